"""The present visit of a layer: which slots are served, and what is still under way (rule 3, serving).

Rows of a step are kept as bits of an integer: bit r is row r.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from moesim.records import InexactRecord

FRESH, STALE, SUBSTITUTED, SUBSTITUTED_STALE, SKIPPED, LATE, REDUCED = range(1, 8)
INEXACT = {
    STALE: "stale",
    SUBSTITUTED: "substituted",
    SUBSTITUTED_STALE: "substituted-stale",
    SKIPPED: "skipped",
    LATE: "late",
    REDUCED: "reduced",
}


def bits_of(rows: Iterable[int]) -> int:
    """Rows as bits."""
    return sum(1 << row for row in rows)


def rows_of(bits: int) -> list[int]:
    """Rows that bits stand for, ascending."""
    return [row for row in range(bits.bit_length()) if bits >> row & 1]


def _by_expert(experts: Any, rows: Sequence[int], active: Sequence[int]) -> list[int]:
    """Bits of the rows routed to each expert, from the (n, top_k) ids of one micro-batch."""
    bits = list(rows)
    if len(experts) > 1:
        table = np.zeros((len(rows), len(experts)), dtype=bool)
        table[experts.T, np.arange(len(experts))] = True
        packed = np.packbits(table, axis=1, bitorder="little")
        for expert in active:
            bits[expert] = int.from_bytes(packed[expert].tobytes(), "little")
    return bits


class Early(NamedTuple):
    """Rows of a Run that was issued before its layer was routed; served at Routed."""

    expert: int
    rows: int
    kind: int  # of the slots that are routed to the expert
    stale: bool


@dataclass(slots=True, eq=False)
class Visit:
    """One visit of a layer."""

    step: int
    layer: int
    base: int  # unit of its expert 0
    k: int
    mbs_left: int  # micro-batches not yet routed
    begin: int = -1  # not begun: only early Runs refer to it
    routed_rows: int = 0  # rows of the micro-batches routed so far
    unserved: list[int] = field(default_factory=list)  # of each expert, the rows routed to it that no Run has taken
    experts: tuple[Any, ...] = ()  # per micro-batch (n, k)
    weights: tuple[Any, ...] = ()
    early: Sequence[Early] = ()
    open: int = 0
    substitutes: Sequence[Early] = ()  # Runs for rows that were not routed to their expert: served last
    inexact: Sequence[tuple[int, int, int]] = ()  # kind, expert whose slots were served that way, rows

    def __post_init__(self) -> None:
        # What keeps the layer open: micro-batches to route, slots to serve, tasks and crossings to end. Changed here only.
        self.open = self.mbs_left

    def hold(self) -> None:
        """Keep the layer open for one more thing: a task, a crossing or a decision."""
        self.open += 1

    def let_go(self) -> None:
        """Take note that one of these has ended."""
        self.open -= 1

    def route(self, experts: Any, weights: Any, rows: Sequence[int], active: Sequence[int]) -> None:
        """Take in one micro-batch's routing."""
        self.mbs_left -= 1
        self.open += len(experts) * self.k - 1
        bits = _by_expert(experts, rows, active)
        if self.unserved:
            first = self.routed_rows
            bits = [before | more << first for before, more in zip(self.unserved, bits, strict=True)]
        self.unserved = bits
        self.experts += (experts,)
        self.weights += (weights,)
        self.routed_rows += len(experts)

    def take(self, expert: int) -> int:
        """Serve all rows routed to an expert that no Run has taken, hold the layer open for their task, and return them."""
        rows = self.unserved[expert]
        self.unserved[expert] = 0
        self.open += 1 - rows.bit_count()
        return rows

    def serve(self, expert: int, rows: int, kind: int, stale: bool) -> None:
        """Serve the slots of `expert` for `rows`; rows not routed to it wait for `serve_substitutes`."""
        routed = self.unserved[expert] & rows
        self._close(expert, routed, kind)
        if routed != rows:
            self.substitutes = (
                *self.substitutes,
                Early(expert, rows ^ routed, SUBSTITUTED_STALE if stale else SUBSTITUTED, stale),
            )
        self.open -= rows.bit_count()

    def _close(self, expert: int, rows: int, kind: int) -> None:
        self.unserved[expert] ^= rows
        if rows and kind != FRESH:
            self.inexact = (*self.inexact, (kind, expert, rows))

    def serve_early(self) -> None:
        """Serve the Runs that were issued before the layer was routed, where they match."""
        for early in self.early:
            self.serve(*early)
        self.early = ()

    def serve_substitutes(self) -> tuple[int, int] | None:
        """Give each Run of an expert that was not routed for a row that row's next unserved slot, in rank order.

        Returns the expert and the row of the first for which no slot is left.
        """
        table = np.concatenate(self.experts) if self.substitutes else None
        for expert, rows, kind, _ in self.substitutes:
            for row in rows_of(rows):
                assert table is not None
                replaced = next((e for e in table[row].tolist() if self.unserved[e] >> row & 1), None)
                if replaced is None:
                    return expert, row
                self._close(replaced, 1 << row, kind)
        self.substitutes = ()
        return None


def gate_mass(weights: Sequence[Any]) -> float:
    """Sum the gate weights of all slots of some micro-batches; 0 if the trace has none."""
    return float(sum(w.sum(dtype=np.float64) for w in weights if w is not None))


def inexact_records(
    step: int, layer: int, experts: Sequence[Any], weights: Sequence[Any], inexact: Sequence[tuple[int, int, Sequence[int]]]
) -> list[InexactRecord]:
    """Count what was not fresh in a visit whose slots are all served: kind, expert and rows of each such service."""
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
