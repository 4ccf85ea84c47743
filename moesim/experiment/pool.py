"""Where the runs of a sweep are carried out: processes of this machine or a Dask cluster, both as `concurrent.futures`."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any, ParamSpec, Protocol, TypeVar

from moesim.core.processes import apart, context
from moesim.core.text import say
from moesim.errors import ConfigError, SimulationError, describe_exception

P = ParamSpec("P")
T = TypeVar("T")


class Pool(Protocol):
    """Where runs go."""

    def submit(self, call: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> Future[T]:
        """Give a run to a worker."""

    def room(self) -> int:
        """Say how many runs may be in flight now; it may change."""

    def died(self, error: BaseException) -> bool:
        """Say whether a run has no result because its worker died; raise what ends the sweep."""

    def close(self) -> None:
        """Stop at once: what is in flight is given up."""


class Processes:
    """Processes of this machine, each an executor of its own: one that dies takes no other with it, and names the culprit."""

    def __init__(self, n: int) -> None:
        self._life, self._end = multiprocessing.Pipe(duplex=False)
        self._slots: list[tuple[Executor, Future[Any] | None]] = [(self._executor(), None) for _ in range(n)]

    def _executor(self) -> Executor:
        return ProcessPoolExecutor(1, context(), _begin, (self._life, dict(os.environ)))

    def submit(self, call: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> Future[T]:
        """Give a run to a process that has none, of which there must be one; it starts with its first run."""
        slot = next(i for i, (_, last) in enumerate(self._slots) if last is None or last.done())
        executor, _ = self._slots[slot]
        try:
            with apart():
                try:
                    future = executor.submit(_work, partial(call, *arguments, **options))
                except BrokenExecutor:  # its process has died
                    executor = self._executor()
                    future = executor.submit(_work, partial(call, *arguments, **options))
        except OSError as error:
            raise SimulationError(f"cannot start a process: {error.strerror or error}; take fewer with --jobs") from None
        self._slots[slot] = executor, future
        return future

    def room(self) -> int:
        """Count the processes."""
        return len(self._slots)

    def died(self, error: BaseException) -> bool:
        """Say whether it is the error of a process that died."""
        if isinstance(error, BrokenExecutor):
            return True
        raise error

    def close(self) -> None:
        """End all processes."""
        self._end.close()
        for executor, _ in self._slots:
            executor.shutdown(wait=True, cancel_futures=True)
        self._life.close()


class _Working:
    """What a process does: it is not ended while it sends an answer, for its parent would wait for the other half for ever."""

    change = threading.Lock()
    busy = over = False


def _work(call: Callable[[], T]) -> T:
    """Do a run in a process of `Processes`, which may end in the middle of it."""
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
    """Take over the environment of the process that asks, for what this one is forked from may have an older one."""
    os.environ.clear()
    os.environ.update(environment)
    gc.freeze()  # what has been imported stays: the collector need not look through it after every run
    _end_with(life)


def _end_with(life: Connection) -> None:
    """End this process when the other end of a pipe is closed: by its parent, or by the system if the parent was killed."""

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
                "--scheduler: expected Dask to be installed, got no module 'distributed'; pip install 'moesim[cluster]'"
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
        """Give a run to the scheduler, which gives it to another worker if the first one dies."""
        return self._executor.submit(call, *arguments, **options)

    def room(self) -> int:
        """Count twice the workers there are now, and some for those that may come."""
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
            say(f"moesim: {self._address}: no workers; waiting for some")
        if not self._told and any(n > 1 for n in threads.values()):
            self._told = True
            say(f"moesim: {self._address}: workers have several threads, whose runs take turns; start them with "
                  "--nworkers auto --nthreads 1")  # fmt: skip

    def _lost(self) -> SimulationError:
        return SimulationError(
            f"--scheduler {self._address}: lost the scheduler, or it was restarted; "
            "finished runs are kept, run the same command again to go on"
        )

    def died(self, error: BaseException) -> bool:
        """Say whether it is the error of a run that the scheduler gave up because its workers died."""
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
        """Leave the cluster; its workers go on for others."""
        with suppress(OSError, TimeoutError):  # the scheduler is gone
            self._client.close()


def make_pool(jobs: int | None, scheduler: str | None, needed: Callable[[], int]) -> Pool | None:
    """Choose where runs are carried out."""
    if scheduler is not None:
        if jobs is not None:
            raise ConfigError("--scheduler: expected no --jobs beside it, for the cluster's workers decide; leave one out")
        return Cluster(scheduler)
    n = needed() if jobs is None else jobs
    return Processes(n) if n > 1 else None


class Workers:
    """The processes of a command: started when they are first worth while, ended with the block."""

    def __init__(self, jobs: int | None, scheduler: str | None = None) -> None:
        self._jobs, self._scheduler = jobs, scheduler
        self.pool: Pool | None = None

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: object) -> None:
        if self.pool is not None:
            self.pool.close()

    def needed(self, worth: Callable[[], int]) -> Pool | None:
        """Give the processes that there are, or start as many as are asked for, else as are worth while."""
        if self.pool is None:
            self.pool = make_pool(self._jobs, self._scheduler, worth)
        return self.pool

    def processes(self, worth: Callable[[], int]) -> Processes | None:
        """Give processes of this machine; none where those of a cluster were asked for."""
        pool = self.needed(worth) if self._scheduler is None else None
        return pool if isinstance(pool, Processes) else None
