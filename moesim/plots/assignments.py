"""How far assignment rules are from the best execution of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from moesim.core.colours import BLACK, SERIES
from moesim.plots.style import add_corner, need, styled

_MARKERS: Final = "osD^vP"
_TICKS: Final = (1, 1.5, 2, 3, 5, 10, 20)


@styled
def assignment_ratios(frame: pd.DataFrame, kind: str = "rule") -> Figure:
    """Mean makespan over the best, by rule, regime and number of active experts."""
    columns = ("regime", "active", "kind", "name", "instances", "mean", "low", "high", "worst")
    need(frame, columns, "assignment_ratios")
    frame = frame[frame["kind"] == kind]
    need(frame, columns, "assignment_ratios")
    names, regimes, sizes = (list(dict.fromkeys(frame[column])) for column in ("name", "regime", "active"))
    figure = Figure(figsize=(2.2 + 2.6 * len(sizes), 1.9 + 0.42 * len(names)), layout="constrained")
    panels: Sequence[Any] = figure.subplots(1, len(sizes), sharey=True, squeeze=False)[0]
    for axes, active in zip(panels, sizes, strict=True):
        axes.grid(axis="x")
        axes.grid(visible=False, axis="y")
        axes.axvline(1, color=BLACK, linewidth=0.8)
        for i, regime in enumerate(regimes):
            rows = frame[(frame["regime"] == regime) & (frame["active"] == active)]
            places = [names.index(name) + (i - (len(regimes) - 1) / 2) * 0.7 / len(regimes) for name in rows["name"]]
            colour, mean = SERIES[i % len(SERIES)], rows["mean"]
            spread = [mean - rows["low"], rows["high"] - mean]
            marker = _MARKERS[i % len(_MARKERS)]
            axes.errorbar(mean, places, xerr=spread, fmt=marker, color=colour, markersize=4, capsize=1.5, label=regime)
            axes.plot(rows["worst"], places, "|", color=colour, markersize=6)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(FixedLocator([tick for tick in _TICKS if tick <= 1.1 * frame["worst"].max()]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_title(f"{active} active experts")
        axes.set_xlabel("makespan / best")
    panels[0].set_yticks(range(len(names)), names)
    panels[0].set_ylim(len(names) - 0.4, -0.6)
    panels[-1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.5)
    executed = "in the plan's order" if kind != "rule" else "as they become ready"
    notes = f"random layers, {frame['instances'].min()} each, executed {executed}"
    add_corner(figure, f"{notes} · mean with 95 % interval, tick: worst")
    return figure
