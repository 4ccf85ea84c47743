"""Expert caches with textbook replacement: LRU, LFU, FIFO, random, static, and Belady's optimum.

Baselines, not systems: every miss is loaded on demand, and the CPU computes no expert unless ``assignment`` says so. Each
differs from the others in the replacement part only, so that a comparison shows what replacement is worth.

| point | we do |
|---|---|
| use | all active experts of a layer are marked together, before anything is evicted for that layer |
| victim | asked for when a load could start; never one that a queued or running execution needs |
| too many active experts | the rest comes in waves, as executed experts make room |
| slots of a layer | the granted ones, dealt out: as many for each layer or one more, these evenly spaced; ``slots_split: equal`` leaves a remainder unused |
| start | experts 0, 1, 2 ... of each layer, unless ``placement`` says otherwise |
| ties | lower layer, then lower id (LRU and FIFO have none) |
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Annotated, Literal

from moesim.policies.algorithms.caching import SlotsSplit
from moesim.policies.base import Range
from moesim.policies.composed import Composed, PartSpec
from moesim.policies.parts import AssignmentPart, PlacementPart, PrefetchPart

Scope = Literal["per-layer", "global"]


class _Cache(Composed):
    """A cache that differs from the others in its replacement only."""

    oracles = MappingProxyType({"replacement": {"name": "belady"}, "assignment": {"assignment": "exact"}})
    _part: str

    def __init__(
        self,
        *,
        placement: PartSpec | PlacementPart = "lowest-ids",
        assignment: PartSpec | AssignmentPart = "all-gpu",
        prefetch: PartSpec | PrefetchPart = "none",
        scope: Scope = "per-layer",
        slots_split: SlotsSplit = "spread",
    ) -> None:
        super().__init__(
            placement=placement,
            assignment=assignment,
            prefetch=prefetch,
            replacement=type(self)._part,
            scope=scope,
            slots_split=slots_split,
        )


class LRU(_Cache):
    """Cache that evicts the expert whose last use is longest ago."""

    _part = "lru"


class LFU(_Cache):
    """Cache that evicts the expert used in the fewest layer visits so far."""

    _part = "lfu"


class FIFO(_Cache):
    """Cache that evicts the expert that has been in it longest."""

    _part = "fifo"


class Belady(_Cache):
    """Cache that evicts the expert whose next use is farthest away: an oracle, which knows the future."""

    _part = "belady"


class RandomCache(Composed):
    """Cache that evicts at random, from a seed."""

    oracles = MappingProxyType({"replacement": {"name": "belady", "seed": None}, "assignment": {"assignment": "exact"}})

    def __init__(
        self,
        *,
        seed: int = 0,
        placement: PartSpec | PlacementPart = "lowest-ids",
        assignment: PartSpec | AssignmentPart = "all-gpu",
        prefetch: PartSpec | PrefetchPart = "none",
        scope: Scope = "per-layer",
        slots_split: SlotsSplit = "spread",
    ) -> None:
        self.seed = seed
        super().__init__(
            placement=placement,
            assignment=assignment,
            prefetch=prefetch,
            replacement={"name": "random", "seed": seed},
            scope=scope,
            slots_split=slots_split,
        )


class StaticCache(Composed):
    """The most frequent experts by calibration stay on the GPU for good; others are copied for one use and dropped."""

    oracles = MappingProxyType({"assignment": {"assignment": "exact"}})  # it replaces nothing

    def __init__(
        self,
        *,
        placement: PartSpec | PlacementPart = "frequency-global",
        assignment: PartSpec | AssignmentPart = "all-gpu",
        prefetch: PartSpec | PrefetchPart = "none",
        scope: Scope = "global",
        slots_split: SlotsSplit = "spread",
        staging_slots: Annotated[int, Range(1)] | None = None,
    ) -> None:
        super().__init__(
            placement=placement,
            assignment=assignment,
            prefetch=prefetch,
            replacement="static",
            scope=scope,
            slots_split=slots_split,
            staging_slots=staging_slots,
        )
