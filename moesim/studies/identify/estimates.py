"""From a fit to what an identification gives: constants with intervals, rows with predictions, and the profile's contents."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from moesim.hardware import override
from moesim.studies.identify.constants import Z90, Constant, Machine, Vector
from moesim.studies.identify.fit import Fit, Problem
from moesim.studies.identify.predictor import Predictor
from moesim.studies.identify.results import NARROWS, Estimate, Prediction


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
