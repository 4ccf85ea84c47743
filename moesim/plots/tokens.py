"""Lines of the hit rate by token index."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from moesim.core.colours import BLACK, GREY
from moesim.errors import ConfigError
from moesim.plots.bars import legend_names
from moesim.plots.captions import averaged, caption, corner_label
from moesim.plots.exactness import inexact, meaning
from moesim.plots.kinds import Drawing, kind
from moesim.plots.lines import CHANCE, in_order
from moesim.plots.looks import Look, looks_of
from moesim.plots.rows import policies_of, prepared, qualified
from moesim.plots.style import OPTIMUM, add_corner, legend_above, new_figure
from moesim.plots.widths import COLUMN

_MARKS: Final = 8  # on a line
_COLUMNS: Final = ("phase", "token", "lookups", "hits", "cache_share")


def _by_token(rows: pd.DataFrame, smooth: int) -> pd.DataFrame:
    """Compute the hit rate by token index."""
    if smooth < 1 or smooth % 2 == 0:
        raise ConfigError(f"plot hit_rate_by_token: smooth: expected an odd number of tokens from 1, got {smooth}")
    parts = []
    for policy in policies_of(rows):
        mine = rows[rows["policy"] == policy]
        counts = mine.groupby("token")[["lookups", "hits"]].sum()
        around = counts.rolling(smooth, center=True, min_periods=1).sum()
        part = counts.assign(hit_rate=around["hits"] / around["lookups"].where(around["lookups"] > 0)).reset_index()
        parts.append(part.assign(policy=policy, **qualified(mine)))
    data = pd.concat(parts, ignore_index=True)
    shares = sorted({float(rows["cache_share"].min()), float(rows["cache_share"].max())})
    ends = [int(data["token"].min()), int(data["token"].max())]
    chance = pd.DataFrame([{"policy": CHANCE, "token": end, "hit_rate": share} for share in shares for end in ends])
    columns = ["policy", "token", "lookups", "hits", "hit_rate", "fresh", "source_label"]
    whole = {"lookups": "Int64", "hits": "Int64"}  # chance has none
    return pd.concat([data, chance], ignore_index=True)[columns].astype(whole)


def _decoded(frame: pd.DataFrame) -> pd.DataFrame:
    rows = prepared(frame, "hit_rate_by_token", _COLUMNS)
    rows = rows[(rows["phase"] == "decode") & rows["token"].notna()]
    if rows.empty:
        raise ConfigError(
            "plot hit_rate_by_token: expected decode steps with a token index, got none; runs with refill have none, as their "
            "sequences are at different tokens"
        )
    return rows.assign(token=rows["token"].astype(np.int64))


@kind("steps", "hit rate of decoding by token index")
def hit_rate_by_token(frame: pd.DataFrame, smooth: int = 1) -> Drawing:
    """Lines of the hit rate of decoding by token index."""
    rows = _decoded(frame)
    data = _by_token(rows, smooth)
    policies = policies_of(rows)
    names = legend_names(data, policies)
    figure, axes = new_figure(COLUMN, 2.1)
    axes.grid(visible=True, axis="both")
    for number, (policy, look) in enumerate(looks_of(policies).items()):
        part = data[data["policy"] == policy]
        _line(axes, part["token"], 100 * part["hit_rate"], names[policy], look, number, policy == OPTIMUM)
    chance = data[data["policy"] == CHANCE]
    for share in chance["hit_rate"].unique():
        axes.axhline(100 * share, color=GREY, linestyle=":", linewidth=1.2, zorder=1, label=CHANCE)
    axes.set_xlim(int(data["token"].min()), int(data["token"].max()))
    axes.set_ylim(0, min(103, 10 * math.ceil(10.5 * data["hit_rate"].max())))
    axes.set_xlabel("decode token")
    axes.set_ylabel("hit rate (%)")
    legend_above(figure, in_order(axes, names), "Hit rate by token")
    notes = [*averaged(rows, []), f"moving mean of {smooth} tokens" if smooth > 1 else "", meaning(inexact(rows))]
    add_corner(figure, corner_label(rows), notes)
    per_token = rows.groupby(["policy", "token"])["lookups"].sum()
    low, high = int(per_token.min()), int(per_token.max())
    sentences = [
        f"A point is hits over lookups of {low}{f' to {high}' if high > low else ''} lookups, one for each layer and distinct "
        "routed expert of the step.",
        f"Each point is taken over {smooth} neighbouring tokens." if smooth > 1 else "",
        "Dotted: a cache with random content.",
        f"{OPTIMUM} knows the future." if OPTIMUM in policies else "",
    ]
    what = "Hit rate of decoding by token index: the first token of decoding is 1."
    return Drawing(data, figure, caption(what, rows, [], *sentences))


def _line(axes: Axes, x: Any, y: Any, name: str, look: Look, number: int, best: bool) -> None:
    every = max(1, len(x) // _MARKS)
    axes.plot(
        x, y, label=name, color=look.colour, marker=look.marker, linestyle=look.dash, markersize=6 if best else 3.6,
        markevery=(number * every // 3 % every, every), linewidth=1.7 if best else 1.0, zorder=2.9 if best else 3,
        markeredgecolor=BLACK, markeredgewidth=0.4, clip_on=False,
    )  # fmt: skip
