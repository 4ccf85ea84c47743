"""Which rows of a trace its statistics look at: one phase, whole requests."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.errors import TraceError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moesim.trace import Trace

PHASES = {"prefill": 0, "decode": 1}


@dataclass(frozen=True, eq=False)
class Sample:
    """Rows of one phase of a trace, request after request in token order."""

    trace: Trace  # where they come from
    phase: str  # `"prefill"` or `"decode"`
    rows: NDArray[np.int64]  # their numbers in the trace, ascending
    request: NDArray[Any]  # request of each
    experts: NDArray[Any]  # expert ids in rank order
    sampled: bool  # whether the phase has more rows than these

    @cached_property
    def n_requests(self) -> int:
        """Requests that have rows here."""
        return len(np.unique(self.request))


def phase_rows(trace: Trace, phase: str) -> NDArray[np.int64]:
    """Give the numbers of the rows of a phase."""
    return np.flatnonzero(np.asarray(trace.phase) == PHASES[phase]).astype(np.int64)


def main_phase(trace: Trace) -> str:
    """Choose the phase to describe where none was asked for: decode, unless the trace has none."""
    return "decode" if len(phase_rows(trace, "decode")) else "prefill"


def select(trace: Trace, phase: str, max_rows: int | None = None) -> Sample:
    """Take the rows of a phase."""
    if phase not in PHASES:
        raise TraceError(f"trace statistics: expected phase 'prefill' or 'decode', got {phase!r}")
    rows = phase_rows(trace, phase)
    if not len(rows):
        raise TraceError(f"trace statistics: the trace holds no {phase} rows; choose the other phase")
    request = np.asarray(trace.request)[rows]
    sampled = False
    if max_rows is not None and max_rows < len(rows):
        last = int(np.searchsorted(request, request[max_rows - 1], side="right"))
        sampled = last < len(rows)
        rows, request = rows[:last], request[:last]
    return Sample(trace, phase, rows, request, np.asarray(trace.experts)[rows], sampled)


def spans(request: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Find where each request lies among rows that are in the order of requests."""
    _, first, length = np.unique(request, return_index=True, return_counts=True)
    return first.astype(np.int64), length.astype(np.int64)
