"""Heat maps side by side on one scale of colours, which stay legible in grey."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from moesim.plots.style import for_paper
from moesim.plots.widths import width_for

MAP: Final = "cividis"  # even in brightness: it reads the same in grey
NOT_FROM_ZERO: Final = "The scale of colours does not begin at 0."
"""For captions of heat maps that are drawn so."""
_BLANK: Final = "#FFFFFF"  # what has no value; lighter than every colour of the map, and crossed out
_CROSSED: Final = "#BBBBBB"
_CUT: Final = 2.0  # percent
_TITLE: Final = 0.18  # inches


class Panel(NamedTuple):
    """One heat map: values (rows, columns) with nan where there are none, and the numbers at its edges."""

    title: str
    values: NDArray[np.float64]
    x: tuple[float, float]  # edges
    y: tuple[float, float]
    x_label: str
    y_label: str


class Words(NamedTuple):
    """What is written above all panels, on the screen, and at the scale."""

    title: str
    scale: str


def heat_maps(
    panels: Sequence[Panel],
    words: Words,
    *,
    size: tuple[float, float],
    n_columns: int,
    power: float = 1.0,
    from_zero: bool = True,
    share_y: bool = True,
    square: bool = False,
) -> Figure:
    """Draw heat maps on one scale."""
    width = width_for(size[0])
    n_columns = min(max(1, round(n_columns * width / size[0])), len(panels))
    n_rows = -(-len(panels) // n_columns)
    figure = Figure(
        figsize=(width, n_rows * size[1] + (0 if for_paper() else _TITLE)), layout="compressed" if square else "constrained"
    )
    grid = figure.subplots(n_rows, n_columns, squeeze=False, sharey=share_y)
    everything = np.concatenate([panel.values.ravel() for panel in panels])
    low = 0.0 if from_zero else float(np.nanpercentile(everything, _CUT))
    norm = PowerNorm(power, low, float(np.nanmax(everything)))
    drawn: list[Axes] = []
    for place, axes in enumerate(grid.ravel().tolist()):
        if place >= len(panels):
            axes.remove()
            continue
        panel = panels[place]
        image = _draw(axes, panel, norm, square)
        drawn.append(axes)
        first, last = place % n_columns == 0, place + n_columns >= len(panels)
        axes.set_ylabel(panel.y_label if first or not share_y else "")
        below = None if last else panels[place + n_columns].x_label
        axes.set_xlabel(panel.x_label if panel.x_label != below or not share_y else "")
    cut = "min" if float(np.nanmin(everything)) < low else "neither"
    figure.colorbar(image, ax=drawn, label=words.scale, aspect=25, pad=0.02, fraction=0.05, extend=cut)
    if not for_paper():
        figure.suptitle(words.title, x=0.01, ha="left", fontsize=8.5, fontweight="bold")
    return figure


def _draw(axes: Axes, panel: Panel, norm: PowerNorm, square: bool) -> Any:
    axes.grid(visible=False)
    axes.set_facecolor(_BLANK)
    extent = (*panel.x, *panel.y)
    if np.isnan(panel.values).any():
        axes.add_patch(_crossed(extent))
    image = axes.imshow(
        np.ma.masked_invalid(panel.values),
        cmap=MAP,
        norm=norm,
        origin="lower",
        extent=extent,
        aspect="equal" if square else "auto",
        interpolation="nearest",
        zorder=2,
    )
    axes.set_title(panel.title, fontsize=7.5, fontweight="normal")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    return image


def _crossed(extent: tuple[float, float, float, float]) -> Any:
    left, right, low, high = extent
    return Rectangle((left, low), right - left, high - low, facecolor=_BLANK, edgecolor=_CROSSED, hatch="xxxx", linewidth=0)
