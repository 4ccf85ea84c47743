"""What the figures of a trace have in common: lines that differ in colour, marker and dash, and where they come from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import update_wrapper
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from moesim.core.colours import BLACK, GREY, SERIES
from moesim.errors import ConfigError, unknown_name
from moesim.plots.style import add_corner, styled
from moesim.trace import Trace
from moesim.trace.stats.balance import PHASES, main_phase, phase_rows

_MARKERS: Final = "osD^vPX<>"
_DASHES: Final = ("-", "--", "-.", ":")
_SIGNALS: Final = ("gate_next1", "gate_next2", "gate_next3", "residual", "learned", "shadow", "coactivation", "")
"""Beginnings of the names of signals, in the order of their looks; the last stands for all others."""
_MARKED: Final = 18  # points of a line with as many markers; of more only some have one


class TraceFigure:
    """A figure of one part of a report, made under the style of all figures."""

    def __init__(self, make: Callable[[Mapping[str, Any], Any], Figure], path: tuple[str, ...]) -> None:
        self._make = styled(make)
        self._path = path
        update_wrapper(self, make)

    def __call__(self, report: Mapping[str, Any]) -> Figure | None:
        """Make the figure; None where the report lacks its part."""
        return self._make(report, self._part(report)) if self._is_there(report) else None

    def why_left_out(self, report: Mapping[str, Any]) -> str | None:
        """Say why a report does not have this figure; None where it does."""
        if self._is_there(report):
            return None
        absent, name = report["absent"], ".".join(self._path)
        inner = [reason for key, reason in absent.items() if key.startswith(f"{name}.")]
        near = [reason for key, reason in absent.items() if key.startswith(f"{self._path[0]}.activated.")]
        reasons = [absent[name]] if name in absent else inner or near or ["the trace has no numbers for it"]
        return "; ".join(dict.fromkeys(reasons))

    def _part(self, report: Mapping[str, Any]) -> Any:
        found: Any = report
        for key in self._path:
            found = found[key]
        return found

    def _is_there(self, report: Mapping[str, Any]) -> bool:
        found = self._part(report)
        return found is not None and any(found.values())


def drawn(*path: str) -> Callable[[Callable[[Mapping[str, Any], Any], Figure]], TraceFigure]:
    """Make a `TraceFigure` of a function of the report and one part of it; `path` are the keys that lead there."""
    return lambda make: TraceFigure(make, path)


def signal_numbers(names: Iterable[str]) -> dict[str, int]:
    """Number signals for `line`, so that each looks the same in every figure whichever others there are.

    >>> signal_numbers(["coactivation", "shadow-int8", "residual", "shadow-int4"])
    {'residual': 3, 'shadow-int4': 5, 'coactivation': 6, 'shadow-int8': 13}
    """
    numbers: dict[str, int] = {}
    for name in sorted(names):
        number = next(i for i, beginning in enumerate(_SIGNALS) if name.startswith(beginning))
        while number in numbers.values():
            number += len(_SIGNALS)
        numbers[name] = number
    return dict(sorted(numbers.items(), key=lambda item: item[1]))


def line(axes: Axes, x: Sequence[float], y: Sequence[float | None], number: int, label: str, **changes: Any) -> None:
    """Draw a line; its number decides colour, marker and dash, so that it can be told apart in grey as well."""
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


def phase_of(trace: Trace, phase: str | None) -> str:
    """Choose the phase to draw: the one asked for, else decode, unless the trace has none."""
    if phase is None:
        return main_phase(trace)
    if phase not in PHASES:
        raise ConfigError(f"plot: {unknown_name('phase', phase, list(PHASES))}")
    if not len(phase_rows(trace, phase)):
        raise ConfigError(f"plot: expected a trace with {phase} tokens, got none in {trace.model}; choose the other phase")
    return phase


def trace_corner(trace: Trace, phase: str, rows: NDArray[Any] | None = None) -> str:
    """Say in one line which routing a figure shows; `rows` of the trace, or all of the phase."""
    return f"routing of {trace.model} · {_origin(trace)} · {_tokens(trace, phase, rows)}"


def trace_words(trace: Trace, phase: str, rows: NDArray[Any] | None = None) -> str:
    """Say in a caption which routing a figure shows, and how far it can be trusted; `rows` as for `trace_corner`."""
    warning = {"miniature": " A miniature has a large model's routing shape and is easier to predict.",
               "synthetic": " No model was run: the routing is made up."}  # fmt: skip
    return (
        f"Routing of {trace.model} ({_origin(trace)}): {_tokens(trace, phase, rows)}, {trace.n_layers} MoE layers of "
        f"{trace.n_experts} experts, top {trace.top_k}.{warning.get(trace.origin, '')}"
    )


def _tokens(trace: Trace, phase: str, rows: NDArray[Any] | None) -> str:
    rows = phase_rows(trace, phase) if rows is None else rows
    n_requests = len(np.unique(trace.request[rows]))
    return f"{len(rows):,} {phase} tokens of {n_requests} request{'' if n_requests == 1 else 's'}"


def _origin(trace: Trace) -> str:
    return trace.label if trace.origin in ("recorded", trace.label) else f"{trace.label}, {trace.origin}"


def doubling_axis(axes: Axes, values: Sequence[int], label: str) -> None:
    """Make the x axis logarithmic with a tick at each value."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(values), [str(v) for v in values])
    axes.minorticks_off()
    axes.set_xlabel(label)


def whole_numbers(*axes: Axis) -> None:
    """Have ticks at whole numbers only: there is no half of a layer, a rank or a step."""
    for axis in axes:
        axis.set_major_locator(MaxNLocator(integer=True))
