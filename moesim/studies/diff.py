"""Two runs side by side: time by cause, phase and layer, in integer ns that add up."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from moesim.core.table import Format, render, render_records
from moesim.core.text import shown
from moesim.core.units import NS_PER_MS, NS_PER_S, NS_PER_US
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
    "policy", *SETTINGS, *CACHE_SETTINGS, "cache_slots", "own_transfer", "workload_digest", "source_label",
    "notes",
)  # fmt: skip
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


_MOST = 8  # layers that are told
_WIDTH = 60  # characters of a setting in words


def text_of(found: Diff, name_a: str, name_b: str, form: Format) -> str:
    """Write a comparison."""
    named = (("A", name_a, found.a), ("B", name_b, found.b))
    if form.for_programs:
        labels = {"run_a": name_a, "run_b": name_b, "label_a": _label(found.a.row), "label_b": _label(found.b.row)}
        return render_records([{**entry.record(), **labels} for entry in found.entries()], form)
    sides = [f"{x}: {name}: {side.row['policy']} ({_label(side.row)})" for x, name, side in named]
    parts = [("\n\n" if form is Format.MD else "\n").join(map(shown, sides)) + "\n"]
    parts.append(_section("settings that differ", ["setting", "A", "B"], _words(found.settings(), form), form))
    head = ["", "A", "B", "B - A", "change"]
    parts.append(_section("speed", head, map(_cells, found.speeds()), form))
    parts.append(_section("time by cause", head, map(_cells, found.times()), form))
    for phase, what in (("prefill", "prompt token"), ("decode", "decoded token")):
        per_token = found.times(phase, per_token=True)
        if per_token:
            parts.append(_section(f"{phase}, for each {what}", head, map(_cells, per_token), form))
    parts.append(_layers(found, form))
    parts.append(_section("bytes over links", head, map(_cells, found.bytes()), form))
    parts.append(_section("rates and counts", head, map(_cells, found.rates()), form))
    return "\n".join(part for part in parts if part)


def _label(row: Any) -> str:
    return f"{row.get('source_label')}, {row.get('routing')} routing"


def _section(title: str, head: Sequence[str], rows: Iterable[list[str]], form: Format) -> str:
    cells = list(rows)
    title = f"### {title}\n\n" if form is Format.MD else f"{title}\n"
    return title + (render(head, cells, form, right=head[1:] if len(head) > 3 else ()) if cells else "none\n")


def _words(entries: Sequence[Entry], form: Format) -> list[list[str]]:
    """Write settings in words; long ones, such as notes, go on in further rows."""
    rows = []
    for entry in entries:
        sides = ["-" if v is None else str(v) for v in (entry.a, entry.b)]
        if form is Format.TABLE:
            wrapped = [textwrap.wrap(side, _WIDTH, break_on_hyphens=False) for side in sides]
            rows += [[key, *parts] for key, *parts in zip_longest([entry.key], *wrapped, fillvalue="")]
        else:
            rows.append([entry.key, *sides])
    return rows


def _cells(entry: Entry) -> list[str]:
    change = "-"
    if entry.difference is not None and entry.a:
        change = f"{100 * entry.difference / entry.a:+z.1f} %"
    sides = [_value(v, entry.unit) for v in (entry.a, entry.b)]
    return [entry.key, *sides, _value(entry.difference, entry.unit, sign=True), change]


def _value(value: Any, unit: str, *, sign: bool = False) -> str:
    if value is None:
        return "-"
    plus = "+" if sign else ""
    if unit == "ns":
        scale, word = next(
            (s, w) for s, w in ((NS_PER_S, "s"), (NS_PER_MS, "ms"), (NS_PER_US, "us"), (1, "ns")) if abs(value) >= s or s == 1
        )
        return f"{value / scale:{plus}z.4g} {word}"
    if unit == "bytes":
        return f"{value / 1e9:{plus}z.4g} GB" if abs(value) >= 1e9 else f"{value / 1e6:{plus}z.4g} MB"
    return f"{value:{plus},}" if isinstance(value, int) else f"{value:{plus}z.4g}"


def _layers(found: Diff, form: Format) -> str:
    if not found.by_layer:
        numbers = f"{found.a.n_layers} and {found.b.n_layers}"
        return f"by layer: not compared, for the models have {numbers} layers with experts; the causes above are of whole runs\n"
    entries = found.layers()
    most = most_different(entries, _MOST)
    rows = []
    for layer, difference, causes in most:
        name = "outside the layers" if layer == OUTSIDE else str(layer)
        told = ", ".join(f"{e.key} {_value(e.difference, 'ns', sign=True)}" for e in causes[:3])
        rows.append([name, _value(difference, "ns", sign=True), told])
    whole = sum(abs(difference) for _, difference, _ in most_different(entries, len(entries)))
    share = sum(abs(difference) for _, difference, _ in most) / whole if whole else 0.0
    title = (
        f"layers with the largest difference ({len(most)} of {found.a.n_layers}, {100 * share:.0f} % of the differences of all)"
    )
    return _section(title, ["layer", "B - A", "of which"], rows, form)
