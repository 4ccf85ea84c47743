"""A prefetcher next to least-stale eviction by generations; see `moesim.policies.systems.two_generations` for what is known of it."""

from __future__ import annotations

from typing import Any

from moesim.policies.composed import Composed, Parts, Scope
from moesim.policies.options import option
from moesim.policies.parts import PlacementOption, PrefetchOption
from moesim.policies.parts.prefetch import Lane, Source, TopPredicted
from moesim.policies.systems.two_generations import Freshness, LeastStaleByGeneration
from moesim.policy import View


class LeastStale2Gen(Composed):
    """Prefetch into one cache for all layers, which evicts first what the present pass has not used (no SpecMD).

    The two-generation reading of "least stale". SpecMD (arXiv:2602.03921) was not read in full; only its abstract was.
    """

    missing = (
        "SpecMD: only its abstract was read; this is one of several public readings of its eviction",
        "its prefetcher: the next layer's gate on the present state stands next to the eviction",
    )

    placement: PlacementOption = option("none")
    prefetch: PrefetchOption | None = option(None, "Another prefetch, without the options of its own.")  # type: ignore[assignment]
    replacement: Any = None  # its own
    scope: Scope = option("global")
    slots_split = "spread"
    staging_slots = None
    load_order = "id"
    cache_only = False
    prefetched: Freshness = option("fresh")
    prefetch_source: Source = option("signal:gate_next1")
    prefetch_size: int | None = option(None, "Experts of a layer visit to prefetch; null: as many as a row uses.", ge=1)
    lane: Lane = option("main")

    def compose(self) -> Parts:
        """Return its decisions, or what is named instead of one."""
        ahead = TopPredicted(source=self.prefetch_source, lane=self.lane, pool="cache", size=self.prefetch_size or 1)
        return Parts(
            placement=self.named("placement"),
            assignment=self.named("assignment"),
            prefetch=self.named("prefetch", ahead),
            replacement=LeastStaleByGeneration(prefetched=self.prefetched),
        )

    def adjust(self, view: View) -> None:
        """Prefetch as many experts as a row uses, if no number is given."""
        if self.prefetch is None and self.prefetch_size is None:
            self.parts.prefetch.size = view.model.top_k  # type: ignore[attr-defined]
