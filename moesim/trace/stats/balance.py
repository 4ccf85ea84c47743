"""How evenly a router spreads its tokens, and how evenly a uniform one would have spread as many."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray


def used(experts: NDArray[Any], n_experts: int) -> NDArray[np.int64]:
    """Count the rows of (n_rows, n_layers, top_k) that used each expert: (n_layers, n_experts).

    >>> used(np.array([[[0, 2]], [[1, 2]]]), 4).tolist()
    [[1, 1, 2, 0]]
    """
    n_layers = experts.shape[1]
    places = experts + np.arange(n_layers, dtype=np.int64)[:, None] * n_experts
    return np.bincount(places.ravel(), minlength=n_layers * n_experts).reshape(n_layers, -1)


def activation_frequency(experts: NDArray[Any], n_experts: int) -> NDArray[np.float64]:
    """Compute each expert's share of the activations of its layer."""
    n_rows, _, top_k = experts.shape
    return np.asarray(used(experts, n_experts) / max(1, n_rows * top_k), np.float64)


def entropy_by_layer(frequency: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute the entropy of the activations over its largest value, log(n_experts)."""
    logs = np.log(np.where(frequency > 0, frequency, 1.0))
    return np.asarray(-(frequency * logs).sum(axis=-1) / np.log(frequency.shape[-1]))


def normalised_entropy(frequency: NDArray[np.float64]) -> float:
    """Average `entropy_by_layer` over layers.

    >>> round(normalised_entropy(np.full((2, 8), 1 / 8)), 9)
    1.0
    """
    return float(entropy_by_layer(frequency).mean())


def top_over_uniform(frequency: NDArray[np.float64]) -> float:
    """Compute how many times as often as the average expert the most used one is used; mean over layers."""
    return float(top_by_layer(frequency).mean())


def top_by_layer(frequency: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute the largest share over the average one; (..., n_experts) -> (...) float64."""
    return np.asarray(frequency.max(axis=-1) * frequency.shape[-1])


def gini(frequency: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute the Gini coefficient of the activations: our measure of skew.

    Chosen over the exponent of a fitted Zipf law because it needs no fit, takes experts that are never used, and
    does not depend on which ranks are fitted.

    >>> gini(np.array([[0.25, 0.25, 0.25, 0.25], [1, 0, 0, 0]])).tolist()
    [0.0, 0.75]
    """
    n = frequency.shape[-1]
    rank = 2 * np.arange(1, n + 1) - n - 1
    return np.asarray((np.sort(frequency, axis=-1) * rank).sum(axis=-1) / n)


def uniform_counts(
    rng: np.random.Generator, n_rows: ArrayLike, n_experts: int, top_k: int, shape: tuple[int, ...]
) -> NDArray[np.int64]:
    """Draw how often each expert is used if every token takes top_k different experts at random.

    Exact, without drawing tokens: of the tokens which still need j of the r experts that are left, a binomial
    number takes the next one, each with probability j / r.
    """
    needing = np.zeros((*shape, top_k + 1), np.int64)  # [..., j]: tokens which still need j experts
    needing[..., top_k] = n_rows
    counts = np.empty((*shape, n_experts), np.int64)
    for expert in range(n_experts):
        take = np.minimum(1.0, np.arange(top_k + 1) / (n_experts - expert))
        taken = rng.binomial(needing, take)
        counts[..., expert] = taken.sum(axis=-1)
        needing -= taken
        needing[..., :-1] += taken[..., 1:]
    return counts


def loads(experts: NDArray[Any], group: NDArray[Any], n_experts: int) -> NDArray[np.int64]:
    """Count the rows that each expert serves in each group of rows."""
    n_layers = experts.shape[1]
    n_groups = int(group.max()) + 1 if len(group) else 0
    counts = np.empty((n_groups, n_layers, n_experts), np.int64)
    base = group.astype(np.int64)[:, None] * n_experts
    for layer in range(n_layers):
        cells = (base + experts[:, layer]).ravel()
        counts[:, layer] = np.bincount(cells, minlength=n_groups * n_experts).reshape(n_groups, n_experts)
    return counts
