"""What a composition is: four parts, by name or as objects, and the options beside them; see `moesim.policies.composed`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from moesim.policies.algorithms.caching import SlotsSplit
from moesim.policies.base import Future, PolicyBase, Range
from moesim.policies.declare import lifted_from
from moesim.policies.no_prefetch import NoPrefetch
from moesim.policies.part_names import make_part
from moesim.policies.parts import AssignmentPart, PlacementPart, PrefetchPart, ReplacementPart
from moesim.policy import LayerEnd, Predicted, Routed, StepBegin, View

PartSpec = str | Mapping[str, Any]
# It prefetches where the GPU has something to do, which it then never has.
Prefetch = PartSpec | PrefetchPart
Scope = Literal["per-layer", "global"]
PerLayerSplit = SlotsSplit
StagingSlots = Annotated[int, Range(1)] | None


class Parts(NamedTuple):
    """The four parts of a composition."""

    placement: PlacementPart
    assignment: AssignmentPart
    prefetch: PrefetchPart
    replacement: ReplacementPart


class Composition(PolicyBase):
    """Four parts and the options of what they share."""

    oracles = MappingProxyType({"replacement": {"replacement": "belady"}, "assignment": {"assignment": "exact"}})
    own: ClassVar[Mapping[str, type | Callable[[Any], Any]]] = MappingProxyType({})
    """For a composition with parts of its own: the class of each that is not named, or a function of the policy that builds it."""

    placement: PartSpec | PlacementPart = "lowest-ids"
    """What is in the cache at the start: a part by its name, by a mapping of ``name`` and its options, or the object itself."""
    assignment: PartSpec | AssignmentPart = "all-gpu"
    """Which device executes each active expert; a part."""
    prefetch: Prefetch = "none"
    """What is fetched before it is asked for; a part."""
    replacement: PartSpec | ReplacementPart = "lru"
    """What leaves the cache when something else wants its place; a part."""
    scope: Scope = "per-layer"
    """Cache slots for each layer, or one pool for all."""
    slots_split: PerLayerSplit = "spread"
    """What becomes of slots beyond an equal share of each layer: one more for some layers, evenly spaced, or unused, as
    published systems have it. For ``scope: per-layer``."""
    staging_slots: StagingSlots = None
    """Experts that lie next to the cache: all demand loads of a replacement that admits none, and of others those whose victim
    is still to run; None: the model's top_k, but at least 2."""
    load_order: Literal["id", "rows", "plan"] = "id"
    """Demand loads in ascending id, or by rows, most first, or in the order of the assignment's plan, in which the GPU then
    also executes; in the other orders it executes what is there first."""
    cache_only: bool = False
    """The assignment counts only cached experts as being on the GPU, not prefetched ones."""

    @cached_property
    def parts(self) -> Parts:
        """The parts, built at the first use."""
        return Parts(*(self._part(kind) for kind in Parts._fields))

    def _part(self, kind: str) -> Any:
        given = getattr(self, kind)
        return self.own_part(kind) if given is None else make_part(kind, given)

    def own_part(self, kind: str) -> Any:
        """Build a part of this composition that is not named, with those options of the policy that are declared as the part's."""
        own = self.own[kind]
        return own(**lifted_from(self, own)) if isinstance(own, type) else own(self)

    def adjust(self, view: View) -> None:
        """Set what parts take from the model or from each other, before they start: nothing; a preset may have its own."""

    @property
    def listens(self) -> frozenset[type]:
        """Routing; predictions if something is prefetched; layer ends if something is transient; steps if a part wants them."""
        _, _, prefetch, replacement = self.parts
        events: set[type] = {Routed}
        if prefetch.predicts:
            events.add(Predicted)
        if not replacement.admits or prefetch.transient:
            events.add(LayerEnd)
        if any(hasattr(part, "step_begin") for part in self.parts):
            events.add(StepBegin)
        return frozenset(events)

    @property
    def prefetches(self) -> bool:
        """Whether it has a part that prefetches."""
        return not isinstance(self.parts.prefetch, NoPrefetch)

    @property
    def needs(self) -> frozenset[str]:
        """What its parts need."""
        return frozenset().union(*(part.needs for part in self.parts))

    def bind_oracle(self, future: Future) -> None:
        """Hand the future to the parts that want it."""
        for part in self.parts:
            if hasattr(part, "bind_oracle"):
                part.bind_oracle(future)
