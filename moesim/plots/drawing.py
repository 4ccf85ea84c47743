"""Figures on request: frames from folders, options as typed, four files a figure."""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

import pandas as pd

from moesim.core.files import read_verified
from moesim.core.text import uncell
from moesim.core.units import as_share
from moesim.errors import ConfigError, unknown_name
from moesim.metrics.outcome import Outcome
from moesim.plots.captions import setting_label
from moesim.plots.catalogue import SOURCES, figures_of, kind_of, options_of
from moesim.plots.result_rows import REPEATS, column_of, group_name, settings_in, shared_setting
from moesim.plots.style import Kind, Medium, drawn_among, drawn_for, drawn_wide, written
from moesim.serving.steps import Served
from moesim.trace import Trace, find_trace

FILES: Final = {
    "rows": "runs.parquet", "steps": "frames/steps.parquet", "layers": "frames/layers.parquet",
    "validation": "results.csv", "papers": "papers.csv", "regret": "regret.csv", "whatif": "whatif.parquet",
    "league": "league.csv", "lookahead": "lookahead.csv", "capacity": "capacity.csv",
}  # fmt: skip
"""Source -> file in its folder."""
_OF_ALL: Final = ("policies", "where", "label", "medium", "width")
"""Options that every kind has."""
_RUNS: Final = 1_000_000  # more than a sweep has; what numbers the runs of a further folder


def read_frames(source: str, paths: Sequence[Path], what: str) -> pd.DataFrame:
    """Read the frame of a source from folders or files."""
    frames = []
    for number, path in enumerate(paths):
        frame = _read(_file(source, path, what), what)
        if "run" in frame and pd.api.types.is_numeric_dtype(frame["run"]):
            frame["run"] += number * _RUNS
        frames.append(frame)
    return _once(frames)


def all_policies(source: str, paths: Sequence[Path], frame: pd.DataFrame, what: str) -> list[str]:
    """List the policies of all runs: steps and layers lack those that failed."""
    known: list[str] = []
    for path in paths if source in ("steps", "layers") else ():
        file = path / FILES["rows"]
        if file.is_file():
            runs = _read(file, what)
            known += runs["policy"].astype(str).tolist() if "policy" in runs else []
    return list(dict.fromkeys([*known, *(frame["policy"].dropna().astype(str) if "policy" in frame else [])]))


