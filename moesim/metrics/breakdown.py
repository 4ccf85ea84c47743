"""Time by cause: why the run took as long as it did, in integer nanoseconds that add up to the makespan.

The run is cut into windows: one for each visit of a layer, and one for each gap around them (embedding
and leading layers before, the LM head after). In each window a walk goes backwards from its end. At
every moment it stands at the start of something and asks what that waited for: something that ended at
exactly this nanosecond. The time between is charged to the cause of what was waited for, clipped to the
window. `docs/reference/metrics.md` has the rules in full.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesim.core.record_table import RecordTable
from moesim.core.units import format_ns
from moesim.errors import SimulationError
from moesim.metrics.causes import CAUSES
from moesim.metrics.critical_path import Walk, Window
from moesim.records import Records

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Breakdown:
    """Time by cause of a run.

    Attributes
    ----------
    windows : sequence of Window
        Contiguous windows from 0 to the makespan.
    ns : ndarray of int64, shape (n_windows, n_causes), ns
        Time of each window by cause, columns as in `CAUSES`; each row adds up to the length of its window.
    """

    windows: RecordTable[Window]
    ns: NDArray[np.int64]

    def total(self) -> dict[str, int]:
        """Add up all windows.

        Returns
        -------
        dict of str to int, ns
            Time by cause; the values add up to the makespan.
        """
        return dict(zip(CAUSES, self.ns.sum(axis=0).tolist(), strict=True))

    def select(self, steps: Iterable[int]) -> dict[str, int]:
        """Add up the windows of some steps.

        Parameters
        ----------
        steps : iterable of int
            Numbers of the steps, for example all decode steps.

        Returns
        -------
        dict of str to int, ns
            Time by cause; the values add up to the time spent in these steps.
        """
        numbers = steps if isinstance(steps, np.ndarray) else np.array(list(steps), np.int64)
        chosen = np.isin(self.windows.column("step"), numbers)
        return dict(zip(CAUSES, self.ns[chosen].sum(axis=0).tolist(), strict=True))


class Cuts:
    """Cuts a run that comes in pieces into layer visits and the gaps around them."""

    def __init__(self) -> None:
        self._now = 0

    def add(self, records: Records) -> Ints:
        """Give the windows of the steps in the records: begin, end, step and layer."""
        steps = _columns(records.steps, "begin", "end", "step")
        steps = steps[:, np.lexsort(steps[::-1])]
        layers = _columns(records.layers, "begin", "end", "layer", "step")
        by_number = np.argsort(steps[2], kind="stable")
        place = np.append(by_number, -1)[np.searchsorted(steps[2, by_number], layers[3])]
        over = np.append(steps[2], -1)[place] == layers[3]
        if not over.all():  # a visit of no step
            layers, place = layers[:, over], place[over]
        if ((place[1:] < place[:-1]) | ((place[1:] == place[:-1]) & (layers[0, 1:] <= layers[0, :-1]))).any():
            order = np.lexsort((layers[2], layers[1], layers[0], place))
            layers, place = layers[:, order], place[order]
        # Each step has its begin, the begin and the end of each layer, and its end: instants up to which windows go.
        number, n_before = np.arange(len(steps[0])), np.searchsorted(place, np.arange(len(steps[0]) + 1))
        instants = np.full((3, 2 * (len(number) + len(place))), -1)
        instants[0, 2 * (number + n_before[:-1])] = steps[0]
        instants[:2, 2 * (number + n_before[1:]) + 1] = steps[1:]
        at = 2 * (np.arange(len(place)) + place) + 1
        instants[:2, at] = layers[0], layers[3]
        instants[:, at + 1] = layers[1], layers[3], layers[2]
        return self._until(instants)

    def rest(self, makespan_ns: int) -> Ints:
        """Give the window after the last step, if there is any."""
        return self._until(np.array([[makespan_ns], [-1], [-1]]))

    def _until(self, instants: Ints) -> Ints:
        to = instants[0]
        since = np.append(self._now, to)
        self._now = int(since[-1])
        since = since[:-1]
        if (to < since).any():
            now, (then, step, layer) = int(since[to < since][0]), instants[:, to < since][:, 0].tolist()
            raise SimulationError(
                f"step {step}, layer {layer}: expected windows in time order, got one that reaches back from "
                f"{format_ns(now)} to {format_ns(then)}; the records do not come from one run"
            )
        windows: Ints = np.concatenate((since[None], instants))[:, to > since]
        return windows


def _columns(table: RecordTable[Any], *names: str) -> Ints:
    return np.stack([table.column(name) for name in names])


def cut_windows(records: Records) -> RecordTable[Window]:
    """Cut the run into layer visits and the gaps around them."""
    cuts = Cuts()
    return _table(np.concatenate((cuts.add(records), cuts.rest(records.makespan_ns)), axis=1))


def _table(windows: Ints) -> RecordTable[Window]:
    found = RecordTable(Window)
    found.fill(dict(zip(Window._fields, windows, strict=True)))
    return found


class TimeByCause:
    """The breakdown of a run that comes in pieces."""

    def __init__(self, kinds: Mapping[str, str], media: Mapping[str, str] | None = None) -> None:
        self._walk = Walk(kinds, media or {})
        self._cuts = Cuts()
        self._windows: list[Ints] = []
        self._makespan_ns = 0

    def add(self, records: Records, settled_ns: int = 0) -> Breakdown:
        """Take the next records in, and explain the windows about which no later record can say more.

        No record of a later piece starts before ``settled_ns``; 0 explains none yet.
        """
        self._walk.add(records)
        self._windows.append(self._cuts.add(records))
        self._makespan_ns = records.makespan_ns
        return self._explain(settled_ns)

    def rest(self) -> Breakdown:
        """Explain the windows that are left, after the last records."""
        self._windows.append(self._cuts.rest(self._makespan_ns))
        return self._explain(None)

    def _explain(self, settled_ns: int | None) -> Breakdown:
        windows = np.concatenate(self._windows, axis=1)
        n = len(windows[1]) if settled_ns is None else int(np.searchsorted(windows[1], settled_ns))
        self._windows, windows = [windows[:, n:].copy()], windows[:, :n]
        ns = self._walk.explain(windows)
        charged, asked = int(ns.sum()), int((windows[1] - windows[0]).sum())
        assert charged == asked, f"charged {charged} ns of {asked} ns"
        return Breakdown(_table(windows), ns)


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
    O(n log n) in the number of records n, for one sort by end; what each activity waited for is found for all at once.

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
    time = TimeByCause(kinds, media)
    time.add(records)
    return time.rest()
