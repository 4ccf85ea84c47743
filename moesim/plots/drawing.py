"""Figures on request: what to draw, from where, for which medium, and the four files of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pandas as pd

from moesim.errors import ConfigError
from moesim.metrics.outcome import Outcome
from moesim.plots.captions import setting_label
from moesim.plots.catalogue import SOURCES, figures_of, kind_of, options_of
from moesim.plots.kinds import written
from moesim.plots.looks import drawn_among
from moesim.plots.options import read_options
from moesim.plots.rows import shared_setting
from moesim.plots.sources import all_policies, chosen, read_frames
from moesim.plots.style import Medium, drawn_for
from moesim.plots.widths import drawn_wide
from moesim.trace import Trace, find_trace

OPTIONS: Final = ("baseline", "x", "y", "metric")
"""Options of kinds that the command line has by their own names."""


OutcomeOf = Callable[[Path, int], Outcome]


@dataclass(frozen=True)
class Request:
    """What to draw."""

    kinds: Sequence[str]  # names of the catalogue
    paths: Sequence[str]  # folders, files, or names of traces, as the kinds need them
    options: Mapping[str, str] = field(default_factory=dict)  # as typed; each goes to the kinds that take it
    policies: Sequence[str] = ()  # names in their order; empty: all
    where: Sequence[tuple[str, str]] = ()  # columns and the values that they must have
    medium: Medium = "screen"  # what it is for
    width: float | None = None  # in inches; None: as wide as each kind is by itself


def draw(request: Request, outcome_of: OutcomeOf) -> dict[str, bytes]:
    """Draw the figures of a request."""
    options = {name: _checked(request, name) for name in request.kinds}
    made: dict[str, bytes] = {}
    with drawn_for(request.medium), drawn_wide(request.width):
        for name in dict.fromkeys(request.kinds):
            for figure, arguments, more, among in _arguments(request, name, options[name], outcome_of):
                with drawn_among(among):
                    made |= files_of(name, figure, arguments, {**options[name], **more})
    return made


def files_of(
    name: str, figure: str, arguments: Sequence[Any], options: Mapping[str, Any], suffixes: Sequence[str] = ("png", "pdf")
) -> dict[str, bytes]:
    """Draw one figure."""
    return written(kind_of(name).drawing(*arguments, **options), figure, suffixes)


def _checked(request: Request, name: str) -> dict[str, Any]:
    """Read the options that a kind takes, and refuse what changes nothing in it."""
    kind = kind_of(name)
    taken = {option for other in request.kinds for option in options_of(kind_of(other))}
    options = read_options(name, request.options, taken)
    if kind.source == "trace" and (request.policies or request.where):
        raise ConfigError(f"plot {name}: expected no --policies and no --where, which change nothing in a figure of a trace")
    if not request.paths:
        raise ConfigError(f"plot {name}: expected {SOURCES[kind.source]}, got nothing; name one after the kind")
    if kind.source in ("trace", "records") and len(request.paths) > 1:
        raise ConfigError(f"plot {name}: expected one result, {SOURCES[kind.source]}, got {len(request.paths)}")
    return options


def _arguments(
    request: Request, name: str, options: Mapping[str, Any], outcome_of: OutcomeOf
) -> Iterator[tuple[str, Sequence[Any], Mapping[str, Any], Sequence[str]]]:
    """Give what each figure of a kind draws, options that follow from it, and the policies of the whole results."""
    kind = kind_of(name)
    if kind.source == "trace":
        yield name, [Trace.read(find_trace(request.paths[0]))], {}, []
        return
    source = "rows" if kind.source == "records" else kind.source
    paths = [Path(path) for path in request.paths]
    whole = read_frames(source, paths, name)
    among = all_policies(source, paths, whole, name)
    frame = chosen(whole, request.policies, request.where, name)
    if kind.source == "records":
        rows, missing = shared_setting(frame, name)
        yield name, _records(paths[0], rows, outcome_of), {"label": setting_label(rows, missing)}, among
        return
    for figure, part in figures_of(name, frame, options):
        yield figure, [part], {}, among


def _records(folder: Path, rows: pd.DataFrame, outcome_of: OutcomeOf) -> Sequence[Any]:
    """Records of runs by policy, and their machine."""
    outcomes = {str(row["policy"]): outcome_of(folder, int(row["run"])) for _, row in rows.iterrows()}
    return [{name: outcome.records for name, outcome in outcomes.items()}, next(iter(outcomes.values())).machine]
