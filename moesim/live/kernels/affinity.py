"""Which cores the calling thread may run on."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


def usable_cores() -> list[int]:
    """List the cores that the calling thread may run on, ascending."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def pin(cores: Sequence[int]) -> bool:
    """Keep the calling thread on some cores from now on; threads that it starts inherit them."""
    if not hasattr(os, "sched_setaffinity"):
        return False
    os.sched_setaffinity(0, cores)  # 0 is the calling thread, not the process, on Linux
    return True


@contextmanager
def pinned(cores: Sequence[int]) -> Iterator[bool]:
    """Keep the calling thread on some cores for the length of a block."""
    before = usable_cores()
    done = pin(cores)
    try:
        yield done
    finally:
        if done:
            pin(before)
