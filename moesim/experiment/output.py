"""What an experiment leaves on disk: which runs to keep for it, and the content of each file."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import python_version
from typing import TYPE_CHECKING, Any

import yaml

from moesim import __version__
from moesim.core import collector
from moesim.core.output_folder import OutputFolder, check_own_folder
from moesim.core.text import say
from moesim.errors import ConfigError, unknown_name
from moesim.experiment.again import RESOLVED
from moesim.experiment.asked_figures import needs_records, read_plots
from moesim.experiment.drawn_before import drawn_before, figures_entry, figures_key
from moesim.experiment.figures import draw
from moesim.experiment.repeats import aggregate, repeated
from moesim.experiment.result import DATASET, GROWING, OWNER, RECORDS, SUMMARY
from moesim.experiment.small_inputs import INPUTS
from moesim.experiment.store import Store
from moesim.metrics.frames import frame_bytes, layer_frame, step_frame
from moesim.metrics.naming import fingerprint
from moesim.metrics.timeline import Timeline

if TYPE_CHECKING:
    from moesim.experiment.pool import Workers
    from moesim.experiment.resolve import Experiment
    from moesim.experiment.run import Results
    from moesim.experiment.runner import Kept

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
        with collector.paused():
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
        self._out.replace(files, last=SUMMARY, keep=GROWING, tidy=False)
        Store(self.folder).keep_records([str(results.outcomes[i].row["key"]) for i in self.kept])
        return self.folder

    def _figures(
        self, results: Results, resolved: dict[str, Any], workers: Workers | None, progress: bool
    ) -> Mapping[str, bytes | Path]:
        """Draw the figures, or take those that are there if nothing of them has changed; `resolved` gets of what they are."""
        if not self._plots:
            return {}
        key = figures_key(self._plots, results.rows, frames=self.experiment.config.frames)
        if (before := drawn_before(self.folder, key)) is not None:
            resolved |= figures_entry(key, (path.name for path in before.values()))
            return before
        by_policy = {str(results.outcomes[i].row["policy"]): results.outcomes[i] for i in self._in_gantt}
        figures, left_out = draw(self._plots, results.outcomes, by_policy, workers, progress=progress)
        if any(outcome.failure is None for outcome in results.outcomes):  # else the error of a run says more
            for line in left_out:
                say(f"moesim: {line}")
        if not left_out:  # else they are drawn again, and say so again
            resolved |= figures_entry(key, figures)
        return {f"plots/{name}": content for name, content in figures.items()}

    def _timeline(self, results: Results) -> dict[str, bytes]:
        config = self.experiment.config.timeline
        shown = [results.outcomes[i] for i in self._in_timeline if results.outcomes[i].records is not None]
        if config is None or not shown:
            return {}
        runs = {str(one.row["policy"]): (one.records, one.machine) for one in shown if one.records is not None}
        return {"timeline.json": Timeline.of(runs, config.steps).json()}

    def _frames(self, results: Results) -> dict[str, bytes]:
        kept = [outcome for outcome in results.outcomes if outcome.records is not None]
        return {
            "frames/steps.parquet": frame_bytes([row for outcome in kept for row in step_frame(outcome)]),
            "frames/layers.parquet": frame_bytes([row for outcome in kept for row in layer_frame(outcome)]),
        }


def _figures_there(folder: Path, names: Collection[str]) -> list[str]:
    """Name what stands where figures may be written; which those are shows in the rows only."""
    if not (folder / "plots").is_dir():
        return []
    found = [path.name for path in (folder / "plots").iterdir()]
    return [f"plots/{name}" for name in found if (figure := _FIGURE.fullmatch(name)) and figure["figure"] in names]


def describe(experiment: Experiment) -> dict[str, Any]:
    """Say what went into an experiment: the whole configuration, versions, and a sha256 of every input.

    ``key`` is the hash of all that decides the results: nothing that does not, such as the output folder.
    """
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
