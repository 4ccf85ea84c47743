"""Constants of a paper's platform from its own printed rows, and each block of rows answered by what all other blocks say.

The rows are ratios and times of whole runs, so that there is no formula for them. The engine is asked at the base profile, and
with each constant dearer. A row then responds like a sum of times of which a share grows with the constant. Where a fit ends, the
engine is asked again, and the response moved there. Least squares with priors by the numbers' labels give the constants, by the
core of `moesim calibrate` (`moesim.identify.fit`). Runs are shortened: what they say is how a row changes against the derived
profile, whose runs are whole. A row that the constants miss although it had a part in them tells nothing more: it is inconsistent
with the rest of its paper. What comes out is a reading of a paper, labelled ``identified``. The answers of derived profiles,
to which nothing was fitted, stay beside it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from moesim.errors import ConfigError
from moesim.identify.constants import Constant
from moesim.identify.fit import Problem
from moesim.studies.papers import Compared
from moesim.studies.published import Published
from moesim.yaml_reader import read_yaml_value

NAME = "_identify.yaml"
MISSED: Final = 1.35
"""A row beyond this factor even of constants that it had a part in is inconsistent with the rest of its paper."""

_STEP: Final = 0.7
"""The engine is asked this far from the base, of a constant's logarithm, or two standard deviations if that is less."""

_CLEARLY: Final = 2.0
"""Bits whose fit is worse by this factor are not looked at closer."""

_LEAST: Final = 0.05  # of a row's time that is left, however cheap a constant becomes

Vector = NDArray[np.float64]


class Plan(BaseModel):
    """What is identified of a paper's platform; see ``experiments/papers/_identify.yaml``."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    paper: str = ""
    hardware: str
    start: dict[str, Any] = Field(default_factory=dict)
    free: list[str] = Field(default_factory=list)
    more: dict[str, list[str]] = Field(default_factory=dict)
    bits: dict[str, list[float]] = Field(default_factory=dict)
    decode_tokens: int | None = Field(default=None, ge=1)
    prompt_tokens: int | None = Field(default=None, ge=1)
    lengths: dict[str, int] = Field(default_factory=dict)
    spread: float = Field(default=0.1, gt=0)
    readings: list[str] = Field(default_factory=list)
    blocks: list[str] = Field(min_length=2)
    told_by: str | None = None

    def block_of(self, row: Published) -> str | None:
        """Find the block of a row: a figure, or a figure and what its setting, quantity or runs are; None if it takes no part."""
        if row.source != "runs" or row.kind not in ("value", "speedup", "gain"):
            return None
        told = (row.quantity, row.setting, row.system, row.kind, *row.where.split(";"))
        for block in self.blocks:
            figure, _, parts = block.partition(":")
            if row.figure == figure and all(part in told for part in parts.split(";") if part):
                return block
        return None

    def counts(self, row: Published) -> bool:
        """Say whether a row may tell constants: of a number that can be read in several ways, only in a reading that is named."""
        return not row.reading or row.reading in self.readings

    def telling(self, out: str) -> list[str]:
        """List the blocks that tell the constants which answer a block; for ``""`` the block that tells alone, or all."""
        return [self.told_by] if self.told_by else [block for block in self.blocks if block != out]


def read_plans(folder: Path) -> dict[str, Plan]:
    """Read what is identified of which paper.

    Parameters
    ----------
    folder : Path
        Of the papers' experiments.

    Returns
    -------
    dict of str to Plan
        By name; `Plan.paper` is always given.

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
    for name, plan in raw.items():
        try:
            found[name] = Plan.model_validate({"paper": name, **plan})
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, (name, *first["loc"])))
            raise ConfigError(f"{path}: {where}: {first['msg'].lower()}, got {first['input']!r}; correct it") from None
    return found


