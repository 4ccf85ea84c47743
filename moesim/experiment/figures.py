"""Which figures an experiment asks for, and what each of them shows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from moesim.errors import ConfigError, unknown_name
from moesim.experiment.naming import SETTINGS

if TYPE_CHECKING:
    from moesim.experiment.runner import Outcome

PLOTS = ("decode_speed", "hit_rate", "breakdown", "gantt")
"""Names for ``plots:`` in an experiment."""


def check_plots(names: Sequence[str], place: str) -> None:
    """Check the names of plots before anything runs; raises `ConfigError`."""
    for i, name in enumerate(names):
        if name not in PLOTS:
            raise ConfigError(f"{place}: plots[{i}]: {unknown_name('plot', name, PLOTS)}")


def draw(names: Sequence[str], outcomes: Sequence[Outcome], runs: Mapping[str, Outcome], folder: Path) -> None:
    """Draw the figures of an experiment into a folder, each as PNG and PDF.

    Parameters
    ----------
    names : sequence of str
        Of `PLOTS`.
    outcomes : sequence of Outcome
        All runs; the failed ones are left out.
    runs : mapping of str to Outcome
        Policy -> its run with records, all at the same setting.
    folder : Path
        Where to.
    """
    from moesim import plots  # Matplotlib takes most of a second to import

    frame = frame_of(outcomes)
    made: dict[str, Callable[[str], Iterator[tuple[str, Any]]]] = {
        "decode_speed": lambda name: _by_panel(name, frame, lambda part, group: plots.decode_speed(part, group)),
        "breakdown": lambda name: _by_panel(name, frame, lambda part, group: _breakdown(part, group)),
        "hit_rate": lambda name: _by_panel(name, frame, lambda part, group: _hit_rate(part), group="cache_ratio"),
        "gantt": lambda name: _gantt(name, frame, runs),
    }
    for name in dict.fromkeys(names):
        for file, figure in made[name](name):
            plots.save(figure, folder / file)


def frame_of(outcomes: Sequence[Outcome]) -> pd.DataFrame:
    """Put the rows of the runs that succeeded into one frame; ``cache_ratio`` is filled in where a budget was given."""
    rows = [dict(o.row) for o in outcomes if o.failure is None]
    for row in rows:
        if row["cache_ratio"] is None:
            row["cache_ratio"] = row["cache_share"]
    return pd.DataFrame(rows)


def _varying(frame: pd.DataFrame) -> list[str]:
    """List the columns that are swept; where budgets are, the cache ratio follows from them and the policy."""
    from moesim.plots.style import cache_column

    columns = [*SETTINGS, cache_column(frame)]
    return [column for column in columns if frame[column].astype(str).nunique() > 1]


def _by_panel(
    name: str, frame: pd.DataFrame, make: Callable[[pd.DataFrame, str], Any], group: str | None = None
) -> Iterator[tuple[str, Any]]:
    """One figure for each combination of what is swept beside the group, so that nothing is averaged away."""
    from moesim.plots.style import cache_column

    varying = _varying(frame)
    cache = cache_column(frame)
    if group is None:
        group = "batch_size" if "batch_size" in varying and cache not in varying else cache
    others = [column for column in varying if column != group and column != (cache if group == "cache_ratio" else "")]
    if not others:
        yield name, make(frame, group)
        return
    for values, part in frame.groupby([frame[column].astype(str) for column in others], sort=False):
        parts = [f"{column}={value}" for column, value in zip(others, values, strict=True)]
        yield f"{name}.{_safe('.'.join(parts))}", make(part, group)


def _safe(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9=._-]+", "-", text)


def _breakdown(part: pd.DataFrame, group: str) -> Any:
    from moesim import plots

    prefix = "decode_time" if (part["n_decode_tokens"] > 0).all() else "time"
    return plots.breakdown(part, prefix, group if part[group].nunique() > 1 else None)


def _hit_rate(part: pd.DataFrame) -> Any:
    from moesim import plots

    return plots.hit_rate(part, "hit_rate_decode" if (part["n_decode_tokens"] > 0).all() else "hit_rate")


def _gantt(name: str, frame: pd.DataFrame, runs: Mapping[str, Outcome]) -> Iterator[tuple[str, Any]]:
    """Two layers in the middle of a decode step in the middle of the run, for all policies at the first setting."""
    from moesim import plots

    records = {policy: o.records for policy, o in runs.items() if o.records is not None}
    if not records:
        return
    first = next(iter(records.values()))
    steps = [s.step for s in first.steps if s.phase == "decode"] or [s.step for s in first.steps]
    n_layers = 1 + max(layer.layer for layer in first.layers)
    low = max(0, n_layers // 2 - 1)
    shown = frame[frame["run"].isin([o.row["run"] for o in runs.values()])]
    machine = next(iter(runs.values())).machine
    layers = (low, min(low + 1, n_layers - 1))
    yield name, plots.gantt(records, machine, steps[len(steps) // 2], layers, plots.corner_label(shown))
