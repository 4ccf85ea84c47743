"""Hit rates of caches over the rows of a trace, of several sizes at once.

Every lookup of a row is answered before its cache changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.core.gate import check_made

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from moesim.trace import Trace
    from moesim.trace.stats.balance import Context

    Worth = Callable[[int, NDArray[np.int64]], NDArray[np.float64]]

CACHE_SHARES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)
_CHUNK_CELLS = 2**24  # cells of the largest temporary array


def layer_hit_rates(
    experts: NDArray[Any], n_experts: int, capacities: Sequence[int], policies: Sequence[str] = ("lru", "lfu", "belady")
) -> dict[str, NDArray[np.float64]]:
    """Replay rows through one cache a layer."""
    sizes = np.asarray(capacities, np.int64)
    lookups = max(1, experts.shape[0] * experts.shape[2])
    replays = {"lru": _lru, "lfu": _lfu, "belady": _belady, "belady-visit": _belady_visit}
    return {name: replays[name](experts, n_experts, sizes) / lookups for name in policies}


def _chunks(experts: NDArray[Any], n_experts: int) -> Iterator[slice]:
    n_rows, n_layers, top_k = experts.shape
    step = max(1, _CHUNK_CELLS // (n_layers * n_experts * top_k))
    return (slice(a, min(a + step, n_rows)) for a in range(0, n_rows, step))


def _lru(experts: NDArray[Any], n_experts: int, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Count hits at all sizes in one pass, by how many experts were used more recently."""
    _, n_layers, top_k = experts.shape
    histogram = np.zeros((n_layers, n_experts + 1), np.int64)  # the last bin: never used before
    before = np.full((n_layers, n_experts), -1, np.int32)
    layer = np.arange(n_layers)[:, None]
    for part in _chunks(experts, n_experts):
        ids = experts[part].astype(np.int64)
        n = len(ids)
        last = np.full((n + 1, n_layers, n_experts), -1, np.int32)
        last[0] = before
        when = ((part.start + np.arange(n))[:, None, None] * top_k + np.arange(top_k)).astype(np.int32)
        np.put_along_axis(last[1:], ids, when, axis=2)
        np.maximum.accumulate(last, axis=0, out=last)
        mine = np.take_along_axis(last[:-1], ids, axis=-1)
        distance = np.stack([(last[:-1] > mine[:, :, i, None]).sum(axis=2, dtype=np.uint32) for i in range(top_k)], axis=2)
        distance[mine < 0] = n_experts
        np.add.at(histogram, (np.broadcast_to(layer, ids.shape), distance), 1)
        before = last[-1].copy()
    within = histogram.cumsum(axis=1)
    return np.stack([within[:, min(c, n_experts) - 1] if c else within[:, 0] * 0 for c in sizes])


