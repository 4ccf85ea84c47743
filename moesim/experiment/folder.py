"""The result folder of an experiment: its files and figures, and one of its runs once more."""

from __future__ import annotations

import json
import re
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import python_version
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import yaml

from moesim import __version__
from moesim.core.data import noting, shipped
from moesim.core.files import Manifest, OutputFolder, State, check_own_folder, read_verified
from moesim.core.own_code import NOT_TRUSTED, reading
from moesim.core.processes import paused, usable_cores
from moesim.core.progress import Progress
from moesim.core.text import note
from moesim.core.yaml_reader import read_yaml_value
from moesim.errors import ConfigError, InputError, TraceError, mistyped, unknown_name
from moesim.experiment.config import Config, parse_config
from moesim.experiment.report import aggregate, repeated
from moesim.experiment.resolve import Experiment, written_key
from moesim.experiment.routing import GIVEN
from moesim.experiment.runner import Kept, run_one
from moesim.experiment.store import (
    DATASET,
    GROWING,
    INPUTS,
    OWNER,
    RECORDS,
    SUMMARY,
    SmallInputs,
    Store,
    code_digest,
    package_digest,
    read_summary,
)
from moesim.experiment.sweep import Point, each_machine, expand
from moesim.experiment.workers import Workers
from moesim.hardware import load_hardware
from moesim.metrics.breakdown import breakdown
from moesim.metrics.frames import frame_bytes, layer_frame, request_bytes, request_table, step_frame
from moesim.metrics.machine import Machine
from moesim.metrics.naming import LIVE, fingerprint, hardware_label, policy_label
from moesim.metrics.outcome import Outcome
from moesim.policies.user_code import foreign
from moesim.records import Records
from moesim.serving import RequestFile
from moesim.serving.files import read_requests
from moesim.trace import SUFFIX, Trace, find_trace
from moesim.trace.shards import PARTS_SUFFIX
from moesim.trace.workload import WorkloadSpec

if TYPE_CHECKING:
    import pandas as pd

    from moesim.experiment.run import Results
    from moesim.plots.style import Medium


RESOLVED = "config.resolved.yaml"


def outcome_of(folder: Path, run: int, *, wanted: Kept = True, trust: bool = False, inputs: Path | None = None) -> Outcome:
    """Return a run of a folder with its records; `inputs` has traces, and trusted modules."""
    rows = read_summary(folder)["runs"]
    if not 0 <= run < len(rows):
        raise ConfigError(f"{folder}: expected a run from 0 to {len(rows) - 1}, got {run}")
    row = rows[run]
    place = f"{folder}: run {run} ({row['policy']})"
    if row["error"]:
        raise ConfigError(f"{place}: expected a run that succeeded, got: {row['error']}")
    if LIVE in str(row.get("notes")):
        raise ConfigError(f"{place}: expected a simulated run, got a replay without records")
    config, resolved = _resolved(folder / RESOLVED)
    small = SmallInputs.read(folder)
    with reading(trust=trust):
        if trust and inputs is not None:
            sys.path.append(str(inputs.absolute()))  # last, and for good, as the current folder
        records = Store(folder, read_only=True).records(str(row.get("key")), wanted)
        machine = None if records is None else _machine(config, str(folder / RESOLVED), small, row)
        if records is None or machine is None:
            machine, records = _again(folder, config, resolved, small, rows, run, trust=trust, inputs=inputs)
    whole = records.first_steps is None
    return Outcome(row, machine, records, breakdown(records, machine.kinds, machine.media) if whole else None)


def _resolved(path: Path) -> tuple[Config, dict[str, Any]]:
    try:
        resolved: Any = read_yaml_value(read_verified(path).decode(), str(path))
        written = resolved["experiment"]
    except (OSError, UnicodeDecodeError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path}: expected the configuration of a result, got: {reason}; run the experiment again") from None
    return parse_config(written, str(path)), resolved


