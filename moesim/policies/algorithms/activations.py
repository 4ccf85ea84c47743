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

    >>> unit_rows(np.array([[3, 4], [0, 0]])).tolist()
    [[0.6, 0.8], [0.0, 0.0]]
    """
    length = np.sqrt(np.square(counts, dtype=np.float64).sum(axis=-1, keepdims=True))
    found: NDArray[np.float64] = np.divide(counts, length, out=np.zeros(counts.shape), where=length > 0)
    return found


def shares(counts: NDArray[Any]) -> NDArray[np.float64]:
    """Scale each row to a sum of 1; a row of zeros stays.

    >>> shares(np.array([[3, 1], [0, 0]])).tolist()
    [[0.75, 0.25], [0.0, 0.0]]
    """
    total = counts.sum(axis=-1, keepdims=True, dtype=np.float64)
    found: NDArray[np.float64] = np.divide(counts, total, out=np.zeros(counts.shape), where=total > 0)
    return found


def remaining_priority(probability: NDArray[Any], layer: int) -> NDArray[np.float64]:
    """Weigh the experts that a forward pass has still to come to, by their expected share in their layer; nearer layers weigh more.

    ``(p + 1e-8) (1 - (j - l) / (L + 1))`` in row j >= l of L rows, l the layer that the pass is at, and 0 in the rows passed.

    >>> remaining_priority(np.array([[0.5, 0.5], [1.0, 0.0], [0.25, 0.75]]), 1).round(4).tolist()
    [[0.0, 0.0], [1.0, 0.0], [0.1875, 0.5625]]
    """
    n_layers = len(probability)
    ahead = np.arange(n_layers) - layer
    decay = np.where(ahead >= 0, 1 - ahead / (n_layers + 1), 0.0)
    return np.asarray((probability + SMALLEST) * decay[:, None])


def least_visited(visits: NDArray[Any], may_go: NDArray[np.bool_]) -> tuple[int, int] | None:
    """Return the expert that MoE-Infinity's released code evicts: the first strict minimum of the counts of those that may go.

    Scanned expert by expert over all layers: of equals the lowest expert, then the lowest layer. None if none may go.

    >>> least_visited(np.array([[2, 1], [1, 1]]), np.array([[True, True], [False, True]]))
    (0, 1)
    """
    best = np.where(may_go, visits, np.inf).T.ravel()
    at = int(best.argmin())
    if best[at] == np.inf:
        return None
    expert, layer = divmod(at, len(visits))
    return layer, expert


DECIMALS = 12  # to which likenesses are compared, so that rounding breaks no tie


class Past:
    """Activation matrices of the sequences that are over, and of those under way.

    ``stored`` (n_layers, n, n_experts) are there from the start, as far as the capacity goes. With ``learns``, those of the
    run that are over are stored too.

    With the mask ``seen``, the method's intent, rows 0 .. l are compared, l being the layer that was routed last. ``later`` is the
    released code: rows 0 .. l of the stored ones are overwritten by a constant, so that they differ in the rows after l only. In
    the first pass of a sequence these are empty, and the first one is found. Sums of cosines of the rows, each scaled to a sum
    of 1, are compared to 12 decimals; a row of zeros has cosine 0.
    """

    def __init__(
        self, capacity: int, n_layers: int, n_experts: int, *, stored: NDArray[Any] | None = None, learns: bool = True,
        mask: Mask = "seen",
    ) -> None:  # fmt: skip
        self._learns, self._mask = learns, mask
        self._capacity = capacity
        self._shape = (n_layers, n_experts)
        self._n_stored = 0  # ever; the oldest are replaced
        self._shares = np.zeros((0, *self._shape))  # of what is stored
        self._units = np.zeros((n_layers, 0, n_experts))  # the same by layer, rows of length 1
        self._counts: dict[int, NDArray[Any]] = {}  # request -> its matrix so far
        self._decoded: set[int] = set()  # requests of the last decode step
        self._order: list[int] = []  # requests of this step
        self._row_of: NDArray[Any] = np.zeros(0, np.int64)  # of the step's rows, in that order
        self._present = np.zeros((0, *self._shape))  # matrices of the requests of this step
        self._likeness = np.zeros((0, 0))  # (requests, stored): sum of the cosines of the rows compared
        self._cosines: NDArray[Any] | None = None  # (n_layers, requests, stored), before this step; for the mask "later"
        for matrix in () if stored is None else stored.swapaxes(0, 1)[:capacity]:
            self._store(matrix)

    def begin(self, requests: NDArray[Any], decode: bool) -> None:
        """Begin a step; a request that has decoded and is not in a later decode step is over."""
        for at, request in enumerate(self._order):
            self._counts[request] = self._present[at]
        order, self._row_of = np.unique(requests, return_inverse=True)
        self._order = order.tolist()
        if decode:
            for over in sorted(self._decoded.difference(self._order)):
                matrix = self._counts.pop(over)
                if self._learns:
                    self._store(matrix)
            self._decoded = set(self._order)
        empty = np.zeros(self._shape)
        self._present = np.stack([self._counts.get(request, empty) for request in self._order])
        self._likeness = np.zeros((len(self._order), len(self._shares)))
        if self._mask == "later":
            self._cosines = unit_rows(self._present).swapaxes(0, 1) @ self._units.swapaxes(1, 2)

    def count(self, layer: int, experts: NDArray[Any], first_row: int) -> None:
        """Count what the rows of a micro-batch use, and compare the layer with the stored ones."""
        rows = self._row_of[first_row : first_row + len(experts)]
        row = self._present[:, layer]
        np.add.at(row, (rows[:, None], experts), 1)
        if self._cosines is not None:
            self._likeness = self._cosines[layer + 1 :].sum(axis=0)
        elif len(self._shares):
            these = np.unique(rows)
            self._likeness[these] += unit_rows(row[these]) @ self._units[layer].T

    def priority(self, layer: int) -> NDArray[Any]:
        """Weigh all experts by the closest past of each sequence of this step; of equals the first.

        The released code masks the rows up to this layer and compares the others, which are empty in the first pass.
        """
        if len(self._shares):
            expected = self._shares[self._likeness.round(DECIMALS).argmax(axis=1)]
        else:
            expected = shares(self._present)
        return remaining_priority(expected.mean(axis=0), layer)

    def _store(self, counts: NDArray[Any]) -> None:
        units = unit_rows(counts)
        if len(self._shares) < self._capacity:
            self._shares = np.concatenate([self._shares, shares(counts)[None]])
            self._units = np.concatenate([self._units, units[:, None]], axis=1)
        else:
            at = self._n_stored % self._capacity
            self._shares[at] = shares(counts)
            self._units[:, at] = units
        self._n_stored += 1
