"""KTransformers' choices: experts on the GPU at the start, after a long prompt, and experts whose outputs may come late."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from moesim.policies.algorithms.caching import global_top

if TYPE_CHECKING:
    from numpy.typing import NDArray

Strategy = Literal["uniform", "front-loading", "random", "frequency"]


def gpu_experts(
    strategy: Strategy, total: int, n_layers: int, n_experts: int, *, seed: int = 42,
    counts: Sequence[Sequence[float]] | None = None,
) -> list[list[int]]:  # fmt: skip
    """Choose the experts of each layer that are on the GPU.

    Parameters
    ----------
    strategy : {"uniform", "front-loading", "random", "frequency"}
        As many of each layer, whole layers from the first, pairs drawn at random, or the most frequent pairs.
    total : int
        Experts over all layers.
    n_layers, n_experts : int
        MoE layers, and experts of each.
    seed : int
        Of ``random``. The released code draws from another generator.
    counts : sequence, (n_layers, n_experts), optional
        Activations of each expert, for ``frequency``.

    Examples
    --------
    >>> [len(layer) for layer in gpu_experts("uniform", 10, 4, 8)]
    [3, 3, 2, 2]
    >>> [len(layer) for layer in gpu_experts("front-loading", 10, 4, 8)]
    [8, 2, 0, 0]
    >>> gpu_experts("frequency", 3, 2, 4, counts=[[0.1, 0.5, 0.3, 0.8], [0.2, 0.4, 0.9, 0.1]])
    [[1, 3], [2]]
    """
    total = min(total, n_layers * n_experts)
    if strategy == "frequency":
        assert counts is not None
        return global_top(counts, total)
    if strategy == "random":
        drawn = np.random.default_rng(seed).permutation(n_layers * n_experts)[:total].tolist()
        return [sorted(unit % n_experts for unit in drawn if unit // n_experts == layer) for layer in range(n_layers)]
    if strategy == "uniform":
        each, more = divmod(total, n_layers)
        return [list(range(each + (layer < more))) for layer in range(n_layers)]
    return [list(range(max(0, min(n_experts, total - layer * n_experts)))) for layer in range(n_layers)]


def most_used(experts: NDArray[Any], n_experts: int, n: int) -> list[int]:
    """Return the n experts that most rows of a chunk are routed to, ascending; of equals the lower ids.

    Parameters
    ----------
    experts : ndarray of int, (n_rows, top_k)
        Ids that the router chose.
    n_experts, n : int
        Experts of the layer, and how many to return.

    Examples
    --------
    >>> most_used(np.array([[3, 1], [3, 2], [0, 1]]), 4, 3)
    [0, 1, 3]
    """
    counts = np.bincount(np.ravel(experts), minlength=n_experts).tolist()
    return sorted(sorted(range(n_experts), key=lambda expert: -counts[expert])[:n])


def split_late(
    experts: NDArray[Any], late: int, on_cpu: Collection[int], weights: NDArray[Any] | None = None
) -> tuple[list[int], list[int]]:  # fmt: skip
    """Divide the CPU's experts into those that a layer waits for, and those whose outputs the next layer adds.

    The ``top_k - late`` experts of each row with the largest weights are protected. An expert that any row protects is waited for
    by all rows.

    Parameters
    ----------
    experts : ndarray of int, (n_rows, top_k)
        Ids in rank order.
    late : int
        How many of each row may be late.
    on_cpu : collection of int
        Experts that the CPU computes; the GPU's are never late.
    weights : ndarray of float, (n_rows, top_k), optional
        The router's weights, of equals the first rank first; None: they fall with the rank.

    Returns
    -------
    tuple of list of int
        Waited for and late, each ascending.

    Examples
    --------
    >>> split_late(np.array([[9, 3, 7, 1]]), 2, {9, 3, 7})
    ([3, 9], [7])
    >>> split_late(np.array([[9, 3, 7, 1], [7, 5, 9, 1]]), 2, {9, 3, 7, 5})
    ([3, 5, 7, 9], [])
    >>> split_late(np.array([[9, 3, 7, 1]]), 2, {9, 3, 7}, np.array([[0.2, 0.3, 0.4, 0.1]]))
    ([3, 7], [9])
    """
    n_protected = max(0, experts.shape[1] - late)
    if weights is not None:
        experts = np.take_along_axis(experts, np.argsort(-weights, axis=1, kind="stable"), axis=1)
    protected = set(experts[:, :n_protected].ravel().tolist())
    return sorted(e for e in on_cpu if e in protected), sorted(e for e in on_cpu if e not in protected)
