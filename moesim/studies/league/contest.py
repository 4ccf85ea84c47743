"""Who wins a setting: from speeds over draws of routing, and over the interval of the CPU's cost a row, to a best system."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from moesim.core.student import Mean, mean

NEAR: Final = 1.15
"""Systems that are at most so many times slower than the best of the first draw meet on the other draws, too."""
MOST: Final = 5
"""Of these so many at most, the fastest."""

LEVEL: Final = 0.95
"""Of the interval of a margin."""

NOISE, CPU_COST, ALONE = "draws of routing", "CPU cost a row", "no second system"
"""Why it is not certain who wins."""


@dataclass(frozen=True)
class Contest:
    """How a setting came out."""

    best: str
    speed: float  # of the best: geometric mean over the draws
    # of the best, of all draws
    least: float
    most: float
    second: str  # the next; empty if nobody else ran
    margin: Mean | None  # speed of the best over that of the second; None without a second
    doubts: tuple[str, ...]  # of `NOISE`, `CPU_COST` and `ALONE`; empty: it is certain

    @property
    def certain(self) -> bool:
        """Whether the best wins beyond the noise, wherever the CPU's cost lies in its interval."""
        return not self.doubts


def near(first: Mapping[str, float], factor: float = NEAR, most: int | None = MOST) -> list[str]:
    """List the systems that come near the best of the first draw, at least the two fastest and at most so many.

    >>> near({"lru": 8.0, "dali": 10.0, "on-demand": 3.0})
    ['dali', 'lru']
    """
    fastest = sorted(first, key=lambda name: -first[name])[:most]  # of equals the first
    return [name for place, name in enumerate(fastest) if place < 2 or first[name] * factor >= first[fastest[0]]]


def decide(speeds: Mapping[str, Sequence[float]], ends: Sequence[Mapping[str, float]] = ()) -> Contest:
    """Decide a setting from the speeds of each system on the same draws, and on one draw at each end of the CPU's cost a row.

    Of equals the first is the best. The margin has its 95 % interval by Student's t over the draws' ratios, on the scale of their
    logarithms. There is doubt where that holds 1, and where at an end anybody is as fast as the best.

    >>> found = decide({"lru": [8.0, 8.2], "dali": [10.0, 10.1]}, [{"lru": 8.0, "dali": 9.0}, {"lru": 8.0, "dali": 7.0}])
    >>> found.best, round(found.margin.value, 2), found.doubts
    ('dali', 1.24, ('CPU cost a row',))
    """
    means = {name: mean(values, LEVEL).value for name, values in speeds.items()}
    ranked = sorted(means, key=lambda name: -means[name])
    best = ranked[0]
    found = best, means[best], min(speeds[best]), max(speeds[best])
    if len(ranked) == 1:
        return Contest(*found, "", None, (ALONE,))
    margin = mean([a / b for a, b in zip(speeds[best], speeds[ranked[1]], strict=True)], LEVEL)
    doubts = []
    if margin.n < 2 or margin.value <= margin.factor:
        doubts.append(NOISE)
    if any(best in end and end[best] <= max((v for name, v in end.items() if name != best), default=0.0) for end in ends):
        doubts.append(CPU_COST)
    return Contest(*found, ranked[1], margin, tuple(doubts))
