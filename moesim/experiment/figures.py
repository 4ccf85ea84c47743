"""Which figures an experiment asks for, and drawing them into its folder."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TYPE_CHECKING, Any, NamedTuple

from moesim.core.progress import Progress
from moesim.errors import ConfigError, unknown_name
from moesim.experiment.pool import Workers, usable_cores
from moesim.metrics.frames import layer_frame, step_frame

if TYPE_CHECKING:
    import pandas as pd

    from moesim.metrics.outcome import Outcome

_FRAMES = {"steps": step_frame, "layers": layer_frame}
_WORTH_PROCESSES = 4  # figures for which processes are started, each of which begins with a second of imports
_Drawn = dict[str, bytes] | ConfigError


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


class _Figure(NamedTuple):
    """One figure to draw."""

    kind: str
    name: str
    arguments: Sequence[Any]
    options: Mapping[str, Any]


def draw(
    names: Sequence[str],
    outcomes: Sequence[Outcome],
    runs: Mapping[str, Outcome],
    workers: Workers | None = None,
    *,
    progress: bool = False,
) -> tuple[dict[str, bytes], list[str]]:
    """Draw the figures of an experiment, each as PNG and PDF, with its data as CSV and its caption as text.

    Bars mark runs that failed; other figures leave them out. Processes that are given share the work.
    """
    asked: list[_Figure] = []
    refused: dict[str, ConfigError] = {}  # by kind: what is left out from there on
    for name in dict.fromkeys(names):
        try:
            asked.extend(_Figure(name, *one) for one in _figures(name, outcomes, runs))
        except ConfigError as error:
            refused[name] = error
    files: dict[str, bytes] = {}
    failed: dict[str, ConfigError] = {}
    for one, drawn in zip(asked, _draw_all(asked, workers, progress), strict=True):
        if isinstance(drawn, ConfigError):
            failed.setdefault(one.kind, drawn)
        elif one.kind not in failed:
            files |= drawn
    refused |= failed
    return files, [f"plots: {name} is left out: {refused[name]}" for name in dict.fromkeys(names) if name in refused]


def _draw_all(asked: Sequence[_Figure], workers: Workers | None, progress: bool) -> list[_Drawn]:
    """Draw figures in processes and here at once: here first those of records, which would take long to send."""
    worth = workers is not None and (workers.pool is not None or len(asked) >= _WORTH_PROCESSES)
    pool = workers.processes(lambda: min(usable_cores(), len(asked) // 2)) if workers is not None and worth else None
    shared = [i for i, one in enumerate(asked) if pool is not None and _source(one.kind) != "records"]
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

    try:
        return files_of(*one)
    except ConfigError as error:
        return error


def _source(kind: str) -> str:
    from moesim.plots.catalogue import kind_of

    return kind_of(kind).source


def _figures(
    name: str, outcomes: Sequence[Outcome], runs: Mapping[str, Outcome]
) -> Iterator[tuple[str, Sequence[Any], Mapping[str, Any]]]:
    """Give each figure of a kind: its name, what it draws, and its options."""
    import pandas as pd  # takes half a second to import

    from moesim.plots.captions import setting_label
    from moesim.plots.catalogue import figures_of

    source = _source(name)
    if source == "records":
        kept = {policy: outcome for policy, outcome in runs.items() if outcome.records is not None}
        if not kept:
            raise ConfigError("expected a run with records, got none")
        rows = pd.DataFrame([dict(outcome.row) for outcome in kept.values()])
        records = {policy: outcome.records for policy, outcome in kept.items()}
        missing = [policy for policy in runs if policy not in kept]
        yield name, [records, next(iter(kept.values())).machine], {"label": setting_label(rows, missing)}
        return
    for figure, part in figures_of(name, _frame(source, outcomes), {}):
        yield figure, [part], {}


def _frame(source: str, outcomes: Sequence[Outcome]) -> pd.DataFrame:
    import pandas as pd

    done = [outcome for outcome in outcomes if outcome.failure is None]
    if source == "rows":
        return pd.DataFrame([dict(outcome.row) for outcome in outcomes], columns=None if outcomes else ["policy"])
    return pd.DataFrame([row for outcome in done if outcome.records is not None for row in _FRAMES[source](outcome)])
