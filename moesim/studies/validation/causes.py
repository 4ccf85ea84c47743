"""The time of an execution by cause, with idle time cut in two."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from moesim.metrics.causes import CAUSES
from moesim.metrics.chain import WAITING, Chain, Record
from moesim.metrics.machine import Machine
from moesim.metrics.utilisation import common_ns, length, union
from moesim.records import Records

GAP: Final = "gap"
RESIDUALS: Final = (*(cause for cause in CAUSES if cause != "idle"), WAITING, GAP)
"""Causes of a residual: those of `moesim.metrics.causes`, with idle time cut in two.

``gap``: no lane and no link was busy, and nobody decided: the cost of passing work on. ``waiting``: nothing that was needed was
under way, but something else was.
"""


def time_by_cause(records: Records, machine: Machine, steps: Collection[int]) -> dict[str, int]:
    """Split the time of some steps by cause."""
    charged = Chain(records, machine.kinds, machine.media).split(steps)
    found = {cause: charged.get(cause, 0) for cause in RESIDUALS}
    everything: list[Record] = [*records.tasks, *records.transfers, *records.activations, *records.decisions]
    until = max([records.makespan_ns, *(r.end for r in everything)])
    occupied = union(((r.start, r.end) for r in everything), until)
    asked = union(((s.begin, s.end) for s in records.steps if s.step in steps), until)
    # Where nothing was busy, the walk can have charged nothing but waiting: so this never exceeds it.
    found[GAP] = length(asked) - common_ns(asked, occupied)
    found[WAITING] -= found[GAP]
    assert sum(found.values()) == length(asked)
    return found
