"""Shares of the gate weight that were served as the model asked, and how they are printed."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from moesim.core.record_table import RecordTable
from moesim.metrics.columns import by_text, in_decode
from moesim.records import Records, StepRecord

_EXACT: Final = 1 - 1e-9  # sums of gate weights are rounded


def is_exact(share: float) -> bool:
    """Whether a share of gate weight is all of it."""
    return share >= _EXACT


def fresh_percent(share: float) -> float:
    """Return the share in per cent, rounded down to a decimal, so that only exact runs have 100.

    >>> fresh_percent(0.9567), fresh_percent(0.99999), fresh_percent(0.568), fresh_percent(1.0)
    (95.6, 99.9, 56.8, 100.0)
    """
    return 100.0 if is_exact(share) else math.floor(1000 * share + 1e-7) / 10  # 1000 * 0.568 is 567.99...


def fresh_cell(share: float) -> str:
    """Write the cell of a table under ``fresh %``; an asterisk marks what is not exact."""
    return "100" if is_exact(share) else f"{fresh_percent(share):.1f}*"


_INEXACT: Final = ("stale", "substituted", "substituted-stale", "skipped", "late", "reduced")


def fidelity(records: Records) -> dict[str, float | int | None]:
    """Return the shares of the routing that were served as the model asked.

    Parameters
    ----------
    records : Records
        Records of one run.

    Returns
    -------
    dict of str to float or None
        Shares of the gate mass, which add up to 1: ``fidelity_fresh``, ``_stale``, ``_substituted``,
        ``_substituted_stale``, ``_skipped``, ``_late`` and ``_reduced``; None if nothing was run, or if slots
        were inexact and the trace holds no weights. ``n_inexact_slots`` counts slots.
    """
    found = GateMass()
    found.add(records)
    return found.fidelity(records.steps)


def fidelity_fresh_decode(records: Records) -> float | None:
    """Return the fresh share of the gate mass of decode steps; None without any."""
    found = GateMass()
    found.add(records)
    return found.fresh_decode(records.steps)


class GateMass:
    """Gate mass of top-k places not served fresh at full width, in a run that comes in pieces."""

    def __init__(self) -> None:
        self._mass = np.zeros((2, len(_INEXACT)))  # of all steps, and of decode steps
        self._any = [False, False]
        self._n_slots = 0

    def add(self, records: Records) -> None:
        table = records.inexact
        if not len(table):
            return
        kind, mass = by_text(table.texts("kind"), _INEXACT.index), table.column("mass")
        decoded = np.isin(table.column("step"), records.steps.column("step")[in_decode(records.steps)])
        self._n_slots += int(table.column("slots").sum())
        for of, chosen in enumerate((np.ones(len(kind), bool), decoded)):
            self._any[of] |= bool(chosen.any())
            for number in range(len(_INEXACT)):
                # Without weights the mass of the steps is 0 as well, and no share can be told.
                more = mass[chosen & (kind == number) & ~np.isnan(mass)]
                self._mass[of, number] = np.add.accumulate(np.append(self._mass[of, number], more))[-1]  # one after the other

    def fidelity(self, steps: RecordTable[StepRecord]) -> dict[str, float | int | None]:
        return {**self._shares(0, steps.column("gate_mass").tolist()), "n_inexact_slots": self._n_slots}

    def fresh_decode(self, steps: RecordTable[StepRecord]) -> float | None:
        return self._shares(1, steps.column("gate_mass")[in_decode(steps)].tolist())["fidelity_fresh"]

    def _shares(self, of: int, masses: list[float]) -> dict[str, float | None]:
        whole = sum(masses)
        if masses and not self._any[of]:
            whole = 1.0  # all of it was fresh, so it does not matter how much; exact runs do not add it up
        mass = dict(zip(_INEXACT, self._mass[of].tolist(), strict=True))
        fresh = max(0.0, 1 - sum(mass.values()) / whole) if whole else None
        shares = {f"fidelity_{kind.replace('-', '_')}": m / whole if whole else None for kind, m in mass.items()}
        return {"fidelity_fresh": fresh, **shares}
