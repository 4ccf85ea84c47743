"""DALI on one CPU and several GPUs.

The paper DALI, arXiv, 2026, section 6.5. No code is released. It prints decode speed-ups with two GPUs (3.43 over llama.cpp, 1.87
over KTransformers, 1.32 over HybriMoE), and not how the work is divided. Every row is our choice, such that one GPU gives ``dali``.

| point | paper says | released code does | we do |
|---|---|---|---|
| assignment | - | none | Alg. 1; to the GPU with the smallest total after adding the expert, if that is not larger than the CPU's |
| its order | - | none | by the difference of the CPU's cost and the cheapest GPU's, largest first |
| GPU cost | - | none | as ``dali`` for each GPU: an expert cached on another one counts its transfer |
| what is cached where | - | none | disjoint sets, ``cache.ratio`` of all experts on each GPU, drawn at random |
| slots that do not divide by the layers | - | none | dealt out on each GPU to the same layers; ``slots_split: equal``: unused |
| cache | - | none | Alg. 2 for each GPU; experts cached nowhere are dealt out in turns, busiest first |
| prefetch | - | none | ``prefetch_size`` for each GPU, dealt out in turns, busiest first |
| predictions, attention, shared experts | - | none | on the compute device |
| activations of other GPUs | - | none | through the host, as the links go |
| a prompt | - | none | as a decode step: Alg. 1, a visit of Alg. 2 for each chunk |
| the rest | - | none | as ``dali`` with its defaults |
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from moesim.errors import HardwareError
from moesim.policies.base import (
    CACHE,
    STAGING,
    CostTable,
    PolicyBase,
    SlotsSplit,
    cpu_of,
    gpu_of,
    idle_resident,
    layer_residents,
    slot_bytes,
    slots_per_layer,
    staging_pool,
)
from moesim.policies.options import option
from moesim.policies.parts import source_needs
from moesim.policies.parts.assignment import layer_costs
from moesim.policies.parts.prefetch import Source, Transient, top_by_count
from moesim.policies.parts.replacement import WindowSize, WindowSwaps
from moesim.policies.systems.dali import FEW_EXPERTS, PUBLISHED_PREFETCH_SIZE, PUBLISHED_U_SIZE
from moesim.policy import (
    DEMAND,
    UPDATE,
    Action,
    Copy,
    Drop,
    Fetch,
    LayerEnd,
    Move,
    Placement,
    Pool,
    Predict,
    Predicted,
    Routed,
    Run,
    View,
)


class MultiPlan(NamedTuple):
    """Who executes what."""

    gpus: tuple[tuple[int, ...], ...]  # for each GPU, expert ids in the order of assignment
    cpu: tuple[int, ...]
    gpu_totals: tuple[float, ...]  # planned, in the unit of the costs
    cpu_total: float


def greedy_multi_assignment(
    gpu_costs: Sequence[Sequence[float]], cpu_cost: Sequence[float], gpu_first: Sequence[float] = (), cpu_first: float = 0
) -> MultiPlan:
    """Assign greedily to one CPU and several GPUs; with one GPU, as `greedy_assignment`.

    ``gpu_costs`` has a row a GPU; ``gpu_first`` and ``cpu_first`` are what the first expert on each takes beyond its cost. Experts are
    taken by the difference of the CPU's cost and the cheapest GPU's, largest first (ties: lower id). The GPU whose total would be
    smallest (ties: the first) takes the expert if that total is at most the CPU's with it.

    Experts 3 and 4 are resident, on the first and on the second GPU; 2 is taken before 3, which ends sooner as a copy on the second:

    >>> greedy_multi_assignment([[3, 3, 3, 2, 3], [3, 3, 3, 3, 2]], [1, 1, 5, 4, 1])
    MultiPlan(gpus=((2,), (3,)), cpu=(0, 1, 4), gpu_totals=(3, 3), cpu_total=3)
    """
    cheapest = [min(costs) for costs in zip(*gpu_costs, strict=True)]
    ids = [e for e, cost in enumerate(cpu_cost) if cost or cheapest[e]]
    ids.sort(key=lambda e: -abs(cheapest[e] - cpu_cost[e]))
    gpus: list[list[int]] = [[] for _ in gpu_costs]
    totals: list[float] = [0] * len(gpu_costs)
    cpu: list[int] = []
    cpu_total: float = 0
    extras = list(gpu_first) or [0] * len(gpu_costs)
    for e in ids:
        best, with_it = 0, totals[0] + gpu_costs[0][e] + extras[0]
        for g in range(1, len(totals)):
            total = totals[g] + gpu_costs[g][e] + extras[g]
            if total < with_it:
                best, with_it = g, total
        on_cpu = cpu_total + cpu_cost[e] + (0 if cpu else cpu_first)
        if with_it <= on_cpu:
            gpus[best].append(e)
            totals[best], extras[best] = with_it, 0
        else:
            cpu.append(e)
            cpu_total = on_cpu
    return MultiPlan(tuple(tuple(taken) for taken in gpus), tuple(cpu), tuple(totals), cpu_total)


def workload_aware_swaps(scores: Sequence[int], residents: Sequence[Iterable[int]], u_size: int) -> list[list[tuple[int, int]]]:
    """Choose the replacements at the end of a window, on GPUs that never hold the same expert.

    For each GPU up to ``u_size`` pairs (victim, newcomer): its residents with the fewest rows, and of the busiest experts on no GPU,
    dealt out in turns, its own.

    >>> workload_aware_swaps([5, 0, 1, 7, 4, 0, 6, 2], [[0, 1, 2, 3]], u_size=2)
    [[(1, 6), (2, 4)]]
    >>> workload_aware_swaps([5, 0, 1, 7, 4, 0, 6, 2], [[0, 1], [2, 3]], u_size=1)
    [[(1, 6)], [(2, 4)]]
    """
    inside = [sorted(set(of_gpu)) for of_gpu in residents]
    anywhere = {expert for of_gpu in inside for expert in of_gpu}
    outside = sorted((e for e in range(len(scores)) if e not in anywhere), key=lambda e: -scores[e])
    swaps = []
    for turn, of_gpu in enumerate(inside):
        victims = sorted(of_gpu, key=lambda e: scores[e])[:u_size]
        swaps.append(list(zip(victims, outside[turn :: len(inside)], strict=False)))
    return swaps


class DaliMultiGpu(PolicyBase):
    """DALI's greedy split, prefetch and cache over one CPU and all GPUs (DALI, 2026, sec. 6.5)."""

    paper = "DALI (arXiv, 2026)"
    profile = "rtx3090x2-epyc7532"
    missing = (
        "a rule of the paper's for dividing work between GPUs: its section 6.5 prints speed-ups only",
        "copies from one GPU to another, and an assignment other than the greedy one",
    )

    n_gpus: int | None = option(None, "The first so many GPUs, the compute device before the others; None: all.", ge=1)
    w_size: WindowSize = option(4)
    u_size: WindowSwaps | None = option(None, "Experts replaced at its end on each GPU; null: the paper's for one GPU; 0: never.")
    prefetch_size: int | None = option(
        None, "Experts of a layer visit to prefetch to each GPU; None: the paper's for one GPU; 0: none.", ge=0
    )
    prefetch_source: Source = option("signal:residual")
    seed: int = option(0, "Of the residents at the start.")
    slots_split: SlotsSplit = option(
        "spread", "What becomes of slots beyond an equal share of each layer, on each GPU: dealt out to some layers, or unused."
    )

    @property
    def listens(self) -> frozenset[type]:
        return frozenset({Routed, LayerEnd} if self.prefetch_size == 0 else {Routed, LayerEnd, Predicted})

    @property
    def needs(self) -> frozenset[str]:
        return frozenset() if self.prefetch_size == 0 else source_needs(self.prefetch_source)

    def place(self, view: View) -> Placement:
        """Draw disjoint residents; give each GPU its pools."""
        model = view.model
        many = model.n_experts > FEW_EXPERTS
        self._u_size = PUBLISHED_U_SIZE[many] if self.u_size is None else self.u_size
        self._size = PUBLISHED_PREFETCH_SIZE[many] if self.prefetch_size is None else self.prefetch_size
        self._cpu = cpu_of(view, "dali-multi-gpu")
        self._cpu_ns = CostTable(view, self._cpu)
        self._gpus = [_Gpu(view, name) for name in self._names(view)]
        self._gpu_first = [view.costs.first_extra_ns(gpu.name) for gpu in self._gpus]
        self._cpu_first = view.costs.first_extra_ns(self._cpu)
        self._now = (-1, -1)  # step and layer routed last
        self._scores = [[0] * model.n_experts for _ in range(model.n_layers)]
        self._visits = [0] * model.n_layers
        self._about = (-1, -1)  # step and layer that the counts of predicted rows speak about
        self._counts: list[int] = []
        self._chosen: set[int] = set()
        most = model.n_experts // len(self._gpus)
        slots = [slots_per_layer(view, gpu.name, "dali-multi-gpu", 0, split=self.slots_split, at_most=most) for gpu in self._gpus]
        draw = random.Random(self.seed)
        for counts in zip(*slots, strict=True):  # of a layer, on each GPU
            drawn = draw.sample(range(model.n_experts), sum(counts))
            for gpu, count in zip(self._gpus, counts, strict=True):
                gpu.members.append(set(drawn[:count]))
                del drawn[:count]
        pools = []
        for gpu, of_layers in zip(self._gpus, slots, strict=True):
            pools.append(Pool(gpu.name, CACHE, [count * slot_bytes(view) for count in of_layers], per_layer=True))
            pools.append(staging_pool(view, gpu.name, None))
            if self._size:
                pools.append(gpu.transient.pool(self._size, view))
        copies = [Copy(i, sorted(at), gpu.name) for gpu in self._gpus for i, at in enumerate(gpu.members) if at]
        return Placement(copies=copies, pools=pools)

    def _names(self, view: View) -> list[str]:
        first = gpu_of(view, "dali-multi-gpu")
        names = [first, *(name for name in view.gpus if name != first)]
        if self.n_gpus is not None and self.n_gpus > len(names):
            raise HardwareError(
                f"policy dali-multi-gpu: n_gpus: expected at most the {len(names)} GPUs of the hardware profile, got {self.n_gpus}"
            )
        return names[: self.n_gpus]

    def on_routed(self, event: Routed, view: View) -> list[Action]:
        """Ask for a prediction, count rows, and split the layer."""
        layer, loads = event.layer, event.rows
        self._now = (event.step, layer)
        actions: list[Action] = []
        if self._size and not event.mb and layer + 1 < view.model.n_layers:
            device = view.dense_device(layer)
            actions.append(Predict(event.step, layer + 1, self.prefetch_source, device))
        scores = self._scores[layer]
        for expert in event.active:
            scores[expert] += loads[expert]
        resident = [view.residency(layer, gpu.name) for gpu in self._gpus]
        costs = [gpu.costs(event, here, self._cpu_ns, view) for gpu, here in zip(self._gpus, resident, strict=True)]
        plan = greedy_multi_assignment([on_gpu for on_gpu, _ in costs], costs[0][1], self._gpu_first, self._cpu_first)
        if plan.cpu:
            actions.append(Run(layer, plan.cpu, self._cpu))
        for gpu, here, experts in zip(self._gpus, resident, plan.gpus, strict=True):
            if experts:
                misses = sorted([e for e in experts if not here[e]], key=lambda e: (-loads[e], e))
                actions += gpu.load(layer, misses, view)
                actions.append(Run(layer, [*(e for e in experts if here[e]), *misses], gpu.name))
        return actions

    def on_predicted(self, event: Predicted, view: View) -> Iterable[Action]:
        step, now = self._now
        if step == event.step and now >= event.layer:
            return ()  # too late: that layer is routed
        if self._about != (event.step, event.layer):
            self._about = (event.step, event.layer)
            self._counts = [0] * view.model.n_experts
            self._chosen = set()
        for row in event.ids[:, : view.model.top_k].tolist():
            for expert in row:
                self._counts[expert] += 1
        return self._prefetch(event.layer, top_by_count(self._counts, self._size * len(self._gpus)), view)

    def _prefetch(self, layer: int, top: Sequence[int], view: View) -> list[Action]:
        """Deal out what is on no GPU, in turns over all predictions about a layer."""
        resident = [view.residency(layer, gpu.name) for gpu in self._gpus]
        dealt: list[list[int]] = [[] for _ in self._gpus]
        for expert in top:
            turn = len(self._chosen)
            if turn < self._size * len(self._gpus) and expert not in self._chosen and not any(at[expert] for at in resident):
                self._chosen.add(expert)
                dealt[turn % len(self._gpus)].append(expert)
        actions: list[Action] = []
        for gpu, experts in zip(self._gpus, dealt, strict=True):
            wanted = [e for e in experts if not view.is_pending(layer, e, gpu.name)]
            if wanted:
                actions.append(gpu.transient.fetch(layer, wanted))
        return actions

    def on_layer_end(self, event: LayerEnd, view: View) -> list[Action]:
        """Swap at the end of a window; drop what was transient."""
        layer = event.layer
        visit = self._visits[layer]
        self._visits[layer] = visit + 1
        swaps: list[list[tuple[int, int]]] = [[] for _ in self._gpus]
        if not (visit + 1) % self.w_size:
            members = [gpu.members[layer] for gpu in self._gpus]
            swaps = workload_aware_swaps(self._scores[layer], members, self._u_size)
            self._scores[layer] = [0] * len(self._scores[layer])
        actions: list[Action] = []
        for gpu, pairs in zip(self._gpus, swaps, strict=True):
            actions += gpu.layer_end(layer, pairs, view)
        return actions

    def evict(self, fetch: Fetch, view: View) -> tuple[int, int] | None:
        if fetch.pool == STAGING:
            return idle_resident(view, fetch)
        gpu = next(gpu for gpu in self._gpus if gpu.name == fetch.device)
        return gpu.replaced(fetch, view) if fetch.pool == CACHE else gpu.transient.spent(fetch, self._now[1], view)


