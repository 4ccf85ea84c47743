"""What looking ahead is worth: the gap that is closed over the window, and where half of it is, over the size of the cache."""

from __future__ import annotations

from typing import Final

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from moesim.core.colours import BLACK
from moesim.core.student import line
from moesim.plots.kinds import Drawing, kind
from moesim.plots.looks import look
from moesim.plots.style import add_corner, legend_above, need
from moesim.plots.widths import TEXT, is_narrow, width_for
from moesim.trace.stats.lookahead import HALF_GAP

_COLUMNS: Final = ("model", "trace", "slots", "cached_share", "top_k", "tokens", "window", "closed", "half_window")
_SHARE: Final = 0.25  # of the curves on the left: the size nearest to it


@kind("lookahead", "what knowing some tokens ahead is worth to a cache")
def lookahead(frame: pd.DataFrame) -> Drawing:
    """Share of the gap that a window closes, by trace; and the window of half the gap over slots / top-k."""
    need(frame, _COLUMNS, "lookahead")
    models = list(dict.fromkeys(frame["model"]))
    width = width_for(TEXT)
    figure = Figure(figsize=(width, 4.6 if is_narrow(width) else 2.4), layout="constrained")
    left, right = figure.subplots(2, 1) if is_narrow(width) else figure.subplots(1, 2)
    handles = []
    for place, model in enumerate(models):
        rows, style = frame[frame["model"] == model], look(place)
        nearest = (rows["cached_share"] - _SHARE).abs()
        curve = rows[nearest == nearest.min()].groupby("window")["closed"].mean()
        plain = {"color": style.colour, "linestyle": style.dash, "marker": style.marker, "markersize": 3.5, "linewidth": 1.2}
        handles += left.plot(curve.index, 100 * curve.to_numpy(), label=model, **plain)
        halves = rows.drop_duplicates(["trace", "slots"]).dropna(subset=["half_window"])
        right.plot(halves["slots"] / halves["top_k"], halves["half_window"], **{**plain, "linestyle": ""})
    left.set_xscale("symlog", base=2, linthresh=1)
    left.set_xticks([0, 1, 2, 4, 8, 16, 32, 64], ["0", "1", "2", "4", "8", "16", "32", "64"])
    left.set_ylim(-3, 103)
    left.set_xlabel("tokens ahead that are known")
    left.set_ylabel("gap closed (%)")
    ratios = frame["slots"] / frame["top_k"]
    across = np.array([ratios.min(), ratios.max()])
    halves = frame.drop_duplicates(["trace", "slots"]).dropna(subset=["half_window"]).query("half_window > 0")
    if len(halves) > 2 and (halves["slots"] / halves["top_k"]).nunique() > 1:
        offset, slope = line(list(zip(np.log(halves["slots"] / halves["top_k"]), np.log(halves["half_window"]), strict=True)))
        handles += right.plot(
            across, np.exp(offset) * across**slope, color=BLACK, linewidth=1.2,
            label=f"fitted: {np.exp(offset):.2f} (slots / k)^{slope:.2f}",
        )  # fmt: skip
    handles += right.plot(
        across, HALF_GAP[0] * across ** HALF_GAP[1], color=BLACK, linewidth=1.2, linestyle="--",
        label=f"published: {HALF_GAP[0]} (slots / k)^{HALF_GAP[1]}",
    )  # fmt: skip
    right.set_xscale("log", base=2)
    right.set_yscale("log", base=2)
    for axis in (right.xaxis, right.yaxis):
        axis.set_major_formatter(lambda value, place: f"{value:g}")
    right.set_xlabel("slots of a layer / experts a token")
    right.set_ylabel("tokens ahead for half the gap")
    legend_above(figure, handles, "What looking ahead is worth to a cache")
    add_corner(figure, "", [f"left: caches of the size nearest to {_SHARE:.0%} of a layer's experts; counted from traces"])
    told = (
        "Left: share of the misses between a cache that goes by decayed frequency and the fewest that can be which knowing some "
        f"tokens ahead avoids, for the size nearest to {_SHARE:.0%} of a layer's experts; mean over a model's traces. Right: "
        "tokens ahead that avoid half of them, for every trace and size; line: fitted to them; dashed: the relation that "
        "moe-speed-of-light publishes. "
        f"One cache a layer, batch 1, {int(frame['tokens'].max())} decoded tokens at most; traces: "
        f"{', '.join(dict.fromkeys(frame['trace']))}."
    )
    return Drawing(frame.reset_index(drop=True), figure, told)
