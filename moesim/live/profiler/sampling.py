"""In which order things are measured, how often, and what is left out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from moesim.live.profiler.plan import Block, Plan
from moesim.live.profiler.probes import LIMIT_US, Probe, Reading
from moesim.live.profiler.store import Store

_ALWAYS = 2
"""Sizes of a curve that are measured however long they take: fewer are no curve."""


class Bench(Protocol):
    """Carries out probes; ``disk_mode`` says how a disk was read (as of `moesim.live.kernels.files.FileExperts`), or nothing."""

    disk_mode: str

    def prepare(self, probes: Sequence[Probe]) -> None:
        """Have memory for some probes; what was prepared before is gone."""

    def warm(self, probe: Probe) -> float:
        """Carry a probe out once, and tell about how long that took, in us."""

    def time(self, probe: Probe, expected_us: float) -> list[Reading]:
        """Measure a probe once: itself, or what it is made of. ``expected_us`` is what `warm` has told."""

    def release(self) -> None:
        """Give the memory back."""

    def close(self) -> None:
        """Give everything back."""


def sample(plan: Plan, bench: Bench, store: Store, tell: Callable[[str, int], None] = lambda text, steps: None) -> float:
    """Measure all that a plan has and a store has not.

    A block is prepared, then each of its probes is carried out once in ascending order: caches, code and pages are warm, and of
    a curve whose next size would take longer than `LIMIT_US` the larger sizes are left out. Then come the repeats; each
    goes through all probes in another order, so that a disturbance does not fall on one of them. Sentinels are measured first
    and last, and again whenever a measurement goes on after an interruption.
    """
    began = time.monotonic()
    _sentinels(plan, bench, store, "start", tell)
    for block in plan.blocks:
        pending = [p for p in block.probes if any(not store.has(p, repeat) for repeat in range(plan.repeats))]
        if pending:
            tell(block.name, 0)
            bench.prepare(block.probes)
            try:
                _block(plan, block, pending, bench, store, tell)
            finally:
                bench.release()
            store.spent(store.seconds + time.monotonic() - began)
    _sentinels(plan, bench, store, "end", tell)
    seconds = store.seconds + time.monotonic() - began
    store.spent(seconds)
    return seconds


def _block(
    plan: Plan, block: Block, pending: Sequence[Probe], bench: Bench, store: Store, tell: Callable[[str, int], None]
) -> None:
    expected = _warm_up(pending, bench, store)
    tell(block.name, plan.repeats * (len(block.probes) - len(expected)))
    for repeat in range(plan.repeats):
        for probe in plan.order(block, repeat):
            if probe in expected:
                if not store.has(probe, repeat):
                    store.append(probe, repeat, bench.time(probe, expected[probe]))
                tell(block.name, 1)


def _warm_up(pending: Sequence[Probe], bench: Bench, store: Store) -> dict[Probe, float]:
    """Carry out everything once, the small before the large, and find what would take too long."""
    found: dict[Probe, float] = {}
    last: dict[tuple[object, ...], tuple[int, float, int]] = {}  # curve -> size, its time, sizes so far
    for probe in sorted(pending, key=lambda probe: probe.size):
        if store.has(probe, -1):  # left out in an earlier session
            continue
        limit = LIMIT_US.get(probe.unit)
        size, us, n = last.get(probe.curve, (0, 0.0, 0))
        if limit is not None and n >= _ALWAYS and (guess := us * probe.size / size) > limit and us > limit / 4:
            store.skip(probe, f"one run would take about {guess / 1e6:.1f} s")
            continue
        us = bench.warm(probe)
        last[probe.curve] = probe.size, us, n + 1
        if limit is not None and us > limit and n >= _ALWAYS:
            store.skip(probe, f"one run takes {us / 1e6:.1f} s")
            continue
        found[probe] = us
    return found


def _sentinels(plan: Plan, bench: Bench, store: Store, when: str, tell: Callable[[str, int], None]) -> None:
    tell(f"sentinel, {when}", 0)
    probes = [replace(probe, variant=when) for probe in plan.sentinels]
    bench.prepare(probes)
    try:
        for probe in probes:
            expected = bench.warm(probe)
            first = store.repeats_of(probe)
            for repeat in range(first, first + plan.repeats):
                store.append(probe, repeat, bench.time(probe, expected))
    finally:
        bench.release()
