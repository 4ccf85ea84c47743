"""Two generations of cached experts: those of the present pass through the layers, and those not seen in it yet."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from itertools import chain
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class TwoGenerations(Generic[Key]):
    """Cache entries of which the stale ones leave first, each generation in the order in which its entries entered it.

    The two-generation reading of "least stale", of which SpecMD (arXiv:2602.03921) prints in its abstract what it gains. The paper
    was not read in full. What is cached at the start is stale, the first to leave first. An entry that is fresh and hit again keeps
    its place. Without prefetches each entry is hit at most once in a pass, and the order is that of LRU.

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
        """Make all entries stale, behind those that are."""
        self.stale.update(self.fresh)
        self.fresh.clear()

    def hit(self, key: Key) -> None:
        """Make a stale entry fresh, the last of them; nothing for one that is fresh or not cached."""
        if key in self.stale:
            del self.stale[key]
            self.fresh[key] = None

    def insert(self, key: Key, *, fresh: bool = True) -> None:
        """Add an entry behind the others of a generation; one that is cached is hit if ``fresh``, and else stays."""
        if key in self.stale or key in self.fresh:
            if fresh:
                self.hit(key)
            return
        (self.fresh if fresh else self.stale)[key] = None

    def remove(self, key: Key) -> None:
        """Take an entry out, if it is cached."""
        self.stale.pop(key, None)
        self.fresh.pop(key, None)

    def __contains__(self, key: object) -> bool:
        return key in self.stale or key in self.fresh

    def __iter__(self) -> Iterator[Key]:
        """Go through the entries, the first to leave first."""
        return chain(self.stale, self.fresh)
