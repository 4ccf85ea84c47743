"""HybriMoE's split of a layer as its released code does it: one list, with the GPU at its head and the CPU at its tail."""

from __future__ import annotations

from collections.abc import Container, Sequence

from moesim.policies.algorithms.assignment import Plan
from moesim.policies.algorithms.queues import Timings


def two_ended_plan(order: Sequence[int], cached: Container[int], loads: Sequence[int], costs: Timings) -> Plan:
    """Split a layer as HybriMoE's released code does: the GPU takes from one end of a list, the CPU from the other.

    The list is the cached experts, then the others, each by rows, most first, of equals as the gate ranks them (``order``). The
    GPU's candidate is its head, which waits for its transfer behind those counted so far; the CPU's is its tail. The one that would
    end first is assigned; ties go to the GPU. So the CPU gets a cached expert only after it has got all others.

    The instance of `queue_plan`, where the CPU cannot take E as long as C is in the list, and decode with the constants of
    the code, six experts of which four are cached:

    >>> two_ended_plan([0, 1, 2, 3, 4], {3, 4}, [1, 1, 5, 4, 1], Timings(3, [0, 2, 2, 2, 2, 2], range(6))).makespan
    6
    >>> two_ended_plan(range(6), range(4), [1] * 6, CODE_COSTS).cpu
    (5,)
    """
    transfer, gpu_cost, cpu_cost, gpu_extra, cpu_extra = costs
    assert cpu_cost is not None
    here = sorted([e for e in order if e in cached], key=lambda e: -loads[e])
    queue = here + sorted([e for e in order if e not in cached], key=lambda e: -loads[e])
    n_here = len(here)
    gpu_end: float = 0
    cpu_end: float = 0
    link_end: float = 0
    head, tail = 0, len(queue)
    while head < tail:
        in_list = head >= n_here
        start = max(gpu_end, link_end + transfer) if in_list else gpu_end
        at_gpu = start + gpu_cost[loads[queue[head]]] + gpu_extra
        at_cpu = cpu_end + cpu_cost[loads[queue[tail - 1]]] + cpu_extra
        if at_gpu <= at_cpu:
            link_end += transfer if in_list else 0
            gpu_end, gpu_extra = at_gpu, 0
            head += 1
        else:
            cpu_end, cpu_extra = at_cpu, 0
            tail -= 1
    return Plan(tuple(queue[:head]), tuple(reversed(queue[tail:])), gpu_end, cpu_end, tuple(queue[n_here:head]))


class PerRow:
    """A cost in proportion to the rows, or the same whatever they are."""

    def __init__(self, fixed: float, each: float = 0) -> None:
        self._fixed, self._each = fixed, each

    def __getitem__(self, rows: int, /) -> float:
        """Return the cost."""
        return self._fixed + self._each * rows


CODE_CPU_PER_ROW = {"deepseek": 1.0, "mixtral": 0.2, "qwen2": 0.8}
"""Time of a row of an expert on the CPU: in the released code for DeepSeek, in its comments for the others."""
CODE_COSTS = Timings(0.41791011235117914, PerRow(0.5), PerRow(0, CODE_CPU_PER_ROW["deepseek"]), 0, 0.79)
"""The constants of the released code, the same for every model and, by its comment, to be tested; presumably milliseconds."""
