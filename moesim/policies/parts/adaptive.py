"""Caches that learn (ARC, Fate's variant, S3-FIFO), as pure directories and as parts.

A victim that a directory names at a request is there until the engine asks for it; requested meanwhile, it is requested anew.
Directories know no visits: instead of an expert that the present visit is about to run, by default the oldest other one leaves.

N. Megiddo, D. S. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003, figure 4; `FateArc`: Fate's released
code; J. Yang et al., "FIFO Queues are All You Need for Cache Eviction", SOSP 2023.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence
from typing import Generic, Literal, TypeVar

from moesim.policies.options import option
from moesim.policies.parts import Part, Setup, Swap, Unit
from moesim.policies.parts.replacement import UNROUTED_FIRST, PresentVisit, Victims
from moesim.policy import Fetch, Routed, View

Key = TypeVar("Key")


class Arc(Generic[Key]):
    """Four lists in order of use: T1 and T2 are cached, B1 and B2 remember what has left.

    T1 and B1 hold what was asked for once of late, T2 and B2 what was asked for more often; ``target`` is the size of T1 that
    the cache aims at (the paper's p). A request of something in B1 says that T1 is too small, one in B2 that it is too large.
    ``capacity`` is at least 1 (the paper's c).

    >>> arc = Arc(2)
    >>> [arc.request(key) for key in "ABAC"]  # A moves to T2; B leaves for B1
    [None, None, None, 'B']
    >>> arc.request("B"), arc.target  # remembered: T1 should have been larger, so T2 gives way
    ('A', 1.0)
    >>> arc.lists()
    (['C'], ['B'], [], ['A'])
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.target = 0.0
        # OrderedDict finds its oldest key at once; a dict walks past all that has left since it last grew.
        self._once: OrderedDict[Key, None] = OrderedDict()  # T1
        self._often: OrderedDict[Key, None] = OrderedDict()  # T2
        self._once_gone: OrderedDict[Key, None] = OrderedDict()  # B1
        self._often_gone: OrderedDict[Key, None] = OrderedDict()  # B2

    def __contains__(self, key: object) -> bool:
        return key in self._once or key in self._often

    def request(self, key: Key, spared: Container[Key] = ()) -> Key | None:
        """Ask for a key, which is in the cache afterwards; return the key that leaves to make room.

        Those ``spared`` leave only if no other is in the cache: then the oldest other key leaves, of the other list where the rule's
        has none.
        """
        if key in self._once:
            del self._once[key]
            self._often[key] = None
            return None
        if key in self._often:
            self._often.move_to_end(key)
            return None
        if key in self._once_gone:
            self.target = min(self.capacity, self.target + self._growth())
            victim = self._replace(spared, often=False)
            del self._once_gone[key]
            self._often[key] = None
            return victim
        if key in self._often_gone:
            self.target = max(0, self.target - self._shrinkage())
            victim = self._replace(spared, often=True)
            del self._often_gone[key]
            self._often[key] = None
            return victim
        leaving = self._make_room(spared)
        self._once[key] = None
        return leaving

    def lists(self) -> tuple[list[Key], list[Key], list[Key], list[Key]]:
        """Return T1, T2, B1 and B2, each least recently used first."""
        return list(self._once), list(self._often), list(self._once_gone), list(self._often_gone)

    def _growth(self) -> float:
        """Return what the target gains when a key of B1 is asked for."""
        return max(1.0, len(self._often_gone) / len(self._once_gone))

    def _shrinkage(self) -> float:
        """Return what the target loses when a key of B2 is asked for."""
        return max(1.0, len(self._once_gone) / len(self._often_gone))

    def _forget(self) -> None:
        """Drop a remembered key when all four lists together are full."""
        _pop_oldest(self._often_gone)

    def _from_once(self, often: bool) -> bool:
        """Whether the next victim comes from T1; ``often``: the requested key is in B2."""
        n_once = len(self._once)
        return bool(n_once) and (n_once > self.target or (often and n_once == self.target))

    def _make_room(self, spared: Container[Key]) -> Key | None:
        """Make room for a key that no list knows (case IV)."""
        once = len(self._once) + len(self._once_gone)
        if once == self.capacity:
            if len(self._once) == self.capacity:  # nothing to forget: the oldest leaves and is not remembered
                return _pop_oldest(self._once, spared)
            _pop_oldest(self._once_gone)
            return self._replace(spared, often=False)
        total = once + len(self._often) + len(self._often_gone)
        if total < self.capacity:
            return None
        if total == 2 * self.capacity:
            self._forget()
        return self._replace(spared, often=False)

    def _replace(self, spared: Container[Key], often: bool) -> Key:
        """Let the oldest of T1 or T2 leave, and remember it."""
        once, twice = (self._once, self._once_gone), (self._often, self._often_gone)
        lists = (once, twice) if self._from_once(often) else (twice, once)
        held, gone = lists[0]  # not empty, as the cache is full
        if spared:
            held, gone = next((pair for pair in lists if any(key not in spared for key in pair[0])), lists[0])
        victim = _pop_oldest(held, spared)
        gone[victim] = None
        return victim


class FateArc(Arc[Key]):
    """ARC as Fate's released code has it, which differs from the published rule in four points.

    * The target grows by the whole length of T1 where a key of B1 is asked for, and shrinks by that of T2 for one of B2:
      lengths of the cached lists, not a ratio of the remembered ones, and 0 where that list is empty.
    * T1 gives way only if it is longer than the target; the published rule takes equality, too, for a key of B2.
    * When all lists are full, the oldest key of B1 is forgotten, and of B2 only if B1 is empty.
    * T2 can be empty where the rule wants a victim from it. Then the oldest of T1 leaves (the code's behaviour is not known).

    >>> arc = FateArc(3)
    >>> [arc.request(key) for key in "ABCAD"]  # A is in T2, C and D are in T1
    [None, None, None, None, 'B']
    >>> arc.request("B"), arc.target  # remembered: the target becomes as long as T1, so that T2 gives way
    ('A', 2.0)
    """

    def _growth(self) -> float:
        return len(self._once)

    def _shrinkage(self) -> float:
        return len(self._often)

    def _forget(self) -> None:
        _pop_oldest(self._once_gone or self._often_gone)

    def _from_once(self, often: bool) -> bool:
        return len(self._once) > self.target or not self._often


def _pop_oldest(keys: OrderedDict[Key, None], spared: Container[Key] = ()) -> Key:
    if not spared:
        return keys.popitem(last=False)[0]
    found = next((key for key in keys if key not in spared), None)
    key = next(iter(keys)) if found is None else found
    del keys[key]
    return key


CAP = 3  # of a key's counter


class S3Fifo(Generic[Key]):
    """A small queue for newcomers, a main one for keys used again, and a memory of the dropped.

    The small queue has a tenth of the capacity, rounded, and at least 1. As many keys are remembered as the main queue holds, and
    at least 1. 0 is used twice in the small queue, so that it moves to the main one when 3 needs room; 1 leaves, and is remembered.

    >>> cache = S3Fifo(3)
    >>> [cache.request(key) for key in (0, 0, 1, 2, 0, 3)]
    [None, None, None, None, None, 1]
    >>> cache.queues()
    ([2, 3], [0], [1])
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.small_size = max(1, (capacity + 5) // 10)
        self.main_size = capacity - self.small_size
        self.ghost_size = max(1, self.main_size)
        self._small: OrderedDict[Key, int] = OrderedDict()  # key to its counter, the oldest first
        self._main: OrderedDict[Key, int] = OrderedDict()
        self._ghosts: OrderedDict[Key, None] = OrderedDict()

    def __contains__(self, key: object) -> bool:
        return key in self._small or key in self._main

    def refuses(self, spared: Container[Key]) -> bool:
        """Whether the cache is full of spared keys, so that a newcomer is served without it."""
        full = len(self._small) + len(self._main) >= self.capacity
        return full and all(key in spared for queue in (self._small, self._main) for key in queue)

    def request(self, key: Key, spared: Container[Key] = ()) -> Key | None:
        """Insert or use a key; return the key that leaves for it. On ``spared`` see `refuses`."""
        for queue in (self._small, self._main):
            if key in queue:
                queue[key] = min(queue[key] + 1, CAP)
                return None
        seen = key in self._ghosts
        victim = self._make_room(() if self.refuses(spared) else spared)
        if seen:
            self._ghosts.pop(key, None)
        (self._main if seen else self._small)[key] = 0
        return victim

    def queues(self) -> tuple[list[Key], list[Key], list[Key]]:
        """Return the small queue, the main one and what is remembered, each the oldest first."""
        return list(self._small), list(self._main), list(self._ghosts)

    def _make_room(self, spared: Container[Key]) -> Key | None:
        """Let one key leave a full cache, moving others to the main queue or its young end."""
        victim = None
        while len(self._small) + len(self._main) >= self.capacity:
            queues = (
                (self._main, self._small) if len(self._main) > self.main_size or not self._small else (self._small, self._main)
            )
            queue, key = next((queue, key) for queue in queues for key in queue if key not in spared)
            counter = queue.pop(key)
            if queue is self._main and counter:
                queue[key] = counter - 1
            elif queue is self._small and counter > 1:
                self._main[key] = 0
            else:
                victim = key
                if queue is self._small:
                    self._remember(key)
        return victim

    def _remember(self, key: Key) -> None:
        self._ghosts[key] = None
        if len(self._ghosts) > self.ghost_size:
            self._ghosts.popitem(last=False)


class _Directed(Part):
    """Requests of a directory, for each layer or for the global pool."""

    # A layer's active cached experts are requested first, ascending, then those that are loaded, in the order of
    # their loads. A prefetch is a request, too.

    admits = True

    def start(self, setup: Setup, residents: Sequence[Sequence[int]] = ()) -> None:
        self._gpu = setup.gpu
        self._per_layer = setup.per_layer
        self._visit = PresentVisit()
        self._caches = [self._directory(slots) for slots in setup.slots]
        # Victims that the engine has not asked for yet, in the order in which they were named.
        self._leaving: list[dict[Unit, None]] = [{} for _ in setup.slots]
        for layer, experts in enumerate(residents):
            self.inserted(layer, experts)

    def _directory(self, slots: int) -> Arc[Unit] | S3Fifo[Unit]:
        raise NotImplementedError

    def _spares(self) -> bool:
        """Whether what the present layer visit is routed to goes only if nothing else is cached."""
        raise NotImplementedError

    def used(self, event: Routed) -> None:
        """Request what is cached, or was to leave and still is there."""
        self._visit.add(event)
        at = event.layer if self._per_layer else 0
        units = [(event.layer, expert) for expert in event.active]
        self._request(at, [unit for unit in units if unit in self._caches[at] or unit in self._leaving[at]])

    def inserted(self, layer: int, experts: Sequence[int]) -> None:
        """Request what is fetched into the cache, unless it is known to be coming."""
        at = layer if self._per_layer else 0
        for expert in experts:
            if (layer, expert) not in self._caches[at]:
                self._request(at, ((layer, expert),))

    def victim(self, fetch: Fetch, view: View) -> Unit | None:
        """Name the first that the directory has let go and that is there."""
        at = fetch.layer if self._per_layer else 0
        newcomer = (fetch.layer, fetch.experts[0])
        found = self._first_there(at, view)
        if found is None and newcomer not in self._caches[at]:  # later requests displaced it, and what they let go has gone
            self._request(at, (newcomer,))
            found = self._first_there(at, view)
        if found is not None:
            del self._leaving[at][found]
        return found

    def _first_there(self, at: int, view: View) -> Unit | None:
        return next((unit for unit in self._leaving[at] if view.is_resident(*unit, self._gpu)), None)

    def layer_end(self, step: int, layer: int) -> Swap | None:
        return None

    def _request(self, at: int, units: Iterable[Unit]) -> None:
        spared = self._visit.units if self._spares() else ()
        for unit in units:
            victim = self._caches[at].request(unit, spared)
            self._leaving[at].pop(unit, None)
            if victim is not None:
                self._leaving[at][victim] = None


class ArcVictim(_Directed):
    """ARC, for each layer or for the global pool (Megiddo and Modha, FAST 2003)."""

    variant: Literal["canonical", "fate"] = option(
        "canonical", "The published rule, or that of Fate's released code (`FateArc` says where it differs)."
    )
    victims: Victims | None = option(
        None,
        "Routed experts of the present layer visit go only if no others are cached, or as the rule says, "
        "which knows no visits. None: the former, but the latter for Fate, whose code asks the rule and keeps "
        "what is in use until it has run.",
    )

    def _directory(self, slots: int) -> Arc[Unit]:
        return FateArc(slots) if self.variant == "fate" else Arc(slots)

    def _spares(self) -> bool:
        default = UNROUTED_FIRST if self.variant == "canonical" else "idle"
        return (self.victims or default) == UNROUTED_FIRST


class S3FifoVictim(_Directed):
    """S3-FIFO, for each layer or for the global pool (Yang et al., SOSP 2023)."""

    # Requests are made as for ARC. Where moe-speed-of-light's rule serves a miss without the cache, since all that is
    # cached belongs to the visit, the oldest of those leaves once it has run.

    victims: Victims = option(UNROUTED_FIRST)

    def _directory(self, slots: int) -> S3Fifo[Unit]:
        return S3Fifo(slots)

    def _spares(self) -> bool:
        return self.victims == UNROUTED_FIRST
