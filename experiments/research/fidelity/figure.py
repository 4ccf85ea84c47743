"""What inexact execution cost a model, against the fidelity that a simulation would print."""

from __future__ import annotations

from typing import Final

import pandas as pd
from matplotlib.figure import Figure

from moesim.core.colours import BLACK, SERIES
from moesim.plots.style import add_corner, legend_beside, need, styled

_MARKERS: Final = "osD^vPX*<>"


@styled
def fidelity(frame: pd.DataFrame, name: str) -> Figure:
    """Change of perplexity, and Kullback-Leibler divergence, against the gate mass that was executed as routed.

    Parameters
    ----------
    frame : DataFrame
        Rows of `fidelity.measure.rows`, of which those over all text are drawn.
    name : str
        Of the model, for the title.

    Returns
    -------
    Figure
        A line a series. Were fidelity all that matters, all points of a panel would lie on one line.
    """
    columns = ("series", "strength", "text", "fidelity_fresh", "change", "change_low", "change_high", "kl")
    need(frame, columns, "fidelity")
    frame = frame[frame["text"] == "all"]
    figure = Figure(figsize=(9.2, 4.4), layout="constrained")
    change_axes, kl_axes = figure.subplots(1, 2)
    names = [str(series) for series in frame["series"].unique()]
    for number, series in enumerate(names):
        rows = frame[frame["series"] == series].sort_values("fidelity_fresh", kind="stable")
        fresh, change = 100 * rows["fidelity_fresh"], 100 * rows["change"]
        look = {
            "color": SERIES[number % len(SERIES)],
            "marker": _MARKERS[number % len(_MARKERS)],
            "markersize": 5,
            "markeredgecolor": BLACK,
            "markeredgewidth": 0.4,
            "linewidth": 1.3,
            "linestyle": ("-", "--")[number // len(SERIES) % 2],
        }
        bars = [change - 100 * rows["change_low"], 100 * rows["change_high"] - change]
        change_axes.errorbar(fresh, change, yerr=bars, elinewidth=0.8, capsize=2, **look)
        kl_axes.plot(fresh, rows["kl"], label=series, **look)
    change_axes.axhline(0, color=BLACK, linewidth=0.8)
    change_axes.set_ylabel("change of perplexity (%)")
    change_axes.set_title(f"{name}: what fidelity is worth")
    kl_axes.set_yscale("log")
    kl_axes.set_ylabel("KL from the exact model (nats a token)")
    for axes in (change_axes, kl_axes):
        axes.set_xlabel("fidelity_fresh, as a simulation prints it (%)")
    legend_beside(kl_axes, names)
    windows = ", ".join(str(n) for n in sorted(frame["n_windows"].unique()))
    notes = [f"{windows} held-out windows; bars: 95 % of the paired bootstrap over windows"]
    add_corner(figure, "measured in the model itself; the simulator has no kind for deferral, which counts as exact", notes)
    return figure
