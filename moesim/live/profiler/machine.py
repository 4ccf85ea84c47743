"""The machine as the bench uses it: workers, buffers and kernels in the places of a layout."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

from moesim.live.kernels.affinity import usable_cores
from moesim.live.kernels.buffers import Buffers
from moesim.live.kernels.dense import DenseKernel
from moesim.live.kernels.expert import ExpertKernel
from moesim.live.kernels.fill import byte_block, generator, tile
from moesim.live.kernels.machine import (
    gpu_power_w,
    joules_between,
    package_energy_uj,
)
from moesim.live.kernels.plans import ExpertShape
from moesim.live.kernels.streams import CudaStreamWorker
from moesim.live.kernels.tensors import Tensors
from moesim.live.kernels.workers import Done, Worker
from moesim.live.profiler.host import Host, index_of
from moesim.live.profiler.layout import Device
from moesim.live.profiler.needs import DenseNeed, ring_length

_POWER_S = 1.0  # over which power is taken


class Ring:
    """Experts of one shape in buffers that take turns, so that their weights have left the cache when they come again."""

    def __init__(self, shape: ExpertShape, place: str, turning: int, seed: int) -> None:
        self.kernel = ExpertKernel(shape, place)
        self._buffers = Buffers(ring_length(shape.n_bytes, turning), shape.n_bytes, place)
        for i in range(len(self._buffers)):
            self.kernel.fill(self._buffers[i], seed + i)
        self._turn = 0

    def next(self) -> Any:
        """Bind the expert whose turn it is."""
        self._turn = (self._turn + 1) % len(self._buffers)
        return self.kernel.bind(self._buffers[self._turn])


class Arena:
    """One large buffer of which copies of any size take turns."""

    def __init__(self, n_bytes: int, place: str, seed: int, *, pinned: bool = False) -> None:
        self.n_bytes = n_bytes
        self._flat = Buffers(1, self.n_bytes, place, pinned=pinned)[0]
        tile(self._flat, byte_block(generator(seed)))  # pages that were never written are all the same one

    def part(self, turn: int, n_bytes: int) -> Any:
        """Give the next piece of so many bytes, on a page of its own."""
        stride = -(-n_bytes // 4096) * 4096
        start = turn % max(1, self.n_bytes // stride) * stride
        return self._flat[start : start + n_bytes]


class Machine(Host):
    """The real machine. Nothing here changes any of its settings."""

    def __init__(self) -> None:
        self.tensors = Tensors({})

    def at(self, place: str) -> str:
        """Tell what PyTorch calls a place of the layout."""
        return place

    def worker(self, name: str, done: SimpleQueue[Done], place: str, cores: Sequence[int], threads: int) -> Any:
        """Make a worker: threads on cores (none given: on any), or a stream of a GPU."""
        if place.startswith("cuda"):
            return CudaStreamWorker(name, done, place)
        return Worker(name, done, cores or usable_cores(), threads)

    def streams(self, place: str, n: int) -> list[Any]:
        """Make further streams of a GPU."""
        return list(self.tensors.streams(n, [self.at(place)]))

    def ring(self, shape: ExpertShape, place: str, turning: int, seed: int) -> Ring:
        """Fill a ring of experts."""
        return Ring(shape, self.at(place), turning, seed)

    def act_dtype(self, shape: ExpertShape) -> Any:
        """Tell the type of the hidden states beside experts of a shape."""
        return ExpertKernel(shape).act_dtype

    def arena(self, n_bytes: int, place: str, seed: int, *, pinned: bool = False) -> Arena:
        """Fill an arena of copies."""
        return Arena(n_bytes, self.at(place), seed, pinned=pinned)

    def dense(self, need: DenseNeed, seed: int) -> DenseKernel:
        """Make the dense part of a model."""
        return DenseKernel(need.model, self.at(need.place), seed=seed, **need.options)  # type: ignore[arg-type]

    def power_w(self, device: Device, during: Callable[[float], None]) -> float | None:
        """Read the power of a device while something is done for the seconds that it is told; None where it cannot be read."""
        if device.kind == "gpu":
            with ThreadPoolExecutor(1) as beside:  # it is read while something goes on, not after it
                reading = beside.submit(_read_power, index_of(device), _POWER_S)
                during(_POWER_S)
                known = sorted(watts for watts in reading.result() if watts is not None)
            return known[len(known) // 2] if known else None
        before, began = package_energy_uj(), time.monotonic()
        during(_POWER_S)
        after, seconds = package_energy_uj(), time.monotonic() - began
        return joules_between(before, after) / seconds if before and after else None


def _read_power(index: int, seconds: float) -> list[float | None]:
    """Read a GPU's power a few times, evenly spread over some seconds, without the first fifth."""
    readings = []
    for _ in range(3):
        time.sleep(seconds / 5)
        readings.append(gpu_power_w(index))
    return readings