class _Gpu:
    """One GPU: what it caches, and what is on its way there ahead of time."""

    def __init__(self, view: View, name: str) -> None:
        self.name = name
        self.members: list[set[int]] = []  # of its cache, by layer
        self.transient = Transient(name)
        self._compute_ns = CostTable(view, name)
        self._load_ns = [view.costs.fetch_ns(view.host, name, None, layer) for layer in range(view.model.n_layers)]

    def costs(self, event: Routed, resident: bytes, cpu_ns: CostTable, view: View) -> tuple[list[float], list[float]]:
        """Return each expert's cost here and on the CPU, with what is left of a transfer."""
        layer = event.layer
        waiting = [0] * len(resident)
        for expert in event.active:
            if not resident[expert]:
                pending = view.is_pending(layer, expert, self.name)
                waiting[expert] = view.remaining_ns(layer, expert, self.name) if pending else self._load_ns[layer]
        return layer_costs(event.rows, waiting, self._compute_ns, cpu_ns)

    def load(self, layer: int, misses: list[int], view: View) -> list[Action]:
        """Fetch what is not here; what is on its way becomes more urgent."""
        early, rest = self.transient.demand(layer, misses, view)
        return [*early, Fetch(layer, rest, self.name, DEMAND, STAGING)] if rest else [*early]

    def layer_end(self, layer: int, pairs: Sequence[tuple[int, int]], view: View) -> list[Action]:
        """Drop what was transient, and swap; a transient newcomer on its way becomes the cache's."""
        held = layer_residents(view, self.name, STAGING, layer) + self.transient.layer_end(layer, view)
        victims, newcomers = [out for out, _ in pairs], [new for _, new in pairs]
        self.members[layer].difference_update(victims)
        self.members[layer].update(newcomers)
        coming = [e for e in newcomers if view.is_pending(layer, e, self.name)]
        self.transient.forget(layer, coming)
        held = [e for e in held if e not in victims and e not in coming]
        actions: list[Action] = [Drop(layer, experts, self.name) for experts in (victims, held) if experts]
        if coming:
            actions.append(Move(layer, coming, self.name, CACHE))
        if newcomers:
            actions.append(Fetch(layer, newcomers, self.name, UPDATE, CACHE))
        return actions

    def replaced(self, fetch: Fetch, view: View) -> tuple[int, int] | None:
        """Name a copy that was replaced while it was on its way."""
        for expert in layer_residents(view, self.name, CACHE, fetch.layer):
            if expert not in self.members[fetch.layer] and not view.is_in_use(fetch.layer, expert, self.name):
                return fetch.layer, expert
        return None
