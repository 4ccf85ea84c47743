"""FineMoE (fMoE): past iterations that begin alike decide prefetches and evictions.

Code: IntelliSys-Lab/FineMoE-EuroSys26 at 5c58468, on MoE-Infinity's engine; the paper was not read.

| point | paper says | released code does | we do |
|---|---|---|---|
| store | - | up to 1000 maps, each with an embedding, from the run | of requests held back for calibration; none of the run |
| probabilities | - | the router's softmax | recorded scores, or weights of the chosen, scaled to a sum of 1 a layer |
| first layers | - | 0 to d - 1 by the closest embedding, as an iteration begins; layer d never | on demand, or the same by the signal ``embedding`` (``first_layers``) |
| embedding | - | of the prompt or token; how a prompt's is made was not read | a decoded token's own, of a prompt the mean so far [choice]; rounded to half precision |
| later layers | - | at layer l the closest trajectory, by rows 0 to l: layers l + 1 + d and on; d = 6 | the same (``prefetch_distance``) |
| selected | - | by descending probability while their sum is at most 1 - similarity; at least top-k | the same |
| priority | - | probability x (1 - (j - start) / (end + 1)) if selected, plus 1e-6 for all of the band | the same; ``selected_only`` leaves the others out |
| queue | - | first in, first out; a new prediction puts its experts at the end anew | the same; one copy at a time |
| on demand | - | before all prefetches; drops what is queued for this layer and those passed | the same; one thread, ascending id: a hit waits for the misses before it |
| victim | - | the lowest probability x visits while cached, as an integer, so that ties decide; no rule for them | the same (``float_score``); of equals the lowest layer, then id |
| its probability | - | reset with the visits on eviction | that of the map found last for its layer, first 0 |
| protected | - | what is executed or locked, and the experts of the last prediction | the same; they may go for an on-demand copy that finds nothing else |
| several requests at once | - | one by one | each is matched; the largest priority and probability count |
| prompts | - | the last row is observed | the same, of each chunk |
| CPU | - | computes nothing; misses wait | the same |
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from moesim.policies.options import option
from moesim.policies.parts import Unit, source_needs
from moesim.policies.systems.moe_infinity import PrefetchingThread, shares
from moesim.policy import PREFETCH, Action, Fetch, Placement, Predict, Predicted, Routed, StepBegin, View
from moesim.trace.stats.calibration import DECIMALS, EMBEDDING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


DISTANCE = 6
"""Layers between the one that is routed and the first whose experts are predicted, in the released code."""
CAPACITY = 1000
EVERY = 1e-6  # priority of all experts of the band, selected or not


def layer_decay(layer: int, start: int, end: int) -> float:
    """Weigh a layer j of the band [start, end): ``1 - (j - start) / (end + 1)``.

    >>> [round(layer_decay(layer, 7, 24), 2) for layer in (7, 8, 15, 23)]
    [1.0, 0.96, 0.68, 0.36]
    """
    return 1 - (layer - start) / (end + 1)


class MapRanks(NamedTuple):
    """Ranks of each layer's experts in an expert map, whatever the band and similarity."""

    place: NDArray[np.int64]  # of each expert by descending probability, of equals the lower id first, (n_layers, n_experts)
    sums: NDArray[np.float64]  # of the probabilities up to each place, (n_layers, n_experts)


def map_ranks(expert_map: NDArray[Any]) -> MapRanks:
    """Rank the experts of each layer of a map, (n_layers, n_experts).

    >>> map_ranks(np.array([[0.25, 0.5, 0.25]]))
    MapRanks(place=array([[1, 0, 2]]), sums=array([[0.5 , 0.75, 1.  ]]))
    """
    rows = np.asarray(expert_map, np.float64)
    order = np.argsort(-rows, axis=-1, kind="stable")
    place = np.empty_like(order)
    np.put_along_axis(place, order, np.broadcast_to(np.arange(rows.shape[1]), rows.shape), axis=1)
    return MapRanks(place, np.cumsum(np.take_along_axis(rows, order, axis=-1), axis=1))


