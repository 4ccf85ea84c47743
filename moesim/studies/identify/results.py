"""What an identification gives: constants with intervals, rows with predictions, and the machine's profile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from moesim.hardware import HardwareProfile
from moesim.studies.identify.cases import Case
from moesim.studies.identify.constants import Constant
from moesim.studies.identify.fit import Fit
from moesim.studies.identify.observations import Observation
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
    base : str
        The profile that it began with.
    observations : tuple of Observation
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
    base: str
    observations: tuple[Observation, ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def intervals(self) -> dict[str, tuple[float, float]]:
        """Interval of each constant by name."""
        return {one.constant.name: (one.low, one.high) for one in self.constants}
