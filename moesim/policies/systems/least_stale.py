"""Least stale by generations: experts unused in the present pass leave first.

SpecMD's abstract (arXiv:2602.03921) reports what its "Least-Stale" eviction gains, not how it works; the paper was not read in
full and no code is public. Public re-readings disagree; this is one, and no result may be named SpecMD. ``least-stale`` among
the replacement parts is another, by the distance of layers.

* At the begin of a pass (a step) all cached experts become stale.
* A hit makes an expert fresh; what is loaded is fresh.
* Stale experts leave first, then fresh ones, each in the order in which they became so.

Without prefetches this is LRU. With them, what is prefetched and then used keeps the place of its prefetch.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import Field

from moesim.policies.composed import Composed, Parts, Scope
from moesim.policies.options import option
from moesim.policies.parts import PlacementOption, PrefetchOption, Setup, Unit
from moesim.policies.parts.prefetch import Source, TopPredicted
from moesim.policies.parts.replacement import Admitting
from moesim.policy import Fetch, Routed, StepBegin, View

Key = TypeVar("Key", bound=Hashable)


class TwoGenerations(Generic[Key]):
    """Cache entries of which the stale ones leave first, each generation in order of entry.

    What is cached at the start is stale; an entry that is fresh and hit again keeps its place.

    >>> cache = TwoGenerations("ab")
    >>> cache.insert("c")
    >>> cache.hit("a")
    >>> list(cache)
    ['b', 'c', 'a']
    >>> cache.begin_pass()
    >>> cache.hit("b")
    >>> list(cache)
    ['c', 'a', 'b']
    """

    def __init__(self, entries: Iterable[Key] = ()) -> None:
        self.stale: dict[Key, None] = dict.fromkeys(entries)
        self.fresh: dict[Key, None] = {}

    def begin_pass(self) -> None:
        """Mark all entries stale, behind those that are."""
        self.stale.update(self.fresh)
        self.fresh.clear()

    def hit(self, key: Key) -> None:
        """Mark a stale entry fresh, the last of them; others stay."""
        if key in self.stale:
            del self.stale[key]
            self.fresh[key] = None

    def insert(self, key: Key, *, fresh: bool = True) -> None:
        """Add an entry at a generation's end; one that is cached is hit if ``fresh``, else stays."""
        if key in self.stale or key in self.fresh:
            if fresh:
                self.hit(key)
            return
        (self.fresh if fresh else self.stale)[key] = None

    def remove(self, key: Key) -> None:
        self.stale.pop(key, None)
        self.fresh.pop(key, None)

    def __iter__(self) -> Iterator[Key]:
        return chain(self.stale, self.fresh)


Freshness = Annotated[Literal["fresh", "stale"], Field(description="What a prefetched expert is until it is used.")]


class LeastStaleByGeneration(Admitting):
    """The first that the present pass has not used, then the first of the others (no SpecMD)."""

    victims = "idle"  # its reading knows of no visits

    prefetched: Freshness = option("fresh")

    def start(self, setup: Setup, residents: Sequence[Sequence[int]] = ()) -> None:
        n_pools = setup.view.model.n_layers if setup.per_layer else 1
        self._generations: list[TwoGenerations[Unit]] = [TwoGenerations() for _ in range(n_pools)]
        super().start(setup, residents)
        self._begin_pass()

    def step_begin(self, event: StepBegin) -> None:
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
        entries = self.of(layer)
        for unit in ((layer, expert) for expert in experts):
            entries.insert(unit, fresh=unit in self._visit.units or self.prefetched == "fresh")

    def victim(self, fetch: Fetch, view: View) -> Unit | None:
        entries = self.of(fetch.layer)
        unit = self.first_resident(entries, view)
        if unit is not None:
            entries.remove(unit)
        return unit


class LeastStale2Gen(Composed):
    """Prefetch into one cache, which evicts first what this pass has not used (no SpecMD)."""

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

    def compose(self) -> Parts:
        ahead = TopPredicted(source=self.prefetch_source, pool="cache", size=self.prefetch_size or 1)
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
