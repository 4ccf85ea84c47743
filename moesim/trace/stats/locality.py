"""How alike neighbouring tokens are routed: reuse by distance, by rank of the score, by segment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.trace.stats.balance import activation_frequency
from moesim.trace.stats.sample import spans

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from moesim.trace.stats.sample import Sample


def membership(experts: NDArray[Any], n_experts: int) -> NDArray[np.bool_]:
    """Mark the experts of each row and layer."""
    chosen = np.zeros((*experts.shape[:2], n_experts), bool)
    np.put_along_axis(chosen, experts.astype(np.int64), True, axis=2)
    return chosen


def _later(request: NDArray[Any], distance: int) -> NDArray[np.int64]:
    """Give the rows that have a row of the same request so many tokens before them."""
    return (np.flatnonzero(request[distance:] == request[:-distance]) + distance).astype(np.int64)


def reuse_by_lag(experts: NDArray[Any], request: NDArray[Any], lags: Sequence[int], n_experts: int) -> NDArray[np.float64]:
    """Compute the share of a token's experts that the token n positions earlier also used."""
    n_layers = experts.shape[1]
    result = np.full((len(lags), n_layers), np.nan)
    for layer in range(n_layers):
        ids = np.ascontiguousarray(experts[:, layer]).astype(np.int64)
        chosen = np.zeros((len(ids), n_experts), bool)
        np.put_along_axis(chosen, ids, True, axis=1)
        flat = chosen.ravel()
        for i, lag in enumerate(lags):
            later = _later(request, lag)
            if len(later):
                result[i, layer] = flat[(later - lag)[:, None] * n_experts + ids[later]].mean()
    return result


def reuse(experts: NDArray[Any], request: NDArray[Any], distance: int, n_experts: int) -> float:
    """Compute the share of a token's experts that the token ``distance`` positions earlier also used.

    >>> reuse(np.array([[[0, 1]], [[1, 2]]]), np.array([5, 5]), 1, 4)
    0.5
    """
    return float(reuse_by_lag(experts, request, [distance], n_experts).mean())


def reuse_baseline(experts: NDArray[Any], n_experts: int) -> float:
    """Compute the share that a random other token of the trace would have used.

    The expectation over all pairs of different rows, so nothing is drawn: with c rows that use an expert,
    c (c - 1) of the n (n - 1) pairs share it.
    """
    n_rows, _, top_k = experts.shape
    if n_rows < 2:
        return float("nan")
    count = activation_frequency(experts, n_experts) * n_rows * top_k
    pairs = (count * (count - 1)).sum(axis=1)
    return float(pairs.mean() / (n_rows * (n_rows - 1) * top_k))


def by_score(scores: NDArray[Any]) -> NDArray[np.int64]:
    """Order the experts of each row by their score."""
    # Half floats that are not negative sort as their bits do, and sorting 16-bit integers is several times faster.
    bits = np.asarray(scores, np.float16).view(np.uint16)
    return np.argsort(np.uint16(0xFFFF) - bits, axis=-1, kind="stable")


def ranked(sample: Sample) -> NDArray[Any]:
    """Order the experts of each row by score; without full scores only the chosen ones, as the router did."""
    trace = sample.trace
    if trace.recorded_scores is None:
        return sample.experts
    scores = np.asarray(trace.recorded_scores)
    found = np.empty((len(sample.rows), trace.n_layers, trace.n_experts), np.uint16)
    for layer in range(trace.n_layers):
        found[:, layer] = by_score(scores[sample.rows, layer])
    return found


def reuse_by_rank(ranked: NDArray[Any], experts: NDArray[Any], request: NDArray[Any], n_experts: int) -> NDArray[np.float64]:
    """Compute the probability that the next token uses an expert, by its rank in this token (HybriMoE, 2025, Fig. 3b)."""
    later = _later(request, 1)
    n_layers, m = ranked.shape[1:]
    if not len(later):
        return np.full((m, n_layers), np.nan)
    result = np.empty((m, n_layers))
    for layer in range(n_layers):
        chosen = membership(experts[later][:, layer : layer + 1], n_experts)[:, 0]
        result[:, layer] = np.take_along_axis(chosen, ranked[later - 1, layer].astype(np.int64), axis=1).mean(axis=0)
    return result


def segments(request: NDArray[Any], length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Cut requests into consecutive segments of equal length; what is left over at the end of one is not used."""
    first, size = spans(request)
    place = np.arange(len(request)) - np.repeat(first, size)
    whole = np.repeat(size // length, size)
    rows = np.flatnonzero(place // length < whole)
    before = np.cumsum(size // length) - size // length
    return rows.astype(np.int64), (np.repeat(before, size) + place // length)[rows].astype(np.int64)


def segment_best(counts: NDArray[Any], length: int, top_k: int, sizes: Sequence[int]) -> tuple[Any, NDArray[np.float64]]:
    """Compute SRP and SCH, the measures of local routing consistency, of segments of tokens.

    "Not All Models Suit Expert Offloading: On Local Routing Consistency of Mixture-of-Expert Models" (2025); the formulas
    are our reading of its definitions.
    """
    ascending = np.sort(counts.astype(np.uint16 if length < 2**16 else np.uint32), axis=2)  # small types sort much faster
    within = np.cumsum(ascending[:, :, ::-1], axis=2, dtype=np.int32)
    group = np.arange(1, counts.shape[2] + 1)
    srp = (2 * within / (length * (group + top_k))).max(axis=2).mean(axis=0)
    held = within[:, :, np.minimum(np.asarray(sizes), counts.shape[2]) - 1]
    return srp, np.asarray(held.mean(axis=0).T / (length * top_k))
