"""The result folder of an experiment: its files, and one of its runs once more."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import python_version
from typing import TYPE_CHECKING, Any, Final

import yaml

from moesim import __version__
from moesim.core.data import noting
from moesim.core.files import Manifest, OutputFolder, State, check_own_folder, read_verified
from moesim.core.processes import paused
from moesim.core.text import say
from moesim.core.yaml_reader import read_yaml_value
from moesim.errors import ConfigError, InputError, TraceError, unknown_name
from moesim.experiment.config import Config, parse_config
from moesim.experiment.figures import Asked, draw, needs_records, read_plots
from moesim.experiment.keys import code_digest, package_digest
from moesim.experiment.resolve import Experiment, written_key
from moesim.experiment.routing import GIVEN
from moesim.experiment.rows import aggregate, repeated
from moesim.experiment.runner import Kept, run_one
from moesim.experiment.store import DATASET, GROWING, INPUTS, OWNER, RECORDS, SUMMARY, SmallInputs, Store, read_summary
from moesim.experiment.sweep import each_machine, expand
from moesim.hardware import load_hardware
from moesim.metrics.breakdown import breakdown
from moesim.metrics.frames import frame_bytes, layer_frame, step_frame
from moesim.metrics.machine import Machine
from moesim.metrics.naming import LIVE, fingerprint, hardware_label
from moesim.metrics.outcome import Outcome
from moesim.policies.registry import NOT_TRUSTED, reading
from moesim.policies.user_code import foreign
from moesim.records import Records
from moesim.trace import SUFFIX, Trace, find_trace
from moesim.trace.shards import PARTS_SUFFIX

if TYPE_CHECKING:
    from moesim.experiment.run import Results
    from moesim.experiment.runner import Kept
    from moesim.experiment.workers import Workers


RESOLVED = "config.resolved.yaml"


def outcome_of(folder: Path, run: int, *, wanted: Kept = True, trust: bool = False, inputs: Path | None = None) -> Outcome:
    """Return a run of a folder with its records; `inputs` has its traces, and modules if they are trusted."""
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
    """Simulate a run again with the others on its trace, whose needs decide which requests are drawn."""
    row, file = rows[run], f"{folder}/{RESOLVED}"
    place = f"{folder}: run {run} ({row['policy']})"
    points = expand(config, file, imports=trust)
    others = [] if trust else list(dict.fromkeys(name for point in points for name in foreign(point.policy)))
    needed = foreign(points[run].policy) if len(points) == len(rows) else others
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
    experiment = Experiment(config, file, imports=trust, known=known, small=small, points=same)
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
    """Return where a trace may be: where the experiment had it, also if all moved, and next to the result."""
    if written.startswith(GIVEN):  # an object of Python, which may have been written since
        yield from sorted(inputs.glob(f"*{SUFFIX}")) if inputs is not None else []
        return
    own = folder.absolute()
    by_path = written.endswith((SUFFIX, PARTS_SUFFIX)) or Path(written).name != written
    below = Path(written) if by_path else Path("traces", f"{written}{SUFFIX}")
    near = [own, own.parent] if inputs is None else [inputs, own, own.parent]
    yield from () if inputs is None else (inputs / below, inputs / below.name)
    yield written
    yield from (above / below for above in (own, *own.parents))
    yield from (place / below.name for place in near)


FIGURES: Final = "figures"
"""Key of the resolved configuration: of what its figures were drawn, and their files."""
_DRAWING_PACKAGES: Final = ("matplotlib", "pandas", "fonttools")


def figures_key(asked: Sequence[Asked], rows: Iterable[Mapping[str, Any]], *, frames: bool) -> str:
    """Hash what figures follow from: entries, rows (whose keys stand for records), code and packages."""
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
          "frames/layers.parquet")  # fmt: skip
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
        every = [s.index for s in experiment.specs] if config.frames else []
        steps = config.timeline.steps if config.timeline is not None else 0
        self.kept: dict[int, Kept] = dict.fromkeys(self._in_timeline, steps) | dict.fromkeys([*self._in_gantt, *every], True)

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
            resolved[FIGURES] = {"key": key, "files": sorted(path.name for path in before.values())}
            return before
        by_policy = {str(results.outcomes[i].row["policy"]): results.outcomes[i] for i in self._in_gantt}
        figures, left_out = draw(self._plots, results.outcomes, by_policy, workers, progress=progress)
        if any(outcome.failure is None for outcome in results.outcomes):  # else the error of a run says more
            for line in left_out:
                say(f"moesim: {line}")
        if not left_out:  # else they are drawn again, and say so again
            resolved[FIGURES] = {"key": key, "files": sorted(figures)}
        return {f"plots/{name}": content for name, content in figures.items()}

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


def _figures_there(folder: Path, names: Collection[str]) -> list[str]:
    """Name the files that figures of these names would replace."""
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
