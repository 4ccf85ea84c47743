"""Time to the first token, time per output token, and throughput, from the steps of a run."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from moesim.core.record_table import RecordTable
from moesim.core.units import NS_PER_S
from moesim.metrics.columns import in_decode
from moesim.records import Records, StepRecord

Ints = NDArray[np.int64]
Sample = tuple[int, int]
"""A time (ns) and how many sequences had it."""


def mean(samples: Sequence[Sample] | Ints) -> float | None:
    """Return the weighted mean; None without samples."""
    times, n = _columns(samples)
    total = sum(int(times[n == one].sum()) * one for one in np.unique(n).tolist())  # times many sequences have more than 64 bits
    count = int(n.sum())
    return total / count if count else None


def percentile(samples: Sequence[Sample] | Ints, percent: int) -> int | None:
    """Return the nearest-rank percentile: the least sample that this share do not exceed.

    >>> percentile([(10, 1), (40, 2), (20, 1)], 50), percentile([(10, 99), (7000, 1)], 99)
    (20, 10)
    """
    times, n = _columns(samples)
    order = np.argsort(times, kind="stable")
    totals = np.cumsum(n[order])
    if not len(totals) or not totals[-1]:
        return None
    rank = -(-int(totals[-1]) * percent // 100)
    return int(times[order[np.searchsorted(totals, rank)]])


def _columns(samples: Sequence[Sample] | Ints) -> Ints:
    """Return the times, and how many sequences had each."""
    return np.array(samples, np.int64).reshape(-1, 2).T


def token_times(records: Records, last_chunks: Collection[int] | None = None) -> tuple[list[Sample], list[Sample]]:
    """Collect the times to the first token and between tokens.

    Parameters
    ----------
    records : Records
        Records of one run.
    last_chunks : collection of int, optional
        Numbers of the prefill steps with the last chunk of the requests admitted together. Without it, the
        last of consecutive prefill steps of a batch; the two differ only if requests end without decoding.

    Returns
    -------
    ttft : list of (int, int), ns
        A time for each group of requests admitted together, and their number.
    between : list of (int, int), ns
        For each decode step, the time since these sequences' tokens before, and their number. Under
        ``refill`` a step has two samples: one of the sequences just admitted, one of the others, who waited
        for that prefill.
    """
    return _samples(records.steps, last_chunks)


def _samples(table: RecordTable[StepRecord], last_chunks: Collection[int] | None) -> tuple[list[Sample], list[Sample]]:
    columns = np.stack([table.column(name) for name in ("begin", "end", "step", "batch", "n_sequences")])
    order = np.lexsort(columns[2::-1])
    steps = list(zip(*columns[:, order].tolist(), in_decode(table)[order].tolist(), strict=True))
    ttft: list[Sample] = []
    between: list[Sample] = []
    batch = None
    admitted = 0  # sequences whose prompt has been read by the prefill steps at hand
    first_begin: int | None = None  # of these prefill steps
    fresh: list[Sample] = []  # (end of prefill, sequences) that have had one token only
    last_token: int | None = None  # end of the decode step before
    for i, (begin, end, number, of_batch, n_sequences, decodes) in enumerate(steps):
        if of_batch != batch:
            batch, admitted, first_begin, fresh, last_token = of_batch, 0, None, [], None
        if not decodes:
            first_begin = begin if first_begin is None else first_begin
            admitted += n_sequences
            following = steps[i + 1 : i + 2]
            going_on = any(number == batch and not decoding for *_, number, _, decoding in following)
            # Whether requests admitted together have their first tokens at the end of this prefill step.
            if number in last_chunks if last_chunks is not None else not going_on:
                ttft.append((end - first_begin, admitted))
                fresh.append((end, admitted))
                admitted, first_begin = 0, None
            continue
        new = sum(n for _, n in fresh)
        if new <= n_sequences:  # else some ended with their prompt, and who is who cannot be told
            between.extend((end - since, n) for since, n in fresh)
        else:
            between.append((end - fresh[-1][0], n_sequences))
        if new < n_sequences:
            since = begin if last_token is None else last_token
            between.append((end - since, n_sequences - new))
        fresh, last_token = [], end
    return ttft, between


def _per_s(count: int, ns: float | None) -> float | None:
    return count * NS_PER_S / ns if ns else None


def latency(records: Records, last_chunks: Collection[int] | None = None) -> dict[str, float | int | None]:
    """Summarise latency and throughput of a run.

    Parameters
    ----------
    records : Records
        Records of one run.
    last_chunks : collection of int, optional
        As in `token_times`.

    Returns
    -------
    dict of str to float, int or None
        The keys of "Latency and throughput" in `docs/reference/metrics.md`; None where a phase does not
        occur.
    """
    steps = records.steps
    ttft, between = _samples(steps, last_chunks)
    decodes, n_sequences, ns = in_decode(steps), steps.column("n_sequences"), steps.column("end") - steps.column("begin")
    n_decode, n_prefill = int(n_sequences[decodes].sum()), int(steps.column("n_tokens")[~decodes].sum())
    tpot = mean(between)
    return {
        "makespan_ns": records.makespan_ns, "n_steps": len(steps), "n_prefill_tokens": n_prefill,
        "n_decode_tokens": n_decode, "n_generated_tokens": int(n_sequences.sum()), "ttft_mean_ns": mean(ttft),
        "tpot_mean_ns": tpot, "tpot_p50_ns": percentile(between, 50), "tpot_p90_ns": percentile(between, 90),
        "tpot_p99_ns": percentile(between, 99),
        "prefill_tokens_per_s": _per_s(n_prefill, int(ns[~decodes].sum())),
        "decode_tokens_per_s": _per_s(n_decode, int(ns[decodes].sum())),
        "decode_tokens_per_s_request": _per_s(1, tpot),
    }  # fmt: skip
