"""The figures that an experiment asks for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from moesim.core.processes import usable_cores
from moesim.core.progress import Progress
from moesim.errors import ConfigError, mistyped, unknown_name
from moesim.experiment.workers import Workers
from moesim.metrics.frames import layer_frame, step_frame
from moesim.metrics.naming import policy_label

if TYPE_CHECKING:
    import pandas as pd

    from moesim.metrics.outcome import Outcome
    from moesim.plots.style import Medium


KIND: Final = "kind"
_FRAMES: Final = ("steps", "layers")  # sources that need `frames: true`


class Asked(NamedTuple):
    """One entry of ``plots``."""

    name: str  # with which the names of its files begin: the kind, and a number from the second entry of a kind on
    kind: str
    options: Mapping[str, Any] = {}  # of the kind
    policies: Sequence[str] = ()  # in their order; empty: all
    where: Sequence[tuple[str, str]] = ()  # columns and the values that they must have
    medium: Medium = "screen"
    width: float | None = None  # in inches; None: as wide as the kind is by itself


def read_plots(plots: Sequence[Any], place: str, policies: Collection[str] = (), *, frames: bool = True) -> list[Asked]:
    """Read and check the entries of ``plots``, each once."""
    found: list[Asked] = []
    entries = [entry if isinstance(entry, dict) else {KIND: entry} for entry in plots]
    for i, entry in enumerate(entries):
        if entry in entries[:i]:
            continue
        here = f"{place}: plots[{i}]"
        kind = _kind(entry[KIND], here, frames=frames)
        number = 1 + sum(one.kind == kind for one in found)
        found.append(_read(entry, kind, kind if number == 1 else f"{kind}-{number}", here, policies))
    return found


def _kind(name: Any, here: str, *, frames: bool) -> str:
    from moesim.plots.catalogue import IN_EXPERIMENTS, KINDS, SOURCES  # Matplotlib takes most of a second to import

    known = [name for name, kind in KINDS.items() if kind.source in IN_EXPERIMENTS]
    if not isinstance(name, str):
        raise ConfigError(f"{here}: {KIND}: {mistyped('the name of a kind of figure', name)}")
    if name in KINDS and name not in known:
        needs = SOURCES[KINDS[name].source]
        raise ConfigError(f"{here}: expected a figure of runs, got '{name}'; `moesim plot {name}` draws {needs}")
    if name not in known:
        raise ConfigError(f"{here}: {unknown_name('plot', name, known)}")
    if KINDS[name].source in _FRAMES and not frames:
        raise ConfigError(f"{here}: expected frames for '{name}', got none; set `frames: true`")
    return name


def _read(entry: Mapping[str, Any], kind: str, name: str, here: str, known: Collection[str]) -> Asked:
    from moesim.plots.catalogue import KINDS
    from moesim.plots.drawing import read_options
    from moesim.plots.style import MEDIA, parse_width

    options = dict(entry)
    del options[KIND]
    policies = options.pop("policies", [])
    where, medium, width = options.pop("where", {}), options.pop("medium", "screen"), options.pop("width", None)
    if not isinstance(where, dict):
        raise ConfigError(f"{here}: where: {mistyped('a mapping of columns to values', where)}; write {{batch_size: 4}}")
    if where and KINDS[kind].source == "records":
        raise ConfigError(
            f"{here}: where: expected none for '{kind}', which shows the first setting; `moesim plot {kind} --where` draws others"
        )
    if medium not in MEDIA:
        raise ConfigError(f"{here}: medium: {unknown_name('medium', str(medium), MEDIA)}")
    policies = [_label(one) for one in (policies if isinstance(policies, list) else [policies])]
    if "baseline" in options:
        options["baseline"] = _label(options["baseline"])
    for key, names in (("policies", policies), ("baseline", [options["baseline"]] if "baseline" in options else [])):
        for one in names:
            if known and one not in known:
                raise ConfigError(f"{here}: {key}: {unknown_name('policy of this experiment', one, known)}")
    try:
        read = read_options(kind, {key: _typed(value) for key, value in options.items() if value is not None})
    except ConfigError as error:
        raise ConfigError(f"{here}: {error}") from None
    inches = None if width is None else parse_width(_typed(width), f"{here}: width")
    return Asked(name, kind, read, policies, [(str(key), _typed(value)) for key, value in where.items()], medium, inches)


def _label(policy: Any) -> str:
    """Name a policy as the results do, by its name or its mapping."""
    return policy_label(policy) if isinstance(policy, dict) and "name" in policy else _typed(policy)


def _typed(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(_typed, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def needs_records(asked: Sequence[Asked]) -> bool:
    """Whether a figure is drawn from records of all policies at the first setting."""
    if not asked:
        return False
    from moesim.plots.catalogue import KINDS

    return any(KINDS[one.kind].source == "records" for one in asked)


MAKE_FRAME: Mapping[str, Callable[[Outcome], Any]] = {"steps": step_frame, "layers": layer_frame}
_WORTH_PROCESSES = 4  # figures for which processes are started, each of which begins with a second of imports
_Drawn = dict[str, bytes] | ConfigError


class _Figure(NamedTuple):
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
    """Draw all figures as PNG, PDF, CSV and text, shared with workers; name what is left out."""
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
    """Draw figures in processes and here: here first those of records, which take long to send."""
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
    from moesim.plots.style import drawn_among, drawn_for, drawn_wide

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
    """Return each figure of an entry: its name, what it draws, and its options."""
    import pandas as pd  # takes half a second to import

    from moesim.plots.captions import setting_label
    from moesim.plots.catalogue import figures_of
    from moesim.plots.drawing import chosen

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
    return pd.DataFrame([row for outcome in done if outcome.records is not None for row in MAKE_FRAME[source](outcome)])