def _lfu(experts: NDArray[Any], n_experts: int, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    uses = np.zeros((experts.shape[1], n_experts), np.float64)
    layers = np.arange(experts.shape[1])[:, None]

    def rank(row: int, ids: NDArray[np.int64]) -> NDArray[np.float64]:
        uses[layers, ids] += 1
        return uses[layers, ids]

    return _keep_visit(experts, n_experts, sizes, rank)


def _belady(experts: NDArray[Any], n_experts: int, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    upcoming = _next_rows(experts, n_experts)
    worth = np.zeros((experts.shape[1], n_experts), np.float64)
    layers = np.arange(experts.shape[1])[:, None]

    def value(row: int, ids: NDArray[np.int64]) -> NDArray[np.float64]:
        worth[layers, ids] = -upcoming[row]
        return worth

    return keep_worthiest(experts, n_experts, sizes, value)


def _belady_visit(experts: NDArray[Any], n_experts: int, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    upcoming = _next_rows(experts, n_experts)
    return _keep_visit(experts, n_experts, sizes, lambda row, ids: -upcoming[row])


def _keep_visit(experts: NDArray[Any], n_experts: int, sizes: NDArray[np.int64], rank: Worth) -> NDArray[np.int64]:
    """Evict by ``rank(row, ids)``, then by last use; the row's own experts go last."""
    n_rows, n_layers, top_k = experts.shape
    lookups = n_rows * top_k
    last = np.arange(top_k)
    present = 4.0 * lookups * lookups  # above all ranks
    worth = np.zeros((n_layers, n_experts), np.float64)
    layers = np.arange(n_layers)[:, None]
    before: NDArray[np.int64] | None = None

    def value(row: int, ids: NDArray[np.int64]) -> NDArray[np.float64]:
        nonlocal before
        if before is not None:
            worth[layers, before] -= present
        worth[layers, ids] = rank(row, ids) * lookups + (row * top_k + last) + present  # exact: below 2**53
        before = ids
        return worth

    return keep_worthiest(experts, n_experts, sizes, value)


def _next_rows(experts: NDArray[Any], n_experts: int) -> NDArray[np.float64]:
    n_rows, n_layers, top_k = experts.shape
    result = np.empty(experts.shape, np.float64)
    for layer in range(n_layers):
        ids = experts[:, layer].astype(np.int64).ravel()
        order = np.argsort(ids, kind="stable")  # by expert, then by row
        same = ids[order][1:] == ids[order][:-1]
        upcoming = np.full(len(ids), 2.0 * n_rows)
        upcoming[order[:-1][same]] = order[1:][same] // top_k
        result[:, layer] = upcoming.reshape(n_rows, top_k)
    return result


def keep_worthiest(experts: NDArray[Any], n_experts: int, sizes: NDArray[np.int64], value: Worth) -> NDArray[np.int64]:
    """Evict the least worthy after each row, down to the cache's size."""
    n_rows, n_layers, top_k = experts.shape
    # 0 for what is held, infinite for what is not: adding it to the worth is several times faster than a mask.
    away = np.full((len(sizes), n_layers, n_experts), np.inf)
    worth = np.empty(away.shape, np.float64)
    away_flat, worth_flat = away.reshape(-1, n_experts), worth.reshape(-1, n_experts)
    n_held = np.zeros((len(sizes), n_layers), np.int64)
    hits = np.zeros((len(sizes), n_layers), np.int64)
    layers = np.arange(n_layers)[:, None]
    for row in range(n_rows):
        ids = experts[row].astype(np.int64)
        found = (away[:, layers, ids] == 0).sum(axis=2)
        hits += found
        n_held += top_k - found
        away[:, layers, ids] = 0
        np.add(away, value(row, ids), out=worth)
        excess = (n_held - sizes[:, None]).ravel()
        over = np.flatnonzero(excess > 0)
        while len(over):
            worst = worth_flat[over].argmin(axis=1)
            away_flat[over, worst] = worth_flat[over, worst] = np.inf
            excess[over] -= 1
            over = over[excess[over] > 0]
        np.minimum(n_held, sizes[:, None], out=n_held)
    return hits


MRS_ALPHA = 0.5
"""HybriMoE's weight of the present row (its code)."""
W_SIZE = 4
"""DALI's window, in visits."""


def keep_top(scores: NDArray[Any], p: int) -> NDArray[np.float32]:
    """Zero all but the p largest scores of each row."""
    full = np.asarray(scores, np.float32)
    if p >= full.shape[-1]:
        return full
    threshold = np.partition(full, full.shape[-1] - p, axis=-1)[..., -p, None]
    return np.where(full >= threshold, full, np.float32(0))


def mrs_update(mrs: NDArray[np.float64], kept: NDArray[Any], alpha: float = MRS_ALPHA) -> NDArray[np.float64]:
    """Move MRS scores on by one row (HybriMoE, equation 3)."""
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
    """Replay HybriMoE's cache."""
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
    """Return the experts that DALI replaces at the end of a window."""
    return max(1, min(8, n_experts // 8))


def workload_aware_hits(
    experts: NDArray[Any], n_experts: int, capacities: Sequence[int], u_size: int, w_size: int = W_SIZE, seed: int = 0
) -> NDArray[np.float64]:
    """Replay DALI's cache (Algorithm 2)."""
    n_rows, n_layers, top_k = experts.shape
    order = np.random.default_rng(seed).random((n_layers, n_experts)).argsort(axis=-1)
    held = [order.argsort(axis=-1) < c for c in capacities]
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
            victims, newcomers = (np.argpartition(key, u - 1, axis=-1)[:, :u] for key in (low, high))
            cache[layers, victims] = False
            cache[layers, newcomers] = True
    return np.asarray(hits / max(1, n_rows * top_k))


def static_hits(frequency: NDArray[Any], popularity: NDArray[Any], capacities: Sequence[int]) -> NDArray[np.float64]:
    """Compute the hit rate of a cache of the most popular experts."""
    order = np.argsort(-np.asarray(popularity, np.float64), axis=-1, kind="stable")
    within = np.cumsum(np.take_along_axis(np.asarray(frequency, np.float64), order, axis=-1), axis=1)
    return np.stack([within[:, c - 1] if c else within[:, 0] * 0 for c in capacities])


def check_uniform_rows(n_rows: int, n_layers: int, n_experts: int) -> None:
    """Refuse rows that would take too much memory."""
    check_made("statistics", "random scores to compare with", (n_rows, n_layers, n_experts), 8, "check the number of experts")


def uniform_rows(n_rows: int, n_layers: int, n_experts: int, top_k: int, seed: int = 0) -> NDArray[np.int64]:
    """Draw rows of a uniform router: top_k different experts at random."""
    check_uniform_rows(n_rows, n_layers, n_experts)
    drawn = np.random.default_rng(seed).random((n_rows, n_layers, n_experts))
    return np.argsort(drawn, axis=-1, kind="stable")[:, :, :top_k]  # a partition's order depends on the processor


_TABLES = ("activation_frequency_{phase}", "activation_frequency")
_NULL_ROWS, _NULL_LAYERS = 2048, 4


def caches(context: Context) -> dict[str, Any]:
    """Compute hit rates by cache size."""
    context.begin("LRU, LFU, Belady", 4)
    sample = context.sample
    trace = sample.trace
    n_experts, top_k = trace.n_experts, trace.top_k
    capacities = sorted({c for share in CACHE_SHARES if 0 < (c := round(share * n_experts)) < n_experts})
    u_size = default_u_size(n_experts)
    textbook = layer_hit_rates(sample.experts, n_experts, capacities, ("lru", "lfu", "belady-visit", "belady"))
    rates: dict[str, NDArray[np.float64] | None] = {**textbook}
    context.begin("MRS", 5)
    scores, basis = mrs_scores(trace, sample.rows)
    if scores is None:
        rates["mrs"], context.absent["hit_rate.mrs"] = None, basis
    else:
        p = min(n_experts, top_k if trace.recorded_scores is None else 2 * top_k)
        rates["mrs"] = mrs_hits(sample.experts, scores, p, capacities)
    context.begin("workload-aware", 3)
    rates["workload-aware"] = workload_aware_hits(sample.experts, n_experts, capacities, u_size)
    table = next((name for t in _TABLES if (name := t.format(phase=sample.phase)) in trace.tables), None)
    if table is None:
        rates["static"], context.absent["hit_rate.static"] = None, "the trace has no activation frequencies of other requests"
    else:
        rates["static"] = static_hits(context.frequency, np.asarray(trace.tables[table]), capacities)
    rates["static-hindsight"] = static_hits(context.frequency, context.frequency, capacities)
    drawn = uniform_rows(_NULL_ROWS, _NULL_LAYERS, n_experts, top_k)
    random = layer_hit_rates(drawn, n_experts, capacities, ("belady", "belady-visit"))
    return {
        "capacities": capacities, "shares": [c / n_experts for c in capacities],
        "hit_rate": {name: None if rate is None else rate.mean(axis=1) for name, rate in rates.items()},
        "hit_rate_by_layer": {name: rate for name, rate in rates.items() if rate is not None},
        "uniform": [c / n_experts for c in capacities], "uniform_belady": random["belady"].mean(axis=1),
        "uniform_belady_visit": random["belady-visit"].mean(axis=1), "mrs_basis": basis,
        "workload_aware": {"w_size": W_SIZE, "u_size": u_size}, "static_table": table,
    }  # fmt: skip
