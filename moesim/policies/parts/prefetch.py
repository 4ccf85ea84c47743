"""Prefetch parts: which experts of a later layer to fetch before they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import floor
from typing import Annotated, Any, Literal

from numpy.typing import NDArray
from pydantic import Field

from moesim.model import ModelSpec
from moesim.policies.base import CostTable, layer_residents, sample, slot_bytes, twin
from moesim.policies.options import option
from moesim.policies.parts import Part, Plan, Setup, Unit, source_needs
from moesim.policy import DEMAND, PREFETCH, Fetch, Pool, Predict, Predicted, Routed, StepBegin, View


class Prefetching(Part):
    """Defaults of a prefetch part: it asks for no prediction and chooses nothing."""

    predicts = False

    def ask(self, event: Routed, view: View) -> Sequence[Predict]:
        return ()

    def ahead(self, event: Routed, plan: Plan, view: View) -> Sequence[Unit]:
        return ()

    def choose(self, event: Predicted, view: View) -> Sequence[Unit]:
        return ()


class NoPrefetch(Prefetching):
    """Nothing is prefetched."""

    transient = False
    slots = 0


Lane = Annotated[
    Literal["main", "side"],
    Field(description='Where the prediction is computed; ``"side"`` needs its rate in the profile.'),
]
Over = Annotated[
    Literal["all", "non-resident"],
    Field(description="Take the top ``size`` of all experts and skip those on the GPU, or of those that are not on the GPU."),
]
Source = Annotated[
    str, Field(description='Prediction source, for example ``"signal:gate_next1"``, ``"frequency"`` or ``"oracle"``.')
]
Buffers = Annotated[int, Field(ge=1, description="Slots of the transient pool in units of ``size``.")]


class _Pooled(Prefetching):
    """Fetches into the cache, or into a transient pool of ``size`` times ``buffers`` slots."""

    size: int = option(1, "Experts of a layer visit to prefetch.", ge=1)
    pool: Literal["transient", "cache"] = option(
        "transient", "Where they go: a pool of their own, emptied at the end of their layer, or the cache."
    )
    buffers: Buffers = option(1)
    lookahead: int = option(1, "How many layers ahead.", ge=1)

    @property
    def transient(self) -> bool:
        return self.pool == "transient"

    @property
    def slots(self) -> int:
        return self.size * self.buffers if self.transient else 0


class RandomAhead(_Pooled):
    """Fetch experts of a following layer at random: the gain of prefetching without knowledge."""

    size: int = option(1, "Experts drawn for each layer visit; those that are on the GPU already are skipped.", ge=1)
    seed: int = option(0, "Of the draws, which depend on nothing but it, the step and the layer.")

    def start(self, setup: Setup) -> None:
        self._gpu = setup.gpu
        self._n_layers = setup.view.model.n_layers
        self._n_experts = setup.view.model.n_experts

    def ahead(self, event: Routed, plan: Plan, view: View) -> Sequence[Unit]:
        layer = event.layer + self.lookahead
        if event.mb or layer >= self._n_layers:
            return ()
        drawn = sample(self._n_experts, self.size, self.seed, event.step * self._n_layers + layer)
        return [(layer, expert) for expert in drawn if not view.is_resident(layer, expert, self._gpu)]


def top_by_count(counts: Sequence[int], size: int) -> list[int]:
    """Return up to ``size`` ids with the highest positive counts; ties to the lower id.

    >>> top_by_count([0, 3, 1, 3, 0], 4)
    [1, 3, 2]
    """
    positive = [expert for expert, count in enumerate(counts) if count > 0]
    return sorted(positive, key=lambda expert: -counts[expert])[: max(size, 0)]


def add_rows(counts: dict[int, int], ids: NDArray[Any], top_k: int) -> dict[int, int]:
    """Add each expert's rows among the best ``top_k`` of every row of ids to the counts.

    >>> import numpy as np
    >>> add_rows({3: 1}, np.array([[1, 3, 0], [1, 2, 0]]), 2)
    {3: 2, 1: 2, 2: 1}
    """
    for row in ids[:, :top_k].tolist():
        for expert in row:
            counts[expert] = counts.get(expert, 0) + 1
    return counts


class TopPredicted(_Pooled):
    """Fetch the experts that a predictor gives the most rows in a following layer."""

    predicts = True

    source: Source = option()
    over: Over = option("all")
    lane: Lane = option("main")
    nearer: Literal["skip", "ask"] = option(
        "skip", "Layers nearer to a step's first layer than ``lookahead``: nobody asks about them, or the first layer does."
    )

    residents: Literal["as-they-are", "used"] = option(
        "as-they-are",
        "What becomes of chosen experts that are in the cache: nothing, or they count as used, so that others leave before them.",
    )

    @property
    def needs(self) -> frozenset[str]:
        return source_needs(self.source)

    def start(self, setup: Setup) -> None:
        self._gpu = setup.gpu
        self._top_k = setup.view.model.top_k
        self._n_layers = setup.view.model.n_layers
        self._step = -1
        self._seen: dict[int, tuple[dict[int, int], set[int]]] = {}  # of that step, by layer: rows of experts, and who was chosen

    def ask(self, event: Routed, view: View) -> Sequence[Predict]:
        if event.mb:
            return ()
        last = event.layer + self.lookahead
        first = 1 if self.nearer == "ask" and event.layer == 0 else last
        where = view.dense_device(event.layer)
        return [
            Predict(event.step, layer, self.source, where, self.lane) for layer in range(first, min(last + 1, self._n_layers))
        ]

    def choose(self, event: Predicted, view: View) -> Sequence[Unit]:
        """Count predicted rows over the micro-batches so far; choose the ``size`` top in all."""
        if self._step != event.step:
            self._step, self._seen = event.step, {}
        counts, chosen = self._seen.setdefault(event.layer, ({}, set()))
        add_rows(counts, event.ids, self._top_k)
        resident = view.residency(event.layer, self._gpu)
        if self.over != "all":
            counts = {expert: n for expert, n in counts.items() if not resident[expert]}
        top = sorted(counts, key=lambda expert: (-counts[expert], expert))[: self.size]
        new = [e for e in top if not resident[e] and e not in chosen][: self.size - len(chosen)]
        chosen.update(new)
        used = [e for e in top if resident[e]] if self.residents == "used" else []
        return [(event.layer, e) for e in (*used, *new)]

    def native_state(self) -> dict[str, Any] | None:
        """Nothing but the options; C++ knows no ``residents``."""
        return {} if self.residents == "as-they-are" else None


PREFETCHED = "prefetch"


class Transient:
    """Experts fetched ahead to a device, by layer, until that layer ends."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._ahead: dict[int, list[int]] = {}
        self._late: dict[int, list[int]] = {}  # what was on its way when its layer ended, which a slow link may bring yet

    def pool(self, slots: int, view: View) -> Pool:
        """Return the pool, with no more slots than a layer has experts."""
        return Pool(self._device, PREFETCHED, min(slots, view.model.n_experts) * slot_bytes(view))

    def fetch(self, layer: int, experts: Sequence[int]) -> Fetch:
        self._ahead.setdefault(layer, []).extend(experts)
        return Fetch(layer, experts, self._device, PREFETCH, PREFETCHED)

    def demand(self, layer: int, misses: Sequence[int], view: View) -> tuple[list[Fetch], Sequence[int]]:
        """Return fetches that make copies on their way urgent, and what is still to be loaded."""
        if late := self._late.pop(layer, []):
            late = [e for e in late if view.is_pending(layer, e, self._device)]
            if again := [e for e in late if e in misses]:
                self._ahead.setdefault(layer, []).extend(again)
            if others := [e for e in late if e not in again]:
                self._late[layer] = others
        if layer not in self._ahead:
            return [], misses
        ahead = self._ahead[layer]
        early = [e for e in misses if e in ahead and view.is_pending(layer, e, self._device)]
        rest = [e for e in misses if e not in early]
        return [Fetch(layer, early, self._device, DEMAND, PREFETCHED)] if early else [], rest

    def layer_end(self, layer: int, view: View) -> list[int]:
        """Return what to drop as a layer ends: what is there, and unused copies on their way."""
        if (ahead := self._ahead.pop(layer, None)) is None:
            return []
        held = layer_residents(view, self._device, PREFETCHED, layer)
        late = [e for e in ahead if view.is_pending(layer, e, self._device)]
        if late:
            self._late[layer] = list(dict.fromkeys([*self._late.get(layer, ()), *late]))
        return held + late

    def forget(self, layer: int, experts: Sequence[int]) -> None:
        """Leave experts on their way to another pool."""
        if layer in self._late:
            self._late[layer] = [e for e in self._late[layer] if e not in experts]

    def spent(self, fetch: Fetch, routed: int, view: View) -> Unit | None:
        """Return an unused prefetched expert of a routed layer; for a demand load, any idle one."""
        for layer, experts in self._ahead.items():
            if layer <= routed or fetch.urgency == DEMAND:
                for expert in experts:
                    if view.is_resident(layer, expert, self._device) and not view.is_in_use(layer, expert, self._device):
                        experts.remove(expert)
                        return layer, expert
        return None


