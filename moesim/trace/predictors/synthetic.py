"""Predictions of a stated recall, made from the true routing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from moesim.trace.predictors.contract import Prediction
    from moesim.trace.workload import Step

LOOKAHEAD = 1  # layers
_CELLS_AT_ONCE = 2**20  # (row, layer, expert) cells up to which all layers of a step are drawn together


class Synthetic:
    """The true routing, spoilt to a stated recall.

    Each routed expert is kept with probability ``recall`` and otherwise replaced in its place by one that was
    not routed, so that a row's ids stay distinct. The scores are the true gate weights by rank.
    A layer's predictions do not depend on the recalls of other layers.

    Parameters
    ----------
    n_experts : int
        Experts of a layer. If fewer than top_k of them are not routed, recall cannot fall to 0.
    recall : float or sequence of float
        Expected share of routed experts among the predicted, 0 to 1; several: of layer 1, the first that is
        predicted, of layer 2 and so on, the last of them for all the rest. Without lookahead the first is layer 0.
    seed : int
        The same seed, step, layer and row give the same answer, however often and in whatever order it is
        asked.
    lookahead : int
        Layers between the one whose state is needed and the one predicted; 0: no state is, as for a shadow.
    """

    label = "synthetic"

    def __init__(self, n_experts: int, recall: float | Sequence[float], seed: int = 0, lookahead: int = LOOKAHEAD) -> None:
        recalls = [float(one) for one in ([recall] if isinstance(recall, int | float) else recall)]
        wrong = [one for one in recalls if not 0.0 <= one <= 1.0]
        if wrong or not recalls:
            raise ConfigError(f"predictor synthetic: expected a recall from 0 to 1, got {wrong[0] if wrong else 'none'}")
        self.name = f"synthetic:{','.join(f'{one:g}' for one in recalls)}"
        self._n_experts = n_experts
        self._recalls = np.array(recalls)
        self._seed = seed
        self._lookahead = lookahead
        self._step: Step | None = None
        self._ready: dict[tuple[int, int], NDArray[Any]] = {}  # (micro-batch, layer) of that step -> ids

    def needs_layer(self, layer: int) -> int | None:
        """Tell the layer before; None for layer 0, which is not predicted, and without lookahead."""
        return layer - self._lookahead if 0 < self._lookahead <= layer else None

    def predict(self, step: Step, mb: int, layer: int) -> Prediction | None:
        """Spoil the true routing; None for layer 0, unless no lookahead is needed."""
        if layer < self._lookahead:
            return None
        if step is not self._step:
            self._step, self._ready = step, {}
        if (mb, layer) not in self._ready:
            micro = step.micro[mb]
            cells = micro.n_rows * len(micro.layers) * self._n_experts
            layers = range(len(micro.layers)) if cells <= _CELLS_AT_ONCE else [layer]
            ids = self._spoil(step, mb, layers)
            self._ready |= {(mb, which): part for which, part in zip(layers, ids, strict=True)}
        return self._ready[mb, layer], step.micro[mb].layers[layer].weights

    def _spoil(self, step: Step, mb: int, layers: Sequence[int]) -> NDArray[Any]:
        micro = step.micro[mb]
        routed = np.stack([micro.layers[layer].experts for layer in layers]).astype(np.int64)
        top_k = routed.shape[2]
        rows = np.arange(micro.first_row, micro.first_row + micro.n_rows)
        draws = uniform(self._seed, step.index, np.array(layers), rows, top_k + self._n_experts)
        nth_layer = np.clip(np.array(layers) - self._lookahead, 0, len(self._recalls) - 1)
        wrong = draws[..., :top_k] >= self._recalls[nth_layer][:, None, None]
        spoilt = np.nonzero(wrong.any(axis=2))  # most rows have no wrong slot, and need no order of the others
        kept, wrong, order = routed[spoilt], wrong[spoilt], draws[..., top_k:][spoilt]
        np.put_along_axis(order, kept, 2.0, axis=1)  # the routed ones come last
        others = np.argsort(order, axis=1, kind="stable")
        # The i-th wrong slot of a row takes the i-th of the others, as far as there are any.
        nth = np.cumsum(wrong, axis=1) - 1
        wrong &= nth < self._n_experts - top_k
        routed[spoilt] = np.where(wrong, np.take_along_axis(others, np.clip(nth, 0, None), axis=1), kept)
        return routed


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64: Steele, Lea, Flood, OOPSLA 2014
_MIX = ((np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB)))
_LAST_SHIFT = np.uint64(31)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    for shift, factor in _MIX:
        x = (x ^ (x >> shift)) * factor
    return x ^ (x >> _LAST_SHIFT)


def uniform(seed: int, step: int, layers: NDArray[Any], rows: NDArray[Any], n: int) -> NDArray[np.float64]:
    """Draw numbers that depend on their place only: a counter hashed with SplitMix64."""
    state = np.zeros(1, np.uint64)
    for word in (np.array([seed]), np.array([step]), layers[:, None, None], rows[:, None], np.arange(n)):
        state = _mix(state + (word.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (state >> np.uint64(11)).astype(np.float64) / 2.0**53
