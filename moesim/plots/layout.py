"""Texts of a figure that collide: measured as laid out, and given room by general means."""

from __future__ import annotations

import re
import warnings
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.text import Text
from matplotlib.textpath import text_to_path
from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator

_POINTS: Final = 72  # in an inch
_HINTED: Final = 1.02  # glyphs are as wide as whole pixels allow
_ROUNDS: Final = 6
_TALLER: Final = 0.12  # of a figure, where more height is the remedy
_NAMES: Final = 0.4  # of a figure's width, for names at its left
_PRINT: Final = 240  # dots an inch: at fewer, glyphs of other widths are drawn
_APART: Final = 3.0  # dots next to a text; of numbers in axes, which are close to each other, less
_NEAR: Final = 0.5
_BREAKS: Final = re.compile(r"(?<=[\s,;/+:_-])(?=[^\s,;/+:_-])|(?<=\S)(?=\()")


@lru_cache(maxsize=4096)
def extent(text: str, size: float, weight: str = "normal") -> tuple[float, float]:
    """Measure the width and height of a line of text, in inches."""
    font = FontProperties(size=size, weight=weight)
    (width, _, _), (_, height, _) = (text_to_path.get_text_width_height_descent(one, font, ismath=False) for one in (text, "lp"))
    return _HINTED * width / _POINTS, height / _POINTS


def wrapped(text: str, inches: float, size: float, weight: str = "normal") -> str:
    """Break a text into lines of at most this width, after spaces and signs if there are any.

    >>> wrapped("a policy(with=2,three=3)", 0.7, 7).split(chr(10))
    ['a policy', '(with=2,', 'three=3)']
    """
    lines = [""]
    for part in _BREAKS.split(text.replace("\n", " ")):
        if lines[-1] and extent((lines[-1] + part).rstrip(), size, weight)[0] > inches:
            lines.append("")
        while len(part) > 1 and extent(part.rstrip(), size, weight)[0] > inches:
            n = next((n for n in range(len(part) - 1, 1, -1) if extent(part[:n], size, weight)[0] <= inches), 1)
            lines[-1:], part = [lines[-1] + part[:n], ""], part[n:]
        lines[-1] += part
    return "\n".join(line.rstrip() for line in lines if line.strip())


class _Shown(NamedTuple):
    text: Text
    role: str  # x or y: a tick label of that axis; xlabel, ylabel, title, inside, legend, other
    axes: Axes | None


def settle(figure: Figure) -> None:
    """Give texts that collide room: fewer or turned tick labels, lines that break, wider axes, a taller figure."""
    dpi = figure.dpi
    figure.dpi = _PRINT
    _settle(figure)
    stale = figure.stale
    figure.dpi = dpi
    figure.stale = stale  # not so if its layout is that of the last drawing


def _settle(figure: Figure) -> None:
    for axes in figure.axes:
        names = [label.get_text() for label in axes.get_yticklabels()]
        if isinstance(axes.yaxis.get_major_locator(), FixedLocator) and any(map(_worded, names)):
            size = float(axes.get_yticklabels()[0].get_fontsize())
            lines = [[wrapped(line, _NAMES * figure.get_figwidth(), size) for line in name.split("\n")] for name in names]
            axes.set_yticks(axes.get_yticks(), ["\n".join(one) for one in lines])
    for _ in range(_ROUNDS):
        with warnings.catch_warnings(record=True) as collapsed:
            warnings.simplefilter("always", UserWarning)
            figure.draw_without_rendering()
        shown = _shown(figure)
        found = _colliding(figure, shown)
        if not found and not collapsed:
            return
        done: set[int] = set()
        more = 3 * _TALLER if collapsed else 0.0  # of height
        for place, other in found:
            one = shown[place]
            if id(one.text) not in done:
                more = max(more, _remedy(figure, one, None if other is None else shown[other], done))
        figure.set_figheight((1 + more) * figure.get_figheight())


def _colliding(figure: Figure, shown: list[_Shown]) -> list[tuple[int, int | None]]:
    """List the texts that cover another one, with its number, or that leave the figure."""
    if not shown:
        return []
    boxes = np.array([one.text.get_window_extent().extents for one in shown])
    gaps = np.array([_NEAR if one.role == "inside" else _APART for one in shown])
    (x0, y0, x1, y1), whole = boxes.T, figure.bbox.extents
    out = (x0 < whole[0] - 1) | (y0 < whole[1] - 1) | (x1 > whole[2] + 1) | (y1 > whole[3] + 1)
    across, up = (np.minimum.outer(b, b) - np.maximum.outer(a, a) for a, b in ((x0, x1), (y0, y1)))
    pairs = np.argwhere(np.triu((across > -np.add.outer(gaps, gaps)) & (up > -_NEAR), 1))
    return [(int(i), None) for i in np.flatnonzero(out)] + [(int(k), int(j)) for pair in pairs for k, j in (pair, pair[::-1])]


