"""Bench of the real machine: memory and workers for a block's probes, and their times."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from moesim.core.files import OutputFolder
from moesim.errors import LiveError, MoesimError, describe_exception
from moesim.live.kernels import memory
from moesim.live.kernels.dense import DenseKernel
from moesim.live.kernels.experts import ExpertKernel, serve
from moesim.live.kernels.host import empty_gpu_caches, gpu_power_w, joules_between, package_energy_uj, usable_cores
from moesim.live.kernels.memory import Buffers, FileExperts, byte_block, copy, copy_in_chunks, generator, tile
from moesim.live.kernels.plans import ExpertShape
from moesim.live.kernels.workers import CudaStreamWorker, Done, Worker
from moesim.live.profiler.plan import Plan, pair_runs
from moesim.live.profiler.probes import (
    CONTEXT,
    FILE_BLOCK,
    FOLLOWING,
    PARTS,
    SENTINEL_COPY,
    DenseNeed,
    Device,
    Host,
    Probe,
    Reading,
    flush_bytes,
    index_of,
    pair_copy,
    ring_length,
    sequences_of,
    subject_of,
)
from moesim.live.profiler.runtime import Runtime
from moesim.live.profiler.samples import COMMAND

_SHAPE = ExpertShape(4096, 4096, 16, 2, FILE_BLOCK)  # two matrices that are exactly one block


class TiledFile:
    """Random bytes in a file, in pieces."""

    def __init__(self, path: Path, n_bytes: int, seed: int) -> None:
        path.unlink(missing_ok=True)  # of a measurement that was killed
        self._n_bytes = n_bytes
        self._first = FileExperts.create(path, n_bytes // FILE_BLOCK, FILE_BLOCK, ExpertKernel(_SHAPE).fill, seed)
        self._tiled: dict[int, FileExperts] = {}
        self._buffered = -1

    @property
    def mode(self) -> str:
        return self._first.mode

    def _of(self, size: int) -> FileExperts:
        if size not in self._tiled:
            self._tiled[size] = FileExperts(self._first.path, self._n_bytes // size, size)
        return self._tiled[size]

    def _piece(self, turn: int, size: int) -> int:
        """Scatter the pieces over the file: an odd factor reaches each of a power of two once."""
        return turn * 0x9E3779B1 % (self._n_bytes // size)

    def read(self, turn: int, part: Any) -> None:
        self._of(len(part)).read(self._piece(turn, len(part)), part)

    def write(self, turn: int, part: Any) -> None:
        self._of(len(part)).write(self._piece(turn, len(part)), part)

    def read_cached(self, turn: int, part: Any) -> None:
        if self._buffered < 0:
            self._buffered = os.open(self._first.path, os.O_RDONLY)
        data, offset = part.numpy().data, self._piece(turn, len(part)) * len(part)
        memory.transfer(self._buffered, data, offset, write=False)

    def remove(self) -> None:
        if self._buffered >= 0:
            os.close(self._buffered)
            self._buffered = -1
        for file in self._tiled.values():
            file.close()
        self._first.remove()


_POWER_S = 1.0  # over which power is taken


class Ring:
    """Experts of one shape in buffers that take turns, so that none is still in a cache."""

    def __init__(self, shape: ExpertShape, place: str, turning: int, seed: int) -> None:
        self.kernel = ExpertKernel(shape, place)
        self._buffers = Buffers(ring_length(shape.n_bytes, turning), shape.n_bytes, place)
        for i in range(len(self._buffers)):
            self.kernel.fill(self._buffers[i], seed + i)
        self._turn = 0

    def next(self) -> Any:
        self._turn = (self._turn + 1) % len(self._buffers)
        return self.kernel.bind(self._buffers[self._turn])


class Arena:
    """One large buffer of which copies of any size take turns."""

    def __init__(self, n_bytes: int, place: str, seed: int, *, pinned: bool = False) -> None:
        self.n_bytes = n_bytes
        self._buffers = Buffers(1, self.n_bytes, place, pinned=pinned)  # page-locked as long as it lives
        self._flat = self._buffers[0]
        tile(self._flat, byte_block(generator(seed)))  # pages that were never written are all the same one

    def part(self, turn: int, n_bytes: int) -> Any:
        stride = -(-n_bytes // 4096) * 4096
        start = turn % max(1, self.n_bytes // stride) * stride
        return self._flat[start : start + n_bytes]


class Machine(Host):
    """The real machine. Nothing here changes any of its settings."""

    def at(self, place: str) -> str:
        return place

    def worker(self, name: str, done: SimpleQueue[Done], place: str, cores: Sequence[int], threads: int) -> Any:
        """Make a worker: threads on cores (none given: on any), or a stream of a GPU."""
        if place.startswith("cuda"):
            return CudaStreamWorker(name, done, place)
        return Worker(name, done, cores or usable_cores(), threads)

    def streams(self, place: str, n: int) -> list[Any]:
        return list(memory.streams(self.at(place), n))

    def ring(self, shape: ExpertShape, place: str, turning: int, seed: int) -> Ring:
        return Ring(shape, self.at(place), turning, seed)

    def arena(self, n_bytes: int, place: str, seed: int, *, pinned: bool = False) -> Arena:
        return Arena(n_bytes, self.at(place), seed, pinned=pinned)

    def dense(self, need: DenseNeed, seed: int) -> DenseKernel:
        return DenseKernel(need.model, self.at(need.place), seed=seed, **need.options)  # type: ignore[arg-type]

    def power_w(self, device: Device, during: Callable[[float], None]) -> float | None:
        """Read the power of a device while `during` is called with seconds; None if unreadable."""
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


Call = Callable[[], object]

BEFORE_FIRST_S = 5e-3  # something else goes on for so long before the first expert of a group

CHUNKS = 3


class Timed(NamedTuple):
    """A call whose time is taken, and calls right before it whose time is not."""

    call: Call
    before: tuple[Call, ...] = ()


Maker = Callable[[], Timed]  # makes the next execution of a probe, on buffers whose turn it is


def flusher(machine: Machine, place: str, turning: int, seed: int) -> Call:
    """Make a call that fills a place's cache with other things."""
    half = flush_bytes(place, turning) // 2
    arena = machine.arena(2 * half, place, seed)
    return partial(copy, arena.part(0, half), arena.part(1, half))


