"""Drawing the figures that an experiment asks for."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TYPE_CHECKING, Any, NamedTuple

from moesim.core.processes import usable_cores
from moesim.core.progress import Progress
from moesim.errors import ConfigError, unknown_name
from moesim.experiment.asked_figures import Asked
from moesim.experiment.pool import Workers
from moesim.metrics.frames import layer_frame, step_frame

if TYPE_CHECKING:
    import pandas as pd

    from moesim.metrics.outcome import Outcome

_FRAMES = {"steps": step_frame, "layers": layer_frame}
_WORTH_PROCESSES = 4  # figures for which processes are started, each of which begins with a second of imports
_Drawn = dict[str, bytes] | ConfigError


class _Figure(NamedTuple):
    """One figure to draw."""

    asked: Asked
    name: str
    arguments: Sequence[Any]
    options: Mapping[str, Any]
    among: Sequence[str]  # all policies of the experiment


def draw(
    asked: Sequence[Asked],
    outcomes: Sequence[Outcome],
    runs: Mapping[str, Outcome],
    workers: Workers | None = None,
    *,
    progress: bool = False,
) -> tuple[dict[str, bytes], list[str]]:
    """Draw the figures of an experiment, each as PNG and PDF, with its data as CSV and its caption as text.

    Bars mark runs that failed; other figures leave them out. Processes that are given share the work.
    """
    figures: list[_Figure] = []
    refused: dict[str, ConfigError] = {}  # by name: what is left out from there on
    among = list(dict.fromkeys(str(outcome.row["policy"]) for outcome in outcomes))
    for entry in asked:
        try:
            figures.extend(_Figure(entry, *one, among) for one in _figures(entry, outcomes, runs))
        except ConfigError as error:
            refused[entry.name] = error
    files: dict[str, bytes] = {}
    failed: dict[str, ConfigError] = {}
    for one, drawn in zip(figures, _draw_all(figures, workers, progress), strict=True):
        if isinstance(drawn, ConfigError):
            failed.setdefault(one.asked.name, drawn)
        elif one.asked.name not in failed:
            files |= drawn
    refused |= failed
    return files, [f"plots: {entry.name} is left out: {refused[entry.name]}" for entry in asked if entry.name in refused]


def _draw_all(asked: Sequence[_Figure], workers: Workers | None, progress: bool) -> list[_Drawn]:
    """Draw figures in processes and here at once: here first those of records, which would take long to send."""
    worth = workers is not None and (workers.pool is not None or len(asked) >= _WORTH_PROCESSES)
    pool = workers.processes(lambda: min(usable_cores(), len(asked) // 2)) if workers is not None and worth else None
    shared = [i for i, one in enumerate(asked) if pool is not None and _source(one.asked.kind) != "records"]
    mine, waiting = deque(i for i in range(len(asked)) if i not in shared), deque(shared)
    running: dict[Future[_Drawn], int] = {}
    found: dict[int, _Drawn] = {}
    with Progress(len(asked), enabled=progress) as bar:
        while len(found) < len(asked):
            while pool is not None and waiting and len(running) < pool.room() - 1:  # this process draws, too
                place = waiting.popleft()
                running[pool.submit(_draw, asked[place])] = place
            own = mine or waiting
            if own:
                place = own.popleft()
                bar.describe(f"drawing {asked[place].name}")
                found[place] = _draw(asked[place])
                bar.advance(1)
            else:
                bar.describe(f"drawing {', '.join(asked[place].name for place in running.values())}")
            for future in wait(running, 0 if own else None, FIRST_COMPLETED).done:
                place, error = running.pop(future), future.exception()
                if error is None:
                    found[place] = future.result()
                    bar.advance(1)
                elif pool is not None and pool.died(error):
                    mine.append(place)
    return [found[place] for place in range(len(asked))]


def _draw(one: _Figure) -> _Drawn:
    from moesim.plots.drawing import files_of
    from moesim.plots.looks import drawn_among
    from moesim.plots.style import drawn_for
    from moesim.plots.widths import drawn_wide

    try:
        with drawn_for(one.asked.medium), drawn_wide(one.asked.width), drawn_among(one.among):
            return files_of(one.asked.kind, one.name, one.arguments, one.options)
    except ConfigError as error:
        return error


def _source(kind: str) -> str:
    from moesim.plots.catalogue import kind_of

    return kind_of(kind).source


def _figures(
    asked: Asked, outcomes: Sequence[Outcome], runs: Mapping[str, Outcome]
) -> Iterator[tuple[str, Sequence[Any], Mapping[str, Any]]]:
    """Give each figure of an entry: its name, what it draws, and its options."""
    import pandas as pd  # takes half a second to import

    from moesim.plots.captions import setting_label
    from moesim.plots.catalogue import figures_of
    from moesim.plots.sources import chosen

    source = _source(asked.kind)
    if source == "records":
        for policy in asked.policies:
            if policy not in runs:
                raise ConfigError(f"plot {asked.kind}: policies: {unknown_name('policy of the first setting', policy, runs)}")
        meant = {policy: runs[policy] for policy in asked.policies or runs}
        kept = {policy: outcome for policy, outcome in meant.items() if outcome.records is not None}
        if not kept:
            raise ConfigError("expected a run with records, got none")
        rows = pd.DataFrame([dict(outcome.row) for outcome in kept.values()])
        records = {policy: outcome.records for policy, outcome in kept.items()}
        missing = [policy for policy in meant if policy not in kept]
        label = setting_label(rows, missing)
        yield asked.name, [records, next(iter(kept.values())).machine], {**asked.options, "label": label}
        return
    frame = chosen(_frame(source, outcomes), asked.policies, asked.where, asked.kind)
    for figure, part in figures_of(asked.kind, frame, asked.options):
        yield asked.name + figure.removeprefix(asked.kind), [part], asked.options


def _frame(source: str, outcomes: Sequence[Outcome]) -> pd.DataFrame:
    import pandas as pd

    done = [outcome for outcome in outcomes if outcome.failure is None]
    if source == "rows":
        return pd.DataFrame([dict(outcome.row) for outcome in outcomes], columns=None if outcomes else ["policy"])
    return pd.DataFrame([row for outcome in done if outcome.records is not None for row in _FRAMES[source](outcome)])
