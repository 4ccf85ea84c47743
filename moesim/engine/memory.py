"""Who is where: copies and pools of one device (rule 6)."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from moesim.model import ModelSpec
from moesim.policy import Pool
from moesim.records import EvictionRecord, MemoryRecord, Records


class Unit(NamedTuple):
    """An expert at one width, which can be copied."""

    layer: int
    expert: int  # -1: no expert, but something else of the layer
    bits: float | None = None  # None: the full width


@dataclass(slots=True, eq=False)
class CopyState:
    """One resident copy of an expert."""

    pool: PoolState | None  # None on a backing device
    fetch: int  # the fetch that brought it; -1: placed at the start
    in_use: int = 0  # queued or running Runs and copies that read it here
    used: bool = False
    leaves: str = ""  # "drop" or "evict": was dropped, or named as a victim, while in use, and goes when idle


class PoolState:
    """A pool's bytes, there and in use: one number each, or one for each layer."""

    def __init__(self, pool: Pool, n_layers: int) -> None:
        self.name, self.per_layer, self.landing = pool.name, pool.per_layer, pool.landing
        self.capacity = pool.sizes(n_layers)
        self.used = [0] * len(self.capacity)
        self.leaving = [0] * len(self.capacity)  # of these, victims that are still in use
        self.landed = 0  # bytes beyond the capacities, over all layers
        self.total = self.peak = 0
        self.members: defaultdict[tuple[int, float | None], set[int]] = defaultdict(set)  # layer, width -> resident experts

    def at(self, layer: int) -> int:
        return layer if self.per_layer else 0

    def free(self, layer: int) -> int:
        """Return the bytes that a copy may take now; below 0 while copies lie next to the pool."""
        at = layer if self.per_layer else 0
        return self.capacity[at] - self.used[at]

    def lacks(self, layer: int, n_bytes: int) -> bool:
        """Whether another victim must be named for a copy."""
        return n_bytes > self.free(layer) + self.leaving[self.at(layer)]

    def lands(self, layer: int, n_bytes: int) -> bool:
        """Whether a copy whose victims are named has room, in the pool or next to it."""
        free = self.free(layer)
        return n_bytes <= free or n_bytes - max(0, free) <= self.landing - self.landed

    def take(self, layer: int, n_bytes: int) -> None:
        """Count bytes in (or, negative, out)."""
        at = layer if self.per_layer else 0
        free = self.capacity[at] - self.used[at]
        self.used[at] += n_bytes
        self.landed += max(0, n_bytes - free) - max(0, -free)
        self.total += n_bytes
        self.peak = max(self.peak, self.total)


@dataclass(slots=True, eq=False)
class DeviceMemory:
    """Copies and bytes of one device."""

    name: str
    model: ModelSpec
    capacity: int
    backing: bool  # it has all experts
    records: Records
    copies: dict[Unit, CopyState] = field(default_factory=dict)  # from the placement on
    pools: dict[str, PoolState] = field(default_factory=dict)
    used: int = 0  # bytes: fixed parts, KV, pools' contents and copies in transit
    kv: int = 0
    spare: int = 0  # bytes that no purpose claims, for copies in transit
    peak: int = 0

    def add(self, n_bytes: int, now: int) -> None:
        """Count bytes in (or, negative, out) and record the new level."""
        self.used += n_bytes
        self.peak = max(self.peak, self.used)
        self.records.memory.append(MemoryRecord(now, self.name, self.used))

    def hold(self, n_bytes: int, now: int) -> None:
        """Count a copy in transit, in or out, without what a pool or the KV cache may still fill."""
        self.spare -= n_bytes
        self.add(n_bytes, now)

    def reserve(self, pool: PoolState, layer: int, n_bytes: int, now: int) -> None:
        pool.take(layer, n_bytes)
        self.add(n_bytes, now)

    def arrive(self, unit: Unit, pool: PoolState, fetch: int) -> CopyState:
        copy = self.copies[unit] = CopyState(pool, fetch)
        pool.members[unit.layer, unit.bits].add(unit.expert)
        return copy

    def leave(self, unit: Unit, reason: str, now: int) -> None:
        """Remove a copy now if it is idle, else as soon as it is: dropped, or as a victim."""
        copy, pool = self._find(unit)
        if not copy.in_use:
            self._remove(unit, reason, now)
        elif reason == "evict":
            copy.leaves = reason
            self._count_leaving(unit, pool, 1)
        elif not copy.leaves:
            copy.leaves = reason

    def keep(self, unit: Unit) -> None:
        """Keep a copy that was dropped; a victim leaves in any case, since something replaces it."""
        if self.copies[unit].leaves == "drop":
            self.copies[unit].leaves = ""

    def release(self, unit: Unit, now: int) -> None:
        """One user of a copy has done with it; a copy that is to leave goes with the last."""
        copy = self.copies[unit]
        copy.in_use -= 1
        if copy.leaves and not copy.in_use:
            if copy.leaves == "evict":
                self._count_leaving(unit, copy.pool, -1)
            self._remove(unit, copy.leaves, now)

    def relabel(self, unit: Unit, to: PoolState) -> None:
        """Move a resident copy to another pool; the device's bytes do not change."""
        copy, pool = self._find(unit)
        n_bytes = self.model.expert_bytes(unit.layer, unit.bits)
        for one, sign in ((pool, -1), (to, 1)):
            one.take(unit.layer, sign * n_bytes)
            if copy.leaves == "evict":
                self._count_leaving(unit, one, sign)
        pool.members[unit.layer, unit.bits].discard(unit.expert)
        to.members[unit.layer, unit.bits].add(unit.expert)
        copy.pool = to

    def _find(self, unit: Unit) -> tuple[CopyState, PoolState]:
        copy = self.copies[unit]
        assert copy.pool is not None  # only copies on backing devices have none, and these stay
        return copy, copy.pool

    def _count_leaving(self, unit: Unit, pool: Any, sign: int) -> None:
        pool.leaving[pool.at(unit.layer)] += sign * self.model.expert_bytes(unit.layer, unit.bits)

    def _remove(self, unit: Unit, reason: str, now: int) -> None:
        copy, pool = self._find(unit)
        del self.copies[unit]
        pool.members[unit.layer, unit.bits].discard(unit.expert)
        n_bytes = self.model.expert_bytes(unit.layer, unit.bits)
        pool.take(unit.layer, -n_bytes)
        self.add(-n_bytes, now)
        layer, expert, bits = unit
        self.records.evictions.append(
            EvictionRecord(now, self.name, pool.name, layer, expert, reason, copy.used, copy.fetch, bits)
        )
