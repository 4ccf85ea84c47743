"""HybriMoE's two assignments of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from moesim.policies.algorithms.assignment import Plan
from moesim.policies.algorithms.queues import Reading, Timings, queue_layer_plan
from moesim.policies.algorithms.two_ended import CODE_COSTS, CODE_CPU_PER_ROW, PerRow, two_ended_plan
from moesim.policies.base import CostTable
from moesim.policies.parts import Part, Setup
from moesim.policy import Routed, StepBegin


def layer_timings(setup: Setup) -> list[Timings]:
    """Return what the operations of each layer cost on the engine; layers share the tables of compute times."""
    view, gpu, cpu = setup.view, setup.gpu, setup.cpu
    costs = view.costs
    gpu_ns, cpu_ns = CostTable(view, gpu), CostTable(view, cpu) if cpu else None
    first = costs.first_extra_ns(gpu), costs.first_extra_ns(cpu) if cpu else 0
    return [Timings(costs.fetch_ns(view.host, gpu, None, layer), gpu_ns, cpu_ns, *first) for layer in range(view.model.n_layers)]


class Queues(Part):
    """HybriMoE's paper: a plan from three simulated timelines, of GPU, CPU and link."""

    uses_cpu = True

    timeline: Literal["completion", "free"] = "completion"
    """The timeline that acts next: whose operation would complete first, or which is free first."""
    ties: Literal["gpu", "cpu", "link"] = "gpu"
    """Which timeline wins among equals; the others follow as GPU, CPU, link."""
    count_compute: bool = False
    """A transfer is not complete before its expert could have been computed."""
    overtake: bool = True
    """The GPU takes another expert while the one with the most rows is still on its way."""
    shared_in_plan: bool = False
    """The GPU begins with the layer's shared experts, which the paper's algorithm does not know of."""

    @property
    def reading(self) -> Reading:
        """How it reads the paper."""
        return Reading(self.timeline, self.ties, self.count_compute, self.overtake)

    def start(self, setup: Setup) -> None:
        """Prepare the costs."""
        self._timings, self._reading = layer_timings(setup), self.reading
        self._costs, self._gpu, self._top_k = setup.view.costs, setup.gpu, setup.view.model.top_k

    def assign(self, layer: int, loads: Sequence[int], waiting: Sequence[int]) -> Plan:
        """Simulate the layer."""
        costs = self._timings[layer]
        shared = self._costs.shared_ns(self._gpu, sum(loads) // self._top_k) if self.shared_in_plan else 0
        return queue_layer_plan(loads, waiting, costs, shared, self._reading)


class TwoEnded(Part):
    """HybriMoE's released code (its function HSS): a list that the GPU eats from the head and the CPU from the tail.

    In steps with more than one row everything goes to the GPU, unless asked otherwise.
    """

    uses_cpu = True

    costs: Literal["profile", "code"] = "profile"
    """The engine's own, or the constants built into the released code."""
    cpu_per_row: Literal["deepseek", "mixtral", "qwen2"] = "deepseek"
    """Which of the code's constants for a row on the CPU; it has the first, and the others in comments."""
    cached_from: Literal["issue", "start"] = "issue"
    """An expert that is on its way counts as cached from the issue of its copy on, as in the code, or from when the link has
    begun with it."""
    multi_row: Literal["gpu", "cpu-and-gpu"] = "gpu"
    """Of steps with more than one row: everything on the GPU, as in the code, or the same split as of a single row."""

    @property
    def counts_issued(self) -> bool:
        """Whether what is only queued for the GPU counts as being there."""
        return self.cached_from == "issue"

    def start(self, setup: Setup) -> None:
        """Prepare the costs."""
        self._view, self._gpu = setup.view, setup.gpu
        self._timings = layer_timings(setup)
        self._used = self._timings
        if self.costs == "code":
            cpu = PerRow(0, CODE_CPU_PER_ROW[self.cpu_per_row])
            self._used = [CODE_COSTS._replace(cpu=cpu)] * len(self._timings)
        self._rows = 1
        self._ranked: Sequence[int] | None = None

    def step_begin(self, event: StepBegin) -> None:
        """Learn how many rows the step has."""
        self._rows = len(event.requests)

    def routed(self, event: Routed) -> None:
        """Learn how the gate ranks the experts of a single row, which decides among them."""
        self._ranked = event.experts[0].tolist() if self._rows == 1 else None

    def assign(self, layer: int, loads: Sequence[int], waiting: Sequence[int]) -> Plan:
        """Plan a single row; of several, too, or the GPU runs everything, what is there first."""
        order, self._ranked = self._ranked, None
        if order is None:
            order = [e for e, w in enumerate(loads) if w]
        transfer = self._timings[layer].transfer
        cached = {e for e in order if waiting[e] < transfer}
        if self.counts_issued:
            cached.update(e for e in order if self._view.is_pending(layer, e, self._gpu))
        if self._rows == 1 or self.multi_row == "cpu-and-gpu":
            return two_ended_plan(order, cached, loads, self._used[layer])
        return Plan(tuple(sorted(order, key=lambda e: e not in cached)), (), 0, 0)
