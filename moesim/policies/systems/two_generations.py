"""Least stale by generations: what the present pass through the layers has not used leaves first.

SpecMD's abstract (arXiv:2602.03921) reports what its "Least-Stale" eviction gains, not how it works. The paper was not read in
full, and none of its code is public, so this is no SpecMD, and no result may be named after it. Public re-readings disagree; this is
one of them. ``least-stale`` among the replacement parts is another, by the distance of layers.

* At the begin of a pass (a step) all cached experts become stale.
* A hit makes an expert fresh; what is loaded is fresh.
* Stale experts leave first, then fresh ones, each in the order in which they became so.

Without prefetches this is LRU. With them it differs: what is prefetched and then used keeps the place of its prefetch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from moesim.policies.algorithms.generations import TwoGenerations
from moesim.policies.options import option
from moesim.policies.parts import Setup, Unit
from moesim.policies.parts.replacement import Admitting
from moesim.policy import Fetch, Routed, StepBegin, View

Freshness = Annotated[Literal["fresh", "stale"], Field(description="What a prefetched expert is until it is used.")]


class LeastStaleByGeneration(Admitting):
    """One that the present pass has not used, the first to have become stale; then of the others the first (no SpecMD)."""

    victims = "idle"  # its reading knows of no visits

    prefetched: Freshness = option("fresh")

    def start(self, setup: Setup, residents: Sequence[Sequence[int]] = ()) -> None:
        """Begin with the residents, stale."""
        n_pools = setup.view.model.n_layers if setup.per_layer else 1
        self._generations: list[TwoGenerations[Unit]] = [TwoGenerations() for _ in range(n_pools)]
        super().start(setup, residents)
        self._begin_pass()

    def step_begin(self, event: StepBegin) -> None:
        """Begin a pass."""
        self._begin_pass()

    def _begin_pass(self) -> None:
        for generations in self._generations:
            generations.begin_pass()

    def of(self, layer: int) -> TwoGenerations[Unit]:
        """Return the entries among which a fetch for a layer has its victim."""
        return self._generations[layer if self._per_layer else 0]

    def used(self, event: Routed) -> None:
        """Make hits fresh, by ascending id; what is loaded follows them."""
        super().used(event)
        entries = self.of(event.layer)
        for expert in event.active:
            entries.hit((event.layer, expert))

    def inserted(self, layer: int, experts: Sequence[int]) -> None:
        """Add what is fetched on demand or ahead."""
        entries = self.of(layer)
        for unit in ((layer, expert) for expert in experts):
            entries.insert(unit, fresh=unit in self._visit.units or self.prefetched == "fresh")

    def victim(self, fetch: Fetch, view: View) -> Unit | None:
        """Name the first, and forget it."""
        entries = self.of(fetch.layer)
        unit = self.first_resident(entries, view)
        if unit is not None:
            entries.remove(unit)
        return unit
