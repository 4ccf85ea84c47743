"""What the papers print against what is simulated: one marker a printed number, both axes logarithmic."""

from __future__ import annotations

from typing import Any, Final

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator

from moesim.colours import BLACK, GREY, WHITE
from moesim.plots.looks import look
from moesim.plots.style import COLUMN, add_corner, legend_above, need, new_figure, styled

NAMES: Final = {"dali": "DALI", "hybrimoe": "HybriMoE", "prescope": "PreScope", "daop": "DAOP", "odmoe": "OD-MoE"}
_BAND: Final = 1.35
_MARGIN: Final = 1.6


def printed_data(frame: pd.DataFrame) -> pd.DataFrame:
    """Give printed and simulated numbers that runs answer, gains as factors.

    Parameters
    ----------
    frame : DataFrame
        Rows of ``papers.csv``, as `moesim papers` writes it.

    Returns
    -------
    DataFrame
        ``paper``, ``figure``, ``what``, ``printed``, ``simulated``, ``identified`` (none if the frame has no such column): values
        and ratios; no bounds, no places among systems.
    """
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
        }
    ).reset_index(drop=True)


@styled
def printed(frame: pd.DataFrame, corner: str = "") -> Figure:
    """Simulated over printed numbers of all papers; arguments as of `printed_data`.

    Parameters
    ----------
    frame : DataFrame
        Rows of ``papers.csv``, perhaps with ``identified``: by constants that the other tables of the paper tell.
    corner : str
        What the figure is about.

    Returns
    -------
    Figure
        The band is a factor of 1.35 to either side. Identified values are hollow, with a line from the derived ones.
    """
    data = printed_data(frame)
    shown = data[["printed", "simulated", "identified"]]
    least, most = float(shown.min().min()) / _MARGIN, float(shown.max().max()) * _MARGIN
    ends = [least, most]
    figure, axes = new_figure(COLUMN, 3.4)
    axes.grid(visible=True, axis="both")
    handles: list[Artist] = []
    for i, (name, rows) in enumerate(data.groupby("paper", sort=False)):
        style: dict[str, Any] = {"marker": look(i).marker, "color": look(i).colour, "markersize": 4.2, "markeredgewidth": 0.4}
        axes.vlines(rows["printed"], rows["simulated"], rows["identified"], color=look(i).colour, linewidth=0.5, alpha=0.6)
        axes.plot(rows["printed"], rows["simulated"], linestyle="none", markeredgecolor=BLACK, **style)
        if rows["identified"].notna().any():
            hollow = style | {"markerfacecolor": WHITE, "markeredgecolor": look(i).colour, "markeredgewidth": 0.8}
            axes.plot(rows["printed"], rows["identified"], linestyle="none", **hollow)
        handles.append(Line2D([], [], linestyle="none", markeredgecolor=BLACK, label=NAMES.get(str(name), str(name)), **style))
    if data["identified"].notna().any():
        for name, face in (("derived", GREY), ("identified", WHITE)):
            style = {"marker": "o", "markersize": 4.2, "markerfacecolor": face, "markeredgecolor": BLACK, "markeredgewidth": 0.6}
            handles.append(Line2D([], [], linestyle="none", label=name, **style))
    below, above = [end / _BAND for end in ends], [end * _BAND for end in ends]
    band = axes.fill_between(ends, below, above, color=GREY, alpha=0.25, linewidth=0, label=f"within {_BAND:g}")
    axes.plot(ends, ends, color=BLACK, linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="printed", ylabel="simulated", facecolor=WHITE)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator())
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_aspect("equal")
    legend_above(figure, [*handles, band], "Simulated against printed numbers")
    add_corner(figure, corner, ["speeds, ratios, times and shares, each in its unit"])
    return figure
