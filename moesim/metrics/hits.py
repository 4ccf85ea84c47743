"""Hit rates under several counting conventions, from the lookups recorded at each router's result."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from moesim.records import Records

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
    hit, in_flight : ndarray of bool, shape (n,)
        Resident on a GPU; on its way to one.
    first : ndarray of bool, shape (n,)
        The first lookup of this expert in this layer visit: False only for later micro-batches.
    """

    time: Flat
    step: Flat
    layer: Flat
    expert: Flat
    load: Flat
    hit: NDArray[np.bool_]
    in_flight: NDArray[np.bool_]
    first: NDArray[np.bool_]


def flatten_lookups(records: Records) -> Lookups:
    """Turn the lookup records into flat arrays.

    Parameters
    ----------
    records : Records
        Records of one run.

    Returns
    -------
    Lookups
        Arrays in order of time.
    """
    rows = records.lookups
    lengths = [len(r.active) for r in rows]
    total = sum(lengths)

    def spread(values: list[int]) -> Flat:
        return np.repeat(np.array(values, dtype=np.int64), lengths)

    def joined(values: list[tuple[int, ...]]) -> Flat:
        return np.fromiter(chain.from_iterable(values), dtype=np.int64, count=total)

    step, layer, mb = (spread(list(v)) for v in ([r.step for r in rows], [r.layer for r in rows], [r.mb for r in rows]))
    expert = joined([r.active for r in rows])
    first = np.ones(total, dtype=bool)
    if total and bool(mb.any()):  # several micro-batches: only the first to route to an expert counts it
        order = np.lexsort((np.arange(total), expert, layer, step))
        keys = np.stack((step, layer, expert))[:, order]
        first[order[1:]] = (keys[:, 1:] != keys[:, :-1]).any(axis=0)
    return Lookups(
        time=spread([r.time for r in rows]),
        step=step,
        layer=layer,
        expert=expert,
        load=joined([r.loads for r in rows]),
        hit=joined([r.hits for r in rows]).astype(bool),
        in_flight=joined([r.in_flight for r in rows]).astype(bool),
        first=first,
    )


def default_warm_up(n_steps: int) -> int:
    """Number of steps that count as warm-up unless the user says otherwise.

    >>> default_warm_up(8), default_warm_up(1000)
    (2, 16)
    """
    return min(16, n_steps // 4)


def _share(flags: NDArray[np.bool_], chosen: NDArray[np.bool_], weight: Flat | None = None) -> float | None:
    """Weighted share of the flags among the chosen; None if nothing is chosen."""
    whole = int(chosen.sum()) if weight is None else int(weight[chosen].sum())
    part = int((flags & chosen).sum()) if weight is None else int(weight[flags & chosen].sum())
    return part / whole if whole else None


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
    if warm_up_steps is None:
        warm_up_steps = default_warm_up(len(records.steps))
    looked = flatten_lookups(records)
    ordered = sorted(s.step for s in records.steps)
    cold = np.isin(looked.step, ordered[:warm_up_steps])
    decode = np.isin(looked.step, [s.step for s in records.steps if s.phase == "decode"])
    counted = looked.first
    everything = np.ones_like(counted)
    return {
        "n_lookups": int(counted.sum()),
        "warm_up_steps": warm_up_steps,
        "hit_rate": _share(looked.hit, counted),
        "hit_rate_prefill": _share(looked.hit, counted & ~decode),
        "hit_rate_decode": _share(looked.hit, counted & decode),
        "hit_rate_cold": _share(looked.hit, counted & cold),
        "hit_rate_warm": _share(looked.hit, counted & ~cold),
        "hit_rate_decode_warm": _share(looked.hit, counted & decode & ~cold),
        "hit_rate_per_token": _share(looked.hit, everything, looked.load),
        "in_flight_share": _share(looked.in_flight & ~looked.hit, counted),
        "prefetch_hit_share": _prefetch_hits(records, looked, kinds),
        "no_demand_share": _no_demand_share(records, kinds),
    }


def _arrivals(records: Records, kinds: Mapping[str, str]) -> dict[tuple[str, int, int], list[tuple[int, str]]]:
    """Arrivals (ns, cause) of each (GPU, layer, expert), ascending in time."""
    found: dict[tuple[str, int, int], list[tuple[int, str]]] = {}
    for t in records.transfers:
        device = t.link.partition("->")[2]
        if t.last and t.expert >= 0 and kinds[device] == "gpu":
            found.setdefault((device, t.layer, t.expert), []).append((t.end, t.cause))
    return found


def _prefetch_hits(records: Records, looked: Lookups, kinds: Mapping[str, str]) -> float | None:
    """Share of lookups that hit a copy which a prefetch had brought since that expert's lookup before."""
    n_counted = int(looked.first.sum())
    if not n_counted:
        return None
    times: dict[tuple[int, int], list[tuple[int, bool]]] = {}
    fields = (looked.layer, looked.expert, looked.time, looked.hit & looked.first)
    for layer, expert, at_ns, counts in zip(*(f.tolist() for f in fields), strict=True):
        times.setdefault((layer, expert), []).append((at_ns, counts))
    credited = set()  # two GPUs may both have received a copy: a lookup counts once
    for (_, layer, expert), arrivals in _arrivals(records, kinds).items():
        lookups = times.get((layer, expert), [])
        for time, cause in arrivals:
            at = bisect_left(lookups, (time, False))  # arriving at the instant of the lookup is in time
            if cause == "prefetch" and at < len(lookups) and lookups[at][1]:
                credited.add((layer, expert, at))
    return len(credited) / n_counted


def _no_demand_share(records: Records, kinds: Mapping[str, str]) -> float | None:
    """Share of the experts run on GPUs that did not need a demand fetch for it."""
    arrivals = _arrivals(records, kinds)
    visits: dict[tuple[str, int, int, int], bool] = {}  # whether any Run of the visit needed a fetch
    taken: set[tuple[str, int, int, int]] = set()  # arrivals that an earlier Run has used, by their number
    runs = (t for t in records.tasks if t.expert >= 0 and kinds[t.device] == "gpu")
    for run in sorted(runs):
        place = (run.device, run.layer, run.expert)
        visit = (*place, run.step)
        visits.setdefault(visit, False)
        history = arrivals.get(place, [])
        at = bisect_right(history, (run.start, "~")) - 1  # "~" sorts after every cause
        if at >= 0 and (*place, at) not in taken:
            taken.add((*place, at))
            visits[visit] |= history[at][1] == "demand"
    return 1 - sum(visits.values()) / len(visits) if visits else None
