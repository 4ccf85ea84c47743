"""Activation matrices of past sequences and of those under way: which past one each of the present is most like so far."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.policies.algorithms.activations import Mask, remaining_priority, shares, unit_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

DECIMALS = 12  # to which likenesses are compared, so that rounding breaks no tie


class Past:
    """Activation matrices of the sequences that are over, and of those under way.

    ``stored`` (n_layers, n, n_experts) are there from the start, as far as the capacity goes. With ``learns``, those of the
    run that are over are stored too. ``mask`` says which rows are compared; see `closest_matrix`.
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
