"""Sweeps of layers whose experts are on the CPU: measured points and predicted lines, a panel a machine."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from moesim.core.colours import BLACK, BLUE, GREEN, GREY, ORANGE, VERMILION
from moesim.hardware import weakest
from moesim.plots.style import add_corner, need, styled

_COLOURS: Final = (BLUE, VERMILION, GREEN, ORANGE, BLACK)
_COLUMNS: Final = 3
_FEWEST: Final = 3  # rows of a machine that make a panel

_SYMBOLS: Final = (
    Line2D([], [], color=BLACK, marker="o", linestyle="", markersize=3, label="measured, experts of layers on the CPU"),
    Line2D([], [], color=BLACK, marker="s", linestyle="", markersize=3, label="measured, whole layers on the CPU"),
    Line2D([], [], color=BLACK, linewidth=1.0, label="predicted"),
    Line2D([], [], color=BLACK, linewidth=1.0, linestyle=":", label="predicted, whole layers"),
)


@styled
def sweeps(frame: pd.DataFrame) -> Figure:
    """Measured and predicted speed over the share of layers whose experts are on the CPU."""
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
    figure.legend(handles=_SYMBOLS, loc="outside upper right", ncols=len(_SYMBOLS), fontsize=6.5)
    labels = [str(label) for label in done["label"] if label]
    add_corner(
        figure,
        f"simulated, weakest source: {weakest(labels)}",
        ["no speed of a machine is in its profile; machines with fewer than three settings are not drawn"],
    )
    return figure


def _panel(axes: Axes, rows: pd.DataFrame, machine: str) -> None:
    handles = []
    for colour, (curve, line) in zip(_COLOURS, rows.groupby("curve", sort=False), strict=False):
        whole_layers = line["setting"].str.contains("-ngl (?!99)") | (line["place"] == "cpu")
        for whole, some in line.groupby(whole_layers):
            some = some.assign(share=some["layers_on_cpu"].astype(float) / some["layers"].astype(float))
            again = some["share"].duplicated()  # the same layers with other threads or another context: not on the line
            first = some[~again].sort_values("share")
            style: dict[str, Any] = {"color": colour, "linewidth": 1.0, "markersize": 9}
            single = "_" if len(first) == 1 else ""
            axes.plot(first["share"], first["predicted"].astype(float), ls=":" if whole else "-", marker=single, **style)
            axes.plot(some["share"][again], some["predicted"][again].astype(float), ls="", marker="_", **style)
            axes.plot(some["share"], some["measured"].astype(float), "s" if whole else "o", color=colour, markersize=3)
        handles.append(Line2D([], [], color=colour, label=str(curve).partition(" (")[0]))
    axes.margins(y=0.12)
    axes.set_title(machine)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("share of layers with experts on the CPU")
    axes.set_ylabel("tokens/s")
    axes.grid(visible=True, axis="both")
    axes.legend(handles=handles, fontsize=5.5, labelcolor=GREY if not handles else None)
