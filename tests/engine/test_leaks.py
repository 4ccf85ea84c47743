"""The native engine gives the memory of a run back."""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import pytest

from moesim.engine.native import AVAILABLE
from moesim.policies.registry import make_policy
from moesim.testing import run_tiny, tiny_workload

NAMES = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
POLICIES = ("lru", "hybrimoe-code", "prescope", "zero-inference")


class Heap(ctypes.Structure):
    """What glibc says of its heap."""

    _fields_ = [(name, ctypes.c_size_t) for name in NAMES]


def in_use() -> int:
    """Ask glibc for the bytes in use; where it is not, always 0."""
    heap = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if heap is None:
        return 0
    heap.restype = Heap
    return int(heap().uordblks)


def is_counted() -> bool:
    """Say whether glibc's heap is the one that is used; a sanitizer has its own."""
    before = in_use()
    held = bytearray(50_000)
    return in_use() - before >= len(held)


def grown(n: int) -> float:
    """Return by how many bytes a run the heap grows: decided in C++, by Python with compiled twins, and with streamed weights."""
    before = 0
    for at in range(-n, n):  # the first half fills what is kept for later runs
        for name in POLICIES:
            policy = make_policy(name)
            run_tiny(policy, tiny_workload(policy))
        if at == -1:
            gc.collect()
            before = in_use()
    gc.collect()
    return (in_use() - before) / (n * len(POLICIES))


def test_runs_leave_nothing_on_the_heap(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if engine == "simpy" or not AVAILABLE or not is_counted():
        pytest.skip("measures the native engine, where glibc counts its heap")
    from moesim.engine.native._native import Engine

    assert grown(4) < 1000
    kept: list[Any] = []
    monkeypatch.setattr(Engine, "close", lambda self, close=Engine.close: kept.append(self) or close(self))
    assert grown(4) > 5000
