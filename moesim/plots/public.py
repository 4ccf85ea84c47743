"""Predicted against publicly measured speed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

from moesim.core.colours import BLACK, BLUE, GREY, VERMILION
from moesim.hardware import weakest
from moesim.plots.style import add_corner, legend_beside, need, short, styled

_BAND: Final = 1.1
_WIDE: Final = 1.3
_DARK: Final = "#CCCCCC"
_LIGHT: Final = "#EEEEEE"
_TICKS: Final = (0.5, 0.7, 1.0, 1.5, 2.0, 3.0)
_LOOK: Final = (
    ("predicted", False, "o", BLUE, "well described"),
    ("predicted", True, "D", VERMILION, "thinly described"),
    ("calibration", None, "s", GREY, "calibration (not a prediction)"),
)


@styled
def public(frame: pd.DataFrame) -> Figure:
    """Predicted against measured tokens per second on logarithmic axes, a point a check, and beside it their ratios by name."""
    columns = ("check", "measured", "measured_low", "measured_high", "predicted", "status", "loose", "label")
    need(frame, columns, "public")
    frame = frame[frame["predicted"].notna()]
    need(frame, ("check",), "public")
    figure = Figure(figsize=(9.6, 1.6 + 0.16 * len(frame)), layout="constrained")
    speeds, ratios = figure.subplots(1, 2, width_ratios=(1.25, 1))
    _speeds(speeds, frame)
    _ratios(ratios, frame)
    legend_beside(ratios, [words for *_, words in _LOOK])
    labels = [str(label) for label in frame["label"] if label]
    add_corner(
        figure, f"simulated, weakest source: {weakest(labels)}", ["names are checks of docs/background/validation-public.md"]
    )
    return figure


def _groups(frame: pd.DataFrame) -> Iterator[tuple[pd.DataFrame, dict[str, Any]]]:
    """Give the rows of each kind and what they look like."""
    for status, loose, marker, colour, words in _LOOK:
        rows = frame[(frame["status"] == status) & (True if loose is None else frame["loose"] == loose)]
        if not rows.empty:
            yield rows, {
                "fmt": marker, "color": colour, "markersize": 4.5, "markeredgecolor": BLACK, "markeredgewidth": 0.4,
                "elinewidth": 0.8, "capsize": 2, "label": words,
            }  # fmt: skip


def _speeds(axes: Axes, frame: pd.DataFrame) -> None:
    both = pd.concat([frame["measured_low"], frame["measured_high"], frame["predicted"]]).astype(float)
    ends = np.array([both.min() / 1.5, both.max() * 1.5])
    axes.fill_between(ends, ends / _WIDE, ends * _WIDE, color=_LIGHT, linewidth=0)
    axes.fill_between(ends, ends / _BAND, ends * _BAND, color=_DARK, linewidth=0)
    axes.plot(ends, ends, color=BLACK, linewidth=0.8)
    for rows, look in _groups(frame):
        measured, predicted = rows["measured"].astype(float), rows["predicted"].astype(float)
        bars = [measured - rows["measured_low"].astype(float), rows["measured_high"].astype(float) - measured]
        axes.errorbar(measured, predicted, xerr=bars, **look)
    for axis, scale in ((axes.xaxis, axes.set_xscale), (axes.yaxis, axes.set_yscale)):
        scale("log")
        axis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
        axis.set_minor_formatter(NullFormatter())
    axes.set_xlim(ends[0], ends[1])
    axes.set_ylim(ends[0], ends[1])
    axes.grid(visible=True, axis="both")
    axes.set_aspect("equal")
    axes.set_xlabel("measured (tokens/s)")
    axes.set_ylabel("predicted (tokens/s)")
    axes.set_title("Public measurements, derived profiles")


def _ratios(axes: Axes, frame: pd.DataFrame) -> None:
    places = {str(name): i for i, name in enumerate(frame["check"])}
    axes.axvspan(1 / _WIDE, _WIDE, color=_LIGHT, linewidth=0, label=f"within a factor of {_WIDE:g}")
    axes.axvspan(1 / _BAND, _BAND, color=_DARK, linewidth=0, label="within 10 %")
    axes.axvline(1, color=BLACK, linewidth=0.8)
    for rows, look in _groups(frame):
        middle, predicted = rows["measured"].astype(float), rows["predicted"].astype(float)
        ratio = predicted / middle
        bars = [ratio - predicted / rows["measured_high"].astype(float), predicted / rows["measured_low"].astype(float) - ratio]
        axes.errorbar(ratio, [places[str(name)] for name in rows["check"]], xerr=bars, **look)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(_TICKS))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_yticks(list(places.values()), list(places), fontsize=7)
    axes.set_ylim(len(places) - 0.4, -0.6)
    axes.grid(visible=True, axis="both")
    axes.set_xlabel("predicted / measured")
