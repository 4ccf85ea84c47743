"""Expert caches by textbook: LRU, LFU, FIFO, S3-FIFO, random, static and Belady's optimum.

Baselines that differ in the replacement part only; the CPU computes no expert unless ``assignment`` says so.

| point | we do |
|---|---|
| use | all active experts of a layer are marked together, before anything leaves |
| order within a visit | one row: by rank, as in ``moesim trace stats``; several rows, or ``use_order: id``: ascending id, and for LRU what is loaded after what was cached, as in Mixtral-Offloading's code |
| victim | named when a load could start; experts of the present visit only if nothing else is there (``victims: idle``: like any other) |
| the victim is in use | leaves once idle; until then its load lies next to the cache, where top_k experts (at least 2) have room |
| too many active experts | victims are of the visit itself; what finds no room comes in waves |
| slots of a layer | the granted ones, dealt out, some layers have one more; ``slots_split: equal`` leaves a remainder unused |
| start | experts 0, 1, 2 ... of each layer (``placement``) |
| ties | LFU, Belady: used longest ago (Belady in one pool: first that of the later layer); ``ties: id`` of ``lfu``: lowest layer and id |
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from moesim.policies.composed import Composed, Parts, Scope, Split
from moesim.policies.options import option
from moesim.policies.parts import PlacementOption, PrefetchOption, ReplacementPart, replacement
from moesim.policies.parts.replacement import LfuTies, UseOrder, Victims
from moesim.policies.registry import make_part

PLANNED: Mapping[str, Mapping[str, Any]] = {"assignment": {"assignment": "exact"}}
UNROUTED_FIRST = replacement.UNROUTED_FIRST


class _Cache(Composed):
    """Experts of a cache, with one rule for who leaves it."""

    oracles = MappingProxyType({"replacement": {"name": "belady"}, **PLANNED})

    replacement: Any = None  # the class's own rule
    scope: Scope = option("per-layer")
    slots_split: Split = option("spread")
    staging_slots = None
    load_order = "id"
    cache_only = False

    def compose(self) -> Parts:
        return super().compose()._replace(replacement=self.rule())

    def rule(self) -> ReplacementPart:
        """Return what decides who leaves."""
        raise NotImplementedError


class LRU(_Cache):
    """Cache that evicts the expert whose last use is longest ago."""

    oracles = MappingProxyType({"replacement": {"name": "belady", "use_order": None}, **PLANNED})

    use_order: UseOrder = option("rank")

    def rule(self) -> ReplacementPart:
        return replacement.LRU(use_order=self.use_order)


class LFU(_Cache):
    """Cache that evicts the expert used in the fewest layer visits so far."""

    oracles = MappingProxyType({"replacement": {"name": "belady", "ties": None}, **PLANNED})

    victims: Victims = option(UNROUTED_FIRST)
    ties: LfuTies = option("last-use")

    def rule(self) -> ReplacementPart:
        return replacement.LFU(victims=self.victims, ties=self.ties)


class S3FifoCache(_Cache):
    """Cache of two FIFO queues: newcomers, and those used more than once there (S3-FIFO)."""

    victims: Victims = option(UNROUTED_FIRST)

    def rule(self) -> ReplacementPart:
        part: ReplacementPart = make_part("replacement", {"name": "s3-fifo", "victims": self.victims})
        return part


class FIFO(_Cache):
    """Cache that evicts the expert that has been in it longest."""

    victims: Victims = option(UNROUTED_FIRST)

    def rule(self) -> ReplacementPart:
        return replacement.FIFO(victims=self.victims)


class Belady(_Cache):
    """Cache that evicts the expert whose next use is farthest away: an oracle of the future."""

    victims: Victims = option(UNROUTED_FIRST)

    def rule(self) -> ReplacementPart:
        return replacement.Belady(victims=self.victims)


class RandomCache(_Cache):
    """Cache that evicts at random, from a seed."""

    oracles = MappingProxyType({"replacement": {"name": "belady", "seed": None}, **PLANNED})

    victims: Victims = option(UNROUTED_FIRST)
    seed: int = option(0, "Of the draws.")

    def rule(self) -> ReplacementPart:
        return replacement.RandomVictim(victims=self.victims, seed=self.seed)


class StaticCache(Composed):
    """The most frequent experts by calibration stay on the GPU; others are copied for one use."""

    oracles = MappingProxyType(PLANNED)  # it replaces nothing

    placement: PlacementOption = option("frequency-global")
    prefetch: PrefetchOption = option("none")
    replacement = "static"
    scope: Scope = option("global")
    staging_slots = None
    load_order = "id"
    cache_only = False
