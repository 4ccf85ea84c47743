"""Waiting for events. No test passes or fails by how long something takes: the only limit is for what hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

HANG_S = 900.0  # many times what anything takes on a busy machine; reached only by what would never end


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Wait for something that another process or thread does."""
    end = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < end, f"waited {HANG_S:g} s in vain: {what}"
        time.sleep(0.01)


class Clock:
    """Stands for the module ``time``: its time goes on by a nanosecond with each look, and by what a test says."""

    def __init__(self) -> None:
        self._now_ns = 1_000_000_000
        self._lock = threading.Lock()

    def perf_counter_ns(self) -> int:
        return self.advance(1)

    def perf_counter(self) -> float:
        return self.advance(1) / 1e9

    monotonic = perf_counter

    def advance(self, ns: int) -> int:
        """Let time go on, and tell it."""
        with self._lock:
            self._now_ns += ns
            return self._now_ns

    def reach(self, ns: int) -> None:
        """Let time go on to a moment, unless it is over."""
        with self._lock:
            self._now_ns = max(self._now_ns, ns)
