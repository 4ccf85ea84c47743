"""Runs for studies that compare many of them: each once, by the runner of all sweeps, and little kept of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from moesim.errors import MoesimError
from moesim.experiment.config import parse_config
from moesim.experiment.resolve import Experiment, read_inputs
from moesim.experiment.run import run_experiment
from moesim.experiment.workers import Workers
from moesim.metrics.naming import CACHE_SETTINGS, SETTINGS
from moesim.studies.whatif.limits import Limits, limits_of

if TYPE_CHECKING:
    from moesim.metrics import Value
    from moesim.metrics.outcome import Outcome
    from moesim.trace import Trace

METRICS: Final = ("decode_tokens_per_s", "ttft_mean_ns", "makespan_ns", "hit_rate", "cache_slots", "contention_ns")
"""Metrics that are kept of a run."""
_WORDS: Final = ("source_label", "notes", "routing", "fidelity_fresh", "fidelity_fresh_decode", *SETTINGS, *CACHE_SETTINGS)
_CURVES = ("linear", "flat_linear", "points")


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


Works = Sequence[tuple[Mapping[str, Any], int]]
"""Experiments, and the number of the run in each."""


class Runs:
    """Runs of one study, each once: points of ordinary sweeps, of which a shot is kept."""

    def __init__(
        self, place: str, jobs: int | None, progress: bool, simulate: Callable[[Works], list[Shot]] | None = None
    ) -> None:
        self._place, self._progress = place, progress
        self._simulate = simulate or self._sweep
        self._known: dict[tuple[str, int], Shot] = {}
        self._traces: dict[str, Trace] = {}
        self._workers = Workers(jobs)

    def __enter__(self) -> Runs:
        return self

    def __exit__(self, *error: Any) -> None:
        self._workers.__exit__(*error)

    def read_inputs(self, raws: Iterable[Mapping[str, Any]]) -> None:
        """Read models, machines and traces of experiments, so that a missing one is known before the first run."""
        for raw in raws:
            read_inputs(raw, self._place, self._traces)

    def shots(self, works: Works) -> list[Shot]:
        """Give runs; those not known yet are simulated."""
        keys = [(_identity(raw), index) for raw, index in works]
        missing = {key: work for key, work in zip(keys, works, strict=True) if key not in self._known}
        self._known.update(zip(missing, self._simulate(list(missing.values())), strict=True))
        return [self._known[key] for key in keys]

    def _sweep(self, works: Works) -> list[Shot]:
        """Carry out all runs as one sweep; what cannot become a run of it is a failed shot."""
        experiments: dict[str, Experiment | Shot] = {}
        found: list[Shot | None] = []
        runs = []
        for raw, index in works:
            key = json.dumps(raw, sort_keys=True)
            if key not in experiments:
                try:
                    experiments[key] = Experiment(parse_config(dict(raw), self._place), self._place, known=self._traces)
                except MoesimError as error:
                    experiments[key] = Shot({}, None, frozenset(), error)
            one = experiments[key]
            found.append(one if isinstance(one, Shot) else None)
            if isinstance(one, Experiment):
                runs.append((one, one.specs[index]))
        outcomes = iter(self._outcomes(Experiment.joined(runs)) if runs else [])
        return [shot or _shot(next(outcomes)) for shot in found]

    def _outcomes(self, experiment: Experiment) -> list[Outcome]:
        return run_experiment(experiment, progress=self._progress, examine=limits_of, workers=self._workers).outcomes


def _identity(raw: Any) -> str:
    """Write what a run depends on: all but the words beside numbers."""
    return json.dumps(_without_words(raw), sort_keys=True)


def _without_words(value: Any) -> Any:
    if isinstance(value, Mapping):
        words = ("how", "why", "ref") if "source" in value else ()
        return {key: _without_words(inner) for key, inner in value.items() if key not in words}
    return [_without_words(inner) for inner in value] if isinstance(value, list) else value


def _shot(outcome: Outcome) -> Shot:
    if outcome.failure is not None:
        return Shot({"policy": outcome.row["policy"]}, None, frozenset(), outcome.failure)
    costs = outcome.provenance or {}
    return Shot(
        {name: outcome.row.get(name) for name in ("policy", *METRICS, *_WORDS)},
        outcome.found,
        frozenset(number for cost in costs.values() for number in cost["numbers"]),
        rooflines=frozenset(name for name, cost in costs.items() if cost["form"] == "roofline"),
        curves=frozenset(name for name, cost in costs.items() if cost["form"].partition(",")[0] in _CURVES),
    )
