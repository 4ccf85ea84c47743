"""What looking ahead is worth: misses of caches that know the routing of some tokens ahead, between those that know none and all.

The gap that is closed by a window is the share of the misses between a cache that goes by decayed frequency alone and the fewest
that there can be. Where half of it is closed grows with the cache: moe-speed-of-light states a power law, which is tested here.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from moesim.core.student import line
from moesim.trace.stats.balance import main_phase, select
from moesim.trace.stats.lookahead import HALF_GAP, misses_by_window

if TYPE_CHECKING:
    from moesim.trace import Trace

WINDOWS: Final = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Tokens ahead whose routing is known."""
SHARES: Final = (0.125, 0.25, 0.375, 0.5, 0.625)
"""Shares of the experts of a layer that are cached."""
MOST_TOKENS: Final = 1024
"""Decoded tokens of a trace that are counted."""
_RESAMPLES: Final = 2000


@dataclass(frozen=True)
class Line:
    """Misses of one cache size of one trace, by window."""

    model: str
    trace: str
    slots: int  # of a layer
    share: float  # of the experts of a layer
    top_k: int
    tokens: int
    misses: Mapping[int, int]  # by window
    fewest: int  # of a cache that knows everything

    def closed(self, window: int) -> float:
        """Give the share of the gap that a window closes; nan where there is no gap."""
        gap = self.misses[0] - self.fewest
        return (self.misses[0] - self.misses[window]) / gap if gap else math.nan

    @property
    def half(self) -> float | None:
        """The window that closes half of the gap, on straight lines between windows; None if none does."""
        before = None
        for window in self.misses:
            closed = self.closed(window)
            if closed >= 0.5:
                if before is None:
                    return float(window)
                at, was = before
                return at + (window - at) * (0.5 - was) / (closed - was)
            before = window, closed
        return None


@dataclass(frozen=True)
class Relation:
    """The window that closes half of the gap is ``factor * (slots / top_k) ** exponent``."""

    factor: float
    exponent: float
    # low, high: 95 % interval of the exponent, from models drawn with replacement
    low: float
    high: float
    n: int  # cache sizes of traces that it rests on

    @property
    def confirms(self) -> bool:
        """Whether the published exponent lies in the interval."""
        return self.low <= HALF_GAP[1] <= self.high


def look_ahead(
    trace: Trace, label: str, *, shares: Sequence[float] = SHARES, windows: Sequence[int] = WINDOWS, max_tokens: int = MOST_TOKENS
) -> list[Line]:
    """Count the misses of a trace's decoded tokens, one after another, for each size of cache."""
    sample = select(trace, main_phase(trace), max_tokens)
    n_experts, top_k = trace.n_experts, int(sample.experts.shape[2])
    slots = sorted({max(top_k, round(share * n_experts)) for share in shares})
    experts = sample.experts[:max_tokens]
    known = [*sorted({0, *windows}), len(experts)]
    found = misses_by_window(experts, n_experts, slots, known).sum(axis=2)
    return [
        Line(
            trace.model, label, size, size / n_experts, top_k, len(experts),
            {window: int(found[i, place]) for i, window in enumerate(known[:-1])}, int(found[-1, place]),
        )
        for place, size in enumerate(slots)
    ]  # fmt: skip


def relation(lines: Sequence[Line], seed: int = 0) -> Relation | None:
    """Fit the power law to all lines whose half is known; None if they have fewer than three, or one ratio only."""
    points = [(one.model, math.log(one.slots / one.top_k), math.log(one.half)) for one in lines if one.half and one.half > 0]
    by_model: dict[str, list[tuple[float, float]]] = {}  # its traces are not independent
    for model, x, y in points:
        by_model.setdefault(model, []).append((x, y))
    fitted = _line([point for mine in by_model.values() for point in mine])
    if fitted is None:
        return None
    draw, names, slopes = random.Random(seed), list(by_model), []
    for _ in range(_RESAMPLES):
        chosen = _line([point for name in draw.choices(names, k=len(names)) for point in by_model[name]])
        if chosen is not None:
            slopes.append(chosen[1])
    low, high = np.quantile(slopes, [0.025, 0.975])
    return Relation(math.exp(fitted[0]), fitted[1], float(low), float(high), len(points))


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """Fit a straight line by least squares; None where the points do not say which."""
    if len(points) < 3 or len({x for x, _ in points}) < 2:
        return None
    return line(points)


def records(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Write every window of every line as a row."""
    return [
        {
            "model": one.model, "trace": one.trace, "slots": one.slots, "cached_share": one.share, "top_k": one.top_k,
            "tokens": one.tokens, "window": window, "misses_per_token": misses / one.tokens,
            "fewest_per_token": one.fewest / one.tokens, "closed": one.closed(window), "half_window": one.half,
        }
        for one in lines
        for window, misses in one.misses.items()
    ]  # fmt: skip