def _machine(config: Config, place: str, small: SmallInputs, row: Mapping[str, Any]) -> Machine | None:
    """Find the machine that a row names; None if several have that name."""
    with noting(small.texts):
        found = [load_hardware(written, f"{place}: hardware") for written in each_machine(config)]
    named = [Machine.of(one) for one in found if hardware_label(one) == row["hardware"]]
    return named[0] if named and all(one == named[0] for one in named) else None


def _again(
    folder: Path, config: Config, resolved: Mapping[str, Any], small: SmallInputs, rows: list[dict[str, Any]], run: int, *,
    trust: bool, inputs: Path | None,
) -> tuple[Machine, Records]:  # fmt: skip
    """Simulate a run again with the others on its trace, whose needs decide its requests."""
    row, file = rows[run], f"{folder}/{RESOLVED}"
    place = f"{folder}: run {run} ({row['policy']})"
    points = expand(config, file, imports=trust)
    others = [] if trust else list(dict.fromkeys(name for point in points for name in foreign(point.code)))
    needed = foreign(points[run].code) if len(points) == len(rows) else others
    if needed and not trust:
        raise ConfigError(
            f"{place}: expected its records in the folder, got none, and to simulate it again takes {', '.join(needed)}, "
            f"{NOT_TRUSTED}"
        )
    if len(points) != len(rows):
        raise ConfigError(f"{file}: expected {len(rows)} runs as in the summary, got {len(points)}; run the experiment again")
    written = points[run].trace
    known = {written_key(written): _trace(written, resolved, folder, inputs, place)} if isinstance(written, str) else {}
    same = [point for point in points if point.trace == written]
    files = _requests(same, folder, inputs, place)
    experiment = Experiment(config, file, imports=trust, known=known, small=small, points=same, files=files)
    spec = experiment.specs[sum(point.trace == written for point in points[:run])]
    outcome = run_one(experiment, spec, keep=True)
    changed = [key for key, value in outcome.row.items() if key in row and row[key] != value and key != "run"]
    changed.sort(key=lambda key: isinstance(row[key], str))  # a number says more than notes
    if changed:
        why = "an input, code of a policy or moesim changed"
        why += f", or it depends on what {', '.join(others)} needs (--trust)" if others else ""
        raise ConfigError(
            f"{place}: expected the same result when simulated again, got another "
            f"{changed[0]}: {row[changed[0]]} before, {outcome.row[changed[0]]} now; {why}; run it again"
        )
    assert outcome.records is not None
    return Machine.of(spec.hardware), outcome.records


def _trace(written: str, resolved: Mapping[str, Any], folder: Path, inputs: Path | None, place: str) -> Trace:
    try:
        digest = str(resolved["inputs"]["traces"][written]["sha256"])
    except (KeyError, TypeError):
        raise ConfigError(f"{folder}/{RESOLVED}: expected the sha256 of trace {written}, got none; run it again") from None
    got = ""
    for name in dict.fromkeys(map(str, _places(written, folder, inputs))):
        with suppress(TraceError):
            path = find_trace(name)
            got = got or f"another in {path}"
            if (trace := Trace.read(path)).digest == digest:
                return trace
    raise ConfigError(
        f"{place}: expected the trace {written} (sha256 {digest[:16]}) to simulate it again, got {got or 'none of that name'}; "
        f"put it next to {folder}, or name its folder with --inputs DIR (in Python inputs=DIR)"
    )


def _places(written: str, folder: Path, inputs: Path | None) -> Iterator[str | Path]:
    """Return where a trace may be: as the experiment had it, moved with it, or by the result."""
    if written.startswith(GIVEN):  # an object of Python, which may have been written since
        yield from sorted(inputs.glob(f"*{SUFFIX}")) if inputs is not None else []
        return
    by_path = written.endswith((SUFFIX, PARTS_SUFFIX)) or Path(written).name != written
    yield from _near(written, Path(written) if by_path else Path("traces", f"{written}{SUFFIX}"), folder, inputs)


