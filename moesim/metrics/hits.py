"""Hit rates under several counting conventions, from the lookups recorded at each router's result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesim.core.record_table import RecordTable
from moesim.metrics.arrivals import DemandFree, PrefetchHits, ran_from_cache
from moesim.metrics.columns import in_decode
from moesim.records import Records, StepRecord

Flat = NDArray[np.int64]


@dataclass(frozen=True)
class Lookups:
    """Lookups, one entry per (step, layer, micro-batch, distinct routed expert).

    Attributes
    ----------
    time : ndarray of int64, shape (n,), ns
        When the router's result was known.
    step, layer, expert : ndarray of int64, shape (n,)
        What was looked up, and in which step.
    load : ndarray of int64, shape (n,), rows
        Rows of the micro-batch routed to the expert.
    resident, in_flight : ndarray of bool, shape (n,)
        A copy was on a GPU; on its way to one.
    hit : ndarray of bool, shape (n,)
        A copy was there, and a GPU ran the expert from it in this layer visit: no demand fetch came in between.
    first : ndarray of bool, shape (n,)
        The first lookup of this expert in this layer visit: False only for later micro-batches.
    """

    time: Flat
    step: Flat
    layer: Flat
    expert: Flat
    load: Flat
    resident: NDArray[np.bool_]
    hit: NDArray[np.bool_]
    in_flight: NDArray[np.bool_]
    first: NDArray[np.bool_]


def flatten_lookups(records: Records, kinds: Mapping[str, str]) -> Lookups:
    """Turn the lookup records into flat arrays.

    Parameters
    ----------
    records : Records
        Records of one run.
    kinds : mapping of str to str
        Kind of each device, ``"gpu"`` or ``"cpu"``.

    Returns
    -------
    Lookups
        Arrays in order of time.
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
    return Lookups(
        time=time,
        step=step,
        layer=layer,
        expert=expert,
        load=table.lists("loads")[1],
        resident=resident,
        hit=hit,
        in_flight=table.lists("in_flight")[1].astype(bool),
        first=first,
    )


def default_warm_up(n_steps: int) -> int:
    """Number of steps that count as warm-up unless the user says otherwise.

    >>> default_warm_up(8), default_warm_up(1000)
    (2, 16)
    """
    return min(16, n_steps // 4)


def hit_rates(records: Records, kinds: Mapping[str, str], warm_up_steps: int | None = None) -> dict[str, float | int | None]:
    """Hit rates of a run, by the conventions of `docs/reference/metrics.md`.

    Parameters
    ----------
    records : Records
        Records of one run.
    kinds : mapping of str to str
        Kind of each device, ``"gpu"`` or ``"cpu"``.
    warm_up_steps : int, optional
        Steps at the start of the run that count as cold; `default_warm_up` if not given.

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
        self._counts: list[Flat] = []
        self._prefetches = PrefetchHits(kinds)
        self._demand = DemandFree(kinds)

    def add(self, records: Records, settled_ns: int = 0) -> None:
        """Take the next records in; no record of a later piece starts before ``settled_ns``."""
        looked = flatten_lookups(records, self._kinds)
        counts = (looked.hit & looked.first).astype(np.int64)
        decodes = np.isin(looked.step, records.steps.column("step")[in_decode(records.steps)])
        counts = np.stack((counts, counts * decodes))
        self._prefetches.add(records, (looked.layer, looked.expert, looked.time, counts), settled_ns)
        self._demand.add(records, settled_ns)
        if len(looked.step):
            begin = np.append(0, np.flatnonzero(looked.step[1:] != looked.step[:-1]) + 1)
            first, resident = looked.first, looked.resident
            flags = (first, first & looked.hit, first & resident, first & looked.in_flight & ~resident)
            numbers = (*flags, looked.load, looked.load * looked.hit)
            sums = np.stack([looked.step[begin], *(np.add.reduceat(number, begin, dtype=np.int64) for number in numbers)], axis=1)
            self._counts.append(sums.astype(np.int32) if sums.max() <= _LARGEST else sums)

    def rates(self, steps: RecordTable[StepRecord], warm_up_steps: int | None = None) -> dict[str, float | int | None]:
        """Give the rates of the whole run, which has these steps."""
        if warm_up_steps is None:
            warm_up_steps = default_warm_up(len(steps))
        counts = np.concatenate([np.zeros((0, 7), np.int32), *self._counts])
        number = steps.column("step")
        decode = np.isin(counts[:, 0], number[in_decode(steps)])
        cold = np.isin(counts[:, 0], np.sort(number)[:warm_up_steps])

        def share(part: int, whole: int, chosen: Any = slice(None)) -> float | None:
            n = int(counts[chosen, whole].sum(dtype=np.int64))
            return int(counts[chosen, part].sum(dtype=np.int64)) / n if n else None

        which = {
            "": slice(None), "_prefill": ~decode, "_decode": decode,
            "_cold": cold, "_warm": ~cold, "_decode_warm": decode & ~cold,
        }  # fmt: skip
        prefetched = self._prefetches.totals()
        n_lookups, n_decode = (int(counts[chosen, _LOOKUPS].sum(dtype=np.int64)) for chosen in (slice(None), decode))
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


_LARGEST = np.iinfo(np.int32).max
_LOOKUPS, _HITS, _RESIDENT, _IN_FLIGHT, _ROWS, _ROWS_HIT = range(1, 7)
