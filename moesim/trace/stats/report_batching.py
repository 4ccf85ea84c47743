"""Batching: how many experts a layer needs at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moesim.trace.stats.batches import BATCH_SIZES, compose, distinct_experts, independent_distinct, uniform_distinct

if TYPE_CHECKING:
    from moesim.trace.stats.context import Context


def batching(context: Context) -> dict[str, Any]:
    """Compute the distinct experts of a layer by batch size; ``docs/reference/statistics.md`` defines them."""
    context.begin("batching", 1)
    sample = context.sample
    n_experts, top_k = sample.trace.n_experts, sample.trace.top_k
    sizes = [b for b in BATCH_SIZES if b <= sample.n_requests]
    found = [distinct_experts(sample.experts, compose(sample.request, b), n_experts) for b in sizes]
    if len(sizes) == 1:
        context.absent["distinct.larger"] = "batches are composed of different requests, and the trace has one"
    return {
        "batch_sizes": sizes,
        "distinct": [of_layers.mean() for of_layers in found],
        "uniform": [uniform_distinct(n_experts, top_k, b) for b in sizes],
        "independent": [independent_distinct(sample.experts, n_experts, b) for b in sizes],
        "by_layer": found,
    }
