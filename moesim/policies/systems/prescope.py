"""PreScope: one plan for a layer's loads and the next's prefetches, by a learned prediction.

"PreScope: Unleashing the Power of Prefetching for Resource-Constrained MoE Inference", arXiv, 2025. No code is released.

Idea: an expert is worth a transfer only if it arrives before the CPU has computed the rest; the link's idle time up to the next
layer's experts goes to the busiest that are predicted there.

| point | paper says | released code does | we do |
|---|---|---|---|
| hot expert table | most frequent (layer, expert) pairs until memory is full, never changed | none | the same, from calibration; ``placement`` |
| predictor | LLaPor, a small network a layer | none | ``predictor``: any source, ``null`` for none; a learned one takes the printed memory, 2.8 MB a layer |
| online learning | possible | none | not implemented |
| when | once gate and prediction are done; its time is hidden | none | the GPU runs what it has at once; with ``head_start`` the CPU what every plan gives it; the rest waits for the prediction |
| plan | Alg. 1: GPU_Q over both layers, checked again for this one | none | the same, once a layer; micro-batches are added up |
| a prompt: loads | a phase of the throughput; no rule of its own | none | the same plan, in one step, as in Transformers; hardly a prefetch; loads wait while both buffers are full and the GPU computes what it had (0.2 of 1.1 s: DeepSeek-V2-Lite, batch 64) |
| a prompt: what stays | the hot table | none | the same |
| alpha | not defined in use | none | what is left of the transfer under way; after a head start, from then |
| t_c of a set | beta w + C for each expert | none | sum of the profile's costs, without ``first_extra_us`` |
| x, g | one of each | none | x by layer; g of the busiest expert |
| t_attn | - | none | attention, router and shared experts |
| no index passes | the loop still loads the busiest | none | ``none_better``: ``eq2`` (that one or none, by eq. 2), ``printed``, ``sentinel`` (none) |
| the expert with the fewest tokens | never loaded: eq. 5 leaves it to the CPU | none | ``eq2`` loads it where eq. 2 says so and it is the only one left; the others leave it, in prompts 645 s in place of 7.3 (Mixtral, 64 of 512 tokens) |
| f | (T_gap + t_attn) / x, rounded | none | half up; from 0 to what is predicted and absent |
| at most GPU_Q's members | not stated | none | no; ``limit_to_queue`` |
| R_hit, R_miss | not defined | none | share of that layer's and rank's predictions that came true; ``prior_hit`` counts for one (0.94, the least printed for its "hot Top-4") |
| order of prefetches | the loop begins with the coldest chosen, the text with the hottest | none | ``prefetch_order``: ``busiest`` or ``printed`` |
| GPU_Q without next-layer experts | a larger window, no algorithm | none | ``window``: ``none``, or ``next2``: step 4 for the layer after (``next2_predictor``) |
| OnIoDone, OnCpuGpuDone | the next transfer, the next expert | none | queues in the plan's order |
| order of loads and of the CPU | fewest tokens first | none | the same |
| link | demand goes first; a transfer is not interrupted | none | the same; the parts of one that has begun count as demand, before the loads |
| queued prefetches | not stated | none | given up when the layer ends, or at the ``next-gate`` (``cancel``) |
| predicted and still under way at its gate | not stated | none | runs on the GPU when it arrives; not in the plan |
| buffers | 2 for loads; two groups for prefetches, sizes not given; overwritten, never kept | none | ``demand_slots``; ``prefetch_slots`` a group, by default all that can be absent; emptied at the end of their layer |
| without the table | random preloading | none | ``placement: random``; ``none`` leaves it empty |
| AsyncIO | three-part asynchronous copies, 79 % of the link | none | ``async_io``: the ``chunked`` curve, an expert in three; off: the experiment's transfers |
| without AsyncIO | transfers and computation take turns | none | the same plan: shared experts, as many loads as ``demand_slots``, all that is there, further loads; prefetches with the last |
| time of the GPU | hidden by transfers | none | simulated |

Ablations: ``placement: random``, ``predictor: null``, ``async_io: false``; without PreSched, ``scheduler: threshold``
(Fiddler's rule, layer by layer) and ``prefetch_size: 4`` ("hot Top-4"). A ``scheduler`` alone keeps equations 6 and 7 for the
number of prefetches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from moesim.core.units import ceil_div
from moesim.model import ModelSpec
from moesim.policies.algorithms.presched import Timing, certain_for_cpu, cross_layer_plan
from moesim.policies.base import (
    CACHE,
    STAGING,
    CostTable,
    PolicyBase,
    cpu_of,
    gpu_of,
    idle_resident,
    layer_residents,
    slot_bytes,
    twin,
)
from moesim.policies.options import option
from moesim.policies.parts import (
    AssignmentOption,
    AssignmentPart,
    PlacementOption,
    PlacementPart,
    Plan,
    Setup,
    Unit,
    source_needs,
)
from moesim.policies.parts.prefetch import PUBLISHED_HIT, Foresight, absent, add_rows, most_absent, prefetch_count, where
from moesim.policies.registry import make_part
from moesim.policy import (
    DEMAND,
    PREFETCH,
    Action,
    Copies,
    Copy,
    Drop,
    Fetch,
    Fetched,
    LayerEnd,
    Placement,
    Pool,
    Predict,
    Predicted,
    Ran,
    Routed,
    Run,
    SharedRan,
    StepBegin,
    View,
)


class Turns:
    """Holds copies and Runs of a layer, and starts a turn of them when the one before is over."""

    # A turn of copies brings as many experts as the buffer for loads holds (`slots`), the last one also those of later
    # layers; a turn of computation runs what is there, and empties the buffer. So the layer ends with computation
    # and nothing on its way.

    def __init__(self, gpu: str, slots: int) -> None:
        self._gpu = gpu
        self._slots = slots
        self._layer = -1
        self._copies_next = True
        self._loads: list[int] = []
        self._ahead: list[Fetch] = []
        self._runs: dict[str, list[int]] = {}  # device -> experts in order
        self._buffered: list[int] = []  # loads of the latest turn of copies
        self._awaited: set[tuple[int, int, str]] = set()  # (layer, expert, device) of the present turn

    def hold(self, layer: int, actions: Iterable[Action]) -> list[Action]:
        """Keep a layer's copies and Runs, each expert once; return the other actions."""
        self._layer = layer
        now: list[Action] = []
        for action in actions:
            if isinstance(action, Fetch) and action.urgency == DEMAND:
                self._loads += [e for e in action.experts if e not in self._loads]
            elif isinstance(action, Fetch):
                self._ahead.append(action)
            elif isinstance(action, Run):
                runs = self._runs.setdefault(action.device, [])
                runs += [e for e in action.experts if e not in runs]
            else:
                now.append(action)
        return now

    def happened(self, event: Fetched | Ran) -> None:
        experts = (event.expert,) if isinstance(event, Fetched) else event.experts
        self._awaited.difference_update((event.layer, expert, event.device) for expert in experts)

    def go_on(self) -> list[Action]:
        """Return the next turn if the one before is over; to be asked once all is held."""
        actions: list[Action] = []
        while not self._awaited and (self._loads or self._ahead or self._runs):
            actions += self._copy() if self._copies_next else self._compute()
            self._copies_next = not self._copies_next
        return actions

    def _copy(self) -> list[Action]:
        """Load what the buffer holds; with the last loads, fetch for later layers."""
        now, self._loads = self._loads[: self._slots], self._loads[self._slots :]
        fetches = [Fetch(self._layer, now, self._gpu, DEMAND, STAGING)] if now else []
        if not self._loads:
            fetches, self._ahead = fetches + self._ahead, []
        self._awaited = {(fetch.layer, expert, self._gpu) for fetch in fetches for expert in fetch.experts}
        self._buffered = now
        return [*fetches]

    def _compute(self) -> list[Action]:
        """Run what is there; where more is to be loaded, it leaves the buffer after its run."""
        later, on_gpu = set(self._loads), self._runs.pop(self._gpu, [])
        runs = {device: [e for e in experts if e not in on_gpu] for device, experts in self._runs.items()}
        runs[self._gpu] = [e for e in on_gpu if e not in later]
        self._runs = {self._gpu: [e for e in on_gpu if e in later]} if later else {}
        if later:  # else nothing follows in this layer
            self._awaited = {(self._layer, e, device) for device, experts in runs.items() for e in experts}
        actions: list[Action] = [Run(self._layer, experts, device) for device, experts in runs.items() if experts]
        return [*actions, Drop(self._layer, self._buffered, self._gpu)] if later else actions


