"""Expert maps of past iterations, compared layer by layer with the iterations under way (FineMoE)."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.policies.algorithms.activations import shares
from moesim.policies.algorithms.finemoe import MapRanks, map_ranks
from moesim.policy import Routed
from moesim.trace.stats.calibration import DECIMALS

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Trajectories:
    """Finds what `closest_map` finds, for each request of a step, without adding up earlier layers again.

    Scores count as probabilities: each layer's are scaled to a sum of 1, which those of a softmax have anyway.
    """

    def __init__(self, maps: NDArray[Any]) -> None:
        self._given = maps
        self._ranks: dict[int, MapRanks] = {}  # of the maps that were found
        self._requests: NDArray[Any] = np.zeros(0, np.int64)
        self._products: dict[int, NDArray[np.float64]] = {}  # request -> product with each map so far
        self._own: dict[int, float] = {}  # request -> square of its length so far

    def begin(self, requests: NDArray[Any]) -> None:
        """Begin a step: an iteration of each request that has rows in it."""
        self._requests = requests
        self._products, self._own = {}, {}

    @cached_property
    def _maps(self) -> NDArray[np.float64]:
        """Probabilities, (n_layers, n, n_experts): only a run needs them, and many a placement is made without one."""
        return shares(np.asarray(self._given, np.float64))

    @cached_property
    def _squares(self) -> NDArray[np.float64]:
        """Squares of the lengths of the rows up to each layer, (n_layers, n)."""
        return np.asarray(np.cumsum(np.square(self._maps).sum(axis=2), axis=0))

    def ranks(self, index: int) -> MapRanks:
        """Return how a stored map ranks the experts of each layer."""
        if index not in self._ranks:
            self._ranks[index] = map_ranks(self.map(index))
        return self._ranks[index]

    def map(self, index: int) -> NDArray[np.float64]:
        """Return a stored map, (n_layers, n_experts)."""
        return self._maps[:, index]

    def observe(self, event: Routed) -> list[tuple[int, float]]:
        """Take in the last row of each request of a micro-batch; return the index and similarity of each one's closest map."""
        first, layer = event.first_row, event.layer
        of_rows = self._requests[first : first + len(event.experts)].tolist()
        last = {request: row for row, request in enumerate(of_rows)}
        found = []
        for request in sorted(last):
            seen = shares(self._scores(event, last[request]))
            products = self._products.get(request, 0.0) + self._maps[layer] @ seen
            own = self._own.get(request, 0.0) + float(seen @ seen)
            self._products[request], self._own[request] = products, own
            lengths = np.sqrt(self._squares[layer] * own)
            cosines = np.divide(products, lengths, out=np.zeros(len(lengths)), where=lengths > 0)
            best = int(cosines.round(DECIMALS).argmax())
            found.append((best, float(cosines[best])))
        return found

    def _scores(self, event: Routed, row: int) -> NDArray[np.float64]:
        """Return the scores of a row, or, where none were recorded, the weights of its experts."""
        if event.scores is not None:
            return np.asarray(event.scores[row], np.float64)
        if event.weights is None:
            raise RuntimeError("trajectories: the trace was promised to hold scores or weights, and holds neither")
        seen = np.zeros(self._maps.shape[2])
        seen[event.experts[row]] = event.weights[row]
        return seen
