"""Hit rates by several conventions, prefetch hits, and Runs without a demand fetch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from moesim.core.record_table import RecordTable
from moesim.metrics.columns import by_text, in_decode
from moesim.records import Records, StepRecord

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
_NONE: Final = np.zeros((5, 0), np.int64)
_DENSE: Final = 2**26  # flags of a table; a piece of a run has a hundredth of them
_LAST: Final = np.iinfo(np.int64).max


def _gpus(kinds: Mapping[str, str]) -> dict[str, int]:
    return {name: number for number, name in enumerate(name for name, kind in kinds.items() if kind == "gpu")}


def _arrivals(records: Records, gpus: Mapping[str, int], cause: str, before: Ints) -> Ints:
    """Add arrivals of copies on GPUs: device, layer, expert, time, and whether of a cause."""
    table = records.transfers
    device = by_text(table.texts("link"), lambda link: gpus.get(link.partition("->")[2], -1))
    of_cause = by_text(table.texts("cause"), lambda name: int(name == cause))
    expert = table.column("expert")
    here = table.column("last") & (expert >= 0) & (device >= 0)
    return _longer(before, here, device, table.column("layer"), expert, table.column("end"), of_cause)


def _longer(rows: Ints, flags: Flags, *columns: Ints) -> Ints:
    here = np.flatnonzero(flags)
    return np.concatenate((rows, np.stack([column[here] for column in columns])), axis=1)


def _numbers(*keys: Ints) -> tuple[Ints, ...]:
    """Return one number for each column of several arrays, the same for the same columns."""
    sizes = np.max([key.max(axis=1, initial=0) for key in keys], axis=0) + 1

    def number(key: Ints) -> Ints:
        found: Ints = key[0]
        for row, size in zip(key[1:], sizes[1:], strict=True):
            found = found * size + row
        return found

    return tuple(map(number, keys))


def _among(numbers: Ints, others: Ints) -> Flags:
    """Return which numbers, of at least 0, are among others: by a flag for each there can be, several times as fast as a sort."""
    n = int(max(numbers.max(initial=0), others.max(initial=0))) + 1
    if n > _DENSE:
        return np.isin(numbers, others)
    flags = np.zeros(n, bool)
    flags[others] = True
    found: Flags = flags[numbers]
    return found


class PrefetchHits:
    """Counts lookups that hit a copy which a prefetch had brought since the one before."""

    def __init__(self, kinds: Mapping[str, str]) -> None:
        self._gpus = _gpus(kinds)
        self._brought = _NONE[:3]  # layer, expert and time of prefetches that arrived
        self._looked: list[tuple[Ints, ...]] = []  # layer, expert, time, and for each number whether the lookup counts
        self._n = np.zeros(2, np.int64)

    def add(self, records: Records, looked: tuple[Ints, ...], settled_ns: int) -> None:
        arrived = _arrivals(records, self._gpus, "prefetch", _NONE)
        arrived = arrived[1:4, arrived[4] != 0]
        self._brought = np.concatenate((self._brought, arrived), axis=1)
        self._looked.append(looked)
        if settled_ns:
            self._settle(settled_ns)

    def totals(self) -> list[int]:
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
        at = _next_of(of_lookup, of_copy, np.searchsorted(time, brought[2]))
        found = at < n
        credited = np.zeros(n, bool)  # two GPUs may both have received a copy: a lookup counts once
        credited[at[found]] = True
        self._n += counts[:, :n][:, credited].sum(axis=1)
        _, firsts = np.unique(of_copy[~found], return_index=True)  # copies of an expert that wait for the same lookup
        self._brought = np.concatenate((brought[:, ~found][:, firsts], later), axis=1)


def ran_from_cache(records: Records, kinds: Mapping[str, str], looked: Ints, resident: Flags) -> Flags:
    """Return whether a GPU ran a copy that a lookup found, without a new demand fetch."""
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
    found: Flags = resident & _among(of_lookup, of_run)
    unsure = np.flatnonzero(found & _among(of_lookup, of_copy))
    if not len(unsure):
        return found
    found[unsure] = False
    device, start = device[here], tasks.column("start")[here]
    for one in np.unique(device).tolist():
        mine, came = np.vstack((runs, start))[:, device == one], arrived[1:, arrived[0] == one]
        found[unsure] |= _ran_before(_sorted(mine, 3), _sorted(came, 2), looked[:, unsure])
    return found


def _in_steps(records: Records, arrived: Ints) -> Ints:
    """Return the step in which each copy arrived, its layer and its expert."""
    begin, step = (records.steps.column(name) for name in ("begin", "step"))
    order = np.argsort(begin, kind="stable")
    at = np.searchsorted(begin[order], arrived[3], side="right") - 1
    during = at >= 0
    return np.stack((step[order][at[during]], arrived[1, during], arrived[2, during]))


def _ran_before(runs: Ints, came: Ints, looked: Ints) -> Flags:
    """Return in which visits the first Run of the expert begins before a copy comes."""
    of_run, of_lookup = _numbers(runs[:3], looked[:3])
    run = _next_of(of_run, of_lookup, np.zeros_like(of_lookup, np.int64))
    found: Flags = run < len(of_run)
    if came.shape[1]:
        of_copy, of_lookup = _numbers(came[:2], looked[1:3])
        copy = _next_of(of_copy, of_lookup, np.searchsorted(came[2], looked[3], side="right"))
        found &= (copy == len(of_copy)) | (np.append(came[2], 0)[copy] > np.append(runs[3], 0)[run])
    return found


class DemandFree:
    """Counts the experts that GPUs run in a layer visit, and those that needed a demand fetch."""

    def __init__(self, kinds: Mapping[str, str]) -> None:
        self._gpus = _gpus(kinds)
        self._arrived = _NONE  # device, layer, expert and time of arrivals, and whether a demand fetch brought them
        self._runs = _NONE  # device, layer, expert and begin of Runs, and the step
        self._n_visits = self._n_demanded = 0

    def add(self, records: Records, settled_ns: int) -> None:
        tasks = records.tasks
        device = by_text(tasks.texts("device"), lambda name: self._gpus.get(name, -1))
        columns = [tasks.column(name) for name in ("layer", "expert", "start", "step")]
        self._runs = _longer(self._runs, (columns[1] >= 0) & (device >= 0), device, *columns)
        self._arrived = _arrivals(records, self._gpus, "demand", self._arrived)
        if settled_ns:
            self._settle(settled_ns)

    def share(self) -> float | None:
        """Return the share of visits without a demand fetch; None if no GPU runs any."""
        self._settle(None)
        return 1 - self._n_demanded / self._n_visits if self._n_visits else None

    def _settle(self, until: int | None) -> None:
        n_visits, n_demanded, self._arrived, self._runs = _settled(self._arrived, self._runs, until)
        self._n_visits += n_visits
        self._n_demanded += n_demanded


def _settled(arrived: Ints, runs: Ints, until: int | None) -> tuple[int, int, Ints, Ints]:
    """Count visits whose Runs are known, and those on demand; return what to keep."""
    # No Run begins before `until` that is not there.
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
    order = _order(of_arrival)
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
    """Put columns in the order of a row, in which most are already."""
    key = columns[row]
    return columns[:, np.argsort(key, kind="stable")] if (key[1:] < key[:-1]).any() else columns


def _order(numbers: Ints) -> Ints:
    """Return the stable order of numbers of at least 0; NumPy sorts 16 bits by digits, several times as fast."""
    short = numbers.astype(np.uint16) if numbers.max(initial=0) < 2**16 else numbers
    return np.argsort(short, kind="stable")


def _next_of(numbers: Ints, wanted: Ints, since: Ints) -> Ints:
    """Find where each wanted number next occurs, from a place on; the length if it does not."""
    n = len(numbers)
    order = _order(numbers)
    keys = numbers[order] * (n + 1) + order
    at = np.append(order, n)[np.searchsorted(keys, wanted * (n + 1) + since)]
    found: Ints = np.where(np.append(numbers, 0)[at] == wanted, at, n)
    return found


def _n_different(numbers: Ints, steps: Ints) -> int:
    keys = (steps - steps.min(initial=_LAST)) * (int(numbers.max(initial=0)) + 1) + numbers
    n = int(keys.max(initial=0)) + 1
    if n > _DENSE:
        return len(np.unique(keys))
    flags = np.zeros(n, bool)
    flags[keys] = True
    return int(np.count_nonzero(flags))


@dataclass(frozen=True)
class Lookups:
    """Lookups, one entry per (step, layer, micro-batch, distinct routed expert).

    Attributes
    ----------
    time : ndarray of int64, shape (n,), ns
        When the router's result was known.
    step, layer, expert, load : ndarray of int64, shape (n,)
        What was looked up, in which step, and the rows of the micro-batch routed to it.
    resident, in_flight : ndarray of bool, shape (n,)
        A copy was on a GPU; on its way to one.
    hit : ndarray of bool, shape (n,)
        A copy was there, and a GPU ran the expert from it in this layer visit: no demand fetch came in
        between.
    first : ndarray of bool, shape (n,)
        The first lookup of this expert in this layer visit: False only for later micro-batches.
    """

    time: Ints
    step: Ints
    layer: Ints
    expert: Ints
    load: Ints
    resident: Flags
    hit: Flags
    in_flight: Flags
    first: Flags


def flatten_lookups(records: Records, kinds: Mapping[str, str]) -> Lookups:
    """Turn the lookup records into flat arrays, in order of time.

    Parameters
    ----------
    records : Records
        Records of one run.
    kinds : mapping of str to str
        Kind of each device, ``"gpu"`` or ``"cpu"``.

    Returns
    -------
    Lookups
    """
    table = records.lookups
    offsets, expert = table.lists("active")
    lengths = np.diff(offsets)
    step, layer, mb, time = (table.column(name) for name in ("step", "layer", "mb", "time"))
    first = np.ones(len(expert), dtype=bool)
    if mb.any():  # several micro-batches: only the first to route to an expert counts it
        visit = np.stack((np.repeat(step, lengths), np.repeat(layer, lengths), expert))
        order = np.lexsort(visit[::-1])
        visit = visit[:, order]
        first[order[1:]] = (visit[:, 1:] != visit[:, :-1]).any(axis=0)
    step, layer, time = (np.repeat(column, lengths) for column in (step, layer, time))
    resident = table.lists("hits")[1].astype(bool)
    hit = ran_from_cache(records, kinds, np.stack((step, layer, expert, time)), resident)
    loads, in_flight = table.lists("loads")[1], table.lists("in_flight")[1].astype(bool)
    return Lookups(time, step, layer, expert, loads, resident, hit, in_flight, first)


def default_warm_up(n_steps: int) -> int:
    """Return the number of steps that count as warm-up by default."""
    return min(16, n_steps // 4)


def hit_rates(records: Records, kinds: Mapping[str, str], warm_up_steps: int | None = None) -> dict[str, float | int | None]:
    """Return the hit rates of a run, by the conventions of `docs/reference/metrics.md`.

    Parameters
    ----------
    records : Records
        Records of one run.
    kinds : mapping of str to str
        Kind of each device, ``"gpu"`` or ``"cpu"``.
    warm_up_steps : int, optional
        Steps at the start of the run that count as cold; by default a quarter of them, at most 16.

    Returns
    -------
    dict of str to float, int or None
        Shares in [0, 1]; None where nothing was looked up.
    """
    hits = HitRates(kinds)
    hits.add(records)
    return hits.rates(records.steps, warm_up_steps)


class HitRates:
    """Hit rates of a run that comes in pieces."""

    def __init__(self, kinds: Mapping[str, str]) -> None:
        self._kinds = kinds
        # For each stretch of a step: step, lookups, hits, residents, what is in flight alone, rows, rows of hits.
        self._counts: list[Ints] = []
        self._prefetches = PrefetchHits(kinds)
        self._demand = DemandFree(kinds)

    def add(self, records: Records, settled_ns: int = 0) -> None:
        looked = flatten_lookups(records, self._kinds)
        counts = (looked.hit & looked.first).astype(np.int64)
        decodes = _among(looked.step, records.steps.column("step")[in_decode(records.steps)])
        counts = np.stack((counts, counts * decodes))
        self._prefetches.add(records, (looked.layer, looked.expert, looked.time, counts), settled_ns)
        self._demand.add(records, settled_ns)
        if len(looked.step):
            begin = np.append(0, np.flatnonzero(looked.step[1:] != looked.step[:-1]) + 1)
            first, resident = looked.first, looked.resident
            flags = (first, first & looked.hit, first & resident, first & looked.in_flight & ~resident)
            numbers = (*flags, looked.load, looked.load * looked.hit)
            sums = (np.add.reduceat(number, begin, dtype=np.int64) for number in numbers)
            self._counts.append(np.stack([looked.step[begin], *sums], axis=1))

    def rates(self, steps: RecordTable[StepRecord], warm_up_steps: int | None = None) -> dict[str, float | int | None]:
        if warm_up_steps is None:
            warm_up_steps = default_warm_up(len(steps))
        counts = np.concatenate([np.zeros((0, 7), np.int64), *self._counts])
        number = steps.column("step")
        decode = np.isin(counts[:, 0], number[in_decode(steps)])
        cold = np.isin(counts[:, 0], np.sort(number)[:warm_up_steps])

        def share(part: int, whole: int, chosen: Any = slice(None)) -> float | None:
            n = int(counts[chosen, whole].sum())
            return int(counts[chosen, part].sum()) / n if n else None

        which = {
            "": slice(None), "_prefill": ~decode, "_decode": decode,
            "_cold": cold, "_warm": ~cold, "_decode_warm": decode & ~cold,
        }  # fmt: skip
        prefetched = self._prefetches.totals()
        n_lookups, n_decode = (int(counts[chosen, _LOOKUPS].sum()) for chosen in (slice(None), decode))
        return {
            "n_lookups": n_lookups,
            "warm_up_steps": warm_up_steps,
            **{f"hit_rate{name}": share(_HITS, _LOOKUPS, steps) for name, steps in which.items()},
            "hit_rate_per_token": share(_ROWS_HIT, _ROWS),
            **{f"resident_rate{name}": share(_RESIDENT, _LOOKUPS, steps) for name, steps in which.items()},
            "in_flight_share": share(_IN_FLIGHT, _LOOKUPS),
            "prefetch_hit_share": prefetched[0] / n_lookups if n_lookups else None,
            "prefetch_hit_share_decode": prefetched[1] / n_decode if n_decode else None,
            "no_demand_share": self._demand.share(),
        }


_LOOKUPS, _HITS, _RESIDENT, _IN_FLIGHT, _ROWS, _ROWS_HIT = range(1, 7)
