"""Where the runs of a sweep are computed: processes of this machine or a Dask cluster."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import platform
import threading
import time
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, CancelledError, Executor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

from moesim.core.files import OutputFolder
from moesim.core.processes import apart, context, paused
from moesim.core.text import note
from moesim.errors import ConfigError, InputError, SimulationError, TraceError, describe_exception, install
from moesim.experiment.routing import GIVEN
from moesim.experiment.runner import Examine, Kept, run_one
from moesim.experiment.store import DATASET, OWNER, code_digest
from moesim.metrics.machine import Machine
from moesim.metrics.outcome import Outcome
from moesim.policies.user_code import sources_digest
from moesim.serving import RequestFile, composed
from moesim.trace import Trace, find_trace
from moesim.trace.workload import Workload, WorkloadSpec
from moesim.trace.workload.spec import own_scheduler

if TYPE_CHECKING:
    from moesim.experiment.resolve import Experiment
    from moesim.experiment.sweep import RunSpec


P = ParamSpec("P")
T = TypeVar("T")


class Pool(Protocol):
    """Where runs go."""

    def submit(self, call: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> Future[T]:
        """Submit a run to a worker."""

    def room(self) -> int:
        """Return how many runs may be in flight now; it may change."""

    def died(self, error: BaseException) -> bool:
        """Return whether a worker died; raise any other error."""

    def close(self) -> None:
        """Stop at once: what is in flight is given up."""


class Processes:
    """Local processes, each an executor of its own, so that one that dies names the culprit."""

    def __init__(self, n: int) -> None:
        self._life, self._end = multiprocessing.Pipe(duplex=False)
        self._slots: list[tuple[Executor, Future[Any] | None]] = [(self._executor(), None) for _ in range(n)]

    def _executor(self) -> Executor:
        return ProcessPoolExecutor(1, context(), _begin, (self._life, dict(os.environ)))

    def submit(self, call: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> Future[T]:
        """Submit a run to an idle process, of which there must be one."""
        slot = next(i for i, (_, last) in enumerate(self._slots) if last is None or last.done())
        executor, _ = self._slots[slot]
        try:
            with apart():
                try:
                    future = executor.submit(_run_here, partial(call, *arguments, **options))
                except BrokenExecutor:  # its process has died
                    executor = self._executor()
                    future = executor.submit(_run_here, partial(call, *arguments, **options))
        except OSError as error:
            raise SimulationError(f"cannot start a process: {error.strerror or error}; take fewer with --jobs") from None
        self._slots[slot] = executor, future
        return future

    def room(self) -> int:
        return len(self._slots)

    def died(self, error: BaseException) -> bool:
        if isinstance(error, BrokenExecutor):
            return True
        raise error

    def close(self) -> None:
        self._end.close()
        for executor, _ in self._slots:
            executor.shutdown(wait=True, cancel_futures=True)
        self._life.close()


class _Working:
    """State of a process, which must not end while it sends an answer: its parent would hang."""

    change = threading.Lock()
    busy = over = False


def _run_here(call: Callable[[], T]) -> T:
    """Run in a process of `Processes`, which may end in the middle of it."""
    with _Working.change:
        if _Working.over:
            os._exit(1)
        _Working.busy = True
    try:
        return call()
    finally:
        with _Working.change:
            _Working.busy = False


def _begin(life: Connection, environment: dict[str, str]) -> None:
    """Take over the environment of the parent, for the fork server may have an older one."""
    os.environ.clear()
    os.environ.update(environment)
    gc.freeze()  # what has been imported stays: the collector need not look through it after every run
    _end_with(life)


def _end_with(life: Connection) -> None:
    """End this process when the other end of a pipe closes: its parent closed it, or was killed."""

    def wait() -> None:
        with suppress(EOFError, OSError):
            life.recv_bytes()
        with _Working.change:
            _Working.over = True
            if _Working.busy:
                os._exit(1)  # in the middle of a run
        if (parent := multiprocessing.parent_process()) is not None:
            parent.join()  # which ends this process once it has the answer, unless it was killed
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


class Cluster:
    """A Dask cluster, through the `concurrent.futures` interface of its client."""

    _WAIT_S = 10.0  # for the scheduler's answer
    _LEAST = 100  # runs given to the scheduler at least: an adaptive cluster grows by what is waiting
    _AHEAD = 2  # runs a worker has waiting or running: it is never idle, and little is sent in vain
    _LOOK_S = 1.0  # time after which workers are counted again

    def __init__(self, address: str) -> None:
        try:
            distributed: Any = import_module("distributed")
        except ImportError:
            raise ConfigError(
                f"--scheduler: expected Dask to be installed, got no module 'distributed'; {install('cluster')}"
            ) from None
        for name in ("distributed", "distributed.client", "distributed.gc", "tornado", "tornado.application", "asyncio"):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)  # what a user must know is said below, in one line
        self._address = address
        try:
            distributed.comm.resolve_address(address)  # a client with a wrong one hangs when it is thrown away
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about versions: those that matter are compared by each worker
                self._client = distributed.Client(address, timeout=self._WAIT_S, set_as_default=False, name="moesim")
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split()) or "no answer"
            raise ConfigError(
                f"--scheduler {address}: expected a Dask scheduler such as tcp://HOST:8786, got: {reason}; start one with "
                "'dask scheduler', or mend the address"
            ) from None
        self._executor: Executor = self._client.get_executor(pure=False)
        self._n_workers, self._looked, self._told = 1, float("-inf"), False

    def submit(self, call: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> Future[T]:
        """Submit a run to the scheduler, which moves it if its worker dies."""
        return self._executor.submit(call, *arguments, **options)

    def room(self) -> int:
        """Return twice the workers, and some for those that may come."""
        if time.monotonic() - self._looked > self._LOOK_S:
            try:
                threads = self._client.ncores()
            except (OSError, TimeoutError):
                raise self._lost() from None
            self._looked = time.monotonic()
            self._tell(threads)
            self._n_workers = len(threads)
        return max(self._LEAST, self._AHEAD * self._n_workers)

    def _tell(self, threads: dict[str, int]) -> None:
        if not threads and self._n_workers:
            note(f"moesim: {self._address}: no workers; waiting for some")
        if not self._told and any(n > 1 for n in threads.values()):
            self._told = True
            note(f"moesim: {self._address}: workers have several threads, whose runs take turns; start them with "
                  "--nworkers auto --nthreads 1")  # fmt: skip

    def _lost(self) -> SimulationError:
        return SimulationError(
            f"--scheduler {self._address}: lost the scheduler, or it was restarted; "
            "finished runs are kept, run the same command again to go on"
        )

    def died(self, error: BaseException) -> bool:
        if type(error).__name__ == "KilledWorker":
            return True
        if isinstance(error, CancelledError):
            raise self._lost()
        while error.__cause__ is not None:
            error = error.__cause__
        raise SimulationError(
            f"--scheduler {self._address}: expected runs to be carried out, got {describe_exception(error)}; install the same "
            "version of moesim for the scheduler and all workers, and run the same command again to go on"
        )

    def close(self) -> None:
        with suppress(OSError, TimeoutError):  # the scheduler is gone
            self._client.close()


def make_pool(jobs: int | None, scheduler: str | None, needed: Callable[[], int]) -> Pool | None:
    """Choose where runs are executed."""
    if scheduler is not None:
        if jobs is not None:
            raise ConfigError("--scheduler: expected no --jobs next to it, for the cluster's workers decide; leave one out")
        return Cluster(scheduler)
    n = needed() if jobs is None else jobs
    return Processes(n) if n > 1 else None


class Workers:
    """The processes of a command: started when they first save time, ended with the block."""

    def __init__(self, jobs: int | None, scheduler: str | None = None) -> None:
        self._jobs, self._scheduler = jobs, scheduler
        self.pool: Pool | None = None

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: object) -> None:
        if self.pool is not None:
            self.pool.close()

    def needed(self, worth: Callable[[], int]) -> Pool | None:
        """Return the processes, started now if as many are asked for or save time."""
        if self.pool is None:
            self.pool = make_pool(self._jobs, self._scheduler, worth)
        return self.pool

    def processes(self, worth: Callable[[], int]) -> Processes | None:
        pool = self.needed(worth) if self._scheduler is None else None
        return pool if isinstance(pool, Processes) else None


_MADE = f"{DATASET}/.traces"  # made-up routing, in the folder that all processes see; readers of datasets pass over it
_TRACES = 8  # mapped ones that a process remembers: a cluster's worker outlives many sweeps


class RefusedError(SimulationError):
    """A worker is not fit for any run of a sweep, so the sweep must end."""


@dataclass(frozen=True)
class Work:
    """A run to do in another process, with the inputs that `run_one` asks for."""

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
    policy_source: str | None  # likewise of the source of policy and scheduler, as far as they are not moesim's own

    def trace(self, spec: RunSpec) -> Trace:
        if self.trace_digest not in _traces:
            trace = Trace.read(_find_trace(self), verify=False)  # who asks has; here it must only be the same
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
        trace = self.trace(spec)
        asked = _composed(trace, spec.workload, spec.file, self.required).within(spec.prompt_rows)
        return _composed(trace, asked, spec.file, self.required)

    def signals(self, spec: RunSpec) -> frozenset[str]:
        return self.required


_traces: OrderedDict[str, Trace] = OrderedDict()  # of this process, by digest


@lru_cache(maxsize=8)  # neighbours in a grid share them
def _composed(trace: Trace, asked: WorkloadSpec, file: RequestFile | None, required: frozenset[str]) -> Workload:
    return composed(trace, asked, require_signals=required, file=file)


@contextmanager
def work_of(experiment: Experiment, shared: Path | None) -> Iterator[WorkMaker]:
    """Prepare runs for other processes: made-up routing becomes a file that they can map."""
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
        self._sources = {names: sources_digest(names) for names in {spec.point.code for spec in experiment.specs}}
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
        policy = spec.point.code
        if policy not in self._sources:  # an oracle's, which the experiment does not name
            self._sources[policy] = sources_digest(policy)
        return Work(
            spec, experiment.place, str(path), name, digest, experiment.signals(spec), keep, examine, code_digest(),
            self._sources[policy],
        )  # fmt: skip

    def _write(self, trace: Trace) -> Path:
        name = f"{_MADE}/{trace.digest}.safetensors"
        path = self._folder / name
        if name in self._made and path.is_file():  # a sweep next to this one may have removed it
            return path
        self._made.add(name)
        if self._shared is None:
            return trace.write(path)
        with TemporaryDirectory(prefix="moesim.") as folder:
            self._shared.put({name: trace.write(Path(folder, "made.safetensors"))})
        return path

    def remove(self) -> None:
        if self._shared is not None:
            self._shared.remove(self._made)


def _find_trace(work: Work) -> Path:
    """Return the trace's file where it was, or a shipped one where this process has it."""
    path = Path(work.trace_path)
    if not path.exists() and work.trace_name is not None:
        with suppress(TraceError):
            return find_trace(work.trace_name)
    return path