def _once(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    records: list[dict[Any, Any]] = []
    seen: set[str] = set()
    for frame in frames:
        names = ["key"] if "key" in frame and frame["key"].notna().all() else [name for name in frame if name != "run"]
        texts = ["\x1f".join(map(str, values)) for values in frame[names].astype(object).itertuples(index=False)]
        kept = [text not in seen for text in texts]
        records += frame[kept].astype(object).to_dict("records")
        seen.update(texts)
    columns = list(dict.fromkeys(name for frame in frames for name in frame))
    return pd.DataFrame(records, columns=columns).infer_objects() if len(frames) > 1 else frames[0]


def _file(source: str, path: Path, what: str) -> Path:
    file = path / FILES[source] if path.is_dir() else path
    if not file.is_file():
        got = "no such file in it" if path.is_dir() else "nothing there"
        raise ConfigError(f"{path}: plot {what}: expected a folder with {FILES[source]}, got {got}; name {SOURCES[source]}")
    return file


def _read(file: Path, what: str) -> pd.DataFrame:
    try:
        if file.suffix == ".parquet":
            return pd.read_parquet(io.BytesIO(read_verified(file)))
        if file.suffix == ".csv":
            read = pd.read_csv(io.BytesIO(read_verified(file)))
            return read.rename(columns=uncell).map(uncell, na_action="ignore")
    except (OSError, ValueError) as error:  # of Arrow and of the CSV reader too
        text = " ".join(str(error).split())[:200]
        raise ConfigError(f"{file}: plot {what}: expected a table that can be read, got: {text}; write it again") from None
    raise ConfigError(f"{file}: plot {what}: expected a folder, or a file that ends in .parquet or .csv, got '{file.name}'")


def chosen(frame: pd.DataFrame, policies: Sequence[str], where: Sequence[tuple[str, str]], what: str) -> pd.DataFrame:
    """Keep some policies in the order named, and rows with given values."""
    for column, value in where:
        column = column_of(frame, column)
        if column not in frame:
            settings = [name for name in ("policy", "policy_name", *settings_in(frame), *REPEATS) if name in frame]
            raise ConfigError(f"plot {what}: --where: {unknown_name('column', column, settings)}")
        names = [{group_name(one, column), group_name(one), str(one)} for one in frame[column]]
        wanted = {value, str(as_share(value))}  # 1/3 is one, too
        kept = [not wanted.isdisjoint(found) for found in names]
        if not any(kept):
            values = ", ".join(dict.fromkeys(group_name(one, column) for one in frame[column]))
            raise ConfigError(f"plot {what}: --where: expected {column} to be one of {values}, got '{value}'")
        frame = frame[kept]
    if not policies:
        return frame
    if "policy" not in frame:
        raise ConfigError(f"plot {what}: --policies: expected results of policies, got a table without the column policy")
    known = list(dict.fromkeys(frame["policy"]))
    for name in policies:
        if name not in known:
            raise ConfigError(f"plot {what}: --policies: {unknown_name('policy of these results', name, known)}")
    return pd.concat([frame[frame["policy"] == name] for name in dict.fromkeys(policies)])


def read_options(name: str, given: Mapping[str, str], elsewhere: Collection[str] = ()) -> dict[str, Any]:
    """Read the options of a kind; those of kinds drawn with it are no error."""
    kind = kind_of(name)
    known = options_of(kind)
    for option in given:
        if option not in known and option not in elsewhere:
            uses = ", ".join(known) or "none"
            near = get_close_matches(option, [*known, *_OF_ALL], n=1)
            meant = "medium" if option in ("for", "for_") else near[0] if near else ""
            hint = f"did you mean {meant}? " if meant else ""
            raise ConfigError(f"plot {name}: expected no option {option}, which changes nothing in it; {hint}its options: {uses}")
    return {option: parse_option(kind, option, text) for option, text in given.items() if option in known}


def parse_option(kind: Kind[...], name: str, text: str) -> Any:
    """Read the value of an option by what the kind takes.

    >>> from moesim.plots.catalogue import KINDS
    >>> parse_option(KINDS["gantt"], "layers", "15,16"), parse_option(KINDS["hit_rate_by_token"], "smooth", "9")
    ([15, 16], 9)
    """
    known = {key: str(p.annotation) for key, p in list(inspect.signature(kind).parameters.items())[1:]}
    if name not in known:
        raise ConfigError(f"plot: {unknown_name('option', name, known)}")
    takes = known[name]
    parts = [part.strip() for part in text.split(",")]
    if "Sequence[int]" in takes:
        return [_whole(name, part) for part in parts]
    if "Sequence[str]" in takes:
        return parts
    return _whole(name, text) if takes.startswith("int") else text


def _whole(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"plot: {name}: expected a whole number, got '{text}'") from None


OPTIONS: Final = ("baseline", "x", "y", "panel", "metric")
"""Options of kinds that the command line has by their own names."""


OutcomeOf = Callable[..., Outcome]
"""Of a folder, a run, and as `wanted` what is needed of its records."""
_OF_RUNS: Final = ("records", "requests")
"""Sources that are read from single runs."""


@dataclass(frozen=True)
class Request:
    """A request for figures."""

    kinds: Sequence[str]  # names of the catalogue
    paths: Sequence[str]  # folders, files, or names of traces, as the kinds need them
    options: Mapping[str, str] = field(default_factory=dict)  # as typed; each goes to the kinds that take it
    policies: Sequence[str] = ()  # names in their order; empty: all
    where: Sequence[tuple[str, str]] = ()  # columns and the values that they must have
    labels: Mapping[str, str] = field(default_factory=dict)  # policies and the names that they have in the figures
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
    kind = kind_of(name)
    taken = {option for other in request.kinds for option in options_of(kind_of(other))}
    options = read_options(name, with_labels(request.options, request.labels), taken)
    if kind.source == "trace" and (request.policies or request.where):
        raise ConfigError(f"plot {name}: expected no --policies and no --where, which change nothing in a figure of a trace")
    if not request.paths:
        raise ConfigError(f"plot {name}: expected {SOURCES[kind.source]}, got nothing; name one after the kind")
    if kind.source in ("trace", *_OF_RUNS) and len(request.paths) > 1:
        raise ConfigError(f"plot {name}: expected one result, {SOURCES[kind.source]}, got {len(request.paths)}")
    return options


def _arguments(
    request: Request, name: str, options: Mapping[str, Any], outcome_of: OutcomeOf
) -> Iterator[tuple[str, Sequence[Any], Mapping[str, Any], Sequence[str]]]:
    kind = kind_of(name)
    if kind.source == "trace":
        yield name, [Trace.read(find_trace(request.paths[0]))], {}, []
        return
    source = "rows" if kind.source in _OF_RUNS else kind.source
    paths = [Path(path) for path in request.paths]
    whole = read_frames(source, paths, name)
    among = [request.labels.get(one, one) for one in all_policies(source, paths, whole, name)]
    frame = relabelled(chosen(whole, request.policies, request.where, name), whole, request.labels, name)
    if kind.source == "requests":
        rows, missing = shared_setting(frame, name)
        found = {str(row["policy"]): outcome_of(paths[0], int(row["run"]), wanted=0) for _, row in rows.iterrows()}
        yield name, [served_runs(found, name)], {"label": setting_label(rows, missing)}, among
        return
    if kind.source == "records":
        rows, missing = shared_setting(frame, name)
        yield name, _records(paths[0], rows, outcome_of), {"label": setting_label(rows, missing)}, among
        return
    for figure, part in figures_of(name, frame, options):
        yield figure, [part], {}, among


def with_labels(options: Mapping[str, Any], labels: Mapping[str, str]) -> dict[str, Any]:
    """Name the policy of an option as figures name it."""
    return {name: labels.get(value, value) if name == "baseline" else value for name, value in options.items()}


def relabelled(frame: pd.DataFrame, whole: pd.DataFrame, labels: Mapping[str, str], what: str) -> pd.DataFrame:
    """Give policies the names that they are to have."""
    if not labels:
        return frame
    known = list(dict.fromkeys(whole["policy"])) if "policy" in whole else []
    for name in labels:
        if name not in known:
            raise ConfigError(f"plot {what}: --label: {unknown_name('policy of these results', name, known)}")
    named = [labels.get(one, one) for one in known]
    if len(set(named)) < len(named):
        raise ConfigError(f"plot {what}: --label: expected a name of its own for each policy, got {', '.join(named)}")
    return frame.assign(policy=frame["policy"].map(lambda one: labels.get(one, one)))


def served_runs(outcomes: Mapping[str, Outcome], what: str) -> dict[str, Served]:
    """Return what became of the requests of runs by policy; ConfigError if one has no served workload."""
    found = {policy: one.records.served for policy, one in outcomes.items() if one.records is not None}
    if not found or None in found.values():
        raise ConfigError(f"plot {what}: expected served workloads, got others; give arrivals or closed")
    return {policy: served for policy, served in found.items() if served is not None}


def _records(folder: Path, rows: pd.DataFrame, outcome_of: OutcomeOf) -> Sequence[Any]:
    outcomes = {str(row["policy"]): outcome_of(folder, int(row["run"])) for _, row in rows.iterrows()}
    return [{name: outcome.records for name, outcome in outcomes.items()}, next(iter(outcomes.values())).machine]
