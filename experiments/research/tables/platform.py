"""Identify the constants of a paper's platform from its printed rows, and answer each block of rows by what all others say.

The rows are ratios and times of whole runs, so that there is no formula for them. The engine is asked at the base profile, and
with each constant dearer. A row then responds like a sum of times of which a share grows with the constant. Where a fit ends, the
engine is asked again, and the response moved there. The engine decides: a step after which it meets the rows worse is halved, and
not taken in the end. Least squares with priors by the numbers' labels give the constants, by the core of `moesim calibrate`
(`moesim.studies.identify.fit`). Runs are shortened: they say how a row changes against the derived profile, whose runs are whole.
A row that the constants miss although it had a part in them tells nothing more: it is inconsistent with the rest of its paper.
What comes out is a reading of a paper, labelled ``identified``. The answers of derived profiles, to which nothing was fitted,
stay next to it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from moesim.core.gate import YAML, read_text
from moesim.core.yaml_reader import read_yaml_value
from moesim.errors import ConfigError
from moesim.studies.identify.fit import Constant, Priors, Problem, Vector, softened
from moesim.studies.papers.compare import Compared
from moesim.studies.papers.published import Published

NAME = "_identify.yaml"


class Plan(BaseModel):
    """A plan of what is identified of a paper's platform; see ``experiments/papers/_identify.yaml``."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    paper: str = ""
    hardware: str
    start: dict[str, Any] = Field(default_factory=dict)
    free: list[str] = Field(default_factory=list)
    more: dict[str, list[str]] = Field(default_factory=dict)
    bits: dict[str, list[float]] = Field(default_factory=dict)
    decode_tokens: int | None = Field(default=None, ge=1)
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
        """Return whether a row may constrain constants: only in a named reading, if there are several."""
        return not row.reading or row.reading in self.readings

    def telling(self, out: str) -> list[str]:
        """List the blocks whose constants answer a block; for ``""`` the one that answers alone, or all."""
        return [self.told_by] if self.told_by else [block for block in self.blocks if block != out]


def read_plans(folder: Path) -> dict[str, Plan]:
    """Read what is identified of which paper; `Plan.paper` is always given. Raises `ConfigError`."""
    path = folder / NAME
    raw = read_yaml_value(read_text(path, YAML, "what is identified of papers"), str(path))
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


# ----- how printed rows respond to constants: a formula around the base, moved to what the engine says elsewhere

_STEP: Final = 0.7
"""The engine is asked this far from the base, of a constant's logarithm, or two standard deviations if that is less."""

_LEAST: Final = 0.05  # of a row's time that is left, however cheap a constant becomes


@dataclass(frozen=True)
class Point:
    """A machine: logarithms of the constants' factors, and bits by model where they are free."""

    logs: tuple[float, ...]
    bits: tuple[tuple[str, float], ...] = ()


def point_at(logs: Vector, bits: tuple[tuple[str, float], ...]) -> Point:
    """Round a machine: last digits depend on how arrays lie in memory, and runs are found again by their constants."""
    return Point(tuple(round(float(log), 5) for log in logs), bits)


