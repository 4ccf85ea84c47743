"""Processes, threads and the cycle collector.

On Linux processes are forked from one that has imported what all need; that takes two seconds, so a command begins it first.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from multiprocessing.context import BaseContext

_IMPORTED = ["moesim.experiment.workers"]  # by the process that all others are forked from


def usable_cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def context() -> BaseContext:
    """Return how processes start: not forked from this one, which may have threads."""
    import multiprocessing  # the engine imports this module, too

    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(_IMPORTED)
    return found


def prepare_processes(jobs: int | None) -> None:
    """Start the process that others are forked from, if several jobs are to run."""
    if sys.platform == "linux" and (jobs or usable_cores()) > 1:
        from multiprocessing import forkserver

        context()
        with suppress(OSError), apart():  # without it the first run says what is wrong
            forkserver.ensure_running()


@contextmanager
def apart() -> Iterator[None]:
    """Shield processes started meanwhile from Ctrl-C and from the main module."""
    # A spawned process imports the program that was started: the command line would double its time,
    # and a script without a check of __name__ would begin a sweep of its own.
    main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if hasattr(signal, "pthread_sigmask") else None
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        if before is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


_THREADS = 2  # each has arrays of its own

S = TypeVar("S")
T = TypeVar("T")


def in_threads(call: Callable[[S], T], things: Iterable[S], done: Callable[[], None] = lambda: None) -> list[T]:
    """Call a function with each of some things; results in their order, `done` after each."""
    from concurrent.futures import ThreadPoolExecutor

    found = []
    with ThreadPoolExecutor(_THREADS) as threads:
        for one in threads.map(call, things):
            found.append(one)
            done()
    return found


@contextmanager
def paused() -> Iterator[None]:
    """Pause the cycle collector: a run leaves some hundred thousand tuples and no cycles."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
