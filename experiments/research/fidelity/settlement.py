"""What became of each slot when a layer executed something else than was routed, and the gate mass of it.

The rule is the engine's (`moesim.engine.visit.Visit`) for all rows at once, and the shares are
`moesim.metrics.fidelity` of the same records, so that the figure is the one that a simulation prints.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moesim.engine.visit import FRESH, INEXACT, SKIPPED, STALE, SUBSTITUTED, SUBSTITUTED_STALE
from moesim.metrics import fidelity
from moesim.records import InexactRecord, Records, StepRecord


def settle(routed: Tensor, executed: Tensor, stale: Tensor, skipped: Tensor) -> Tensor:
    """Settle the slots of some rows.

    Parameters
    ----------
    routed : Tensor of int64, (n_rows, top_k)
        What the router chose, in rank order.
    executed : Tensor of int64, (n_rows, n_executed)
        What was executed, the best-scored first; no expert twice in a row.
    stale : Tensor of bool, (n_rows, n_executed)
        Executed on an earlier layer's state.
    skipped : Tensor of bool, (n_rows, n_executed)
        Not executed after all, on purpose.

    Returns
    -------
    Tensor of uint8, (n_rows, top_k)
        The engine's codes: ``FRESH``, ``STALE``, ``SUBSTITUTED``, ``SUBSTITUTED_STALE``, ``SKIPPED``. An expert
        that was routed settles its own slot; of the others those that started before the layer was routed
        (stale) come first, and each takes the row's next open slot in rank order.
    """
    same = routed.unsqueeze(2) == executed.unsqueeze(1)  # (n_rows, top_k, n_executed)
    how = torch.where(skipped, SKIPPED, torch.where(stale, STALE, FRESH))
    slots = (same * how.unsqueeze(1)).sum(dim=2).to(torch.uint8)
    strangers = ~same.any(dim=1) & ~skipped
    for early, kind in ((True, SUBSTITUTED_STALE), (False, SUBSTITUTED)):
        wanted = (strangers & (stale == early)).sum(dim=1, keepdim=True)
        is_open = slots == 0
        slots[is_open & (is_open.cumsum(dim=1) <= wanted)] = kind
    return slots


class Ledger:
    """Adds up the gate mass by kind over layers and windows.

    Attributes
    ----------
    late_mass : float
        Of the fresh slots, the mass whose outputs arrive a layer late, for which the simulator has no kind.
    """

    def __init__(self) -> None:
        self.late_mass = 0.0
        self._whole = 0.0
        self._mass = dict.fromkeys(INEXACT, 0.0)
        self._slots = dict.fromkeys(INEXACT, 0)

    def add(self, weights: Tensor, slots: Tensor, late: Tensor) -> None:
        """Add a layer's rows: gate weights, kinds and lateness of the slots, each (n_rows, top_k)."""
        masses = weights.double()
        self._whole += float(masses.sum())
        self.late_mass += float(masses[late].sum())
        for kind in INEXACT:
            here = slots == kind
            self._mass[kind] += float(masses[here].sum())
            self._slots[kind] += int(here.sum())

    def shares(self) -> dict[str, float | int | None]:
        """Return the shares as `moesim.metrics.fidelity` computes them, and ``deferred``, the share that came late."""
        run = Records()
        run.steps.append(StepRecord(0, 0, 0, "decode", 0, 0, 0, self._whole))
        run.inexact.extend(
            InexactRecord(0, 0, name, self._slots[k], self._mass[k]) for k, name in INEXACT.items() if self._slots[k]
        )
        shares = fidelity(run)
        shares["deferred"] = self.late_mass / self._whole if self._whole else None
        return shares

    @classmethod
    def merged(cls, parts: Sequence[Ledger]) -> Ledger:
        """Add up several."""
        both = cls()
        for part in parts:
            both.late_mass += part.late_mass
            both._whole += part._whole
            for kind in INEXACT:
                both._mass[kind] += part._mass[kind]
                both._slots[kind] += part._slots[kind]
        return both