def _near(written: str, below: Path, folder: Path, inputs: Path | None) -> Iterator[str | Path]:
    """Return where a file may be that is written so: there, below `inputs` or a folder above the result, or by it."""
    own = folder.absolute()
    near = [own, own.parent] if inputs is None else [inputs, own, own.parent]
    yield from () if inputs is None else (inputs / below, inputs / below.name)
    yield written
    yield from (above / below for above in (own, *own.parents))
    yield from (place / below.name for place in near)


def _requests(points: Sequence[Point], folder: Path, inputs: Path | None, place: str) -> dict[str, RequestFile | None]:
    """Read the files of requests that arrive, by how the experiment names them; whether they changed, the results say."""
    found: dict[str, RequestFile | None] = {}
    for asked in {spec.file for spec in (WorkloadSpec(**point.workload) for point in points) if spec.file is not None}:
        _, written, most = asked
        path = next((one for one in _near(written, Path(written), folder, inputs) if shipped(Path(one)).is_file()), None)
        if path is None:
            raise ConfigError(
                f"{place}: expected the requests {written} to simulate it again, got no such file; put it next to {folder}, or "
                f"name its folder with --inputs DIR (in Python inputs=DIR)"
            )
        found[written_key(asked)] = replace(read_requests(str(path), most), name=written)
    return found


FIGURES: Final = "figures"
"""Key of the resolved configuration: of what its figures were drawn, and their files."""
_DRAWING_PACKAGES: Final = ("matplotlib", "pandas", "fonttools")


def figures_key(asked: Sequence[Asked], rows: Iterable[Mapping[str, Any]], *, frames: bool) -> str:
    """Hash what figures follow from: entries, rows (with keys for records), code, packages."""
    packages = {name: version(name) for name in _DRAWING_PACKAGES}
    entries = [one._asdict() for one in asked]
    code = [code_digest(), package_digest("plots")]
    return fingerprint({"asked": entries, "rows": list(rows), "frames": frames, "code": code, "packages": packages})


def drawn_before(folder: Path, key: str) -> dict[str, Path] | None:
    """Return the figures of a folder if they have this key and are unchanged; else None."""
    try:
        drawn = read_yaml_value(read_verified(folder / RESOLVED).decode(), RESOLVED)[FIGURES]
        same = drawn["key"] == key
        names = [f"plots/{name}" for name in drawn["files"]]
    except (OSError, InputError, UnicodeDecodeError, KeyError, TypeError):
        return None  # no result yet, an older or a damaged one: they are drawn
    manifest = Manifest(folder)
    if not same or not all(manifest.state(name) is State.OURS for name in names):
        return None
    return {name: folder / name for name in names}


_PACKAGES = ("numpy", "pandas", "pyarrow", "simpy", "scipy", "matplotlib", "pydantic")
_NAMES = (RESOLVED, INPUTS, SUMMARY, "runs.parquet", "repeats.parquet", "timeline.json", "frames/steps.parquet",
          "frames/layers.parquet", "requests.parquet")  # fmt: skip
_FOLDERS = (DATASET, RECORDS, "plots")
_FIGURE = re.compile(r"(?P<figure>[\w-]+)(\.\w+=.*)?\.(png|pdf|csv|txt)")


