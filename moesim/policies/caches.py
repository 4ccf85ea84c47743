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

from moesim.policies import ranking, replacement
from moesim.policies.algorithms.caching import SlotsSplit
from moesim.policies.base import Range
from moesim.policies.composed import Composed, PartSpec
from moesim.policies.declare import option_of
from moesim.policies.moot import MootIf, OnlyWith
from moesim.policies.part_conditions import COLD, DEALT_OUT, LOADS_NOTHING, NO_LOADS
from moesim.policies.parts import PrefetchPart
from moesim.policies.ranking import LfuTies
from moesim.policies.replacement import UseOrder
from moesim.policies.visit import Victims

Scope = Literal["per-layer", "global"]


def _oracles(**without: None) -> MappingProxyType[str, Mapping[str, Any]]:
    """Return the options of the oracles, and the options of the rule that its oracle has not."""
    return MappingProxyType({"replacement": {"name": "belady", **without}, "assignment": {"assignment": "exact"}})


class _Cache(Composed, fixed=("replacement", "staging_slots", "load_order", "cache_only")):
    """A cache that differs from the others in its replacement only; each class names the options of its own rule."""

    oracles = _oracles()
    replacement = None  # type: ignore[assignment]
    scope: Scope = "per-layer"
    slots_split: Annotated[SlotsSplit, OnlyWith(scope="per-layer")] = "spread"


class LRU(_Cache):
    """Cache that evicts the expert whose last use is longest ago."""

    oracles = _oracles(use_order=None)
    own = MappingProxyType({"replacement": replacement.LRU})
    use_order: UseOrder = option_of(replacement.LRU, NO_LOADS)


class LFU(_Cache):
    """Cache that evicts the expert used in the fewest layer visits so far."""

    oracles = _oracles(ties=None)
    own = MappingProxyType({"replacement": ranking.LFU})
    victims: Victims = option_of(ranking.LFU, NO_LOADS)
    ties: LfuTies = option_of(ranking.LFU, NO_LOADS)


class FIFO(_Cache):
    """Cache that evicts the expert that has been in it longest."""

    own = MappingProxyType({"replacement": replacement.FIFO})
    victims: Victims = option_of(replacement.FIFO, NO_LOADS)


class Belady(_Cache):
    """Cache that evicts the expert whose next use is farthest away: an oracle, which knows the future."""

    own = MappingProxyType({"replacement": ranking.Belady})
    victims: Victims = option_of(ranking.Belady, NO_LOADS)


class RandomCache(_Cache):
    """Cache that evicts at random, from a seed."""

    oracles = _oracles(seed=None)
    own = MappingProxyType({"replacement": replacement.RandomVictim})
    victims: Victims = option_of(replacement.RandomVictim, NO_LOADS)
    seed: int = option_of(replacement.RandomVictim, NO_LOADS)


class StaticCache(Composed, fixed=("replacement", "load_order", "cache_only")):
    """The most frequent experts by calibration stay on the GPU for good; others are copied for one use and dropped."""

    oracles = MappingProxyType({"assignment": {"assignment": "exact"}})  # it replaces nothing
    placement = "frequency-global"
    replacement = "static"
    prefetch: PartSpec | PrefetchPart = "none"
    scope: Annotated[Scope, MootIf(placement=DEALT_OUT)] = "global"
    slots_split: Annotated[SlotsSplit, OnlyWith(scope="per-layer"), MootIf(placement=COLD)] = "spread"
    staging_slots: Annotated[int, Range(1), MootIf(assignment=LOADS_NOTHING)] | None = None