@dataclass(frozen=True)
class Answer:
    """A printed row beside three simulated numbers.

    Attributes
    ----------
    published : Published
    block : str
    derived, left_out, everything : float or None
        By the derived profile; by constants from all other blocks, or from the one that tells alone; by constants from all
        blocks, this one included (None if one tells alone). As printed: a gain in per cent.
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

    @property
    def consistent(self) -> bool | None:
        """Whether constants meet this row within `MISSED` that it had a part in; None without a run."""
        ratio = self.ratio(self.everything)
        return None if ratio is None else max(ratio, 1 / ratio) <= MISSED


@dataclass(frozen=True)
class Identified:
    """What was found for a paper.

    Attributes
    ----------
    constants : dict of str to dict
        By block that was left out, and for ``""`` (none was), the constants by name.
    bits : dict of str to dict
        Likewise the precision of models whose precision is not printed.
    base, prior, sigma : dict of str to float
        Of each constant its base, and one standard deviation of its logarithm before and after all blocks.
    answers : list of Answer
    """

    constants: dict[str, dict[str, float]]
    bits: dict[str, dict[str, float]]
    base: dict[str, float]
    prior: dict[str, float]
    sigma: dict[str, float]
    answers: list[Answer]


@dataclass(frozen=True)
class Point:
    """A machine: logarithms of the constants' factors, and bits by model where they are free."""

    logs: tuple[float, ...]
    bits: tuple[tuple[str, float], ...] = ()


Evaluate = Callable[[Sequence[Point | None], Sequence[int]], Sequence[Sequence[Compared]]]
"""Gives the rows of these numbers compared on each machine by shortened runs; None: the profile as it is."""


def identify_paper(
    plan: Plan, constants: Sequence[Constant], rows: Sequence[Published], whole: Sequence[Compared], evaluate: Evaluate,
    moves: int = 2,
) -> Identified:  # fmt: skip
    """Identify a platform with each block left out in turn.

    Parameters
    ----------
    plan : Plan
        Blocks, and bits to choose from.
    constants : sequence of Constant
        The free ones, with their priors.
    rows : sequence of Published
        All rows of the paper; those of no block take no part.
    whole : sequence of Compared
        The same rows by whole runs on the profile as it is.
    evaluate : callable
        Runs the experiments, shortened.
    moves : int
        How often the response is moved to what the engine says at the optimum.

    Returns
    -------
    Identified
    """
    blocks = [plan.block_of(row) for row in rows]
    every = [index for index, block in enumerate(blocks) if block is not None]
    derived = _logs(rows, range(len(rows)), whole)
    short = _logs(rows, every, evaluate([None], every)[0])

    def ask(points: Sequence[Point], which: Sequence[int] = every) -> list[Vector]:
        return [_logs(rows, which, one) + derived - short for one in evaluate(points, which)]

    used = [index for index in every if plan.counts(rows[index]) and math.isfinite(short[index] + derived[index])]
    kept = {out: [i for i in used if blocks[i] in plan.telling(out)] for out in ("", *plan.blocks)}
    spread = np.full(len(rows), plan.spread)
    observed = np.array([_log(row, row.published) for row in rows])
    choices = [tuple(zip(plan.bits, chosen, strict=True)) for chosen in itertools.product(*plan.bits.values())]
    needed = sorted(set().union(*kept.values()))
    response = _Response.around_base(observed, constants, lambda points: ask(points, needed), choices[0])
    ends: dict[str, tuple[float, Point]] = {}
    for bits in choices:
        base = 0 * response.priors
        mine = response if bits == choices[0] else response.through(base, ask([_point(base, bits)], needed)[0])
        aside: set[int] = set()
        for turn in range(moves + 1):
            telling = {out: [index for index in which if index not in aside] for out, which in kept.items()}
            fits = {out: Problem(mine, telling[out], spread, "soft_l1").fit(inflate=False) for out in kept}
            worse = _squares(mine, fits[""].logs, kept[""], plan.spread) / ends[""][0] if ends else 0.0
            if turn == moves or worse > _CLEARLY:
                break
            said = ask([_point(fits[""].logs, bits)], needed)[0]
            mine = mine.through(fits[""].logs, said)
            aside = _contradicting(said - observed, kept[""]) if not plan.told_by else aside
        for out, fit in fits.items():
            squares = _squares(mine, fit.logs, kept[out], plan.spread)
            if out not in ends or squares < ends[out][0]:
                ends[out] = squares, _point(fit.logs, bits)
    everything = np.full(len(rows), math.nan) if plan.told_by else ask([ends[""][1]])[0]
    left_out = np.full(len(rows), math.nan)
    for out in plan.blocks:
        which = [index for index in every if blocks[index] == out]
        left_out[which] = ask([ends[out][1]], which)[0][which]
    slope = response.slopes(np.array(ends[""][1].logs))[kept[""]] / plan.spread
    sigma = np.sqrt(np.diag(np.linalg.inv(slope.T @ slope + np.diag(response.priors**-2.0))))
    return Identified(
        constants={
            out: {c.name: c.base * math.exp(log) for c, log in zip(constants, point.logs, strict=True)}
            for out, (_, point) in ends.items()
        },
        bits={out: dict(point.bits) for out, (_, point) in ends.items()},
        base={constant.name: constant.base for constant in constants},
        prior={constant.name: constant.sigma for constant in constants},
        sigma={constant.name: float(one) for constant, one in zip(constants, sigma, strict=True)},
        answers=[
            Answer(rows[index], str(blocks[index]), *(_value(rows[index], one[index]) for one in (derived, left_out, everything)))
            for index in every
        ],
    )