GROUPS = ("prefetch-even", "prefetch-odd")  # by the number of the layer


class PrefetchGroups:
    """Fetches ahead through two pools of ``slots`` experts; only queued copies may be cancelled."""

    def __init__(self, gpu: str, slots: int, view: View) -> None:
        self._gpu = gpu
        self._slots = slots
        model, chunk = view.model, view.costs.chunk_bytes
        sizes = [model.expert_bytes(layer) for layer in range(model.n_layers)]
        self._load_ns = [view.costs.fetch_ns(view.host, gpu, size) for size in sizes]
        last = [size if chunk is None else (size - 1) % chunk + 1 for size in sizes]
        self._last_ns = [view.costs.fetch_ns(view.host, gpu, size) for size in last]  # of the last chunk
        self._ahead: list[Unit] = []  # may still be queued or under way
        self._over: set[Unit] = set()  # under way, though their layer has ended; dropped when they arrive

    def pools(self, view: View) -> list[Pool]:
        return [Pool(self._gpu, group, self._slots * slot_bytes(view)) for group in GROUPS]

    def fetch(self, layer: int, experts: Sequence[int]) -> Fetch:
        self._ahead += [(layer, expert) for expert in experts]
        return Fetch(layer, experts, self._gpu, PREFETCH, GROUPS[layer % 2])

    def keep(self, layer: int, experts: Sequence[int]) -> list[Action]:
        """Want what is on its way: what was to be dropped on arrival stays."""
        again = [expert for expert in experts if (layer, expert) in self._over]
        self._over.difference_update([(layer, expert) for expert in again])
        return [Fetch(layer, again, self._gpu, PREFETCH, GROUPS[layer % 2])] if again else []

    def under_way(self, view: View) -> dict[Unit, int]:
        """Return the transfers that have begun, with the time that is left."""
        found: dict[Unit, int] = {}
        for layer, expert in self._ahead:
            if view.is_pending(layer, expert, self._gpu):
                left = view.remaining_ns(layer, expert, self._gpu)
                if left < self._load_ns[layer]:
                    found[layer, expert] = left
        return found

    def busy_ns(self, view: View) -> int:
        """Return how long the link goes on with what it has begun."""
        return max(self.under_way(view).values(), default=0) if self._ahead else 0

    def finish_first(self, view: View) -> list[Action]:
        """Keep the chunks of what has begun together: as urgent as a load, and before it."""
        actions: list[Action] = []
        begun = self.under_way(view) if self._ahead else {}
        for (layer, expert), left in begun.items():
            if left <= self._last_ns[layer]:
                continue  # there is nothing between
            actions.append(Fetch(layer, (expert,), self._gpu, DEMAND, GROUPS[layer % 2]))
            if (layer, expert) in self._over:
                actions.append(Drop(layer, (expert,), self._gpu))
        return actions

    def layer_end(self, layer: int, view: View) -> list[Action]:
        gone = layer_residents(view, self._gpu, GROUPS[layer % 2], layer)
        if self._ahead:
            begun = self.under_way(view)
            gone += [e for at, e in self._ahead if at == layer and view.is_pending(at, e, self._gpu)]
            self._ahead = [unit for unit in self._ahead if unit in begun or unit[0] != layer]
            self._over = {unit for unit in begun if unit[0] == layer or unit in self._over}
        else:
            self._over.clear()
        return [Drop(layer, gone, self._gpu)] if gone else []

    def cancel_queued(self, view: View) -> list[Drop]:
        if not self._ahead:
            return []
        begun = self.under_way(view)
        queued: dict[int, list[int]] = {}
        for layer, expert in self._ahead:
            if (layer, expert) not in begun and view.is_pending(layer, expert, self._gpu):
                queued.setdefault(layer, []).append(expert)
        self._ahead = list(begun)
        return [Drop(layer, experts, self._gpu) for layer, experts in queued.items()]


