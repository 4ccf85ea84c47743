"""Run an experiment: all its runs, one after another or in several processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moesim.errors import InputError
from moesim.experiment.config import parse_config
from moesim.experiment.resolve import Experiment
from moesim.experiment.runner import SIMULATED, Execution, Outcome, run_one
from moesim.progress import Progress

if TYPE_CHECKING:
    from moesim.metrics import Value


@dataclass(frozen=True)
class Results:
    """What came of an experiment.

    Attributes
    ----------
    experiment : Experiment
        What was run.
    outcomes : list of Outcome
        One a run, in the experiment's order.
    """

    experiment: Experiment
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def rows(self) -> list[dict[str, Value]]:
        """One row a run."""
        return [outcome.row for outcome in self.outcomes]

    @property
    def failures(self) -> list[str]:
        """One line for each run that failed."""
        return [f"{describe_run(o.row)}: {o.failure}" for o in self.outcomes if o.failure is not None]


def run_experiment(
    experiment: Experiment, *, jobs: int = 1, keep: Callable[[int], bool] = lambda index: False, progress: bool = False,
    execution: Execution = SIMULATED,
) -> Results:  # fmt: skip
    """Run all runs of an experiment.

    Parameters
    ----------
    experiment : Experiment
        Resolved.
    jobs : int
        Processes; the results do not depend on it.
    keep : callable
        Whether to keep the records of a run, by its index.
    progress : bool
        Show a bar on the terminal once it has taken two seconds.
    execution : Execution
        Simulated, or live: then one after another, in this process.

    Returns
    -------
    Results
        Failed runs among them.

    Raises
    ------
    InputError
        If every run failed with one: then what was asked for is wrong.
    """
    kept = [spec.index for spec in experiment.specs if keep(spec.index)]
    total = sum(len(experiment.workload(spec).steps) for spec in experiment.specs)
    with Progress(total, enabled=progress) as bar:
        if jobs > 1 and len(experiment.specs) > 1 and execution is SIMULATED:
            outcomes = list(_parallel(experiment, jobs, kept, bar))
        else:
            outcomes = list(_sequential(experiment, kept, bar, execution))
    outcomes.sort(key=lambda outcome: int(outcome.row["run"] or 0))
    failures = [outcome.failure for outcome in outcomes]
    if all(isinstance(failure, InputError) for failure in failures):
        assert failures[0] is not None
        raise type(failures[0])(f"{experiment.place}: {failures[0]}")
    return Results(experiment, outcomes)


def _sequential(experiment: Experiment, kept: Sequence[int], bar: Progress, execution: Execution) -> Iterator[Outcome]:
    for spec in experiment.specs:
        bar.describe(spec.policy_name)
        done = bar.done
        yield run_one(experiment, spec, keep=spec.index in kept, progress=lambda step: bar.advance(1), execution=execution)
        bar.advance(done + len(experiment.workload(spec).steps) - bar.done)  # a failed run has not told all its steps


def _parallel(experiment: Experiment, jobs: int, kept: Sequence[int], bar: Progress) -> Iterator[Outcome]:
    written = experiment.config.model_dump(mode="json")
    # Spawned, not forked: the parent may have threads, and every process reads its own view of the trace.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        min(jobs, len(experiment.specs)), context, initializer=_start_worker, initargs=(written, experiment.place)
    ) as pool:
        running = {pool.submit(_work, spec.index, spec.index in kept): spec for spec in experiment.specs}
        for future in as_completed(running):
            spec = running[future]
            bar.describe(spec.policy_name)
            bar.advance(len(experiment.workload(spec).steps))
            yield future.result()


_worker: list[Experiment] = []  # the experiment of a worker process


def _start_worker(written: dict[str, object], place: str) -> None:
    _worker[:] = [Experiment(parse_config(written, place), place)]


def _work(index: int, keep: bool) -> Outcome:
    experiment = _worker[0]
    return run_one(experiment, experiment.specs[index], keep=keep)


def describe_run(row: Mapping[str, Value]) -> str:
    """Say in a few words which run a row is of.

    >>> describe_run({"run": 3, "policy": "lru", "cache_ratio": 0.5, "cache_budget_bytes": None, "batch_size": 4})
    'run 3 (lru, cache 0.5, batch 4)'
    """
    ratio, budget = row["cache_ratio"], row["cache_budget_bytes"]
    cache = f"{ratio:g}" if isinstance(ratio, float) else f"{budget} B"
    return f"run {row['run']} ({row['policy']}, cache {cache}, batch {row['batch_size']})"
