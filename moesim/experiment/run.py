"""Run an experiment: keep finished runs, run the rest here or on a cluster, estimate times."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from moesim.core.processes import usable_cores
from moesim.core.progress import Progress
from moesim.core.text import explain, note
from moesim.core.units import format_s, format_size
from moesim.engine import chosen
from moesim.errors import InputError, MoesimError, WorkloadError
from moesim.experiment.report import describe_run
from moesim.experiment.resolve import Experiment, run_keys
from moesim.experiment.runner import SIMULATED, Examine, Execution, Kept, run_one
from moesim.experiment.store import Store
from moesim.experiment.sweep import RunSpec
from moesim.experiment.workers import Pool, Workers, outcomes_of, work_of
from moesim.hardware.costs.model import most_chunks
from moesim.metrics.breakdown import breakdown
from moesim.metrics.machine import Machine
from moesim.metrics.naming import CACHE_SETTINGS, SETTINGS
from moesim.metrics.outcome import Outcome
from moesim.policies.user_code import WouldImport
from moesim.trace.workload.spec import WorkloadSpec, shortened

if TYPE_CHECKING:
    from moesim.experiment.resolve import Experiment
    from moesim.experiment.sweep import RunSpec
    from moesim.metrics import Value


_LONG_S = 10.0  # of runs whose time is reported before they begin


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
        """Whether every run ended, failed or not; false if it stopped at the first failure."""
        return len(self.outcomes) == len(self.experiment.specs)

    @property
    def failures(self) -> list[str]:
        """One line for each run that failed."""
        return [f"{describe_run(o.row)}: {o.failure}" for o in self.outcomes if o.failure is not None]


def run_experiment(
    experiment: Experiment, *, jobs: int | None = 1, keep: Callable[[int], Kept | None] = lambda index: None,
    progress: bool = False, execution: Execution = SIMULATED, folder: Path | None = None, scheduler: str | None = None,
    fail_fast: bool = False, may_fail: bool = False, examine: Examine | None = None, workers: Workers | None = None,
    bar: Progress | None = None,
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
    progress, bar : bool, Progress or None
        Show a bar on the terminal once it has taken two seconds; a study's bar counts the steps of these runs instead.
    execution : Execution
        Simulated, or live: then one after another, in this process whatever `jobs` and `scheduler`, and whatever has been run
        before.
    folder : Path, optional
        Result folder: runs that it holds are not repeated, and each run is kept there as soon as it is done.
    scheduler : str, optional
        Address of a Dask scheduler, whose workers execute the runs.
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
    kept = {spec.index: _kept(keep(spec.index), spec, examine) for spec in experiment.specs}
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
            note(f"{len(missing)} runs, about {format_s(took() / (pool.room() if pool is not None else 1))}{figures}")
        processes = "this process" if pool is None else f"{pool.room()} processes"
        explain("%d runs in %s on the simulator %s; %d were done before", len(missing), processes, chosen(), len(found))
        shown = _Shown(bar or stack.enter_context(Progress(n_steps, enabled=progress)), len(missing))
        if pool is None:
            new = _here(experiment, missing, kept, shown, execution, examine)
        else:
            new = _elsewhere(experiment, missing, kept, shown, pool, _Known(experiment, store, keys, kept), folder, examine)
        for spec, outcome in new:
            outcome.row.update(key=keys[spec.index], group=spec.group)
            if store is not None and outcome.failure is None:
                if outcome.records is not None:
                    store.add_records(keys[spec.index], outcome.records)
                store.add(keys[spec.index], outcome.row)
            stored = store is not None and not kept[spec.index]  # the folder has its requests, of which a sweep may have many
            done.append(replace(outcome, records=None) if stored else outcome)
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


def _kept(asked: Kept | None, spec: RunSpec, examine: Examine | None) -> Kept:
    """Return what is kept of a run: of a served workload at least what became of its requests."""
    return asked or (0 if spec.workload.served and examine is None else False)


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
        note(f"{n} run{'s' * (n > 1)} of {store.folder} {was} computed with other code or inputs, and will be computed again")
    return found


def _setting_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
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
        if wanted is False:
            return Outcome(row, machine)
        assert self.store is not None
        records = self.store.records(self.keys[spec.index], wanted)
        if records is None:
            return None
        split = breakdown(records, machine.kinds, machine.media) if wanted is True else None
        return Outcome(row, machine, records if wanted else None, split)


class _Shown:
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
    shown: _Shown,
    execution: Execution,
    examine: Examine | None,
) -> Iterator[tuple[RunSpec, Outcome]]:
    for spec in specs:
        shown.doing(spec)
        begun, n_steps = shown.bar.done, len(experiment.workload(spec).steps)
        outcome = run_one(
            experiment, spec, keep=kept[spec.index], progress=shown.bar.step, execution=execution,
            examine=examine,
        )  # fmt: skip
        yield spec, outcome  # stored before it is counted
        shown.done(spec, outcome, begun + n_steps - shown.bar.done)  # a failed run has not reported all its steps


def _elsewhere(
    experiment: Experiment, specs: Sequence[RunSpec], kept: Mapping[int, Kept], shown: _Shown, pool: Pool, known: _Known,
    folder: Path | None, examine: Examine | None,
) -> Iterator[tuple[RunSpec, Outcome]]:  # fmt: skip
    with work_of(experiment, folder) as make:
        for spec, outcome in outcomes_of(specs, lambda spec: make(spec, kept[spec.index], examine), pool, known.now):
            yield spec, outcome  # stored before it is counted
            shown.done(spec, outcome, len(experiment.workload(spec).steps))


_S_PER_LOOKUP = {"simpy": 50e-6, "native": 5e-6}  # lru; mean of the quickstart's policies
_CHUNK = 0.17  # of a lookup's time: 17.5 us against 101 us, lru on Mixtral's shape with 16, 64 and 256 chunks a transfer
_TRIED_TOKENS, _TRIED_CHUNKS = (4, 16), 64
_TRYING_S = 2.0  # at most, before the runs
_START_S = 2.0  # of a process: interpreter, imports, traces


class Estimate(NamedTuple):
    """How long some runs take."""

    seconds: float  # s: one after another; 0 if no policy could be tried
    n_tried: int  # policies of which a short run succeeded
    failures: tuple[str, ...] = ()  # why other short runs failed, beginning with the policy


class _Pace(NamedTuple):
    """How long the runs of a policy take: s each, and s a lookup."""

    start: float
    each: float


def lookups(experiment: Experiment, spec: RunSpec) -> int:
    """Count how many experts a run has to see to."""
    model = spec.model
    seen = np.minimum(model.n_experts, experiment.workload(spec).steps.n_tokens * model.top_k)
    return model.n_layers * int(seen.sum())


def chunks(experiment: Experiment, spec: RunSpec) -> tuple[int, int]:
    """Count the chunks of a run's transfers."""
    each = most_chunks(spec.model, experiment.transfer(spec)[1])
    return each, each * round(lookups(experiment, spec) * spec.point.share_outside)


