"""One cache a layer under the rules of offloading systems: MRS (HybriMoE), workload-aware (DALI) and static contents.

Counted as in `moesim.trace.stats.layer_caches`: every row is one visit of every layer, answered before the cache changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.core.gate import check_made
from moesim.trace.stats.layer_caches import keep_worthiest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from moesim.trace import Trace

MRS_ALPHA = 0.5
"""HybriMoE's weight of the present row (its code)."""
W_SIZE = 4
"""DALI's window, in visits."""


def keep_top(scores: NDArray[Any], p: int) -> NDArray[np.float32]:
    """Zero all but the p largest scores of each row (TopP of HybriMoE's eq. 3); they are not normalised again.

    >>> keep_top(np.array([0.5, 0.25, 0.125, 0.125]), 2).tolist()
    [0.5, 0.25, 0.0, 0.0]
    """
    full = np.asarray(scores, np.float32)
    if p >= full.shape[-1]:
        return full
    threshold = np.partition(full, full.shape[-1] - p, axis=-1)[..., -p, None]
    return np.where(full >= threshold, full, np.float32(0))


def mrs_update(mrs: NDArray[np.float64], kept: NDArray[Any], alpha: float = MRS_ALPHA) -> NDArray[np.float64]:
    """Move the scores by which HybriMoE keeps experts (minus recent score, eq. 3) on by one row."""
    return np.asarray(alpha * kept + (1 - alpha) * mrs, np.float64)


def mrs_scores(trace: Trace, rows: NDArray[np.int64]) -> tuple[NDArray[Any] | None, str]:
    """Choose what MRS can go by in a trace."""
    if trace.recorded_scores is not None:
        return np.asarray(trace.recorded_scores)[rows], "full scores, p = 2 k"
    if trace.recorded_weights is None:
        return None, "the trace has neither scores nor weights" + (" that were recorded" if trace.made_up else "")
    scores = np.zeros((len(rows), trace.n_layers, trace.n_experts), np.float16)
    np.put_along_axis(scores, np.asarray(trace.experts)[rows].astype(np.int64), np.asarray(trace.recorded_weights)[rows], axis=2)
    return scores, "weights of the chosen only, p = k"


def mrs_hits(
    experts: NDArray[Any], scores: NDArray[Any], p: int, capacities: Sequence[int], alpha: float = MRS_ALPHA
) -> NDArray[np.float64]:
    """Replay HybriMoE's cache: the scores move first, then the experts enter, then those with the smallest S leave."""
    n_rows, n_layers, top_k = experts.shape
    n_experts = scores.shape[2]
    mrs = np.zeros((n_layers, n_experts), np.float64)

    def value(row: int, _: NDArray[np.int64]) -> NDArray[np.float64]:
        nonlocal mrs
        mrs = mrs_update(mrs, keep_top(scores[row], p), alpha)
        return mrs

    hits = keep_worthiest(experts, n_experts, np.asarray(capacities, np.int64), value)
    return np.asarray(hits / max(1, n_rows * top_k))


def default_u_size(n_experts: int) -> int:
    """Give the experts that DALI replaces at the end of a window: 1 for Mixtral's 8, 8 for models with many experts."""
    return max(1, min(8, n_experts // 8))


def workload_aware_hits(
    experts: NDArray[Any], n_experts: int, capacities: Sequence[int], u_size: int, w_size: int = W_SIZE, seed: int = 0
) -> NDArray[np.float64]:
    """Replay DALI's cache (Algorithm 2): only the end of a window changes it.

    Each layer starts with random experts. After every `w_size` rows the `u_size` residents that served the fewest of
    them make room for the others that served the most, whether or not these served more; ties to the lower id.
    """
    n_rows, n_layers, top_k = experts.shape
    order = np.random.default_rng(seed).random((n_layers, n_experts)).argsort(axis=1)
    held = [order.argsort(axis=1) < c for c in capacities]
    counts = [min(u_size, c, n_experts - c) for c in capacities]
    hits = np.zeros((len(capacities), n_layers), np.int64)
    layers = np.arange(n_layers)[:, None]
    ties = np.arange(n_experts)
    for begin in range(0, n_rows, w_size):
        ids = experts[begin : begin + w_size].astype(np.int64)
        window = np.bincount((ids + layers * n_experts).ravel(), minlength=n_layers * n_experts).reshape(n_layers, n_experts)
        for i, (cache, u) in enumerate(zip(held, counts, strict=True)):
            hits[i] += (window * cache).sum(axis=1)
            if not u or len(ids) < w_size:
                continue
            low = np.where(cache, window * n_experts + ties, np.iinfo(np.int64).max)
            high = np.where(cache, np.iinfo(np.int64).max, -window * n_experts + ties)
            victims, newcomers = (np.argpartition(key, u - 1, axis=1)[:, :u] for key in (low, high))
            cache[layers, victims] = False
            cache[layers, newcomers] = True
    return np.asarray(hits / max(1, n_rows * top_k))


def static_hits(frequency: NDArray[Any], popularity: NDArray[Any], capacities: Sequence[int]) -> NDArray[np.float64]:
    """Compute the hit rate of a cache that always holds the most popular experts of each layer.

    >>> static_hits(np.array([[0.5, 0.3, 0.2]]), np.array([[1, 3, 2]]), [1, 2]).tolist()
    [[0.3], [0.5]]
    """
    order = np.argsort(-np.asarray(popularity, np.float64), axis=1, kind="stable")
    within = np.cumsum(np.take_along_axis(np.asarray(frequency, np.float64), order, axis=1), axis=1)
    return np.stack([within[:, c - 1] if c else within[:, 0] * 0 for c in capacities])


def uniform_rows(n_rows: int, n_layers: int, n_experts: int, top_k: int, seed: int = 0) -> NDArray[np.int64]:
    """Draw rows of a uniform router: top_k different experts at random, independent of everything."""
    check_made("statistics", "random scores to compare with", (n_rows, n_layers, n_experts), 8, "check the number of experts")
    drawn = np.random.default_rng(seed).random((n_rows, n_layers, n_experts))
    return np.argsort(drawn, axis=2, kind="stable")[:, :, :top_k]  # a partition's order depends on the processor
