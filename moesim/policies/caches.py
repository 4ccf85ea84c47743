"""Expert caches with textbook replacement: LRU, LFU, FIFO, random, static, and Belady's optimum.

Baselines, not systems: every miss is loaded on demand, and the CPU computes no expert unless ``assignment`` says so. Each
differs from the others in the replacement part only, so that a comparison shows what replacement is worth.

| point | we do |
|---|---|
| use | all active experts of a layer are marked together, before anything is evicted for that layer |
| order within a visit | one row: by rank, the last-ranked expert counts as used last, as in ``moesim trace stats``; several rows, or ``use_order: id`` of ``lru``: by ascending id, and for LRU what is loaded after what was cached, as they are executed and as in Mixtral-Offloading's code |
| victim | asked for when a load could start; never one that a queued or running execution needs; what the present layer visit is routed to only if nothing else is idle, ``victims: idle``: like any other once it has run |
| too many active experts | the rest comes in waves, as executed experts make room |
| slots of a layer | the granted ones, dealt out: as many for each layer or one more, these evenly spaced; ``slots_split: equal`` leaves a remainder unused |
| start | experts 0, 1, 2 ... of each layer, unless ``placement`` says otherwise |
| ties | LFU, Belady: the one used longest ago (Belady, in one pool for all layers: first that of the later layer); ``lfu`` with ``ties: id``: the lowest layer and id |
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from moesim.policies.algorithms.caching import SlotsSplit
from moesim.policies.base import Range
from moesim.policies.composed import Composed, PartSpec, Prefetch
from moesim.policies.moot import MootIf, OnlyWith
from moesim.policies.part_conditions import COLD, DEALT_OUT, LOADS_NOTHING, NO_LOADS
from moesim.policies.parts import AssignmentPart, PlacementPart, PrefetchPart
from moesim.policies.ranking import LfuTies
from moesim.policies.replacement import UseOrder
from moesim.policies.visit import UNROUTED_FIRST, Victims

Scope = Literal["per-layer", "global"]


class _Cache(Composed):
    """A cache that differs from the others in its replacement only; each class names the options of its own rule."""

    oracles = MappingProxyType({"replacement": {"name": "belady"}, "assignment": {"assignment": "exact"}})

    def __init__(
        self,
        replacement: Mapping[str, Any],
        placement: PartSpec | PlacementPart,
        assignment: PartSpec | AssignmentPart,
        prefetch: PartSpec | PrefetchPart,
        scope: Scope,
        slots_split: SlotsSplit,
    ) -> None:
        super().__init__(
            placement=placement,
            assignment=assignment,
            prefetch=prefetch,
            replacement=replacement,
            scope=scope,
            slots_split=slots_split,
        )


class LRU(_Cache):
    """Cache that evicts the expert whose last use is longest ago."""

    oracles = MappingProxyType({**_Cache.oracles, "replacement": {"name": "belady", "use_order": None}})

    def __init__(
        self,
        *,
        placement: PartSpec | PlacementPart = "lowest-ids",
        assignment: PartSpec | AssignmentPart = "all-gpu",
        prefetch: Prefetch = "none",
        scope: Scope = "per-layer",
        slots_split: Annotated[SlotsSplit, OnlyWith(scope="per-layer")] = "spread",
        use_order: Annotated[UseOrder, NO_LOADS] = "rank",
    ) -> None:
        self.use_order: UseOrder = use_order
        super().__init__({"name": "lru", "use_order": use_order}, placement, assignment, prefetch, scope, slots_split)


class LFU(_Cache):
    """Cache that evicts the expert used in the fewest layer visits so far."""

    oracles = MappingProxyType({**_Cache.oracles, "replacement": {"name": "belady", "ties": None}})

    def __init__(
        self,
        *,
        placement: PartSpec | PlacementPart = "lowest-ids",
        assignment: PartSpec | AssignmentPart = "all-gpu",
        prefetch: Prefetch = "none",
        scope: Scope = "per-layer",
        slots_split: Annotated[SlotsSplit, OnlyWith(scope="per-layer")] = "spread",
        victims: Annotated[Victims, NO_LOADS] = UNROUTED_FIRST,
        ties: Annotated[LfuTies, NO_LOADS] = "last-use",
    ) -> None:
        self.victims: Victims = victims
        self.ties: LfuTies = ties
        super().__init__({"name": "lfu", "victims": victims, "ties": ties}, placement, assignment, prefetch, scope, slots_split)


class FIFO(_Cache):
    """Cache that evicts the expert that has been in it longest."""

    def __init__(
        self,
        *,
        placement: PartSpec | PlacementPart = "lowest-ids",
        assignment: PartSpec | AssignmentPart = "all-gpu",
        prefetch: Prefetch = "none",
        scope: Scope = "per-layer",
        slots_split: Annotated[SlotsSplit, OnlyWith(scope="per-layer")] = "spread",
        victims: Annotated[Victims, NO_LOADS] = UNROUTED_FIRST,
    ) -> None:
        self.victims: Victims = victims
        super().__init__({"name": "fifo", "victims": victims}, placement, assignment, prefetch, scope, slots_split)


class Belady(_Cache):
    """Cache that evicts the expert whose next use is farthest away: an oracle, which knows the future."""

    def __init__(
        self,
        *,
        placement: PartSpec | PlacementPart = "lowest-ids",
        assignment: PartSpec | AssignmentPart = "all-gpu",
        prefetch: Prefetch = "none",
        scope: Scope = "per-layer",
        slots_split: Annotated[SlotsSplit, OnlyWith(scope="per-layer")] = "spread",
        victims: Annotated[Victims, NO_LOADS] = UNROUTED_FIRST,
    ) -> None:
        self.victims: Victims = victims
        super().__init__({"name": "belady", "victims": victims}, placement, assignment, prefetch, scope, slots_split)


class RandomCache(_Cache):
    """Cache that evicts at random, from a seed."""

    oracles = MappingProxyType({**_Cache.oracles, "replacement": {"name": "belady", "seed": None}})

    def __init__(
        self,
        *,
        placement: PartSpec | PlacementPart = "lowest-ids",
        assignment: PartSpec | AssignmentPart = "all-gpu",
        prefetch: Prefetch = "none",
        scope: Scope = "per-layer",
        slots_split: Annotated[SlotsSplit, OnlyWith(scope="per-layer")] = "spread",
        victims: Annotated[Victims, NO_LOADS] = UNROUTED_FIRST,
        seed: Annotated[int, NO_LOADS] = 0,
    ) -> None:
        self.victims: Victims = victims
        self.seed = seed
        super().__init__(
            {"name": "random", "victims": victims, "seed": seed}, placement, assignment, prefetch, scope, slots_split
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
        scope: Annotated[Scope, MootIf(placement=DEALT_OUT)] = "global",
        slots_split: Annotated[SlotsSplit, OnlyWith(scope="per-layer"), MootIf(placement=COLD)] = "spread",
        staging_slots: Annotated[int, Range(1), MootIf(assignment=LOADS_NOTHING)] | None = None,
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
