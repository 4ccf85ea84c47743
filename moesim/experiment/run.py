"""Run an experiment: read the runs that are done, and run the rest here, in processes or on a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesim.core.processes import usable_cores
from moesim.core.progress import Progress
from moesim.core.text import say
from moesim.core.units import format_s
from moesim.errors import InputError
from moesim.experiment.estimate import before, worth_processes
from moesim.experiment.keys import run_keys
from moesim.experiment.resolve import Experiment
from moesim.experiment.rows import describe_run
from moesim.experiment.runner import SIMULATED, Examine, Execution, Kept, run_one
from moesim.experiment.spec import RunSpec
from moesim.experiment.store import Store
from moesim.experiment.workers import Pool, Workers, outcomes_of, work_of
from moesim.metrics.breakdown import breakdown
from moesim.metrics.machine import Machine
from moesim.metrics.outcome import Outcome

if TYPE_CHECKING:
    from moesim.metrics import Value


_LONG_S = 10.0  # of runs whose time is told before they begin


@dataclass(frozen=True)
class Results:
    """Results of an experiment.

    Attributes
    ----------
    experiment : Experiment
        What was run.
    outcomes : list of Outcome
        One a run, in the experiment's order.
    n_found : int
        How many of them had been run before.
    """

    experiment: Experiment
    outcomes: list[Outcome] = field(default_factory=list)
    n_found: int = 0

    @property
    def rows(self) -> list[dict[str, Value]]:
        """One row a run."""
        return [outcome.row for outcome in self.outcomes]

    @property
    def complete(self) -> bool:
        """Whether every run was carried out, with or without success; not so if it was stopped at the first failure."""
        return len(self.outcomes) == len(self.experiment.specs)

    @property
    def failures(self) -> list[str]:
        """One line for each run that failed."""
        return [f"{describe_run(o.row)}: {o.failure}" for o in self.outcomes if o.failure is not None]


def run_experiment(
    experiment: Experiment, *, jobs: int | None = 1, keep: Callable[[int], Kept | None] = lambda index: None,
    progress: bool = False, execution: Execution = SIMULATED, folder: Path | None = None, scheduler: str | None = None,
    fail_fast: bool = False, may_fail: bool = False, examine: Examine | None = None, workers: Workers | None = None,
) -> Results:  # fmt: skip
    """Run all runs of an experiment that have not been run.

    Parameters
    ----------
    experiment : Experiment
        Resolved.
    jobs : int or None
        Processes, None: all cores if that is faster; the results do not depend on it.
    keep : callable
        Which records of a run are wanted, by its index: True for all, a number for those of so many first steps.
    progress : bool
        Show a bar on the terminal once it has taken two seconds.
    execution : Execution
        Simulated, or live: then one after another, in this process whatever `jobs` and `scheduler`, and whatever has been run
        before.
    folder : Path, optional
        Result folder: runs that it holds are not repeated, and each run is kept there as soon as it is done.
    scheduler : str, optional
        Address of a Dask scheduler, whose workers carry out the runs.
    fail_fast : bool
        Stop at the first failed run; those in flight are given up, those behind are not begun.
    may_fail : bool
        Return even if every run failed.
    examine : callable, optional
        What to look for in the records of each run, which need not be kept for that; the answer is `Outcome.found`.
    workers : Workers, optional
        Processes that stay when the runs are done, instead of `jobs` and `scheduler`.

    Returns
    -------
    Results
        Failed runs among them.

    Raises
    ------
    InputError
        If every run failed with one: then what was asked for is wrong. Not with `may_fail`, nor for a study that examines.
    """
    live = execution is not SIMULATED
    keys = run_keys(experiment)
    store = Store(folder) if folder is not None and not live else None
    kept = {spec.index: keep(spec.index) or False for spec in experiment.specs}
    found = {} if store is None else _found(experiment, keys, kept, store)
    missing = [spec for spec in experiment.specs if spec.index not in found]
    done = list(found.values())
    n_steps = sum(len(experiment.workload(spec).steps) for spec in missing)
    with ExitStack() as stack:
        crew = workers or stack.enter_context(Workers(jobs, scheduler))
        # Processes that have worked before save time, and their command has shown how long it takes.
        known = live or crew.pool is not None
        took = cache(lambda: 0.0 if known else before(experiment, missing))  # only if it is asked for, since runs are tried
        pool = crew.needed(lambda: worth_processes(took(), len(missing), usable_cores())) if missing and not live else None
        if progress and took() > _LONG_S:
            figures = ", then figures" if folder is not None and experiment.config.plots else ""
            say(f"{len(missing)} runs, about {format_s(took() / (pool.room() if pool is not None else 1))}{figures}")
        bar = stack.enter_context(Progress(n_steps, enabled=progress))
        told = _Told(bar, len(missing))
        if pool is None:
            new = _here(experiment, missing, kept, told, execution, examine)
        else:
            new = _elsewhere(experiment, missing, kept, told, pool, _Known(experiment, store, keys, kept), folder, examine)
        for spec, outcome in new:
            outcome.row.update(key=keys[spec.index], group=spec.group)
            if store is not None and outcome.failure is None:
                if outcome.records is not None:
                    store.add_records(keys[spec.index], outcome.records)
                store.add(keys[spec.index], outcome.row)
            done.append(outcome)
            if fail_fast and outcome.failure is not None:
                break
    if store is not None:
        store.merge()  # also what a sweep killed at its very end has left
    done.sort(key=lambda outcome: int(outcome.row["run"] or 0))
    failures = [outcome.failure for outcome in done]
    raises = not may_fail and examine is None and len(done) == len(keys)
    if raises and failures and all(isinstance(failure, InputError) for failure in failures):
        assert failures[0] is not None
        raise type(failures[0])(f"{experiment.place}: {failures[0]}")
    return Results(experiment, done, len(found))


def _found(experiment: Experiment, keys: Sequence[str], kept: Mapping[int, Kept], store: Store) -> dict[int, Outcome]:
    rows = store.read()
    known = _Known(experiment, store, keys, kept)
    found = {}
    for spec in experiment.specs:
        if (row := rows.get(keys[spec.index])) is not None and (outcome := known.outcome(spec, row)) is not None:
            found[spec.index] = outcome
    settings = {_setting_of(row) for row in rows.values()}
    outdated = [
        s for s in experiment.specs if keys[s.index] not in rows and _setting_of({**s.row(), "group": s.group}) in settings
    ]
    if outdated:
        n, was = len(outdated), "was" if len(outdated) == 1 else "were"
        say(f"{n} run{'s' * (n > 1)} of {store.folder} {was} computed with other code or inputs, and will be computed again")
    return found


def _setting_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what names a run with any code and inputs."""
    return tuple(row.get(name) for name in ("group", "repeat", "seed", "trace"))