class Visit:
    """The present visit of a layer."""

    current: Sequence[int] = ()  # the experts of `rows`, once all micro-batches are routed: fewest rows first
    tokens: Sequence[int] = ()  # their rows
    counts: Mapping[int, int] | None = None  # rows predicted in the next layer, of experts that have any
    awaits = False  # a prediction of the next layer has been asked for and is not in
    complete = False  # all micro-batches are routed
    shared = 0  # micro-batches whose shared experts are still to be run
    looks_further = False  # a prediction of the layer after the next has been asked for
    gap: float = 0  # T_gap of the plan
    n_certain = 0  # experts that the CPU has begun with before the plan
    routed_ns = 0  # when it did

    def __init__(self, step: int, layer: int) -> None:
        self.step, self.layer = step, layer
        self.rows: dict[int, int] = {}  # of the experts that are neither on the GPU nor on their way
        self.cancelled: set[int] = set()  # of its experts, prefetches that are given up as it is routed

    def sort(self) -> None:
        rows_of = self.rows.__getitem__
        self.current = sorted(sorted(self.rows), key=rows_of)
        self.tokens = [*map(rows_of, self.current)]


LEARNED = "signal:learned"
PREDICTOR_BYTES = 2_800_000  # a layer, the largest that is printed
PARTS_OF_A_TRANSFER = 3
PRESCHED = "presched"


