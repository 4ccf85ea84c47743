"""Time to the first token, time per output token, and throughput, from the steps of a run."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate

from moesim.core.units import NS_PER_S
from moesim.records import Records, StepRecord

Sample = tuple[int, int]
"""A time (ns) and how many sequences had it."""


def mean(samples: Sequence[Sample]) -> float | None:
    """Weighted mean; None without samples.

    >>> mean([(10, 1), (40, 2)])
    30.0
    """
    count = sum(n for _, n in samples)
    return sum(t * n for t, n in samples) / count if count else None


def percentile(samples: Sequence[Sample], percent: int) -> int | None:
    """Nearest-rank percentile: the smallest sample that at least this share do not exceed; None without any.

    >>> percentile([(10, 1), (40, 2), (20, 1)], 50), percentile([(10, 99), (7000, 1)], 99)
    (20, 10)
    """
    ordered = sorted(samples)
    totals = list(accumulate(n for _, n in ordered))
    if not totals or not totals[-1]:
        return None
    rank = -(-totals[-1] * percent // 100)
    return next(t for (t, _), total in zip(ordered, totals, strict=True) if total >= rank)


def token_times(records: Records, last_chunks: Collection[int] | None = None) -> tuple[list[Sample], list[Sample]]:
    """Collect the times to the first token and between tokens.

    Parameters
    ----------
    records : Records
        Records of one run.
    last_chunks : collection of int, optional
        Numbers of the prefill steps with the last chunk of the requests admitted together. Without it,
        the last of consecutive prefill steps of a batch; the two differ only if requests end without
        decoding.

    Returns
    -------
    ttft : list of (int, int), ns
        A time for each group of requests admitted together, and their number.
    between : list of (int, int), ns
        For each decode step, the time since these sequences' tokens before, and their number. Under
        ``refill`` a step gives two samples: one of the sequences just admitted, one of the others, who
        waited for that prefill.
    """
    ttft: list[Sample] = []
    between: list[Sample] = []
    steps = sorted(records.steps)
    batch = None
    admitted = 0  # sequences whose prompt has been read by the prefill steps at hand
    first_begin: int | None = None  # of these prefill steps
    fresh: list[Sample] = []  # (end of prefill, sequences) that have had one token only
    last_token: int | None = None  # end of the decode step before
    for i, step in enumerate(steps):
        if step.batch != batch:
            batch, admitted, first_begin, fresh, last_token = step.batch, 0, None, [], None
        if step.phase == "prefill":
            first_begin = step.begin if first_begin is None else first_begin
            admitted += step.n_sequences
            if _closes(steps, i, last_chunks):
                ttft.append((step.end - first_begin, admitted))
                fresh.append((step.end, admitted))
                admitted, first_begin = 0, None
            continue
        new = sum(n for _, n in fresh)
        if new <= step.n_sequences:  # else some ended with their prompt, and who is who cannot be told
            between.extend((step.end - since, n) for since, n in fresh)
        else:
            between.append((step.end - fresh[-1][0], step.n_sequences))
        if new < step.n_sequences:
            since = step.begin if last_token is None else last_token
            between.append((step.end - since, step.n_sequences - new))
        fresh, last_token = [], step.end
    return ttft, between


def _closes(steps: Sequence[StepRecord], i: int, last_chunks: Collection[int] | None) -> bool:
    """Whether requests admitted together have their first tokens at the end of this prefill step."""
    if last_chunks is not None:
        return steps[i].step in last_chunks
    following = steps[i + 1] if i + 1 < len(steps) else None
    return following is None or following.phase != "prefill" or following.batch != steps[i].batch


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
        The keys of the section "Latency and throughput" of `docs/reference/metrics.md`; None where a phase does not
        occur.
    """
    ttft, between = token_times(records, last_chunks)
    prefill = [s for s in records.steps if s.phase == "prefill"]
    decode = [s for s in records.steps if s.phase == "decode"]
    n_decode = sum(s.n_sequences for s in decode)
    n_prefill = sum(s.n_tokens for s in prefill)
    tpot = mean(between)
    return {
        "makespan_ns": records.makespan_ns,
        "n_steps": len(records.steps),
        "n_prefill_tokens": n_prefill,
        "n_decode_tokens": n_decode,
        "n_generated_tokens": n_decode + sum(s.n_sequences for s in prefill),
        "ttft_mean_ns": mean(ttft),
        "tpot_mean_ns": tpot,
        "tpot_p50_ns": percentile(between, 50),
        "tpot_p90_ns": percentile(between, 90),
        "tpot_p99_ns": percentile(between, 99),
        "prefill_tokens_per_s": _per_s(n_prefill, sum(s.end - s.begin for s in prefill)),
        "decode_tokens_per_s": _per_s(n_decode, sum(s.end - s.begin for s in decode)),
        "decode_tokens_per_s_request": _per_s(1, tpot),
    }
