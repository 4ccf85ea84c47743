"""Sweeps of layers whose experts are on the CPU: measured points and predicted lines, a panel a machine."""

from __future__ import annotations

from typing import Final

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from moesim.colours import BLACK, BLUE, GREEN, GREY, ORANGE, VERMILION
from moesim.hardware import weakest
from moesim.plots.style import add_corner, need, styled

_COLOURS: Final = (BLUE, VERMILION, GREEN, ORANGE, BLACK)
_COLUMNS: Final = 3
_FEWEST: Final = 3  # rows of a machine that make a panel


@styled
def sweeps(frame: pd.DataFrame) -> Figure:
    """Measured and predicted speed over the share of layers whose experts are on the CPU.

    Parameters
    ----------
    frame : DataFrame
        As of `moesim.validation.sweep_report.run_sweeps`; machines with fewer than three predictions are left out.

    Returns
    -------
    Figure
        Points are measured, lines predicted without any speed of the machine; squares and dotted lines are whole layers on the
        CPU.
    """
    done = frame[frame["status"] == "predicted"]
    machines = [name for name, rows in done.groupby("machine", sort=False) if len(rows) >= _FEWEST]
    done = done[done["machine"].isin(machines)]
    need(done, ("machine", "measured", "predicted", "layers_on_cpu", "layers"), "sweeps")
    n_rows = -(-len(machines) // _COLUMNS)
    figure = Figure(figsize=(9.6, 0.6 + 2.3 * n_rows), layout="constrained")
    panels = np.atleast_1d(figure.subplots(n_rows, _COLUMNS, squeeze=False)).ravel()
    for axes, machine in zip(panels, machines, strict=False):
        _panel(axes, done[done["machine"] == machine], str(machine))
    for axes in panels[len(machines) :]:
        axes.set_axis_off()
    labels = [str(label) for label in done["label"] if label]
    add_corner(figure, f"simulated, weakest source: {weakest(labels)}", ["no speed of a machine is in its profile"])
    return figure


def _panel(axes: Axes, rows: pd.DataFrame, machine: str) -> None:
    handles = []
    for colour, (curve, line) in zip(_COLOURS, rows.groupby("curve", sort=False), strict=False):
        for whole, some in line.groupby(line["setting"].str.contains("-ngl (?!99)") | (line["place"] == "cpu")):
            share = some["layers_on_cpu"].astype(float) / some["layers"].astype(float)
            order = share.to_numpy().argsort(kind="stable")
            axes.plot(
                share.to_numpy()[order],
                some["predicted"].astype(float).to_numpy()[order],
                color=colour,
                linewidth=1.0,
                linestyle=":" if whole else "-",
                marker="_" if share.nunique() == 1 else "",
            )
            axes.plot(share, some["measured"].astype(float), "s" if whole else "o", color=colour, markersize=3)
        handles.append(Line2D([], [], color=colour, label=str(curve)))
    axes.set_title(machine)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("share of layers with experts on the CPU")
    axes.set_ylabel("tokens/s")
    axes.grid(visible=True, axis="both")
    axes.legend(handles=handles, fontsize=5.5, labelcolor=GREY if not handles else None)