@dataclass(frozen=True)
class Response:
    """Logarithms of all rows as functions of those of the constants' factors.

    With one constant dearer by a factor f, a time with a share s of it becomes 1 + s (f - 1) times as long. A row that falls is
    taken as the inverse of one that rises.
    """

    observed: Vector
    priors: Priors
    dearer: Vector  # 1 for costs, -1 for rates
    signs: Vector  # rows x constants
    shares: Vector
    base: Vector
    secants: Vector  # added to the slopes

    @classmethod
    def around_base(
        cls, observed: Vector, constants: Sequence[Constant], ask: Callable[[Sequence[Point]], list[Vector]],
        bits: tuple[tuple[str, float], ...],
    ) -> Response:  # fmt: skip
        priors = Priors.of(constants)
        dearer = np.array([-1.0 if constant.unit.endswith("/s") else 1.0 for constant in constants])
        step = np.minimum(2 * priors.at(dearer), _STEP)
        middle, *others = ask([point_at(move, bits) for move in (0 * step, *np.diag(dearer * step))])
        change = np.array(others).T - middle[:, None]
        shares = np.expm1(np.abs(change)) / np.expm1(step)
        return cls(observed, priors, dearer, np.sign(change), shares, middle, 0 * shares)

    def _left(self, logs: Vector) -> Vector:
        found: Vector = np.maximum(1 + self.shares * np.expm1(self.dearer * logs), _LEAST)
        return found

    def values(self, logs: Vector) -> Vector:
        """Return the logarithm of each row."""
        found: Vector = self.base + (self.signs * np.log(self._left(logs))).sum(axis=1) + self.secants @ logs
        return found

    def slopes(self, logs: Vector, *, both: bool = False) -> Vector:
        """Return the derivatives, (rows, constants)."""
        found: Vector = self.signs * self.dearer * self.shares * np.exp(self.dearer * logs) / self._left(logs) + self.secants
        return found

    def through(self, logs: Vector, values: Vector, since: Vector | None = None) -> Response:
        """Move it to the engine's values at a point, and through the point before, if given (Broyden's update)."""
        off, secants = values - self.values(logs), self.secants
        if since is not None:
            move = (logs - since) / self.priors.at(logs) ** 2
            secants = secants + np.outer(off, move) / (move @ (logs - since))
            off = off - (secants - self.secants) @ logs
        return replace(self, base=self.base + off, secants=secants)


# ----- the search

MISSED: Final = 1.35
"""A row beyond this factor even of constants that it had a part in is inconsistent with the rest of its paper."""

_CLEARLY: Final = 2.0
"""Bits whose fit is worse by this factor are not looked at closer."""

_TRIES: Final = 3
"""How often a step is tried, half as long each time, before it is given up."""


@dataclass(frozen=True)
class Answer:
    """A printed row next to three simulated numbers, as printed: a gain in per cent."""

    published: Published
    block: str
    derived: float | None  # by the derived profile
    left_out: float | None  # by constants from all other blocks, or from the one that answers alone
    everything: float | None  # by constants from all blocks, this one included; None if one answers alone

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
    """Constants and answers of a paper."""

    constants: dict[str, dict[str, float]]  # by name, for each block that was left out, and for "": none was
    bits: dict[str, dict[str, float]]  # likewise the precision of models whose precision is not printed
    base: dict[str, float]  # of each constant
    # prior, sigma: standard deviation of its logarithm before any block, below and above the base; after all blocks
    prior: dict[str, tuple[float, float]]
    sigma: dict[str, float]
    answers: list[Answer]


Evaluate = Callable[[Sequence[Point | None], Sequence[int]], Sequence[Sequence[Compared]]]
"""Gives the rows of these numbers compared on each machine by shortened runs; None: the profile as it is."""


