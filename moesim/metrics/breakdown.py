"""Time by cause: why the run took as long as it did, in integer nanoseconds that add up to the makespan.

The run is cut into windows: one for each visit of a layer, and one for each gap around them (embedding
and leading layers before, the LM head after). In each window a walk goes backwards from its end. At
every moment it stands at the start of something and asks what that waited for: something that ended at
exactly this nanosecond. The time between is charged to the cause of what was waited for, clipped to the
window. `docs/reference/metrics.md` has the rules in full.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moesim.core.units import format_ns
from moesim.errors import SimulationError
from moesim.metrics.causes import CAUSES
from moesim.metrics.critical_path import Walk, Window
from moesim.records import Records


@dataclass(frozen=True)
class Breakdown:
    """Time by cause of a run.

    Attributes
    ----------
    windows : list of Window
        Contiguous windows from 0 to the makespan.
    ns : ndarray of int64, shape (n_windows, n_causes), ns
        Time of each window by cause, columns as in `CAUSES`; each row adds up to the length of its window.
    """

    windows: list[Window]
    ns: NDArray[np.int64]

    def total(self) -> dict[str, int]:
        """Add up all windows.

        Returns
        -------
        dict of str to int, ns
            Time by cause; the values add up to the makespan.
        """
        return dict(zip(CAUSES, self.ns.sum(axis=0).tolist(), strict=True))

    def select(self, steps: set[int]) -> dict[str, int]:
        """Add up the windows of some steps.

        Parameters
        ----------
        steps : set of int
            Numbers of the steps, for example all decode steps.

        Returns
        -------
        dict of str to int, ns
            Time by cause; the values add up to the time spent in these steps.
        """
        rows = [i for i, window in enumerate(self.windows) if window.step in steps]
        return dict(zip(CAUSES, self.ns[rows].sum(axis=0).tolist(), strict=True))


def cut_windows(records: Records) -> list[Window]:
    """Cut the run into layer visits and the gaps around them."""
    layers: dict[int, list[tuple[int, int, int]]] = {}
    for layer in records.layers:
        layers.setdefault(layer.step, []).append((layer.begin, layer.end, layer.layer))
    windows: list[Window] = []
    now = 0

    def advance(to: int, step: int, layer: int) -> None:
        nonlocal now
        if to < now:
            raise SimulationError(
                f"step {step}, layer {layer}: expected windows in time order, got one that reaches back from "
                f"{format_ns(now)} to {format_ns(to)}; the records do not come from one run"
            )
        if to > now:
            windows.append(Window(now, to, step, layer))
            now = to

    for step in sorted(records.steps):
        advance(step.begin, -1, -1)
        for begin, end, number in sorted(layers.get(step.step, ())):
            advance(begin, step.step, -1)
            advance(end, step.step, number)
        advance(step.end, step.step, -1)
    advance(records.makespan_ns, -1, -1)
    return windows


def breakdown(records: Records, kinds: Mapping[str, str], media: Mapping[str, str] | None = None) -> Breakdown:
    """Split the makespan of a run by what was waited for.

    Parameters
    ----------
    records : Records
        Records of one run.
    kinds : mapping of str to str
        Kind of each device, ``"gpu"`` or ``"cpu"``.
    media : mapping of str to str, optional
        Medium of each link that shares one with others.

    Returns
    -------
    Breakdown
        Windows with their time by cause; all times together are exactly the makespan.

    Raises
    ------
    SimulationError
        If steps or layers overlap.

    Notes
    -----
    O(n log n) in the number of records n, for one sort; every lookup in the walk is by end time in a dict.

    Examples
    --------
    A layer whose dense part takes 10 ns, after which an expert of 5 ns waits 20 ns for its demand fetch:

    >>> from moesim.records import LayerRecord, StepRecord, TaskRecord, TransferRecord
    >>> run = Records(makespan_ns=35)
    >>> run.steps.append(StepRecord(0, 35, 0, "decode", 0, 1, 1, 1.0))
    >>> run.layers.append(LayerRecord(0, 35, 0, 0))
    >>> run.tasks.append(TaskRecord(0, 10, "gpu0", "main", "dense", 0, 0, 0, -1, 1, 10, 0, 0))
    >>> run.tasks.append(TaskRecord(30, 35, "gpu0", "main", "expert", 0, 0, 0, 7, 1, 5, 10, 30))
    >>> run.transfers.append(
    ...     TransferRecord(10, 30, "cpu0->gpu0", "demand", 0, 7, 100, 0, 10, 0, True, False))
    >>> split = breakdown(run, {"gpu0": "gpu", "cpu0": "cpu"})
    >>> {cause: ns for cause, ns in split.total().items() if ns}
    {'dense': 10, 'gpu_experts': 5, 'exposed_demand': 20}
    """
    windows = cut_windows(records)
    walk = Walk(records, kinds, media or {})
    rows = [walk.explain(window) for window in windows]
    result = Breakdown(windows, np.array(rows, dtype=np.int64).reshape(-1, len(CAUSES)))
    charged = int(result.ns.sum())
    assert charged == records.makespan_ns, f"charged {charged} ns of {records.makespan_ns} ns"
    return result
