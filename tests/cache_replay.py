"""What a cache would have held, replayed over visits without a notion of time: LRU, LFU and Belady.

A *visit* is a group of lookups made together: the experts that one token, or one step, uses in one layer. Two
ways of counting it differ by up to several points, so both are here:

* **set-wise** (the default): every lookup of a visit is answered before the cache is updated. Then the
  visited keys enter or are refreshed in the order given, and only after all of them does the cache shrink to
  its capacity. This is what an engine does that asks once per layer what is resident.
  Each rule breaks ties by last use: of equals the one used longest ago goes.
* **sequential**: lookup and insertion one key at a time, as a general-purpose cache library does. An early
  miss of a visit can evict what the same visit looks up later.

A key is any hashable value: ``expert`` for one cache a layer, ``(layer, expert)`` for a global one.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence


K = TypeVar("K", bound="Hashable")
NEVER = 2**62  # next use of what is not used again


def replay_lru(
    visits: Iterable[Sequence[K]],
    capacity: int,
    *,
    sizes: Mapping[K, int] | None = None,
    set_wise: bool = True,
) -> list[bool]:
    """Replay a cache that forgets what was used longest ago.

    >>> replay_lru([[0, 1], [2, 0]], 2), replay_lru([[0, 1], [2, 0]], 2, set_wise=False)
    ([False, False, False, True], [False, False, False, False])
    """
    cached: OrderedDict[K, int] = OrderedDict()  # key -> size, least recently used first
    hits: list[bool] = []
    used = 0
    for group in _groups(visits, set_wise):
        hits += [key in cached for key in group]
        for key in group:
            size = cached.pop(key, None)
            if size is None:
                size = 1 if sizes is None else sizes[key]
                used += size
            cached[key] = size
        while used > capacity:
            used -= cached.popitem(last=False)[1]
    return hits


def replay_lfu(
    visits: Iterable[Sequence[K]],
    capacity: int,
    *,
    sizes: Mapping[K, int] | None = None,
    set_wise: bool = True,
) -> list[bool]:
    """Replay a cache that forgets what was used least often.

    Uses are counted from the start, in and out of the cache. Among equals the one used longest ago goes. What
    a visit used goes last, since it had to be brought in.

    >>> replay_lfu([[0], [0], [1], [2], [0], [1]], 2)
    [False, True, False, False, True, False]
    """
    cached: dict[K, int] = {}
    rank: dict[K, tuple[int, int]] = {}  # (uses, order of use): the smallest goes first
    queue: list[tuple[tuple[int, int], K]] = []  # entries of the past are skipped when met
    hits: list[bool] = []
    used = order = 0
    for group in _groups(visits, set_wise):
        hits += [key in cached for key in group]
        for key in group:
            order += 1
            rank[key] = (rank[key][0] + 1 if key in rank else 1, order)
            if key not in cached:
                cached[key] = 1 if sizes is None else sizes[key]
                used += cached[key]
        while used > capacity:
            used -= cached.pop(_lowest(queue, cached, group, rank))
        for key in dict.fromkeys(group):
            if key in cached:
                heapq.heappush(queue, (rank[key], key))
    return hits


def replay_belady(
    visits: Iterable[Sequence[K]],
    capacity: int,
    *,
    sizes: Mapping[K, int] | None = None,
    set_wise: bool = True,
    keep_visit: bool = False,
) -> list[bool]:
    """Replay a cache that knows the future, and keeps what is used again soonest.

    Among equals the one used longest ago goes. A key that was only just used may be the one that goes: no cache that fetches
    on demand has more hits if all sizes are equal. With different sizes it is a strong heuristic, not an optimum.

    >>> replay_belady([[0], [1], [2], [0], [1]], 2), replay_belady([[0], [1], [2], [0], [1]], 2, keep_visit=True)
    ([False, False, False, True, True], [False, False, False, True, False])
    """
    groups = [list(g) for g in _groups(visits, set_wise)]
    upcoming = _next_uses(groups)
    cached: dict[K, int] = {}
    rank: dict[K, tuple[int, int]] = {}  # (-next use, order of use): the smallest goes first
    queue: list[tuple[tuple[int, int], K]] = []  # entries of the past are skipped when met
    hits: list[bool] = []
    used = order = 0
    for group, uses in zip(groups, upcoming, strict=True):
        hits += [key in cached for key in group]
        for key, use in zip(group, uses, strict=True):
            order += 1
            rank[key] = (-use, order)
            if key not in cached:
                cached[key] = 1 if sizes is None else sizes[key]
                used += cached[key]
            if not keep_visit:
                heapq.heappush(queue, (rank[key], key))
        while used > capacity:
            used -= cached.pop(_lowest(queue, cached, group, rank))
        if keep_visit:
            for key in dict.fromkeys(group):
                if key in cached:
                    heapq.heappush(queue, (rank[key], key))
    return hits


def _lowest(
    queue: list[tuple[tuple[int, int], K]], cached: Mapping[K, int], group: Sequence[K], rank: Mapping[K, tuple[int, int]]
) -> K:
    """Take the cached key of the smallest rank out of a queue; of the group that has been looked up, if it holds no other."""
    while queue:
        now, key = heapq.heappop(queue)
        if key in cached and rank[key] == now:
            return key
    return min((key for key in group if key in cached), key=lambda key: rank[key])


def _next_uses(groups: Sequence[Sequence[K]]) -> list[list[int]]:
    """For each lookup, the number of the next visit that uses its key."""
    seen: dict[K, int] = {}
    result: list[list[int]] = []
    for i in range(len(groups) - 1, -1, -1):
        result.append([seen.get(key, NEVER) for key in groups[i]])
        seen |= dict.fromkeys(groups[i], i)
    return result[::-1]


def _groups(visits: Iterable[Sequence[K]], set_wise: bool) -> Iterable[Sequence[K]]:
    return visits if set_wise else ([key] for visit in visits for key in visit)
