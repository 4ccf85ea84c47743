"""From a question to an advice: routing, search, intervals, ranking, flags."""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import yaml

from moesim.core.files import write_bytes
from moesim.core.progress import telling
from moesim.core.student import Mean, mean
from moesim.studies.advice.candidates import LOSSY, Candidate, Space, gib
from moesim.studies.advice.engines import Command, commands
from moesim.studies.advice.observed import IDENTIFIED, Observed, check_machine, curve
from moesim.studies.advice.question import PLACE, Asked, Routing, Setting, find_routing, look_up
from moesim.studies.advice.search import Found, Search, gpu_share, speed
from moesim.studies.identify.bench import read_observations
from moesim.studies.identify.identify import identify
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
    fresh: float | None  # share of the gate weight of decoding that was served as routed
    # of the time that the processor and the GPU take in decoding, all their work included, how much is not the processor's
    gpu_share: float
    crossed: float | None  # speed on other routing over that on this one
    label: str  # weakest source of its numbers
    notes: str  # of its runs
    commands: tuple[Command, ...]  # what to type


@dataclass(frozen=True)
class Advice:
    """The answer."""

    setting: Setting  # the question, looked up
    # routing, others: what was simulated on, and other routing for comparison
    routing: Routing
    others: Sequence[Routing]
    found: Found  # all that was simulated
    # runnable, papers: finalists of either class, fastest first
    runnable: list[Judged]
    papers: list[Judged]
    warnings: list[str]  # what else a reader must know
    observed: Observed | None = None  # results of observed speeds, if some were given

    @property
    def best(self) -> Judged:
        """The fastest that can be run; of papers' policies if none can."""
        return (self.runnable or self.papers)[0]


def recommend(asked: Asked, *, jobs: int | None = 1, progress: bool = False) -> Advice:
    """Search placements and policies for a model on a machine; independent of `jobs`."""
    with tempfile.TemporaryDirectory(prefix="moesim.") as folder:
        setting = look_up(asked, Path(folder))
        routing, others = find_routing(setting.model, asked, PLACE)
        found = Search(Space(setting, routing), others=others, jobs=jobs, progress=progress).run()
    ranked = [*found.ranked(True), *found.ranked(False)]
    judged = [_judge(one, ranked[0], found, setting) for one in ranked]
    runnable = [one for one in judged if one.candidate.runnable]
    papers = [one for one in judged if not one.candidate.runnable]
    return Advice(
        setting, routing, others, found, runnable, papers,
        _warnings(setting, routing, others, found),
    )  # fmt: skip


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
    fresh = rows[0].get("fidelity_fresh_decode")
    return Judged(
        candidate=one, speed=middle, low=low, high=high, costs=costs,
        ratio=mean([b / a for a, b in zip(bests, speeds, strict=True)], LEVEL).value,
        same=one is not best and (indistinguishable(bests, speeds) or _flips(one, best, found)),
        ttft_s=sum(float(row["ttft_mean_ns"]) for row in rows) / len(rows) / 1e9,
        fresh=None if fresh is None or one.family not in LOSSY else min(float(row["fidelity_fresh_decode"]) for row in rows),
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


def recommend_observed(asked: Asked, file: Path, *, jobs: int | None = 1, progress: bool = False) -> Advice:
    """Identify the machine by observed speeds, and search on it."""
    rows = read_observations(file, [asked.model] if isinstance(asked.model, str) and asked.gguf is None else [])
    with telling(lines=True, enabled=progress) as tell, tempfile.TemporaryDirectory(prefix="moesim.") as folder:
        setting = look_up(asked, Path(folder))  # what is wrong with the question is known before the machine is identified
        check_machine(setting)
        if asked.trace is not None:
            find_routing(setting.model, asked, PLACE)
        found = identify(asked.hardware, rows, leave_out=False, tell=tell)
        raw = {**found.raw, "name": f"{found.predictor.machine.base.name}-identified"}
        contents = _dumped(raw)
        profile = write_bytes(Path(folder) / IDENTIFIED, contents)
        asked = replace(asked, hardware=str(profile))
        tell("placements")
        setting = look_up(asked, Path(folder))
        # A terminal has room for one thing that moves.
        advice = recommend(asked, jobs=jobs, progress=progress and not sys.stderr.isatty())
        tell("settings of llama.cpp")
        return replace(advice, observed=Observed(found, contents, setting, curve(setting, found)))


def _dumped(raw: Any) -> bytes:
    return yaml.safe_dump(raw, sort_keys=False, width=120).encode()