def _work(experiment: Experiment, spec: RunSpec) -> float:
    """Count lookups, and chunks beyond the first of a transfer in lookups."""
    each, total = chunks(experiment, spec)
    return lookups(experiment, spec) + _CHUNK * (total - total // each)


def before(experiment: Experiment, specs: Sequence[RunSpec]) -> float:
    """Estimate the seconds of some runs in a row; short ones are tried if it is worth it."""
    took = _S_PER_LOOKUP[chosen()] * sum(_work(experiment, spec) for spec in specs)
    if took <= _START_S:
        return took
    return seconds(experiment, specs, limit_s=_TRYING_S).seconds or took


def worth_processes(took_s: float, n_runs: int, cores: int) -> int:
    """Return how many processes are worth starting for such runs."""
    return min(cores, n_runs) if took_s > _START_S else 1


def seconds(experiment: Experiment, specs: Sequence[RunSpec], *, limit_s: float = 10.0) -> Estimate:
    """Estimate how long some runs take one after another."""
    firsts: dict[str, RunSpec] = {}
    for spec in specs:
        if experiment.imported(spec) and spec.refusal is None:
            firsts.setdefault(spec.policy_name, spec)
    began = time.perf_counter()
    paces: dict[str, _Pace] = {}
    failures = []
    for name, spec in firsts.items():
        if time.perf_counter() - began > limit_s:
            break
        pace = _pace(experiment, spec)
        if isinstance(pace, MoesimError):
            failures.append(f"{name}: {pace}")
        else:
            paces[name] = pace
    return Estimate(_scaled(experiment, specs, paces) if paces else 0.0, len(paces), tuple(failures))


def _pace(experiment: Experiment, spec: RunSpec) -> _Pace | MoesimError:
    """Time two short runs, of which the longer one has more to do; one if they are the same."""
    times: dict[float, float] = {}
    for tokens in _TRIED_TOKENS:
        tried = spec.in_pieces(_TRIED_CHUNKS)
        short = replace(tried, workload=WorkloadSpec(**shortened(vars(spec.workload), tokens)))
        try:
            tried, work = short, _work(experiment, short)
        except WorkloadError:  # requests that short are not in the trace: try the whole
            work = _work(experiment, tried)
        if work in times:
            continue
        began = time.perf_counter()
        outcome = run_one(experiment, tried)
        times[work] = time.perf_counter() - began
        if outcome.failure is not None:
            return outcome.failure
    (least, first), *more = sorted(times.items())
    if not more:
        return _Pace(0.0, first / least)
    each = max(0.0, (more[0][1] - first) / (more[0][0] - least))
    return _Pace(max(0.0, first - each * least), each)


def _scaled(experiment: Experiment, specs: Sequence[RunSpec], paces: Mapping[str, _Pace]) -> float:
    mean = _Pace(*(sum(values) / len(paces) for values in zip(*paces.values(), strict=True)))
    found = [(paces.get(spec.policy_name, mean), _work(experiment, spec)) for spec in specs]
    return sum(pace.start + pace.each * work for pace, work in found)


def describe_grid(experiment: Experiment, folder: Path | None, jobs: int | None, cores: int) -> str:
    """Describe an experiment without running it, but for a few seconds of short runs."""
    rows = [spec.row() for spec in experiment.specs]
    lines = [f"{name}: {', '.join(values)}" for name, values in _varying(rows)]
    lines += [_would_import(one) for one in dict.fromkeys(experiment.not_imported.values()) if one is not None]
    n_points = len({tuple(map(repr, spec.point.setting)) for spec in experiment.specs})
    n_policies = len({spec.policy_name for spec in experiment.specs})
    of = f" ({n_policies} policies at {n_points} settings)" if len(rows) == n_policies * n_points else ""
    if experiment.not_imported:
        missing = experiment.specs
        lines.append(f"{_counted(len(rows), 'run')}{of}; how many of them are done shows once the code is imported")
    else:
        there = Store(folder, read_only=True).read() if folder is not None else {}
        missing = [spec for spec, key in zip(experiment.specs, run_keys(experiment), strict=True) if key not in there]
        lines.append(f"{_counted(len(rows), 'run')}{of}, {len(rows) - len(missing)} of them done, {len(missing)} to do")
    lines += [f"cannot run: {describe_run(spec.row())}: {spec.refusal}" for spec in experiment.specs if spec.refusal]
    counts = [chunks(experiment, spec) for spec in missing]
    if any(each > 1 for each, _ in counts):
        each, total = max(each for each, _ in counts), sum(total for each, total in counts if each > 1)
        lines.append(f"chunks: {each:,} a transfer at most, about {total:,} in all")
    if missing:
        estimate = seconds(experiment, missing)
        lines += [f"a short run failed: {why}" for why in estimate.failures]
        n = jobs or worth_processes(estimate.seconds, len(missing), cores)
        n = min(n, cores, len(missing))
        if estimate.n_tried:
            basis = f"from short runs of {_counted(estimate.n_tried, 'policy')}"
            lines.append(
                f"estimated time: {format_s(estimate.seconds / n)} on {_counted(n, 'process')}, without figures ({basis})"
            )
        else:
            lines.append("estimated time: unknown, since no policy could be tried")
    return "\n".join(lines) + "\n"


def _would_import(one: WouldImport) -> str:
    files = " and ".join(str(path) for path in one.files) or "which comes from no file"
    return f"would import and run {one.module} ({files}); it is neither checked nor tried here"


def _varying(rows: list[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    found = []
    for name in ("policy", *SETTINGS, *CACHE_SETTINGS):
        values = list(dict.fromkeys(row[name] for row in rows))
        if len(values) > 1 or name == "policy":
            shown = [value for value in values if value is not None or name not in CACHE_SETTINGS]  # each has one of the two
            found.append((name, [_written(name, value) for value in shown]))
    return found


def _written(name: str, value: Any) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)  # as in the file
    return format_size(value) if name == "cache_budget_bytes" else f"{value:g}" if isinstance(value, float) else str(value)


def _counted(n: int, what: str) -> str:
    many = {"policy": "policies", "process": "processes"}.get(what, f"{what}s")
    return f"{n} {what if n == 1 else many}"