def expert_maker(machine: Machine, ring: Ring, place: str, rows: int, before: tuple[Call, ...] = ()) -> Maker:
    """Serve rows by the experts of a ring, one after the other."""
    kernel, hidden = ring.kernel, ring.kernel.shape.hidden
    where = machine.at(place)
    x, sums = (memory.zeros(where, rows, hidden, kernel.act_dtype) for _ in range(2))
    x.normal_()
    index = memory.index(where, np.arange(rows, dtype=np.int64))
    gates = memory.values(where, [0.5] * rows, kernel.act_dtype)
    return lambda: Timed(partial(serve, kernel, ring.next(), x, index, gates, sums), before)


class DenseCalls:
    """Parts of a model's dense computation on a device, with weights that have left the cache."""

    def __init__(self, machine: Machine, need: DenseNeed, kernel: DenseKernel, flush: Call, seed: int) -> None:
        self._machine, self._need, self._kernel, self._flush = machine, need, kernel, flush
        self._ids = np.random.default_rng(seed)
        self._layer = 0
        self._kept: deque[Any] = deque(maxlen=8)

    def _state(self, rows: int) -> tuple[Any, Any, Any]:
        where = self._machine.at(self._need.place)
        made = tuple(memory.zeros(where, rows, self._need.model.hidden, self._kernel.dtype).normal_() for _ in range(3))
        return made[0], made[1], made[2]

    def _next_layer(self) -> int:
        self._layer = (self._layer + 1) % self._need.model.n_layers
        return self._layer

    def maker(self, kind: str, size: int, unit: str) -> Maker:
        """Make the calls of a part of the model, for rows or for tokens in the cache."""
        rows = size if unit == "rows" else 1
        sequences = sequences_of(rows) if unit == "rows" else [(1, size - 1)]
        state = self._state(rows)
        make = getattr(self, f"_{kind}")
        before = () if self._leaves_cache(kind) else (self._flush, state[0].clone)  # the rows themselves are warm in reality
        return lambda: Timed(make(*state, sequences), before)

    def _leaves_cache(self, kind: str) -> bool:
        """Whether a part's weights, in all its layers, have as many bytes as must take turns."""
        model = self._need.model
        n_bytes = {
            "attention": model.attention_bytes, "context": model.attention_bytes, "shared": model.shared_bytes,
            "leading": model.leading_bytes // max(1, model.n_dense_layers),
        }.get(kind, 0) * self._need.distinct_layers  # fmt: skip
        if kind == "leading":
            n_bytes = model.leading_bytes
        if kind == "head":
            n_bytes = model.head_bytes
        return n_bytes >= self._need.turning

    def _attention(self, hidden: Any, _: Any, sums: Any, sequences: list[tuple[int, int]]) -> Call:
        kernel, layer = self._kernel, self._next_layer()

        def call() -> None:  # with the outputs of the layer before added to the residual stream
            hidden.add_(sums)
            sums.zero_()
            hidden[:] = kernel.attention(layer, hidden, sequences)

        return call

    _context = _attention

    def _dense(self, hidden: Any, normed: Any, _: Any, __: Any) -> Call:
        kernel, layer = self._kernel, self._next_layer()

        def call() -> None:
            normed[:], _ = kernel.router(layer, hidden)

        return call

    def _shared(self, _: Any, normed: Any, sums: Any, __: Any) -> Call:
        kernel, layer = self._kernel, self._next_layer()
        return lambda: sums.add_(kernel.shared(layer, normed))

    def _leading(self, hidden: Any, _: Any, __: Any, sequences: list[tuple[int, int]]) -> Call:
        kernel, layer = self._kernel, self._next_layer() % self._need.model.n_dense_layers

        def call() -> None:
            hidden[:] = kernel.leading(layer, hidden, sequences)

        return call

    def _embedding(self, hidden: Any, _: Any, __: Any, ___: Any) -> Call:
        kernel = self._kernel
        some = self._ids.integers(0, self._need.model.vocab, len(hidden))
        ids = memory.index(self._machine.at(self._need.place), some)
        self._kept.append(ids)  # a GPU may read it after the call has returned

        def call() -> None:
            hidden[:] = kernel.embed(ids)

        return call

    def _head(self, hidden: Any, _: Any, __: Any, ___: Any) -> Call:
        return partial(self._kernel.head, hidden)

    def _predict(self, _: Any, normed: Any, __: Any, ___: Any) -> Call:
        return partial(self._kernel.predict, self._next_layer(), normed)

    def both(self) -> Maker:
        """Make calls of one row's attention and router, layer by layer: the dense part at batch 1."""
        state = self._state(1)

        def make() -> Timed:
            attention, router = self._attention(*state, [(1, CONTEXT - 1)]), self._dense(*state, [])

            def call() -> None:
                attention()
                router()

            return Timed(call)

        return make

    def busy(self) -> Call:
        """Make a call that goes on with dense parts for `BEFORE_FIRST_S`."""
        make = self.both()

        def call() -> None:
            until = time.perf_counter() + BEFORE_FIRST_S
            while time.perf_counter() < until:
                make().call()

        return call