@dataclass(frozen=True)
class _Known:
    experiment: Experiment
    store: Store | None
    keys: Sequence[str]
    kept: Mapping[int, Kept]

    def now(self, spec: RunSpec) -> Outcome | None:
        """Look whether another sweep in the same folder has finished a run meanwhile."""
        row = self.store.find(self.keys[spec.index]) if self.store is not None else None
        return self.outcome(spec, row) if row is not None else None

    def outcome(self, spec: RunSpec, row: Mapping[str, Value]) -> Outcome | None:
        """Make an outcome of a row; None if records are wanted and not there."""
        machine = Machine.of(spec.hardware)
        # Its place in this experiment, and the names that this experiment has for things.
        row = {**row, **spec.row(), "workload_digest": self.experiment.workload(spec).digest, "group": spec.group}
        wanted = self.kept[spec.index]
        if not wanted:
            return Outcome(row, machine)
        assert self.store is not None
        records = self.store.records(self.keys[spec.index], wanted)
        if records is None:
            return None
        split = breakdown(records, machine.kinds, machine.media) if wanted is True else None
        return Outcome(row, machine, records, split)


class _Told:
    def __init__(self, bar: Progress, n_runs: int) -> None:
        self.bar, self._n_runs, self._n_done, self._n_failed = bar, n_runs, 0, 0

    def doing(self, spec: RunSpec) -> None:
        failed = f", {self._n_failed} failed" if self._n_failed else ""
        self.bar.describe(f"{self._n_done}/{self._n_runs} runs{failed}: {spec.policy_name}")

    def done(self, spec: RunSpec, outcome: Outcome, n_steps: int) -> None:
        self._n_done += 1
        self._n_failed += outcome.failure is not None
        self.doing(spec)
        self.bar.advance(n_steps)


def _here(
    experiment: Experiment,
    specs: Sequence[RunSpec],
    kept: Mapping[int, Kept],
    told: _Told,
    execution: Execution,
    examine: Examine | None,
) -> Iterator[tuple[RunSpec, Outcome]]:
    for spec in specs:
        told.doing(spec)
        begun, n_steps = told.bar.done, len(experiment.workload(spec).steps)
        outcome = run_one(
            experiment, spec, keep=kept[spec.index], progress=told.bar.step, execution=execution,
            examine=examine,
        )  # fmt: skip
        told.done(spec, outcome, begun + n_steps - told.bar.done)  # a failed run has not told all its steps
        yield spec, outcome


def _elsewhere(
    experiment: Experiment, specs: Sequence[RunSpec], kept: Mapping[int, Kept], told: _Told, pool: Pool, known: _Known,
    folder: Path | None, examine: Examine | None,
) -> Iterator[tuple[RunSpec, Outcome]]:  # fmt: skip
    with work_of(experiment, folder) as make:
        for spec, outcome in outcomes_of(specs, lambda spec: make(spec, kept[spec.index], examine), pool, known.now):
            told.done(spec, outcome, len(experiment.workload(spec).steps))
            yield spec, outcome
