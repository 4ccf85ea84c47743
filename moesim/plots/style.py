"""What all figures have in common: style, colours of policies, legends, corner labels, and saving."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, Final, ParamSpec

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from moesim.atomic import write_bytes
from moesim.colours import BLACK, SERIES
from moesim.errors import ConfigError
from moesim.hardware import weakest
from moesim.units import format_bytes

STYLE: Final[Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "figure.dpi": 100,
    "savefig.dpi": 200,
    "pdf.fonttype": 42,  # TrueType: text stays text, and the font comes with the file
    "ps.fonttype": 42,
}

CONDITIONED: Final = (
    "* share of decoding's gate mass computed as routed, on fresh inputs; the rest was not, yet routing is replayed as recorded"
)
"""What must stand beside the speed of a policy that is not exact."""

OPTIMUM: Final = "belady"
"""The policy that is drawn in black."""

_NO_BREAK: Final = "\N{NO-BREAK SPACE}"
_ROUNDING: Final = 1e-9  # of sums of gate weights
_P = ParamSpec("_P")


def styled(make: Callable[_P, Figure]) -> Callable[_P, Figure]:
    """Make a figure under `STYLE`, and leave the user's settings as they were."""

    @wraps(make)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> Figure:
        with matplotlib.rc_context():
            matplotlib.rcdefaults()
            matplotlib.rcParams.update(STYLE)
            figure = make(*args, **kwargs)
            FigureCanvasAgg(figure)
            return figure

    return wrapper


