"""Simulated beside measured: a scatter with a band, and what the difference is made of."""

from __future__ import annotations

import math
from typing import Any, Final

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator

from moesim.core.colours import BLACK, FILL, GREY, HATCH, LABEL, WHITE
from moesim.core.units import NS_PER_MS
from moesim.hardware import weakest
from moesim.plots.kinds import Drawing, kind
from moesim.plots.looks import looks_of
from moesim.plots.rows import mean, policies_of
from moesim.plots.style import add_corner, legend_above, legend_beside, need, new_figure, styled, title
from moesim.plots.widths import COLUMN, TEXT

_SIDES: Final = {"predicted": "simulated_ms", "measured": "measured_ms", "low": "low_ms", "high": "high_ms"}
_BAND: Final = 0.1
_MARGIN: Final = 1.25  # of a logarithmic axis
_LABEL: Final = LABEL | {
    "gpu_experts": "experts on the accelerator",
    "cpu_experts": "experts on the host",
    "waiting": "waiting, other things busy",
    "gap": "nothing busy",
}
_FILL: Final = FILL | {"waiting": WHITE, "gap": WHITE}
_HATCH: Final = HATCH | {"waiting": "oo", "gap": ""}
_VISIBLE: Final = 0.0005  # of a step


def _times(frame: pd.DataFrame) -> pd.DataFrame:
    """Give simulated and measured times of each run in ms."""
    need(frame, ("policy", "decode_step_ns_predicted", "decode_step_ns_measured"), "validation")
    what = "decode_step_ns" if frame["decode_step_ns_measured"].notna().any() else "makespan_ns"
    columns = {f"{what}_{side}": name for side, name in _SIDES.items()}
    need(frame, list(columns), "validation")
    rows = frame[frame[f"{what}_measured"].notna()]
    kept = [name for name in ("policy", "batch_size", "cache_ratio", "cache_budget_bytes") if name in rows]
    data = rows[kept].assign(figure=what)
    for column, name in columns.items():
        data[name] = rows[column].astype(float) / NS_PER_MS
    return data.reset_index(drop=True)


@kind("validation", "simulated against measured times")
def validation(frame: pd.DataFrame) -> Drawing:
    """Measured against simulated times of the runs of a validation."""
    data = _times(frame)
    error = (data["simulated_ms"] / data["measured_ms"] - 1).abs()
    what = "decode step" if data["figure"].iloc[0] == "decode_step_ns" else "makespan"
    told = (
        f"Simulated against measured {what} of {len(data)} runs: marker, median of the replays; bar, shortest to longest; "
        f"grey, 10 % to either side. Median absolute error {100 * error.median():.1f} %, largest {100 * error.max():.1f} %. "
        f"{_about(frame)}."
    )
    return Drawing(data, scatter(frame, _about(frame)), told)


def _about(frame: pd.DataFrame) -> str:
    about = [name for name in ("model", "hardware", "trace") if name in frame]
    parts = [", ".join(sorted({str(v) for v in frame[name].dropna()})) for name in about]
    if "repeats" in frame:
        parts.append(f"{' or '.join(str(n) for n in sorted(set(frame['repeats'])))} replays a run")
    if "source_label" in frame and frame["source_label"].notna().any():
        parts.append(f"measured; simulated, weakest source: {weakest(str(v) for v in frame['source_label'].dropna())}")
    return " · ".join(parts)


@styled
def scatter(frame: pd.DataFrame, corner: str = "") -> Figure:
    """Measured against predicted decode step, both logarithmic."""
    data = _times(frame)
    ms = data[list(_SIDES.values())]
    least, most = float(ms.min().min()) / _MARGIN, float(ms.max().max()) * _MARGIN
    ends = [least, most]
    below, above = ([(1 + sign * _BAND) * end for end in ends] for sign in (-1, 1))
    names = policies_of(data)
    figure, axes = new_figure(COLUMN, 3.45, square=True)
    axes.grid(visible=True, axis="both")
    handles: list[Artist] = []
    for name, look in looks_of(names).items():
        x, y, low, high = (data.loc[data["policy"] == name, column] for column in _SIDES.values())
        style: dict[str, Any] = {
            "marker": look.marker, "color": look.colour, "markersize": 4.2, "markeredgecolor": BLACK, "markeredgewidth": 0.4
        }  # fmt: skip
        axes.errorbar(x, y, yerr=[y - low, high - y], linestyle="none", elinewidth=0.7, capsize=1.5, **style)
        handles.append(Line2D([], [], linestyle="none", label=name, **style))
    handles.append(axes.fill_between(ends, below, above, color=GREY, alpha=0.25, linewidth=0, label="± 10 %"))
    axes.plot(ends, ends, color=BLACK, linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(FixedLocator(_ticks(least, most)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_aspect("equal")
    what = "decode step" if data["figure"].iloc[0] == "decode_step_ns" else "makespan"
    axes.set_xlabel(f"simulated {what} (ms)")
    axes.set_ylabel(f"measured {what} (ms)")
    legend_above(figure, handles, f"Measured against simulated {what}")
    add_corner(figure, corner, ["marker: median of the replays · bar: smallest to largest"])
    return figure


def _ticks(least: float, most: float) -> list[float]:
    """Give 1, 2 and 5 times each power of ten in a range; of more than eight, the powers only."""
    powers = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
    found = [digit * 10.0**power for power in powers for digit in (1, 2, 5) if least <= digit * 10.0**power <= most]
    return found if len(found) <= 8 else [tick for tick in found if math.log10(tick) % 1 == 0]


@styled
def residual_bars(frame: pd.DataFrame, corner: str = "") -> Figure:
    """Difference between measured and predicted mean decode step by cause, as a share of the measured step."""
    causes = [column.removesuffix("_share") for column in map(str, frame) if column.endswith("_share")]
    need(frame, ("policy", "difference_ns", "measured_ns", *(f"{cause}_share" for cause in causes)), "residual_bars")
    names = policies_of(frame)
    figure, axes = new_figure(TEXT, 0.5 + 0.26 * max(3, len(names)))
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")
    axes.axvline(0, color=BLACK, linewidth=0.8)
    means = {name: {cause: mean(frame[frame["policy"] == name], f"{cause}_share") or 0.0 for cause in causes} for name in names}
    seen = [cause for cause in causes if max(abs(parts[cause]) for parts in means.values()) > _VISIBLE]
    for place, name in enumerate(names):
        reach = {True: 0.0, False: 0.0}
        for cause in seen:
            share = 100 * means[name][cause]
            side = share > 0
            axes.barh(
                place, share, 0.7, reach[side], color=_FILL[cause], hatch=_HATCH[cause], edgecolor=BLACK, linewidth=0.5,
                label=None if place else _LABEL[cause],
            )  # fmt: skip
            reach[side] += share
        runs = frame[frame["policy"] == name]
        whole = 100 * runs["difference_ns"].astype(float) / runs["measured_ns"].astype(float)
        axes.plot(whole, [place] * len(whole), "o", color=BLACK, markersize=3, markeredgecolor=WHITE, markeredgewidth=0.4,
                  label=None if place else "whole difference of a run")  # fmt: skip
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlabel("measured less simulated, % of the measured decode step")
    title(axes, "What the simulation misses")
    legend_beside(axes, [_LABEL[cause] for cause in causes])
    add_corner(figure, corner, ["bar: mean over the policy's runs · right of 0: longer than simulated"])
    return figure
