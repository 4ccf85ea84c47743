"""Simulated beside measured: a scatter with a band, and what the difference is made of."""

from __future__ import annotations

import math
from typing import Final

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from moesim.colours import BLACK, FILL, GREY, HATCH, LABEL, SERIES, WHITE
from moesim.plots.style import add_corner, legend_beside, mean, need, new_figure, policies_of, styled
from moesim.units import NS_PER_MS

_MARKERS: Final = "osD^vP*"  # as many as are prime to the number of colours
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


@styled
def scatter(frame: pd.DataFrame, corner: str = "") -> Figure:
    """Measured against predicted decode step, both logarithmic.

    Parameters
    ----------
    frame : DataFrame
        Rows of `moesim.validation.compare.Compared`; if none decodes, the makespan is shown.
    corner : str
        What the figure is about.

    Returns
    -------
    Figure
        A marker a run, its bar from the shortest replay to the longest; the band is 10 % to either side.
    """
    need(frame, ("policy", "decode_step_ns_predicted", "decode_step_ns_measured"), "scatter")
    figure_of = "decode_step_ns" if frame["decode_step_ns_measured"].notna().any() else "makespan_ns"
    columns = [f"{figure_of}_{side}" for side in ("predicted", "measured", "low", "high")]
    need(frame, columns, "scatter")
    frame = frame[frame[columns[1]].notna()]
    figure, axes = new_figure(6.6, 4.4)
    axes.grid(axis="both")
    ms = frame[columns].astype(float) / NS_PER_MS
    least, most = float(ms.min().min()) / _MARGIN, float(ms.max().max()) * _MARGIN
    ends = [least, most]
    below, above = ([(1 + sign * _BAND) * end for end in ends] for sign in (-1, 1))
    axes.fill_between(ends, below, above, color=GREY, alpha=0.25, linewidth=0, label="± 10 %")
    axes.plot(ends, ends, color=BLACK, linewidth=0.8)
    names = policies_of(frame)
    for i, name in enumerate(names):
        x, y, low, high = (ms[frame["policy"] == name][column] for column in columns)
        axes.errorbar(
            x, y, yerr=[y - low, high - y], fmt=_MARKERS[i % len(_MARKERS)], color=SERIES[i % len(SERIES)], markersize=5,
            markeredgecolor=BLACK, markeredgewidth=0.4, elinewidth=0.8, capsize=1.5, label=name,
        )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(FixedLocator(_ticks(least, most)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_aspect("equal")
    what = "decode step" if figure_of == "decode_step_ns" else "makespan"
    axes.set_xlabel(f"simulated {what} (ms)")
    axes.set_ylabel(f"measured {what} (ms)")
    axes.set_title(f"Measured against simulated {what}")
    legend_beside(axes, [*names, "± 10 %"])
    add_corner(figure, corner, ["marker: median of the replays · bar: smallest to largest"])
    return figure


def _ticks(least: float, most: float) -> list[float]:
    """Give 1, 2 and 5 times each power of ten in a range; of more than eight, the powers only."""
    powers = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
    found = [digit * 10.0**power for power in powers for digit in (1, 2, 5) if least <= digit * 10.0**power <= most]
    return found if len(found) <= 8 else [tick for tick in found if math.log10(tick) % 1 == 0]


@styled
def residual_bars(frame: pd.DataFrame, corner: str = "") -> Figure:
    """Difference between measured and predicted mean decode step by cause, as a share of the measured step.

    Parameters
    ----------
    frame : DataFrame
        Rows of `moesim.validation.report.Report.residuals`.
    corner : str
        What the figure is about.

    Returns
    -------
    Figure
        A bar a policy, the mean of its runs: to the right what took longer than predicted, to the left what was quicker. Dots:
        the whole difference of each run.
    """
    causes = [column.removesuffix("_share") for column in map(str, frame) if column.endswith("_share")]
    need(frame, ("policy", "difference_ns", "measured_ns", *(f"{cause}_share" for cause in causes)), "residual_bars")
    names = policies_of(frame)
    figure, axes = new_figure(7.4, 1.5 + 0.34 * max(3, len(names)))
    axes.grid(axis="x")
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
    axes.set_title("What the simulation misses")
    legend_beside(axes, [_LABEL[cause] for cause in causes])
    add_corner(figure, corner, ["bar: mean over the policy's runs · right of 0: longer than simulated"])
    return figure
