"""Lines of hit rates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pandas as pd
from matplotlib.figure import Figure

from moesim.colours import BLACK, GREY, SERIES
from moesim.plots.style import (
    OPTIMUM,
    add_corner,
    averaged,
    colours_of,
    corner_label,
    legend_beside,
    mean,
    need,
    new_figure,
    policies_of,
    styled,
)

CHANCE: Final = "chance (cached share)"
"""Legend of what a cache with random content hits."""

_MARKERS: Final = "osD^vPX<>"
_WORDS: Final = {"hit_rate_decode": "decode hit rate", "hit_rate_prefill": "prefill hit rate"}
_MARGIN: Final = 5.0  # percentage points


@styled
def hit_rate(frame: pd.DataFrame, metric: str = "hit_rate_decode") -> Figure:
    """Hit rate against the cache ratio.

    Parameters
    ----------
    frame : DataFrame
        Result rows with ``policy``, ``cache_ratio`` and the metric.
    metric : str
        Any of the hit rates of `moesim.metrics.hits.hit_rates`.

    Returns
    -------
    Figure
        A line a policy, Belady's emphasised, and chance: what a cache with random content hits. Where the cache
        ratios span less than half of the axis, it shows no more than them.
    """
    need(frame, ("policy", "cache_ratio", metric), "hit_rate")
    figure, axes = new_figure(5.6, 3.8)
    policies = policies_of(frame)
    colours = colours_of(policies)
    words = _WORDS.get(metric, metric.replace("_", " "))
    shown: list[float] = []
    for policy in policies:
        rows = frame[frame["policy"] == policy]
        ratios = sorted(rows["cache_ratio"].unique())
        points = [(r, mean(rows[rows["cache_ratio"] == r], metric)) for r in ratios]
        x, y = (
            [100 * float(r) for r, v in points if v is not None],
            [100 * v for _, v in points if v is not None],
        )
        shown += x
        if policy == OPTIMUM:
            axes.plot(
                x,
                y,
                color=BLACK,
                linewidth=2.4,
                marker="*",
                markersize=9,
                label=f"{policy} (oracle)",
                zorder=4,
            )
        else:
            i = list(colours).index(policy) - 1  # the optimum is first
            axes.plot(
                x,
                y,
                color=colours[policy],
                linewidth=1.4,
                marker=_MARKERS[i % len(_MARKERS)],
                markersize=5,
                markeredgecolor=BLACK,
                markeredgewidth=0.4,
                linestyle=("-", "--", "-.")[i // len(SERIES) % 3],
                label=policy,
            )
    axes.plot([0, 100], [0, 100], color=GREY, linestyle=":", linewidth=1.2, label=CHANCE, zorder=1)
    axes.set_xlim(*_limits(shown))
    axes.set_ylim(0, 103)
    axes.set_xlabel("cache ratio (% of all experts)")
    axes.set_ylabel(f"{words} (%)")
    axes.set_title(f"{words[0].upper()}{words[1:]} by cache ratio")
    legend_beside(axes, [f"{OPTIMUM} (oracle)", *policies])
    add_corner(
        figure,
        corner_label(frame, "cache_ratio"),
        [*averaged(frame, "cache_ratio"), "one lookup per layer visit and distinct routed expert"],
    )
    return figure


def _limits(values: Sequence[float]) -> tuple[float, float]:
    """Choose what an axis of percentages shows: all of it, unless the values span less than half."""
    low, high = min(values, default=0.0), max(values, default=100.0)
    if high - low >= 50:
        return 0.0, 100.0
    return max(0.0, low - _MARGIN), min(100.0, high + _MARGIN)
