"""How well signals tell which experts of a batch will be busiest: the accuracy that DALI prints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from moesim.trace.stats.batches import compose, workloads
from moesim.trace.stats.prediction import top_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from moesim.trace import Signal, Trace


class WorkloadRecall(NamedTuple):
    """Recall of the busiest experts at one batch size."""

    batch_size: int
    n_steps: int
    n: tuple[int, ...]
    by_layer: NDArray[np.float64]
    """(len(n), n_layers): nan in layers that the signal says nothing about."""
    chance: NDArray[np.float64]
    """(len(n),): what experts named at random would score, mean over the layers that are covered."""


def busiest_found(predicted: NDArray[Any], true: NDArray[Any], n: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Compare the n experts with the largest predicted workload with those with the largest true one.

    >>> busiest_found(np.array([[3, 1, 0, 0]]), np.array([[2, 0, 1, 1]]), 2)
    (array([0.5]), array([0.75]))
    """
    n_experts = true.shape[1]
    possible = np.minimum(n, (true > 0).sum(axis=1))
    least = np.partition(true, n_experts - n, axis=1)[:, n_experts - n]
    right = true >= np.maximum(least, 1)[:, None]
    # One key for workload and id, so that the n first are determined.
    key = -predicted.astype(np.int64) * n_experts + np.arange(n_experts)
    named = np.argpartition(key, n - 1, axis=1)[:, :n]
    found = np.take_along_axis(right & (predicted > 0), named, axis=1).sum(axis=1) / possible
    return found, right.mean(axis=1) * n / possible


def workload_recall(
    trace: Trace, signal: Signal, rows: NDArray[Any], batch_sizes: Sequence[int], counts: Sequence[int], seed: int = 0
) -> list[WorkloadRecall]:
    """Compute how well a signal names the busiest experts of batches of different requests.

    DALI (2026) prints the top 1 and 2 (Table 2); PreScope's accuracy is another, see
    `docs/reference/predictors.md`. The rows that the signal covers are composed
    into batches (see `moesim.trace.stats.batches.compose`); its top_k of every row are counted like the routed experts.
    """
    wanted = np.flatnonzero(np.isin(signal.rows, rows))
    covered = np.asarray(signal.rows)[wanted]
    n_layers, n_experts = trace.n_layers, trace.n_experts
    sizes = tuple(n for n in counts if n < n_experts)
    layers = range(signal.first_layer, n_layers)
    if not len(covered) or not sizes or not layers:
        return []
    true_ids = np.asarray(trace.experts)[covered]
    said_ids = top_ids(signal, wanted, trace.top_k)
    request = np.asarray(trace.request)[covered]
    result = []
    for size in batch_sizes:
        batches = compose(request, size, seed)
        if not batches:
            continue
        steps = np.concatenate(batches)
        found, chance = np.full((len(sizes), n_layers), np.nan), np.zeros((len(sizes), len(layers)))
        for layer in layers:
            true, said = (workloads(ids[:, layer][steps], n_experts) for ids in (true_ids, said_ids))
            for i, n in enumerate(sizes):
                right, by_chance = busiest_found(said, true, n)
                found[i, layer], chance[i, layer - signal.first_layer] = right.mean(), by_chance.mean()
        result.append(WorkloadRecall(size, len(steps), sizes, found, chance.mean(axis=1)))
    return result
