"""Who is where: copies and pools of one device (rule 6)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moesim.core.record_table import RecordTable
from moesim.engine.weights import Weights
from moesim.records import EvictionRecord, MemoryRecord

_new: Any = tuple.__new__


@dataclass(slots=True, eq=False)
class CopyState:
    """One resident copy of an expert."""

    pool: PoolState | None  # None on a backing device
    fetch: int  # the fetch that brought it; -1: placed at the start
    in_use: int = 0  # queued or running Runs and copies that read it here
    used: bool = False
    leaves: str = ""  # "drop" or "evict": was dropped, or named as a victim, while in use, and goes when idle


class PoolState:
    """A pool's bytes, there and in use: one number each, or, if the pool is per layer, one for each layer."""

    __slots__ = ("capacity", "landed", "landing", "leaving", "members", "name", "peak", "per_layer", "total", "used")

    def __init__(self, name: str, capacity: list[int], per_layer: bool, landing: int = 0) -> None:
        self.name = name
        self.capacity = capacity
        self.per_layer = per_layer
        self.landing = landing
        self.landed = 0  # bytes beyond the capacities, over all layers
        self.used = [0] * len(capacity)
        self.leaving = [0] * len(capacity)  # of these, victims that are still in use
        self.members: dict[int, set[int]] = {}  # shelf (layer at a width) -> resident units, if any; sorted when asked for
        self.total = 0
        self.peak = 0

    def free(self, layer: int) -> int:
        """Bytes that a copy may take now; below 0 while copies lie next to the pool."""
        at = layer if self.per_layer else 0
        return self.capacity[at] - self.used[at]

    def lacks(self, layer: int, n_bytes: int) -> bool:
        """Whether another victim must be named for a copy."""
        return n_bytes > self.free(layer) + self.leaving[layer if self.per_layer else 0]

    def lands(self, layer: int, n_bytes: int) -> bool:
        """Whether a copy whose victims are named has room, in the pool or next to it."""
        free = self.free(layer)
        return n_bytes <= free or n_bytes - max(0, free) <= self.landing - self.landed

    def take(self, layer: int, n_bytes: int) -> None:
        """Count bytes in (or, negative, out)."""
        at = layer if self.per_layer else 0
        free = self.capacity[at] - self.used[at]
        self.used[at] += n_bytes
        if free < n_bytes or free < 0:
            self.landed += max(0, n_bytes - free) - max(0, -free)
        self.total += n_bytes
        if self.total > self.peak:
            self.peak = self.total

    def add(self, shelf: int, unit: int) -> None:
        self.members.setdefault(shelf, set()).add(unit)

    def remove(self, shelf: int, unit: int) -> None:
        there = self.members[shelf]
        there.discard(unit)
        if not there:
            del self.members[shelf]


class DeviceMemory:
    """Copies and bytes of one device."""

    def __init__(
        self, name: str, weights: Weights, capacity: int, backing: bool,
        evictions: RecordTable[EvictionRecord], memory: RecordTable[MemoryRecord],
    ) -> None:  # fmt: skip
        self.name = name
        self.weights = weights
        self.n_experts = weights.n_experts
        self.capacity = capacity
        self.backing = backing
        n_units = len(weights)
        # One byte a unit: 1 if a usable copy is here.
        self.resident = bytearray(b"\x01" * n_units) if backing else bytearray(n_units)
        self.copies: dict[int, CopyState] = {}  # from the placement on
        self.pools: dict[str, PoolState] = {}
        self.used = 0  # bytes: fixed parts, KV, pools' contents and copies in transit
        self.kv = 0
        self.spare = capacity  # bytes that no purpose claims, for copies in transit
        self.peak = 0
        self._evictions = evictions
        self._memory = memory

    def add(self, n_bytes: int, now: int) -> None:
        """Count bytes in (or, negative, out) and record the new level."""
        self.used += n_bytes
        if self.used > self.peak:
            self.peak = self.used
        self._memory.append(_new(MemoryRecord, (now, self.name, self.used)))

    def hold(self, n_bytes: int, now: int) -> None:
        """Count a copy in transit in (or, negative, out). It takes nothing that a pool or the KV cache may still fill."""
        self.spare -= n_bytes
        self.add(n_bytes, now)

    def reserve(self, pool: PoolState, layer: int, n_bytes: int, now: int) -> None:
        """Take a pool's memory for an expert that is to come."""
        pool.take(layer, n_bytes)
        self.add(n_bytes, now)

    def arrive(self, unit: int, pool: PoolState, fetch: int) -> CopyState:
        copy = CopyState(pool, fetch)
        self.copies[unit] = copy
        self.resident[unit] = 1
        pool.add(unit // self.n_experts, unit)
        return copy

    def remove(self, unit: int, reason: str, now: int) -> None:
        """Forget an idle copy and free its memory."""
        copy = self.copies.pop(unit)
        self.resident[unit] = 0
        shelf, expert = divmod(unit, self.n_experts)
        layer = shelf % self.weights.n_layers
        pool: PoolState = copy.pool  # type: ignore[assignment]  # only copies on backing devices have none
        n_bytes = self.weights.n_bytes[shelf]
        pool.remove(shelf, unit)
        pool.take(layer, -n_bytes)
        self.add(-n_bytes, now)
        self._evictions.append(
            _new(
                EvictionRecord,
                (now, self.name, pool.name, layer, expert, reason, copy.used, copy.fetch, self.weights.bits(unit)),
            )
        )

    def drop(self, unit: int, now: int) -> None:
        """Remove a copy now if it is idle, else as soon as it is."""
        copy = self.copies[unit]
        if not copy.in_use:
            self.remove(unit, "drop", now)
        elif not copy.leaves:
            copy.leaves = "drop"

    def evict(self, unit: int, now: int) -> None:
        """Remove a victim now if it is idle, else as soon as it is."""
        copy = self.copies[unit]
        if not copy.in_use:
            self.remove(unit, "evict", now)
        else:
            copy.leaves = "evict"
            self._leave(copy, unit, 1)

    def keep(self, unit: int) -> None:
        """Keep a copy that was dropped; a victim leaves in any case, since something else comes in its place."""
        copy = self.copies[unit]
        if copy.leaves == "drop":
            copy.leaves = ""

    def _leave(self, copy: CopyState, unit: int, sign: int) -> None:
        shelf, pool = unit // self.n_experts, copy.pool
        assert pool is not None
        pool.leaving[shelf % self.weights.n_layers if pool.per_layer else 0] += sign * self.weights.n_bytes[shelf]

    def release(self, unit: int, now: int) -> None:
        """One user of a copy has done with it; a copy that is to leave goes with the last."""
        copy = self.copies[unit]
        copy.in_use -= 1
        if copy.leaves and not copy.in_use:
            if copy.leaves == "evict":
                self._leave(copy, unit, -1)
            self.remove(unit, copy.leaves, now)

    def relabel(self, unit: int, pool: PoolState, layer: int) -> None:
        """Move a resident copy to another pool; the device's bytes do not change."""
        copy = self.copies[unit]
        assert copy.pool is not None
        if copy.leaves == "evict":
            self._leave(copy, unit, -1)
        shelf = unit // self.n_experts
        n_bytes = self.weights.n_bytes[shelf]
        copy.pool.take(layer, -n_bytes)
        copy.pool.remove(shelf, unit)
        pool.take(layer, n_bytes)
        pool.add(shelf, unit)
        copy.pool = pool
        if copy.leaves == "evict":
            self._leave(copy, unit, 1)
