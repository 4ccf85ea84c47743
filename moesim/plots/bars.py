"""Bars of decode speed, and stacked bars of time by cause."""

from __future__ import annotations

from typing import Final

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from moesim.colours import BLACK, FILL, HATCH, LABEL
from moesim.metrics.causes import CAUSES
from moesim.plots.style import (
    CONDITIONED,
    add_corner,
    averaged,
    colours_of,
    corner_label,
    group_name,
    legend_beside,
    lossy_mark,
    mean,
    need,
    new_figure,
    policies_of,
    short,
    styled,
)
from moesim.units import NS_PER_MS

AXIS: Final = {
    "cache_ratio": "share of all experts that the GPU cache holds",
    "cache_budget_bytes": "GPU memory budget",
    "batch_size": "batch size (requests)",
}
"""Words for the columns by which results are grouped."""

_WORD: Final = {"cache_ratio": "cache", "cache_budget_bytes": "cache", "batch_size": "batch"}
_VISIBLE: Final = 0.0005  # of a bar; less is 0.0%, and has no entry in the legend


@styled
def decode_speed(frame: pd.DataFrame, group: str = "cache_ratio") -> Figure:
    """Decode speed by policy, grouped by cache ratio, memory budget or batch size.

    Parameters
    ----------
    frame : DataFrame
        Result rows with ``policy``, ``decode_tokens_per_s`` and the column of groups. Several rows
        of a bar are averaged.
    group : str
        ``"cache_ratio"``, ``"cache_budget_bytes"`` or ``"batch_size"``.

    Returns
    -------
    Figure
        Bars; one that computed anything else than the model asked for is hatched and carries its fresh
        share of gate mass.
    """
    need(frame, ("policy", group, "decode_tokens_per_s"), "decode_speed")
    policies, groups = policies_of(frame), sorted(frame[group].unique())
    colours = colours_of(policies)
    n_bars = len(policies) * len(groups)
    figure, axes = new_figure(max(4.5, 1.9 + 0.33 * n_bars), 3.6)
    width = 0.84 / len(policies)
    notes = averaged(frame, group)
    for i, policy in enumerate(policies):
        label: str | None = policy  # of the first of its bars
        for j, value in enumerate(groups):
            rows = frame[(frame["policy"] == policy) & (frame[group] == value)]
            speed = mean(rows, "decode_tokens_per_s")
            if speed is None:
                continue
            mark = lossy_mark(rows)
            x = j + (i - (len(policies) - 1) / 2) * width
            axes.bar(
                x,
                speed,
                width * 0.94,
                color=colours[policy],
                edgecolor=BLACK,
                linewidth=0.6,
                hatch="//" if mark else None,
                label=label,
            )
            label = None
            text = short(speed)
            if mark:
                text += f"\n{mark}"
                notes = [*averaged(frame, group), CONDITIONED]
            axes.annotate(text, (x, speed), (0, 2), textcoords="offset points", ha="center", fontsize=6.5)
    axes.set_xticks(range(len(groups)), [group_name(value, group) for value in groups])
    axes.tick_params(axis="x", length=0)
    axes.margins(y=0.15)
    axes.set_xlabel(AXIS.get(group, group))
    axes.set_ylabel("decode speed (tokens/s, whole batch)")
    axes.set_title("Decode speed by policy")
    legend_beside(axes, policies)
    add_corner(figure, corner_label(frame, group), notes)
    return figure


@styled
def breakdown(frame: pd.DataFrame, prefix: str = "time", group: str | None = None) -> Figure:
    """Time by cause, one stacked bar a run.

    Parameters
    ----------
    frame : DataFrame
        Result rows with ``policy`` and ``<prefix>_<cause>_ns``.
    prefix : str
        ``"time"`` for the whole run, ``"decode_time"`` for its decode steps (then per decode token, if
        the frame has ``n_decode_tokens``).
    group : str, optional
        A column that is added to the names of the bars, such as ``"cache_ratio"``.

    Returns
    -------
    Figure
        Horizontal bars in ms with the causes in the order of `CAUSES`. The legend leaves out those that are
        0.0% of every bar.
    """
    columns = [f"{prefix}_{cause}_ns" for cause in CAUSES]
    need(frame, ("policy", *columns), "breakdown")
    per_token = prefix == "decode_time" and "n_decode_tokens" in frame
    names: list[str] = []
    bars: list[list[float]] = []
    lossy = False
    keys = ["policy"] if group is None else ["policy", group]
    for key, rows in frame.groupby(keys, sort=False):
        times = [mean(rows, column) or 0.0 for column in columns]
        scale = (mean(rows, "n_decode_tokens") or 1.0) if per_token else 1.0
        bars.append([t / scale / NS_PER_MS for t in times])
        mark = lossy_mark(rows)
        lossy = lossy or bool(mark)
        name = str(key[0])
        if group is not None:
            name += f", {_WORD.get(group, group)} {group_name(key[1], group)}"
        names.append(name + (f" ({mark})" if mark else ""))
    figure, axes = new_figure(7.2, 1.7 + 0.36 * len(names))
    axes.grid(axis="x")
    axes.grid(visible=False, axis="y")
    left = np.zeros(len(names))
    totals = np.maximum(np.sum(bars, axis=1), 1e-9)
    for cause, values in zip(CAUSES, np.array(bars).T, strict=True):
        if values.any():
            axes.barh(
                range(len(names)),
                values,
                left=left,
                height=0.68,
                color=FILL[cause],
                hatch=HATCH[cause],
                edgecolor=BLACK,
                linewidth=0.5,
                label=LABEL[cause] if (values / totals >= _VISIBLE).any() else None,
            )
            left += values
    for i, total in enumerate(left):
        axes.annotate(short(total), (total, i), (3, 0), textcoords="offset points", va="center", fontsize=7)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(0, 1.09 * max(left.max(), 1e-9))  # room for the totals; no margin is kept beyond a bar of no width
    axes.set_xlabel("time per decode token of the batch (ms)" if per_token else "time (ms)")
    axes.set_title("Time by what was waited for")
    legend_beside(axes, [LABEL[cause] for cause in CAUSES])
    add_corner(figure, corner_label(frame, group), [*averaged(frame, group), *([CONDITIONED] if lossy else [])])
    return figure