# ------------------------------------------------------------------------- PreScope's rule: what the link has time for
def prefetch_count(share: float, n_upcoming: int, hit_rate: Callable[[int], float]) -> int:
    """Round the transfers that fit, f, to whole experts (PreSched step 4, equation 7).

    f is the gap and the next layer's dense part in units of one transfer, ``hit_rate`` the probability R_hit that the predicted
    expert of a rank (0: the busiest) is wanted. With |f| the rounded number, the last expert is worth it if
    ``R_hit (f - |f| + 1) > R_miss (|f| - f)``.

    >>> [prefetch_count(2 / 3, 2, lambda rank: hit) for hit in (0.33, 0.34)]
    [0, 1]
    >>> [prefetch_count(f, 3, lambda rank: 0.9) for f in (-2, 0.49, 0.5, 2.4, 9)]
    [0, 0, 1, 2, 3]
    """
    rounded = floor(share + 0.5)
    if rounded <= 0 or n_upcoming == 0:
        return 0
    if rounded > n_upcoming:
        return n_upcoming
    hit = hit_rate(rounded - 1)
    return rounded if hit * (share - rounded + 1) > (1 - hit) * (rounded - share) else rounded - 1


PUBLISHED_HIT = 0.94  # the least that the paper prints for its predictor's "hot Top-4"
_PRIOR_WEIGHT = 1  # visits of a layer that the prior counts for


