"""ARC and S3-FIFO as replacement parts: caches that balance recency and frequency by what they remember of what has left.

The algorithm decides at the moment of a request, the engine when a copy can start. So a victim that it names waits in a list until
the engine asks, and until then it is still there: asked for meanwhile, it is requested anew, and something else leaves.

Both know requests, not visits: they may name an expert that the same layer visit is about to run. By default the oldest other one
leaves instead.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Literal, Protocol

from moesim.policies.algorithms.arc import Arc, FateArc
from moesim.policies.algorithms.s3fifo import S3Fifo
from moesim.policies.parts import Part, Setup, Swap, Unit
from moesim.policies.visit import UNROUTED_FIRST, PresentVisit, Victims
from moesim.policy import Fetch, Routed, View


class Directory(Protocol):
    """What is in one cache, by a rule that names who leaves as something is asked for."""

    def __contains__(self, key: object) -> bool:
        """Whether it is in the cache."""

    def request(self, key: Unit, spared: Container[Unit] = ()) -> Unit | None:
        """Ask for a key; return what has left the cache to make room."""


class _Directed(Part):
    """Requests of a directory, for each layer or for the global pool.

    The active experts of a layer that are cached are requested first, ascending, then those that are loaded, in the order of
    their loads. A prefetch is a request, too.
    """

    admits = True
    swaps = False

    def start(self, setup: Setup, residents: Sequence[Sequence[int]] = ()) -> None:
        """Begin with the residents, requested once each."""
        self._gpu = setup.gpu
        self._per_layer = setup.per_layer
        self._visit = PresentVisit()
        self._caches = [self._directory(slots) for slots in setup.slots]
        # Victims that the engine has not asked for yet, in the order in which they were named.
        self._leaving: list[dict[Unit, None]] = [{} for _ in setup.slots]
        for layer, experts in enumerate(residents):
            self.inserted(layer, experts)

    def _directory(self, slots: int) -> Directory:
        raise NotImplementedError

    def _spares(self) -> bool:
        """Whether what the present layer visit is routed to goes only if nothing else is cached."""
        raise NotImplementedError

    def used(self, event: Routed) -> None:
        """Request what is cached, or was to leave and still is there."""
        self._visit.add(event)
        layer = event.layer
        at = layer if self._per_layer else 0
        cache, leaving = self._caches[at], self._leaving[at]
        units = [(layer, expert) for expert in event.active]
        self._request(at, [unit for unit in units if unit in cache or unit in leaving])

    def inserted(self, layer: int, experts: Sequence[int]) -> None:
        """Request what is fetched into the cache, unless it is known to be coming."""
        at = layer if self._per_layer else 0
        cache = self._caches[at]
        for expert in experts:
            if (layer, expert) not in cache:
                self._request(at, ((layer, expert),))

    def victim(self, fetch: Fetch, view: View) -> Unit | None:
        """Name the first that the directory has let go and that is there."""
        at = fetch.layer if self._per_layer else 0
        leaving, newcomer = self._leaving[at], (fetch.layer, fetch.experts[0])
        found = self._first_there(at, view)
        if found is None and newcomer not in self._caches[at]:  # later requests displaced it, and what they let go has gone
            self._request(at, (newcomer,))
            found = self._first_there(at, view)
        if found is not None:
            del leaving[found]
        return found

    def _first_there(self, at: int, view: View) -> Unit | None:
        return next((unit for unit in self._leaving[at] if view.is_resident(*unit, self._gpu)), None)

    def layer_end(self, step: int, layer: int) -> Swap | None:
        """Replace nothing: replacement happens on demand."""
        return None

    def _request(self, at: int, units: Iterable[Unit]) -> None:
        cache, leaving = self._caches[at], self._leaving[at]
        spared = self._visit.units if self._spares() else ()
        for unit in units:
            victim = cache.request(unit, spared)
            leaving.pop(unit, None)
            if victim is not None:
                leaving[victim] = None


class ArcVictim(_Directed):
    """ARC, for each layer or for the global pool (Megiddo and Modha, FAST 2003).

    The active experts of a layer that are cached are requested first, ascending, then those that are loaded, in the order of
    their loads. A prefetch is a request, too.
    """

    variant: Literal["canonical", "fate"] = "canonical"
    """The published rule, or that of Fate's released code (`FateArc` says where it differs)."""
    victims: Victims | None = None
    """Routed experts of the present layer visit go only if no others are cached, or as the rule says, which knows no
    visits. None: the former, but the latter for Fate, whose code asks the rule and keeps what is in use until it has run."""

    def _directory(self, slots: int) -> Directory:
        return FateArc(slots) if self.variant == "fate" else Arc(slots)

    def _spares(self) -> bool:
        default = UNROUTED_FIRST if self.variant == "canonical" else "idle"
        return (self.victims or default) == UNROUTED_FIRST


class S3FifoVictim(_Directed):
    """S3-FIFO, for each layer or for the global pool (Yang et al., SOSP 2023).

    Requests are made as for ARC. Where the published rule of moe-speed-of-light serves a miss without the cache, since all that
    is cached belongs to the visit, the oldest of those leaves once it has run.
    """

    victims: Victims = UNROUTED_FIRST
    """Routed experts of the present layer visit go only if no others are cached, or as the rule says, which knows no visits."""

    def _directory(self, slots: int) -> Directory:
        return S3Fifo(slots)

    def _spares(self) -> bool:
        return self.victims == UNROUTED_FIRST
