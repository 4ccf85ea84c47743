"""Assignment part: a threshold of fixed constants, as released codes have it, instead of the costs of the machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from moesim.policies.algorithms.assignment import FIDDLER_CPU_PER_ROW, FIDDLER_GPU_LOAD, Plan, make_plan
from moesim.policies.base import Range
from moesim.policies.parts import Part


class FixedThreshold(Part):
    """Fiddler's rule with constants: an expert that is not on the GPU goes to the CPU if its rows take less than a load."""

    uses_cpu = True

    cpu_ms: Annotated[float, Range(0)] = FIDDLER_CPU_PER_ROW
    """One row of one expert on the CPU; Fiddler's by default."""
    load_ms: Annotated[float, Range(0)] = FIDDLER_GPU_LOAD
    """Copying one expert to the GPU, where computing it counts nothing."""

    def assign(self, layer: int, loads: Sequence[int], waiting: Sequence[int]) -> Plan:
        """Compare the constants for each expert that is not on the GPU; ties go to the GPU."""
        active = [e for e, w in enumerate(loads) if w]
        gpu_cost = [self.load_ms if w and waiting[e] else 0 for e, w in enumerate(loads)]
        cpu_cost = [self.cpu_ms * w for w in loads]
        return make_plan(gpu_cost, cpu_cost, [e for e in active if gpu_cost[e] <= cpu_cost[e]], active)
