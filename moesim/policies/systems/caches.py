"""Expert caches with textbook replacement: LRU, LFU, FIFO, S3-FIFO, random, static, and Belady's optimum.

Baselines, not systems: every miss is loaded on demand, and the CPU computes no expert unless ``assignment`` says so. Each
differs from the others in the replacement part only, so that a comparison shows what replacement is worth.

| point | we do |
|---|---|
| use | all active experts of a layer are marked together, before anything is evicted for that layer |
| order within a visit | one row: by rank, the last-ranked expert counts as used last, as in ``moesim trace stats``; several rows, or ``use_order: id`` of ``lru``: by ascending id, and for LRU what is loaded after what was cached, as they are executed and as in Mixtral-Offloading's code |
| victim | named when a load could start, among all that is there; what the present layer visit is routed to only if nothing else is, ``victims: idle``: like any other |
| the victim is in use | it leaves once it is idle; until then its load lies next to the cache, where top_k experts (at least 2) have room |
| too many active experts | victims are experts of the visit itself; what finds no room next to the cache comes in waves, as executed experts make room |
| slots of a layer | the granted ones, dealt out: as many for each layer or one more, these evenly spaced; ``slots_split: equal`` leaves a remainder unused |
| start | experts 0, 1, 2 ... of each layer, unless ``placement`` says otherwise |
| ties | LFU, Belady: the one used longest ago (Belady, in one pool for all layers: first that of the later layer); ``lfu`` with ``ties: id``: the lowest layer and id |
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from moesim.policies import adaptive, ranking
from moesim.policies.algorithms.caching import SlotsSplit
from moesim.policies.base import Range
from moesim.policies.composed import Composed
from moesim.policies.composition import PartSpec
from moesim.policies.declare import option, option_of, option_parameters
from moesim.policies.parts import PrefetchPart, replacement

PLANNED: dict[str, Mapping[str, Any]] = {"assignment": {"assignment": "exact"}}
Scope = Literal["per-layer", "global"]
Split = SlotsSplit


def _cache(name: str, part: type, text: str) -> type[Composed]:
    """Name the composition of a replacement part, with the options of that part; those that Belady's has not are its rule's."""
    options = option_parameters(part)
    of_rule = [option for option in options if option not in option_parameters(ranking.Belady)]
    return Composed.preset(
        name,
        text,
        fixed=("replacement", "staging_slots", "load_order", "cache_only"),
        oracles=MappingProxyType({"replacement": {"name": "belady", **dict.fromkeys(of_rule)}} | PLANNED),
        own=MappingProxyType({"replacement": part}),
        replacement=None,  # none by name: the part in `own`
        scope=option(Scope, "per-layer"),
        slots_split=option(Split, "spread"),
        **{name: option_of(part) for name in options},
    )


LRU = _cache("LRU", replacement.LRU, "Cache that evicts the expert whose last use is longest ago.")
LFU = _cache("LFU", ranking.LFU, "Cache that evicts the expert used in the fewest layer visits so far.")
S3FifoCache = _cache(
    "S3FifoCache",
    adaptive.S3FifoVictim,
    "Cache of two FIFO queues: newcomers, and what was used more than once among them (S3-FIFO).",
)
FIFO = _cache("FIFO", replacement.FIFO, "Cache that evicts the expert that has been in it longest.")
Belady = _cache(
    "Belady", ranking.Belady, "Cache that evicts the expert whose next use is farthest away: an oracle, which knows the future."
)
RandomCache = _cache("RandomCache", replacement.RandomVictim, "Cache that evicts at random, from a seed.")

StaticCache = Composed.preset(
    "StaticCache",
    "The most frequent experts by calibration stay on the GPU for good; others are copied for one use and dropped.",
    fixed=("replacement", "load_order", "cache_only"),
    oracles=MappingProxyType(PLANNED),  # it replaces nothing
    placement="frequency-global",
    replacement="static",
    prefetch=option(PartSpec | PrefetchPart, "none"),
    scope=option(Scope, "global"),
    slots_split=option(Split, "spread"),
    staging_slots=option(Annotated[int, Range(1)] | None, None),
)
