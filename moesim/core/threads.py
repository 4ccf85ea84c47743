"""Threads for NumPy, hashing and unpacking."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_THREADS = 2  # each has arrays of its own

S = TypeVar("S")
T = TypeVar("T")


def in_threads(call: Callable[[S], T], things: Iterable[S], done: Callable[[], None] = lambda: None) -> list[T]:
    """Call a function with each of some things; results in their order, `done` after each."""
    found = []
    with ThreadPoolExecutor(_THREADS) as threads:
        for one in threads.map(call, things):
            found.append(one)
            done()
    return found