_one_at_a_time = Lock()  # a worker with threads: they share what is remembered, and would gain nothing
_source = cache(sources_digest)  # of what has been imported, whatever becomes of the file


def do(work: Work) -> Outcome:
    """Execute a run in this process."""
    with _one_at_a_time, paused():
        _check(work)
        return run_one(work, work.spec, keep=work.keep, examine=work.examine)


def _check(work: Work) -> None:
    who = f"worker {platform.node()}, process {os.getpid()}"
    if work.code != code_digest():
        raise RefusedError(
            f"{who}: expected moesim's code {work.code[:12]}, got {code_digest()[:12]}; install the same versions of moesim, "
            "NumPy, SciPy and SimPy for all workers, start them again, and run the same command again to go on"
        )
    point = work.spec.point
    names = " or scheduler ".join([f"policy {point.policy['name']}", *own_scheduler(point.workload)])
    try:
        source = _source(point.code)
        work.trace(work.spec)
    except InputError as error:
        raise RefusedError(
            f"{who}: {error}; all workers must see the traces, the result folder and modules of policies under the same paths, "
            "see docs/guide/cluster.md; run the same command again to go on"
        ) from None
    if source != work.policy_source:
        raise RefusedError(
            f"{who}: {names}: expected the source that the sweep began with, got another; start the workers again, in "
            "the same folder, and run the same command again to go on"
        )


