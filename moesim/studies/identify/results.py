"""What an identification gives: constants with intervals, rows with predictions, and the machine's profile."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from moesim.hardware import HardwareProfile, override
from moesim.studies.identify.cases import Case
from moesim.studies.identify.constants import Z90, Constant, Machine, Vector
from moesim.studies.identify.fit import Fit, Problem
from moesim.studies.identify.predictor import Predictor

NARROWS: Final = 0.5
"""A constant is identified if its interval is at most this share of its prior's."""

UNEXPLAINED: Final = 3.0
"""Standard deviations beyond which no constants explain a row."""


@dataclass(frozen=True)
class Estimate:
    """What is known of a constant after the observations.

    Attributes
    ----------
    constant : Constant
    value, low, high : float
        Of the first number that it scales, with its interval of 90 %.
    prior_low, prior_high : float
        The same before any observation.
    identified : bool
        The observations narrow the prior's interval at least to half.
    moves : bool
        Some row depends on it.
    beside : str
        The constant that it can be exchanged with most, if rows tell only their sum.
    """

    constant: Constant
    value: float
    low: float
    high: float
    prior_low: float
    prior_high: float
    identified: bool
    moves: bool
    beside: str = ""


@dataclass(frozen=True)
class Prediction:
    """A row beside what the identified machine says of it.

    Attributes
    ----------
    case : Case
    observed, predicted : float
        In the unit of the row.
    low, high : float
        Interval of 90 % for another measurement of it.
    ratio : float
        Predicted over observed speed.
    z : float
        Standard deviations between them.
    status : str
        ``used``, ``check``, ``set aside`` (no constants explain it) or ``beyond memory``.
    left_out : float or None
        Ratio where its block was left out of the identification.
    """

    case: Case
    observed: float
    predicted: float
    low: float
    high: float
    ratio: float
    z: float
    status: str
    left_out: float | None = None


@dataclass(frozen=True)
class Identified:
    """An identified machine.

    Attributes
    ----------
    profile : HardwareProfile
        Its numbers labelled.
    raw : dict
        Contents of the profile's file.
    constants : tuple of Estimate
    predictions : tuple of Prediction
        In the order of the rows.
    bits : mapping
        (model, bits) of rows -> the choice that fits best, where there was one, with how much worse others are.
    fit : Fit
    predictor : Predictor
    engine_difference : float
        Largest difference of closed form and engine at the optimum, as a share.
    inflation : float
        By how much rows scatter more than their spreads say.
    left_out_by : str
        What was left out together: blocks, or single rows.
    """

    profile: HardwareProfile
    raw: dict[str, Any]
    constants: tuple[Estimate, ...]
    predictions: tuple[Prediction, ...]
    bits: Mapping[tuple[str, str], list[tuple[str, float]]]
    fit: Fit
    predictor: Predictor
    engine_difference: float
    inflation: float
    left_out_by: str
    notes: tuple[str, ...] = field(default=())

    @property
    def intervals(self) -> dict[str, tuple[float, float]]:
        """Interval of each constant by name."""
        return {one.constant.name: (one.low, one.high) for one in self.constants}


def estimate(machine: Machine, problem: Problem, fit: Fit, intervals: bool, tell: Callable[[str], None]) -> tuple[Estimate, ...]:
    """Give each constant with its interval: by likelihood, or else that of a parabola."""
    deviations = np.sqrt(np.diag(fit.covariance))
    correlation = fit.covariance / np.outer(deviations, deviations)
    found = []
    for k, constant in enumerate(machine.constants):
        tell(f"interval of {constant.name}")
        low, high = fit.logs[k] - Z90 * deviations[k], fit.logs[k] + Z90 * deviations[k]
        if intervals:
            low, high = problem.interval(fit, k)
        identified = high - low <= NARROWS * constant.width
        others = [j for j in range(len(deviations)) if j != k]
        partner = min(others, key=lambda j: correlation[k, j], default=None) if others else None
        beside = ""
        if partner is not None and not identified:
            strongest = max(others, key=lambda j: abs(correlation[k, j]))
            beside = machine.constants[strongest].name if abs(correlation[k, strongest]) > 0.4 else ""
        base = constant.base
        found.append(
            Estimate(
                constant, base * math.exp(fit.logs[k]), base * math.exp(low), base * math.exp(high),
                constant.at(-Z90), constant.at(Z90), identified, True, beside,
            )
        )  # fmt: skip
    return tuple(found)


def untouched(constant: Constant) -> Estimate:
    """Give a constant on which no row depends."""
    low, high = constant.at(-Z90), constant.at(Z90)
    return Estimate(constant, constant.base, low, high, low, high, False, False)


def profile_contents(
    start: Machine, machine: Machine, estimates: Sequence[Estimate], fit: Fit, raw: Mapping[str, Any], name: str,
    status: Sequence[str], place: str,
) -> dict[str, Any]:  # fmt: skip
    """Write what was found into a profile: identified numbers, and those that rows do not tell, each with its interval."""
    values: dict[str, Any] = {}
    n_rows = status.count("used")
    for one in estimates:
        if not one.moves:
            continue
        for key in one.constant.keys:
            here = float(machine.base.numbers[key].value)
            scale = here / one.constant.base
            value, low, high = (float(f"{scale * number:.6g}") for number in (one.value, one.low, one.high))
            ends = [min(low, value), max(high, value)]
            if one.identified:
                how = f"moesim calibrate: {n_rows} observed speeds on the base {here:g} ({one.constant.label})"
                values[key] = {"value": value, "source": "identified", "how": how, "interval": ends}
            else:
                why = (
                    f"moesim calibrate: {n_rows} observed speeds do not tell it"
                    + (f" from {one.beside}" if one.beside else "")
                    + f", held by the base {here:g} ({one.constant.label})"
                )
                values[key] = {"value": value, "source": "assumed", "why": why, "interval": ends}
    contents = override(dict(start.raw), values, place)
    contents.pop("anchors", None)
    contents["name"] = name
    told = str(contents.get("description", "")).strip()
    contents["description"] = f"Identified from {n_rows} observed speeds by moesim calibrate. Before that: {told}"
    return contents


def predictions(
    predictor: Predictor, fit: Fit, sigma: Vector, status: Sequence[str], left_out: Mapping[int, float]
) -> tuple[Prediction, ...]:
    """Put each row beside what the identified machine says of it."""
    values = predictor.values(fit.logs)
    slopes = predictor.slopes(fit.logs)
    found = []
    for index, case in enumerate(predictor.cases):
        one = case.observation
        wide = Z90 * math.sqrt(float(slopes[index] @ fit.covariance @ slopes[index]) + sigma[index] ** 2)
        ends = sorted(one.in_unit(values[index] + sign * wide) for sign in (-1, 1))
        off = values[index] - predictor.observed[index]
        found.append(
            Prediction(
                case, one.value, one.in_unit(values[index]), ends[0], ends[1], math.exp(-off), float(off / sigma[index]),
                status[index], left_out.get(index),
            )
        )  # fmt: skip
    return tuple(found)
