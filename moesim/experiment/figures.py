"""Which figures an experiment asks for, and drawing them into its folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from moesim.errors import ConfigError, unknown_name
from moesim.metrics.frames import layer_frame, step_frame

if TYPE_CHECKING:
    import pandas as pd

    from moesim.metrics.outcome import Outcome

_FRAMES = {"steps": step_frame, "layers": layer_frame}


def check_plots(names: Sequence[str], place: str, *, frames: bool = True) -> None:
    """Check the names of plots before anything runs."""
    if not names:
        return
    from moesim.plots.catalogue import IN_EXPERIMENTS, KINDS, SOURCES  # Matplotlib takes most of a second to import

    known = [name for name, kind in KINDS.items() if kind.source in IN_EXPERIMENTS]
    for i, name in enumerate(names):
        if name in KINDS and name not in known:
            needs = SOURCES[KINDS[name].source]
            raise ConfigError(f"{place}: plots[{i}]: expected a figure of runs, got '{name}'; `moesim plot {name}` draws {needs}")
        if name not in known:
            raise ConfigError(f"{place}: plots[{i}]: {unknown_name('plot', name, known)}")
        if KINDS[name].source in _FRAMES and not frames:
            raise ConfigError(f"{place}: plots[{i}]: expected frames for '{name}', got none; set `frames: true`")


def needs_records(names: Sequence[str]) -> bool:
    """Whether a figure is drawn from records, those of all policies at the first setting."""
    if not names:
        return False
    from moesim.plots.catalogue import KINDS

    return any(KINDS[name].source == "records" for name in names if name in KINDS)


def draw(names: Sequence[str], outcomes: Sequence[Outcome], runs: Mapping[str, Outcome]) -> tuple[dict[str, bytes], list[str]]:
    """Draw the figures of an experiment, each as PNG and PDF, with its data as CSV and its caption as text.

    Bars mark runs that failed; other figures leave them out.
    """
    files: dict[str, bytes] = {}
    left_out: list[str] = []
    if not names:
        return files, left_out
    from moesim.plots.drawing import files_of

    for name in dict.fromkeys(names):
        try:
            for figure, arguments, options in _figures(name, outcomes, runs):
                files |= files_of(name, figure, arguments, options)
        except ConfigError as error:
            left_out.append(f"plots: {name} is left out: {error}")
    return files, left_out


def _figures(
    name: str, outcomes: Sequence[Outcome], runs: Mapping[str, Outcome]
) -> Iterator[tuple[str, Sequence[Any], Mapping[str, Any]]]:
    """Give each figure of a kind: its name, what it draws, and its options."""
    import pandas as pd  # takes half a second to import

    from moesim.plots.captions import corner_label
    from moesim.plots.catalogue import figures_of, kind_of

    source = kind_of(name).source
    if source == "records":
        kept = {policy: outcome for policy, outcome in runs.items() if outcome.records is not None}
        if not kept:
            raise ConfigError("expected a run with records, got none")
        rows = pd.DataFrame([dict(outcome.row) for outcome in kept.values()])
        records = {policy: outcome.records for policy, outcome in kept.items()}
        yield name, [records, next(iter(kept.values())).machine], {"label": corner_label(rows)}
        return
    for figure, part in figures_of(name, _frame(source, outcomes), {}):
        yield figure, [part], {}


def _frame(source: str, outcomes: Sequence[Outcome]) -> pd.DataFrame:
    import pandas as pd

    done = [outcome for outcome in outcomes if outcome.failure is None]
    if source == "rows":
        return pd.DataFrame([dict(outcome.row) for outcome in outcomes], columns=None if outcomes else ["policy"])
    return pd.DataFrame([row for outcome in done if outcome.records is not None for row in _FRAMES[source](outcome)])
