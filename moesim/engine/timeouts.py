"""The unit in which the engine's own speed is told: what SimPy does when it does nothing else."""

from __future__ import annotations

from collections.abc import Generator
from time import perf_counter
from typing import Any

from simpy import Environment


def bare_timeouts(n: int) -> float:
    """Time one process, in s, that yields ``timeout(1)`` on an otherwise empty heap."""
    env = Environment()

    def process() -> Generator[Any, None, None]:
        for _ in range(n):
            yield env.timeout(1)

    env.process(process())
    began = perf_counter()
    env.run()
    return perf_counter() - began
