"""Search: a coarse grid a family, refinement around the best, all requests for the last.

The same question has the same simulations in the same order. Each placement has the costs of the engine that has it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from moesim.core.processes import usable_cores
from moesim.core.progress import Progress
from moesim.errors import CapacityError
from moesim.experiment import run_experiment
from moesim.experiment.config import parse_config
from moesim.experiment.resolve import Experiment, written_key
from moesim.experiment.runner import Examine
from moesim.experiment.sweep import RunSpec
from moesim.experiment.workers import Workers
from moesim.hardware import HardwareProfile
from moesim.metrics.outcome import Outcome
from moesim.policies.registry import make_policy
from moesim.studies.advice.candidates import (
    Candidate,
    Family,
    Space,
    additions,
    coarse,
    experiment_of,
    halves,
    varied,
)
from moesim.studies.advice.question import PLACE, Routing, Setting, shortest_prompt
from moesim.studies.whatif.limits import Limits, limits_of
from moesim.trace import Trace


def gpu_share(limits: Limits) -> float:
    """Share of the processor's and the GPU's time that is not the processor's.

    >>> from moesim.studies.whatif.limits import Limits
    >>> gpu_share(Limits({"link": 0.1, "CPU memory": 0.4, "GPU launches": 0.3, "decisions": 0.2}))
    0.5
    """
    parts = limits.by_part
    elsewhere, cpu = parts.get("GPU", 0.0) + parts.get("link", 0.0), parts.get("CPU", 0.0)
    return elsewhere / (elsewhere + cpu) if elsewhere + cpu else 1.0


REFINED: Final = 2
"""Families that are refined: the best of the coarse grid."""
SCREEN_TOKENS: Final = 32
"""Most tokens that fixed placements decode while the grid is searched; caches, which begin empty, decode all."""
FINALISTS: Final = 4
"""Placements that all requests are simulated for."""
CROSS_GROUPS: Final = 2
"""Groups of requests on which the finalists are compared with other routing of the same model."""

Row = Mapping[str, Any]


@dataclass
class Found:
    """Results of a search."""

    # every candidate on the first group of requests, fixed placements with fewer tokens
    screened: dict[Candidate, Row] = field(default_factory=dict)
    final: dict[Candidate, list[Row]] = field(default_factory=dict)  # the finalists on every group, in their order
    no_fit: dict[str, str] = field(default_factory=dict)  # families and policies that were left out, and why
    failed: dict[str, str] = field(default_factory=dict)  # candidates whose simulation failed, and why
    n_simulations: int = 0  # how many were carried out
    # speeds of the finalists on each other routing over those on this one
    crossed: dict[Candidate, tuple[float, ...]] = field(default_factory=dict)
    limits: dict[Candidate, Limits] = field(default_factory=dict)  # what limits each finalist, on the last group of requests
    machines: dict[Candidate, HardwareProfile] = field(default_factory=dict)  # of each finalist: with its engine's costs

    def ranked(self) -> list[Candidate]:
        """Sort finalists, fastest first over all requests; of equals the sooner first token."""
        return sorted(
            self.final, key=lambda one: (-_mean_speed(self.final[one]), _ttft(self.final[one]), one.gpu_bytes, one.family)
        )


def speed(row: Row) -> float:
    """Tokens per second of the whole batch while decoding."""
    return float(str(row["decode_tokens_per_s"]))


def _mean_speed(rows: Sequence[Row]) -> float:
    product = 1.0
    for row in rows:
        product *= speed(row)
    return float(product ** (1 / len(rows)))


def _ttft(rows: Sequence[Row]) -> float:
    return sum(float(str(row["ttft_mean_ns"])) for row in rows)


@dataclass(frozen=True)
class Glance:
    """A candidate on one group of requests."""

    candidate: Candidate
    row: Row
    hardware: HardwareProfile  # with its engine's costs


def glance(space: Space, candidates: Sequence[Candidate], folder: Path, jobs: int | None = None) -> list[Glance]:
    """Simulate candidates on the first group of requests, once each; those that fail are left out."""
    paths = space.routing.write(folder, slice(1))
    known = {written_key(str(path)): space.routing.groups[0] for path in paths}
    runs: list[tuple[Candidate, Experiment, RunSpec]] = []
    for budget in dict.fromkeys(one.budget for one in candidates):
        some = [one for one in candidates if one.budget == budget]
        raw = experiment_of(space.setting, [str(path) for path in paths], some, space.setting.asked.decode)
        experiment = Experiment(parse_config(raw, PLACE), PLACE, known=known)
        runs += [(one, experiment, spec) for one, spec in zip(some, experiment.specs, strict=True)]
    if not runs:
        return []
    with Workers(jobs or 1) as workers:
        found = run_experiment(Experiment.joined([run[1:] for run in runs]), workers=workers, may_fail=True)
    return [
        Glance(one, outcome.row, spec.hardware)
        for (one, _, spec), outcome in zip(runs, found.outcomes, strict=True)
        if outcome.failure is None
    ]


class Search:
    """A search over the candidates of a setting."""

    def __init__(self, space: Space, *, others: Sequence[Routing] = (), jobs: int | None = 1, progress: bool = False) -> None:
        self.space = space
        self._others = others
        self.found = Found()
        self._workers = Workers(jobs or usable_cores())  # a search is worth them, though none of its rounds is
        self._known: dict[str, Trace] = {}  # by path, so that no experiment reads it
        self._enabled = progress
        self._bar = Progress(0, enabled=False)
        self._traces: list[Path] = []

    def run(self) -> Found:
        every = self.space.families
        families, adding = {one.name: one for one in every if not one.like}, [one for one in every if one.like]
        fit = {name: numbers for name, family in families.items() if (numbers := self.space.feasible(family))}
        shipped, not_shipped = self.space.shipped()
        self.found.no_fit = not_shipped | {
            name: self.space.misfit(family) for name, family in families.items() if name not in fit
        }
        if not fit and not shipped:
            # Families ask for no more than caches do; the one with all experts on the host asks least of the GPU.
            why = [
                self.found.no_fit[name] for name in ("expert-layers", "all-gpu", *self.found.no_fit) if name in self.found.no_fit
            ]
            raise CapacityError(f"{PLACE}: {_nothing_fits(self.space.setting, next(iter(why), 'no placement is simulated'))}")
        tried = {name: numbers[-1:] if families[name].fullest else coarse(numbers) for name, numbers in fit.items()}
        first = [*(self._one(families[name], n) for name, numbers in tried.items() for n in numbers), *shipped]
        n_crossed = (1 + len(self._others)) * CROSS_GROUPS * FINALISTS if self._others else 0
        # Halving the gaps takes some four rounds of two; a guess is enough for a bar.
        total = len(first) + 8 * REFINED + FINALISTS * len(self.space.routing.groups) + n_crossed
        with (
            tempfile.TemporaryDirectory(prefix="moesim.") as name, Progress(total, enabled=self._enabled, lines=True) as bar,
            self._workers,
        ):  # fmt: skip
            self._bar, folder = bar, Path(name)
            self._write(folder, slice(1))
            bar.describe("coarse grid")
            self._screen(first)
            bar.describe("refinement")
            self._refine([families[name] for name in fit if not families[name].fullest], fit)
            self._add(adding)
            bar.describe("all requests")
            self._write(folder, slice(1, None))
            self._finish()
            bar.describe("other routing")
            self._cross(folder)
        return self.found

    def _write(self, folder: Path, groups: slice) -> None:
        paths = self.space.routing.write(folder, groups)
        self._traces += paths
        self._known |= {written_key(str(path)): one for path, one in zip(paths, self.space.routing.groups[groups], strict=True)}

    def _one(self, family: Family, number: int) -> Candidate:
        one = self.space.candidate(family, number)
        assert isinstance(one, Candidate), one
        return one

    def _screen(self, candidates: Iterable[Candidate]) -> None:
        new = [one for one in dict.fromkeys(candidates) if one not in self.found.screened]
        for one, rows in self._simulate(new, self._traces[:1], self._few).items():
            self.found.screened[one] = rows[0]

    def _few(self, one: Candidate) -> int:
        return min(self._all(one), SCREEN_TOKENS) if one.budget is None else self._all(one)

    def _all(self, one: Candidate) -> int:
        return self.space.setting.asked.decode

    def _refine(self, families: Sequence[Family], fit: Mapping[str, range]) -> None:
        def best(family: Family) -> float:
            return max(self._speeds(family).values(), default=0.0)

        searched = sorted(families, key=lambda one: (-best(one), one.name))[:REFINED]
        while between := {one.name: numbers for one in searched if (numbers := halves(fit[one.name], self._speeds(one)))}:
            self._screen(self._one(one, number) for one in searched for number in between.get(one.name, ()))
            # A simulation that failed has no speed: its place would be asked for again and again.
            searched = [one for one in searched if set(between.get(one.name, ())) <= set(self._speeds(one))]

    def _add(self, families: Iterable[Family]) -> None:
        tried = []
        for family, number in additions(families, {one: speed(row) for one, row in self.found.screened.items()}):
            if numbers := self.space.feasible(family):
                tried.append(self._one(family, max((n for n in numbers if n <= number), default=numbers[0])))
            else:
                self.found.no_fit[family.name] = self.space.misfit(family)
        self._screen(tried)

    def _speeds(self, family: Family) -> dict[int, float]:
        return {
            one.number: speed(row)
            for one, row in self.found.screened.items()
            if one.family == family.name and one.number is not None
        }

    def _finish(self) -> None:
        ranked = sorted(self.found.screened, key=lambda one: (-speed(self.found.screened[one]), one.gpu_bytes, one.family))
        chosen = varied(ranked, FINALISTS)
        known = {one: [self.found.screened[one]] for one in chosen if self._few(one) == self._all(one)}
        first = known | self._simulate([one for one in chosen if one not in known], self._traces[:1], self._all)
        rest = self._simulate([one for one in chosen if one in first], self._traces[1:], self._all, begun=1)
        self.found.final = {one: [*first[one], *rows] for one, rows in rest.items()}

    def _cross(self, folder: Path) -> None:
        """Compare the finalists on this routing with other routing, both cut to the same lengths."""
        groups = [routing.groups[:CROSS_GROUPS] for routing in self._others]
        if not groups:
            return
        every = [trace for group in groups for trace in group]
        traces = [trace.write(folder / f"other{n}.safetensors") for n, trace in enumerate(every)]
        self._known |= {written_key(str(path)): trace for path, trace in zip(traces, every, strict=True)}
        prompt = min(self.space.setting.asked.prompt, *(shortest_prompt(trace) for trace in every))
        decode = min(self.space.setting.asked.decode, SCREEN_TOKENS)  # no question of what is faster
        chosen = [
            one for one in self.found.final if all(routing.has(make_policy(one.policy).needs) is None for routing in self._others)
        ]
        n = min(len(self._traces), *map(len, groups))
        both = self._simulate(chosen, [*self._traces[:n], *traces], lambda one: decode, prompt)
        for one, rows in both.items():
            here, there = rows[:n], iter(rows[n:])
            others = [[next(there) for _ in group] for group in groups]
            self.found.crossed[one] = tuple(_mean_speed(found) / _mean_speed(here) for found in others)

    def _simulate(
        self,
        candidates: Sequence[Candidate],
        traces: Sequence[Path],
        decode: Callable[[Candidate], int],
        prompt: int | None = None,
        begun: int = 0,
    ) -> dict[Candidate, list[Row]]:
        """Simulate candidates on request groups from `begun` on; find limits with the last group."""
        runs: list[tuple[Candidate, int, Experiment, RunSpec]] = []  # candidate and group of each
        for budget, tokens in dict.fromkeys((one.budget, decode(one)) for one in candidates if traces):
            some = [one for one in candidates if (one.budget, decode(one)) == (budget, tokens)]
            raw = self._raw(some, traces, tokens, prompt)
            experiment = Experiment(parse_config(raw, PLACE), PLACE, known=self._known)
            # Traces vary slowest, policies fastest.
            runs += [
                (some[place % len(some)], begun + place // len(some), experiment, spec)
                for place, spec in enumerate(experiment.specs)
            ]
        done: dict[Candidate, list[Row]] = {}
        as_asked, last = prompt is None, len(self.space.routing.groups) - 1
        whole = [as_asked and group == last and decode(one) == self._all(one) for one, group, *_ in runs]
        for examine, wanted in ((limits_of, True), (None, False)):
            part = [run for run, is_whole in zip(runs, whole, strict=True) if is_whole == wanted]
            for (one, group, _, spec), outcome in zip(part, self._run([run[2:] for run in part], examine), strict=True):
                if outcome.failure is not None:
                    self.found.failed[one.title] = " ".join(str(outcome.failure).split())
                    continue
                row = dict(outcome.row) | {"trace": self.space.routing.label, "group": group}
                costs = outcome.provenance
                row["costs_measured"] = costs is not None and all(cost["source"] == "measured" for cost in costs.values())
                done.setdefault(one, []).append(row)
                if examine is not None:
                    self.found.limits[one], self.found.machines[one] = outcome.found, spec.hardware
        in_order = {one: sorted(rows, key=lambda row: int(str(row["group"]))) for one, rows in done.items()}
        return {one: rows for one in candidates if len(rows := in_order.get(one, [])) == len(traces)}

    def _run(self, runs: Sequence[tuple[Experiment, RunSpec]], examine: Examine | None) -> list[Outcome]:
        if not runs:
            return []
        results = run_experiment(Experiment.joined(runs), workers=self._workers, examine=examine, may_fail=True)
        self.found.n_simulations += len(results.rows)
        self._bar.advance(len(results.rows))
        return results.outcomes

    def _raw(
        self,
        candidates: Sequence[Candidate],
        traces: Sequence[Path],
        decode: int,
        prompt: int | None,
    ) -> dict[str, Any]:
        raw = experiment_of(self.space.setting, [str(path) for path in traces], candidates, decode)
        if prompt is not None:
            raw["workload"]["prompt_tokens"] = prompt
        return raw


def _nothing_fits(setting: Setting, why: str) -> str:
    remedy = "raise --vram or --ram, lower --bits, --context or --batch"
    disk = "" if not setting.host_computes else ", or give a profile whose experts lie on a disk (backing: [disk0])"
    return f"expected a placement of {setting.model.name} that fits {setting.hardware.name}, got none: {why}; {remedy}{disk}"
