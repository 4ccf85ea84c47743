"""Expert activation matrices: how often each expert of each layer served a sequence, and what that says about the next layers.

MoE-Infinity (arXiv:2401.14361) keeps such a matrix (EAM) of every sequence, finds the past one that is most like the present
one so far, and takes its later rows for what is to come.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

Mask = Literal["seen", "later"]
SMALLEST = 1e-8  # added to each share, so that nearness still counts among experts that were never used (released code)


def unit_rows(counts: NDArray[Any]) -> NDArray[np.float64]:
    """Scale each row to a Euclidean length of 1; a row of zeros stays.

    Examples
    --------
    >>> unit_rows(np.array([[3, 4], [0, 0]])).tolist()
    [[0.6, 0.8], [0.0, 0.0]]
    """
    length = np.sqrt(np.square(counts, dtype=np.float64).sum(axis=-1, keepdims=True))
    found: NDArray[np.float64] = np.divide(counts, length, out=np.zeros(counts.shape), where=length > 0)
    return found


def shares(counts: NDArray[Any]) -> NDArray[np.float64]:
    """Scale each row to a sum of 1; a row of zeros stays.

    Examples
    --------
    >>> shares(np.array([[3, 1], [0, 0]])).tolist()
    [[0.75, 0.25], [0.0, 0.0]]
    """
    total = counts.sum(axis=-1, keepdims=True, dtype=np.float64)
    found: NDArray[np.float64] = np.divide(counts, total, out=np.zeros(counts.shape), where=total > 0)
    return found


def closest_matrix(stored: NDArray[Any], matrix: NDArray[Any], layer: int, mask: Mask = "seen") -> int:
    """Find the past sequence that the present one is most like at a layer (MoE-Infinity).

    Parameters
    ----------
    stored : ndarray of int or float, (n, n_layers, n_experts)
        Matrices of past sequences: tokens that used each expert.
    matrix : ndarray of int or float, (n_layers, n_experts)
        That of the present sequence so far.
    layer : int
        The layer that was routed last, l.
    mask : {"seen", "later"}
        ``seen`` compares rows 0 .. l, the method's intent. ``later`` is the released code: rows 0 .. l of the stored ones are
        overwritten by a constant, so that only the rows after l tell them apart. In the first pass of a sequence these are
        empty, and the first one is found.

    Returns
    -------
    int
        Index of the smallest distance, of equals the first. The distance is 1 minus the mean over the rows of the cosine of
        the rows, each scaled to a sum of 1; a row of zeros has cosine 0. Distances that agree to 12 decimals are equal.

    Examples
    --------
    >>> past = np.array([[[4, 0], [4, 0]], [[0, 4], [4, 0]], [[0, 4], [0, 4]]])
    >>> now = np.array([[1, 3], [0, 2]])
    >>> closest_matrix(past, now, 0), closest_matrix(past, now, 1), closest_matrix(past, now, 0, "later")
    (1, 2, 2)
    """
    past = np.array(stored, np.float64)
    present = np.asarray(matrix, np.float64)
    if mask == "seen":
        past, present = past[:, : layer + 1], present[: layer + 1]
    else:
        past[:, : layer + 1] = 1
    cosines = (unit_rows(shares(past)) * unit_rows(shares(present))).sum(axis=2)
    return int((1 - cosines.mean(axis=1)).round(12).argmin())


def remaining_priority(probability: NDArray[Any], layer: int) -> NDArray[np.float64]:
    """Weigh the experts that a forward pass has still to come to; nearer layers weigh more.

    Parameters
    ----------
    probability : (n_layers, n_experts) array
        Expected share of each expert in its layer.
    layer : int
        The layer that the pass is at, l.

    Returns
    -------
    (n_layers, n_experts) float64
        ``(p + 1e-8) (1 - (j - l) / (L + 1))`` in row j >= l of L rows, and 0 in the rows passed.

    Examples
    --------
    >>> remaining_priority(np.array([[0.5, 0.5], [1.0, 0.0], [0.25, 0.75]]), 1).round(4).tolist()
    [[0.0, 0.0], [1.0, 0.0], [0.1875, 0.5625]]
    """
    n_layers = len(probability)
    ahead = np.arange(n_layers) - layer
    decay = np.where(ahead >= 0, 1 - ahead / (n_layers + 1), 0.0)
    return np.asarray((probability + SMALLEST) * decay[:, None])


def least_visited(visits: NDArray[Any], may_go: NDArray[np.bool_]) -> tuple[int, int] | None:
    """Find the expert that MoE-Infinity's released code evicts: the lowest count, scanned expert by expert over all layers.

    Parameters
    ----------
    visits : ndarray of int or float, (n_layers, n_experts)
        What each expert is ranked by; in the released code the times it was used since the start, whether cached or not.
    may_go : ndarray of bool, (n_layers, n_experts)
        Which experts are cached and not locked.

    Returns
    -------
    (int, int) or None
        Layer and expert of the first strict minimum: of equals the lowest expert, then the lowest layer. None if none may go.

    Examples
    --------
    >>> least_visited(np.array([[2, 1], [1, 1]]), np.array([[True, True], [False, True]]))
    (0, 1)
    """
    best = np.where(may_go, visits, np.inf).T.ravel()
    at = int(best.argmin())
    if best[at] == np.inf:
        return None
    expert, layer = divmod(at, len(visits))
    return layer, expert
