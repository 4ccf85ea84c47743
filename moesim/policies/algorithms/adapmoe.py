"""AdapMoE's pure functions: cache sizes of layers, what they are expected to cost, and when one expert is enough."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import numpy as np

from moesim.errors import CapacityError

SENSITIVITY = 0.005
"""Constant in the released code's thresholds."""


def expected_loads(size: int, n_experts: int, accuracy: float, single: float = 0.0) -> float:
    """Return the demand loads that one token is expected to need in a layer.

    Parameters
    ----------
    size : int
        Experts in the layer's cache, as if drawn at random.
    n_experts : int
        Experts of the layer.
    accuracy : float
        Chance that the one prefetched expert is a missing one; 0 for the first layer.
    single : float
        Share of tokens for which one expert is enough.

    Returns
    -------
    float
        Sum of four terms: one expert wanted and missing; of two, both missing, with a right prefetch and without; of two, one
        missing (AdapMoE, ICCAD 2024, arXiv:2408.10284; the terms are our derivation).

    Examples
    --------
    >>> [round(expected_loads(size, 8, 0.5), 3) for size in (0, 4, 8)]
    [1.5, 0.607, 0.0]
    """
    n, free = n_experts, n_experts - size
    both, one = free * (free - 1) / (n * (n - 1)), 2 * size * free / (n * (n - 1))
    alone = single * (1 - accuracy) * free / n
    return alone + (1 - single) * (accuracy * both + (1 - accuracy) * 2 * both + (1 - accuracy) * one)


def cache_sizes(loads: Sequence[Sequence[float]], total: int) -> list[int]:
    """Divide cache slots among layers so that the expected loads are fewest.

    Parameters
    ----------
    loads : sequence of sequence of float, shape (n_layers, n_experts + 1)
        Expected loads of each layer by its slots.
    total : int
        Slots of all layers; more than all experts are not used.

    Returns
    -------
    list of int, shape (n_layers,)
        At least 1 each; of equal sums, layer by layer from the last, the smallest size.

    Raises
    ------
    CapacityError
        If there are fewer slots than layers.

    Examples
    --------
    >>> cache_sizes([[9, 5, 1], [9, 8, 7], [9, 2, 2]], 4)
    [2, 1, 1]
    """
    n_layers, largest = len(loads), len(loads[0]) - 1
    if total < n_layers:
        raise CapacityError(
            f"cache sizes: expected at least a slot a layer, {n_layers} in all, got {total}; raise cache.ratio or cache.budget"
        )
    total = min(total, n_layers * largest)
    best = np.full(total + 1, np.inf)
    best[0] = 0.0
    chosen = np.zeros((n_layers, total + 1), np.int64)
    for layer, cost in enumerate(loads):
        found = np.full(total + 1, np.inf)
        for size in range(1, min(largest, total) + 1):
            with_it = best[: total + 1 - size] + cost[size]
            better = with_it < found[size:]
            found[size:][better] = with_it[better]
            chosen[layer, size:][better] = size
        best = found
    sizes, left = [], total
    for layer in reversed(range(n_layers)):
        sizes.append(int(chosen[layer, left]))
        left -= sizes[-1]
    return sizes[::-1]


def gating_threshold(sensitivity: float) -> float:
    """Return below which weight a token's second expert is left out.

    Parameters
    ----------
    sensitivity : float
        Of the layer: how much its output matters.

    Returns
    -------
    float
        sqrt(0.005 / sensitivity), of weights that sum to 1 (AdapMoE's released code).

    Examples
    --------
    >>> gating_threshold(0.02)
    0.5
    """
    return sqrt(SENSITIVITY / sensitivity)


def leaves_second_out(first: float, second: float, threshold: float) -> bool:
    """Say whether a token does without its second expert.

    Parameters
    ----------
    first, second : float
        Gate weights of its two experts, on any common scale.
    threshold : float
        See `gating_threshold`.

    Returns
    -------
    bool
        Whether the second weight, of weights that are scaled to sum to 1, is below the threshold (AdapMoE's released code).

    Examples
    --------
    >>> leaves_second_out(0.6, 0.2, 0.26), leaves_second_out(0.6, 0.2, 0.25)
    (True, False)
    """
    return second / (first + second) < threshold