def new_figure(width: float, height: float) -> tuple[Figure, Axes]:
    """Make a figure with one axes, laid out so that nothing is cut off; sizes in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def corner_label(frame: pd.DataFrame, group: str | None = None) -> str:
    """Say what a figure is about: model, hardware, trace and the weakest source label of all its numbers.

    Parameters
    ----------
    frame : DataFrame
        Result rows.
    group : str, optional
        The column that is on an axis, and so not repeated here.

    Returns
    -------
    str
        One line, with batch size and cache ratio or budget where all rows have the same; the columns that the
        frame lacks are left out.
    """
    parts = []
    for column in ("model", "hardware", "trace"):
        if column in frame:
            parts.append(", ".join(sorted({str(v) for v in frame[column].dropna()})))
    if "routing" in frame:
        origins = sorted({str(v) for v in frame["routing"].dropna()} - {"recorded"})
        parts += [f"{' and '.join(origins)} routing"] if origins else []
    for column, words in (("batch_size", "batch"), (cache_column(frame), "cache")):
        if column != group and column in frame and frame[column].nunique() == 1:
            parts.append(f"{words} {group_name(frame[column].dropna().iloc[0], column)}")
    if "source_label" in frame:
        labels = [str(v) for v in frame["source_label"].dropna()]
        if labels:
            parts.append(f"simulated, weakest source: {weakest(labels)}")
    return " · ".join(part for part in parts if part)


def add_corner(figure: Figure, text: str, notes: Sequence[str] = ()) -> None:
    """Write the corner label, and notes below it, under a figure."""
    width = int(figure.get_figwidth() * 18)  # characters of this size in the width
    lines = [line for part in (*notes, text) if part for line in _wrapped(part, width)]
    if lines:
        figure.supxlabel("\n".join(lines), x=0.99, ha="right", fontsize=7, color="#555555")


def _wrapped(text: str, width: int) -> list[str]:
    """Wrap a text, between its parts if it has any; a part that is wider than a line is split between words."""
    parts = [part if len(part) > width - 2 else part.replace(" ", _NO_BREAK) for part in text.split(" · ")]
    lines = textwrap.wrap(f"{_NO_BREAK}· ".join(parts), width, break_on_hyphens=False)
    return [line.replace(_NO_BREAK, " ") for line in lines]


def need(frame: pd.DataFrame, columns: Sequence[str], what: str) -> None:
    """Check that a frame has columns and rows; raises `ConfigError`."""
    missing = [column for column in columns if column not in frame]
    if missing:
        raise ConfigError(f"plot {what}: expected the columns {', '.join(missing)} in the results, got none of them")
    if frame.empty:
        raise ConfigError(f"plot {what}: expected at least one result, got none")


def averaged(frame: pd.DataFrame, group: str | None) -> list[str]:
    """Say over what a figure averages: the swept columns that it does not show."""
    found = []
    cache = cache_column(frame)
    for column, words in ((cache, "cache ratio" if cache == "cache_ratio" else "budget"), ("batch_size", "batch size")):
        shown = column == group or (column == cache and group == "cache_ratio")  # each budget has its own ratio
        if not shown and column in frame and frame[column].nunique() > 1:
            values = ", ".join(group_name(value, column) for value in sorted(frame[column].dropna().unique()))
            found.append(f"mean over {words} {values}")
    return found


def cache_column(frame: pd.DataFrame) -> str:
    """Name the column that says how large the cache was asked to be: a budget if all rows have one, else the ratio."""
    has_budgets = "cache_budget_bytes" in frame and frame["cache_budget_bytes"].notna().all()
    return "cache_budget_bytes" if has_budgets else "cache_ratio"


def policies_of(frame: pd.DataFrame) -> list[str]:
    """List the policies in the order in which they first appear."""
    return [str(name) for name in frame["policy"].unique()]


def mean(frame: pd.DataFrame, column: str) -> float | None:
    """Average a column, without the rows where it has no value; None if none has."""
    values = pd.to_numeric(frame[column], errors="coerce").dropna()
    return float(values.mean()) if len(values) else None


def lossy_mark(frame: pd.DataFrame) -> str:
    """Say which share of the decoding was computed as the model asked for; empty if all of it was."""
    column = "fidelity_fresh_decode"
    fresh = mean(frame, column) if column in frame else None
    if fresh is None or fresh >= 1 - _ROUNDING:
        return ""
    return f"{math.floor(1000 * fresh) / 10:g}%*"  # down: never 100% of what is not exact


def colours_of(policies: Sequence[str]) -> dict[str, str]:
    """Give every policy its colour, the same in all figures of one set of policies."""
    others = [policy for policy in policies if policy != OPTIMUM]
    return {OPTIMUM: BLACK, **{policy: SERIES[i % len(SERIES)] for i, policy in enumerate(others)}}


def short(value: float) -> str:
    """Write a number beside a bar: three figures, never with an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def group_name(value: Any, column: str = "") -> str:
    """Write the value of a group as it would be typed; bytes with a unit."""
    if column == "cache_budget_bytes":
        return _bytes(int(value))
    return f"{value:g}" if isinstance(value, (int, float, np.number)) else str(value)


def _bytes(value: int) -> str:
    """Write a budget in the binary unit in which it was probably typed, else in decimal ones."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if value >= size and value * 4 % size == 0:
            return f"{value / size:g} {unit}"
    return format_bytes(value)


def legend_beside(axes: Axes, names: Sequence[str]) -> None:
    """Put the legend to the right of the axes, where it covers nothing."""
    handles, labels = axes.get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda i: names.index(labels[i]) if labels[i] in names else len(names))
    axes.legend(
        [handles[i] for i in order],
        [labels[i] for i in order],
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
        borderaxespad=0.5,
    )


def save(figure: Figure, path_base: str | Path) -> list[Path]:
    """Write a figure as PNG and PDF, atomically; the same figure gives the same bytes.

    Parameters
    ----------
    figure : Figure
        From one of the functions here.
    path_base : str or Path
        The path without a suffix.

    Returns
    -------
    list of Path
        The PNG and the PDF.
    """
    written = []
    for suffix, metadata in (("png", {"Software": None}), ("pdf", {"CreationDate": None, "Producer": None})):
        buffer = io.BytesIO()
        with matplotlib.rc_context():
            matplotlib.rcdefaults()
            matplotlib.rcParams.update(STYLE)
            figure.savefig(buffer, format=suffix, metadata=metadata)
        written.append(write_bytes(Path(f"{path_base}.{suffix}"), buffer.getvalue()))
    return written
