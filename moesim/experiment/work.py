"""One run as a piece of work for any process: what it needs travels with it, but for the trace, which each process maps once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import TYPE_CHECKING

from moesim import collector
from moesim.errors import SimulationError, TraceError
from moesim.experiment.keys import code_digest
from moesim.experiment.runner import Outcome, run_one
from moesim.trace import Trace, find_trace
from moesim.workload import Workload, WorkloadSpec, compose

if TYPE_CHECKING:
    from moesim.experiment.resolve import Experiment, RunSpec

_WORKLOADS = 8  # composed ones that a process remembers; neighbours in a grid share them


@dataclass(frozen=True)
class Work:
    """A run to carry out.

    Attributes
    ----------
    spec : RunSpec
        With model and machine.
    place : str
        The experiment, for messages.
    trace : str
        Path of the trace's file.
    trace_digest : str
        What the file must hold.
    required : frozenset of str
        Signals that every request must have.
    keep : bool
        Whether records are wanted.
    code : str
        Digest of the code that asks; another one may not answer.
    """

    spec: RunSpec
    place: str
    trace: str
    trace_digest: str
    required: frozenset[str]
    keep: bool
    code: str


@contextmanager
def work_of(experiment: Experiment, shared: Path | None) -> Iterator[WorkMaker]:
    """Prepare the runs of an experiment for other processes: made-up routing becomes a file that they can map.

    Parameters
    ----------
    experiment : Experiment
        Resolved.
    shared : Path or None
        A folder that all of those processes see; None: a temporary one of this machine.

    Yields
    ------
    WorkMaker
        Good until the end of the block.
    """
    if shared is not None:
        shared.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=shared, prefix=".traces.") as folder:
        yield WorkMaker(experiment, Path(folder).absolute())


class WorkMaker:
    """Makes `Work` of the runs of an experiment; see `work_of`."""

    def __init__(self, experiment: Experiment, folder: Path) -> None:
        self._experiment = experiment
        self._folder = folder
        self._paths: dict[str, str] = {}  # by digest

    def __call__(self, spec: RunSpec, keep: bool) -> Work:
        experiment = self._experiment
        digest = experiment.trace(spec).digest
        if digest not in self._paths:
            self._paths[digest] = self._path(spec, digest)
        return Work(
            spec, experiment.place, self._paths[digest], digest, experiment.signals(spec), keep, code_digest()
        )  # fmt: skip

    def _path(self, spec: RunSpec, digest: str) -> str:
        written = spec.point.trace
        if isinstance(written, str):
            return str(Path(find_trace(written)).absolute())
        return str(self._experiment.trace(spec).write(self._folder / f"{digest}.safetensors"))


class _Inputs:
    """What runs of one process share."""

    def __init__(self) -> None:
        self.traces: dict[str, Trace] = {}  # by digest
        self.workloads: OrderedDict[tuple[str, WorkloadSpec, frozenset[str]], Workload] = OrderedDict()

    def trace(self, work: Work) -> Trace:
        if work.trace_digest not in self.traces:
            trace = Trace.read(work.trace)
            if trace.digest != work.trace_digest:
                raise TraceError(
                    f"{work.trace}: expected the trace that the sweep began with ({work.trace_digest[:12]}), "
                    f"got another ({trace.digest[:12]}); run the sweep again"
                )
            self.traces[work.trace_digest] = trace
        return self.traces[work.trace_digest]

    def workload(self, work: Work) -> Workload:
        key = (work.trace_digest, work.spec.workload, work.required)
        if key not in self.workloads:
            self.workloads[key] = compose(self.trace(work), work.spec.workload, require_signals=work.required)
            if len(self.workloads) > _WORKLOADS:
                self.workloads.popitem(last=False)
        self.workloads.move_to_end(key)
        return self.workloads[key]


_shared = _Inputs()  # of this process
_one_at_a_time = Lock()  # a worker with threads: they share what is remembered, and would gain nothing


@dataclass(frozen=True)
class _OneRun:
    """The inputs of one run, as `moesim.experiment.runner.run_one` asks for them."""

    work: Work

    @property
    def place(self) -> str:
        return self.work.place

    def trace(self, spec: RunSpec) -> Trace:
        return _shared.trace(self.work)

    def workload(self, spec: RunSpec) -> Workload:
        return _shared.workload(self.work)

    def signals(self, spec: RunSpec) -> frozenset[str]:
        return self.work.required


def do(work: Work) -> Outcome:
    """Carry out a run in this process.

    Parameters
    ----------
    work : Work
        The run.

    Returns
    -------
    Outcome
        Of a failed run too.

    Raises
    ------
    SimulationError
        If this process has another version of moesim than the one that asks.
    """
    if work.code != code_digest():
        raise SimulationError(
            f"worker: expected moesim's code {work.code[:12]}, got {code_digest()[:12]}; install the same version on all workers"
        )
    with _one_at_a_time, collector.paused():
        return run_one(_OneRun(work), work.spec, keep=work.keep)