def largest_priorities(
    maps: Sequence[NDArray[Any]], ranks: Sequence[MapRanks], start: int, end: int, similarities: Sequence[float], top_k: int
) -> NDArray[np.float64]:
    """Return each expert's largest priority over several ranked maps, each with a similarity."""
    band = np.array([one[start:end] for one in maps], np.float64)
    place, sums = (np.array([of[start:end] for of in column]) for column in zip(*ranks, strict=True))
    chosen = _selected(place, sums, np.reshape(similarities, (-1, 1, 1)), top_k)
    decay = np.array([layer_decay(layer, start, end) for layer in range(start, end)])
    found = np.zeros(np.shape(maps[0]))
    # Rounding keeps order, so that the largest of the products is the product with the largest.
    found[start:end] = np.where(chosen, band, 0.0).max(axis=0) * decay[:, None] + EVERY
    return found


def eviction_scores(probability: NDArray[Any], visits: NDArray[Any]) -> NDArray[np.int64]:
    """Score cached experts: int(probability x visits while cached), as the code stores it.

    >>> eviction_scores(np.array([[0.3, 0.6, 0.5]]), np.array([[3, 3, 4]])).tolist()
    [[0, 1, 2]]
    """
    return np.asarray(np.asarray(probability, np.float64) * visits).astype(np.int64)


def evicted(scores: NDArray[Any], may_go: NDArray[np.bool_]) -> tuple[int, int] | None:
    """Return the expert with the lowest score that may go, ties to the lowest layer, then id.

    >>> evicted(np.array([[1, 0], [0, 0]]), np.array([[True, False], [True, True]]))
    (1, 0)
    """
    values = np.where(may_go, scores, np.inf).ravel()
    at = int(values.argmin())
    if values[at] == np.inf:
        return None
    layer, expert = divmod(at, may_go.shape[1])
    return layer, expert


def _selected(place: NDArray[Any], sums: NDArray[Any], similarity: Any, top_k: int) -> NDArray[np.bool_]:
    threshold = np.clip(1 - similarity, 0.0, 1.0)
    n = np.clip((sums <= threshold).sum(axis=-1), top_k, sums.shape[-1])
    return np.asarray(place < n[..., None])


class Trajectories:
    """Finds the stored iteration most like each request's, by the cosine of all layers so far."""

    def __init__(self, maps: NDArray[Any]) -> None:
        self._given = maps
        self._ranks: dict[int, MapRanks] = {}  # of the maps that were found
        self._requests: NDArray[Any] = np.zeros(0, np.int64)
        self._products: dict[int, NDArray[np.float64]] = {}  # request -> product with each map so far
        self._own: dict[int, float] = {}  # request -> square of its length so far

    def begin(self, requests: NDArray[Any]) -> None:
        """Begin a step: an iteration of each request in it."""
        self._requests = requests
        self._products, self._own = {}, {}

    @cached_property
    def _maps(self) -> NDArray[np.float64]:
        """Probabilities, (n_layers, n, n_experts), of a sum of 1; only a run needs them."""
        return shares(np.asarray(self._given, np.float64))

    @cached_property
    def _squares(self) -> NDArray[np.float64]:
        return np.asarray(np.cumsum(np.square(self._maps).sum(axis=2), axis=0))

    def ranks(self, index: int) -> MapRanks:
        if index not in self._ranks:
            self._ranks[index] = map_ranks(self.map(index))
        return self._ranks[index]

    def map(self, index: int) -> NDArray[np.float64]:
        return self._maps[:, index]

    def observe(self, event: Routed) -> list[tuple[int, float]]:
        """Take in each request's last row; return the index and similarity of its closest map."""
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
        """Return a row's scores, or the weights of its experts where none were recorded."""
        if event.scores is not None:
            return np.asarray(event.scores[row], np.float64)
        if event.weights is None:
            raise RuntimeError("trajectories: the trace was promised to hold scores or weights, and holds neither")
        seen = np.zeros(self._maps.shape[2])
        seen[event.experts[row]] = event.weights[row]
        return seen


