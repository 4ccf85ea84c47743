"""Constants that observations may identify, how labels hold them, and the most likely ones."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from moesim.errors import ConfigError, unknown_name
from moesim.hardware import HardwareProfile, build_profile, override
from moesim.hardware.types import Number

Vector = NDArray[np.float64]

PRIOR: Final[Mapping[str, float]] = {
    "measured": 0.05, "published": 0.10, "derived": 0.30, "identified": 0.30, "spec-sheet": math.log(2),
    "assumed": math.log(2),
}  # fmt: skip
"""One standard deviation of a constant's logarithm, by the label of its number; an interval next to the number goes before it."""

CEILING: Final = PRIOR["measured"]
"""How far above a data sheet's rate a rate may lie: the sheet says what no program exceeds."""

Z90: Final = 1.6448536269514722
"""Standard deviations on either side within which nine of ten lie."""

LOOSE: Final = math.log(3)
"""Of a constant that the profile does not have: known to a factor of three, one standard deviation."""

_ABSENT: Final[Mapping[str, tuple[float, str]]] = {
    "expert_cost.few_row_flops": (90e9, "within the 40 to 300 GFLOP/s of published engines"),
    "expert_cost.per_row_us": (3.0, "a call and its synchronisation"),
    "expert_cost.per_expert_us": (3.0, "a call and its synchronisation"),
}
"""Where a prior begins for what the profile of a processor leaves out."""


def check_free(names: Sequence[str]) -> None:
    """Refuse names of no constant, by `ConfigError`."""
    for name in names:
        if name not in _PLACES:
            raise ConfigError(f"--free {name}: {unknown_name('constant', name, _PLACES)}")


@dataclass(frozen=True)
class Constant:
    """A free constant: a factor on numbers of the profile."""

    name: str  # in options and results
    keys: tuple[str, ...]  # dotted keys of the numbers that it scales
    base: float  # the first of them, as the profile has it
    unit: str  # of that number
    sigmas: tuple[float, float]  # of the logarithm of the factor, below and above the base, before any observation
    label: str  # of the number that the prior rests on

    def at(self, deviations: float) -> float:
        """Return the number that many standard deviations above its base (below, if negative)."""
        return self.base * math.exp(deviations * self.sigmas[deviations > 0])

    @property
    def width(self) -> float:
        """Width of the prior's interval of 90 %, in logarithms."""
        return Z90 * sum(self.sigmas)


@dataclass(frozen=True)
class Priors:
    """Deviations of constants' logarithms, below and above their bases: each (constants,)."""

    below: Vector
    above: Vector

    @classmethod
    def of(cls, constants: Sequence[Constant]) -> Priors:
        return cls(np.array([one.sigmas[0] for one in constants]), np.array([one.sigmas[1] for one in constants]))

    def at(self, logs: Vector) -> Vector:
        """Return of each constant the deviation on the side where its logarithm lies."""
        return np.where(logs < 0, self.below, self.above)


ROOM: Final = 2**46
"""Memory of each device in a prediction."""

_CPU, _GPU = "devices.{cpu}.", "devices.{gpu}."
_POINTS: Final = f"{_CPU}expert_cost.read_rates.*.bytes_per_s"  # one factor on all: the curve keeps its shape
_PLACES: Final[Mapping[str, tuple[str, ...]]] = {
    "cpu_read_rate": (f"{_CPU}memory_bytes_per_s", f"{_CPU}expert_cost.read_bytes_per_s", _POINTS),
    "cpu_per_expert": (f"{_CPU}expert_cost.per_expert_us",),
    "cpu_per_row": (f"{_CPU}expert_cost.per_row_us",),
    "cpu_few_row_rate": (f"{_CPU}expert_cost.few_row_flops",),
    "cpu_many_row_rate": (f"{_CPU}expert_cost.many_row_flops",),
    "cpu_rate": (f"{_CPU}flops",),
    "cpu_layer": (f"{_CPU}launch_us", f"{_CPU}operation_us"),
    "cpu_experts_of_layer": (f"{_CPU}first_extra_us", f"{_CPU}wake_us"),
    "gpu_layer": (f"{_GPU}launch_us", f"{_GPU}operation_us", f"{_GPU}router_us"),
    "gpu_experts_of_layer": (f"{_GPU}first_extra_us",),
    "gpu_step": (f"{_GPU}token_us",),
    "cpu_step": (f"{_CPU}token_us",),
    "gpu_latent_attention": (f"{_GPU}latent_attention_us",),
    "gpu_read_rate": (f"{_GPU}memory_bytes_per_s",),
    "gpu_rate": (f"{_GPU}flops",),
    "link_rate": ("links.{down}.*.bytes_per_s", "links.{up}.*.bytes_per_s"),
    "link_latency": ("links.{down}.*.latency_us", "links.{up}.*.latency_us"),
    "switch": ("links.{down}.activation.latency_us", "links.{up}.activation.latency_us"),
    "host_per_expert": ("host_expert_us",),
}
_UNITS: Final = {"flops": "FLOP/s", "bytes_per_s": "B/s", "us": "us", "_w": "W"}
_KINDS: Final = ("pinned", "pageable", "chunked", "any")


