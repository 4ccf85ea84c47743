"""Prefetch parts: which experts of a later layer to fetch before they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from moesim.policies.algorithms.assignment import Plan
from moesim.policies.algorithms.counting import add_rows, top_counted
from moesim.policies.algorithms.drawing import sample
from moesim.policies.base import layer_residents, slot_bytes
from moesim.policies.options import option
from moesim.policies.parts import Part, Setup, Unit, source_needs
from moesim.policy import DEMAND, PREFETCH, Fetch, Pool, Predict, Predicted, Routed, View


class NoPrefetch(Part):
    """Nothing is prefetched."""

    transient = False
    slots = 0
    predicts = False

    def ask(self, event: Routed, view: View) -> Sequence[Predict]:
        """Ask for no prediction."""
        return ()

    def ahead(self, event: Routed, plan: Plan, view: View) -> Sequence[Unit]:
        """Choose no expert."""
        return ()

    def choose(self, event: Predicted, view: View) -> Sequence[Unit]:
        """Choose no expert."""
        return ()


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


class _Pooled(Part):
    """Fetches into the cache, or into a transient pool of ``size`` times ``buffers`` slots."""

    size: int = option(1, "Experts of a layer visit to prefetch.", ge=1)
    pool: Literal["transient", "cache"] = option(
        "transient", "Where they go: a pool of their own, emptied at the end of their layer, or the cache."
    )
    buffers: Buffers = option(1)
    lookahead: int = option(1, "How many layers ahead.", ge=1)

    @property
    def transient(self) -> bool:
        """Whether it has a pool of its own."""
        return self.pool == "transient"

    @property
    def slots(self) -> int:
        """Experts that its own pool holds."""
        return self.size * self.buffers if self.transient else 0


class RandomAhead(_Pooled):
    """Fetch experts of a following layer at random: what prefetching gains without knowing anything."""

    predicts = False

    size: int = option(1, "Experts drawn for each layer visit; those that are on the GPU already are skipped.", ge=1)
    seed: int = option(0, "Of the draws, which depend on nothing but it, the step and the layer.")

    def start(self, setup: Setup) -> None:
        """Learn the model's shape."""
        self._gpu = setup.gpu
        self._n_layers = setup.view.model.n_layers
        self._n_experts = setup.view.model.n_experts

    def ask(self, event: Routed, view: View) -> Sequence[Predict]:
        """Ask for no prediction."""
        return ()

    def ahead(self, event: Routed, plan: Plan, view: View) -> Sequence[Unit]:
        """Draw once per layer visit."""
        layer = event.layer + self.lookahead
        if event.mb or layer >= self._n_layers:
            return ()
        drawn = sample(self._n_experts, self.size, self.seed, event.step * self._n_layers + layer)
        return [(layer, expert) for expert in drawn if not view.is_resident(layer, expert, self._gpu)]

    def choose(self, event: Predicted, view: View) -> Sequence[Unit]:
        """Choose no expert: nothing was asked."""
        return ()


def top_by_count(counts: Sequence[int], size: int) -> list[int]:
    """Return up to ``size`` ids with the highest positive counts, highest first, ties to the lower id.

    >>> top_by_count([0, 3, 1, 3, 0], 4)
    [1, 3, 2]
    """
    positive = [expert for expert, count in enumerate(counts) if count > 0]
    return sorted(positive, key=lambda expert: -counts[expert])[: max(size, 0)]


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
        """The source's signal or table."""
        return source_needs(self.source)

    def start(self, setup: Setup) -> None:
        """Forget the counts of an earlier run."""
        self._gpu = setup.gpu
        self._top_k = setup.view.model.top_k
        self._n_layers = setup.view.model.n_layers
        self._step = -1
        self._seen: dict[int, tuple[dict[int, int], set[int]]] = {}  # of that step, by layer: rows of experts, and who was chosen

    def ask(self, event: Routed, view: View) -> Sequence[Predict]:
        """Ask about the layer ahead, once per layer visit."""
        if event.mb:
            return ()
        last = event.layer + self.lookahead
        first = 1 if self.nearer == "ask" and event.layer == 0 else last
        where = view.dense_device(event.layer)
        return [
            Predict(event.step, layer, self.source, where, self.lane) for layer in range(first, min(last + 1, self._n_layers))
        ]

    def ahead(self, event: Routed, plan: Plan, view: View) -> Sequence[Unit]:
        """Choose nothing before the prediction."""
        return ()

    def choose(self, event: Predicted, view: View) -> Sequence[Unit]:
        """Count predicted rows over the micro-batches so far; choose the top, at most ``size`` in all."""
        if self._step != event.step:
            self._step, self._seen = event.step, {}
        counts, chosen = self._seen.setdefault(event.layer, ({}, set()))
        add_rows(counts, event.ids, self._top_k)
        resident = view.residency(event.layer, self._gpu)
        if self.over != "all":
            counts = {expert: n for expert, n in counts.items() if not resident[expert]}
        top = top_counted(counts, self.size)
        new = [e for e in top if not resident[e] and e not in chosen][: self.size - len(chosen)]
        chosen.update(new)
        used = [e for e in top if resident[e]] if self.residents == "used" else []
        return [(event.layer, e) for e in (*used, *new)]

    def native_state(self) -> dict[str, Any] | None:
        """Nothing but the options; C++ knows no ``residents``."""
        return {} if self.residents == "as-they-are" else None


PREFETCHED = "prefetch"


class Transient:
    """What was fetched ahead to a device, by layer, until that layer ends."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._ahead: dict[int, list[int]] = {}
        self._late: dict[int, list[int]] = {}  # what was on its way when its layer ended, which a slow link may bring yet

    def pool(self, slots: int, view: View) -> Pool:
        """Return the pool, with no more slots than a layer has experts."""
        return Pool(self._device, PREFETCHED, min(slots, view.model.n_experts) * slot_bytes(view))

    def fetch(self, layer: int, experts: Sequence[int]) -> Fetch:
        """Fetch experts of a later layer."""
        self._ahead.setdefault(layer, []).extend(experts)
        return Fetch(layer, experts, self._device, PREFETCH, PREFETCHED)

    def demand(self, layer: int, misses: Sequence[int], view: View) -> tuple[list[Fetch], Sequence[int]]:
        """Make what is on its way more urgent, in the pool it was meant for; return that, and what is still to be loaded."""
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
        """Return what is to be dropped of a layer that ends: what is there, and what is on its way to this pool, for nobody."""
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
        """Return a prefetched expert whose layer is routed and that nothing uses; for a demand load, any idle one."""
        for layer, experts in self._ahead.items():
            if layer <= routed or fetch.urgency == DEMAND:
                for expert in experts:
                    if view.is_resident(layer, expert, self._device) and not view.is_in_use(layer, expert, self._device):
                        experts.remove(expert)
                        return layer, expert
        return None
