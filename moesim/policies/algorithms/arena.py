"""The optional cache of Pre-gated MoE's released code: one arena of experts for all layers."""

from __future__ import annotations

from typing import Generic, Literal, TypeVar

Key = TypeVar("Key")
Rule = Literal["lfu", "lru", "lifo"]


class Arena(Generic[Key]):
    """Keys of a cache that learns of requests when copies are issued.

    ``lfu``: the fewest requests since it came in leaves; of equals the one whose count changed longest ago. A key that comes in
    again begins at 1. ``lru``: the one requested longest ago leaves. ``lifo``: the one that came in last leaves.

    Parameters
    ----------
    capacity : int
        Keys that it holds.
    rule : {"lfu", "lru", "lifo"}
        Who leaves.

    Examples
    --------
    >>> arena = Arena(2, "lfu")
    >>> [arena.request(key) for key in "AABCB"]  # C puts out B, which was asked for once
    [None, None, None, 'B', 'C']
    >>> "A" in arena, "C" in arena
    (True, False)
    """

    def __init__(self, capacity: int, rule: Rule = "lfu") -> None:
        self.capacity = capacity
        self.rule = rule
        self._counts: dict[Key, int] = {}  # in order of the last change

    def __contains__(self, key: object) -> bool:
        """Whether it is in the cache."""
        return key in self._counts

    def request(self, key: Key) -> Key | None:
        """Ask for a key; it is in the cache afterwards.

        Parameters
        ----------
        key : hashable
            What is asked for.

        Returns
        -------
        key or None
            What has left the cache to make room; the key itself if the cache holds nothing.
        """
        counts = self._counts
        if key in counts:
            if self.rule != "lifo":
                counts[key] = counts.pop(key) + 1
            return None
        if not self.capacity:
            return key
        victim = self._victim() if len(counts) == self.capacity else None
        if victim is not None:
            del counts[victim]
        counts[key] = 1
        return victim

    def discard(self, key: Key) -> None:
        """Forget a key, if it is there."""
        self._counts.pop(key, None)

    def reset(self) -> None:
        """Begin all counts anew at 1, as where the decoder takes over from the encoder; their order stays."""
        self._counts = dict.fromkeys(self._counts, 1)

    def _victim(self) -> Key:
        if self.rule == "lfu":
            return min(self._counts, key=self._counts.__getitem__)  # the first of equals
        return next(iter(self._counts)) if self.rule == "lru" else next(reversed(self._counts))
