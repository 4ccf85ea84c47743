"""The present visit of a layer: which slots are served, and what is still under way (rule 3, serving)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from moesim.errors import PolicyError
from moesim.records import InexactRecord

FRESH, STALE, SUBSTITUTED, SUBSTITUTED_STALE, SKIPPED = 1, 2, 3, 4, 5
KINDS = {
    STALE: "stale",
    SUBSTITUTED: "substituted",
    SUBSTITUTED_STALE: "substituted-stale",
    SKIPPED: "skipped",
}


class Early(NamedTuple):
    """Rows of a Run that was issued before its layer was routed; served at Routed."""

    expert: int
    rows: Sequence[int]
    stale: bool


@dataclass(slots=True, eq=False)
class Visit:
    """One visit of a layer.

    The usual case, each expert run once for all rows routed to it, needs only `pending` (rows nobody has taken yet) and
    `open`. Runs of chosen rows, substitutions, stale inputs and skips go through a table of slots, `slots`, which is
    made when the first of them occurs.
    """

    step: int
    layer: int
    base: int  # unit of its expert 0
    k: int
    mbs_left: int  # micro-batches not yet routed
    begin: int = -1  # not begun: only early Runs refer to it
    routed_rows: int = 0  # rows of the micro-batches routed so far
    pending: Any = ()  # rows per expert that no Run has taken; a list of int once routed
    experts: tuple[Any, ...] = ()  # per micro-batch (n, k)
    weights: tuple[Any, ...] = ()
    early: Sequence[Early] = ()
    slots: Any = None  # one number a top-k slot, 0 if it is open; made when it is needed
    open: int = 0
    _taken: Mapping[int, int] | None = None  # expert -> rows, from row 0, of which a Run has taken all that were routed to it
    _substitutes: Sequence[tuple[int, int, bool]] = ()  # (expert, row, stale) to serve last

    def __post_init__(self) -> None:
        # What keeps the layer open: micro-batches to route, slots to serve, tasks and crossings to end. Changed here only.
        self.open = self.mbs_left

    def hold(self) -> None:
        """Keep the layer open for one more thing: a task, a crossing or a decision."""
        self.open += 1

    def let_go(self) -> None:
        """Take note that one of these has ended."""
        self.open -= 1

    def route(self, experts: Any, weights: Any, rows: Sequence[int], n_rows: int) -> None:
        """Take in one micro-batch's routing."""
        self.mbs_left -= 1
        self.open += n_rows * self.k - 1
        self.pending = [a + b for a, b in zip(self.pending, rows, strict=True)] if self.pending else list(rows)
        self.experts += (experts,)
        self.weights += (weights,)
        self.routed_rows += n_rows
        if self.slots is not None:
            self.slots = np.concatenate((self.slots, np.zeros((n_rows, self.k), dtype=np.uint8)))

    def take(self, expert: int) -> None:
        """Serve all rows routed to an expert that no Run has taken, and hold the layer open for the task that computes them."""
        self.open += 1 - self.pending[expert]
        self.pending[expert] = 0

    def add_early(self, early: Early) -> None:
        """Keep rows of a Run that was issued before the layer is routed."""
        self.early = (*self.early, early)

    # ------------------------------------------------------------------------------------------------ the general case
    def _table(self) -> Any:
        return np.concatenate(self.experts)

    def _make_slots(self) -> None:
        if self.slots is None:
            table = self._table()
            taken = [e for e in np.unique(table).tolist() if not self.pending[e]]
            self.slots = np.where(np.isin(table, taken), FRESH, 0).astype(np.uint8)
            for expert, end in (self._taken or {}).items():
                self.slots[:end][table[:end] == expert] = FRESH

    def note_taken(self, expert: int) -> None:
        """Remember that a Run takes all rows routed to an expert so far, where `pending` cannot tell."""
        self._taken = {**(self._taken or {}), expert: self.routed_rows}
        if self.slots is not None:
            self.slots[(self._table() == expert) & (self.slots == 0)] = FRESH

    def rows_of(self, expert: int) -> list[int]:
        """Rows routed to an expert that no Run has taken, ascending."""
        mask = self._table() == expert
        if self.slots is not None:
            mask &= self.slots == 0
        else:
            mask[: (self._taken or {}).get(expert, 0)] = False
        return [int(r) for r in mask.any(axis=1).nonzero()[0]]

    def serve(self, expert: int, rows: Sequence[int], kind_if_routed: int, stale: bool) -> None:
        """Serve the slots of `expert` for `rows`; rows not routed to it wait for `serve_substitutes`."""
        self._make_slots()
        table = self._table()
        for row in rows:
            places = ((table[row] == expert) & (self.slots[row] == 0)).nonzero()[0]
            if len(places):
                self.slots[row, places[0]] = kind_if_routed
                self.pending[expert] -= 1
            else:
                self._substitutes = (*self._substitutes, (expert, row, stale))
            self.open -= 1

    def serve_early(self) -> None:
        """Serve the Runs that were issued before the layer was routed, where they match."""
        for early in self.early:
            self.serve(early.expert, early.rows, STALE if early.stale else FRESH, early.stale)
        self.early = ()

    def gate_mass(self) -> float:
        """Sum of the gate weights of all slots; 0 if the trace has none."""
        return float(sum(w.sum(dtype=np.float64) for w in self.weights if w is not None))

    def serve_substitutes(self, where: str, who: str) -> None:
        """Give each Run of an expert that was not routed for a row that row's next unserved slot, in rank order."""
        table = self._table() if self._substitutes else None
        for expert, row, stale in self._substitutes:
            places = (self.slots[row] == 0).nonzero()[0]
            if not len(places):
                raise PolicyError(
                    f"{where}: Run(E{expert}) for row {row}: every slot of that row is served already; "
                    f"leave the row out, or Run fewer experts for it {who}"
                )
            self.slots[row, places[0]] = SUBSTITUTED_STALE if stale else SUBSTITUTED
            assert table is not None
            self.pending[int(table[row, places[0]])] -= 1
        self._substitutes = ()

    def inexact_records(self) -> list[InexactRecord]:
        """What was not fresh, once every slot is served."""
        if self.slots is None:
            return []
        weights = None if self.weights[0] is None else np.concatenate(self.weights).astype(np.float64)
        found = []
        for kind, name in KINDS.items():
            mask = self.slots == kind
            slots = int(mask.sum())
            if slots:
                mass = None if weights is None else float(weights[mask].sum())
                found.append(InexactRecord(self.step, self.layer, name, slots, mass))
        return found