_LOOK_S = 1.0  # time after which workers that have joined are given runs, even if none has finished one


def outcomes_of(
    specs: Sequence[RunSpec], make: Callable[[RunSpec], Work], pool: Pool, known: Callable[[RunSpec], Outcome | None]
) -> Iterator[tuple[RunSpec, Outcome]]:
    """Execute runs."""
    waiting: deque[RunSpec] = deque(specs)
    suspects: deque[RunSpec] = deque()
    tried: set[int] = set()
    running: dict[Future[Outcome], RunSpec] = {}
    done: list[tuple[RunSpec, Outcome]] = []
    while waiting or suspects or running:
        if not waiting and not running:
            waiting.append(suspects.popleft())
        room = pool.room()
        while waiting and len(running) < room:
            spec = waiting.popleft()
            if (outcome := known(spec)) is not None:
                yield spec, outcome
            else:
                running[pool.submit(do, make(spec))] = spec
        yield from done  # only now: workers are busy while these are stored
        done.clear()
        for future in wait(running, _LOOK_S, FIRST_COMPLETED).done:
            spec = running.pop(future)
            error = _error(future)
            if error is None:
                done.append((spec, future.result()))
            elif isinstance(error, RefusedError) or not pool.died(error):
                raise error
            elif spec.index in tried:
                failure = SimulationError("its worker process died, and again when it ran alone: killed, or out of memory")
                done.append((spec, Outcome({**spec.row(), "error": str(failure)}, Machine.of(spec.hardware), failure=failure)))
            else:
                tried.add(spec.index)
                suspects.append(spec)
    yield from done


def _error(future: Future[Any]) -> BaseException | None:
    try:
        return future.exception()
    except CancelledError as error:  # a cluster gave it up
        return error