class Foresight:
    """Predictions about the layer ahead, and the hit rate of each rank so far."""

    # `prior_hit`: probability that a predicted expert is wanted, before anything has been seen.

    def __init__(self, model: ModelSpec, prior_hit: float, add_rows: Callable[..., object] = add_rows) -> None:
        self._top_k = model.top_k
        self._add_rows = add_rows
        self._prior = prior_hit
        self._n_rows = 0
        self._routed_rows = 0
        self._active: set[int] = set()
        self._about = (-1, -1)  # step and layer that the counts speak about
        self._counted_rows = 0
        self._counts: dict[int, int] = {}
        self._said: dict[int, Sequence[int]] = {}
        self._hits: dict[int, list[list[float]]] = {}  # layer -> rank -> [came true, said]

    def step_begin(self, event: StepBegin) -> None:
        self._n_rows = len(event.requests)

    def routed(self, event: Routed) -> bool:
        """Count a micro-batch; whether it was the layer's last, which scores the prediction."""
        if not event.mb:
            self._active.clear()
            self._routed_rows = 0
        self._active.update(event.active)
        self._routed_rows += len(event.experts)
        if self._routed_rows < self._n_rows:
            return False
        said = self._said.pop(event.layer, None)
        if said:
            ranks = self._hits.setdefault(event.layer, [])
            while len(ranks) < len(said):
                ranks.append([self._prior * _PRIOR_WEIGHT, _PRIOR_WEIGHT])
            for rank, expert in zip(ranks, said, strict=False):
                rank[0] += expert in self._active
                rank[1] += 1
        return True

    def predicted(self, event: Predicted) -> dict[int, int] | None:
        """Count predicted rows; return them by expert once all micro-batches are in, else None."""
        if self._about != (event.step, event.layer):
            self._about = (event.step, event.layer)
            self._counted_rows = 0
            self._counts = {}
        self._add_rows(self._counts, event.ids, self._top_k)
        self._counted_rows += len(event.ids)
        return self._counts if self._counted_rows >= self._n_rows else None

    def say(self, layer: int, experts: Sequence[int]) -> Callable[[int], float]:
        """Remember a prediction, busiest first; return each rank's probability of being wanted."""
        self._said[layer] = experts
        ranks = self._hits.get(layer, ())

        def hit_rate(rank: int) -> float:
            if rank >= len(ranks):
                return self._prior
            hits, trials = ranks[rank]
            return hits / trials

        return hit_rate


def absent(counts: Mapping[int, int], layer: int, gpu: str, view: View) -> list[int]:
    """Return predicted experts neither on a GPU nor on their way, busiest first, then by id."""
    resident = view.residency(layer, gpu)
    found = sorted([e for e in counts if not resident[e] and not view.is_pending(layer, e, gpu)])
    found.sort(key=lambda e: -counts[e])
    return found


