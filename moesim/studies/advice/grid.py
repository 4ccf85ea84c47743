"""Which numbers of a family a search tries, and which candidates it keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from moesim.studies.advice.candidates import Candidate
from moesim.studies.advice.families import Family

COARSE: Final = 4
"""Points of a family's coarse grid."""


def coarse(numbers: Sequence[int]) -> list[int]:
    """Spread points evenly over a range, both ends among them."""
    last = len(numbers) - 1
    if last < COARSE:
        return list(numbers)
    return [numbers[round(last * point / (COARSE - 1))] for point in range(COARSE)]


def halves(numbers: Sequence[int], speeds: Mapping[int, float]) -> list[int]:
    """Give the middle of the gaps on both sides of the fastest number; nothing if its neighbours are known."""
    known = [place for place, number in enumerate(numbers) if number in speeds]
    if not known:
        return []
    best = max(range(len(known)), key=lambda at: (speeds[numbers[known[at]]], -at))
    around: Callable[[int, int], list[int]] = lambda a, b: [numbers[(a + b) // 2]] if b - a > 1 else []  # noqa: E731
    below = around(known[best - 1], known[best]) if best > 0 else []
    above = around(known[best], known[best + 1]) if best + 1 < len(known) else []
    return below + above


def additions(families: Iterable[Family], speeds: Mapping[Candidate, float]) -> list[tuple[Family, int]]:
    """Choose where to try what families add to others: once each, to the fastest candidate of the others, at its number."""
    by: dict[str, dict[str, Family]] = {}
    for family in families:
        by.setdefault(family.name.removeprefix(family.like), {})[family.like] = family
    chosen = []
    for others in by.values():
        fastest = max((one for one in speeds if one.family in others), key=speeds.__getitem__, default=None)
        if fastest is not None:
            chosen.append((others[fastest.family], fastest.number or 0))
    return chosen


def varied(ranked: Sequence[Candidate], n: int) -> list[Candidate]:
    """Take the first of each kind, then the rest in order: runners-up of other engines are worth more than neighbours."""
    firsts = list({one.kind: one for one in reversed(ranked)}.values())
    order = [one for one in ranked if one in firsts] + [one for one in ranked if one not in firsts]
    kept = {ranked[0], *order[:n]} if ranked else set()
    return [one for one in ranked if one in kept]