class Machine:
    """A base profile whose free constants can be moved."""

    def __init__(
        self, raw: Mapping[str, Any], place: str, free: Sequence[str] = (), more: Mapping[str, Sequence[str]] | None = None
    ) -> None:
        plain = build_profile(raw, place)
        self.gpu, self.cpu = two_devices(plain)
        self.place = place
        self.raw = _completed(raw, plain, self.cpu, place)
        self.base = build_profile(self.raw, place)
        for name in free:
            if name not in _PLACES:
                raise ConfigError(f"{place}: {unknown_name('constant', name, _PLACES)}")
        places = {name: keys for name, keys in _PLACES.items() if not free or name in free}
        if self.gpu == self.cpu:  # without a GPU, its constants would be the processor's under another name
            places = {name: keys for name, keys in places.items() if not name.startswith("gpu_") or name in free}
        if more:
            places = {name: _PLACES[name] for name in free}
            places |= {n: tuple(k for key in keys for k in fnmatch.filter(self.base.numbers, key)) for n, keys in more.items()}
        found = {name: self._constant(name, keys) for name, keys in places.items()}
        lacking = [name for name, constant in found.items() if constant is None and name in (*free, *(more or ()))]
        if lacking:
            raise ConfigError(f"{place}: expected a number for {lacking[0]}, got none; add it to the profile, or do not free it")
        self.constants = tuple(constant for constant in found.values() if constant is not None)
        self._memo: dict[tuple[float, ...], HardwareProfile] = {}

    def _constant(self, name: str, places: Sequence[str]) -> Constant | None:
        keys = _keys(self.base, places)
        if not keys:
            return None
        number, unit = self.base.numbers[keys[0]], _unit(keys[0])
        label = number.source
        short = keys[0].partition(f"{self.cpu}.")[2]
        if short in _ABSENT and number.source == "assumed" and str(number.ref).startswith(_ADDED):
            return Constant(name, tuple(keys), float(number.value), unit, (LOOSE, LOOSE), "not in the profile")
        return Constant(name, tuple(keys), float(number.value), unit, _sigmas(number, unit), label)

    @property
    def sigmas(self) -> list[tuple[float, float]]:
        """Deviations of each constant's prior, below and above its base."""
        return [one.sigmas for one in self.constants]

    @cached_property
    def with_room(self) -> HardwareProfile:
        return build_profile(roomy(self.raw, self.base, self.place), self.place)

    def with_factors(self, logs: Sequence[float]) -> HardwareProfile:
        """Return the machine with each constant multiplied by the exponential of its entry."""
        key = tuple(logs)
        if key not in self._memo:
            if len(self._memo) > 64:
                self._memo.clear()
            self._memo[key] = build_profile(self.changed(logs), self.place)
        return self._memo[key]

    def changed(self, logs: Sequence[float], more: Mapping[str, Any] | None = None) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for constant, log in zip(self.constants, logs, strict=True):
            for where in constant.keys:
                values[where] = float(self.base.numbers[where].value) * math.exp(log)
        return override(self.raw, {**values, **(more or {})}, self.place)


def two_devices(hardware: HardwareProfile) -> tuple[str, str]:
    """Return the GPU and the processor, or what is in their place."""
    gpu = next((name for name, one in hardware.devices.items() if one.role == "accelerator"), hardware.compute)
    return gpu, next((name for name in hardware.backing if hardware.devices[name].role == "host"), hardware.backing[0])


