"""FineMoE (fMoE): past iterations that begin alike tell which experts of later layers to prefetch and to keep.

Code: IntelliSys-Lab/FineMoE-EuroSys26 at 5c58468, on MoE-Infinity's engine. The points are the code's; the paper was not read.

Idea: the probabilities of all experts in all layers (an expert map) say more of an iteration than the experts that were chosen.

| point | paper says | released code does | we do |
|---|---|---|---|
| store | - | up to 1000 maps, each with an embedding, from the run | iterations of requests held back for calibration; none of the run is added |
| probabilities | - | the softmax of the router | recorded scores, scaled to a sum of 1 in each layer; weights of the chosen where there are none |
| first layers | - | layers 0 to d - 1 by the closest embedding, as an iteration begins; layer d never | on demand: traces have no embeddings |
| later layers | - | at layer l the closest trajectory, by rows 0 to l: layers l + 1 + d and on; d = 6 | the same (``prefetch_distance``) |
| selected | - | by descending probability while their sum is at most 1 - similarity; at least top-k | the same |
| priority | - | probability x (1 - (j - start) / (end + 1)) of those selected, plus 1e-6 for every expert of the band | the same; ``selected_only`` leaves the others out |
| queue | - | first in, first out; a new prediction puts its experts at the end anew | the same; one copy at a time |
| on demand | - | before all prefetches; drops what is queued for the present layer and those passed | the same; one thread, active experts by ascending id: a hit waits for the misses before it |
| victim | - | the lowest probability x visits while cached, as an integer, so that ties decide; the sort has no rule for them | the same (``float_score``); of equals the lowest layer, then the lowest id |
| its probability | - | reset with the visits on eviction | that of the map found last for its layer; 0 before one is found |
| protected | - | what is executed or locked, and the experts of the last prediction | the same; for an on-demand copy that finds nothing else, they may go |
| several requests at once | - | one by one | each is matched; the largest priority and probability count |
| prompts | - | the last row is what is observed | the same, of each chunk |
| CPU | - | computes nothing; misses wait | the same |
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from moesim.policies.algorithms.finemoe import CAPACITY, DISTANCE, EVERY, evicted, eviction_scores, prefetch_priorities
from moesim.policies.base import Range
from moesim.policies.fetch_thread import PrefetchingThread
from moesim.policies.parts import Unit
from moesim.policies.trajectories import Trajectories
from moesim.policy import PREFETCH, Fetch, Placement, Routed, StepBegin, View

if TYPE_CHECKING:
    from numpy.typing import NDArray


class FineMoE(PrefetchingThread):
    """Prefetch what past iterations with a similar beginning used, several layers ahead (FineMoE's code, 2026)."""

    paper = "FineMoE (EuroSys 2026), its released code"
    missing = (
        "the match by embeddings, which predicts the first layers: traces have none, so these are loaded on demand",
        "the store's growth during the run, whose replacement weighs embeddings: it holds calibration's iterations only",
        "the time of the match: the experiment's decision_us stands for it",
        "more than one GPU, each with a fetch thread",
    )
    needs = frozenset({"scores-or-weights", "table:expert_maps"})

    prefetch_distance: Annotated[int, Range(0)] = DISTANCE
    """At layer l, layers from l + 1 + this on are predicted."""
    selected_only: bool = False
    """Only selected experts are queued and protected, not all of the layers that are predicted."""
    float_score: bool = False
    """The score of a cached expert is not truncated to an integer."""

    def place(self, view: View) -> Placement:
        """Return the empty cache; keep the calibration's maps."""
        model = view.model
        self._past = Trajectories(view.tables["expert_maps"][:, :CAPACITY])
        self._top_k = model.top_k
        shape = (model.n_layers, model.n_experts)
        self._probability = np.zeros(shape)
        self._candidates = np.zeros(shape, np.bool_)
        self._queue: OrderedDict[Unit, None] = OrderedDict()
        self._dropped_at = (-1, -1)  # step and layer
        return super().place(view)

    def step_begin(self, event: StepBegin) -> None:
        """Begin an iteration of each request; the match by embeddings would replace the candidates now."""
        self._past.begin(event.requests)
        self._candidates[:] = False

    def routed(self, event: Routed) -> None:
        """Observe the layer, and predict those at a distance."""
        super().routed(event)
        matches = self._past.observe(event)
        start, end = event.layer + 1 + self.prefetch_distance, len(self._probability)
        if start >= end:
            return
        maps = [self._past.map(index) for index, _ in matches]
        self._probability[start:] = np.max(maps, axis=0)[start:]
        found = [
            prefetch_priorities(one, start, end, similarity, self._top_k)
            for one, (_, similarity) in zip(maps, matches, strict=True)
        ]
        self._enqueue(np.max(found, axis=0))

    def _enqueue(self, priority: NDArray[np.float64]) -> None:
        """Put the experts of a prediction at the end of the queue, best first; of equals the lowest layer, then the lowest id."""
        wanted = priority > (EVERY if self.selected_only else 0)
        self._candidates = wanted
        order = np.argsort(-priority, axis=None, kind="stable")[: int(wanted.sum())]
        for unit in zip(*(axis.tolist() for axis in np.unravel_index(order, priority.shape)), strict=True):
            self._queue[unit] = None
            self._queue.move_to_end(unit)

    def awaited(self, layer: int) -> None:
        """Drop what is queued for the present layer and for those passed."""
        if self._dropped_at == self._at:  # what is queued since lies in later layers
            return
        self._dropped_at = self._at
        for unit in [unit for unit in self._queue if unit[0] <= layer]:
            del self._queue[unit]

    def next_ahead(self) -> Unit | None:
        """Take the first of the queue that is not there, if there is a slot for it."""
        while self._queue:
            unit = next(iter(self._queue))
            if not self._cached[unit] and self.full and not self.spare().any():
                return None
            del self._queue[unit]
            if not self._cached[unit]:
                return unit
        return None

    def spare(self) -> NDArray[np.bool_]:
        """Return which experts are cached, not locked, and no candidates of the last prediction."""
        return np.asarray(self._cached & ~self._locked & ~self._candidates)

    def lowest(self, may_go: NDArray[np.bool_]) -> Unit | None:
        """Return the expert with the lowest score."""
        scores: Any = self._probability * self._visits if self.float_score else eviction_scores(self._probability, self._visits)
        return evicted(scores, may_go)

    def evict(self, fetch: Fetch, view: View) -> Unit | None:
        """Name the expert with the lowest score; for an on-demand copy that finds no other, a candidate of the last prediction."""
        if fetch.urgency == PREFETCH:
            return super().evict(fetch, view)
        return self.idle(self.spare(), view) or self.idle(self._cached & ~self._locked, view) or self.of_the_layer(view)

    def gone(self, unit: Unit) -> None:
        """Forget its visits and its probability, too."""
        super().gone(unit)
        self._visits[unit] = 0
        self._probability[unit] = 0
