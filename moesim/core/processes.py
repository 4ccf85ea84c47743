"""How processes of this machine start: where Linux allows it, forked from one that has imported what all need and runs nothing.

That one imports for two seconds. A command that will need it begins it first, and imports its own modules meanwhile.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.context import BaseContext
from types import ModuleType

_IMPORTED = ["moesim.experiment.workers"]  # by the process that all others are forked from


def usable_cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def context() -> BaseContext:
    """Return how processes start.

    Not forked from this one, which may have threads. Every process maps the traces itself.
    """
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(_IMPORTED)
    return found


def prepare_processes(jobs: int | None) -> None:
    """Start the process that others will be forked from, if so many, or all cores, are several and it is used here."""
    if sys.platform == "linux" and (jobs or usable_cores()) > 1:
        from multiprocessing import forkserver

        context()
        with suppress(OSError), apart():  # without it the first run says what is wrong
            forkserver.ensure_running()


@contextmanager
def apart() -> Iterator[None]:
    """Keep processes that are started meanwhile from this one's Ctrl-C, for their pool ends them, and from its main module.

    What spawns a process has it import the program that was started, which none needs: the command line would double the time
    it takes, and a script that does not ask for its `__name__` would begin a sweep of its own.
    """
    main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if hasattr(signal, "pthread_sigmask") else None
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        if before is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