def _keys(hardware: HardwareProfile, places: Sequence[str]) -> list[str]:
    """List the keys of the numbers in these places."""
    gpu, cpu = two_devices(hardware)
    patterns = [place.format(cpu=cpu, gpu=gpu, down=f"{cpu}->{gpu}", up=f"{gpu}->{cpu}") for place in places]
    numbers = hardware.numbers
    wanted = [
        key
        for p in patterns
        for key in ([p.replace("*", kind) for kind in _KINDS] if p.startswith("links.") else fnmatch.filter(numbers, p))
    ]
    return [key for key in wanted if key in numbers and _scales(numbers[key].value)]


def _unit(key: str) -> str:
    return next(unit for ending, unit in _UNITS.items() if key.endswith(ending))


def doubt(hardware: HardwareProfile, name: str, *, slower: bool) -> float:
    """Return one standard deviation of a constant before observations, towards a slower or faster machine; 0 without it."""
    keys = _keys(hardware, _PLACES[name])
    if not keys:
        return 0.0
    unit = _unit(keys[0])  # a lower rate is slower, and a longer time
    return _sigmas(hardware.numbers[keys[0]], unit)[slower is not unit.endswith("/s")]


def _sigmas(number: Number, unit: str) -> tuple[float, float]:
    """Hold a number by its own interval, each end for its side, else by its label."""
    interval = number.interval
    if interval is not None and interval[0] > 0 and interval[1] > interval[0]:
        value = float(number.value)
        below, above = math.log(value / interval[0]) / Z90, math.log(interval[1] / value) / Z90
        return max(below, PRIOR["measured"]), max(above, PRIOR["measured"])
    sigma = PRIOR[number.source]
    return sigma, CEILING if number.source == "spec-sheet" and unit.endswith("/s") else sigma


