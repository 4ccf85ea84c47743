"""Observed speeds beside those of an identified machine."""

from __future__ import annotations

from typing import Final

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moesim.core.colours import BLACK, BLUE, SKY, VERMILION, WHITE
from moesim.plots.style import add_corner, need, styled

COLUMNS: Final = ("panel", "unit", "x", "setting", "observed", "predicted", "low", "high", "status")
_MOST: Final = 9
LOOK: Final = {
    "used": ("o", BLUE, "identified from"),
    "check": ("o", WHITE, "check, not used"),
    "set aside": ("X", VERMILION, "no constants explain it"),
    "beyond memory": ("v", WHITE, "beyond the GPU's memory"),
}


@styled
def identified(frame: pd.DataFrame, name: str) -> Figure:
    """Measured and predicted over the setting, a panel for each model, bits and kind of setting; check rows are hollow."""
    need(frame, COLUMNS, "identified")
    panels = list(dict.fromkeys(frame["panel"]))
    shown = panels[:_MOST]
    n_columns = min(3, len(shown))
    n_rows = -(-len(shown) // n_columns)
    figure = Figure(figsize=(3.1 * n_columns, 2.3 * n_rows + 0.4), layout="constrained")
    grid = figure.subplots(n_rows, n_columns, squeeze=False)
    labels: dict[str, Artist] = {}
    for place, axes in enumerate(grid.flat):
        if place >= len(shown):
            axes.set_visible(False)
            continue
        rows = frame[frame["panel"] == shown[place]].sort_values("x", kind="stable")
        _panel(axes, rows, labels)
        axes.set_title(shown[place])
    figure.legend(list(labels.values()), list(labels), loc="outside upper left", ncols=3)
    left = [f"{len(panels) - len(shown)} more panels are not drawn"] if len(panels) > len(shown) else []
    add_corner(figure, f"{name}: identified from observed speeds, so no prediction where marks are filled", left)
    return figure


def _panel(axes: Axes, rows: pd.DataFrame, labels: dict[str, Artist]) -> None:
    x = rows["x"].astype(float)
    if len(rows) > 1:
        labels["90 % interval"] = axes.fill_between(x, rows["low"], rows["high"], color=SKY, alpha=0.35, linewidth=0)
    (labels["predicted"],) = axes.plot(x, rows["predicted"], color=BLACK, linewidth=0.9, marker="_", markersize=5)
    for status, (marker, colour, words) in LOOK.items():
        these = rows[rows["status"] == status]
        if len(these):
            labels[words] = axes.scatter(
                these["x"].astype(float), these["observed"], marker=marker, s=18, facecolor=colour, edgecolor=BLACK,
                linewidth=0.6, zorder=3,
            )  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.set_ylabel(str(rows["unit"].iloc[0]))
    axes.set_xlabel(str(rows["setting"].iloc[0]))
