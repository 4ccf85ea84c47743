"""Lines of hit rates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from moesim.core.colours import BLACK, GREY, WHITE
from moesim.plots.bars import legend_names
from moesim.plots.captions import averaged, caption, corner_label, repeats_sentence
from moesim.plots.exactness import inexact, meaning
from moesim.plots.failures import not_shown, not_shown_sentences
from moesim.plots.kinds import Drawing, kind
from moesim.plots.looks import Look, looks_of
from moesim.plots.rows import cache_column, policies_of, prepared, summarised
from moesim.plots.style import OPTIMUM, add_corner, legend_above, new_figure
from moesim.plots.widths import COLUMN

CHANCE: Final = "chance (cached share)"
"""Legend of what a cache with random content hits."""

_WORDS: Final = {"hit_rate_decode": "decode hit rate", "hit_rate_prefill": "prefill hit rate"}
_SERVED: Final = "A hit ran on a GPU from a copy that was there when its layer was routed."
_OPTIMUM: Final = (
    f"{OPTIMUM} knows the future, and bounds replacement only: it is the best of the caches that fetch on demand and admit every "
    "miss. A policy that runs misses on the CPU, prefetches, or chooses what it admits can lie above it."
)
_BOUND: Final = f"{OPTIMUM} bounds replacement only: prefetching can exceed it"
_PREFETCHED: Final = {"hit_rate": "prefetch_hit_share", "hit_rate_decode": "prefetch_hit_share_decode"}
"""Column of the part of a hit rate that prefetches have brought."""
_SEEN: Final = 0.01  # a part of the hit rate that is drawn
_CACHE_ALONE: Final = "cache hits alone"
"""Legend of the hollow marks."""
_PARTED: Final = (
    "Hollow marks: without the hits of a copy that a prefetch has brought since the expert was last looked up, which fill the "
    "light area up to the line."
)
_CHANCE_LOOK: Final[Any] = {"color": BLACK, "linestyle": (0, (6, 3)), "linewidth": 0.7}  # unlike any of `looks_of`
_HOLLOW: Final[Any] = {
    "linewidth": 0.6, "marker": "o", "markersize": 3.6, "markerfacecolor": WHITE, "markeredgecolor": GREY, "markeredgewidth": 0.9
}  # fmt: skip
_MARGIN: Final = 5.0  # percentage points


@kind("rows", "hit rate against cache size, with Belady and chance")
def hit_rate(frame: pd.DataFrame, metric: str | None = None) -> Drawing:
    """Lines of the hit rate by policy against the cache ratio, with Belady's emphasised and chance.

    Belady's bounds replacement only: a hollow mark tells the hits of the cache from those of a copy that a prefetch has just
    brought. Where the cache ratios span less than half of the axis, it shows no more than them.
    """
    if metric is None:
        decodes = "n_decode_tokens" not in frame or (frame["n_decode_tokens"].dropna() > 0).all()
        metric = "hit_rate_decode" if decodes else "hit_rate"
    rows = prepared(frame, "hit_rate", ["cache_ratio", metric])
    means = _with_prefetched(summarised(rows, ["policy", "cache_ratio"], metric), rows, metric)
    rank = means["policy"].map(policies_of(rows).index)
    means = means.assign(rank=rank).sort_values(["rank", "cache_ratio"], kind="stable").drop(columns="rank")
    chance = pd.DataFrame({"policy": CHANCE, "cache_ratio": [0.0, 1.0], metric: [0.0, 1.0], "n": 0})
    data = pd.concat([means, chance], ignore_index=True)
    words = _WORDS.get(metric, metric.replace("_", " "))
    policies = [name for name in policies_of(rows) if (data["policy"] == name).any()]
    names = legend_names(means, policies)
    figure, axes = new_figure(COLUMN, 2.2)
    axes.grid(visible=True, axis="both")
    for policy, look in looks_of(policies).items():
        part = data[data["policy"] == policy]
        x, y = 100 * part["cache_ratio"], 100 * part[metric]
        axes.plot(x, y, label=names[policy], **style_of(look, best=policy == OPTIMUM))
        if part["prefetched"].max() >= _SEEN:
            _cache_alone(axes, x, y, 100 * part["prefetched"], look)
        if part["low"].notna().any():
            spread = [y - 100 * part["low"], 100 * part["high"] - y]
            axes.errorbar(x, y, yerr=spread, fmt="none", ecolor=look.colour, elinewidth=0.7, capsize=1.5)
    axes.plot(100 * chance["cache_ratio"], 100 * chance[metric], label=CHANCE, zorder=1, **_CHANCE_LOOK)
    axes.set_xlim(*_limits((100 * means["cache_ratio"]).tolist()))
    axes.set_ylim(0, 103)
    axes.set_xlabel("cache ratio (% of all experts)")
    axes.set_ylabel(f"{words} (%)")
    parted = bool((means["prefetched"] >= _SEEN).any())
    handles = [*in_order(axes, names), *([Line2D([], [], label=_CACHE_ALONE, color=GREY, **_HOLLOW)] if parted else [])]
    legend_above(figure, handles, f"{words[0].upper()}{words[1:]} by cache ratio")
    notes = [*averaged(rows, ["cache_ratio"]), "one lookup per layer visit and distinct routed expert"]
    notes += [_BOUND] if OPTIMUM in names else []
    parted = bool((means["prefetched"] >= _SEEN).any())
    notes += not_shown(frame)
    add_corner(figure, corner_label(rows, "cache_ratio"), [*notes, meaning(inexact(rows))])
    sentences = [
        "One lookup per layer visit and distinct routed expert; thin, black and dashed: a cache with random content.",
        _SERVED if metric.startswith("hit_rate") else "",
        _OPTIMUM if OPTIMUM in policies_of(rows) else "",
        _PARTED if parted else "",
        "Cache ratios are those that fit into the budgets." if cache_column(rows) != "cache_ratio" else "",
    ]
    what = f"{words[0].upper()}{words[1:]} against the share of all experts that the GPU caches."
    sentences += [repeats_sentence(rows), not_shown_sentences(frame)]
    return Drawing(data, figure, caption(what, rows, ["cache_ratio", cache_column(rows)], *sentences))


def style_of(look: Look, *, best: bool = False) -> dict[str, Any]:
    """Give the style of a policy's line with a mark at each point; the optimum is wide and below, so that it hides no other."""
    return {
        "color": look.colour, "marker": look.marker, "linestyle": look.dash, "markersize": 7 if best else 4.2,
        "linewidth": 1.9 if best else 1.1, "zorder": 2.9 if best else 3, "markeredgecolor": BLACK, "markeredgewidth": 0.4,
    }  # fmt: skip


