"""S3-FIFO: the directory of one cache of two FIFO queues, without the data.

J. Yang, Y. Zhang, Z. Qiu, Y. Yue, R. Vinayak, "FIFO Queues are All You Need for Cache Eviction", SOSP 2023. The queues' sizes, and
what a visit protects, are those of ``mosl/cachesim.py`` in moe-speed-of-light at 009be858.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container
from typing import Generic, TypeVar

Key = TypeVar("Key")

CAP = 3  # of a key's counter


class S3Fifo(Generic[Key]):
    """A small queue for newcomers, a main queue for those used more than once there, and a memory of what the small one dropped.

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
        """Whether it is in the cache."""
        return key in self._small or key in self._main

    def refuses(self, spared: Container[Key]) -> bool:
        """Say whether the cache is full of spared keys, so that the published simulator serves a newcomer without it."""
        full = len(self._small) + len(self._main) >= self.capacity
        return full and all(key in spared for queue in (self._small, self._main) for key in queue)

    def request(self, key: Key, spared: Container[Key] = ()) -> Key | None:
        """Ask for a key, which is in the cache afterwards; return the key that leaves to make room; on ``spared`` see `refuses`."""
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
        """Let one key leave a full cache; on the way others move to the main queue or to its young end."""
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
