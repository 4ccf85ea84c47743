"""Predictions of a stated recall, made from the true routing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moesim.predictors import Prediction
    from moesim.workload import Step

LOOKAHEAD = 1  # layers


class Synthetic:
    """The true routing, spoilt to a stated recall.

    Each routed expert is kept with probability ``recall`` and otherwise replaced in its place by one that was
    not routed, so that a row's ids stay distinct. The scores are the true gate weights by rank.

    Parameters
    ----------
    n_experts : int
        Experts of a layer. If fewer than top_k of them are not routed, recall cannot fall to 0.
    recall : float
        Expected share of routed experts among the predicted, 0 to 1.
    seed : int
        The same seed, step, layer and row give the same answer, however often and in whatever order it is
        asked.
    """

    label = "synthetic"

    def __init__(self, n_experts: int, recall: float, seed: int = 0) -> None:
        if not 0.0 <= recall <= 1.0:
            raise ConfigError(f"predictor synthetic: expected a recall from 0 to 1, got {recall!r}")
        self.name = f"synthetic:{recall:g}"
        self._n_experts = n_experts
        self._recall = recall
        self._seed = seed

    def needs_layer(self, layer: int) -> int | None:
        """Tell the layer before; None for layer 0, which is not predicted."""
        return layer - LOOKAHEAD if layer >= LOOKAHEAD else None

    def predict(self, step: Step, mb: int, layer: int) -> Prediction | None:
        """Spoil the true routing; None for layer 0."""
        if layer < LOOKAHEAD:
            return None
        routed = step.micro[mb].layers[layer]
        n_rows, top_k = routed.experts.shape
        rows = np.arange(n_rows) + step.micro[mb].first_row
        draws = uniform(self._seed, step.index, layer, rows, top_k + self._n_experts)
        wrong = draws[:, :top_k] >= self._recall
        order = draws[:, top_k:]
        np.put_along_axis(order, routed.experts.astype(np.int64), 2.0, axis=1)  # the routed ones come last
        others = np.argsort(order, axis=1, kind="stable")
        # The i-th wrong slot of a row takes the i-th of the others, as far as there are any.
        nth = np.cumsum(wrong, axis=1) - 1
        wrong &= nth < self._n_experts - top_k
        spoilt = np.take_along_axis(others, np.clip(nth, 0, None), axis=1)
        ids = np.where(wrong, spoilt, routed.experts)
        return ids, routed.weights


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64: Steele, Lea, Flood, OOPSLA 2014
_MIX = ((np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB)))
_LAST_SHIFT = np.uint64(31)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    for shift, factor in _MIX:
        x = (x ^ (x >> shift)) * factor
    return x ^ (x >> _LAST_SHIFT)


def uniform(seed: int, step: int, layer: int, rows: NDArray[Any], n: int) -> NDArray[np.float64]:
    """Draw numbers that depend on their place only: a counter hashed with SplitMix64.

    Parameters
    ----------
    seed, step, layer : int
        The place.
    rows : (n_rows,) integer
        Rows of the step.
    n : int
        Numbers for each row.

    Returns
    -------
    (n_rows, n) float64
        In [0, 1).
    """
    state = np.zeros(1, np.uint64)
    for word in (np.array([seed]), np.array([step]), np.array([layer]), rows[:, None], np.arange(n)[None, :]):
        state = _mix(state + (word.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (state >> np.uint64(11)).astype(np.float64) / 2.0**53
