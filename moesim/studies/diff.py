"""Two runs side by side: time by cause, phase and layer, in integer ns that add up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from moesim.errors import ConfigError, unknown_name
from moesim.experiment.folder import outcome_of
from moesim.experiment.store import read_summary
from moesim.metrics.breakdown import CAUSES
from moesim.metrics.naming import CACHE_SETTINGS, SETTINGS

if TYPE_CHECKING:
    from moesim.metrics import Value
    from moesim.metrics.breakdown import Breakdown
    from moesim.metrics.outcome import Outcome

PHASES: Final = ("prefill", "decode", "between steps")
OUTSIDE: Final = -1
"""The layer of what is outside the layers: embedding, leading dense layers, LM head, and time between steps."""

_SETTINGS: Final = (
    "policy",
    *SETTINGS,
    *CACHE_SETTINGS,
    "cache_slots",
    "own_transfer",
    "workload_digest",
    "source_label",
    "notes",
)
_BYTES: Final = ("demand", "prefetch_used", "prefetch_wasted", "update", "write_back", "message", "activation")
_COUNTS: Final = ("n_gpu_runs", "n_cpu_runs", "n_demand_fetches", "n_prefetches", "n_evictions")
_RATES: Final = (
    "hit_rate", "hit_rate_prefill", "hit_rate_decode", "resident_rate", "in_flight_share", "prefetch_used_share",
    "gpu_run_share", "fidelity_fresh_decode",
)  # fmt: skip
_SPEEDS: Final = ("makespan_ns", "ttft_mean_ns", "tpot_mean_ns", "contention_ns", "decode_tokens_per_s", "prefill_tokens_per_s")


def find_run(text: str, read: Callable[[Path, int], Outcome] = outcome_of) -> Outcome:
    """Find the run that ``DIR``, ``DIR:INDEX`` or ``DIR:POLICY`` names."""
    whole = Path(text).is_dir()
    name, _, which = (text, "", "") if whole else text.rpartition(":")
    folder = Path(name)
    if not name or not folder.is_dir() or not (which or whole):
        raise ConfigError(f"{text}: expected a result folder, or one with a run such as results/quickstart:3, got no such folder")
    rows = read_summary(folder)["runs"]
    if which.isdecimal():
        return read(folder, int(which))
    named = {name for row in rows for name in (row["policy"], row["policy_name"])}
    if which and which not in named:
        raise ConfigError(f"{text}: {unknown_name('policy of this result', which, named)}; or give the number of a run")
    found = [row for row in rows if not which or which == row["policy"]]
    found = found or [row for row in rows if which == row["policy_name"]]
    if len(found) != 1:
        numbers = ", ".join(str(row["run"]) for row in found[:8]) + (", ..." if len(found) > 8 else "")
        of = f" of {which}" if which else ""
        raise ConfigError(
            f"{text}: expected one run{of}, got {len(found)} ({numbers}); say which, such as {folder}:{found[0]['run']}"
        )
    return read(folder, int(found[0]["run"]))


@dataclass(frozen=True)
class Side:
    """One of the two runs."""

    row: Mapping[str, Value]  # its result
    # time by phase, layer and cause, ns; layer `OUTSIDE` is what is in none. All of them add up to the makespan
    times: Mapping[tuple[str, int, str], int]
    n_layers: int  # layers with experts

    @classmethod
    def of(cls, outcome: Outcome) -> Side:
        records, split = outcome.records, outcome.split
        assert records is not None and split is not None
        phases = {step.step: step.phase for step in records.steps}
        return cls(outcome.row, _times(split, phases), 1 + max((layer.layer for layer in records.layers), default=-1))

    def ns(self, phase: str | None = None, layer: int | None = None, cause: str | None = None) -> int:
        """Add up the time of a phase, layer, cause, or whichever are given."""
        wanted = (phase, layer, cause)
        return sum(ns for key, ns in self.times.items() if all(w in (None, k) for w, k in zip(wanted, key, strict=True)))

    def tokens(self, phase: str | None) -> int:
        """Count decoded tokens, those of prompts, or all generated."""
        key = {"prefill": "n_prefill_tokens", "decode": "n_decode_tokens"}.get(phase or "", "n_generated_tokens")
        value = self.row.get(key)
        return value if isinstance(value, int) else 0


def _times(split: Breakdown, phases: Mapping[int, str]) -> dict[tuple[str, int, str], int]:
    times: dict[tuple[str, int, str], int] = {}
    for window, ns in zip(split.windows, np.asarray(split.ns).tolist(), strict=True):
        phase = phases.get(window.step, PHASES[-1])
        for cause, amount in zip(CAUSES, ns, strict=True):
            if amount:
                key = phase, window.layer, cause
                times[key] = times.get(key, 0) + amount
    return times


@dataclass(frozen=True)
class Entry:
    """One compared figure."""

    section: str  # `"setting"`, `"speed"`, `"time"`, `"layer"`, `"bytes"` or `"rate"`
    key: str  # of the row of a result, or the cause
    unit: str  # `"ns"`, `"bytes"`, ..
    # a, b: of the two runs
    a: Any
    b: Any
    phase: str | None = None  # None: of the whole run
    layer: int | None = None  # `OUTSIDE`: none of the layers
    per_token: bool = False  # whether it is divided by the tokens of each run

    @property
    def difference(self) -> Any:
        """B less A; None for words and where one is missing."""
        if any(isinstance(v, bool) or not isinstance(v, int | float) for v in (self.a, self.b)) or self.section == "setting":
            return None
        return self.b - self.a

    def record(self) -> dict[str, Any]:
        return {
            "section": self.section, "phase": self.phase, "layer": self.layer, "key": self.key, "per_token": self.per_token,
            "unit": self.unit, "a": self.a, "b": self.b, "difference": self.difference,
        }  # fmt: skip


@dataclass(frozen=True)
class Diff:
    """Two runs compared."""

    # a, b: the runs
    a: Side
    b: Side

    @classmethod
    def of(cls, a: Outcome, b: Outcome) -> Diff:
        return cls(Side.of(a), Side.of(b))

    @property
    def by_layer(self) -> bool:
        return self.a.n_layers == self.b.n_layers

    def settings(self) -> list[Entry]:
        return [Entry("setting", key, "", a, b) for key, a, b in self._figures(_SETTINGS) if a != b]

    def _figures(self, keys: Iterable[str]) -> list[tuple[str, Value, Value]]:
        return [(key, self.a.row.get(key), self.b.row.get(key)) for key in keys]

    def speeds(self) -> list[Entry]:
        return [Entry("speed", k, "ns" if k.endswith("_ns") else "tokens/s", a, b) for k, a, b in self._figures(_SPEEDS)]

    def times(self, phase: str | None = None, *, per_token: bool = False) -> list[Entry]:
        """List the time by cause that took any, and ``"total"``; whole ns unless ``per_token``."""
        causes = [c for c in CAUSES if self.a.ns(phase, cause=c) or self.b.ns(phase, cause=c)]
        rows = [(c, self.a.ns(phase, cause=c), self.b.ns(phase, cause=c)) for c in causes]
        rows.append(("total", self.a.ns(phase), self.b.ns(phase)))
        if not per_token:
            return [Entry("time", cause, "ns", a, b, phase) for cause, a, b in rows]
        tokens = self.a.tokens(phase), self.b.tokens(phase)
        if not all(tokens):
            return []
        return [Entry("time", cause, "ns", a / tokens[0], b / tokens[1], phase, per_token=True) for cause, a, b in rows]

    def layers(self) -> list[Entry]:
        """List the time by layer and cause where it differs, what is in no layer last."""
        if not self.by_layer:
            return []
        rows = []
        for layer in (*range(self.a.n_layers), OUTSIDE):
            entries = [
                Entry("layer", c, "ns", self.a.ns(layer=layer, cause=c), self.b.ns(layer=layer, cause=c), None, layer)
                for c in CAUSES
            ]
            rows += [entry for entry in entries if entry.difference]
        return rows

    def bytes(self) -> list[Entry]:
        """List bytes over links by cause, for the run and for each generated token."""
        rows = self._figures([*(f"bytes_{cause}" for cause in _BYTES), "bytes_per_token"])
        return [Entry("bytes", key, "bytes", a, b) for key, a, b in rows if a or b or key == "bytes_per_token"]

    def rates(self) -> list[Entry]:
        rows = self._figures((*_RATES, *_COUNTS))
        return [Entry("rate", key, "", a, b) for key, a, b in rows if a is not None or b is not None]

    def entries(self) -> Iterator[Entry]:
        yield from self.settings()
        yield from self.speeds()
        for phase in (None, *PHASES):
            yield from self.times(phase)
            yield from self.times(phase, per_token=True) if phase != PHASES[-1] else ()
        yield from self.layers()
        yield from self.bytes()
        yield from self.rates()


def most_different(entries: Sequence[Entry], n: int) -> list[tuple[int, int, list[Entry]]]:
    """Find the layers where most of a difference arises."""
    by_layer: dict[int, list[Entry]] = {}
    for entry in entries:
        by_layer.setdefault(entry.layer if entry.layer is not None else OUTSIDE, []).append(entry)
    found = [
        (layer, sum(e.difference for e in several), sorted(several, key=lambda e: -abs(e.difference)))
        for layer, several in by_layer.items()
    ]
    return sorted(found, key=lambda one: -abs(one[1]))[:n]
