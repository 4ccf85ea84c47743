"""The reference figures of a trace, to which synthetic ones are fitted.

Batch 1, averaged over layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moesim.trace.stats.balance import activation_frequency, normalised_entropy, select, top_over_uniform
from moesim.trace.stats.caches import CACHE_SHARES, layer_hit_rates
from moesim.trace.stats.locality import prefill_decode_cosine, reuse, reuse_baseline
from moesim.trace.stats.prediction import coactivation_recall, signal_recall

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.trace import Trace

REUSE_DISTANCES = (1, 8)


def stats(
    trace: Trace, phase: str = "decode", *, max_rows: int | None = None, cache_shares: Sequence[float] = CACHE_SHARES
) -> dict[str, Any]:
    """Describe the routing of a trace.

    Parameters
    ----------
    trace : Trace
    phase : str
        ``"decode"`` or ``"prefill"``.
    max_rows : int or None
        Stop after the request in which this many rows are reached; None: all rows.
    cache_shares : sequence of float
        Sizes of a layer's cache, as shares of its experts.

    Returns
    -------
    dict
        ``shape``, ``n_rows``, ``n_requests``, ``sampled``; ``reuse@n``, ``reuse_baseline``; ``entropy``,
        ``top_over_uniform``; ``cache_shares`` and ``hit_rate`` (policy -> one rate for each share);
        ``next_layer_recall`` (source -> recall); ``prefill_decode_cosine`` (None without both phases).

    Raises
    ------
    TraceError
        If the trace has no rows of that phase.
    """
    sample = select(trace, phase, max_rows)
    experts, request, n_experts = sample.experts, sample.request, trace.n_experts
    frequency = activation_frequency(experts, n_experts)
    capacities = [round(share * n_experts) for share in cache_shares]
    rates = layer_hit_rates(experts, n_experts, capacities)
    recalls = {name: signal_recall(trace, signal, sample.rows) for name, signal in sorted(trace.signals.items())}
    recalls["coactivation"] = coactivation_recall(experts, request, n_experts)
    return {
        "shape": {"n_layers": trace.n_layers, "n_experts": n_experts, "top_k": trace.top_k}, "phase": phase,
        "n_rows": len(sample.rows), "n_requests": sample.n_requests, "sampled": sample.sampled,
        **{f"reuse@{n}": reuse(experts, request, n, n_experts) for n in REUSE_DISTANCES},
        "reuse_baseline": reuse_baseline(experts, n_experts), "entropy": normalised_entropy(frequency),
        "top_over_uniform": top_over_uniform(frequency), "cache_shares": list(cache_shares),
        "cache_capacities": capacities,
        "hit_rate": {name: rate.mean(axis=1).tolist() for name, rate in rates.items()},
        "next_layer_recall": recalls, "prefill_decode_cosine": prefill_decode_cosine(trace),
    }  # fmt: skip
