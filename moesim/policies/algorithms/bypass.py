"""A cache that may refuse a newcomer: what it holds after a visit, by the worth of each expert."""

from __future__ import annotations

from collections.abc import Callable, Iterable

Worth = tuple[bool, float]
"""Whether the next use is known, and then the negative of its time, else a score: compared in this order."""


def kept_with_bypass(
    cached: Iterable[int], misses: Iterable[int], slots: int, worth: Callable[[int], Worth], kappa: float = 0.0
) -> set[int]:
    """Return what a cache holds after a visit, if a miss enters only where it is worth more than who would leave.

    Parameters
    ----------
    cached : iterable of int
        What it holds before; those that the visit uses may leave like any other.
    misses : iterable of int
        Experts of the visit that may enter; taken by ascending id.
    slots : int
        Experts that it holds; free ones are always filled.
    worth : callable
        Of an expert; of equals the lowest id leaves, and what is cached stays.
    kappa : float
        By how much more a newcomer must be worth whose next use is not known.

    Returns
    -------
    set of int

    References
    ----------
    moe-speed-of-light, ``mosl/cachesim.py`` at 009be858: MIN with bypass, and windowed Belady.

    Examples
    --------
    >>> next_use = {0: 9, 1: 3, 2: 5}
    >>> sorted(kept_with_bypass([0, 1], [2], 2, lambda e: (True, -next_use[e])))
    [1, 2]
    """
    kept = set(cached)
    for expert in sorted(misses):
        if len(kept) < slots:
            kept.add(expert)
        elif kept:
            victim = min(sorted(kept), key=worth)
            known, value = worth(expert)
            if (known, value if known else value - kappa) > worth(victim):
                kept.remove(victim)
                kept.add(expert)
    return kept