def copy_maker(origin: Arena, target: Arena, size: int, streams: list[Any] | None = None) -> Maker:
    """Copy pieces of a size between arenas; with streams (maybe none) in `CHUNKS` chunks."""
    turn = iter(range(1, 2**62))

    def make() -> Timed:
        now = next(turn)
        dst, src = target.part(now, size), origin.part(now, size)
        if streams is not None:
            return Timed(partial(copy_in_chunks, dst, src, CHUNKS, streams))
        return Timed(partial(copy, dst, src, non_blocking=True))

    return make


def file_maker(file: TiledFile, arena: Arena, size: int, kind: str, variant: str, flush: Call) -> Maker:
    """Read or write pieces of a file; variant "page cache" reads what was just brought there."""
    turn = iter(range(1, 2**62))

    def make() -> Timed:
        now = next(turn)
        part = arena.part(now, size)
        if variant == "page cache":
            read = partial(file.read_cached, now, part)
            return Timed(read, (read, flush))
        return Timed(partial(file.read if kind == "disk_read" else file.write, now, part))

    return make


def crossing_maker(machine: Machine, src: str, dst: str, rows: int, hidden: int, dtype: Any) -> Maker:
    """Copy rows to another device, and as many results back, as a group of Runs does."""
    here, there = machine.at(src), machine.at(dst)
    origin, target = memory.zeros(here, rows, hidden, dtype), memory.zeros(there, rows, hidden, dtype)

    def call() -> None:
        memory.copy_rows(target, origin, range(rows))
        memory.bring(here, target)

    return lambda: Timed(call)


