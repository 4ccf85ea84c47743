"""Which system is the fastest, over link and memory of a machine: a map for each model and batch, hatched in doubt."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Final

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from moesim.core.colours import BLACK, SERIES, WHITE, text_on
from moesim.errors import ConfigError
from moesim.hardware import weakest
from moesim.plots.kinds import Drawing, kind
from moesim.plots.style import SMALL, add_corner, legend_above, need, text_width
from moesim.plots.widths import TEXT, width_for

_COLUMNS: Final = (
    "model", "hardware", "batch_size", "cached_share", "link_over_cpu", "machine_ratio", "best", "second", "margin", "certain",
    "draws", "source_label", "labels",
)  # fmt: skip
_HATCH: Final = "////"
_CELL: Final = 0.2  # inches that a cell is high


@kind("league", "the fastest system over link and memory, hatched where that is not certain")
def crossover(frame: pd.DataFrame) -> Drawing:
    """Maps of the fastest system: models one below another, batches side by side."""
    need(frame, _COLUMNS, "crossover")
    models, batches = (list(dict.fromkeys(frame[name])) for name in ("model", "batch_size"))
    ratios, shares = (sorted(frame[name].unique()) for name in ("link_over_cpu", "cached_share"))
    counts = frame["best"].value_counts(sort=False)
    winners = sorted(counts.index, key=lambda name: -counts[name])  # of equals in order of appearance
    if len(winners) > len(SERIES):
        raise ConfigError(f"plot crossover: expected at most {len(SERIES)} systems that win, got {len(winners)}; map less")
    colours = dict(zip(winners, SERIES, strict=False))
    size = width_for(TEXT), 0.5 + len(models) * (_CELL * len(ratios) + 0.32)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(models), len(batches), sharex=True, sharey=True, squeeze=False)
    room = size[0] / len(batches) / (len(shares) + 0.6)
    for line, model in enumerate(models):
        for column, batch in enumerate(batches):
            axes = grid[line, column]
            cells = frame[(frame["model"] == model) & (frame["batch_size"] == batch)]
            _panel(axes, cells, ratios, shares, colours, with_margins=room > text_width("x1.00") + 0.04)
            axes.set_title(f"{_short(model)}, batch {batch}", fontsize=7, fontweight="normal")
    for axes in grid[-1]:
        axes.set_xticks(range(len(shares)), [f"{100 * share:g}" for share in shares])
    for axes in grid[:, 0]:
        axes.set_yticks(range(len(ratios)), [_ratio(ratio) for ratio in ratios])
    for axes in grid[:, 0]:
        axes.set_ylabel("link / CPU rate")
    for axes in grid[-1]:
        axes.set_xlabel("experts cached (%)")
    handles: list[Artist] = [
        Patch(facecolor=colours[name], edgecolor=BLACK, linewidth=0.5, label=f"{name} ({counts[name]})") for name in winners
    ]
    handles.append(Patch(facecolor=WHITE, hatch=_HATCH, edgecolor=BLACK, linewidth=0.5, label="not certain"))
    legend_above(figure, handles, "The fastest system while decoding")
    about = _about(frame)
    add_corner(figure, about, ["number: speed of the best over that of the second", "dotted: the machine as it is"])
    what = (
        "The fastest exact system while decoding at equal GPU memory, over the rate of the link as a multiple of that at which "
        "the CPU reads experts, and the share of experts for which there is room. The number is its speed over that of the "
        "second; in the legend, in how many cells it is the fastest. Hatched: the 95 % interval of that ratio "
        f"({frame['draws'].iloc[0]} draws of routing) holds 1, or another system is as fast at an end of the interval of the "
        "CPU's cost a row. Dotted: the machine as it is."
    )
    return Drawing(frame.reset_index(drop=True), figure, f"{what} {about}.")


def _about(frame: pd.DataFrame) -> str:
    labels = sorted({str(v) for v in frame["source_label"].dropna()})
    marks = dict.fromkeys(mark for text in frame["labels"].dropna() for mark in str(text).split(", ") if mark)
    return " · ".join([*dict.fromkeys(map(str, frame["hardware"])), *marks, f"simulated, weakest source: {weakest(labels)}"])


def _panel(
    axes: Axes,
    cells: pd.DataFrame,
    ratios: Sequence[float],
    shares: Sequence[float],
    colours: dict[str, str],
    *,
    with_margins: bool,
) -> None:
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(length=0)
    axes.set_xlim(-0.5, len(shares) - 0.5)
    axes.set_ylim(-0.5, len(ratios) - 0.5)
    for best, ratio, share, margin, certain in cells[["best", "link_over_cpu", "cached_share", "margin", "certain"]].itertuples(
        index=False
    ):
        x, y = shares.index(share), ratios.index(ratio)
        hatch = None if certain else _HATCH
        box = Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=colours[best], edgecolor=WHITE, linewidth=0.8)
        axes.add_patch(box)
        if hatch:
            over = Rectangle(
                (x - 0.5, y - 0.5), 1, 1, facecolor="none", edgecolor=text_on(colours[best]), hatch=hatch, linewidth=0
            )
            over.set_alpha(0.55)
            axes.add_patch(over)
        if with_margins and pd.notna(margin):
            axes.text(
                x, y, f"{margin:.2f}", ha="center", va="center", fontsize=SMALL, color=text_on(colours[best]),
                bbox=None if certain else {"facecolor": colours[best], "edgecolor": "none", "pad": 0.6},
            )  # fmt: skip
    own = float(cells["machine_ratio"].iloc[0]) if len(cells) else float("nan")
    if len(ratios) > 1 and ratios[0] <= own <= ratios[-1]:
        place = np.interp(np.log(own), np.log(ratios), range(len(ratios)))
        axes.axhline(float(place), color=BLACK, linewidth=1.0, linestyle=":")


def _short(model: str) -> str:
    """Leave out of a model's name what stands in parentheses."""
    return model.partition(" (")[0]


def _ratio(value: float) -> str:
    """Write a ratio as people say it.

    >>> _ratio(0.125), _ratio(2.0), _ratio(0.3)
    ('1/8', '2', '0.3')
    """
    exact = Fraction(value).limit_denominator(64)
    return f"{exact}" if abs(float(exact) - value) < 1e-9 and (exact.numerator == 1 or exact.denominator == 1) else f"{value:.2g}"
