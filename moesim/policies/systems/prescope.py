"""PreScope: one plan for the loads of a layer and the prefetches of the next, from a learned prediction.

"PreScope: Unleashing the Power of Prefetching for Resource-Constrained MoE Inference", arXiv, 2025. No code is released.

Idea: loads on demand and prefetches share one link, so they are decided together: an expert is worth a transfer only if it
arrives before the CPU has computed the rest, and the link's idle time up to the next layer's experts goes to the busiest
experts that are predicted there.

| point | paper says | released code does | we do |
|---|---|---|---|
| hot expert table | most frequent (layer, expert) pairs until memory is full, never changed | none | the same, from the calibration table; other parts by ``placement`` |
| predictor | LLaPor, a small network a layer | none | ``predictor``: any source, ``null`` for none; a learned one also takes the memory that is printed, 2.8 MB a layer |
| online learning | possible | none | not implemented |
| when | once gate and prediction are done; its time is hidden | none | the GPU runs what it has at once; with ``head_start`` the CPU begins with what every plan gives it; the rest waits for the prediction, if one will come |
| plan | Alg. 1: GPU_Q over both layers, checked again for this one | none | the same, once a layer; micro-batches are added up |
| a prompt: loads | a phase of the throughput; no rule of its own | none | the same plan by its rows, in one step, as in Transformers, unless the experiment cuts it; hardly a prefetch, as the link is busy with loads; these wait while both buffers are full and the GPU computes what it had (0.2 of 1.1 s: DeepSeek-V2-Lite, batch 64) |
| a prompt: what stays | the hot table | none | the same |
| alpha | not defined in use | none | what is left of the transfer under way; after a head start, from then |
| t_c of a set | beta w + C for each expert | none | sum of the profile's costs; what the first expert takes beyond them (``first_extra_us``) is not in it |
| x, g | one of each | none | x by layer; g of the busiest expert |
| t_attn | - | none | attention, router and shared experts, from the profile |
| no index passes | the loop still loads the busiest | none | ``none_better``: ``eq2`` (that one or none, by eq. 2), ``printed``, ``sentinel`` (none) |
| the expert with the fewest tokens | never loaded: eq. 5 leaves it to the CPU | none | ``none_better: eq2`` loads it too where eq. 2 says so and it is the only one left; the other two leave it, which in prompts costs most: 645 s in place of 7.3 (Mixtral, 64 of 512 tokens) |
| f | (T_gap + t_attn) / x, rounded | none | half up; from 0 to what is predicted and absent |
| at most GPU_Q's members | not stated | none | no; ``limit_to_queue`` |
| R_hit, R_miss | not defined | none | share of the predictions of that layer and rank that came true; ``prior_hit`` counts for one (0.94, the least printed for its "hot Top-4", in place of a calibration run) |
| order of prefetches | the loop begins with the coldest chosen, the text with the hottest | none | ``prefetch_order``: ``busiest`` or ``printed`` |
| GPU_Q without next-layer experts | a larger window, no algorithm | none | ``window``: ``none``, or ``next2``: step 4 for the layer after, with ``next2_predictor`` |
| OnIoDone, OnCpuGpuDone | the next transfer, the next expert | none | queues of the link and of the devices, in the plan's order |
| order of loads and of the CPU | fewest tokens first | none | the same |
| link | demand goes first; a transfer is not interrupted | none | the same; the parts of one that has begun go before the loads, and then count as demand |
| queued prefetches | not stated | none | given up when the layer ends, or, as f counts the next dense part too, at the ``next-gate`` (``cancel``) |
| predicted and still under way at its gate | not stated | none | runs on the GPU when it arrives; not in the plan |
| buffers | 2 for loads; two groups for prefetches, sizes not given; overwritten, never kept | none | ``demand_slots``; ``prefetch_slots`` a group, by default all that can be absent; emptied at the end of their layer |
| without the table | random preloading | none | ``placement: random``; ``none`` leaves the memory empty |
| AsyncIO | three-part asynchronous copies, 79 % of the link | none | ``async_io``: the ``chunked`` curve, an expert in three; off: the experiment's transfers |
| without AsyncIO | transfers and computation take turns | none | the same plan: shared experts, as many loads as ``demand_slots`` holds, all experts that are there, further loads; prefetches with the last loads |
| time of the GPU | hidden by transfers | none | simulated |

Ablations: ``placement: random`` (the paper's, without the table), ``predictor: null``, ``async_io: false``; without PreSched, ``scheduler: threshold``
(Fiddler's rule, layer by layer) and ``prefetch_size: 4`` (the predictor's "hot Top-4" whether there is time or not). A ``scheduler``
alone keeps the rule for the number of prefetches, equations 6 and 7, behind another assignment.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

from moesim.core.units import ceil_div
from moesim.model import ModelSpec
from moesim.policies.algorithms.counting import add_rows
from moesim.policies.base import (
    CACHE,
    STAGING,
    PolicyBase,
    Range,
    cpu_of,
    gpu_of,
    idle_resident,
    layer_residents,
    slot_bytes,
)
from moesim.policies.composition import PartSpec
from moesim.policies.cross_layer import PUBLISHED_HIT, Foresight, most_absent
from moesim.policies.part_names import make_part
from moesim.policies.parts import AssignmentPart, PlacementPart, Setup, source_needs
from moesim.policies.prefetch_groups import PrefetchGroups
from moesim.policies.prescope_plan import Planner, PlanRule, Visit
from moesim.policies.turns import Turns
from moesim.policies.twins import twin
from moesim.policy import (
    Action,
    Copy,
    Drop,
    Fetch,
    Fetched,
    LayerEnd,
    Placement,
    Pool,
    Predicted,
    Ran,
    Routed,
    SharedRan,
    StepBegin,
    View,
)

LEARNED = "signal:learned"
PREDICTOR_BYTES = 2_800_000  # a layer, the largest that is printed
PARTS_OF_A_TRANSFER = 3
PRESCHED = "presched"


class PreScopeParts(NamedTuple):
    """The parts of PreScope."""

    placement: PlacementPart
    scheduler: AssignmentPart | None  # None: PreSched


class PreScope(PolicyBase):
    """Cross-layer plan of loads and prefetches from a learned prediction, with a static hot table (PreScope, 2025)."""

    paper = "PreScope (arXiv, 2025)"
    missing = (
        "online learning of the predictor",
        "three parts for the small experts of a model of mixed precision: all parts have the size of a third of the largest expert",
    )
    oracles = MappingProxyType({"assignment": {"scheduler": "exact"}})

    placement: PartSpec | PlacementPart = "frequency-global"
    """The hot expert table: what is on the GPU for good. ``"random"`` experts stand in for it in the paper's ablation."""
    predictor: str | None = LEARNED
    """Source of the prediction of the next layer, for example ``"signal:learned"``, ``"signal:gate_next1"``,
    ``"synthetic:0.9"`` or ``"oracle"``; None: nothing is prefetched."""
    head_start: bool = True
    """The CPU begins before the prediction is in with those experts that every plan gives it; False, or without ``async_io``:
    it waits."""
    scheduler: PartSpec | AssignmentPart = PRESCHED
    """``"presched"``, or an assignment part that plans each layer by itself, for example ``"threshold"``."""
    prefetch_size: Annotated[int, Range(1)] | None = None
    """Experts to prefetch for each layer, whether there is time or not; None: as many as fit."""
    async_io: bool = True
    """Chunked transfers, an expert in three parts, beside all computation. False: the experiment's transfers, and no transfer
    beside any computation."""
    none_better: Literal["eq2", "printed", "sentinel"] = "eq2"
    """What to load where no load would be done before the CPU."""
    limit_to_queue: bool = False
    """Prefetch no more experts than GPU_Q holds of the next layer."""
    prefetch_order: Literal["busiest", "printed"] = "busiest"
    """Busiest first, or as the loop is printed, busiest last."""
    window: Literal["none", "next2"] = "none"
    """What to prefetch where GPU_Q holds no expert of the next layer: nothing, or for the layer after it."""
    next2_predictor: str = "signal:gate_next2"
    """Source of the prediction of the layer after the next."""
    prior_hit: Annotated[float, Range(0, 1)] = PUBLISHED_HIT
    """Probability that a predicted expert is wanted, until something has been seen."""
    demand_slots: Annotated[int, Range(1)] = 2
    """Experts of the buffer for loads on demand."""
    prefetch_slots: Annotated[int, Range(1)] | None = None
    """Experts of each of the two groups of prefetch buffers; None: all that could be wanted and are not in the table."""
    cancel: Literal["layer-end", "next-gate"] = "layer-end"
    """When prefetches that are only queued are given up: when the layer ends that asked for them, or when the one is routed
    that they are for."""
    lane: Literal["main", "side"] = "main"
    """Where predictions are computed; ``"side"`` needs its rate in the profile."""

    @cached_property
    def parts(self) -> PreScopeParts:
        """Hot table and scheduler, built from their names at the first use."""
        own = isinstance(self.scheduler, str) and self.scheduler == PRESCHED
        scheduler = None if own else make_part("assignment", self.scheduler)
        return PreScopeParts(make_part("placement", self.placement), scheduler)

    @property
    def looks_further(self) -> bool:
        """Whether the layer after the next may be prefetched for, which takes its own predictions and buffers of its own."""
        return self.window == "next2" and self.predictor is not None and self.parts.scheduler is None and self.async_io

    @property
    def listens(self) -> frozenset[type]:
        """Steps, routing and layer ends; predictions if there is a predictor; ends of copies and Runs if these take turns."""
        events: set[type] = {StepBegin, Routed, LayerEnd}
        if self.predictor is not None:
            events.add(Predicted)
        return frozenset(events if self.async_io else events | {Fetched, Ran, SharedRan})

    @property
    def needs(self) -> frozenset[str]:
        """The hot table's frequencies and the predictors' signals."""
        placement, scheduler = self.parts
        found = placement.needs | (frozenset() if scheduler is None else scheduler.needs)
        if self.predictor is not None:
            found |= source_needs(self.predictor)
        return found | source_needs(self.next2_predictor) if self.looks_further else found

    def transfer(self, model: ModelSpec) -> tuple[str, int | None] | None:
        """Return chunks of a third of an expert, or nothing without AsyncIO."""
        if not self.async_io:
            return None
        largest = max(model.expert_bytes(layer) for layer in range(model.n_layers))
        return "chunked", ceil_div(largest, PARTS_OF_A_TRANSFER)

    def place(self, view: View) -> Placement:
        """Fill the hot table, and set the buffers up."""
        placement, scheduler = self.parts
        model = view.model
        gpu, cpu = gpu_of(view, "prescope"), cpu_of(view, "prescope")
        self._gpu = gpu
        setup = Setup(view, gpu, cpu, [min(view.cache_slots(gpu), model.n_layers * model.n_experts)], per_layer=False)
        residents = placement.choose(setup)
        self._scheduler, self._looks_further = scheduler, self.looks_further
        if scheduler is not None:
            scheduler.start(setup)
        slots = min(self.prefetch_slots or most_absent(view, residents), model.n_experts)
        self._groups = PrefetchGroups(gpu, slots, view)
        self._foresight, self._foresight2 = (Foresight(model, self.prior_hit, twin(add_rows, view)) for _ in range(2))
        further = self.next2_predictor if self._looks_further else None
        rule = PlanRule(
            self.none_better, self.limit_to_queue, self.prefetch_size, self.prefetch_order == "printed", further, self.lane
        )
        self._planner = Planner(rule, gpu, cpu, self._groups, slots, self._foresight, view)
        self._visit: Visit | None = None  # the layer that is routed and has not ended
        self._turns = Turns(gpu, min(self.demand_slots, model.n_experts))
        table = sum(len(experts) * model.expert_bytes(layer) for layer, experts in enumerate(residents))
        pools = [Pool(gpu, CACHE, table), Pool(gpu, STAGING, min(self.demand_slots, model.n_experts) * slot_bytes(view))]
        return Placement(
            copies=[Copy(layer, experts, gpu) for layer, experts in enumerate(residents) if experts],
            pools=pools + self._groups.pools(view) if self.predictor is not None else pools,
            reserved={gpu: model.n_layers * PREDICTOR_BYTES} if self.predictor == LEARNED else {},
        )

    # ------------------------------------------------------------------------------------------------------ events
    def decide(self, event: Any, view: View) -> Iterable[Action]:
        """Run what is there and plan when routed, or when the prediction is in; tidy up at the end of a layer."""
        return self._answer(event, view) if self.async_io else self._in_turn(event, view)

    def _in_turn(self, event: Any, view: View) -> Iterable[Action]:
        """Answer as ever, but let copies and Runs go in turns once the layer is planned and its shared experts have run."""
        kind = type(event)
        now: Iterable[Action] = ()
        if kind is Fetched or kind is Ran:
            self._turns.happened(event)
        elif kind is not SharedRan:
            now = self._answer(event, view)
        visit = self._visit
        if visit is None:
            return now
        if view.model.n_shared:
            visit.shared += (kind is Routed) - (kind is SharedRan)
        now = self._turns.hold(visit.layer, now)
        return [*now, *self._turns.go_on()] if visit.complete and not visit.awaits and not visit.shared else now

    def _answer(self, event: Any, view: View) -> Iterable[Action]:
        kind = type(event)
        if kind is Routed:
            return self._routed(event, view)
        if kind is Predicted:
            return self._predicted(event, view)
        if kind is LayerEnd:
            return self._layer_end(event, view)
        return self._step_begin(event)

    def evict(self, fetch: Fetch, view: View) -> tuple[int, int] | None:
        """Give up a demand-loaded expert that has been computed; a prefetch waits until its group is empty."""
        return idle_resident(view, fetch) if fetch.pool == STAGING else None

    def _step_begin(self, event: StepBegin) -> Iterable[Action]:
        self._planner.begin_step(len(event.requests))
        self._foresight.step_begin(event)
        self._foresight2.step_begin(event)
        if self._scheduler is not None and hasattr(self._scheduler, "step_begin"):
            self._scheduler.step_begin(event)
        return ()

    def _routed(self, event: Routed, view: View) -> list[Action]:
        actions: list[Action] = []
        visit = self._visit
        if visit is None:  # the first micro-batch
            visit = self._visit = Visit(event.step, event.layer)
            if self.predictor is not None:
                actions += self._planner.ask(self.predictor, event.layer + 1, visit, view)
                visit.awaits = bool(actions)
            if self.cancel == "next-gate":
                cancelled = self._groups.cancel_queued(view)
                visit.cancelled.update(e for drop in cancelled if drop.layer == event.layer for e in drop.experts)
                actions += cancelled
        visit.complete = self._foresight.routed(event)
        if self._looks_further:
            self._foresight2.routed(event)
        if self._scheduler is not None:
            return actions + self._planner.by_layer(self._scheduler, event, visit, view)
        actions += self._planner.residents(event, visit, view)
        if not visit.complete:
            return actions
        visit.sort()
        if not visit.awaits:
            actions += self._planner.plan(visit, view)
        elif self.head_start and self.async_io:
            actions += self._planner.begin_cpu(visit, view)
        return actions

    def _predicted(self, event: Predicted, view: View) -> list[Action]:
        """Plan with a prediction of the next layer, or prefetch with one of the layer after; any other comes too late."""
        visit = self._visit
        if visit is None or event.step != visit.step:
            return []
        if visit.awaits and event.layer == visit.layer + 1 and event.source == self.predictor:
            counts = visit.counts = self._foresight.predicted(event)
            if counts is None:
                return []
            visit.awaits = False
            if self._scheduler is not None:
                return self._planner.fill_gap(event.layer, counts, self._foresight, visit, view)
            return self._planner.plan(visit, view) if visit.complete else []
        if visit.looks_further and event.layer == visit.layer + 2:
            counts = self._foresight2.predicted(event)
            if counts is not None:
                visit.looks_further = False
                return self._planner.fill_gap(event.layer, counts, self._foresight2, visit, view)
        return []

    def _layer_end(self, event: LayerEnd, view: View) -> list[Action]:
        """Empty the buffers of the layer."""
        self._visit = None
        held = layer_residents(view, self._gpu, STAGING, event.layer)
        actions: list[Action] = [Drop(event.layer, held, self._gpu)] if held else []
        if self.predictor is not None:
            actions += self._groups.layer_end(event.layer, view)
            if self.cancel == "layer-end":
                actions += self._groups.cancel_queued(view)
        return actions
