"""What a validation leaves in its folder, and what the terminal shows of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any, Final

import pandas as pd
import yaml

from moesim import __version__
from moesim.core.files import OutputFolder
from moesim.core.table import Format, render, render_records
from moesim.experiment.store import SUMMARY
from moesim.plots.style import pictures
from moesim.plots.validation import residual_bars, scatter
from moesim.studies.validation.compare import AT_WORST, GOAL, RESAMPLES, SEED, TIMES, Compared, Errors, errors_of
from moesim.studies.validation.facts import RESIDUALS
from moesim.studies.validation.residual import largest
from moesim.studies.validation.run import Validation
from moesim.studies.validation.store import FILE, OWNER

EXPERIMENT: Final = "experiment.yaml"
_SETTINGS: Final = ("run", "policy", "model", "hardware", "trace", "batch_size", "cache_ratio", "cache_budget_bytes")


class Report:
    """A validation, compared."""

    def __init__(self, validation: Validation) -> None:
        self.validation = validation
        self.compared = [Compared(pair) for pair in validation.pairs]  # one a run
        violations = [one.violation for one in self.compared]
        # a line for each run that failed, or whose hits or bytes differ though they must not
        self.problems = [*validation.failures, *(f"{text}; these must be equal" for text in violations if text)]

    def by_policy(self) -> dict[str, list[Compared]]:
        """Group the runs by policy, in the experiment's order."""
        found: dict[str, list[Compared]] = {}
        for one in self.compared:
            found.setdefault(one.policy, []).append(one)
        return found

    # ------------------------------------------------------------------------------------------------------------ figures
    def results(self) -> list[dict[str, Any]]:
        """Give one row a run, predicted and measured side by side."""
        return [one.record() for one in self.compared]

    def residuals(self) -> list[dict[str, Any]]:
        """Give one row a run: the difference of the mean decode step by cause, ns and share of the measured step."""
        return [_residual_row(one) for one in self.compared]

    def summary(self) -> dict[str, Any]:
        """Give errors overall and by policy, with the machine's own spread beside them."""
        steps = errors_of(self.compared)
        must = [one for one in self.compared if one.must_be_equal]
        return {
            "moesim": __version__,
            "measured_with": self.validation.header.get("moesim"),
            "date": self.validation.header.get("date"),
            "goal": {"median": GOAL, "at_worst": AT_WORST, "verdict": verdict(steps)},
            "changed_since_measured": self.validation.changed(),
            "interval": f"95 %, median over {RESAMPLES} resamples of the runs, seed {SEED}",
            "errors": {name: _written(errors_of(self.compared, name)) for name in TIMES},
            "errors_no_decision": {name: _written(errors_of(self.compared, name, decided=False)) for name in TIMES},
            "policies": {name: _written(errors_of(runs)) for name, runs in self.by_policy().items()},
            "must_be_equal": len(must),
            "equal": sum(not one.unequal for one in must),
            "reported_only": {one.pair.name: one.unequal for one in self.compared if not one.must_be_equal and one.unequal},
            "problems": self.problems,
            "runs": [{key: row[key] for key in _SETTINGS} for row in self.results()],
        }

    # -------------------------------------------------------------------------------------------------------------- files
    def write(self, folder: Path) -> list[Path]:
        """Write tables, figures and a description beside the measurements."""
        config = self.validation.experiment.config.model_dump(mode="json", exclude_unset=True)
        if not self.compared:
            return []
        texts = {
            EXPERIMENT: yaml.safe_dump(config, sort_keys=False, width=120),
            "results.csv": render_records(self.results(), Format.CSV),
            "residuals.csv": render_records(self.residuals(), Format.CSV),
            "layers.csv": _rows(self.compared, Compared.layers),
            "steps.csv": _rows(self.compared, Compared.steps),
            "tasks.csv": _rows(self.compared, Compared.tasks),
            SUMMARY: json.dumps(self.summary(), indent=1) + "\n",
            "README.md": self._readme(folder),
        }
        corner = self._corner()
        files = {name: text.encode() for name, text in texts.items()}
        files |= pictures(scatter(pd.DataFrame(self.results()), corner), "scatter")
        files |= pictures(residual_bars(pd.DataFrame(self.residuals()), corner), "residual")
        return OutputFolder(folder, OWNER).replace(files, last=SUMMARY, keep=(FILE,))

    def _corner(self) -> str:
        names = [
            sorted({Path(str(one.pair.settings[key])).name for one in self.compared}) for key in ("model", "hardware", "trace")
        ]
        repeats = sorted({len(one.pair.measured) for one in self.compared})
        told = [", ".join(name) for name in names] + [f"{' or '.join(str(n) for n in repeats)} replays a run"]
        return " · ".join([*told, f"measured {self.validation.header.get('date')}"])

    def _machines(self) -> list[Any]:
        return [device for spec in self.validation.experiment.specs for device in spec.hardware.devices.values()]

    def _readme(self, folder: Path) -> str:
        header = self.validation.header
        repeats = max((len(one.pair.measured) for one in self.compared), default=0)
        options = {**header.get("how", {}), "repeats": repeats}
        if any(device.role == "storage" for device in self._machines()):
            options["disk"] = "FOLDER"
        how = " ".join(f"--{key} {value}" for key, value in options.items() if value is not None)
        machines = [f"* {name}: " + "; ".join(f"{k} {v}" for k, v in told.items()) for name, told in header["machine"].items()]
        here = folder.absolute()
        folder = here.relative_to(Path.cwd()) if here.is_relative_to(Path.cwd()) else Path(here.name)
        file = folder / EXPERIMENT
        lines = [
            "# Simulated and replayed times", "",
            f"Measured {header.get('date')} with moesim {header.get('moesim')}:", "",
            *(line.removesuffix(": ") for line in machines), "",
            self.table(Format.MD), "",
            f"* `{FILE}`: every measurement as taken; the rest is computed from it and from simulations.",
            "* `results.csv`: one row per run: predicted, and measured (median, smallest and largest).",
            "* `layers.csv`, `steps.csv`, `tasks.csv`: times of each layer, step and kind of task.",
            "* `residuals.csv`, `residual.png`: measured less predicted decode step (mean), by cause; the causes sum to it.",
            "* `scatter.png`: measured against predicted decode step.",
            "* `summary.json`: errors by figure and by policy.", "",
            "Compute all of it again without measuring (any machine, seconds):", "",
            f"    moesim validate {file} --out {folder} --only-compare", "",
            "Measure again (the same kind of machine, profiled just before):", "",
            f"    moesim validate {file} --out NEW {how}", "",
        ]  # fmt: skip
        return "\n".join(lines)

    # ----------------------------------------------------------------------------------------------------------- terminal
    def table(self, form: Format) -> str:
        """Write the errors by policy, and below it what they come to."""
        if form.for_programs:
            return render_records(self.results(), form)
        head = ["policy", "runs", "decode step |error| %", "worst %", "mean %", "no decisions %", "repeat error %", "spread %",
                "makespan |error| %", "hits and bytes", "largest residual"]  # fmt: skip
        rows = [_cells(name, runs) for name, runs in self.by_policy().items()]
        separator = "\n\n" if form is Format.MD else "\n"
        return render(head, rows, form, head[1:-2]) + "\n" + separator.join(self._notes()) + "\n"

    def _notes(self) -> list[str]:
        overall = errors_of(self.compared)
        lines = []
        if overall is not None:
            own = "" if overall.repeat_error is None else f"; repeat error: median {_percent(overall.repeat_error)} %"
            lines.append(
                f"decode step: median absolute error {_percent(overall.median)} % (95 % interval {_percent(overall.low)} to "
                f"{_percent(overall.high)} %), worst {_percent(overall.worst)} %: {verdict(overall)}{own}"
            )
        must = [one for one in self.compared if one.must_be_equal]
        n_equal = sum(not one.unequal for one in must)
        lines.append(f"hits and bytes are equal in {n_equal} of {len(must)} runs whose decisions depend on no clock")
        if changed := self.validation.changed():
            lines.append(f"changed since it was measured, so that this compares something else: {', '.join(changed)}")
        lines.append("repeat error: of the other replays' median; spread: (largest - smallest) / median; medians over the runs")
        return lines


