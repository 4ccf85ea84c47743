"""The bench of the real machine: the time of each probe."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from moesim.errors import LiveError, MoesimError, describe_exception
from moesim.live.kernels.workers import Done
from moesim.live.profiler.bench_makers import Makers
from moesim.live.profiler.calls import Call, Maker
from moesim.live.profiler.plan import pair_runs
from moesim.live.profiler.probes import FOLLOWING, Probe, Reading
from moesim.live.profiler.runtime import Runtime

_GROUPS = 3
_LONG_US = 250e3  # a run so long leaves nothing of what was before in any cache: it is not run once more to warm up


class RealBench(Makers):
    """Carries out probes on this machine; see `moesim.live.profiler.sampling.Bench`, and close it in the end."""

    def warm(self, probe: Probe) -> float:
        """Carry a probe out once, and tell about how long that took, in us."""
        if probe.kind in ("pair", "power", "runtime"):
            for activity in (probe.device, probe.subject) if probe.kind == "pair" else ():
                worker, make = self._activity(activity)
                self._run(worker, [make().call])
            return 0.0
        worker, make = self._maker(probe)
        timed = make()
        return self._run(worker, [*timed.before, timed.call])[-1]

    def time(self, probe: Probe, expected_us: float) -> list[Reading]:
        """Measure a probe once, in the worker that does such things; ``expected_us`` is what `warm` has told."""
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
        """Let a worker make calls, one right after the other, and give their times in us."""
        for call in calls:
            worker.submit(0, call, None)
        dones = [self._done.get() for _ in calls]
        for done in dones:
            _check(done)
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

    # -------------------------------------------------------------------------------------------------------------- pairs

    def _pair(self, probe: Probe) -> list[Reading]:
        """Time two activities alone and beside each other, within the same seconds."""
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
        """Keep activities going until each has run so often while the others went on; mean times in us, from end to end."""
        times: list[list[Done]] = [[] for _ in sides]
        under_way = 0
        for number, (worker, make) in enumerate(sides):
            for _ in range(2):  # one runs, one waits: no pause between them
                worker.submit(0, make().call, number)
                under_way += 1
        while under_way:
            done = self._done.get()
            under_way -= 1
            _check(done)
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


def _check(done: Done) -> None:
    if isinstance(done.error, (MoesimError, OSError)):
        raise done.error
    if done.error is not None:
        raise LiveError(f"profile measure: expected a call to end well, got {describe_exception(done.error)}") from done.error
