"""Placements of all engines compared: routing, search, intervals, ranking."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from moesim.core.student import Mean, mean
from moesim.errors import ConfigError
from moesim.studies.advice.candidates import Candidate, Space, gib
from moesim.studies.advice.engines import Command, commands
from moesim.studies.advice.question import PLACE, Routing, Setting, find_routing
from moesim.studies.advice.search import Found, Search, gpu_share, speed
from moesim.studies.identify.model_error import LEVEL, shipped
from moesim.studies.whatif.limits import Limits

SAME_LEVEL: Final = 0.95
"""At which two placements are distinguished."""


def interval(speed: Mean, costs: tuple[float, float], routing: float = 1.0) -> tuple[float, float]:
    """Combine independent errors: logarithms' half widths add up as squares, around the middle.

    >>> low, high = interval(Mean(20.0, 1.0, 5), (0.5, 1.0))
    >>> round(low, 6), round(high, 6)
    (10.0, 20.0)
    """
    middle = math.sqrt(costs[0] * costs[1])
    half = math.hypot(math.log(costs[1] / middle), math.log(speed.factor), math.log(routing))
    return speed.value * middle / math.exp(half), speed.value * middle * math.exp(half)


def indistinguishable(best: Sequence[float], other: Sequence[float]) -> bool:
    """Whether two placements differ by no more than their ratio varies between requests."""
    ratio = mean([b / a for a, b in zip(best, other, strict=True)], SAME_LEVEL)
    return ratio.n > 1 and abs(math.log(ratio.value)) <= math.log(ratio.factor)


@dataclass(frozen=True)
class Judged:
    """A finalist with what is known about its speed."""

    candidate: Candidate  # what it is
    speed: Mean  # simulated decode speed of the whole batch, tokens/s, over requests
    # low, high: interval of the speed to be expected on the machine
    low: float
    high: float
    costs: tuple[float, float]  # the part of it that is wrong costs: factors on the simulated speed
    ratio: float  # to the best runnable placement, on the same requests
    same: bool  # the ratio differs from 1 by no more than it varies between requests, or changes sides on other routing
    ttft_s: float  # mean time to the first token
    # of the time that the processor and the GPU take in decoding, all their work included, how much is not the processor's
    gpu_share: float
    crossed: float | None  # speed on other routing over that on this one
    label: str  # weakest source of its numbers
    notes: str  # of its runs
    commands: tuple[Command, ...]  # what to type


@dataclass(frozen=True)
class Comparison:
    """Placements of all engines on one machine."""

    setting: Setting  # the question, looked up
    # routing, others: what was simulated on, and other routing for comparison
    routing: Routing
    others: Sequence[Routing]
    found: Found  # all that was simulated
    judged: list[Judged]  # finalists, fastest first
    warnings: list[str]  # what else a reader must know

    @property
    def best(self) -> Judged:
        """The fastest."""
        return self.judged[0]

    def shares(self, one: Judged) -> dict[str, float]:
        """Return the shares of a placement's decode steps by what takes them."""
        return _shares(self.found.limits[one.candidate], self.setting)


def compare(setting: Setting, *, only: Collection[str] | None = None, jobs: int | None = 1, progress: bool = False) -> Comparison:
    """Search placements for a model on a machine, of `only` these families; independent of `jobs`."""
    if len(setting.gpus) != 1:
        got = f"got {len(setting.gpus)} ({', '.join(setting.gpus)})" if setting.gpus else "got none"
        raise ConfigError(
            f"{PLACE}: --all-engines: expected a machine with one GPU, {got}; leave it out, or use 'moesim compare'"
        )
    routing, others = find_routing(setting.model, setting.asked, PLACE)
    found = Search(Space(setting, routing, only), others=others, jobs=jobs, progress=progress).run()
    ranked = found.ranked()
    judged = [_judge(one, ranked[0], found, setting) for one in ranked]
    return Comparison(setting, routing, others, found, judged, _warnings(setting, routing, others, found))


def _kept(setting: Setting) -> str:
    key = f"devices.{setting.gpu}.workspace_bytes"
    kept = setting.hardware.numbers.get(key)
    if kept is None:
        return f"the profile says nothing of the engine's own buffers on {setting.gpu}: leave some of its memory free"
    n_bytes = setting.hardware.devices[setting.gpu].workspace_bytes
    return f"{gib(n_bytes)} on {setting.gpu} is kept for the engine's own buffers ({kept.source})"


def _shares(limits: Limits, setting: Setting) -> dict[str, float]:
    """Return the shares of the time of a decode step by what takes it."""
    parts = limits.by_part
    away = "copies" if setting.host_computes else "disk"
    found = {"cpu": parts.get("CPU", 0.0), "gpu": parts.get("GPU", 0.0), away: parts.get("link", 0.0)}
    whole = sum(found.values()) or 1.0
    return {part: share / whole for part, share in found.items()}


def _judge(one: Candidate, best: Candidate, found: Found, setting: Setting) -> Judged:
    rows = found.final[one]
    speeds, bests = [speed(row) for row in rows], [speed(row) for row in found.final[best]]
    costs = shipped().factors(found.machines[one], _shares(found.limits[one], setting))
    middle, ratios = mean(speeds, LEVEL), found.crossed.get(one, ())
    crossed = max(ratios, key=lambda ratio: abs(math.log(ratio)), default=None)
    low, high = interval(middle, costs, crossed or 1.0)
    return Judged(
        candidate=one, speed=middle, low=low, high=high, costs=costs,
        ratio=mean([b / a for a, b in zip(bests, speeds, strict=True)], LEVEL).value,
        same=one is not best and (indistinguishable(bests, speeds) or _flips(one, best, found)),
        ttft_s=sum(float(row["ttft_mean_ns"]) for row in rows) / len(rows) / 1e9,
        gpu_share=gpu_share(found.limits[one]), crossed=crossed,
        label=str(rows[0]["source_label"]), notes=str(rows[0]["notes"]),
        commands=tuple(commands(one, setting)),
    )  # fmt: skip


def _flips(one: Candidate, best: Candidate, found: Found) -> bool:
    """Whether a placement overtakes the best one on other routing."""
    if one not in found.crossed or best not in found.crossed:
        return False
    behind = mean([speed(a) / speed(b) for a, b in zip(found.final[one], found.final[best], strict=True)], LEVEL).value
    return any(behind * a > b for a, b in zip(found.crossed[one], found.crossed[best], strict=True))


def _warnings(setting: Setting, routing: Routing, others: Sequence[Routing], found: Found) -> list[str]:
    lines = []
    if routing.label.startswith("assumed"):
        ends = " and ".join(one.label.removeprefix("assumed, ") for one in others)
        lines.append(f"routing is assumed ({routing.why}); intervals and ~ cover {ends}")
    elif routing.origin == "synthetic":
        lines.append("routing is synthetic: made up by parameters fitted to the model's published statistics")
    if routing.origin == "miniature":
        lines.append("routing is that of a small model with this model's routing shape, which is easier to predict")
    if "prompt-truncated" in str(next(iter(found.screened.values()))["notes"]):
        lines.append("recorded prompts are longer than asked for and were cut")
    if len(routing.groups) < 2:
        lines.append("one group of requests only: how much speeds vary between requests is not known")
    lines.append(_kept(setting))
    lines.append("RAM for the system and for other programs is not counted")
    return lines
