"""How well routing can be told in advance: recall of recorded signals and of a co-occurrence table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.core.gate import check_pairs

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moesim.trace import Signal, Trace


def recall(predicted: NDArray[Any], experts: NDArray[Any]) -> NDArray[np.float64]:
    """Compute the share of the routed experts that were predicted, layer by layer."""
    found = (experts[..., :, None] == predicted[..., None, :]).any(axis=3)
    return np.asarray(found.mean(axis=(0, 2)), np.float64)


def signal_recall(trace: Trace, signal: Signal, rows: NDArray[Any] | None = None) -> float:
    """Compute the recall of a recorded signal's top_k, over the layers and rows it covers."""
    by_layer = signal_recall_by_layer(trace, signal, rows)
    return float("nan") if np.isnan(by_layer).all() else float(np.nanmean(by_layer))


def signal_recall_by_layer(trace: Trace, signal: Signal, rows: NDArray[Any] | None = None) -> NDArray[np.float64]:
    """Compute the recall of a recorded signal's top_k, layer by layer."""
    covered = np.asarray(signal.rows)
    wanted = np.ones(len(covered), bool) if rows is None else np.isin(covered, rows)
    result = np.full(trace.n_layers, np.nan)
    if wanted.any():
        layers = slice(signal.first_layer, None)
        predicted = top_ids(signal, wanted, trace.top_k)[:, layers]
        result[layers] = recall(predicted, np.asarray(trace.experts)[covered[wanted]][:, layers])
    return result


def top_ids(signal: Signal, which: Any, top_k: int) -> NDArray[Any]:
    """Read the best ids of a signal."""
    if signal.ids is not None:
        return np.asarray(signal.ids[which][..., :top_k])
    return np.argsort(-np.asarray(signal.scores[which], np.float32), axis=-1, kind="stable")[..., :top_k]


def coactivation(experts: NDArray[Any], n_experts: int) -> NDArray[np.int64]:
    """Count which experts of the next layer follow those of each layer."""
    n_layers = experts.shape[1]
    check_pairs("co-activation", n_layers, n_experts)
    table = np.zeros((n_layers, n_experts, n_experts), np.int64)
    for layer in range(n_layers - 1):
        table[layer] = pair_counts(experts[:, layer], experts[:, layer + 1], n_experts)
    return table


def pair_counts(here: NDArray[Any], there: NDArray[Any], n_experts: int) -> NDArray[np.int64]:
    """Count pairs of experts that the same rows used in two layers."""
    check_pairs("co-activation", 1, n_experts)
    pairs = here.astype(np.int64)[:, :, None] * n_experts + there.astype(np.int64)[:, None, :]
    return np.bincount(pairs.ravel(), minlength=n_experts**2).reshape(n_experts, n_experts)


def conditional(counts: NDArray[Any]) -> NDArray[np.float64]:
    """Turn pair counts into P(there | here)."""
    total = np.asarray(counts, np.float64).sum(axis=1, keepdims=True)
    shares = np.zeros(counts.shape, np.float64)
    np.divide(counts, total, out=shares, where=total > 0)
    return shares


def coactivation_scores(shares: NDArray[np.float64], experts: NDArray[Any]) -> NDArray[np.float64]:
    """Score the experts of the next layer by those of this one."""
    return np.asarray(shares[experts.astype(np.int64)].sum(axis=1))


def coactivation_recall(experts: NDArray[Any], request: NDArray[Any], n_experts: int) -> float:
    """Compute the recall of a co-occurrence table, counted over a random half of the requests and tried on the rest."""
    by_layer = coactivation_recall_by_layer(experts, request, n_experts)
    return float("nan") if np.isnan(by_layer).all() else float(np.nanmean(by_layer))


def coactivation_recall_by_layer(experts: NDArray[Any], request: NDArray[Any], n_experts: int) -> NDArray[np.float64]:
    """Compute the recall of a co-occurrence table layer by layer.

    The halves are drawn with a fixed seed. Every other request would not do: in many recordings kinds of text take
    turns, and a table of one kind tried on another measures something else.
    """
    numbers, number = np.unique(request, return_inverse=True)
    is_seen = np.random.default_rng(0).permutation(len(numbers)) < (len(numbers) + 1) // 2
    seen, unseen = experts[is_seen[number]], experts[~is_seen[number]]
    n_layers, top_k = experts.shape[1:]
    result = np.full(n_layers, np.nan)
    if not len(unseen):
        return result
    chosen = np.zeros((len(unseen), n_experts), np.float64)
    for layer in range(n_layers - 1):
        shares = conditional(pair_counts(seen[:, layer], seen[:, layer + 1], n_experts))
        chosen[:] = 0
        np.put_along_axis(chosen, unseen[:, layer].astype(np.int64), 1.0, axis=1)
        result[layer + 1] = among_best(chosen @ shares, unseen[:, layer + 1], top_k).mean()
    return result


def among_best(scores: NDArray[Any], ids: NDArray[Any], n: int) -> NDArray[np.bool_]:
    """Tell which experts are among the n best of their row; among equal scores the lower id is better.

    >>> among_best(np.array([[1, 3, 3, 3]]), np.array([[2, 3]]), 2).tolist()
    [[True, False]]
    """
    which = ids.astype(np.int64)
    mine = np.take_along_axis(scores, which, axis=1)
    found = np.empty(ids.shape, bool)
    number = np.arange(scores.shape[1])
    for j in range(ids.shape[1]):
        own = mine[:, j, None]
        better = (scores > own) | ((scores == own) & (number < which[:, j, None]))
        found[:, j] = better.sum(axis=1) < n
    return found
