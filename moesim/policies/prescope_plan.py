"""PreScope's decisions in a layer visit: what the GPU loads, what the CPU computes, and what is prefetched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from moesim.policies.algorithms.assignment import Plan
from moesim.policies.algorithms.presched import Timing, certain_for_cpu, cross_layer_plan, prefetch_count
from moesim.policies.base import STAGING, CostTable
from moesim.policies.cross_layer import Foresight, absent, where
from moesim.policies.parts import AssignmentPart
from moesim.policies.prefetch_groups import PrefetchGroups
from moesim.policies.twins import twin
from moesim.policy import DEMAND, Action, Fetch, Predict, Routed, Run, View


class PlanRule(NamedTuple):
    """How the paper is read, as the options of the policy say."""

    none_better: Literal["eq2", "printed", "sentinel"]
    limit_to_queue: bool
    prefetch_size: int | None
    busiest_last: bool
    further: str | None  # source of the prediction of the layer after the next, if one may be asked for
    lane: Literal["main", "side"]


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
        """List the experts to be planned."""
        rows_of = self.rows.__getitem__
        self.current = sorted(sorted(self.rows), key=rows_of)
        self.tokens = [*map(rows_of, self.current)]


class Planner:
    """Plans the visits of one run."""

    def __init__(
        self, rule: PlanRule, gpu: str, cpu: str, groups: PrefetchGroups, slots: int, foresight: Foresight, view: View
    ) -> None:
        self._rule, self._gpu, self._cpu = rule, gpu, cpu
        self._groups, self._slots, self._foresight = groups, slots, foresight
        self._gpu_ns, self._cpu_ns = CostTable(view, gpu), CostTable(view, cpu)
        self._load_ns = [view.costs.fetch_ns(view.host, gpu, None, layer) for layer in range(view.model.n_layers)]
        self._load_next_ns = [*self._load_ns[1:], self._load_ns[-1]]
        self._certain, self._cross_layer = twin(certain_for_cpu, view), twin(cross_layer_plan, view)
        self._absent, self._where = twin(absent, view), twin(where, view)
        self.begin_step(0)

    def begin_step(self, n_rows: int) -> None:
        """Note the rows of a step."""
        self._rows = n_rows
        self._dense: int | None = None  # t_attn of the present step, once asked

    def ask(self, source: str, layer: int, visit: Visit, view: View) -> list[Action]:
        """Ask for a prediction, unless there is no such layer or it is known that none will come."""
        if layer >= len(self._load_ns) or not view.foresees(source, layer):
            return []
        return [Predict(visit.step, layer, source, view.dense_device(visit.layer), self._rule.lane)]

    def residents(self, event: Routed, visit: Visit, view: View) -> list[Action]:
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

    def _timing(self, layer: int, busiest: int, in_flight: int, view: View) -> Timing:
        dense = self._dense_part(layer, view)
        return Timing(self._cpu_ns, self._load_ns[layer], self._load_next_ns[layer], self._gpu_ns[busiest], dense, in_flight)

    def begin_cpu(self, visit: Visit, view: View) -> list[Action]:
        """Let the CPU begin with what every plan gives it, while the prediction is made."""
        tokens = visit.tokens
        if len(tokens) < 2:
            return []  # the busiest may always be loaded
        n = visit.n_certain = self._certain(tokens, self._timing(visit.layer, tokens[-1], 0, view), self._rule.none_better)
        visit.routed_ns = view.now_ns
        return [Run(visit.layer, visit.current[:n], self._cpu)] if n else []

    def plan(self, visit: Visit, view: View) -> list[Action]:
        """Decide with PreSched what to load, what to leave to the CPU, and what to prefetch."""
        layer, current, tokens, counts = visit.layer, visit.current, visit.tokens, visit.counts or {}
        wanted = self._absent(counts, layer + 1, self._gpu, view) if counts else []
        predicted = [*map(counts.__getitem__, reversed(wanted))]
        busy = self._groups.busy_ns(view) + (view.now_ns - visit.routed_ns if visit.n_certain else 0)
        timing = self._timing(layer, (tokens or predicted or [0])[-1], busy, view)
        plan = self._cross_layer(tokens, predicted, timing, self._foresight.say(layer + 1, wanted), self._rule.none_better)
        visit.gap = plan.gap
        actions = self._on_gpu(layer, [], [], current[plan.first :], view)
        if plan.first > visit.n_certain:
            actions.append(Run(layer, current[visit.n_certain : plan.first], self._cpu))
        n_prefetch = min(plan.n_prefetch, plan.queue[1]) if self._rule.limit_to_queue else plan.n_prefetch
        actions += self._prefetch(layer + 1, wanted, self._rule.prefetch_size or n_prefetch)
        if self._rule.further is not None and not plan.queue[1]:
            further = self.ask(self._rule.further, layer + 2, visit, view)
            visit.looks_further = bool(further)
            actions += further
        return actions

    def by_layer(self, scheduler: AssignmentPart, event: Routed, visit: Visit, view: View) -> list[Action]:
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

    def fill_gap(self, layer: int, counts: Mapping[int, int], foresight: Foresight, visit: Visit, view: View) -> list[Action]:
        """Prefetch for a later layer as many experts as fit (step 4), whatever the plan of the present one."""
        wanted = self._absent(counts, layer, self._gpu, view)
        share = (visit.gap + self._dense_part(visit.layer, view)) / self._load_ns[layer]
        n_prefetch = prefetch_count(share, len(wanted), foresight.say(layer, wanted))
        return self._prefetch(layer, wanted, self._rule.prefetch_size or n_prefetch)

    def _on_gpu(self, layer: int, here: Sequence[int], coming: Sequence[int], loads: Sequence[int], view: View) -> list[Action]:
        """Run experts on the GPU: what is there, what is on its way, and what is loaded behind what the link has begun."""
        actions = self._groups.keep(layer, coming)
        if loads:
            actions += self._groups.finish_first(view)
            actions.append(Fetch(layer, loads, self._gpu, DEMAND, STAGING))
        if here or coming or loads:
            actions.append(Run(layer, [*here, *coming, *loads], self._gpu))
        return actions

    def _prefetch(self, layer: int, wanted: Sequence[int], size: int) -> list[Action]:
        chosen = wanted[: min(size, self._slots)]
        if self._rule.busiest_last:
            chosen = chosen[::-1]
        return [self._groups.fetch(layer, chosen)] if chosen else []

    def _dense_part(self, layer: int, view: View) -> int:
        """Return t_attn: what the next layer does before its routed experts; all layers of a step are alike."""
        if self._dense is None:
            self._dense = view.dense_ns(layer) + view.costs.shared_ns(view.compute, self._rows)
        return self._dense
