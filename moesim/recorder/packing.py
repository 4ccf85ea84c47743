"""Scores of a predictor in the form in which a trace keeps them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def pack(scores: NDArray[Any], best: NDArray[Any], *, dense: bool) -> tuple[NDArray[np.float16], NDArray[Any] | None]:
    """Round scores, and keep the best of them or all."""
    n_experts, top_k = scores.shape[-1], best.shape[-1]
    order = _ranked(scores, best.astype(np.int64))
    if dense:
        return _keep_order(scores.astype(np.float16), order), None
    kept = order[..., : min(2 * top_k, n_experts)]
    return np.take_along_axis(scores, kept, axis=-1).astype(np.float16), kept.astype(np.uint8 if n_experts <= 256 else np.uint16)


def _ranked(scores: NDArray[Any], best: NDArray[np.int64]) -> NDArray[np.int64]:
    """All ids: the best as given, then the others by score, among equal ones the lower id first."""
    keys = scores.astype(np.float64)
    places = np.broadcast_to(np.arange(best.shape[-1], 0, -1) + keys.max(initial=0), best.shape)
    np.put_along_axis(keys, best, places, axis=-1)
    return np.argsort(-keys, axis=-1, kind="stable")


def _keep_order(rounded: NDArray[np.float16], order: NDArray[np.int64]) -> NDArray[np.float16]:
    """Raise scores, from the last rank up, where a reader would otherwise rank them differently."""
    ranked = np.take_along_axis(rounded, order, axis=-1)
    for rank in range(ranked.shape[-1] - 2, -1, -1):
        below = ranked[..., rank + 1]
        # Among equal scores a reader takes the lower id first.
        floor = np.where(order[..., rank] < order[..., rank + 1], below, np.nextafter(below, np.float16(np.inf)))
        ranked[..., rank] = np.maximum(ranked[..., rank], floor)
    np.put_along_axis(rounded, order, ranked, axis=-1)
    return rounded