@dataclass(frozen=True)
class _Response:
    """Logarithms of all rows as functions of those of the constants' factors.

    With one constant dearer by a factor f, a time with a share s of it becomes 1 + s (f - 1) times as long. A row that falls is
    taken as the inverse of one that rises.
    """

    observed: Vector
    priors: Vector
    dearer: Vector  # 1 for costs, -1 for rates
    signs: Vector  # rows x constants
    shares: Vector
    base: Vector

    @classmethod
    def around_base(
        cls, observed: Vector, constants: Sequence[Constant], ask: Callable[[Sequence[Point]], list[Vector]],
        bits: tuple[tuple[str, float], ...],
    ) -> _Response:  # fmt: skip
        priors = np.array([constant.sigma for constant in constants])
        dearer = np.array([-1.0 if constant.unit.endswith("/s") else 1.0 for constant in constants])
        step = np.minimum(2 * priors, _STEP)
        middle, *others = ask([_point(move, bits) for move in (0 * step, *np.diag(dearer * step))])
        change = np.array(others).T - middle[:, None]
        shares = np.expm1(np.abs(change)) / np.expm1(step)
        return cls(observed, priors, dearer, np.sign(change), shares, middle)

    def _left(self, logs: Vector) -> Vector:
        found: Vector = np.maximum(1 + self.shares * np.expm1(self.dearer * logs), _LEAST)
        return found

    def values(self, logs: Vector) -> Vector:
        """Give the logarithm of each row."""
        found: Vector = self.base + (self.signs * np.log(self._left(logs))).sum(axis=1)
        return found

    def slopes(self, logs: Vector, *, both: bool = False) -> Vector:
        """Give the derivatives, (rows, constants)."""
        found: Vector = self.signs * self.dearer * self.shares * np.exp(self.dearer * logs) / self._left(logs)
        return found

    def through(self, logs: Vector, values: Vector) -> _Response:
        """Move it to what the engine says at a point."""
        return replace(self, base=self.base + values - self.values(logs))


def _contradicting(off: Vector, used: Sequence[int]) -> set[int]:
    """Find the rows that no constants bring within `MISSED` beside the others: the worst, at most one in five."""
    worst = sorted(used, key=lambda index: -abs(off[index]))[: len(used) // 5]
    return {index for index in worst if abs(off[index]) > math.log(MISSED)}


def _squares(response: _Response, logs: Vector, kept: Sequence[int], spread: float) -> float:
    """Cost of a fit, as its loss has it: what decides between precisions."""
    off = np.concatenate([(response.values(logs) - response.observed)[list(kept)] / spread, logs / response.priors])
    return float(np.sum(2 * (np.sqrt(1 + off**2) - 1)))


def _point(logs: Vector, bits: tuple[tuple[str, float], ...]) -> Point:
    # Rounded: the last digits of a fit depend on how arrays lie in memory, and runs are found again by their constants.
    return Point(tuple(round(float(log), 5) for log in logs), bits)


def _logs(rows: Sequence[Published], which: Sequence[int], compared: Sequence[Compared]) -> Vector:
    values = np.full(len(rows), math.nan)
    for index, one in zip(which, compared, strict=True):
        if one.simulated is not None:
            values[index] = _log(rows[index], one.simulated)
    return values


def _log(row: Published, value: float) -> float:
    """Take the logarithm of a positive quantity: of a gain in per cent that of the factor."""
    return math.log((100 + value) / 100 if row.kind == "gain" else value)


def _value(row: Published, log: float) -> float | None:
    if not math.isfinite(log):
        return None
    return 100 * (math.exp(log) - 1) if row.kind == "gain" else math.exp(log)