def where(layer: int, experts: Sequence[int], gpu: str, view: View) -> tuple[list[int], list[int], list[int]]:
    """Split experts of a layer, in order, into those on a GPU, on their way to it, and others."""
    resident = view.residency(layer, gpu)
    here, coming, neither = [], [], []
    for expert in experts:
        if resident[expert]:
            here.append(expert)
        elif view.is_pending(layer, expert, gpu):
            coming.append(expert)
        else:
            neither.append(expert)
    return here, coming, neither


def most_absent(view: View, residents: Sequence[Sequence[int]] = ()) -> int:
    """Return how many experts of a layer can be wanted and not be resident, at most."""
    model = view.model
    least = min((len(experts) for experts in residents), default=0)
    return max(1, min(model.n_experts - least, view.max_tokens * model.top_k))


class CrossLayer(Part):
    """Fetch the next layer's busiest predicted experts that fit into the link's idle time.

    That is the time between the layer's last load and the end of the CPU's work, as planned, and the next layer's dense part:
    PreScope's equations 6 and 7, behind any assignment.
    """

    predicts = True
    transient = True

    source: Source = option("signal:learned", "Prediction source.")
    size: int | None = option(
        None, "Slots of its pool, which also bound what it fetches; None: for all experts that could be wanted.", ge=1
    )
    order: Literal["busiest", "printed"] = option("busiest", "Busiest first, or as PreScope's loop is printed, busiest last.")
    prior_hit: float = option(
        PUBLISHED_HIT, "Probability that a predicted expert is wanted, until something has been seen.", ge=0, le=1
    )
    lane: Lane = option("main")

    @property
    def needs(self) -> frozenset[str]:
        return source_needs(self.source)

    @property
    def slots(self) -> int:
        return self._slots

    def start(self, setup: Setup) -> None:
        view, self._gpu = setup.view, setup.gpu
        model = view.model
        self._n_layers = model.n_layers
        self._cpu_ns = CostTable(view, setup.cpu) if setup.cpu else None
        self._load_ns = [view.costs.fetch_ns(view.host, setup.gpu, None, layer) for layer in range(model.n_layers)]
        self._slots = most_absent(view) if self.size is None else self.size
        self._foresight = Foresight(model, self.prior_hit, twin(add_rows, view))
        self._absent = twin(absent, view)
        self._rows = 0
        self._gap = 0  # of the layer routed last
        self._chosen: Sequence[int] = ()  # for that layer

    def step_begin(self, event: StepBegin) -> None:
        self._rows = len(event.requests)
        self._foresight.step_begin(event)

    def ask(self, event: Routed, view: View) -> Sequence[Predict]:
        self._foresight.routed(event)
        if event.mb or event.layer + 1 >= self._n_layers:
            return ()
        return (Predict(event.step, event.layer + 1, self.source, view.dense_device(event.layer), self.lane),)

    def ahead(self, event: Routed, plan: Plan, view: View) -> Sequence[Unit]:
        """Choose nothing yet; work out how long the link will be idle before the CPU is done."""
        layer, gpu = event.layer, self._gpu
        whole = self._load_ns[layer]
        if not event.mb:
            self._gap = 0
        if self._cpu_ns is not None:
            self._gap += sum([self._cpu_ns[event.rows[e]] for e in plan.cpu])
        for expert in plan.gpu:
            if view.is_pending(layer, expert, gpu):
                self._gap -= view.remaining_ns(layer, expert, gpu)
            elif not view.is_resident(layer, expert, gpu):
                self._gap -= whole
        if not event.mb:
            for expert in self._chosen:  # for nothing; those that have not begun do not hold up the link
                if expert not in plan.gpu and view.is_pending(layer, expert, gpu):
                    left = view.remaining_ns(layer, expert, gpu)
                    self._gap -= left if left < whole else 0
            self._chosen = ()
        return ()

    def choose(self, event: Predicted, view: View) -> Sequence[Unit]:
        """Count predicted rows; once all are in, choose as many as fit."""
        counts = self._foresight.predicted(event)
        if counts is None:
            return ()
        layer = event.layer
        wanted = self._absent(counts, layer, self._gpu, view)
        hit_rate = self._foresight.say(layer, wanted)
        dense = view.dense_ns(layer) + view.costs.shared_ns(view.compute, self._rows)
        share = (self._gap + dense) / self._load_ns[layer]
        chosen = wanted[: prefetch_count(share, min(len(wanted), self._slots), hit_rate)]
        if self.order == "printed":
            chosen.reverse()
        self._chosen = chosen
        return [(layer, expert) for expert in chosen]
