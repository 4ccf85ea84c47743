"""Keep Python's cycle collector out of work that makes many small objects and no cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """Pause the collector, and let it go on as before.

    A run leaves some hundred thousand tuples; looking through all of them again and again took longer than the metrics
    that are made of them. None of them are in cycles, so reference counts free them.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
