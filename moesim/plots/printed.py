"""What the papers print against what is simulated: one marker a printed number, both axes logarithmic."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator

from moesim.core.colours import BLACK, GREY, WHITE
from moesim.errors import ConfigError
from moesim.hardware import LABELS, weakest
from moesim.plots.kinds import Drawing, kind
from moesim.plots.looks import look
from moesim.plots.style import add_corner, legend_above, need
from moesim.plots.widths import COLUMN, TEXT, is_narrow, width_for

NAMES: Final = {"dali": "DALI", "hybrimoe": "HybriMoE", "prescope": "PreScope", "daop": "DAOP", "odmoe": "OD-MoE"}
_BAND: Final = 1.35
_MARGIN: Final = 1.6


def printed_data(frame: pd.DataFrame) -> pd.DataFrame:
    """Give printed and simulated numbers that runs answer, gains as factors."""
    rows = _answered(frame)
    gain = rows["kind"] == "gain"
    told = rows["identified"] if "identified" in rows else pd.Series(float("nan"), rows.index)
    printed, simulated, identified = (one.astype(float) for one in (rows["published"], rows["simulated"], told))
    over = rows["over"].fillna("")
    return pd.DataFrame(
        {
            "paper": rows["paper"],
            "figure": rows["figure"],
            "what": rows["system"] + over.where(over == "", " over " + over),
            "printed": printed.where(~gain, 1 + printed / 100),
            "simulated": simulated.where(~gain, 1 + simulated / 100),
            "identified": identified.where(~gain, 1 + identified / 100),
            "met": rows["consistent"] != "no" if "consistent" in rows else True,
        }
    ).reset_index(drop=True)


def _answered(frame: pd.DataFrame) -> pd.DataFrame:
    """Keep the rows that runs answer with a number."""
    need(frame, ("paper", "figure", "kind", "published", "simulated", "source"), "printed")
    return frame[frame["kind"].isin(("value", "speedup", "gain")) & (frame["source"] == "runs") & frame["simulated"].notna()]


@kind("papers", "printed against simulated numbers of papers")
def printed(frame: pd.DataFrame, label: str = "") -> Drawing:
    """Simulated over printed numbers of all papers; arguments as of `printed_data`."""
    data = printed_data(frame)
    if data.empty:
        raise ConfigError(
            "plot printed: expected a printed number that runs answer, got none; name a whole paper to `moesim papers`"
        )
    told = data[data["identified"].notna()]
    panels = [("by the derived profile, nothing fitted", data["simulated"], data.assign(met=True))]
    panels += [("identified, the row's table left out", told["identified"], told)] if len(told) else []
    shown = data[["printed", "simulated", "identified"]]
    ends = [float(shown.min().min()) / _MARGIN, float(shown.max().max()) * _MARGIN]
    natural = COLUMN if len(panels) == 1 else TEXT
    width = width_for(natural)
    n_columns = 1 if is_narrow(width) else len(panels)
    n_rows = len(panels) // n_columns
    figure = Figure(figsize=(width, 3.2 * n_rows**2 * min(1.0, width / natural)), layout="constrained")
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
    source = _source(_answered(frame))
    add_corner(figure, label or source, ["speeds, ratios, times and shares, each in its unit"])
    return Drawing(data, figure, _caption(_answered(frame), data, label, source))


def _source(frame: pd.DataFrame) -> str:
    """Name the weakest label of the numbers that were used; rows name several, and what stands for recorded routing."""
    found = {one for text in frame.get("label", pd.Series(dtype=str)).dropna() for one in str(text).split(", ")}
    known = [one for one in found if one in LABELS]
    return f"simulated, weakest source: {weakest(known)}" if known else "simulated"


def _caption(rows: pd.DataFrame, data: pd.DataFrame, label: str, source: str) -> str:
    """Say what is shown, of which figures and tables, and how far off it is."""
    refs = (rows["ref"] if "ref" in rows else rows["figure"]).fillna(rows["figure"]).astype(str)
    places = {str(name): ", ".join(dict.fromkeys(refs[part.index])) for name, part in rows.groupby("paper", sort=False)}
    papers = "; ".join(f"{NAMES.get(name, name)}: {where}" for name, where in places.items())
    sentences = [f"Simulated against printed numbers of papers: {len(data)} rows that runs answer, gains as factors."]
    for name, told in (("simulated", "Derived"), ("identified", "Identified, the row's table left out")):
        off = (data[name] / data["printed"]).dropna()
        if len(off):
            factor = float(np.exp(np.median(np.abs(np.log(off)))))
            within = int(((off <= _BAND) & (off >= 1 / _BAND)).sum())
            sentences.append(f"{told}: half of {len(off)} are within a factor of {factor:.3g}, {within} within {_BAND:g} (grey).")
    if not data["met"].all():
        sentences.append(f"Hollow: {int((~data['met']).sum())} rows that no constants reconcile with the rest of their paper.")
    sentences += [
        f"{label[0].upper()}{label[1:]}." if label else "",
        f"{source[0].upper()}{source[1:]}.",
        f"Printed in {papers}.",
    ]
    return " ".join(sentence for sentence in sentences if sentence)


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
