"""The records of a run's first steps: what a timeline shows of a run that is too long for all of its records to be kept."""

from __future__ import annotations

from typing import Any, Final

from moesim.metrics.columns import joined
from moesim.records import KINDS, Records

LEAST_TASKS: Final = 200_000
"""Tasks up to which a run is short: it is kept as a whole."""


class FirstSteps:
    """Takes a run in pieces and keeps those of its first steps, so that memory does not grow with its length."""

    def __init__(self, n_steps: int) -> None:
        self._n_steps = n_steps
        self._pieces: list[Records] = []
        self._n_tasks = 0
        self._over = self._cut = False

    def add(self, records: Records, settled_ns: int) -> None:
        """Take the next records in, unless all that began before the end of the first steps is there."""
        if self._over:
            self._cut = True
            return
        tables: dict[str, Any] = {name: getattr(records, name).taken() for name in KINDS}
        self._pieces.append(Records(**tables, used_fetches=set(records.used_fetches)))
        self._n_tasks += len(records.tasks)
        ends = sorted(int(end) for piece in self._pieces for end in piece.steps.column("end"))
        self._over = len(ends) >= self._n_steps and ends[self._n_steps - 1] <= settled_ns and self._n_tasks >= LEAST_TASKS

    def of(self, run: Records) -> Records:
        """Give what was kept, with the end and the largest sizes of the run."""
        tables: dict[str, Any] = {
            name: joined(kind, [getattr(piece, name) for piece in self._pieces]) for name, kind in KINDS.items()
        }
        return Records(
            **tables, used_fetches=set().union(*(piece.used_fetches for piece in self._pieces)), peak_bytes=run.peak_bytes,
            pool_peak_bytes=run.pool_peak_bytes, makespan_ns=run.makespan_ns,
            first_steps=self._n_steps if self._cut else None,
        )  # fmt: skip
