"""The walk behind `moesim.metrics.breakdown`: from the end of a window back along what was waited for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moesim.metrics.activities import CROSSING, DECISION, IF_DECIDED, MODEL, Activities, Columns, Ended
from moesim.metrics.causes import CAUSES, INDEX
from moesim.metrics.columns import sums
from moesim.metrics.twins import twin
from moesim.records import Records

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
_IDLE: Final = INDEX["idle"]
_BEFORE: Final = -1  # index of what ended before everything, and when
_Test = Callable[[Ints, Ints], Flags]


class Window(NamedTuple):
    """A stretch of the run that is explained on its own."""

    begin: int  # ns
    end: int  # ns
    step: int  # -1 between two steps
    layer: int  # -1 outside the MoE layers


class Walk:
    """The walk over a run whose records come in pieces."""

    def __init__(self, kinds: Mapping[str, str], media: Mapping[str, str]) -> None:
        self._activities = Activities(kinds, media)

    def add(self, records: Records) -> None:
        """Take the next records in."""
        self._activities.add(records)

    def explain(self, windows: Ints) -> Ints:
        """Charge every nanosecond of the next windows, a row each, to the causes; and forget what ended in them."""
        if not windows.shape[1]:
            return np.zeros((0, len(CAUSES)), np.int64)
        return twin(charged)(*self._activities.take(int(windows[1, -1])), windows)


def charged(columns: Columns, order: Ints, places: Ints, windows: Ints) -> Ints:
    """Charge every nanosecond of windows to the causes, from what ended in them and before, in the order of the ends."""
    begin, end, step, layer = windows
    found = Ended(columns, order, places)
    index = _Ends(found.sorted("end"))

    def ends_window(i: Ints, b: Ints) -> Flags:
        """A layer ends with its own runs and outputs, whatever else happens to end then."""
        traits = found.of("traits", b)
        own = (traits & CROSSING != 0) | ((traits & MODEL != 0) & (found.of("step", b) == step[i]))
        flags: Flags = own & (found.of("layer", b) == layer[i])
        return flags

    def wants(a: Ints, instant: Ints) -> Flags:
        """Whether something particular was waited for."""
        wanted = found.of("wants", a)
        flags: Flags = wanted != 0
        if (wanted & IF_DECIDED).any():
            flags &= (wanted & IF_DECIDED == 0) | index.any_of(found.sorted("traits") & DECISION != 0)[instant]
        return flags

    starts = found.sorted("start")
    last = index.before(end, ends_window)
    before = index.before(starts, found.related, wants)
    ends = np.append(index.ends, _BEFORE)
    path, window = _follow(last, before, ends, begin)
    stop = np.maximum(starts[path], begin[window])
    shape = len(end), len(CAUSES)
    ns = sums(window * len(CAUSES) + found.of("cause", path), ends[path] - stop, len(end) * len(CAUSES)).reshape(shape)
    ns[:, _IDLE] += sums(window, stop - np.maximum(ends[before[path]], begin[window]), len(end))
    ns[:, _IDLE] += end - np.maximum(ends[last], begin)
    return ns


def _follow(last: Ints, before: Ints, ended: Ints, begin: Ints) -> tuple[Ints, Ints]:
    """List what lies on the ways back through all windows, and in which window: a step on each way at a time."""
    at, window = last, np.arange(len(begin))
    path, windows = [at[:0]], [at[:0]]
    while len(at):
        inside = ended[at] > begin[window]
        at, window = at[inside], window[inside]
        path.append(at)
        windows.append(window)
        at = before[at]
    return np.concatenate(path), np.concatenate(windows)


class _Ends:
    """An index of activities by the time at which they ended."""

    def __init__(self, ends: Ints) -> None:
        self.ends = ends
        new = np.ones(len(ends), bool)
        np.not_equal(ends[1:], ends[:-1], out=new[1:])
        first = np.flatnonzero(new)  # of each instant at which any ended
        self._instants = ends[first]
        self._first = np.append(first, _BEFORE)  # what is before the first instant has index -1, too
        self._until = np.append(first[1:], [len(ends), 0])
        self._several = self._until > self._first + 1

    def any_of(self, flags: Flags) -> Flags:
        """Say for each instant whether anything of a kind ended then."""
        found: Flags = np.logical_or.reduceat(flags, self._first[:-1])
        return found

    def before(self, times: Ints, test: _Test, asks: _Test | None = None) -> Ints:
        """Find what ended last and not after some times.

        Of several things that ended exactly then, it is the first that passes a test, or else the first of all; so it is where
        nothing ``asks`` for the test.
        """
        instant = np.searchsorted(self._instants, times, side="right") - 1
        found = self._first[instant]
        left = np.flatnonzero(self._several[instant])
        left = left[self._instants[instant[left]] == times[left]]
        if asks is not None:
            left = left[asks(left, instant[left])]
        candidate, until = found[left], self._until[instant[left]]
        while len(left):
            passed = test(left, candidate)
            found[left[passed]] = candidate[passed]
            goes_on = ~passed & (candidate + 1 < until)
            left, candidate, until = left[goes_on], candidate[goes_on] + 1, until[goes_on]
        return found
