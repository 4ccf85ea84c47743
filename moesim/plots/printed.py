"""What the papers print against what is simulated: one marker a printed number, both axes logarithmic."""

from __future__ import annotations

from typing import Any, Final

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator

from moesim.core.colours import BLACK, GREY, WHITE
from moesim.plots.looks import look
from moesim.plots.style import add_corner, legend_above, need, styled
from moesim.plots.widths import COLUMN, TEXT, is_narrow, width_for

NAMES: Final = {"dali": "DALI", "hybrimoe": "HybriMoE", "prescope": "PreScope", "daop": "DAOP", "odmoe": "OD-MoE"}
_BAND: Final = 1.35
_MARGIN: Final = 1.6


def printed_data(frame: pd.DataFrame) -> pd.DataFrame:
    """Give printed and simulated numbers that runs answer, gains as factors."""
    need(frame, ("paper", "figure", "kind", "published", "simulated", "source"), "papers")
    rows = frame[frame["kind"].isin(("value", "speedup", "gain")) & (frame["source"] == "runs") & frame["simulated"].notna()]
    gain = rows["kind"] == "gain"
    told = rows["identified"] if "identified" in rows else pd.Series(float("nan"), rows.index)
    printed, simulated, identified = (one.astype(float) for one in (rows["published"], rows["simulated"], told))
    return pd.DataFrame(
        {
            "paper": rows["paper"],
            "figure": rows["figure"],
            "what": rows["system"] + rows["over"].where(rows["over"] == "", " over " + rows["over"]),
            "printed": printed.where(~gain, 1 + printed / 100),
            "simulated": simulated.where(~gain, 1 + simulated / 100),
            "identified": identified.where(~gain, 1 + identified / 100),
            "met": rows["consistent"] != "no" if "consistent" in rows else True,
        }
    ).reset_index(drop=True)


@styled
def printed(frame: pd.DataFrame, corner: str = "") -> Figure:
    """Simulated over printed numbers of all papers; arguments as of `printed_data`."""
    data = printed_data(frame)
    told = data[data["identified"].notna()]
    panels = [("by the derived profile, nothing fitted", data["simulated"], data.assign(met=True))]
    panels += [("identified, the row's table left out", told["identified"], told)] if len(told) else []
    shown = data[["printed", "simulated", "identified"]]
    ends = [float(shown.min().min()) / _MARGIN, float(shown.max().max()) * _MARGIN]
    width = width_for(COLUMN if len(panels) == 1 else TEXT)
    n_columns = 1 if is_narrow(width) else len(panels)
    n_rows = len(panels) // n_columns
    figure = Figure(figsize=(width, n_rows * (0.35 + 0.85 * width / n_columns)), layout="constrained")
    names = [str(name) for name in dict.fromkeys(data["paper"])]
    handles: list[Artist] = [
        Line2D([], [], linestyle="none", markeredgecolor=BLACK, label=NAMES.get(name, name), **_style(i))
        for i, name in enumerate(names)
    ]
    grid = figure.subplots(n_rows, n_columns, sharey=True, squeeze=False).ravel()
    for axes, (title, values, rows) in zip(grid, panels, strict=True):
        band = _panel(axes, ends)
        for i, name in enumerate(names):
            for met, edge, face in ((True, BLACK, look(i).colour), (False, look(i).colour, WHITE)):
                mine = (rows["paper"] == name) & (rows["met"] == met)
                if mine.any():
                    style = _style(i) | {"markeredgecolor": edge, "markerfacecolor": face, "markeredgewidth": 0.4 if met else 0.9}
                    axes.plot(rows["printed"][mine], values[mine], linestyle="none", **style)
        if len(panels) > 1:
            axes.set_title(title, fontweight="normal", fontsize=7.5)
    for axes in grid[::n_columns]:
        axes.set_ylabel("simulated")
    if not told["met"].all():
        style = _style(0) | {"marker": "o", "markerfacecolor": WHITE, "markeredgecolor": BLACK, "markeredgewidth": 0.9}
        handles.append(Line2D([], [], linestyle="none", label="inconsistent with its paper", **style))
    legend_above(figure, [*handles, band], "Simulated against printed numbers")
    add_corner(figure, corner, ["speeds, ratios, times and shares, each in its unit"])
    return figure


def _style(index: int) -> dict[str, Any]:
    one = look(index)
    return {"marker": one.marker, "color": one.colour, "markersize": 4.2, "markeredgewidth": 0.4, "clip_on": False}


def _panel(axes: Axes, ends: list[float]) -> Artist:
    """Draw what is under the markers; gives the band."""
    axes.grid(visible=True, axis="both")
    below, above = [end / _BAND for end in ends], [end * _BAND for end in ends]
    band = axes.fill_between(ends, below, above, color=GREY, alpha=0.25, linewidth=0, label=f"within {_BAND:g}")
    axes.plot(ends, ends, color=BLACK, linewidth=0.6)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="printed", facecolor=WHITE)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator())
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_aspect("equal")
    return band
