"""Predicted next to measured figures: differences, what must be equal, and the folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pandas as pd
import yaml

from moesim import __version__
from moesim.core.files import OutputFolder
from moesim.core.table import Format, render, render_records
from moesim.experiment.store import SUMMARY
from moesim.plots.style import pictures
from moesim.plots.validation import residual_bars, scatter
from moesim.studies.validation.facts import RESIDUALS, largest, residual
from moesim.studies.validation.run import FILE, OWNER, Validation

if TYPE_CHECKING:
    from moesim.studies.validation.facts import Facts
    from moesim.studies.validation.run import Pair


GOAL: Final = 0.05
"""Median absolute error of the decode step that is aimed at."""
AT_WORST: Final = 0.10
RESAMPLES: Final = 2000
SEED: Final = 0  # of the resampling

_FIGURES: Final[dict[str, Callable[[Facts], float | None]]] = {
    "decode_step_ns": lambda facts: _median(facts.durations("d")),
    "prefill_step_ns": lambda facts: _median(facts.durations("p")),
    "layer_ns": lambda facts: _median(facts.layer_ns),
    "makespan_ns": lambda facts: float(facts.makespan_ns),
    "resident_rate": lambda facts: _share(facts.hits, facts.lookups),
    "resident_rate_decode": lambda facts: _share(facts.decode_hits, facts.decode_lookups),
    "overlap_share": lambda facts: facts.overlap_share,
    "bytes_total": lambda facts: float(facts.n_bytes["total"]),
}
"""Figures that a row has predicted and measured."""
TIMES: Final = tuple(name for name in _FIGURES if name.endswith("_ns"))
_MOVED: Final = ("demand", "prefetch_used", "prefetch_wasted", "update", "write_back", "message")


def _median(values: Sequence[float]) -> float | None:
    return float(median(values)) if values else None


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


@dataclass(frozen=True)
class Measured:
    """One figure over the repeats of a run."""

    # value, low, high: median, smallest and largest
    value: float
    low: float
    high: float
    spread: float  # (largest - smallest) / median
    # how well replays predict a replay: the median over the repeats of the relative error of the others' median. No prediction
    # can be asked to be better. None with one repeat
    repeat_error: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Measured:
        """Reduce the repeats.

        >>> Measured.of([10.0, 11.0, 10.5])
        Measured(value=10.5, low=10.0, high=11.0, spread=0.09523809523809523, repeat_error=0.06818181818181823)
        """
        value = float(median(values))
        others = [(one, median([*values[:i], *values[i + 1 :]])) for i, one in enumerate(values)] if len(values) > 1 else []
        errors = [abs(rest / one - 1) for one, rest in others if one]
        spread = (max(values) - min(values)) / value if value else 0.0
        return cls(value, min(values), max(values), spread, float(median(errors)) if errors else None)


class Compared:
    """One run, predicted and measured."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair

    @property
    def policy(self) -> str:
        return str(self.pair.settings["policy"])

    def predicted(self, figure: str, *, decided: bool = True) -> float | None:
        return _FIGURES[figure](self.pair.predicted if decided else self.pair.undecided)

    def measured(self, figure: str) -> Measured | None:
        values = [_FIGURES[figure](facts) for facts in self.pair.measured]
        present = [value for value in values if value is not None]
        return Measured.of(present) if present else None

    def error(self, figure: str, *, decided: bool = True) -> float | None:
        predicted, measured = self.predicted(figure, decided=decided), self.measured(figure)
        return predicted / measured.value - 1 if predicted is not None and measured is not None and measured.value else None

    @cached_property
    def layer_error(self) -> float | None:
        """Median over the layers of the absolute relative error of their median visit."""
        errors = [abs(one["predicted_ns"] / one["measured_ns"] - 1) for one in self.layers() if one["measured_ns"]]
        return float(median(errors)) if errors else None

    def layers(self) -> list[dict[str, Any]]:
        """Return the median visit of each layer, predicted and measured ns (median over repeats)."""
        several = zip(*(facts.layer_ns for facts in self.pair.measured), strict=True)
        pairs = zip(self.pair.predicted.layer_ns, several, strict=True)
        return [
            {"layer": layer, "predicted_ns": predicted, "measured_ns": float(median(measured))}
            for layer, (predicted, measured) in enumerate(pairs)
        ]

    def steps(self) -> list[dict[str, Any]]:
        """Return each step, predicted and measured ns (median over repeats)."""
        several = zip(*(facts.step_ns for facts in self.pair.measured), strict=True)
        pairs = zip(self.pair.predicted.phases, self.pair.predicted.step_ns, several, strict=True)
        words = {"p": "prefill", "d": "decode"}
        return [
            {"step": step, "phase": words[phase], "predicted_ns": predicted, "measured_ns": float(median(ns))}
            for step, (phase, predicted, ns) in enumerate(pairs)
        ]

    def tasks(self) -> list[dict[str, Any]]:
        """Return per kind of task predicted and measured number and mean ns (medians of repeats)."""
        found: list[dict[str, Any]] = []
        for name in sorted({name for facts in (self.pair.predicted, *self.pair.measured) for name in facts.tasks}):
            n, whole_ns = self.pair.predicted.tasks.get(name, [0, 0])
            measured = [facts.tasks.get(name, [0, 0]) for facts in self.pair.measured]
            means = [ns / number for number, ns in measured if number]
            found.append(
                {"task": name, "predicted_n": n, "predicted_mean_ns": whole_ns / max(1, n),
                 "measured_n": median(number for number, _ in measured),
                 "measured_mean_ns": float(median(means)) if means else 0.0}
            )  # fmt: skip
        return found

    @property
    def must_be_equal(self) -> bool:
        """Whether hits and bytes must be equal: no decision depends on a clock."""
        return not self.pair.clock

    @cached_property
    def unequal(self) -> list[str]:
        """The counts that differ between the simulation and any replay; empty if none does."""
        found: dict[str, str] = {}
        for facts in self.pair.measured:
            for name, count in _counts(facts).items():
                expected = _counts(self.pair.predicted)[name]
                if count != expected:
                    found.setdefault(name, f"{name}: simulated {expected}, measured {count}")
        return list(found.values())

    @property
    def violation(self) -> str | None:
        """Return in words what differs and must not; None if nothing does."""
        return f"{self.pair.name}: {'; '.join(self.unequal)}" if self.must_be_equal and self.unequal else None

    @cached_property
    def typical(self) -> Facts:
        """The replay with the median decode step, of an even number the shorter middle one."""
        ordered = sorted(self.pair.measured, key=lambda facts: mean(facts.compared_steps))
        return ordered[(len(ordered) - 1) // 2]

    def residual(self) -> dict[str, float]:
        """Split the typical replay's decode step, less the predicted one, by cause; ns."""
        return residual(self.pair.predicted, self.typical)

    def record(self) -> dict[str, Any]:
        pair = self.pair
        row: dict[str, Any] = {**pair.settings, "decision_ns": pair.decision_ns, "source_label": pair.label}
        row["repeats"] = len(pair.measured)
        for name in _FIGURES:
            measured = self.measured(name)
            row[f"{name}_predicted"] = self.predicted(name)
            row[f"{name}_measured"] = None if measured is None else measured.value
            row[f"{name}_low"] = None if measured is None else measured.low
            row[f"{name}_high"] = None if measured is None else measured.high
            if name in TIMES:
                row[f"{name}_no_decision"] = self.predicted(name, decided=False)
                row[f"{name}_error"] = self.error(name)
                row[f"{name}_spread"] = None if measured is None else measured.spread
                row[f"{name}_repeat_error"] = None if measured is None else measured.repeat_error
        row["layer_error"] = self.layer_error
        for cause in _MOVED:
            row[f"bytes_{cause}_predicted"] = pair.predicted.n_bytes[cause]
            row[f"bytes_{cause}_measured"] = median(facts.n_bytes[cause] for facts in pair.measured)
        row["transfers_predicted"] = sum(pair.predicted.transfers.values())
        row["transfers_measured"] = median(sum(facts.transfers.values()) for facts in pair.measured)
        row["waited_memory_predicted"] = pair.predicted.waited_memory
        row["waited_memory_measured"] = median(facts.waited_memory for facts in pair.measured)
        for place in sorted({name for facts in (pair.predicted, *pair.measured) for name in facts.busy_ns}):
            row[f"busy.{place}_predicted"] = _busy(pair.predicted, place)
            row[f"busy.{place}_measured"] = median(_busy(facts, place) for facts in pair.measured)
        row["must_be_equal"] = self.must_be_equal
        row["equal"] = not self.unequal
        row["depends_on_clock"] = "; ".join(pair.clock)
        return row


def _counts(facts: Facts) -> dict[str, int]:
    """Return the counts that must not differ: lookups, hits, and bytes by cause."""
    return {"lookups": facts.lookups, "hits": facts.hits, **{f"bytes {cause}": n for cause, n in facts.n_bytes.items()}}


def _busy(facts: Facts, place: str) -> float:
    return facts.busy_ns.get(place, 0) / facts.makespan_ns


# ------------------------------------------------------------------------------------------------------------------ summary
@dataclass(frozen=True)
class Errors:
    """The errors of one figure over some runs."""

    runs: int  # how many have it
    # median, worst: of the absolute relative errors
    median: float
    worst: float
    # low, high: 95 % interval of the median, from `RESAMPLES` resamples of the runs (seed `SEED`)
    low: float
    high: float
    mean_signed: float  # mean of the signed errors: below 0, predictions are too fast
    # spread, repeat_error: medians over the runs of the machine's own, see `Measured`
    spread: float | None
    repeat_error: float | None


def errors_of(compared: Sequence[Compared], figure: str = "decode_step_ns", *, decided: bool = True) -> Errors | None:
    """Summarise the errors of a figure."""
    pairs = [(error, measured) for one in compared if (error := one.error(figure, decided=decided)) is not None
             and (measured := one.measured(figure)) is not None]  # fmt: skip
    if not pairs:
        return None
    absolute = np.abs(np.array([error for error, _ in pairs]))
    drawn = np.random.default_rng(SEED).integers(0, len(absolute), (RESAMPLES, len(absolute)))
    low, high = np.percentile(np.median(absolute[drawn], axis=1), (2.5, 97.5))
    return Errors(
        runs=len(pairs), median=float(np.median(absolute)), worst=float(absolute.max()), low=float(low),
        high=float(high), mean_signed=float(np.mean([error for error, _ in pairs])),
        spread=_median([measured.spread for _, measured in pairs]),
        repeat_error=_median([measured.repeat_error for _, measured in pairs if measured.repeat_error is not None]),
    )  # fmt: skip


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
        found: dict[str, list[Compared]] = {}
        for one in self.compared:
            found.setdefault(one.policy, []).append(one)
        return found

    def results(self) -> list[dict[str, Any]]:
        return [one.record() for one in self.compared]

    def residuals(self) -> list[dict[str, Any]]:
        """Return one row a run: the difference of the decode step by cause, ns and share."""
        return [_residual_row(one) for one in self.compared]

    def summary(self) -> dict[str, Any]:
        """Return errors overall and by policy, with the machine's own spread next to them."""
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

    def write(self, folder: Path) -> list[Path]:
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

    def _readme(self, folder: Path) -> str:
        header = self.validation.header
        repeats = max((len(one.pair.measured) for one in self.compared), default=0)
        options = {**header.get("how", {}), "repeats": repeats}
        machines = [spec.hardware for spec in self.validation.experiment.specs]
        if any(device.role == "storage" for machine in machines for device in machine.devices.values()):
            options["disk"] = "FOLDER"
        how = " ".join(f"--{key} {value}" for key, value in options.items() if value is not None)
        described = [f"* {name}: " + "; ".join(f"{k} {v}" for k, v in told.items()) for name, told in header["machine"].items()]
        here = folder.absolute()
        folder = here.relative_to(Path.cwd()) if here.is_relative_to(Path.cwd()) else Path(here.name)
        file = folder / EXPERIMENT
        lines = [
            "# Simulated and replayed times", "",
            f"Measured {header.get('date')} with moesim {header.get('moesim')}:", "",
            *(line.removesuffix(": ") for line in described), "",
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

    def table(self, form: Format) -> str:
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
    """Describe whether the goal is met."""
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