def _shown(figure: Figure) -> list[_Shown]:
    found: list[_Shown] = []
    for axes in (axes for axes in figure.axes if axes.get_visible()):
        for role, axis, limits in (("x", axes.xaxis, axes.get_xlim()), ("y", axes.yaxis, axes.get_ylim())):
            if axes.axison and axis.get_visible():
                near = min(limits) - 1e-9 * abs(min(limits)), max(limits) + 1e-9 * abs(max(limits))
                for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
                    labels = (tick.label1, tick.label2) if near[0] <= tick.get_loc() <= near[1] else ()
                    found += [_Shown(label, role, axes) for label in labels]
                found.append(_Shown(axis.get_label(), f"{role}label", axes))
        own = [one for one in axes.get_children() if isinstance(one, Text)]
        found += [_Shown(one, "inside" if one in axes.texts else "title", axes) for one in own]
        legend = axes.get_legend()
        found += [_Shown(one, "legend", axes) for one in (legend.get_texts() if legend else ())]
    found += [_Shown(one, "legend", None) for legend in figure.legends for one in (*legend.get_texts(), legend.get_title())]
    found += [_Shown(one, "other", None) for one in figure.texts]
    return [one for one in found if one.text.get_visible() and one.text.get_text().strip()]


def _remedy(figure: Figure, one: _Shown, other: _Shown | None, done: set[int]) -> float:
    """Do what helps a text that collides; return by which share the figure has to be taller."""
    text, axes, size = one.text, one.axes, float(one.text.get_fontsize())
    if axes is None or one.role == "legend":
        return 0.0 if other is not None and other.axes is not None else _TALLER
    same = other is not None and other.axes is axes and other.role == one.role
    if one.role in ("x", "y"):
        axis = axes.xaxis if one.role == "x" else axes.yaxis
        labels = [tick.label1 for tick in axis.get_major_ticks()]
        done.update(id(label) for label in labels)
        if (
            one.role == "y"
            and isinstance(axis.get_major_locator(), FixedLocator)
            and any(_worded(one.get_text()) for one in labels)
        ):
            return _deficit(labels) if same else _TALLER
        return 0.0 if (same or other is None) and _fewer(axis, labels, one.role) else _TALLER
    if one.role == "inside":
        return _inside(axes, text, other, done)
    inside = axes.get_window_extent()
    lines = wrapped(text.get_text(), (inside.height if one.role == "ylabel" else inside.width) / figure.dpi,
                    size, str(text.get_fontweight()))  # fmt: skip
    if lines.count("\n") > text.get_text().count("\n"):
        text.set_text(lines)
        done.add(id(text))
        return 0.0
    return _TALLER


def _worded(name: str) -> bool:
    return re.fullmatch(r"[-\N{MINUS SIGN}\d.,e+ ]*", name) is None


def _deficit(labels: list[Text]) -> float:
    """Return by which share labels one above another are higher than the room that they have."""
    boxes = sorted((label.get_window_extent() for label in labels if label.get_text()), key=lambda box: float(box.y0))
    ratios = [1.05 * (a.height + b.height) / (b.y0 + b.y1 - a.y0 - a.y1) for a, b in pairwise(boxes)]
    return min(max(ratios, default=1) - 1, 1.0)


def _fewer(axis: Axis, labels: list[Text], which: str) -> bool:
    locator: Any = axis.get_major_locator()
    if isinstance(locator, FixedLocator):
        if which == "x" and any(label.get_rotation() == 0 for label in labels):
            axis.set_ticks(axis.get_majorticklocs(), [label.get_text().replace("\n", ", ") for label in labels])
            axis.set_tick_params(labelrotation=90)
            return True
        if not any(_worded(label.get_text()) for label in labels):
            kept = [label for label in labels if label.get_text()][::2]
            axis.set_ticks(axis.get_majorticklocs(), [label.get_text() if label in kept else "" for label in labels])
            return True
        return False
    shown = [label.get_text() for label in labels if label.get_text()]
    if isinstance(locator, LogLocator):
        locator.set_params(subs=(1,))
    elif len(shown) > 2:
        integer = not any(re.search(r"[^-\N{MINUS SIGN}\d]", one) for one in shown)
        axis.set_major_locator(MaxNLocator(nbins=len(shown) // 2, integer=integer))
    return len(shown) > 2


def _inside(axes: Axes, text: Text, other: _Shown | None, done: set[int]) -> float:
    """Widen axes for what leaves them; numbers that cover each other are left out, for the data have them."""
    inside, box = axes.get_window_extent(), text.get_window_extent()
    if other is None:
        for low, high, begin, end, limits, change in (
            (box.x0, box.x1, inside.x0, inside.x1, axes.get_xlim(), axes.set_xlim),
            (box.y0, box.y1, inside.y0, inside.y1, axes.get_ylim(), axes.set_ylim),
        ):
            span, room = limits[1] - limits[0], end - begin
            change(
                limits[0] - min(max(0.0, begin - low) / room, 1.0) * span,
                limits[1] + min(max(0.0, high - end) / room, 1.0) * span,
            )
    elif other.role == "inside" and other.axes is axes:
        for one in axes.texts:
            one.set_visible(False)
        done.update(id(one) for one in axes.texts)
    else:
        return _TALLER
    return 0.0
