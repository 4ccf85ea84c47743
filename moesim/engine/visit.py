"""The present visit of a layer: slots that are served, and what is under way (rule 3).

Rows of a step are kept as bits of an integer: bit r is row r.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from moesim.records import InexactRecord

FRESH, STALE, SUBSTITUTED, SUBSTITUTED_STALE, SKIPPED, LATE, REDUCED = range(1, 8)
INEXACT = {
    STALE: "stale", SUBSTITUTED: "substituted", SUBSTITUTED_STALE: "substituted-stale", SKIPPED: "skipped", LATE: "late",
    REDUCED: "reduced",
}  # fmt: skip


def bits_of(rows: Iterable[int]) -> int:
    """Return rows as bits."""
    return sum(1 << row for row in rows)


def rows_of(bits: int) -> list[int]:
    """Return the rows that bits stand for, ascending."""
    return [row for row in range(bits.bit_length()) if bits >> row & 1]


class Serving(NamedTuple):
    """Rows of a Run that serves slots later: once its layer is routed, or all others are served."""

    expert: int
    rows: int
    kind: int  # of the slots that are routed to the expert
    stale: bool


@dataclass(slots=True, eq=False)
class Visit:
    """One visit of a layer."""

    step: int
    layer: int
    mbs_left: int  # micro-batches not yet routed
    begin: int = -1  # not begun: only early Runs refer to it
    routed_rows: int = 0  # rows of the micro-batches routed so far
    unserved: Counter[int] = field(default_factory=Counter)  # of each expert, the rows routed to it that no Run has taken
    experts: list[Any] = field(default_factory=list)  # per micro-batch (n, k)
    weights: list[Any] = field(default_factory=list)
    early: list[Serving] = field(default_factory=list)  # Runs that were issued before their rows were routed
    substitutes: list[Serving] = field(default_factory=list)  # Runs for rows that were not routed to their expert
    inexact: list[tuple[int, int, int]] = field(default_factory=list)  # kind, expert whose slots were served that way, rows
    open: int = 0

    def __post_init__(self) -> None:
        # What keeps the layer open: micro-batches to route, slots to serve, tasks and crossings to end. Changed here only.
        self.open = self.mbs_left

    def hold(self) -> None:
        """Keep the layer open for one more thing: a task, a crossing or a decision."""
        self.open += 1

    def let_go(self) -> None:
        self.open -= 1

    def route(self, experts: Any, weights: Any) -> None:
        """Take in one micro-batch's routing."""
        self.mbs_left -= 1
        self.open += experts.size - 1
        for row, chosen in enumerate(experts.tolist(), self.routed_rows):
            for expert in chosen:
                self.unserved[expert] |= 1 << row
        self.experts.append(experts)
        self.weights.append(weights)
        self.routed_rows += len(experts)
        if not self.mbs_left:
            early, self.early = self.early, []
            for serving in early:
                self.serve(*serving)

    def serve(self, expert: int, rows: int, kind: int, stale: bool = False) -> None:
        """Serve slots of `expert` once `rows` are routed; others wait for `serve_substitutes`."""
        if rows.bit_length() > self.routed_rows:
            self.early.append(Serving(expert, rows, kind, stale))
            return
        routed = self.unserved[expert] & rows
        self._close(expert, routed, kind)
        if routed != rows:
            self.substitutes.append(Serving(expert, rows ^ routed, SUBSTITUTED_STALE if stale else SUBSTITUTED, stale))
        self.open -= rows.bit_count()

    def _close(self, expert: int, rows: int, kind: int) -> None:
        self.unserved[expert] ^= rows
        if rows and kind != FRESH:
            self.inexact.append((kind, expert, rows))

    def serve_substitutes(self) -> tuple[int, int] | None:
        """Serve each unrouted row's next slot in rank order; return the first pair without a slot."""
        for expert, rows, kind, _ in self.substitutes:
            for row in rows_of(rows):
                routed = np.concatenate(self.experts)[row].tolist()
                replaced = next((e for e in routed if self.unserved[e] >> row & 1), None)
                if replaced is None:
                    return expert, row
                self._close(replaced, 1 << row, kind)
        self.substitutes.clear()
        return None


def gate_mass(weights: Sequence[Any]) -> float:
    """Sum the gate weights of all slots of some micro-batches; 0 if the trace has none."""
    return float(sum(w.sum(dtype=np.float64) for w in weights if w is not None))


def inexact_records(
    step: int, layer: int, experts: Sequence[Any], weights: Sequence[Any], inexact: Sequence[tuple[int, int, Sequence[int]]]
) -> list[InexactRecord]:
    """Count the services that were not fresh in a served visit: kind, expert and rows of each."""
    if not inexact:
        return []
    ids = np.concatenate(experts).tolist()
    top_k = len(ids[0])
    mass_of = None if weights[0] is None else np.concatenate(weights).astype(np.float64).ravel()
    found = []
    for kind, name in INEXACT.items():
        slots = sorted({
            row * top_k + rank
            for of_kind, expert, rows in inexact if of_kind == kind
            for row in rows
            for rank, routed in enumerate(ids[row]) if routed == expert
        })  # fmt: skip
        if slots:
            mass = None if mass_of is None else float(mass_of[slots].sum())
            found.append(InexactRecord(step, layer, name, len(slots), mass))
    return found
