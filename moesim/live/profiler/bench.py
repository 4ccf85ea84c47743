"""The bench of the real machine: memory and workers for the probes of a block, and their times."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

from moesim.core.files import OutputFolder
from moesim.errors import LiveError, MoesimError, describe_exception
from moesim.live.kernels.experts import ExpertKernel
from moesim.live.kernels.host import empty_gpu_caches, usable_cores
from moesim.live.kernels.workers import Done
from moesim.live.profiler.calls import (
    CHUNKS,
    Arena,
    Call,
    DenseCalls,
    Machine,
    Maker,
    Ring,
    TiledFile,
    copy_maker,
    crossing_maker,
    expert_maker,
    file_maker,
    flusher,
)
from moesim.live.profiler.layout import Device
from moesim.live.profiler.plan import Plan, pair_runs
from moesim.live.profiler.probes import FOLLOWING, PARTS, SENTINEL_COPY, Probe, Reading, pair_copy, subject_of
from moesim.live.profiler.runtime import Runtime
from moesim.live.profiler.samples import COMMAND

FILE = ".moesim-profile.tmp"
_GROUPS = 3
_LONG_US = 250e3  # a run so long leaves nothing of what was before in any cache: it is not run once more to warm up


class RealBench:
    """Measures probes on this machine (a `moesim.live.profiler.samples.Bench`); close it in the end."""

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

    def _activity(self, activity: str) -> tuple[Any, Maker]:
        """Return the worker of an activity of a pair, and the maker of its calls, which mostly read weights."""
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

    def warm(self, probe: Probe) -> float:
        """Run a probe once, and return about how long that took, in us."""
        if probe.kind in ("pair", "power", "runtime"):
            for activity in (probe.device, probe.subject) if probe.kind == "pair" else ():
                worker, make = self._activity(activity)
                self._run(worker, [make().call])
            return 0.0
        worker, make = self._maker(probe)
        timed = make()
        return self._run(worker, [*timed.before, timed.call])[-1]

    def time(self, probe: Probe, expected_us: float) -> list[Reading]:
        """Measure a probe once, which took ``expected_us`` in `warm`."""
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
        """Time two activities alone and together, within the same seconds."""
        runs = pair_runs(self._plan.mode)
        names = (probe.device, probe.subject)
        sides = [self._activity(name) for name in names]
        alone = [self._loop([side], runs)[0] for side in sides]
        together = self._loop(sides, runs)
        readings: list[Reading] = []
        for name, other, apart, beside in zip(names, reversed(names), alone, together, strict=True):
            own = replace(probe, device=name, subject=other)
            readings += [(replace(own, variant="alone"), apart), (replace(own, variant="together"), beside)]
        return readings

    def _loop(self, sides: Sequence[tuple[Any, Maker]], runs: int) -> list[float]:
        """Repeat activities until each has run so often next to the others; mean times in us, end to end."""
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
