"""Bars by policy in groups and panels, sized for a column or the whole width of a page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.patheffects import withStroke
from matplotlib.textpath import text_to_path

from moesim.core.colours import BLACK, GREY, WHITE
from moesim.plots.looks import Look, looks_of
from moesim.plots.style import SMALL, legend_above, text_width
from moesim.plots.widths import COLUMN, TEXT, width_for

_GAP: Final = 1.0  # between groups, in bars
_FRAME: Final = 0.62  # inches beside the axes, for their ticks and label
_NARROW: Final = 0.165  # inches that a bar needs, so that its number can stand above it
_HEIGHT: Final = {1: 1.75, 2: 1.55}  # of axes, in inches, by number of rows
_LOW: Final = 1.3  # the same with more rows
_ALIKE: Final = 2.5  # panels whose axes reach this much further than others have axes of their own
_LINE: Final = 0.115  # inches that a line of small text is high
_POINTS: Final = 72  # in an inch
_SPACE: Final = 0.03  # inches between the numbers of neighbouring bars
_BOX: Final = 0.12  # of the axis, what stands for a run that failed
ENDS: Final = "over the profile's intervals"
"""Words in the legend for what reaches from the least to the most at the ends of intervals."""
_ENDS: Final[Any] = {  # to be seen on every fill, and below a thin error bar
    "color": GREY, "linewidth": 2.4, "solid_capstyle": "butt", "path_effects": [withStroke(linewidth=3.8, foreground=BLACK)]
}  # fmt: skip


class Bar(NamedTuple):
    """One bar: where it stands, how high it is, its 95 % interval (nan if it has none), and what is written above it.

    Without a value (nan) it stands for runs that failed. `least` and `most` reach over the intervals of the profile's numbers;
    nan if it has none.
    """

    panel: str
    group: str
    policy: str
    value: float
    low: float
    high: float
    text: tuple[str, ...]  # lines
    least: float = math.nan
    most: float = math.nan


class Words(NamedTuple):
    """What is written at the axes and above the figure."""

    title: str
    x: str
    y: str


def grouped_bars(bars: Sequence[Bar], words: Words, legend: Mapping[str, str], level: float | None = None) -> Figure:
    """Draw bars."""
    looks = looks_of(list(legend))
    panels: dict[str, list[Bar]] = {}
    for bar in bars:
        panels.setdefault(bar.panel, []).append(bar)
    places = {name: _places(found, list(legend)) for name, found in panels.items()}
    longest = max(place.width for place in places.values())
    width, n_columns = _layout(longest, len(panels))
    n_rows = -(-len(panels) // n_columns)
    height = _HEIGHT.get(n_rows, _LOW)
    inch = (width / n_columns - _FRAME) / longest  # of a bar
    numbers = [line for bar in bars if not math.isnan(bar.value) for line in bar.text]
    rotated = any(_extent(line)[0] + _SPACE > inch for line in numbers)
    if inch < max((_extent(line)[1] for line in numbers), default=0.0):  # they would cover each other; the data have them
        bars = [bar if math.isnan(bar.value) else bar._replace(text=()) for bar in bars]
        panels = {name: [bar for bar in bars if bar.panel == name] for name in panels}
    lines = max(bar.group.count("\n") + 1 for bar in bars)
    heads = 0.2 if len(panels) > 1 else 0.05
    figure = Figure(figsize=(width, 0.1 + n_rows * (height + heads + _LINE * (lines + 0.5)) + 0.15), layout="constrained")
    grid = figure.subplots(n_rows, n_columns, squeeze=False)
    tops: list[float] = []
    for i, axes in enumerate(grid.ravel().tolist()):
        if i >= len(panels):
            axes.remove()
            continue
        name = list(panels)[i]
        tops.append(max(_draw(axes, panels[name], places[name], looks, height, rotated), 1.05 * (level or 0.0)))
        if level is not None:
            axes.axhline(level, color=BLACK, linewidth=0.8, linestyle="--", zorder=0.9)
        axes.set_xlim(-0.5 - _GAP / 2, longest - _GAP - 0.5 + _GAP / 2)
        if len(panels) > 1:
            axes.set_title(name, fontsize=7.5, fontweight="normal")
        if i >= len(panels) - n_columns:
            axes.set_xlabel(words.x)
        if i % n_columns == 0:
            axes.set_ylabel(words.y)
    limit_panels(figure.axes, tops)
    handles: list[Artist] = [
        Patch(facecolor=look.colour, hatch=look.hatch, edgecolor=BLACK, linewidth=0.5, label=legend[policy])
        for policy, look in looks.items()
    ]
    handles += [Line2D([], [], **_ENDS, label=ENDS)] if any(bar.least < bar.most for bar in bars) else []
    legend_above(figure, handles, words.title)
    return figure


def limit_panels(panels: Sequence[Axes], tops: Sequence[float]) -> None:
    """Give panels one axis from 0 to the highest of their tops; those that reach much less far get axes of their own."""
    tops = [top or max(tops) or 1.0 for top in tops]  # of a panel in which all failed
    alike = max(tops) <= _ALIKE * min(tops)
    for axes, top in zip(panels, tops, strict=True):
        axes.set_ylim(0, max(tops) if alike else top)


def _extent(text: str) -> tuple[float, float]:
    """Measure the width and height of a line of small text, in inches; no line is lower than one with descenders."""
    font = FontProperties(size=SMALL)
    sizes = [text_to_path.get_text_width_height_descent(part, font, ismath=False) for part in (text, "lp")]
    return sizes[0][0] / _POINTS, max(height for _, height, _ in sizes) / _POINTS


class _Places(NamedTuple):
    """Where the bars of a panel stand, in bars from the left: of each group, its policies and its middle."""

    x: dict[tuple[str, str], float]
    middles: dict[str, float]
    width: float


def _places(bars: Sequence[Bar], policies: Sequence[str]) -> _Places:
    groups: dict[str, set[str]] = {}
    for bar in bars:
        groups.setdefault(bar.group, set()).add(bar.policy)
    x: dict[tuple[str, str], float] = {}
    middles: dict[str, float] = {}
    at = 0.0
    for group, present in groups.items():
        ordered = [policy for policy in policies if policy in present]
        named = max(text_width(line, 7.0) for line in group.split("\n")) / _NARROW - _GAP / 2  # what its name needs
        spare = max(0.0, named - len(ordered)) / 2
        middles[group] = at + spare + (len(ordered) - 1) / 2
        for i, policy in enumerate(ordered):
            x[group, policy] = at + spare + i
        at += len(ordered) + 2 * spare + _GAP
    return _Places(x, middles, at)


def _layout(longest: float, n_panels: int) -> tuple[float, int]:
    """Choose the width of the figure and how many panels stand side by side."""
    if n_panels == 1:
        return width_for(COLUMN if longest * _NARROW + _FRAME <= COLUMN else TEXT), 1
    width = width_for(TEXT)
    fit = int(width / (longest * _NARROW + _FRAME))
    return width, max(1, min(fit, n_panels, 4))


def _draw(axes: Axes, bars: Sequence[Bar], places: _Places, looks: Mapping[str, Look], height: float, rotated: bool) -> float:
    """Draw the bars of one panel, and say how high its axis must reach for what is written above them."""
    top = 0.0
    for bar in bars:
        x, look = places.x[bar.group, bar.policy], looks[bar.policy]
        if math.isnan(bar.value):
            _failed(axes, x, look, " ".join(bar.text))
            continue
        axes.bar(x, bar.value, 0.9, color=look.colour, hatch=look.hatch, edgecolor=BLACK, linewidth=0.5)
        end = bar.value
        if bar.least < bar.most:  # false of nan
            axes.plot([x, x], [bar.least, bar.most], **_ENDS)
            end = max(end, bar.most)
        if not math.isnan(bar.low):
            error: Any = [[bar.value - bar.low], [bar.high - bar.value]]
            axes.errorbar(x, bar.value, yerr=error, fmt="none", ecolor=GREY if look.colour == BLACK else BLACK, elinewidth=0.8,
                          capsize=1.5)  # fmt: skip
            end = max(end, bar.high)
        text = (" · " if rotated else "\n").join(bar.text)
        long = text_width(text) + 0.03 if rotated else _LINE * len(bar.text) + 0.03
        top = max(top, end / (1 - min(long / height, 0.8)))
        axes.annotate(text, (x, end), (0, 2), textcoords="offset points", ha="center", va="bottom", fontsize=SMALL,
                      rotation=90 if rotated else 0, linespacing=0.95,
                      bbox={"facecolor": WHITE, "edgecolor": "none", "pad": 0.2})  # fmt: skip
    axes.set_xticks(list(places.middles.values()), list(places.middles))
    axes.tick_params(axis="x", length=0)
    return top


def _failed(axes: Axes, x: float, look: Look, text: str) -> None:
    """Draw what stands for a run that failed: an empty box, as high in every figure, and what is written above it."""
    at = axes.get_xaxis_transform()
    outline: Any = {"fill": False, "edgecolor": look.colour, "linestyle": (0, (2, 1.5)), "linewidth": 0.8, "hatch": "xxxx"}
    axes.add_patch(Rectangle((x - 0.45, 0), 0.9, _BOX, transform=at, **outline))
    axes.annotate(text, (x, _BOX), (0, 2), xycoords=at, textcoords="offset points", ha="center", va="bottom", fontsize=SMALL,
                  rotation=90)  # fmt: skip
