"""What copies that arrive on GPUs were good for: lookups that a prefetch served, and experts that ran without a demand fetch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from moesim.metrics.columns import by_text
from moesim.metrics.twins import twin
from moesim.records import Records

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
_NONE: Final = np.zeros((5, 0), np.int64)
_LAST: Final = np.iinfo(np.int64).max
_SPARSE: Final = 64  # times as many possible pairs as there are: sorting them takes less than marking them


def _gpus(kinds: Mapping[str, str]) -> dict[str, int]:
    return {name: number for number, name in enumerate(name for name, kind in kinds.items() if kind == "gpu")}


def _arrivals(records: Records, gpus: Mapping[str, int], cause: str, before: Ints) -> Ints:
    """Add to arrivals of copies of experts on GPUs: device, layer, expert and time of each, and whether it is of a cause."""
    table = records.transfers
    device = by_text(table.texts("link"), lambda link: gpus.get(link.partition("->")[2], -1))
    of_cause = by_text(table.texts("cause"), lambda name: int(name == cause))
    expert = table.column("expert")
    here = table.column("last") & (expert >= 0) & (device >= 0)
    return twin(longer)(before, here, device, table.column("layer"), expert, table.column("end"), of_cause)


def longer(rows: Ints, flags: Flags, *columns: Ints) -> Ints:
    """Put the flagged part of a column at the end of each row."""
    here = np.flatnonzero(flags)
    return np.concatenate((rows, np.stack([column[here] for column in columns])), axis=1)


def _numbers(*keys: Ints) -> tuple[NDArray[Any], ...]:
    """Give one number for each column of several arrays, the same for the same columns; a small type sorts fast."""
    sizes = [max(int(key[row].max(initial=0)) for key in keys) + 1 for row in range(len(keys[0]))]
    kind = np.uint16 if np.prod(sizes, dtype=float) <= np.iinfo(np.uint16).max else np.int64
    found = []
    for key in keys:
        number = key[0].astype(kind)
        for row, size in zip(key[1:], sizes[1:], strict=True):
            number = number * kind(size) + row.astype(kind)
        found.append(number)
    return tuple(found)


class PrefetchHits:
    """Counts lookups, of all and of decode steps, that hit a copy which a prefetch had brought since the one before."""

    def __init__(self, kinds: Mapping[str, str]) -> None:
        self._gpus = _gpus(kinds)
        self._brought = _NONE[:3]  # layer, expert and time of prefetches that arrived
        self._looked: list[tuple[Ints, ...]] = []  # layer, expert, time, and for each number whether the lookup counts
        self._n = np.zeros(2, np.int64)

    def add(self, records: Records, looked: tuple[Ints, ...], settled_ns: int) -> None:
        """Take the next arrivals and lookups in; no record of a later piece starts before ``settled_ns``."""
        arrived = _arrivals(records, self._gpus, "prefetch", _NONE)
        arrived = arrived[1:4, arrived[4] != 0]
        self._brought = np.concatenate((self._brought, arrived), axis=1)
        self._looked.append(looked)
        if settled_ns:
            self._settle(settled_ns)

    def totals(self) -> list[int]:
        """Give the numbers over the whole run."""
        self._settle(None)
        found: list[int] = self._n.tolist()
        return found

    def _settle(self, until: int | None) -> None:
        layer, expert, time, counts = (np.concatenate(parts, axis=-1) for parts in zip(*self._looked, strict=True))
        n = len(time) if until is None else int(np.searchsorted(time, until))
        self._looked = [(layer[n:], expert[n:], time[n:], counts[:, n:])]
        known = self._brought[2] < (np.inf if until is None else until)
        brought, later = self._brought[:, known], self._brought[:, ~known]
        if not brought.shape[1]:
            return
        of_lookup, of_copy = _numbers(np.stack((layer[:n], expert[:n])), brought[:2])
        # Of this expert, the first lookup that is not before the arrival: arriving at the instant of the lookup is in time.
        at = _next_of(of_lookup, of_copy, np.searchsorted(time[:n], brought[2]))
        found = at < n
        credited = np.zeros(n, bool)  # two GPUs may both have received a copy: a lookup counts once
        credited[at[found]] = True
        self._n += counts[:, :n][:, credited].sum(axis=1)
        self._brought = np.concatenate((_one_each(brought[:, ~found]), later), axis=1)


def _one_each(brought: Ints) -> Ints:
    """Keep one of the copies of an expert that wait for the same lookup."""
    return brought[:, np.unique(brought[:2], axis=1, return_index=True)[1]] if brought.shape[1] else brought


def ran_from_cache(records: Records, kinds: Mapping[str, str], looked: Ints, resident: Flags) -> Flags:
    """Say for lookups of a copy on a GPU whether a GPU then ran the expert in this layer visit without a new demand fetch.

    ``looked`` has step, layer, expert and time of each; the records have all Runs of their steps.
    """
    gpus, tasks = _gpus(kinds), records.tasks
    device = by_text(tasks.texts("device"), lambda name: gpus.get(name, -1))
    here = np.flatnonzero((tasks.column("expert") >= 0) & (device >= 0))
    runs = np.stack([tasks.column(name)[here] for name in ("step", "layer", "expert")])
    arrived = _arrivals(records, gpus, "demand", _NONE)
    arrived = arrived[:4, arrived[4] != 0]
    visits = runs, _in_steps(records, arrived), looked[:3]
    first = np.array([[min(int(one[0].min(initial=_LAST)) for one in visits)], [0], [0]])
    of_run, of_copy, of_lookup = _numbers(*(one - first for one in visits))
    # A Run of the visit is enough unless the expert was also fetched on demand in this step, which few of these were.
    found: Flags = resident & _among(of_run, of_lookup)
    unsure = np.flatnonzero(found & _among(of_copy, of_lookup))
    if not len(unsure):
        return found
    found[unsure] = False
    device, start = device[here], tasks.column("start")[here]
    for one in np.unique(device).tolist():
        mine, came = np.vstack((runs, start))[:, device == one], arrived[1:, arrived[0] == one]
        found[unsure] |= _ran_before(_sorted(mine, 3), _sorted(came, 2), looked[:, unsure])
    return found


def _in_steps(records: Records, arrived: Ints) -> Ints:
    """Give the step in which each copy arrived, its layer and its expert."""
    begin, step = (records.steps.column(name) for name in ("begin", "step"))
    order = np.argsort(begin, kind="stable")
    at = np.searchsorted(begin[order], arrived[3], side="right") - 1
    during = at >= 0
    return np.stack((step[order][at[during]], arrived[1, during], arrived[2, during]))


def _ran_before(runs: Ints, came: Ints, looked: Ints) -> Flags:
    """Say in which visits the first Run of the expert on a device begins before a copy comes, which it would read."""
    of_run, of_lookup = _numbers(runs[:3], looked[:3])
    run = _next_of(of_run, of_lookup, np.zeros_like(of_lookup, np.int64))
    found: Flags = run < len(of_run)
    if came.shape[1]:
        of_copy, of_lookup = _numbers(came[:2], looked[1:3])
        copy = _next_of(of_copy, of_lookup, np.searchsorted(came[2], looked[3], side="right"))
        found &= (copy == len(of_copy)) | (np.append(came[2], 0)[copy] > np.append(runs[3], 0)[run])
    return found


def _among(numbers: NDArray[Any], wanted: NDArray[Any]) -> Flags:
    """Say which of the wanted numbers are among others."""
    n = 1 + max(int(numbers.max(initial=0)), int(wanted.max(initial=0)))
    if n > _SPARSE * (len(numbers) + len(wanted)):
        return np.isin(wanted, numbers)
    there = np.zeros(n, bool)
    there[numbers] = True
    found: Flags = there[wanted]
    return found


class DemandFree:
    """Counts the experts that GPUs run in a layer visit, and those that needed no demand fetch for it."""

    def __init__(self, kinds: Mapping[str, str]) -> None:
        self._gpus = _gpus(kinds)
        self._arrived = _NONE  # device, layer, expert and time of arrivals, and whether a demand fetch brought them
        self._runs = _NONE  # device, layer, expert and begin of Runs, and the step
        self._n_visits = self._n_demanded = 0

    def add(self, records: Records, settled_ns: int) -> None:
        """Take the next arrivals and Runs in; no record of a later piece starts before ``settled_ns``."""
        tasks = records.tasks
        device = by_text(tasks.texts("device"), lambda name: self._gpus.get(name, -1))
        columns = [tasks.column(name) for name in ("layer", "expert", "start", "step")]
        self._runs = twin(longer)(self._runs, (columns[1] >= 0) & (device >= 0), device, *columns)
        self._arrived = _arrivals(records, self._gpus, "demand", self._arrived)
        if settled_ns:
            self._settle(settled_ns)

    def share(self) -> float | None:
        """Give the share of visits without a demand fetch; None if no GPU runs any."""
        self._settle(None)
        return 1 - self._n_demanded / self._n_visits if self._n_visits else None

    def _settle(self, until: int | None) -> None:
        n_visits, n_demanded, self._arrived, self._runs = twin(settle)(self._arrived, self._runs, until)
        self._n_visits += n_visits
        self._n_demanded += n_demanded


def settle(arrived: Ints, runs: Ints, until: int | None) -> tuple[int, int, Ints, Ints]:
    """Count the visits of all steps whose Runs are known, and those that were on demand; give arrivals and Runs to be kept.

    A step ends with its Runs, and its piece has all of them: so no Run begins before ``until`` that is not there.
    """
    kept, later = runs[:, :0], arrived[:, :0]
    if until is not None:
        open_steps = runs[4, runs[3] >= until]
        if len(open_steps):
            goes_on = runs[4] >= open_steps.min()
            kept, runs = runs[:, goes_on], runs[:, ~goes_on]
        unknown = arrived[3] >= min(until, kept[3].min(initial=until))
        if unknown.any():
            later, arrived = arrived[:, unknown], arrived[:, ~unknown]
    runs = _sorted(runs, 3)
    arrived = _sorted(arrived, 3)
    since = np.searchsorted(runs[3], arrived[3])  # an arrival is before a Run of the same instant
    of_arrival, of_run = _numbers(arrived[:3], runs[:3])
    order = np.argsort(of_arrival, kind="stable")
    arrived, of_arrival = arrived[:, order], of_arrival[order]
    at = _next_of(of_run, of_arrival, since[order])
    # The first Run after an arrival uses it, and of several arrivals the last.
    last = np.ones(len(at), bool)
    last[:-1] = (of_arrival[1:] != of_arrival[:-1]) | (at[1:] != at[:-1])
    demanded = last & (arrived[4] != 0)
    used = at[demanded & (at < len(of_run))]
    waiting = np.concatenate((arrived[:, demanded & (at == len(of_run))], later), axis=1)
    return _n_different(of_run, runs[4]), _n_different(of_run[used], runs[4, used]), waiting, kept


def _sorted(columns: Ints, row: int) -> Ints:
    """Put columns in the order of a row, which they mostly are in."""
    if (columns[row, 1:] < columns[row, :-1]).any():
        columns = columns[:, np.argsort(columns[row], kind="stable")]
    return columns


def _next_of(numbers: NDArray[Any], wanted: NDArray[Any], since: Ints) -> Ints:
    """Find where each wanted number next occurs among others, from a place on; their length if it does not."""
    n = len(numbers)
    order = np.argsort(numbers, kind="stable")
    keys = numbers[order].astype(np.int64) * (n + 1) + order
    at = np.append(order, n)[np.searchsorted(keys, wanted.astype(np.int64) * (n + 1) + since)]
    found: Ints = np.where(np.append(numbers, 0)[at] == wanted, at, n)
    return found


def _n_different(numbers: NDArray[Any], steps: Ints) -> int:
    """Count different pairs."""
    if not len(numbers):
        return 0
    first, size = int(steps.min()), int(numbers.max()) + 1
    keys, n_keys = (steps - first) * size + numbers, (int(steps.max()) - first + 1) * size
    if n_keys > _SPARSE * len(keys):
        return len(np.unique(keys))
    there = np.zeros(n_keys, bool)
    there[keys] = True
    return int(np.count_nonzero(there))
