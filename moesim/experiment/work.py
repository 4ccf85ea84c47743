"""One run as a piece of work for any process: what it needs travels with it, but for the trace, which each process maps once."""

from __future__ import annotations

import os
import platform
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import TYPE_CHECKING

from moesim.core import collector
from moesim.core.output_folder import OutputFolder
from moesim.errors import InputError, SimulationError, TraceError
from moesim.experiment.keys import code_digest
from moesim.experiment.result import DATASET, OWNER
from moesim.experiment.runner import Examine, Kept, run_one
from moesim.experiment.traces import GIVEN
from moesim.metrics.outcome import Outcome
from moesim.policies.imports import code_names
from moesim.policies.sources import sources_digest
from moesim.trace import Trace, find_trace
from moesim.trace.workload import Workload, WorkloadSpec, compose

if TYPE_CHECKING:
    from moesim.experiment.resolve import Experiment
    from moesim.experiment.spec import RunSpec

_MADE = f"{DATASET}/.traces"  # made-up routing, in the folder that all processes see; readers of datasets pass over it
_TRACES = 8  # mapped ones that a process remembers: a cluster's worker outlives many sweeps
_WORKLOADS = 8  # composed ones; neighbours in a grid share them


class RefusedError(SimulationError):
    """A worker is not fit for the runs of a sweep: it would fail them all, and quickly, so the sweep must end."""


@dataclass(frozen=True)
class Work:
    """A run to carry out: the inputs of one run, as `moesim.experiment.runner.run_one` asks for them."""

    spec: RunSpec  # with model and machine
    place: str  # the experiment, for messages
    trace_path: str
    # as the experiment has it, for a process where it lies elsewhere; None: routing made up for the experiment
    trace_name: str | None
    trace_digest: str  # what the file must hold
    required: frozenset[str]  # signals that every request must have
    keep: Kept  # which records are wanted
    examine: Examine | None  # what to look for in them
    code: str  # digest of the code that asks; another one may not answer
    policy_source: str | None  # likewise of the policy's source, if it is not moesim's own

    def trace(self, spec: RunSpec) -> Trace:
        """Map the trace, unless this process has."""
        if self.trace_digest not in _traces:
            trace = Trace.read(_find(self), verify=False)  # who asks has; here it must only be the same
            if trace.digest != self.trace_digest:
                raise TraceError(
                    f"{self.trace_path}: expected the trace that the sweep began with ({self.trace_digest[:12]}), "
                    f"got another ({trace.digest[:12]})"
                )
            _traces[self.trace_digest] = trace
            if len(_traces) > _TRACES:
                _traces.popitem(last=False)
        _traces.move_to_end(self.trace_digest)
        return _traces[self.trace_digest]

    def workload(self, spec: RunSpec) -> Workload:
        """Compose the workload, unless this process has."""
        return self._composed(spec, self._composed(spec, spec.workload).within(spec.prompt_rows))

    def _composed(self, spec: RunSpec, asked: WorkloadSpec) -> Workload:
        key = (self.trace_digest, asked, self.required)
        if key not in _workloads:
            _workloads[key] = compose(self.trace(spec), asked, require_signals=self.required)
            if len(_workloads) > _WORKLOADS:
                _workloads.popitem(last=False)
        _workloads.move_to_end(key)
        return _workloads[key]

    def signals(self, spec: RunSpec) -> frozenset[str]:
        """Name the recorded signals that every request must have."""
        return self.required


_traces: OrderedDict[str, Trace] = OrderedDict()  # of this process, by digest
_workloads: OrderedDict[tuple[str, WorkloadSpec, frozenset[str]], Workload] = OrderedDict()


@contextmanager
def work_of(experiment: Experiment, shared: Path | None) -> Iterator[WorkMaker]:
    """Prepare the runs of an experiment for other processes: made-up routing becomes a file that they can map."""
    if shared is None:
        with TemporaryDirectory(prefix="moesim.", ignore_cleanup_errors=True) as folder:
            yield WorkMaker(experiment, Path(folder))
        return
    maker = WorkMaker(experiment, shared.absolute(), OutputFolder(shared.absolute(), OWNER))
    try:
        yield maker
    finally:
        maker.remove()


class WorkMaker:
    """Makes `Work` of the runs of an experiment; see `work_of`."""

    def __init__(self, experiment: Experiment, folder: Path, shared: OutputFolder | None = None) -> None:
        self._experiment = experiment
        self._folder = folder
        self._shared = shared
        self._made: set[str] = set()
        # As of now: a policy that is changed in mid-sweep is another one.
        self._sources = {names: sources_digest(names) for names in {code_names(spec.point.policy) for spec in experiment.specs}}
        self._paths: dict[str, Path] = {}

    def __call__(self, spec: RunSpec, keep: Kept, examine: Examine | None = None) -> Work:
        experiment = self._experiment
        written, digest = spec.point.trace, experiment.trace(spec).digest
        name = written if isinstance(written, str) and not written.startswith(GIVEN) else None
        if name is None:
            path = self._write(experiment.trace(spec))
        elif name in self._paths:
            path = self._paths[name]
        else:
            path = self._paths[name] = find_trace(name).absolute()
        policy = code_names(spec.point.policy)
        if policy not in self._sources:  # an oracle's, which the experiment does not name
            self._sources[policy] = sources_digest(policy)
        return Work(
            spec, experiment.place, str(path), name, digest, experiment.signals(spec), keep, examine, code_digest(),
            self._sources[policy],
        )  # fmt: skip

    def _write(self, trace: Trace) -> Path:
        name = f"{_MADE}/{trace.digest}.safetensors"
        path = self._folder / name
        if name in self._made and path.is_file():  # a sweep beside this one may have removed it
            return path
        self._made.add(name)
        if self._shared is None:
            return trace.write(path)
        with TemporaryDirectory(prefix="moesim.") as folder:
            self._shared.put({name: trace.write(Path(folder, "made.safetensors"))}, tidy=False)
        return path

    def remove(self) -> None:
        """Remove the files that were made."""
        if self._shared is not None:
            self._shared.remove(self._made)


def _find(work: Work) -> Path:
    """Give the trace's file where it was; or, a shipped one, where this process has it."""
    path = Path(work.trace_path)
    if not path.exists() and work.trace_name is not None:
        with suppress(TraceError):
            return find_trace(work.trace_name)
    return path


_one_at_a_time = Lock()  # a worker with threads: they share what is remembered, and would gain nothing
_source = cache(sources_digest)  # of what has been imported, whatever becomes of the file


def do(work: Work) -> Outcome:
    """Carry out a run in this process."""
    with _one_at_a_time, collector.paused():
        _check(work)
        return run_one(work, work.spec, keep=work.keep, examine=work.examine)


def _check(work: Work) -> None:
    who = f"worker {platform.node()}, process {os.getpid()}"
    if work.code != code_digest():
        raise RefusedError(
            f"{who}: expected moesim's code {work.code[:12]}, got {code_digest()[:12]}; install the same versions of moesim, "
            "NumPy, SciPy and SimPy for all workers, start them again, and run the same command again to go on"
        )
    name = work.spec.point.policy["name"]
    try:
        source = _source(code_names(work.spec.point.policy))
        work.trace(work.spec)
    except InputError as error:
        raise RefusedError(
            f"{who}: {error}; all workers must see the traces, the result folder and modules of policies under the same paths, "
            "see docs/guide/cluster.md; run the same command again to go on"
        ) from None
    if source != work.policy_source:
        raise RefusedError(
            f"{who}: policy {name}: expected the source that the sweep began with, got another; start the workers again, in "
            "the same folder, and run the same command again to go on"
        )