def _with_prefetched(means: pd.DataFrame, rows: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Add to hit rates the part of them that prefetches have brought; nan where it is not known."""
    column = _PREFETCHED.get(metric, "")
    if column not in rows or rows[column].isna().all():
        return means.assign(prefetched=math.nan)
    parts = summarised(rows, ["policy", "cache_ratio"], column)[["policy", "cache_ratio", column]]
    return means.merge(parts.rename(columns={column: "prefetched"}), "left", ["policy", "cache_ratio"])


def _cache_alone(axes: Axes, x: pd.Series, y: pd.Series, prefetched: pd.Series, look: Look) -> None:
    """Draw below a line the hits of the cache alone: hollow marks, a thin line, and what prefetches add as a light area."""
    below = y - prefetched
    axes.fill_between(x, below, y, color=look.colour, alpha=0.18, linewidth=0, zorder=2)
    axes.vlines(x, below, y, color=look.colour, linewidth=0.7, zorder=2)
    style = {"color": look.colour, "linestyle": look.dash, **_HOLLOW, "marker": look.marker, "markeredgecolor": look.colour}
    axes.plot(x, below, zorder=3.5, **style)


def in_order(axes: Axes, names: Mapping[str, str]) -> list[Artist]:
    """Give the lines of a legend: the policies in their order, and chance."""
    handles = {str(handle.get_label()): handle for handle in axes.get_lines()}
    return [handles[name] for name in (*names.values(), CHANCE)]


def _limits(values: Sequence[float]) -> tuple[float, float]:
    """Choose what an axis of percentages shows: all of it, unless the values span less than half."""
    low, high = min(values, default=0.0), max(values, default=100.0)
    if high - low >= 50:
        return 0.0, 100.0
    return max(0.0, low - _MARGIN), min(100.0, high + _MARGIN)