class Output:
    """The result folder of an experiment.

    Parameters
    ----------
    experiment : Experiment
        Resolved.
    folder : Path
        Where to write.

    Raises
    ------
    ConfigError
        If the folder holds something else, or a plot or a policy of the timeline is unknown; before anything runs.

    Attributes
    ----------
    kept : dict of int to bool or int
        Runs whose records the files need: all of them, or those of so many first steps.
    """

    def __init__(self, experiment: Experiment, folder: Path) -> None:
        self.experiment = experiment
        self.folder = folder
        config, place = experiment.config, experiment.place
        check_own_folder(folder, OWNER)
        self._out = OutputFolder(folder, OWNER)
        policies = {spec.policy_name for spec in experiment.specs}
        self._plots = read_plots(config.plots, place, policies, frames=config.frames)
        self._out.check_free([*_NAMES, *_figures_there(folder, [one.name for one in self._plots])], _FOLDERS)
        first = experiment.specs[0].point.setting
        self._first = [s for s in experiment.specs if s.point.setting == first]  # all policies at the first setting
        known = [spec.policy_name for spec in self._first]
        wanted = config.timeline.policies if config.timeline is not None else []
        for i, name in enumerate(wanted or []):
            if name not in known:
                unknown = unknown_name("policy of this experiment", name, known)
                raise ConfigError(f"{place}: timeline.policies[{i}]: {unknown}; name one of these, or set timeline: null")
        self._in_timeline = [s.index for s in self._first if wanted is None or s.policy_name in wanted]
        self._in_gantt = [s.index for s in self._first] if needs_records(self._plots) else []
        any_setting = any(
            one.where and needs_records([one]) for one in self._plots
        )  # which rows it means is known after the runs
        every = [s.index for s in experiment.specs] if config.frames or any_setting else []
        steps = config.timeline.steps if config.timeline is not None else 0
        self._with_requests = [s.index for s in experiment.specs if s.workload.served]
        self.kept: dict[int, Kept] = dict.fromkeys(self._with_requests, 0) | dict.fromkeys(self._in_timeline, steps)
        self.kept |= dict.fromkeys([*self._in_gantt, *every], True)

    def write(self, results: Results, workers: Workers | None = None, *, progress: bool = False) -> Path:
        """Write all files: they replace earlier ones together, or not at all.

        Parameters
        ----------
        results : Results
            Of this experiment.
        workers : Workers, optional
            Processes that share the drawing of figures.
        progress : bool
            Show a bar on the terminal once drawing has taken two seconds.

        Returns
        -------
        Path
            The folder.
        """
        with paused():
            resolved = describe(self.experiment)
            summary = {"moesim": __version__, "key": resolved["key"], "runs": results.rows}
            files: dict[str, bytes | Path] = {
                SUMMARY: (json.dumps(summary, indent=1) + "\n").encode(),
                "runs.parquet": frame_bytes(results.rows),
            }
            if repeated(results.rows):
                files["repeats.parquet"] = frame_bytes(aggregate(results.rows))
            files |= self._requests(results)
            files |= self._timeline(results)
            files |= self._figures(results, resolved, workers, progress)
            files[INPUTS] = self.experiment.small.to_bytes()
            files[RESOLVED] = yaml.safe_dump(resolved, sort_keys=False, width=120).encode()
            if self.experiment.config.frames:
                files |= self._frames(results)
        self._out.replace(files, last=SUMMARY, keep=GROWING)
        Store(self.folder).keep_records([str(results.outcomes[i].row["key"]) for i in self.kept])
        return self.folder

    def _figures(
        self, results: Results, resolved: dict[str, Any], workers: Workers | None, progress: bool
    ) -> Mapping[str, bytes | Path]:
        """Draw the figures, or take those that are there; `resolved` gets what they are of."""
        if not self._plots:
            return {}
        key = figures_key(self._plots, results.rows, frames=self.experiment.config.frames)
        if (before := drawn_before(self.folder, key)) is not None:
            resolved[FIGURES] = {"key": key, "files": [path.name for path in before.values()]}
            return before
        by_policy = {str(results.outcomes[i].row["policy"]): results.outcomes[i] for i in self._in_gantt}
        figures, left_out = draw(self._plots, results.outcomes, by_policy, workers, folder=self.folder, progress=progress)
        if any(outcome.failure is None for outcome in results.outcomes):  # else the error of a run says more
            for line in left_out:
                note(f"moesim: {line}")
        if not left_out:  # else they are drawn again, and say so again
            resolved[FIGURES] = {"key": key, "files": sorted(figures)}
        return {f"plots/{name}": content for name, content in figures.items()}

    def _requests(self, results: Results) -> dict[str, bytes]:
        runs = (results.outcomes[i] for i in self._with_requests)
        found = ((one.row, with_requests(self.folder, one).records) for one in runs if one.failure is None)
        data = request_bytes(
            request_table(row, records.served) for row, records in found if records is not None and records.served
        )
        return {"requests.parquet": data} if data else {}

    def _timeline(self, results: Results) -> dict[str, bytes]:
        config = self.experiment.config.timeline
        shown = [results.outcomes[i] for i in self._in_timeline if results.outcomes[i].records is not None]
        if config is None or not shown:
            return {}
        runs = {str(one.row["policy"]): (one.records, one.machine) for one in shown if one.records is not None}
        from moesim.metrics.timeline import Timeline

        return {"timeline.json": Timeline.of(runs, config.steps).json()}

    def _frames(self, results: Results) -> dict[str, bytes]:
        kept = [outcome for outcome in results.outcomes if outcome.records is not None]
        return {
            "frames/steps.parquet": frame_bytes([row for outcome in kept for row in step_frame(outcome)]),
            "frames/layers.parquet": frame_bytes([row for outcome in kept for row in layer_frame(outcome)]),
        }


