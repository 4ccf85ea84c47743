"""Stacked bars of time by cause: by policy, and by layer."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes

from moesim.core.colours import BLACK, FILL, HATCH, LABEL
from moesim.core.units import NS_PER_MS
from moesim.errors import ConfigError, unknown_name
from moesim.metrics.breakdown import CAUSES
from moesim.plots.bars import axes_of
from moesim.plots.captions import (
    averaged,
    caption,
    corner_label,
    label_below,
    meaning,
    not_drawn,
    not_shown,
    not_shown_sentences,
    repeats_sentence,
)
from moesim.plots.distributions import visits_of
from moesim.plots.lines import divided
from moesim.plots.result_rows import inexact, levels, mean, named, policies_of, prepared, qualified, star, summarised
from moesim.plots.style import (
    COLUMN,
    SMALL,
    TEXT,
    Drawing,
    add_corner,
    alike,
    grid_of,
    kind,
    legend_above,
    need,
    new_figure,
    numbers_between,
    panel_title,
    panels_of,
    swatch,
    text_width,
    whole_numbers,
    width_for,
)

METRICS: Final = ("time", "decode_time")
_VISIBLE: Final = 0.0005  # of the longest bar; less is 0.0%, and has no entry in the legend
_BAR: Final = 0.15  # inches
_NAMES: Final = 1.35  # inches that names of bars may take of a column
_LEAST: Final = 1.3  # inches of the bars of one of several panels


def _times_by_cause(rows: pd.DataFrame, metric: str, x: str, *, several: bool) -> pd.DataFrame:
    columns = [f"{metric}_{cause}_ns" for cause in CAUSES]
    by = [] if x == "policy" else [x]
    found = []
    for value in levels(rows, x) if by else [None]:
        for policy in policies_of(rows):
            part = rows[(rows["policy"] == policy) & ((rows[x] == value) if by else True)]
            if part.empty:
                continue
            tokens = (mean(part, "n_decode_tokens") or 1.0) if metric == "decode_time" else 1.0
            times = [(mean(part, column) or 0.0) / tokens / NS_PER_MS for column in columns]
            total = part[columns].astype(float).sum(axis=1) / tokens / NS_PER_MS
            of_total = summarised(part.assign(total=total), ["policy"], "total").iloc[0]
            qualities, whole = {name: of_total[name] for name in ("fresh", "source_label", "low", "high")}, max(sum(times), 1e-12)
            name = policy + star(qualities["fresh"]) + (f", {named(value, x)}" if by and several else "")
            head = {"bar": name, "policy": policy, **({x: value} if by else {})}
            found += [{**head, "cause": c, "ms": t, "share": t / whole, **qualities} for c, t in zip(CAUSES, times, strict=True)]
    return pd.DataFrame(found)


def _asked(
    frame: pd.DataFrame, metric: str | None, x: str | None, panel: str | None
) -> tuple[pd.DataFrame, str, str, str | None]:  # fmt: skip
    if metric is not None and metric not in METRICS:
        raise ConfigError(f"plot breakdown: {unknown_name('metric', metric, METRICS)}")
    rows = prepared(frame, "breakdown")
    if metric is None:
        decodes = "n_decode_tokens" in rows and (rows["n_decode_tokens"] > 0).all()
        metric = "decode_time" if decodes else "time"
    need(rows, [f"{metric}_{cause}_ns" for cause in CAUSES], "breakdown")
    x, panels = axes_of(rows, "breakdown", x, panel)
    return rows, metric, x, None if panel is None else panels


@kind("rows", "time by what was waited for")
def breakdown(frame: pd.DataFrame, metric: str | None = None, x: str | None = None, panel: str | None = None) -> Drawing:
    """Horizontal bars of the mean time by cause, the causes in the order of `CAUSES`; a panel for each value of ``panel``."""
    rows, metric, x, panel = _asked(frame, metric, x, panel)
    x = "policy" if x == panel else x
    several = x in rows and rows[x].nunique() > 1
    of_panels = divided(rows, rows, [] if panel is None else [panel])
    parts = [_times_by_cause(part, metric, x, several=several) for part in of_panels]
    if panel is not None:
        parts = [part.assign(**{panel: whole[panel].iloc[0]}) for part, whole in zip(parts, of_panels, strict=True)]
    data = pd.concat(parts, ignore_index=True)
    longest = max(text_width(name, 7.0) for name in data["bar"])
    places = [_places(part, x) for part in parts]
    height = 0.5 + _BAR * max(of_panel[-1] + 1 for of_panel in places)
    width = width_for(COLUMN if len(parts) == 1 and longest <= _NAMES else TEXT)
    alone = len({tuple(part["bar"]) for part in parts}) > 1  # bars of other names: no panel at its side
    n_columns = 1 if alone else max(1, min(len(parts), int((width - min(longest, 0.4 * width)) / _LEAST)))
    figure, grid = panels_of(len(parts), n_columns, width, -(-len(parts) // n_columns) * height)
    reach = max(_stack(axes, part, of_panel) for axes, part, of_panel in zip(grid, parts, places, strict=True))
    label = "time per decode token of the batch (ms)" if metric == "decode_time" else "time (ms)"
    fits = text_width(label, 7.5) < (width - longest) / n_columns
    for i, (axes, part) in enumerate(zip(grid, parts, strict=True)):
        axes.set_xlim(0, 1.12 * reach)  # room for the totals; no margin is kept beyond a bar of no width
        if i >= len(parts) - n_columns:
            axes.set_xlabel(label if fits else label.replace(" of", "\nof"))
        if i % n_columns:
            axes.tick_params(labelleft=False)
        if panel is not None:
            panel_title(axes, named(part[panel].iloc[0], panel))
    seen = [cause for cause in CAUSES if (data.loc[data["cause"] == cause, "share"] >= _VISIBLE).any()]
    legend_above(figure, [_entry(cause) for cause in seen], "Time by what was waited for")
    shown = [x] if panel is None else [x, panel]
    label_below(figure, rows, shown, *not_shown(frame), axis=x)
    what = "decode time per token of the batch" if metric == "decode_time" else "time of the run"
    text = caption(
        f"Breakdown of the {what} by what was waited for on the critical path; the causes add up to the whole.", rows, shown,
        repeats_sentence(rows), not_drawn(rows), not_shown_sentences(frame),
    )  # fmt: skip
    return Drawing(data, figure, text)


def _places(data: pd.DataFrame, x: str) -> np.ndarray:
    """Place bars one below the other, groups apart."""
    first = data.drop_duplicates("bar")
    groups = first[x].astype(str).tolist() if x in first else [""] * len(first)
    return np.arange(len(first)) + 0.5 * np.array([len(dict.fromkeys(groups[: i + 1])) - 1 for i in range(len(groups))])


def _stack(axes: Axes, data: pd.DataFrame, places: np.ndarray) -> float:
    """Draw the bars of a panel; return how far they reach."""
    grid_of(axes, "x")
    first = data.drop_duplicates("bar")
    left = np.zeros(len(first))
    for cause in CAUSES:
        values = data.loc[data["cause"] == cause, "ms"].to_numpy(float)
        if values.any():
            axes.barh(
                places, values, left=left, height=0.76, color=FILL[cause], hatch=HATCH[cause] * 2, edgecolor=BLACK, linewidth=0.4
            )
            left += values
    ends = first[["low", "high"]].to_numpy(float)
    seeds: Any = np.abs(ends - left[:, None]).T
    axes.errorbar(left, places, xerr=seeds, fmt="none", ecolor=BLACK, elinewidth=0.8, capsize=1.5)
    for place, total, text in zip(places, np.fmax(left, ends[:, 1]), alike(left), strict=True):
        axes.annotate(text, (total, place), (2, 0), textcoords="offset points", va="center", fontsize=SMALL)
    axes.set_yticks(places, first["bar"].tolist())
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(places[-1] + 0.6, -0.6)
    return float(max(left.max(), np.nanmax(ends, initial=1e-9)))


def _entry(cause: str) -> Artist:
    return swatch(FILL[cause], LABEL[cause], HATCH[cause] * 2, 0.4)


_MANY: Final = 34  # layers of a figure as wide as a column


def _times_by_layer(rows: pd.DataFrame) -> pd.DataFrame:
    by_layer = rows.groupby("layer")
    means = by_layer[[f"time_{cause}_ns" for cause in CAUSES]].mean() / NS_PER_MS
    long = means.set_axis(list(CAUSES), axis=1).reset_index().melt("layer", var_name="cause", value_name="ms")
    long = long.sort_values("layer", kind="stable").reset_index(drop=True)
    return long.assign(visits=long["layer"].map(by_layer.size()), policy=rows["policy"].iloc[0], **qualified(rows))


@kind("layers", "one policy's time by layer and cause")
def time_by_layer(frame: pd.DataFrame, phase: str | None = None) -> Drawing:
    """Stacked bars of the mean time of a layer visit by cause, one a layer."""
    rows = visits_of(frame, "time_by_layer", phase, [f"time_{cause}_ns" for cause in CAUSES])
    policy, *others = policies_of(rows)
    if others:
        raise ConfigError(f"plot time_by_layer: expected one policy, got {policy}, {', '.join(others)}; choose one")
    data = _times_by_layer(rows)
    tops = data.groupby("layer")["ms"].sum()
    figure, axes = new_figure(COLUMN if len(tops) <= _MANY else TEXT, 1.9)
    handles: list[Artist] = []
    base = np.zeros(len(tops))
    for cause in CAUSES:
        values = data.loc[data["cause"] == cause, "ms"].to_numpy(float)
        if values.any():
            style: Any = {"facecolor": FILL[cause], "hatch": HATCH[cause] * 2, "edgecolor": BLACK, "linewidth": 0.4}
            axes.bar(tops.index, values, 0.9, base, **style)
            base += values
        if values.max() >= _VISIBLE * tops.max():
            handles.append(_entry(cause))
    whole_numbers(axes.xaxis)
    axes.set(
        xlim=(tops.index.min() - 0.75, tops.index.max() + 0.75), ylim=(0, 1.05 * max(float(tops.max()), 1e-9)),
        xlabel="layer", ylabel="time of a visit (ms)",
    )  # fmt: skip
    name = policy + star(qualified(rows)["fresh"])
    legend_above(figure, handles, f"Time by layer: {name}")
    phases = " and ".join(rows["phase"].unique())
    notes = [f"{name}, {phases}", *averaged(rows, []), meaning(inexact(rows))]
    add_corner(figure, corner_label(rows), notes)
    many = numbers_between(int(data["visits"].min()), int(data["visits"].max()))
    sentences = [
        f"A bar is the mean of {many} visits of the layer in {phases}, by what was waited for on the critical path.",
        f"The slowest layer is {tops.idxmax()} with {tops.max():.3g} ms, the fastest {tops.idxmin()} with {tops.min():.3g} ms.",
        "What comes before the first layer visit of a step and after the last one is left out.",
    ]
    return Drawing(data, figure, caption(f"Time of {policy} by layer.", rows, [], *sentences))