FILE = ".moesim-profile.tmp"
_GROUPS = 3
_LONG_US = 250e3  # a run so long leaves nothing of what was before in any cache: it is not run once more to warm up


class RealBench:
    """Measures probes on this machine (a `moesim.live.profiler.samples.Bench`); to be closed."""

    def __init__(self, plan: Plan, machine: Machine) -> None:
        self._plan, self._machine = plan, machine
        self._devices, self._links = plan.layout.devices, plan.layout.links
        self._done: SimpleQueue[Done] = SimpleQueue()
        self._workers: dict[tuple[str, ...], Any] = {}
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
        """Allocate memory for some probes, in place of what was prepared before."""
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
        if self._file is not None:
            self._file.remove()
            self._disk.remove([FILE])
        for runtime in self._runtimes.values():
            runtime.close()
        self._clear()
        empty_gpu_caches()

    def close(self) -> None:
        self.release()
        for worker in self._workers.values():
            worker.close()
        self._workers = {}

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

    def _maker(self, probe: Probe) -> tuple[Any, Maker]:
        if probe.id not in self._made:
            self._made[probe.id] = self._make(probe)
        return self._made[probe.id]

    def _make(self, probe: Probe) -> tuple[Any, Maker]:
        if probe.kind in ("copy", "disk_read", "disk_write"):
            return self._carrier(probe.device), self._copy(probe.device, probe.kind, probe.variant, probe.size)
        if probe.kind == "activation":
            src, dst = (self._devices[end].place for end in self._links[probe.device].ends)
            model = next(w.model for w in self._plan.wanted if not probe.size % w.model.activation_bytes(1))
            rows, dtype = probe.size // model.activation_bytes(1), ExpertKernel(self._plan.wanted[0].shapes[0]).act_dtype
            coordinator = self._worker(("coordinator",), "cpu", usable_cores())  # any core, as the thread that moves small things
            return coordinator, crossing_maker(self._machine, src, dst, rows, model.hidden, dtype)
        if probe.kind == "sentinel":
            if probe.subject == "copy":
                return self._carrier(probe.device), self._copy(probe.device, "copy", "pinned", SENTINEL_COPY)
            return self._activity(f"{probe.device}.experts")
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
        gpu = next((device.place for device in self._devices.values() if device.kind == "gpu"), "cpu")
        return copy_maker(origin, target, size, self._machine.streams(gpu, CHUNKS) if variant == "chunked" else None)

    def _activity(self, activity: str, pair: Probe | None = None) -> tuple[Any, Maker]:
        """Return the worker of a pair's activity, and the maker of its calls (weights read)."""
        wanted = self._plan.wanted[0]
        shape = wanted.shapes[0]
        if activity in self._links:
            ends = [self._devices[end].place for end in self._links[activity].ends]
            kind = ("disk_read" if ends[0] == "disk" else "disk_write") if "disk" in ends else "copy"
            variant = pair.variant if pair is not None and pair.variant else "pinned"
            return self._carrier(activity), self._copy(activity, kind, variant, pair_copy(shape, pair))
        name, _, what = activity.partition(".")
        device = self._devices[name]
        if what == "experts":
            return self._device_worker(device), self._experts(subject_of(shape), shape.bits, device, 1)
        dense = self._dense[wanted.model.name, device.place]
        if what == "side":
            return self._device_worker(device, lane="side"), dense.maker("predict", 1, "rows")
        return self._device_worker(device), dense.both()

    def warm(self, probe: Probe) -> float:
        """Run a probe once, and return about how long that took, in us."""
        if probe.kind in ("pair", "power", "runtime"):
            for activity in (probe.device, probe.subject) if probe.kind == "pair" else ():
                worker, make = self._activity(activity, probe)
                self._run(worker, [make().call])
            return 0.0
        worker, make = self._maker(probe)
        timed = make()
        return self._run(worker, [*timed.before, timed.call])[-1]

    def time(self, probe: Probe, expected_us: float) -> list[Reading]:
        if probe.kind == "pair":
            return self._pair(probe)
        if probe.kind == "power":
            return self._power(probe)
        if probe.kind == "runtime":
            gaps = self._runtime(probe.device).gaps_us(probe.variant)
            return [(replace(probe, variant=name), us) for name, us in gaps.items()]
        worker, make = self._maker(probe)
        if probe.kind == "expert_first":
            return self._first(probe, worker, make)
        warm = [make().call] if expected_us < _LONG_US else []
        timed = make()
        return [(probe, self._run(worker, [*warm, *timed.before, timed.call])[-1])]

    def _run(self, worker: Any, calls: Sequence[Call]) -> list[float]:
        """Let a worker make calls one right after the other; return their times in us."""
        for call in calls:
            worker.submit(0, call, None)
        dones = [_checked(done) for done in [self._done.get() for _ in calls]]
        return [(done.end_ns - done.start_ns) / 1e3 for done in dones]

    def _first(self, probe: Probe, worker: Any, make: Maker) -> list[Reading]:
        """Time the first expert after something else and the one behind it, a few times."""
        times = []
        for _ in range(_GROUPS):
            first, second = make(), make()
            times.append(self._run(worker, [*first.before, first.call, second.call])[-2:])
        one, two = (sorted(some)[_GROUPS // 2] for some in zip(*times, strict=True))
        return [(probe, one), (replace(probe, variant=FOLLOWING), two)]

    def _runtime(self, compute: str) -> Runtime:
        if compute not in self._runtimes:
            tier = next(tier for tier in self._plan.layout.tiers if tier.compute == compute)
            self._runtimes[compute] = Runtime(tier, self._plan.layout.disk, self._plan.seed)
        return self._runtimes[compute]

    def _power(self, probe: Probe) -> list[Reading]:
        device = self._devices[probe.device]

        def busy(seconds: float) -> None:
            worker, make = self._activity(f"{device.name}.experts")
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                self._run(worker, [make().call, make().call])

        watts = self._machine.power_w(device, busy if probe.variant == "busy" else time.sleep)
        return [] if watts is None else [(probe, watts)]

    def _pair(self, probe: Probe) -> list[Reading]:
        runs = pair_runs(self._plan.mode)
        names = (probe.device, probe.subject)
        sides = [self._activity(name, probe) for name in names]
        alone = [self._loop([side], runs)[0] for side in sides]
        together = self._loop(sides, runs)
        readings: list[Reading] = []
        for name, other, alone_us, together_us in zip(names, reversed(names), alone, together, strict=True):
            own = replace(probe, device=name, subject=other)
            readings += [
                (replace(own, variant=f"{probe.variant} {how}".strip()), us)
                for how, us in (("alone", alone_us), ("together", together_us))
            ]
        return readings

    def _loop(self, sides: Sequence[tuple[Any, Maker]], runs: int) -> list[float]:
        """Repeat activities until each ran so often next to the others; mean times in us."""
        times: list[list[Done]] = [[] for _ in sides]
        under_way = 0
        for number, (worker, make) in enumerate(sides):
            for _ in range(2):  # one runs, one waits: no pause between them
                worker.submit(0, make().call, number)
                under_way += 1
        while under_way:
            done = _checked(self._done.get())
            under_way -= 1
            times[done.tag].append(done)
            if any(len(some) < runs + 2 for some in times):
                worker, make = sides[done.tag]
                worker.submit(0, make().call, done.tag)
                under_way += 1
        begin = max(some[0].end_ns for some in times)
        end = min(some[-1].start_ns for some in times)
        means = []
        for some in times:  # from end to end: a thread that has to wait for its core does so between two executions as well
            inside = [done.end_ns for done in some if begin <= done.end_ns <= end]
            if len(inside) < 2:  # held up
                inside = [done.end_ns for done in some]
            means.append((inside[-1] - inside[0]) / (len(inside) - 1) / 1e3)
        return means


def _checked(done: Done) -> Done:
    if isinstance(done.error, (MoesimError, OSError)):
        raise done.error
    if done.error is not None:
        raise LiveError(f"profile measure: expected a call to end well, got {describe_exception(done.error)}") from done.error
    return done