class PreScopeParts(NamedTuple):
    """The parts of PreScope."""

    placement: PlacementPart
    scheduler: AssignmentPart | None  # None: PreSched


class PreScope(PolicyBase):
    """Cross-layer plan of loads and prefetches by learned predictions (PreScope, 2025)."""

    paper = "PreScope (arXiv, 2025)"
    missing = (
        "online learning of the predictor",
        "three parts for the small experts of a model of mixed precision: all parts have the size of a third of the largest expert",
    )
    oracles = MappingProxyType({"assignment": {"scheduler": "exact"}})

    placement: PlacementOption = option(
        "frequency-global",
        'The hot expert table: what is on the GPU for good. ``"random"`` experts stand in for it in the paper\'s ablation.',
    )
    predictor: str | None = option(
        LEARNED,
        'Source of the prediction of the next layer, for example ``"signal:learned"``, '
        '``"signal:gate_next1"``, ``"synthetic:0.9"`` or ``"oracle"``; None: nothing is prefetched.',
    )
    head_start: bool = option(
        True,
        "The CPU begins before the prediction is in with those experts that every plan gives it; False, or "
        "without ``async_io``: it waits.",
    )
    scheduler: AssignmentOption = option(
        PRESCHED, '``"presched"``, or an assignment part that plans each layer by itself, for example ``"threshold"``.'
    )
    prefetch_size: int | None = option(
        None, "Experts to prefetch for each layer, whether there is time or not; None: as many as fit.", ge=1
    )
    async_io: bool = option(
        True,
        "Chunked transfers, an expert in three parts, during all computation. False: the experiment's "
        "transfers, and no transfer during any computation.",
    )
    none_better: Literal["eq2", "printed", "sentinel"] = option("eq2", "What to load where no load would be done before the CPU.")
    limit_to_queue: bool = option(False, "Prefetch no more experts than GPU_Q holds of the next layer.")
    prefetch_order: Literal["busiest", "printed"] = option("busiest", "Busiest first, or as the loop is printed, busiest last.")
    window: Literal["none", "next2"] = option(
        "none", "What to prefetch where GPU_Q holds no expert of the next layer: nothing, or for the layer after it."
    )
    next2_predictor: str = option("signal:gate_next2", "Source of the prediction of the layer after the next.")
    prior_hit: float = option(
        PUBLISHED_HIT, "Probability that a predicted expert is wanted, until something has been seen.", ge=0, le=1
    )
    demand_slots: int = option(2, "Experts of the buffer for loads on demand.", ge=1)
    prefetch_slots: int | None = option(
        None,
        "Experts of each of the two groups of prefetch buffers; None: all that could be wanted and are not in the table.",
        ge=1,
    )
    cancel: Literal["layer-end", "next-gate"] = option(
        "layer-end",
        "When prefetches that are only queued are given up: when the layer ends that asked for them, or when "
        "the one is routed that they are for.",
    )

    @cached_property
    def parts(self) -> PreScopeParts:
        own = isinstance(self.scheduler, str) and self.scheduler == PRESCHED
        scheduler = None if own else make_part("assignment", self.scheduler)
        return PreScopeParts(make_part("placement", self.placement), scheduler)

    @property
    def looks_further(self) -> bool:
        """Whether the layer after the next may be prefetched for."""
        return self.window == "next2" and self.predictor is not None and self.parts.scheduler is None and self.async_io

    @property
    def listens(self) -> frozenset[type]:
        events: set[type] = {StepBegin, Routed, LayerEnd}
        if self.predictor is not None:
            events.add(Predicted)
        return frozenset(events if self.async_io else events | {Fetched, Ran, SharedRan})

    @property
    def needs(self) -> frozenset[str]:
        placement, scheduler = self.parts
        found = placement.needs | (frozenset() if scheduler is None else scheduler.needs)
        if self.predictor is not None:
            found |= source_needs(self.predictor)
        return found | source_needs(self.next2_predictor) if self.looks_further else found

    def transfer(self, model: ModelSpec) -> Copies | None:
        """Return chunks of a third of an expert, or nothing without AsyncIO."""
        if not self.async_io:
            return None
        largest = max(model.expert_bytes(layer) for layer in range(model.n_layers))
        return Copies("chunked", ceil_div(largest, PARTS_OF_A_TRANSFER))

    def place(self, view: View) -> Placement:
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
        self._cpu, self._slots = cpu, slots
        self._gpu_ns, self._cpu_ns = CostTable(view, gpu), CostTable(view, cpu)
        self._load_ns = [view.costs.fetch_ns(view.host, gpu, None, layer) for layer in range(model.n_layers)]
        self._load_next_ns = [*self._load_ns[1:], self._load_ns[-1]]
        self._certain, self._cross_layer = twin(certain_for_cpu, view), twin(cross_layer_plan, view)
        self._absent, self._where = twin(absent, view), twin(where, view)
        self._rows = 0  # of the present step
        self._dense: int | None = None  # its t_attn, once asked
        self._visit: Visit | None = None  # the layer that is routed and has not ended
        self._turns = Turns(gpu, min(self.demand_slots, model.n_experts))
        table = sum(len(experts) * model.expert_bytes(layer) for layer, experts in enumerate(residents))
        pools = [Pool(gpu, CACHE, table), Pool(gpu, STAGING, min(self.demand_slots, model.n_experts) * slot_bytes(view))]
        return Placement(
            copies=[Copy(layer, experts, gpu) for layer, experts in enumerate(residents) if experts],
            pools=pools + self._groups.pools(view) if self.predictor is not None else pools,
            reserved={gpu: model.n_layers * PREDICTOR_BYTES} if self.predictor == LEARNED else {},
        )

    def decide(self, event: Any, view: View) -> Iterable[Action]:
        """Answer at once, or without AsyncIO in turns."""
        return super().decide(event, view) if self.async_io else self._in_turn(event, view)

    def _in_turn(self, event: Any, view: View) -> Iterable[Action]:
        """Answer as usual, but alternate copies and Runs once the layer is planned."""
        kind = type(event)
        now: Iterable[Action] = ()
        if kind is Fetched or kind is Ran:
            self._turns.happened(event)
        elif kind is not SharedRan:
            now = super().decide(event, view)
        visit = self._visit
        if visit is None:
            return now
        if view.model.n_shared:
            visit.shared += (kind is Routed) - (kind is SharedRan)
        now = self._turns.hold(visit.layer, now)
        return [*now, *self._turns.go_on()] if visit.complete and not visit.awaits and not visit.shared else now

    def evict(self, fetch: Fetch, view: View) -> tuple[int, int] | None:
        """Return a load that has been computed; a prefetch waits until its group is empty."""
        return idle_resident(view, fetch) if fetch.pool == STAGING else None

    def on_step_begin(self, event: StepBegin, view: View) -> Iterable[Action]:
        self._rows, self._dense = len(event.requests), None
        self._foresight.step_begin(event)
        self._foresight2.step_begin(event)
        if self._scheduler is not None and hasattr(self._scheduler, "step_begin"):
            self._scheduler.step_begin(event)
        return ()

    def on_routed(self, event: Routed, view: View) -> list[Action]:
        """Run what is there; plan the rest, unless a prediction is awaited."""
        actions: list[Action] = []
        visit = self._visit
        if visit is None:  # the first micro-batch
            visit = self._visit = Visit(event.step, event.layer)
            if self.predictor is not None:
                actions += self._ask(self.predictor, event.layer + 1, visit, view)
                visit.awaits = bool(actions)
            if self.cancel == "next-gate":
                cancelled = self._groups.cancel_queued(view)
                visit.cancelled.update(e for drop in cancelled if drop.layer == event.layer for e in drop.experts)
                actions += cancelled
        visit.complete = self._foresight.routed(event)
        if self._looks_further:
            self._foresight2.routed(event)
        if self._scheduler is not None:
            return actions + self._plan_by_layer(self._scheduler, event, visit, view)
        actions += self._run_residents(event, visit, view)
        if not visit.complete:
            return actions
        visit.sort()
        if not visit.awaits:
            actions += self._plan(visit, view)
        elif self.head_start and self.async_io:
            actions += self._begin_cpu(visit, view)
        return actions

    def _ask(self, source: str, layer: int, visit: Visit, view: View) -> list[Action]:
        """Ask for a prediction, unless it is known that none will come."""
        if layer >= len(self._load_ns) or not view.foresees(source, layer):
            return []
        return [Predict(visit.step, layer, source, view.dense_device(visit.layer))]

    def _run_residents(self, event: Routed, visit: Visit, view: View) -> list[Action]:
        """Run on the GPU what is there or on its way; leave the rest to the plan."""
        layer, gpu = event.layer, self._gpu
        here, coming, neither = self._where(layer, event.active, gpu, view)
        if visit.cancelled:
            neither += [e for e in coming if e in visit.cancelled]
            coming = [e for e in coming if e not in visit.cancelled]
        loads, rows = event.rows, visit.rows
        for expert in neither:
            rows[expert] = rows.get(expert, 0) + loads[expert]
        return self._on_gpu(layer, here, coming, [], view)

    def _begin_cpu(self, visit: Visit, view: View) -> list[Action]:
        """Begin on the CPU with what every plan assigns to it."""
        tokens = visit.tokens
        if len(tokens) < 2:
            return []  # the busiest may always be loaded
        n = visit.n_certain = self._certain(tokens, self._timing(visit.layer, tokens[-1], 0, view), self.none_better)
        visit.routed_ns = view.now_ns
        return [Run(visit.layer, visit.current[:n], self._cpu)] if n else []

    def _plan(self, visit: Visit, view: View) -> list[Action]:
        """Decide with PreSched what to load, what to leave to the CPU, and what to prefetch."""
        layer, current, tokens, counts = visit.layer, visit.current, visit.tokens, visit.counts or {}
        wanted = self._absent(counts, layer + 1, self._gpu, view) if counts else []
        predicted = [*map(counts.__getitem__, reversed(wanted))]
        busy = self._groups.busy_ns(view) + (view.now_ns - visit.routed_ns if visit.n_certain else 0)
        timing = self._timing(layer, (tokens or predicted or [0])[-1], busy, view)
        plan = self._cross_layer(tokens, predicted, timing, self._foresight.say(layer + 1, wanted), self.none_better)
        visit.gap = plan.gap
        actions = self._on_gpu(layer, [], [], current[plan.first :], view)
        if plan.first > visit.n_certain:
            actions.append(Run(layer, current[visit.n_certain : plan.first], self._cpu))
        n_prefetch = min(plan.n_prefetch, plan.queue[1]) if self.limit_to_queue else plan.n_prefetch
        actions += self._prefetch(layer + 1, wanted, self.prefetch_size or n_prefetch)
        if self._looks_further and not plan.queue[1]:
            further = self._ask(self.next2_predictor, layer + 2, visit, view)
            visit.looks_further = bool(further)
            actions += further
        return actions

    def _plan_by_layer(self, scheduler: AssignmentPart, event: Routed, visit: Visit, view: View) -> list[Action]:
        """Plan a micro-batch by an assignment that knows nothing of the next layer."""
        layer, gpu, rows = event.layer, self._gpu, event.rows
        resident = view.residency(layer, gpu)
        coming = [e for e in event.active if e not in visit.cancelled and view.is_pending(layer, e, gpu)]
        waiting = [0] * len(resident)
        for expert in event.active:
            if not resident[expert]:
                waiting[expert] = view.remaining_ns(layer, expert, gpu) if expert in coming else self._load_ns[layer]
        if scheduler.uses_cpu:
            if hasattr(scheduler, "routed"):
                scheduler.routed(event)
            plan = scheduler.assign(layer, rows, waiting)
        else:
            plan = Plan(tuple(event.active), (), 0, 0)
        on_gpu, on_cpu = (sorted(side, key=lambda e: (rows[e], e)) for side in (plan.gpu, plan.cpu))
        loads = [e for e in on_gpu if not resident[e] and e not in coming]
        if not event.mb:
            visit.gap = -self._groups.busy_ns(view)
        visit.gap += sum([self._cpu_ns[rows[e]] for e in on_cpu]) - len(loads) * self._load_ns[layer]
        actions = self._on_gpu(layer, [e for e in on_gpu if resident[e]], [e for e in on_gpu if e in coming], loads, view)
        if on_cpu:
            actions.append(Run(layer, on_cpu, self._cpu))
        return actions

    def on_predicted(self, event: Predicted, view: View) -> list[Action]:
        """Plan with the next layer's prediction, or prefetch for the one after; others are late."""
        visit = self._visit
        if visit is None or event.step != visit.step:
            return []
        if visit.awaits and event.layer == visit.layer + 1 and event.source == self.predictor:
            counts = visit.counts = self._foresight.predicted(event)
            if counts is None:
                return []
            visit.awaits = False
            if self._scheduler is not None:
                return self._fill_gap(event.layer, counts, self._foresight, visit, view)
            return self._plan(visit, view) if visit.complete else []
        if visit.looks_further and event.layer == visit.layer + 2:
            counts = self._foresight2.predicted(event)
            if counts is not None:
                visit.looks_further = False
                return self._fill_gap(event.layer, counts, self._foresight2, visit, view)
        return []

    def _fill_gap(self, layer: int, counts: Mapping[int, int], foresight: Foresight, visit: Visit, view: View) -> list[Action]:
        """Prefetch for a later layer as many experts as fit (step 4)."""
        wanted = self._absent(counts, layer, self._gpu, view)
        share = (visit.gap + self._dense_part(visit.layer, view)) / self._load_ns[layer]
        n_prefetch = prefetch_count(share, len(wanted), foresight.say(layer, wanted))
        return self._prefetch(layer, wanted, self.prefetch_size or n_prefetch)

    def _prefetch(self, layer: int, wanted: Sequence[int], size: int) -> list[Action]:
        chosen = wanted[: min(size, self._slots)]
        if self.prefetch_order == "printed":
            chosen = chosen[::-1]
        return [self._groups.fetch(layer, chosen)] if chosen else []

    def _on_gpu(self, layer: int, here: Sequence[int], coming: Sequence[int], loads: Sequence[int], view: View) -> list[Action]:
        """Run on the GPU what is there, on its way, and loaded behind what the link has begun."""
        actions = self._groups.keep(layer, coming)
        if loads:
            actions += self._groups.finish_first(view)
            actions.append(Fetch(layer, loads, self._gpu, DEMAND, STAGING))
        if here or coming or loads:
            actions.append(Run(layer, [*here, *coming, *loads], self._gpu))
        return actions

    def _timing(self, layer: int, busiest: int, in_flight: int, view: View) -> Timing:
        dense = self._dense_part(layer, view)
        return Timing(self._cpu_ns, self._load_ns[layer], self._load_next_ns[layer], self._gpu_ns[busiest], dense, in_flight)

    def _dense_part(self, layer: int, view: View) -> int:
        """Return t_attn: the next layer's part before its routed experts, alike in a step."""
        if self._dense is None:
            self._dense = view.dense_ns(layer) + view.costs.shared_ns(view.compute, self._rows)
        return self._dense

    def on_layer_end(self, event: LayerEnd, view: View) -> list[Action]:
        self._visit = None
        held = layer_residents(view, self._gpu, STAGING, event.layer)
        actions: list[Action] = [Drop(event.layer, held, self._gpu)] if held else []
        if self.predictor is not None:
            actions += self._groups.layer_end(event.layer, view)
            if self.cancel == "layer-end":
                actions += self._groups.cancel_queued(view)
        return actions
