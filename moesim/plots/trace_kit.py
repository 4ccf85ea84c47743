"""What the figures of a trace have in common: lines that differ in colour, marker and dash, and where they come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moesim.colours import BLACK, GREY, SERIES
from moesim.plots.style import add_corner, styled

_MARKERS: Final = "osD^vPX<>"
_DASHES: Final = ("-", "--", "-.", ":")
_MARKED: Final = 18  # points of a line with as many markers; of more only some have one


def drawn(*path: str) -> Callable[[Callable[[Mapping[str, Any], Any], Figure]], Callable[[Mapping[str, Any]], Figure | None]]:
    """Make a figure of one part of a report, under the style of all figures; None where the report lacks that part.

    Parameters
    ----------
    *path : str
        Keys that lead to the part.

    Returns
    -------
    callable
        Decorates a function of the report and the part.
    """

    def decorate(make: Callable[[Mapping[str, Any], Any], Figure]) -> Callable[[Mapping[str, Any]], Figure | None]:
        in_style = styled(make)

        @wraps(make)
        def wrapper(report: Mapping[str, Any]) -> Figure | None:
            found: Any = report
            for key in path:
                found = found[key]
            return in_style(report, found) if found is not None and any(found.values()) else None

        return wrapper

    return decorate


def line(axes: Axes, x: Sequence[float], y: Sequence[float | None], number: int, label: str, **changes: Any) -> None:
    """Draw a line; its number decides colour, marker and dash, so that it can be told apart in grey as well.

    Parameters
    ----------
    axes : Axes
    x, y : sequence
        Points; those whose y is None are left out.
    number : int
        Of the line in its figure, from 0.
    label : str
        For the legend.
    **changes
        What to draw differently.
    """
    points = [(a, b) for a, b in zip(x, y, strict=True) if b is not None]
    every = 1 + len(points) // _MARKED
    look: dict[str, Any] = {
        "color": SERIES[number % len(SERIES)],
        "marker": _MARKERS[number % len(_MARKERS)],
        "markevery": (number * every // 4 % every, every),  # not all at the same places
        "linestyle": _DASHES[number % len(_DASHES)],
        "markersize": 4.5,
        "markeredgecolor": BLACK,
        "markeredgewidth": 0.4,
        "linewidth": 1.4,
    }
    axes.plot([a for a, _ in points], [b for _, b in points], label=label, **(look | changes))


def level(axes: Axes, y: float | None, label: str, **changes: Any) -> None:
    """Draw a horizontal line to compare with; none if it has no value."""
    look: dict[str, Any] = {"color": GREY, "linestyle": ":", "linewidth": 1.6, "zorder": 1}
    if y is not None:
        axes.axhline(y, label=label, **(look | changes))


def source(figure: Figure, report: Mapping[str, Any], *notes: str) -> None:
    """Write under a figure which routing it shows, after the notes."""
    n_requests = report["n_requests"]
    tokens = f"{report['n_rows']:,} {report['phase']} tokens of {n_requests} request{'' if n_requests == 1 else 's'}"
    parts = [str(report["trace"]), f"routing of {report['model']}", str(report["label"]), tokens]
    add_corner(figure, " · ".join(parts), [note for note in notes if note])


def doubling_axis(axes: Axes, values: Sequence[int], label: str) -> None:
    """Make the x axis logarithmic with a tick at each value."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(values), [str(v) for v in values])
    axes.minorticks_off()
    axes.set_xlabel(label)
