"""EdgeMoE, as others describe it: experts preloaded; the farthest layers leave first.

EdgeMoE's own paper was not read and no scheduler code is released: each point is as OD-MoE (2025), DAOP (2025) and DALI (2026)
describe it, or a choice.

| point | paper says | released code does | we do |
|---|---|---|---|
| prediction | statistics (DALI): how often each expert was active (OD-MoE) | none | co-activation of this layer's experts with the next's, from calibration [choice]; ``prefetch_source: frequency`` is OD-MoE's |
| what is preloaded | not known | none | of the next layer the ``prefetch_size`` experts with the most predicted rows, into the cache; as many as a row uses |
| victim | of the layer farthest from the present one (OD-MoE) | none | of the layer the pass comes to last; ``distance: absolute``: in the stack |
| within a layer | not known | none | used longest ago |
| what the present layer uses | not known | none | goes last (``victims``) |
| start | not known | none | empty (``placement``) |
| widths of experts | each its own (DAOP) | none | one for all |
| CPU | experts are copied to the GPU first (DALI) | none | computes no expert (``assignment``) |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from moesim.errors import ConfigError
from moesim.policies.composed import Composed, Parts
from moesim.policies.options import option
from moesim.policies.parts import PlacementOption, PrefetchOption, ReplacementOption, Setup, Unit
from moesim.policies.parts.prefetch import Source, TopPredicted
from moesim.policies.parts.replacement import LRU, UNROUTED_FIRST, Victims
from moesim.policy import Fetch, Routed, View


def farthest_layers(layer: int, n_layers: int, distance: Literal["next-pass", "absolute"]) -> list[int]:
    """Order all layers by the passes to come (or ``absolute`` distance), farthest first.

    >>> farthest_layers(2, 5, "next-pass"), farthest_layers(2, 5, "absolute")
    ([2, 1, 0, 4, 3], [0, 4, 1, 3, 2])
    """
    waits = [(j - layer - 1) % n_layers + 1 for j in range(n_layers)]
    if distance == "next-pass":
        return sorted(range(n_layers), key=lambda j: -waits[j])
    return sorted(range(n_layers), key=lambda j: (-abs(j - layer), -waits[j]))


Distance = Annotated[
    Literal["next-pass", "absolute"],
    Field(
        description="How far a layer is: until the pass comes to it again, or in the stack, either way (ties: the one passed already)."
    ),
]
LastVictims = Annotated[
    Victims,
    Field(
        description="Routed experts of the present layer visit are named only if there are no others, or with their layer, which by "
        "the absolute distance goes last anyway; they leave after their run."
    ),
]


class LeastStale(LRU):
    """The one whose layer is farthest in the order of layers; needs a global pool."""

    # With layer l just routed, l + 1 is 1 away, and so on round the model; the rest of l is a whole pass away, the
    # farthest. By the distance in the stack both ends go before its neighbours, and l last. Within a layer: used
    # longest ago.

    use_order = "rank"

    distance: Distance = option("next-pass")
    victims: LastVictims = option(UNROUTED_FIRST)

    def start(self, setup: Setup, residents: Sequence[Sequence[int]] = ()) -> None:
        if setup.per_layer:
            raise ConfigError(
                "replacement least-stale: expected scope 'global', got 'per-layer', where all have one distance; "
                "choose lru, or scope: global in a policy that has that option"
            )
        super().start(setup._replace(per_layer=True), residents)  # its lists are kept by layer, each in order of use
        n_layers = setup.view.model.n_layers
        self._orders = [farthest_layers(layer, n_layers, self.distance) for layer in range(n_layers)]
        self._now = n_layers - 1  # the layer routed last

    def used(self, event: Routed) -> None:
        self._now = event.layer
        super().used(event)

    def victim(self, fetch: Fetch, view: View) -> Unit | None:
        found = self.first_resident((unit for layer in self._orders[self._now] for unit in self._members[layer]), view)
        if found is not None:
            del self._members[found[0]][found]
        return found


ANOTHER_PART = "Another part than EdgeMoE's, without the options that describe EdgeMoE's."


class EdgeMoE(Composed):
    """Experts preloaded by statistics; the cache gives up the farthest layers first (EdgeMoE)."""

    paper = "EdgeMoE, as OD-MoE (2025) and DALI (2026) describe it"
    missing = (
        "its own paper was not read: prediction and eviction are as other papers describe them",
        "widths of its experts, each of which has its own: one for all",
        "how many experts it preloads, when, and where to: not known",
        "what is in its cache at the start, and the order of victims within a layer: not known",
    )

    placement: PlacementOption = option("none")
    prefetch: PrefetchOption | None = option(None, ANOTHER_PART)  # type: ignore[assignment]
    replacement: ReplacementOption | None = option(None, ANOTHER_PART)  # type: ignore[assignment]
    scope = "global"
    slots_split = "spread"
    staging_slots = None
    load_order = "id"
    cache_only = False
    distance: Distance = option("next-pass")
    victims: LastVictims = option(UNROUTED_FIRST)
    prefetch_source: Source = option("coactivation")
    prefetch_size: int | None = option(None, "Experts of a layer visit to preload; null: as many as a row uses.", ge=1)

    def compose(self) -> Parts:
        preload = TopPredicted(source=self.prefetch_source, pool="cache", size=self.prefetch_size or 1)
        return Parts(
            placement=self.named("placement"),
            assignment=self.named("assignment"),
            prefetch=self.named("prefetch", preload),
            replacement=self.named("replacement", LeastStale(distance=self.distance, victims=self.victims)),
        )

    def adjust(self, view: View) -> None:
        """Preload as many experts as a row uses, if no number is given."""
        if self.prefetch is None and self.prefetch_size is None:
            self.parts.prefetch.size = view.model.top_k  # type: ignore[attr-defined]
