"""Batches of decode rows: their distinct experts, and how rows of experts change by step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.trace.stats.balance import activation_frequency, spans

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from moesim.trace.stats.balance import Context

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
HEAT_MAP_STEPS = 32
FAR = 16
"""Steps from which two count as far apart, where the workloads of neighbours are compared with those of others."""


def compose(request: NDArray[Any], size: int, seed: int = 0) -> list[NDArray[np.int64]]:
    """Batch rows of different requests: a step takes the next of each."""
    first, length = spans(request)
    order = np.random.default_rng(seed).permutation(len(first))
    groups = order[: len(order) // size * size].reshape(-1, size)
    return [first[g] + np.arange(length[g].min(), dtype=np.int64)[:, None] for g in groups]


def workloads(ids: NDArray[Any], n_experts: int) -> NDArray[np.int32]:
    """Count the rows of each step that go to each expert of one layer."""
    n_steps = len(ids)
    cells = ids.reshape(n_steps, -1).astype(np.int64) + np.arange(n_steps)[:, None] * n_experts
    return np.bincount(cells.ravel(), minlength=n_steps * n_experts).reshape(n_steps, n_experts).astype(np.int32)


def distinct_experts(experts: NDArray[Any], batches: Sequence[NDArray[np.int64]], n_experts: int) -> NDArray[np.float64]:
    """Count the experts that a step of a batch needs in each layer."""
    steps = np.concatenate(batches)
    found = [(workloads(experts[:, layer][steps], n_experts) > 0).sum(axis=1).mean() for layer in range(experts.shape[1])]
    return np.array(found)


def uniform_distinct(n_experts: int, top_k: int, batch_size: int) -> float:
    """Compute the experts that a batch of random rows needs on average."""
    return float(n_experts * (1 - (1 - top_k / n_experts) ** batch_size))


def independent_distinct(experts: NDArray[Any], n_experts: int, batch_size: int) -> float:
    """Compute the experts that a batch of any rows of the trace would need."""
    share = activation_frequency(experts, n_experts) * experts.shape[2]
    return float((1 - (1 - share) ** batch_size).sum(axis=1).mean())


def workload_correlation(
    experts: NDArray[Any], batches: Sequence[NDArray[np.int64]], n_experts: int, n_steps: int = HEAT_MAP_STEPS
) -> dict[str, Any] | None:
    """Correlate the rows of experts in the steps of a batch."""
    long = [b for b in batches if len(b) > 1]
    if not long:
        return None
    n_layers, top_k = experts.shape[1:]
    n = min(n_steps, *(len(b) for b in long))
    total = np.zeros((n, n))
    kept = []
    for batch in long:
        for layer in range(n_layers):
            load = workloads(experts[:, layer][batch], n_experts)
            total += _correlation(load[:n].astype(np.int64))
            busiest = np.argsort(-load, axis=1, kind="stable")[:, :top_k]
            kept.append((busiest[1:, :, None] == busiest[:-1, None, :]).any(axis=2).mean())
    matrix = total / (len(long) * n_layers)
    apart = np.abs(np.subtract.outer(np.arange(n), np.arange(n)))
    distant = matrix[apart >= FAR]
    return {
        "matrix": matrix,  # (T, T): correlation of the rows of experts in steps i and j, mean over batches and layers
        "adjacent": float(matrix[apart == 1].mean()),
        "distant": float(distant.mean()) if distant.size else float("nan"),
        "kept": float(np.mean(kept)),  # share of the top_k experts by rows that are among those of the next step
    }


def _correlation(load: NDArray[np.int64]) -> NDArray[np.float64]:
    """Correlate rows; one that is the same for all experts correlates with none."""
    total = load.sum(axis=1)
    products = load.shape[1] * (load @ load.T) - np.outer(total, total)  # integers: exact, in whatever order they are added
    norm = np.sqrt(products.diagonal())
    norms = np.outer(norm, norm)
    return np.asarray(np.divide(products, norms, out=np.zeros_like(norms), where=norms > 0))


def batching(context: Context) -> dict[str, Any]:
    """Compute the distinct experts of a layer by batch size."""
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
