"""HOBBIT's choices as other papers describe them: the precision of a missing expert, and the score by which copies leave.

Its own paper was not read: the forms of thresholds and scores are choices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

Precision = Literal["high", "low", "skip"]


class ScoreWeights(NamedTuple):
    """Weights of the four scores of a cached expert."""

    lru: float
    lfu: float
    lhu: float
    fld: float


def relative_weights(experts: NDArray[Any], weights: NDArray[Any]) -> dict[int, float]:
    """Return how heavy each expert is in the row in which it is heaviest, in units of the mean weight of that row.

    Parameters
    ----------
    experts : ndarray of int, (n_rows, top_k)
        Ids that the gate chose, or is predicted to choose.
    weights : ndarray of float, (n_rows, top_k)
        Their gate weights, not negative. The experts of a row whose weights are all 0 count as equally heavy.

    Returns
    -------
    dict of int to float
        By expert, ascending.

    Notes
    -----
    HOBBIT, as OD-MoE describes it: thresholds on the gate weight. Relative units, and the heaviest row of several, are choices.
    With 2 experts a row whose weights add up to 1, a relative weight of 0.8 is a weight of 0.4.

    Examples
    --------
    >>> relative_weights(np.array([[3, 1], [1, 0]]), np.array([[0.75, 0.25], [0.5, 0.5]]))
    {0: 1.0, 1: 1.0, 3: 1.5}
    """
    of_row = np.asarray(weights, np.float64)
    whole = of_row.sum(axis=1, keepdims=True)
    shares = np.divide(of_row * of_row.shape[1], whole, out=np.ones_like(of_row), where=whole > 0)
    found, at = np.unique(experts, return_inverse=True)
    heaviest = np.zeros(len(found))
    np.maximum.at(heaviest, at.ravel(), shares.ravel())
    return dict(zip(found.tolist(), heaviest.tolist(), strict=True))


def choose_precision(weight: float, high_weight: float, low_weight: float) -> Precision:
    """Choose what becomes of an expert that is not on the GPU.

    Parameters
    ----------
    weight : float
        Of the expert.
    high_weight : float
        From this weight on the expert is copied at high precision.
    low_weight : float
        Below this weight the expert is skipped. What is between both is copied at low precision.

    Notes
    -----
    HOBBIT, as OD-MoE describes it. On which side of a threshold equality falls is a choice.

    Examples
    --------
    >>> [choose_precision(weight, 0.8, 0.2) for weight in (1.5, 0.8, 0.5, 0.2, 0.1)]
    ['high', 'high', 'low', 'low', 'skip']
    """
    if weight < low_weight:
        return "skip"
    return "high" if weight >= high_weight else "low"


def victim_scores(
    last: NDArray[Any], uses: NDArray[Any], high_uses: NDArray[Any], layers: NDArray[Any],
    now: int, layer: int, n_layers: int, weights: ScoreWeights,
) -> NDArray[np.float64]:  # fmt: skip
    """Score cached experts; the one with the lowest score leaves first.

    The weighted sum of four scores from 0 to 1: how recent the last use is (LRU), in what share of the steps so far the expert
    was used (LFU), in what share at high precision (LHU), and how soon the pass comes to its layer (FLD).

    Parameters
    ----------
    last : ndarray of int
        Step of the last use of each expert, counted from 1; 0: never used.
    uses, high_uses : ndarray of int, as ``last``
        Steps in which each expert was used, and in which it was used at high precision.
    layers : ndarray of int
        Layer of each expert; must broadcast to the shape of ``last``.
    now : int
        The present step, counted from 1.
    layer, n_layers : int
        The layer routed last, and how many there are. The next layer is 1 away, the present one a whole pass.
    weights : ScoreWeights
        Of the four scores.

    Returns
    -------
    ndarray of float64, as ``last``

    Notes
    -----
    HOBBIT, as OD-MoE describes it: a weighted sum of LRU, LFU, LHU and FLD. The four forms are choices.

    Examples
    --------
    >>> ones = np.array([1, 1])
    >>> victim_scores(ones * 3, ones * 2, ones, np.array([1, 0]), 4, 0, 2, ScoreWeights(1, 1, 1, 1)).tolist()
    [2.0, 1.5]
    """
    distance = (np.asarray(layers) - layer - 1) % n_layers + 1
    found: NDArray[np.float64] = (
        weights.lru * (last / now)
        + weights.lfu * (uses / now)
        + weights.lhu * (high_uses / now)
        + weights.fld * (1 - distance / n_layers)
    )
    return found