class RenewedQueue:
    """First in, first out; each expert is in it once."""

    def __init__(self, n_layers: int, n_experts: int) -> None:
        self._shape = n_layers, n_experts
        self._places = np.zeros(0, np.intp)  # layer x n_experts + expert, first to last

    def __len__(self) -> int:
        return len(self._places)

    @property
    def first(self) -> Unit:
        layer, expert = divmod(int(self._places[0]), self._shape[1])
        return layer, expert

    def pop(self) -> None:
        self._places = self._places[1:]

    def renew(self, priority: NDArray[np.float64], wanted: NDArray[np.bool_]) -> None:
        """Put experts at the end, by falling priority, then layer, then id."""
        [new] = np.nonzero(wanted.ravel())
        kept = self._places[~wanted.ravel()[self._places]]
        self._places = np.concatenate((kept, new[np.argsort(-priority.ravel()[new], kind="stable")]))

    def drop_up_to(self, layer: int) -> None:
        self._places = self._places[self._places >= (layer + 1) * self._shape[1]]


SOURCE = f"signal:{EMBEDDING}"


class FineMoE(PrefetchingThread):
    """Prefetch layers ahead what past iterations that began alike used (FineMoE's code, 2026)."""

    paper = "FineMoE (EuroSys 2026), its released code"
    missing = (
        "the match by embeddings, unless first_layers: embedding: few traces have them, so the first layers are loaded on demand",
        "the store's growth during the run, whose replacement weighs embeddings: it holds calibration's iterations only",
        "the time of the match: the experiment's decision_us stands for it, and for that by embeddings a router's product a layer",
        "more than one GPU, each with a fetch thread",
    )

    prefetch_distance: int = option(DISTANCE, "At layer l, layers from l + 1 + this on are predicted.", ge=0)
    first_layers: Literal["demand", "embedding"] = option(
        "demand",
        "Layers before ``prefetch_distance``: on demand, or predicted as a step begins by the closest "
        "embedding, which the signal ``embedding`` tells (``moesim trace record --keep-embeddings``, then "
        "``moesim trace calibrate``).",
    )
    selected_only: bool = option(
        False, "Only selected experts are queued and protected, not all of the layers that are predicted."
    )
    float_score: bool = option(False, "The score of a cached expert is not truncated to an integer.")

    @property
    def listens(self) -> frozenset[type]:
        return super().listens - (set() if self.first_layers == "embedding" else {Predicted})

    @property
    def needs(self) -> frozenset[str]:
        signals = source_needs(SOURCE) if self.first_layers == "embedding" else frozenset()
        return signals | {"scores-or-weights", "table:expert_maps"}

    def place(self, view: View) -> Placement:
        model = view.model
        self._n_first = min(self.prefetch_distance, model.n_layers) if self.first_layers == "embedding" else 0
        self._past = Trajectories(view.tables["expert_maps"][:, :CAPACITY])
        self._top_k = model.top_k
        shape = (model.n_layers, model.n_experts)
        self._probability = np.zeros(shape)
        self._candidates = np.zeros(shape, np.bool_)
        self._queue = RenewedQueue(*shape)
        self._dropped_at = (-1, -1)  # step and layer
        return super().place(view)

    def on_step_begin(self, event: StepBegin, view: View) -> list[Action]:
        """Begin an iteration of each request, without candidates; ask for the first layers."""
        self._past.begin(event.requests)
        self._candidates[:] = False
        if self._n_first:  # prefetches go on before a layer is routed
            self._locked[:] = False
        self._requests = event.requests
        self._said: dict[int, list[NDArray[np.float64]]] = {}  # first layers -> scores of each micro-batch
        device = view.dense_device(0)
        return [Predict(event.step, layer, SOURCE, device) for layer in range(self._n_first)]

    def on_predicted(self, event: Predicted, view: View) -> list[Action]:
        self._foreseen(event)
        return self.go_on(view)

    def _foreseen(self, event: Predicted) -> None:
        """Take in a layer's prediction; with the last of the first layers, queue their experts."""
        self._said.setdefault(event.layer, []).append(_of_all(event, self._probability.shape[1]))
        if event.layer < self._n_first - 1 or sum(map(len, self._said[event.layer])) < len(self._requests):
            return
        last = {request: row for row, request in enumerate(self._requests.tolist())}
        found = np.zeros((len(last), *self._probability.shape))
        for layer, parts in self._said.items():
            found[:, layer] = np.concatenate(parts)[list(last.values())]
        similarities = found[:, list(self._said)].sum(axis=2).mean(axis=1).tolist()  # layers differ by rounding
        passed = self._at[1] + 1 if self._at[0] == event.step else 0
        maps = list(shares(found))
        self._predict(maps, [map_ranks(one) for one in maps], similarities, passed, self._n_first)

    def routed(self, event: Routed) -> None:
        """Observe the layer, and predict those at a distance."""
        super().routed(event)
        matches = self._past.observe(event)
        start, end = event.layer + 1 + self.prefetch_distance, len(self._probability)
        if start < end:
            maps, ranks = zip(*((self._past.map(index), self._past.ranks(index)) for index, _ in matches), strict=True)
            self._predict(maps, ranks, [similarity for _, similarity in matches], start, end)

    def _predict(
        self, maps: Sequence[NDArray[np.float64]], ranks: Sequence[MapRanks], similarities: Sequence[float], start: int, end: int
    ) -> None:
        """Queue the experts of a band of layers by the maps found, one a request."""
        if start >= end:
            return
        self._probability[start:end] = np.max([one[start:end] for one in maps], axis=0)
        priority = largest_priorities(maps, ranks, start, end, similarities, self._top_k)
        self._candidates = priority > (EVERY if self.selected_only else 0)
        self._queue.renew(priority, self._candidates)

    def awaited(self, layer: int) -> None:
        """Drop what is queued for the present layer and for those passed."""
        if self._dropped_at == self._at:  # what is queued since lies in later layers
            return
        self._dropped_at = self._at
        self._queue.drop_up_to(layer)

    def next_ahead(self) -> Unit | None:
        """Take the first of the queue that is not there, if there is a slot for it."""
        while self._queue:
            unit = self._queue.first
            if not self._cached[unit] and self.full and not self.spare().any():
                return None
            self._queue.pop()
            if not self._cached[unit]:
                return unit
        return None

    def spare(self) -> NDArray[np.bool_]:
        return np.asarray(self._cached & ~self._locked & ~self._candidates)

    def _scores(self) -> NDArray[Any]:
        return self._probability * self._visits if self.float_score else eviction_scores(self._probability, self._visits)

    def lowest(self, may_go: NDArray[np.bool_]) -> Unit | None:
        return evicted(self._scores(), may_go)

    def evict(self, fetch: Fetch, view: View) -> Unit | None:
        """Name the lowest score; on demand, without another, a candidate of the last prediction."""
        found = self.idle(self.spare(), view)
        if found is not None or fetch.urgency == PREFETCH:
            return found
        return self.idle(self._cached & ~self._locked, view) or self.of_the_layer(view)

    def gone(self, unit: Unit) -> None:
        super().gone(unit)
        self._visits[unit] = 0
        self._probability[unit] = 0


def _of_all(event: Predicted, n_experts: int) -> NDArray[np.float64]:
    """Return the scores of all experts, (n_tokens, n_experts), 0 for those not named."""
    if event.scores is not None and event.scores.shape[1] == n_experts:
        return np.asarray(event.scores, np.float64)
    found = np.zeros((len(event.ids), n_experts))
    named = 1 / event.ids.shape[1] if event.scores is None else event.scores
    np.put_along_axis(found, event.ids.astype(np.int64), named, axis=1)
    return found
