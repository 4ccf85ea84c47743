"""Predicted and measured figures side by side, how far they are apart, and which of them must be the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import mean, median
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from moesim.studies.validation.residual import residual

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
        """Its policy, with options."""
        return str(self.pair.settings["policy"])

    def predicted(self, figure: str, *, decided: bool = True) -> float | None:
        """Give a predicted figure, with the time of decisions or without."""
        return _FIGURES[figure](self.pair.predicted if decided else self.pair.undecided)

    def measured(self, figure: str) -> Measured | None:
        """Give a measured figure; None if it has no meaning in this run."""
        values = [_FIGURES[figure](facts) for facts in self.pair.measured]
        present = [value for value in values if value is not None]
        return Measured.of(present) if present else None

    def error(self, figure: str, *, decided: bool = True) -> float | None:
        """Give predicted / measured - 1."""
        predicted, measured = self.predicted(figure, decided=decided), self.measured(figure)
        return predicted / measured.value - 1 if predicted is not None and measured is not None and measured.value else None

    @cached_property
    def layer_error(self) -> float | None:
        """Median over the layers of the absolute relative error of their median visit."""
        errors = [abs(one["predicted_ns"] / one["measured_ns"] - 1) for one in self.layers() if one["measured_ns"]]
        return float(median(errors)) if errors else None

    def layers(self) -> list[dict[str, Any]]:
        """Give the median visit of each layer, predicted and measured ns (median over repeats)."""
        several = zip(*(facts.layer_ns for facts in self.pair.measured), strict=True)
        pairs = zip(self.pair.predicted.layer_ns, several, strict=True)
        return [
            {"layer": layer, "predicted_ns": predicted, "measured_ns": float(median(measured))}
            for layer, (predicted, measured) in enumerate(pairs)
        ]

    def steps(self) -> list[dict[str, Any]]:
        """Give each step, predicted and measured ns (median over repeats)."""
        several = zip(*(facts.step_ns for facts in self.pair.measured), strict=True)
        pairs = zip(self.pair.predicted.phases, self.pair.predicted.step_ns, several, strict=True)
        words = {"p": "prefill", "d": "decode"}
        return [
            {"step": step, "phase": words[phase], "predicted_ns": predicted, "measured_ns": float(median(ns))}
            for step, (phase, predicted, ns) in enumerate(pairs)
        ]

    def tasks(self) -> list[dict[str, Any]]:
        """Give each kind of task: predicted number and mean ns, measured number and mean ns (medians over repeats)."""
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

    # ------------------------------------------------------------------------------------------------------- what must be equal
    @property
    def must_be_equal(self) -> bool:
        """Whether hits and bytes must be the same on both sides, since no clock has a say in what the policy decides."""
        return not self.pair.clock

    @cached_property
    def unequal(self) -> list[str]:
        """Say which counts differ between the simulation and any replay; empty if none does."""
        found: dict[str, str] = {}
        for facts in self.pair.measured:
            for name, count in _counts(facts).items():
                expected = _counts(self.pair.predicted)[name]
                if count != expected:
                    found.setdefault(name, f"{name}: simulated {expected}, measured {count}")
        return list(found.values())

    @property
    def violation(self) -> str | None:
        """Say what differs that must not; None if all is well."""
        return f"{self.pair.name}: {'; '.join(self.unequal)}" if self.must_be_equal and self.unequal else None

    # -------------------------------------------------------------------------------------------------------------- residual
    @cached_property
    def typical(self) -> Facts:
        """The replay whose mean decode step is the median (of an even number of repeats the shorter of the middle two)."""
        ordered = sorted(self.pair.measured, key=lambda facts: mean(facts.compared_steps))
        return ordered[(len(ordered) - 1) // 2]

    def residual(self) -> dict[str, float]:
        """Split the mean decode step of the typical replay, less the predicted one, by cause; ns."""
        return residual(self.pair.predicted, self.typical)

    # --------------------------------------------------------------------------------------------------------------- records
    def record(self) -> dict[str, Any]:
        """Give one flat row: settings, and each figure predicted and measured."""
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
    """What must not differ: lookups, hits, and bytes by cause."""
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
        runs=len(pairs),
        median=float(np.median(absolute)),
        worst=float(absolute.max()),
        low=float(low),
        high=float(high),
        mean_signed=float(np.mean([error for error, _ in pairs])),
        spread=_median([measured.spread for _, measured in pairs]),
        repeat_error=_median([measured.repeat_error for _, measured in pairs if measured.repeat_error is not None]),
    )
