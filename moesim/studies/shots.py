"""Simulated runs for studies that compare many of them: each once, in this process or several, and little kept of it."""

from __future__ import annotations

import json
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from moesim.core.progress import Progress
from moesim.errors import MoesimError, SimulationError
from moesim.experiment.config import parse_config
from moesim.experiment.pool import Processes, usable_cores
from moesim.experiment.resolve import Experiment
from moesim.experiment.runner import run_one
from moesim.metrics.naming import CACHE_SETTINGS, SETTINGS
from moesim.studies.limits import Limits, limits_of

if TYPE_CHECKING:
    from moesim.metrics import Value

METRICS: Final = ("decode_tokens_per_s", "ttft_mean_ns", "makespan_ns", "hit_rate", "cache_slots", "contention_ns")
"""Metrics that are kept of a run."""
_WORDS: Final = ("source_label", "notes", "routing", "fidelity_fresh", "fidelity_fresh_decode", *SETTINGS, *CACHE_SETTINGS)
_CURVES = ("linear", "flat_linear", "points")
_WORTH_S = 6.0  # of work in this process, above which starting others pays


@dataclass(frozen=True)
class Shot:
    """What is kept of one simulated run."""

    row: Mapping[str, Value]  # of its metrics and settings those that are told
    limits: Limits | None  # None if it failed
    used: frozenset[str]  # keys of the profile's numbers that its costs come from
    error: MoesimError | None = None  # why it failed
    # rooflines, curves: costs that come of a device's rates alone, and of a curve of the profile
    rooflines: frozenset[str] = frozenset()
    curves: frozenset[str] = frozenset()


class Runs:
    """Simulated runs, each once."""

    def __init__(
        self, place: str, jobs: int | None, expected: int, progress: bool, simulate: Callable[..., Shot] | None = None
    ) -> None:
        self._place, self._jobs, self._expected = place, jobs, expected
        self._simulate = simulate or shoot
        self._known: dict[tuple[str, int], Shot] = {}
        self._bar = Progress(expected, enabled=progress)
        self._pool: Processes | None = None
        self._took = 0.0

    def __enter__(self) -> Runs:
        self._bar.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._pool is not None:
            self._pool.close()
        self._bar.__exit__(*error)

    def shots(self, works: Sequence[tuple[Mapping[str, Any], int]]) -> list[Shot]:
        """Give runs: experiments, and the number of the run in each; those not known yet are simulated."""
        keys = [(_identity(raw), index) for raw, index in works]
        missing = {key: work for key, work in zip(keys, works, strict=True) if key not in self._known}
        if missing and self._parallel(len(missing)):
            assert self._pool is not None
            waiting, running = deque(missing.items()), dict[Future[Shot], tuple[str, int]]()
            while waiting or running:
                while waiting and len(running) < self._pool.room():
                    key, (raw, index) = waiting.popleft()
                    running[self._pool.submit(self._simulate, raw, self._place, index)] = key
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    self._add(running.pop(future), self._result(future))
        else:
            for key, (raw, index) in missing.items():
                begun = time.monotonic()
                self._add(key, self._simulate(raw, self._place, index))
                self._took = max(self._took, time.monotonic() - begun)
        return [self._known[key] for key in keys]

    def _result(self, future: Future[Shot]) -> Shot:
        try:
            return future.result()
        except BrokenExecutor:
            raise SimulationError(f"{self._place}: a worker process died: killed, or out of memory; lower --jobs") from None

    def _parallel(self, n_missing: int) -> bool:
        if self._pool is None:
            n = usable_cores() if self._jobs is None else self._jobs
            left = self._expected - len(self._known)
            worth = self._jobs is not None or (self._known and self._took * left > _WORTH_S)
            if n > 1 and n_missing > 1 and worth:
                self._pool = Processes(n)
        return self._pool is not None

    def _add(self, key: tuple[str, int], shot: Shot) -> None:
        self._known[key] = shot
        self._bar.describe(f"{len(self._known)} runs: {shot.row.get('policy', '')}")
        self._bar.advance(1)


def _identity(raw: Any) -> str:
    """Write what a run depends on: all but the words beside numbers."""
    return json.dumps(_without_words(raw), sort_keys=True)


def _without_words(value: Any) -> Any:
    if isinstance(value, Mapping):
        words = ("how", "why", "ref") if "source" in value else ()
        return {key: _without_words(inner) for key, inner in value.items() if key not in words}
    return [_without_words(inner) for inner in value] if isinstance(value, list) else value


_experiments: OrderedDict[str, Experiment] = OrderedDict()  # those that this process used last
_REMEMBERED = 4


def shoot(raw: Mapping[str, Any], place: str, index: int) -> Shot:
    """Simulate one run of an experiment; what it fails of is kept."""
    key = json.dumps(raw, sort_keys=True) + place
    try:
        if key not in _experiments:
            _experiments[key] = Experiment(parse_config(dict(raw), place), place)
        _experiments.move_to_end(key)
        while len(_experiments) > _REMEMBERED:
            _experiments.popitem(last=False)
        experiment = _experiments[key]
        spec = experiment.specs[index]
        outcome = run_one(experiment, spec, keep=True)
        if outcome.failure is not None:
            return Shot({"policy": spec.policy_name}, None, frozenset(), outcome.failure)
        limits = limits_of(experiment, spec, outcome)
    except MoesimError as error:
        return Shot({}, None, frozenset(), error)
    costs = outcome.provenance or {}
    kept = ("policy", *METRICS, *_WORDS)
    return Shot(
        {name: outcome.row.get(name) for name in kept},
        limits,
        frozenset(number for cost in costs.values() for number in cost["numbers"]),
        rooflines=frozenset(name for name, cost in costs.items() if cost["form"] == "roofline"),
        curves=frozenset(name for name, cost in costs.items() if cost["form"].partition(",")[0] in _CURVES),
    )