def verdict(errors: Errors | None) -> str:
    """Say whether the goal is met."""
    if errors is None:
        return "nothing was decoded"
    if errors.median <= GOAL:
        return f"within the goal of {100 * GOAL:g} %"
    if errors.median <= AT_WORST:
        return f"misses the goal of {100 * GOAL:g} %, within {100 * AT_WORST:g} %"
    return f"misses the goal of {100 * GOAL:g} %, and {100 * AT_WORST:g} %"


def _cells(name: str, runs: Sequence[Compared]) -> list[str]:
    steps, bare, whole = errors_of(runs), errors_of(runs, decided=False), errors_of(runs, "makespan_ns")
    n_must, n_wrong = sum(one.must_be_equal for one in runs), sum(one.must_be_equal and bool(one.unequal) for one in runs)
    free = [one for one in runs if not one.must_be_equal]
    equal = [f"{n_must - n_wrong} of {n_must} equal as they must"] if n_must else []
    equal += [f"{sum(not one.unequal for one in free)} of {len(free)} equal"] if free else []
    residuals = [_residual_row(one) for one in runs]
    parts = {cause: mean(row[f"{cause}_share"] for row in residuals) for cause in RESIDUALS}
    cause = largest(parts)
    figures = ["-"] * 6 if steps is None or bare is None else [
        _percent(steps.median), _percent(steps.worst), f"{100 * steps.mean_signed:+z.1f}", _percent(bare.median),
        _percent(steps.repeat_error), _percent(steps.spread),
    ]  # fmt: skip
    makespan = "-" if whole is None else _percent(whole.median)
    return [name, str(len(runs)), *figures, makespan, ", ".join(equal), f"{cause} {100 * parts[cause]:+z.1f} %"]


def _residual_row(one: Compared) -> dict[str, Any]:
    parts = one.residual()
    measured = mean(one.typical.compared_steps)
    row = {key: one.pair.settings[key] for key in _SETTINGS}
    row |= {"predicted_ns": mean(one.pair.predicted.compared_steps), "measured_ns": measured}
    row |= {"difference_ns": row["measured_ns"] - row["predicted_ns"], "largest": largest(parts)}  # type: ignore[operator]
    row |= {f"{cause}_ns": ns for cause, ns in parts.items()}
    return row | {f"{cause}_share": ns / measured for cause, ns in parts.items()}


def _rows(compared: Sequence[Compared], of: Callable[[Compared], list[dict[str, Any]]]) -> str:
    """Write some rows of each run, with what the run is before each."""
    head = ("run", "policy", "batch_size", "cache_ratio")
    rows = [{key: one.pair.settings[key] for key in head} | row for one in compared for row in of(one)]
    return render_records(rows, Format.CSV)


def _written(errors: Errors | None) -> dict[str, Any] | None:
    return None if errors is None else asdict(errors)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"
