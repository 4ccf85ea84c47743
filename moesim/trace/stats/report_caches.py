"""Caches: how often the experts of a token would have been in a cache, one a layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.trace.stats.layer_caches import layer_hit_rates
from moesim.trace.stats.score_caches import (
    W_SIZE,
    default_u_size,
    mrs_hits,
    mrs_scores,
    static_hits,
    uniform_rows,
    workload_aware_hits,
)
from moesim.trace.stats.trace_stats import CACHE_SHARES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moesim.trace.stats.context import Context

_TABLES = ("activation_frequency_{phase}", "activation_frequency")
_NULL_ROWS, _NULL_LAYERS = 2048, 4


def caches(context: Context) -> dict[str, Any]:
    """Compute hit rates by cache size; ``docs/reference/statistics.md`` defines them."""
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
        "capacities": capacities,
        "shares": [c / n_experts for c in capacities],
        "hit_rate": {name: None if rate is None else rate.mean(axis=1) for name, rate in rates.items()},
        "hit_rate_by_layer": {name: rate for name, rate in rates.items() if rate is not None},
        "uniform": [c / n_experts for c in capacities],
        "uniform_belady": random["belady"].mean(axis=1),
        "uniform_belady_visit": random["belady-visit"].mean(axis=1),
        "mrs_basis": basis,
        "workload_aware": {"w_size": W_SIZE, "u_size": u_size},
        "static_table": table,
    }
