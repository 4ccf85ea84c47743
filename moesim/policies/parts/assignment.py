"""Assignment parts: which device executes each active expert, from the engine's own costs or from fixed constants."""

from __future__ import annotations

from collections.abc import Sequence

from moesim.policies.algorithms.assignment import (
    ENUMERATE_UP_TO,
    FIDDLER_CPU_PER_ROW,
    FIDDLER_GPU_LOAD,
    Plan,
    beam_assignment,
    exact_assignment,
    greedy_layer_plan,
    layer_costs,
    make_plan,
    threshold_layer_plan,
)
from moesim.policies.base import CostTable
from moesim.policies.options import option
from moesim.policies.parts import Part, Setup
from moesim.policy import StepBegin


class AllGpu(Part):
    """Everything on the GPU."""

    uses_cpu = False

    def assign(self, layer: int, loads: Sequence[int], waiting: Sequence[int]) -> Plan:
        """Return every active expert for the GPU, without planned totals."""
        return Plan(tuple(e for e, w in enumerate(loads) if w), (), 0, 0)


class AllCpu(Part):
    """Everything on the CPU, resident or not."""

    uses_cpu = True

    def assign(self, layer: int, loads: Sequence[int], waiting: Sequence[int]) -> Plan:
        """Return every active expert for the CPU, without planned totals."""
        return Plan((), tuple(e for e, w in enumerate(loads) if w), 0, 0)


class Resident(Part):
    """What is on the GPU stays there, everything else is computed where it is: a static split, without any transfer."""

    uses_cpu = True

    def assign(self, layer: int, loads: Sequence[int], waiting: Sequence[int]) -> Plan:
        """Split by residency, without planned totals."""
        active = [e for e, w in enumerate(loads) if w]
        return Plan(tuple(e for e in active if not waiting[e]), tuple(e for e in active if waiting[e]), 0, 0)


class ResidentInDecode(Resident):
    """The resident split in decode; in prefill everything on the GPU, after a copy where it is not there."""

    def start(self, setup: Setup) -> None:
        """Begin before the first step."""
        self._prefill = False

    def step_begin(self, event: StepBegin) -> None:
        """Take note of the phase."""
        self._prefill = event.phase == "prefill"

    def assign(self, layer: int, loads: Sequence[int], waiting: Sequence[int]) -> Plan:
        """Split by residency in decode."""
        if self._prefill:
            return Plan(tuple(e for e, w in enumerate(loads) if w), (), 0, 0)
        return super().assign(layer, loads, waiting)


class _Costed(Part):
    """Assignment by DALI's cost of each expert: max(transfer, compute) on the GPU, compute on the CPU.

    What the first expert of a layer takes beyond that on a device is in the plans, too, except in Fiddler's rule, which looks
    at one expert at a time.
    """

    uses_cpu = True

    def start(self, setup: Setup) -> None:
        """Prepare the costs of both devices."""
        self._gpu_ns = CostTable(setup.view, setup.gpu)
        self._cpu_ns = CostTable(setup.view, setup.cpu)
        costs = setup.view.costs
        self._first = costs.first_extra_ns(setup.gpu), costs.first_extra_ns(setup.cpu)


class Greedy(_Costed):
    """DALI's Algorithm 1."""

    shared_in_plan: bool = option(
        False, "The GPU's total begins with the layer's shared experts, which the paper's algorithm does not know of."
    )

    def start(self, setup: Setup) -> None:
        """Prepare the costs."""
        super().start(setup)
        self._costs, self._gpu, self._top_k = setup.view.costs, setup.gpu, setup.view.model.top_k

    def assign(self, layer: int, loads: Sequence[int], waiting: Sequence[int]) -> Plan:
        """Apply the rule to the costs of this layer."""
        shared = self._costs.shared_ns(self._gpu, sum(loads) // self._top_k) if self.shared_in_plan else 0
        return greedy_layer_plan(loads, waiting, self._gpu_ns, self._cpu_ns, shared, *self._first)


class Exact(_Costed):
    """The 0-1 program that the greedy rule approximates, solved exactly."""

    def assign(self, layer: int, loads: Sequence[int], waiting: Sequence[int]) -> Plan:
        """Solve it with the costs of this layer."""
        costs = layer_costs(loads, waiting, self._gpu_ns, self._cpu_ns)
        return exact_assignment(*costs, ENUMERATE_UP_TO, *self._first)


class Beam(_Costed):
    """Beam search in the greedy order."""

    width: int = option(2, "Partial plans that are kept.", ge=1)

    def assign(self, layer: int, loads: Sequence[int], waiting: Sequence[int]) -> Plan:
        """Search with the costs of this layer."""
        return beam_assignment(*layer_costs(loads, waiting, self._gpu_ns, self._cpu_ns), self.width, *self._first)


class Threshold(_Costed):
    """Fiddler's rule: an expert that is not on the GPU goes to the CPU if that is sooner than transfer plus compute."""

    def assign(self, layer: int, loads: Sequence[int], waiting: Sequence[int]) -> Plan:
        """Compare the two costs of each expert; residents always run where they are."""
        return threshold_layer_plan(loads, waiting, self._gpu_ns, self._cpu_ns)


class FixedThreshold(Part):
    """Fiddler's rule with constants: an expert that is not on the GPU goes to the CPU if its rows take less than a load."""

    uses_cpu = True

    cpu_ms: float = option(FIDDLER_CPU_PER_ROW, "One row of one expert on the CPU; Fiddler's by default.", ge=0)
    load_ms: float = option(FIDDLER_GPU_LOAD, "Copying one expert to the GPU, where computing it counts nothing.", ge=0)

    def assign(self, layer: int, loads: Sequence[int], waiting: Sequence[int]) -> Plan:
        """Compare the constants for each expert that is not on the GPU; ties go to the GPU."""
        active = [e for e, w in enumerate(loads) if w]
        gpu_cost = [self.load_ms if w and waiting[e] else 0 for e, w in enumerate(loads)]
        cpu_cost = [self.cpu_ms * w for w in loads]
        return make_plan(gpu_cost, cpu_cost, [e for e in active if gpu_cost[e] <= cpu_cost[e]], active)
