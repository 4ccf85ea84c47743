"""Memory and workers of the real machine, and what makes the executions of each probe."""

from __future__ import annotations

from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

from moesim.core.output_folder import OutputFolder
from moesim.live.kernels.affinity import usable_cores
from moesim.live.kernels.machine import empty_gpu_caches
from moesim.live.kernels.workers import Done
from moesim.live.profiler.calls import (
    CHUNKS,
    Call,
    DenseCalls,
    Maker,
    copy_maker,
    crossing_maker,
    expert_maker,
    file_maker,
    flusher,
)
from moesim.live.profiler.files import TiledFile
from moesim.live.profiler.layout import Device
from moesim.live.profiler.machine import Arena, Machine, Ring
from moesim.live.profiler.needs import SENTINEL_COPY, pair_copy, subject_of
from moesim.live.profiler.plan import Plan
from moesim.live.profiler.probes import PARTS, Probe
from moesim.live.profiler.runtime import Runtime
from moesim.live.profiler.store import COMMAND

FILE = ".moesim-profile.tmp"


class Makers:
    """Memory and workers for the probes of a block, and what makes their executions; close it in the end."""

    def __init__(self, plan: Plan, machine: Machine) -> None:
        self._plan, self._machine = plan, machine
        self._devices, self._links = plan.layout.devices, plan.layout.links
        self._done: SimpleQueue[Done] = SimpleQueue()
        self._workers: dict[tuple[str, ...], Any] = {}
        self._streams: list[Any] | None = None
        self.disk_mode = ""
        self._clear()

    def _clear(self) -> None:
        self._runtimes: dict[str, Runtime] = {}
        self._rings: dict[tuple[str, float, str], Ring] = {}
        self._dense: dict[tuple[str, str], DenseCalls] = {}
        self._arenas: dict[tuple[str, bool], Arena] = {}
        self._flushes: dict[str, Call] = {}
        self._file: TiledFile | None = None
        self._made: dict[str, tuple[Any, Maker]] = {}

    def prepare(self, probes: Sequence[Probe]) -> None:
        """Have memory for some probes; what was prepared before is gone."""
        self.release()
        needs, machine, seed = self._plan.needs(probes), self._machine, self._plan.seed
        for place, turning in needs.turning.items():
            self._flushes[place] = flusher(machine, place, turning, seed)
        for (subject, bits, place), (shape, _) in needs.experts.items():
            self._rings[subject, bits, place] = machine.ring(shape, place, needs.turning[place], seed)
        for key, need in needs.dense.items():
            self._dense[key] = DenseCalls(machine, need, machine.dense(need, seed), self._flushes[need.place], seed)
        for name, size in needs.copies.items():
            place = self._devices[name].place
            if place != "disk":
                for pinned in (False, True) if place == "cpu" and self._plan.layout.has_gpu else (False,):
                    self._arenas[name, pinned] = machine.arena(max(size, needs.turning[place]), place, seed, pinned=pinned)
        if needs.file_bytes:
            assert self._plan.layout.disk is not None
            self._disk = OutputFolder(self._plan.layout.disk, COMMAND, owned=False)
            self._file = TiledFile(self._disk.grow(FILE), needs.file_bytes, seed)
            self.disk_mode = self._file.mode

    def release(self) -> None:
        """Give the memory back."""
        if self._file is not None:
            self._file.remove()
            self._disk.remove([FILE])
        for runtime in self._runtimes.values():
            runtime.close()
        self._clear()
        empty_gpu_caches()

    def close(self) -> None:
        """Give everything back and end the workers."""
        self.release()
        for worker in self._workers.values():
            worker.close()
        self._workers = {}

    # ------------------------------------------------------------------------------------------------------------ workers

    def _worker(self, key: tuple[str, ...], place: str, cores: Sequence[int] = (), threads: int = 1) -> Any:
        if key not in self._workers:
            self._workers[key] = self._machine.worker("-".join(key), self._done, place, cores, threads)
        return self._workers[key]

    def _device_worker(self, device: Device, threads: int | None = None, lane: str = "main") -> Any:
        n = threads or len(device.cores) or 1
        return self._worker((device.name, lane, str(n)), device.place, device.cores[:n], n)

    def _carrier(self, name: str) -> Any:
        link = self._links[name]
        places = [self._devices[end].place for end in link.ends]
        gpu = next((place for place in places if place.startswith("cuda")), "cpu")
        return self._worker(("link", link.medium or name), gpu, link.cores)

    def _coordinator(self) -> Any:
        """Stand for the thread that moves small things itself, on any core."""
        return self._worker(("coordinator",), "cpu", usable_cores())

    # ------------------------------------------------------------------------------------------------------------- probes

    def _maker(self, probe: Probe) -> tuple[Any, Maker]:
        """Find the worker of a probe, and what makes its executions."""
        if probe.id not in self._made:
            self._made[probe.id] = self._make(probe)
        return self._made[probe.id]

    def _make(self, probe: Probe) -> tuple[Any, Maker]:
        if probe.kind in ("copy", "disk_read", "disk_write"):
            return self._carrier(probe.device), self._copy(probe.device, probe.kind, probe.variant, probe.size)
        if probe.kind == "activation":
            src, dst = (self._devices[end].place for end in self._links[probe.device].ends)
            model = next(w.model for w in self._plan.wanted if not probe.size % w.model.activation_bytes(1))
            rows, shape = probe.size // model.activation_bytes(1), self._plan.wanted[0].shapes[0]
            dtype = self._machine.act_dtype(shape)
            return self._coordinator(), crossing_maker(self._machine, src, dst, rows, model.hidden, dtype)
        if probe.kind == "sentinel":
            shape = self._plan.wanted[0].shapes[0]
            if probe.subject == "copy":
                return self._carrier(probe.device), self._copy(probe.device, "copy", "pinned", SENTINEL_COPY)
            device = self._devices[probe.device]
            return self._device_worker(device), self._experts(subject_of(shape), shape.bits, device, 1)
        device = self._devices[probe.device]
        worker = self._device_worker(device, probe.threads)
        if probe.kind in PARTS:
            return worker, self._dense[probe.subject, device.place].maker(probe.kind, probe.size, probe.unit)
        assert probe.bits is not None
        if probe.kind == "expert_first":
            busy = self._dense[self._plan.wanted[0].model.name, device.place].busy()
            return worker, self._experts(probe.subject, probe.bits, device, probe.size, (busy,))
        return worker, self._experts(probe.subject, probe.bits, device, probe.size)

    def _experts(self, subject: str, bits: float, device: Device, rows: int, before: tuple[Call, ...] = ()) -> Maker:
        return expert_maker(self._machine, self._rings[subject, bits, device.place], device.place, rows, before)

    def _copy(self, name: str, kind: str, variant: str, size: int) -> Maker:
        src, dst = self._links[name].ends
        if self._file is not None and "disk" in (self._devices[src].place, self._devices[dst].place):
            arena = self._arenas[dst if self._devices[src].place == "disk" else src, False]
            return file_maker(self._file, arena, size, kind, variant, self._flushes["cpu"])
        pinned = self._plan.layout.has_gpu and variant != "pageable"
        origin, target = (self._arenas.get((end, pinned)) or self._arenas[end, False] for end in (src, dst))
        return copy_maker(origin, target, size, self._chunk_streams() if variant == "chunked" else None)

    def _chunk_streams(self) -> list[Any]:
        if self._streams is None:
            gpu = next(device.place for device in self._devices.values() if device.kind == "gpu")
            self._streams = self._machine.streams(gpu, CHUNKS)
        return self._streams

    def _activity(self, activity: str) -> tuple[Any, Maker]:
        """Find the worker of an activity of a pair, and what makes its executions: it reads weights and does little else."""
        wanted = self._plan.wanted[0]
        shape = wanted.shapes[0]
        if activity in self._links:
            ends = [self._devices[end].place for end in self._links[activity].ends]
            kind = ("disk_read" if ends[0] == "disk" else "disk_write") if "disk" in ends else "copy"
            return self._carrier(activity), self._copy(activity, kind, "pinned", pair_copy(shape))
        name, _, what = activity.partition(".")
        device = self._devices[name]
        if what == "experts":
            return self._device_worker(device), self._experts(subject_of(shape), shape.bits, device, 1)
        dense = self._dense[wanted.model.name, device.place]
        if what == "side":
            return self._device_worker(device, lane="side"), dense.maker("predict", 1, "rows")
        return self._device_worker(device), dense.both()