def _scales(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def roomy(raw: Mapping[str, Any], hardware: HardwareProfile, place: str) -> dict[str, Any]:
    """Return the contents of a profile whose devices hold anything."""
    sure = {"value": ROOM, "source": "assumed", "why": "whether it fits is asked elsewhere"}
    return override(dict(raw), {f"devices.{name}.memory_bytes": sure for name in hardware.devices}, place)


_ADDED: Final = "where the prior of an identification begins"


def _completed(raw: Mapping[str, Any], plain: HardwareProfile, cpu: str, place: str) -> dict[str, Any]:
    """Add what a processor's linear cost lacks, so that it can be free."""
    values = {}
    if plain.devices[cpu].role == "host":
        for key, (value, why) in _ABSENT.items():
            full = f"devices.{cpu}.{key}"
            if key == "expert_cost.per_expert_us" and plain.devices[cpu].operations:
                continue  # what a call takes is in the counted operations of a layer's experts
            if full not in plain.numbers or not _scales(plain.numbers[full].value):
                values[full] = {"value": value, "source": "assumed", "why": f"{_ADDED}: {why}"}
        if f"devices.{cpu}.launches.expert" in plain.numbers:
            values[f"devices.{cpu}.launches.expert"] = {"value": 0, "source": "assumed", "why": f"{_ADDED}: in per_expert_us"}
    return override(dict(raw), values, place)


_FAR: Final = 8.0
"""Bounds of the search, in standard deviations of the prior."""


@dataclass(frozen=True)
class Fit:
    """The optimum."""

    logs: Vector  # logarithm of each constant's factor
    squares: float  # sum of squares there, priors included
    covariance: Vector  # of the logarithms, around the optimum
    slopes: Vector  # of the rows' values, (rows, constants)
    inflation: float  # by how much this machine's errors are larger than those of most; at least 1


def softened(off: Vector) -> Vector:
    """Shrink residuals to the roots of SciPy's ``soft_l1``."""
    found: Vector = off * np.sqrt(2 / (1 + np.sqrt(1 + off**2)))
    return found


class Linearised(Protocol):
    """Logarithms of rows, and derivatives, as functions of those of constants' factors."""

    @property
    def priors(self) -> Priors: ...
    @property
    def observed(self) -> Vector: ...
    def values(self, logs: Vector) -> Vector: ...
    def slopes(self, logs: Vector, *, both: bool = False) -> Vector: ...


class Problem:
    """Some rows of a predictor with the covariance of all, and the priors; Student's t if `freedom` is finite."""

    def __init__(
        self, predictor: Linearised, rows: list[int], covariance: Vector, *, soft: bool = False, freedom: float = math.inf
    ) -> None:
        self.predictor = predictor
        self.rows = rows
        self.whiten = np.linalg.inv(np.linalg.cholesky(covariance[np.ix_(rows, rows)]))
        self.priors = predictor.priors
        self.freedom = freedom
        self.soft = soft

    def residuals(self, logs: Vector) -> Vector:
        off = self._off(logs)
        return np.concatenate([softened(off) if self.soft else off, logs / self.priors.at(logs)])

    def _off(self, logs: Vector) -> Vector:
        found: Vector = self.whiten @ (self.predictor.values(logs) - self.predictor.observed)[self.rows]
        return found

    def slopes(self, logs: Vector) -> Vector:
        rows = self.whiten @ self.predictor.slopes(logs)[self.rows]
        if self.soft:
            root = np.sqrt(1 + self._off(logs) ** 2)
            rows = rows * (np.sqrt((1 + root) / 2) / root)[:, None]  # the derivative of `softened`
        return np.vstack([rows, np.diag(1 / self.priors.at(logs))])

    def fit(self, start: Vector | None = None) -> Fit:
        logs = self._search(np.zeros(len(self.priors.below)) if start is None else start)
        off = self.residuals(logs)
        squares = float(off @ off)
        # The scale of a Student's t, given rows at this distance; rows that happen to be near narrow nothing.
        scale = 1.0 if math.isinf(self.freedom) else (self.freedom + squares) / (self.freedom + len(self.rows))
        inflation = float(np.round(np.sqrt(max(1.0, scale)), 9))
        full = self.predictor.slopes(logs, both=True)
        rows = self.whiten @ full[self.rows]
        information = rows.T @ rows + np.diag(self.priors.at(logs) ** -2.0)
        covariance = np.round(inflation**2 * np.linalg.inv(information), 12)  # as in `_search`
        return Fit(logs, squares, np.asarray(covariance, float), full, inflation)

    def _search(self, start: Vector) -> Vector:
        if not len(start):
            return start
        from scipy.optimize import least_squares  # takes most of a second to import, and an advice needs none

        low, high = -_FAR * self.priors.below, _FAR * self.priors.above
        found = least_squares(
            self.residuals, np.clip(start, 0.99 * low, 0.99 * high), jac=self.slopes, bounds=(low, high),
            x_scale=(self.priors.below + self.priors.above) / 2, xtol=1e-4, ftol=1e-5, gtol=1e-4, max_nfev=60,
        )  # fmt: skip
        # Libraries add in an order that suits the processor. Digits that differ are far below the tolerance: they are cut.
        return np.round(np.asarray(found.x, float), 9)

    def interval(self, fit: Fit, k: int) -> tuple[float, float]:
        """Find where the least sum of squares rises by 1.645 squared: 90 % by likelihood."""
        low = self._side(fit, k, -1.0)
        high = self._side(fit, k, 1.0)
        return low, high

    def _side(self, fit: Fit, k: int, sign: float) -> float:
        """Follow the valley outwards, other constants by chords with the optimum's slopes."""
        # Where rows say nothing of a constant the first step rises by just this much, give or take the last digit.
        rise, step = (Z90 * fit.inflation) ** 2 * (1 + 1e-6), Z90 * float(np.sqrt(fit.covariance[k, k]))
        others = [j for j in range(len(fit.logs)) if j != k]
        rows = self.whiten @ fit.slopes[self.rows]
        along = fit.covariance[:, k] / fit.covariance[k, k]

        def least(distance: float) -> float:
            logs = fit.logs + sign * distance * along
            best = np.inf
            for _ in range(4):
                off = self.residuals(logs)
                now = float(off @ off)
                if now > best - 1e-3:
                    return min(now, best)
                best = now
                logs = logs.copy()
                slopes = np.vstack([rows, np.diag(1 / self.priors.at(logs))])
                logs[others] -= np.linalg.lstsq(slopes[:, others], off)[0]
            return best

        near, far = 0.0, step
        base = fit.squares
        for _ in range(6):
            if least(far) - base >= rise:
                break
            near, far = far, 1.6 * far
        for _ in range(5):
            middle = 0.5 * (near + far)
            near, far = (near, middle) if least(middle) - base >= rise else (middle, far)
            if far - near < 0.03 * far:
                break
        return float(fit.logs[k] + sign * 0.5 * (near + far))
