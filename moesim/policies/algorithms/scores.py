"""HybriMoE's minus recent scores, as pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesim.trace.stats.caches import keep_top, mrs_update


def credit_by_id(scores: NDArray[Any], p: int) -> NDArray[np.float32]:
    """Keep the p largest scores of each row as HybriMoE's released code does, which mixes up whose score is whose.

    The largest score goes to the lowest id among those that are kept, the second largest to the next id, and so on.

    >>> credit_by_id(np.array([[0.25, 0, 0, 0.5, 0, 0.375]]), 3).tolist()
    [[0.5, 0.0, 0.0, 0.375, 0.0, 0.25]]
    """
    full = np.asarray(scores, np.float32)
    best = np.argsort(-full, axis=-1, kind="stable")[:, :p]
    found = np.zeros_like(full)
    np.put_along_axis(found, np.sort(best, axis=-1), np.take_along_axis(full, best, axis=-1), axis=-1)
    return found


def recent_scores(before: Sequence[float], scores: NDArray[Any], p: int, alpha: float, by_id: bool = False) -> list[float]:
    """Move the scores of a layer on by a visit: S <- alpha TopP(s) + (1 - alpha) S, of several rows with their mean.

    ``scores`` has a row for each token. ``by_id`` credits them by `credit_by_id`; else each expert has its own.

    >>> recent_scores([0.5, 0, 0, 0], np.array([[0.5, 0.25, 0.125, 0.125]]), 2, 0.5)
    [0.5, 0.125, 0.0, 0.0]
    """
    kept = (credit_by_id if by_id else keep_top)(scores, p)
    mean = kept[0] if len(kept) == 1 else kept.mean(axis=0, dtype=np.float64)
    found: list[float] = mrs_update(np.array(before), mean, alpha).tolist()
    return found


def recent_weights(
    before: Sequence[float], ids: NDArray[Any], weights: NDArray[Any], p: int, alpha: float, by_id: bool = False
) -> list[float]:
    """Move the scores of a layer on by a visit whose weights of the chosen experts stand in for scores; all others have 0.

    ``ids`` and ``weights`` have a row for each token.

    >>> recent_weights([0.5, 0, 0, 0], np.array([[0, 2], [3, 2]]), np.array([[0.75, 0.25], [0.5, 0.5]]), 1, 0.5)
    [0.4375, 0.0, 0.125, 0.125]
    """
    order = np.argsort(ids, axis=-1)
    ids, weights = (np.take_along_axis(one, order, axis=-1) for one in (ids, weights))
    kept = (credit_by_id if by_id else keep_top)(weights, p)
    total = np.bincount(ids.ravel(), kept.ravel(), len(before))
    found: list[float] = mrs_update(np.array(before), total / len(ids), alpha).tolist()
    return found
