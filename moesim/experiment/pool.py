"""Where the runs of a sweep are carried out: processes of this machine or a Dask cluster, both as `concurrent.futures`."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor
from typing import Any, Protocol

from moesim.errors import ConfigError, SimulationError


class Pool(Protocol):
    """Where runs go."""

    def executor(self) -> Executor:
        """Give what takes work; a new one after `renew`."""

    def width(self) -> int:
        """Say how many runs go on at once; it may change."""

    def renew(self) -> None:
        """Start anew after workers have died."""

    def close(self) -> None:
        """Stop; what has not begun never will."""


def usable_cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Processes:
    """Processes of this machine.

    Parameters
    ----------
    n : int
        How many.
    """

    def __init__(self, n: int) -> None:
        self._n = n
        self._pool: ProcessPoolExecutor | None = None

    def executor(self) -> Executor:
        """Give the pool of processes; they start with the first work."""
        if self._pool is None:
            # Spawned, not forked: the parent may have threads, and every process maps the traces itself.
            self._pool = ProcessPoolExecutor(self._n, multiprocessing.get_context("spawn"))
        return self._pool

    def width(self) -> int:
        """Say how many processes there are."""
        return self._n

    def renew(self) -> None:
        """Forget processes that have died."""
        self.close()
        self._pool = None

    def close(self) -> None:
        """Stop once the runs in flight are done."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)


class Cluster:
    """A Dask cluster, through the `concurrent.futures` interface of its client.

    Parameters
    ----------
    address : str
        Of the scheduler, such as ``tcp://10.0.0.1:8786``.

    Raises
    ------
    ConfigError
        If Dask is not installed, or no scheduler answers.
    """

    _WAIT_S = 10

    def __init__(self, address: str) -> None:
        try:
            import distributed
        except ImportError:
            raise ConfigError(
                "--scheduler: expected Dask to be installed, got no module 'distributed'; pip install 'moesim[cluster]'"
            ) from None
        try:
            self._client: Any = distributed.Client(  # type: ignore[no-untyped-call]
                address, timeout=self._WAIT_S, set_as_default=False
            )
        except (OSError, ValueError, TimeoutError) as error:
            reason = " ".join(str(error).split()) or "no answer"
            raise ConfigError(
                f"--scheduler {address}: expected a Dask scheduler such as tcp://HOST:8786, got: {reason}; start one with "
                "'dask scheduler', or mend the address"
            ) from None
        self.address = address
        self._executor: Executor | None = None

    def executor(self) -> Executor:
        """Give the client's executor: a run whose worker dies is given to another one by the scheduler."""
        if self._executor is None:
            self._executor = self._client.get_executor(pure=False)
        assert self._executor is not None
        return self._executor

    def width(self) -> int:
        """Count the workers there are now; at least 1, for some may still come. More threads than one a worker are of no use."""
        return max(1, len(self._client.ncores()))

    def renew(self) -> None:
        """Fail: a scheduler that is gone does not come back."""
        raise SimulationError(f"{self.address}: lost the scheduler; finished runs are kept, run the same command again to go on")

    def close(self) -> None:
        """Leave the cluster; its workers go on for others."""
        self._client.close()


def make_pool(jobs: int | None, scheduler: str | None, needed: Callable[[], int]) -> Pool | None:
    """Choose where runs are carried out.

    Parameters
    ----------
    jobs : int or None
        Processes; None: as many as are worth it.
    scheduler : str or None
        Address of a Dask scheduler.
    needed : callable
        How many processes are worth it, asked for if `jobs` is None.

    Returns
    -------
    Pool or None
        None: in this process, one after another.

    Raises
    ------
    ConfigError
        If both are given, or as of `Cluster`.
    """
    if scheduler is not None:
        if jobs is not None:
            raise ConfigError("--scheduler: expected no --jobs beside it, for the cluster's workers decide; leave one out")
        return Cluster(scheduler)
    n = needed() if jobs is None else jobs
    return Processes(n) if n > 1 else None
