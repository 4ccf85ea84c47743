"""Constants of a paper's platform from its own printed rows, and each block of rows answered by what all other blocks say.

The rows are ratios and times of whole runs, so that there is no formula for them. The engine is asked at and around a point; each
printed quantity becomes a quadratic in the logarithms of the constants (no cross terms); least squares with priors give the
constants. A second round starts at the first one's end. What comes out is a reading of a paper, labelled ``identified``. The
answers of derived profiles, to which nothing was fitted, stay beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from scipy.optimize import least_squares

from moesim.errors import ConfigError
from moesim.studies.papers import Compared
from moesim.studies.published import Published
from moesim.yaml_reader import read_yaml_value

NAME = "_identify.yaml"
Vector = NDArray[np.float64]


class Constant(BaseModel):
    """A free constant: its prior value, the factor of one standard deviation, and that by which the engine is asked around it."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    value: float = Field(gt=0)
    factor: float = Field(gt=1)
    step: float = Field(gt=1)


class Plan(BaseModel):
    """What is identified of a paper's platform; see ``experiments/papers/_identify.yaml``."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    hardware: str
    decode_tokens: int = Field(ge=1)
    spread: float = Field(gt=0)
    constants: dict[str, Constant] = Field(min_length=1)
    blocks: list[str] = Field(min_length=2)
    whole: list[str] = Field(default_factory=list)

    def block_of(self, row: Published) -> str | None:
        """Find the block of a row: a figure, or a figure and a setting that the row names; None if it takes no part."""
        for block in self.blocks:
            figure, _, setting = block.partition(":")
            if row.figure == figure and setting in ("", *row.where.split(";")):
                return block
        return None


def read_plans(folder: Path) -> dict[str, Plan]:
    """Read what is identified of which paper.

    Parameters
    ----------
    folder : Path
        Of the papers' experiments.

    Returns
    -------
    dict of str to Plan

    Raises
    ------
    ConfigError
        If the file is not as it must be.
    """
    path = folder / NAME
    raw = read_yaml_value(path.read_text(encoding="utf-8"), str(path))
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected papers with what is identified of them, got {type(raw).__name__}")
    found = {}
    for paper, plan in raw.items():
        try:
            found[paper] = Plan.model_validate(plan)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, (paper, *first["loc"])))
            raise ConfigError(f"{path}: {where}: {first['msg'].lower()}, got {first['input']!r}; correct it") from None
    return found


@dataclass(frozen=True)
class Answer:
    """A printed row beside three numbers of the same shortened runs.

    Attributes
    ----------
    published : Published
    block : str
    derived, left_out, everything : float or None
        By the derived profile; by constants from all other blocks; by constants from all blocks, this one included. As printed: a
        gain in per cent.
    """

    published: Published
    block: str
    derived: float | None
    left_out: float | None
    everything: float | None

    def ratio(self, value: float | None) -> float | None:
        """Simulated over printed, of gains that of the factors."""
        if value is None:
            return None
        return math.exp(_log(self.published, value) - _log(self.published, self.published.published))


@dataclass(frozen=True)
class Identified:
    """What was found for a paper.

    Attributes
    ----------
    constants : dict of str to dict
        By block that was left out, and for ``""`` (none was), the constants by dotted key.
    sigma : dict of str to float
        One standard deviation of each constant's logarithm with all blocks, from the curvature at the optimum.
    answers : list of Answer
    """

    constants: dict[str, dict[str, float]]
    sigma: dict[str, float]
    answers: list[Answer]


Point = Mapping[str, float] | None
Evaluate = Callable[[Sequence[Point]], Sequence[Sequence[Compared]]]
"""Gives all rows compared on machines with these constants; None: on the profile as it is."""


def identify_paper(plan: Plan, rows: Sequence[Published], evaluate: Evaluate, *, rounds: int = 2) -> Identified:
    """Identify a platform with each block left out in turn.

    Parameters
    ----------
    plan : Plan
        Constants, priors, blocks.
    rows : sequence of Published
        All rows of the paper; those of no block take no part.
    evaluate : callable
        Runs the experiments.
    rounds : int
        How often the engine is asked around a point; each round starts where the one before ended.

    Returns
    -------
    Identified
    """
    known = [row for row in rows if plan.block_of(row) is not None]
    blocks = [str(plan.block_of(row)) for row in known]
    printed = np.array([_log(row, row.published) for row in known])
    keys = list(plan.constants)
    prior = np.array([math.log(plan.constants[key].value) for key in keys])
    width = np.array([math.log(plan.constants[key].factor) for key in keys])
    step = np.array([math.log(plan.constants[key].step) for key in keys])
    (derived,) = (_logs(known, one) for one in evaluate([None]))
    used = np.isfinite(derived)

    def at(points: Sequence[Vector]) -> list[Vector]:
        named = [dict(zip(keys, map(float, np.exp(point)), strict=True)) for point in points]
        return [_logs(known, one) for one in evaluate(named)]

    centre, ends = prior, {"": prior}
    for _ in range(rounds):
        surface = _Surface.around(centre, step, at)
        kept = {out: used & (np.array(blocks) != out) for out in ("", *plan.blocks)}
        ends = {out: _fit(surface, printed, kept[out], prior, width, plan.spread) for out in kept}
        centre, step = ends[""], step / 2 + 0.05
    everything, *others = at([ends[out] for out in ("", *plan.blocks)])
    left_out = np.array([others[plan.blocks.index(block)][index] for index, block in enumerate(blocks)])
    answers = [
        Answer(row, block, *(_value(row, found[index]) for found in (derived, left_out, everything)))
        for index, (row, block) in enumerate(zip(known, blocks, strict=True))
    ]
    slope = surface.slopes(ends[""])[used] / plan.spread
    sigma = np.sqrt(np.diag(np.linalg.inv(slope.T @ slope + np.diag(width**-2.0))))
    constants = {out: dict(zip(keys, map(float, np.exp(end)), strict=True)) for out, end in ends.items()}
    return Identified(constants, dict(zip(keys, map(float, sigma), strict=True)), answers)


@dataclass(frozen=True)
class _Surface:
    """Logarithms of all rows as quadratics in those of the constants, from one point and two around it for each constant."""

    centre: Vector
    middle: Vector
    first: Vector  # rows x constants
    second: Vector

    @classmethod
    def around(cls, centre: Vector, step: Vector, at: Callable[[Sequence[Vector]], list[Vector]]) -> _Surface:
        moves = [sign * move for move in np.diag(step) for sign in (1, -1)]
        middle, *around = at([centre, *(centre + move for move in moves)])
        up, down = np.array(around[0::2]).T, np.array(around[1::2]).T
        first, second = (up - down) / (2 * step), (up + down - 2 * middle[:, None]) / step**2
        return cls(centre, middle, first, second)

    def at(self, point: Vector) -> Vector:
        away = point - self.centre
        found: Vector = self.middle + self.first @ away + self.second @ (away**2) / 2
        return found

    def slopes(self, point: Vector) -> Vector:
        found: Vector = self.first + self.second * (point - self.centre)
        return found


def _fit(surface: _Surface, printed: Vector, used: NDArray[np.bool_], prior: Vector, width: Vector, spread: float) -> Vector:
    """Find the constants that the rows used and the priors agree on best; a row far off counts less (soft L1)."""

    def residuals(point: Vector) -> Vector:
        return np.concatenate([(surface.at(point) - printed)[used] / spread, (point - prior) / width])

    reach = 1.0  # of the logarithms: the quadratics say nothing far from where the engine was asked
    bounds = (surface.centre - reach, surface.centre + reach)
    found: Vector = least_squares(residuals, surface.centre, bounds=bounds, loss="soft_l1").x
    return found


def _logs(rows: Sequence[Published], compared: Sequence[Compared]) -> Vector:
    by_row = {id(one.published): one.simulated for one in compared}
    values = [by_row.get(id(row)) for row in rows]
    return np.array([math.nan if value is None else _log(row, value) for row, value in zip(rows, values, strict=True)])


def _log(row: Published, value: float) -> float:
    """Take the logarithm of a positive quantity: of a gain in per cent that of the factor."""
    return math.log((100 + value) / 100 if row.kind == "gain" else value)


def _value(row: Published, log: float) -> float | None:
    if not math.isfinite(log):
        return None
    return 100 * (math.exp(log) - 1) if row.kind == "gain" else math.exp(log)