def identify_paper(
    plan: Plan, constants: Sequence[Constant], rows: Sequence[Published], whole: Sequence[Compared], evaluate: Evaluate,
    moves: int = 2,
) -> Identified:  # fmt: skip
    """Identify a platform with each block left out in turn; a search goes on `moves` times from where it asked last."""
    blocks = [plan.block_of(row) for row in rows]
    every = [index for index, block in enumerate(blocks) if block is not None]
    derived = _logs(rows, range(len(rows)), whole)
    short = _logs(rows, every, evaluate([None], every)[0])

    def ask(points: Sequence[Point]) -> list[Vector]:
        return [_logs(rows, every, one) + derived - short for one in evaluate(points, every)]

    used = [index for index in every if plan.counts(rows[index]) and math.isfinite(short[index] + derived[index])]
    kept = {out: [i for i in used if blocks[i] in plan.telling(out)] for out in ("", *plan.blocks)}
    observed = np.array([_log(row, row.published) for row in rows])
    choices = [tuple(zip(plan.bits, chosen, strict=True)) for chosen in itertools.product(*plan.bits.values())]
    response = Response.around_base(observed, constants, ask, choices[0])
    nowhere = np.zeros(len(constants))
    ends: dict[str, _Known] = {}
    for bits in choices:
        base = response.base if bits == choices[0] else ask([point_at(nowhere, bits)])[0]
        start = _Known(point_at(nowhere, bits), base)
        search = _Search(response, start, ask, plan.spread)
        found = search.better(start, kept[""], moves)
        if ends and search.cost(found, kept[""]) > _CLEARLY * search.cost(ends[""], kept[""]):
            continue
        aside = set() if plan.told_by else _contradicting(found.values - observed, kept[""])
        telling = {out: [index for index in which if index not in aside] for out, which in kept.items()}
        known = {tuple(telling[""]): search.better(found, telling[""], moves)}
        for out, which in telling.items():
            if tuple(which) not in known:  # from the base: where all rows led to, a part of them is not asked for
                known[tuple(which)] = search.better(start, which, moves)
            end = known[tuple(which)]
            if out not in ends or search.cost(end, kept[out]) < search.cost(ends[out], kept[out]):
                ends[out] = end
    none = np.full(len(rows), math.nan)
    everything = none if plan.told_by else ends[""].values
    left_out = np.array([ends[block].values[i] if block is not None else math.nan for i, block in enumerate(blocks)])
    logs = np.array(ends[""].point.logs)
    slope = response.slopes(logs)[kept[""]] / plan.spread
    sigma = np.sqrt(np.diag(np.linalg.inv(slope.T @ slope + np.diag(response.priors.at(logs) ** -2.0))))
    return Identified(
        constants={
            out: {c.name: c.base * math.exp(log) for c, log in zip(constants, end.point.logs, strict=True)}
            for out, end in ends.items()
        },
        bits={out: dict(end.point.bits) for out, end in ends.items()},
        base={constant.name: constant.base for constant in constants},
        prior={constant.name: constant.sigmas for constant in constants},
        sigma={constant.name: float(one) for constant, one in zip(constants, sigma, strict=True)},
        answers=[
            Answer(rows[index], str(blocks[index]), *(_value(rows[index], one[index]) for one in (derived, left_out, everything)))
            for index in every
        ],
    )


@dataclass(frozen=True)
class _Known:
    """A machine, and the logarithm of each row by the engine."""

    point: Point
    values: Vector


class _Search:
    """Looks for constants with a response, and believes the engine.

    The response always goes through what the engine said last, whichever rows were looked at: the engine's answers to one block's
    constants say how rows respond, and nothing about what was printed for them.
    """

    def __init__(self, response: Response, start: _Known, ask: Callable[[Sequence[Point]], list[Vector]], spread: float) -> None:
        self.last = np.array(start.point.logs)
        self.response = response.through(self.last, start.values)
        self.ask = ask
        self.spread = spread

    def cost(self, known: _Known, rows: Sequence[int]) -> float:
        """Sum the squares of these rows by the engine, with their robust loss, and those of the priors."""
        off = softened((known.values - self.response.observed)[list(rows)] / self.spread)
        logs = np.array(known.point.logs)
        prior = logs / self.response.priors.at(logs)
        return float(off @ off + prior @ prior)

    def better(self, best: _Known, rows: list[int], moves: int) -> _Known:
        """Follow the response to where it meets these rows best, as long as the engine agrees that they are met better."""
        sigma = np.full(len(best.values), self.spread)
        for _ in range(moves):
            start = np.array(best.point.logs)
            logs = Problem(self.response, rows, np.diag(sigma**2), soft=True).fit(start).logs
            for _ in range(_TRIES):
                point = point_at(logs, best.point.bits)
                if point == best.point:
                    return best
                tried = self._ask(point)
                if self.cost(tried, rows) < self.cost(best, rows):
                    break
                logs = (logs + start) / 2
            else:
                return best
            best = tried
        return best

    def _ask(self, point: Point) -> _Known:
        logs = np.array(point.logs)
        known = _Known(point, self.ask([point])[0])
        if np.any(logs != self.last):
            self.response = self.response.through(logs, known.values, self.last)
            self.last = logs
        return known


def _contradicting(off: Vector, used: Sequence[int]) -> set[int]:
    """Find the rows that no constants bring within `MISSED` next to the others: the worst, at most one in five."""
    worst = sorted(used, key=lambda index: -abs(off[index]))[: len(used) // 5]
    return {index for index in worst if abs(off[index]) > math.log(MISSED)}


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