def with_requests(folder: Path | None, outcome: Outcome) -> Outcome:
    """Return a run with what became of its requests, which its folder has."""
    if outcome.records is not None or folder is None:
        return outcome
    return replace(outcome, records=Store(folder, read_only=True).records(str(outcome.row["key"]), 0))


def _figures_there(folder: Path, names: Collection[str]) -> list[str]:
    if not (folder / "plots").is_dir():
        return []
    found = [path.name for path in (folder / "plots").iterdir()]
    return [f"plots/{name}" for name in found if (figure := _FIGURE.fullmatch(name)) and figure["figure"] in names]


def describe(experiment: Experiment) -> dict[str, Any]:
    """Describe what went into an experiment; ``key`` hashes all that decides the results."""
    written = experiment.config.model_dump(mode="json")
    decides = {k: v for k, v in written.items() if k not in ("name", "description", "output", "plots", "timeline", "frames")}
    inputs = experiment.inputs()
    return {
        "moesim": __version__,
        "key": fingerprint({"moesim": __version__, "experiment": decides, "inputs": inputs}),
        "experiment": written,
        "inputs": inputs,
        "versions": {"python": python_version(), **{name: _version(name) for name in _PACKAGES}},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


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
    labels: Mapping[str, str] = {}  # policies and the names that they have in the figure


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
    from moesim.plots.drawing import read_options, with_labels
    from moesim.plots.style import MEDIA, parse_width

    options = dict(entry)
    del options[KIND]
    policies = options.pop("policies", [])
    where, width, labels = options.pop("where", {}), options.pop("width", None), options.pop("label", {})
    medium = options.pop("for", options.pop("medium", "screen"))
    if not isinstance(where, dict):
        raise ConfigError(f"{here}: where: {mistyped('a mapping of columns to values', where)}; write {{batch_size: 4}}")
    if not isinstance(labels, dict):
        raise ConfigError(f"{here}: label: {mistyped('a mapping of policies to names', labels)}; write {{dali: Ours}}")
    labels = {str(key): _typed(value) for key, value in labels.items()}
    if medium not in MEDIA:
        raise ConfigError(f"{here}: medium: {unknown_name('medium', str(medium), MEDIA)}")
    policies = [_label(one) for one in (policies if isinstance(policies, list) else [policies])]
    if "baseline" in options:
        options["baseline"] = _label(options["baseline"])
    baseline = [options["baseline"]] if "baseline" in options else []
    for key, names in (("policies", policies), ("baseline", baseline), ("label", list(labels))):
        for one in names:
            if known and one not in known:
                raise ConfigError(f"{here}: {key}: {unknown_name('policy of this experiment', one, known)}")
    try:
        typed = {key: _typed(value) for key, value in options.items() if value is not None}
        read = read_options(kind, with_labels(typed, labels))
    except ConfigError as error:
        raise ConfigError(f"{here}: {error}") from None
    inches = None if width is None else parse_width(_typed(width), f"{here}: width")
    chosen = [(str(key), _typed(value)) for key, value in where.items()]
    return Asked(name, kind, read, policies, chosen, medium, inches, labels)


def _label(policy: Any) -> str:
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
    folder: Path | None = None,
    progress: bool = False,
) -> tuple[dict[str, bytes], list[str]]:
    """Draw all figures as PNG, PDF, CSV and text, shared with workers; name what is left out."""
    figures: list[_Figure] = []
    refused: dict[str, ConfigError] = {}  # by name: what is left out from there on
    among = list(dict.fromkeys(str(outcome.row["policy"]) for outcome in outcomes))
    for entry in asked:
        try:
            named = [entry.labels.get(one, one) for one in among]
            figures.extend(_Figure(entry, *one, named) for one in _figures(entry, outcomes, runs, folder))
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
    asked: Asked, outcomes: Sequence[Outcome], runs: Mapping[str, Outcome], folder: Path | None
) -> Iterator[tuple[str, Sequence[Any], Mapping[str, Any]]]:
    """Return each figure of an entry: its name, what it draws, and its options."""
    import pandas as pd  # takes half a second to import

    from moesim.plots.captions import setting_label
    from moesim.plots.catalogue import figures_of
    from moesim.plots.drawing import chosen, relabelled, served_runs
    from moesim.plots.result_rows import shared_setting

    source = _source(asked.kind)
    by_run = {outcome.row["run"]: outcome for outcome in outcomes}
    if source == "records":
        lost: Sequence[str] = ()
        if asked.where:
            rows, lost = shared_setting(chosen(_frame("rows", outcomes), asked.policies, asked.where, asked.kind), asked.kind)
            runs = {str(row["policy"]): by_run[row["run"]] for _, row in rows.iterrows()}
        for policy in asked.policies:
            if policy not in (*runs, *lost):
                raise ConfigError(f"plot {asked.kind}: policies: {unknown_name('policy of the first setting', policy, runs)}")
        meant = {policy: runs[policy] for policy in asked.policies or runs if policy in runs}
        kept = {policy: outcome for policy, outcome in meant.items() if outcome.records is not None}
        if not kept:
            raise ConfigError("expected a run with records, got none")
        rows = pd.DataFrame([dict(outcome.row) for outcome in kept.values()])
        rows = relabelled(rows, rows, {one: text for one, text in asked.labels.items() if one in kept}, asked.kind)
        records = dict(zip(rows["policy"], (outcome.records for outcome in kept.values()), strict=True))
        missing = [*lost, *(policy for policy in meant if policy not in kept)]
        label = setting_label(rows, missing)
        yield asked.name, [records, next(iter(kept.values())).machine], {**asked.options, "label": label}
        return
    whole = _frame("rows" if source == "requests" else source, outcomes)
    frame = relabelled(chosen(whole, asked.policies, asked.where, asked.kind), whole, asked.labels, asked.kind)
    if source == "requests":
        rows, missing = shared_setting(frame, asked.kind)
        found = {str(row["policy"]): with_requests(folder, by_run[row["run"]]) for _, row in rows.iterrows()}
        yield asked.name, [served_runs(found, asked.kind)], {**asked.options, "label": setting_label(rows, missing)}
        return
    for figure, part in figures_of(asked.kind, frame, asked.options):
        yield asked.name + figure.removeprefix(asked.kind), [part], asked.options


def _frame(source: str, outcomes: Sequence[Outcome]) -> pd.DataFrame:
    import pandas as pd

    done = [outcome for outcome in outcomes if outcome.failure is None]
    if source == "rows":
        return pd.DataFrame([dict(outcome.row) for outcome in outcomes], columns=None if outcomes else ["policy"])
    return pd.DataFrame([row for outcome in done if outcome.records is not None for row in MAKE_FRAME[source](outcome)])
