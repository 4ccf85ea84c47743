"""The runs of a league, each once, and kept in a folder, so that a league that was stopped goes on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesim.errors import MoesimError
from moesim.experiment.config import parse_config
from moesim.experiment.resolve import Experiment, read_inputs
from moesim.experiment.run import run_experiment
from moesim.experiment.spec import RunSpec
from moesim.experiment.workers import Workers
from moesim.metrics.naming import policy_label

if TYPE_CHECKING:
    from moesim.metrics import Value
    from moesim.trace import Trace

System = Mapping[str, Any]
"""A policy as an experiment has it: its name and options."""
Row = Mapping[str, "Value"]


@dataclass
class Meetings:
    """Who met where, and how fast they were."""

    place: str  # the experiment's file, for messages
    workers: Workers
    folder: Path | None = None  # where runs are kept; None: nowhere
    progress: bool = False
    n_runs: int = 0  # that were asked for
    n_found: int = 0  # of those that had been run before
    errors: dict[str, str] = field(default_factory=dict)  # why a system did not run, by its label: the first reason
    _known: dict[tuple[str, str], Row | None] = field(default_factory=dict)
    _traces: dict[str, Trace] = field(default_factory=dict)

    def read_inputs(self, raws: Iterable[str]) -> None:
        """Read models, machines and traces of experiments, so that a missing one is known before the first run."""
        for raw in raws:
            read_inputs(json.loads(raw), self.place, self._traces)

    def rows(self, meetings: Sequence[tuple[str, Sequence[System]]]) -> list[list[Row | None]]:
        """Give the result rows of the systems of each meeting, an experiment without policies as JSON; None if one cannot run."""
        keys = [[(raw, json.dumps(one)) for one in systems] for raw, systems in meetings]
        missing = {key: None for one in keys for key in one if key not in self._known}
        by_raw: dict[str, list[str]] = {}
        for raw, system in missing:
            by_raw.setdefault(raw, []).append(system)
        runs = [run for raw, systems in by_raw.items() for run in self._specs(raw, systems)]
        if runs:
            joined = Experiment.joined([(experiment, spec) for experiment, spec, _ in runs])
            done = run_experiment(joined, folder=self.folder, progress=self.progress, workers=self.workers, may_fail=True)
            self.n_runs += len(runs)
            self.n_found += done.n_found
            for (_, _, key), outcome in zip(runs, done.outcomes, strict=True):
                if outcome.failure is None:
                    self._known[key] = outcome.row
                else:
                    self._note(str(outcome.row["policy"]), outcome.failure)
        return [[self._known[key] for key in one] for one in keys]

    def _specs(self, raw: str, systems: Sequence[str]) -> list[tuple[Experiment, RunSpec, tuple[str, str]]]:
        """Resolve a meeting; who cannot run there is known at once."""
        experiment = self.experiment(raw, [json.loads(system) for system in systems])
        self._known.update({(raw, system): None for system in systems})
        if experiment is None:
            return []
        return [(experiment, spec, (raw, json.dumps(dict(spec.point.policy)))) for spec in experiment.specs]

    def experiment(self, raw: str, systems: Sequence[System]) -> Experiment | None:
        """Resolve a meeting; None if nobody can run there."""
        asked = json.loads(raw) | {"policies": list(systems)}
        try:
            return Experiment(parse_config(asked, self.place), self.place, known=self._traces)
        except MoesimError as error:
            for system in systems:
                self._note(policy_label(system), error)
            return None

    def _note(self, label: str, error: MoesimError) -> None:
        self.errors.setdefault(label, " ".join(str(error).split()))
