"""A queue of experts in which each new prediction puts its experts at the end anew."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.policies.parts import Unit

if TYPE_CHECKING:
    from numpy.typing import NDArray


class RenewedQueue:
    """First in, first out; each expert is in it once."""

    def __init__(self, n_layers: int, n_experts: int) -> None:
        self._shape = n_layers, n_experts
        self._places = np.zeros(0, np.intp)  # layer x n_experts + expert, first to last

    def __len__(self) -> int:
        return len(self._places)

    @property
    def first(self) -> Unit:
        """Who is next; the queue must not be empty."""
        layer, expert = divmod(int(self._places[0]), self._shape[1])
        return layer, expert

    def pop(self) -> None:
        """Take the first away."""
        self._places = self._places[1:]

    def renew(self, priority: NDArray[np.float64], wanted: NDArray[np.bool_]) -> None:
        """Put experts at the end, the highest priority first; of equals the lowest layer, then the lowest id."""
        [new] = np.nonzero(wanted.ravel())
        kept = self._places[~wanted.ravel()[self._places]]
        self._places = np.concatenate((kept, new[np.argsort(-priority.ravel()[new], kind="stable")]))

    def drop_up_to(self, layer: int) -> None:
        """Take away the experts of a layer and of those before it."""
        self._places = self._places[self._places >= (layer + 1) * self._shape[1]]
