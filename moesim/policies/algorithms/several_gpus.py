"""One CPU and several GPUs: DALI's two algorithms with a choice among GPUs.

Its section 6.5 runs one CPU with two GPUs and prints speed-ups only, so both functions are our reading. With one GPU they are the
paper's algorithms.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class MultiPlan(NamedTuple):
    """Who executes what."""

    gpus: tuple[tuple[int, ...], ...]  # for each GPU, expert ids in the order of assignment
    cpu: tuple[int, ...]
    gpu_totals: tuple[float, ...]  # planned, in the unit of the costs
    cpu_total: float

    @property
    def makespan(self) -> float:
        """The planned end: the largest total."""
        return max(*self.gpu_totals, self.cpu_total)


def greedy_multi_assignment(
    gpu_costs: Sequence[Sequence[float]], cpu_cost: Sequence[float], gpu_first: Sequence[float] = (), cpu_first: float = 0
) -> MultiPlan:
    """Assign greedily to one CPU and several GPUs.

    Parameters
    ----------
    gpu_costs : sequence of sequence of float, shape (n_gpus, n_experts)
        Cost of each expert on each GPU, which differ with what is resident where.
    cpu_cost : sequence of float, shape (n_experts,)
        Cost of each expert on the CPU.
    gpu_first : sequence of float, shape (n_gpus,) or ()
        What the first expert on each GPU takes beyond its cost; empty: nothing.
    cpu_first : float
        The same of the CPU.

    Returns
    -------
    MultiPlan
        With one GPU, exactly the plan of `moesim.policies.algorithms.assignment.greedy_assignment`.

    Notes
    -----
    Experts are taken by the difference of the CPU's cost and the cheapest GPU's, largest first (ties: lower id). For each, the GPU
    is considered whose total would be smallest with it (ties: the first); it takes the expert if that total is at most the CPU's
    total with it.

    Examples
    --------
    Experts 3 and 4 are resident, on the first and on the second GPU. Expert 2 is taken before 3, so that the first GPU is busy
    when it is the turn of 3, which finishes sooner as a copy on the second:

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


def workload_aware_swaps(
    scores: Sequence[int], residents: Sequence[Iterable[int]], u_size: int, only_if_better: bool = False
) -> list[list[tuple[int, int]]]:
    """Choose the replacements at the end of a window on several GPUs, which never hold the same expert.

    Parameters
    ----------
    scores : sequence of int, shape (n_experts,)
        Rows each expert served in the window.
    residents : sequence of iterable of int, shape (n_gpus, ...)
        Experts of the layer in the cache of each GPU.
    u_size : int
        Experts to replace on each GPU; fewer where there are not so many.
    only_if_better : bool
        Keep a resident unless its newcomer's score is higher.

    Returns
    -------
    list of list of (int, int)
        For each GPU the pairs (victim, newcomer): its lowest residents, lowest first; of the highest experts that are on no
        GPU, dealt out in turns, its own, highest first.

    Examples
    --------
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
        pairs = list(zip(victims, outside[turn :: len(inside)], strict=False))
        swaps.append([(out, new) for out, new in pairs if not only_if_better or scores[new] > scores[out]])
    return swaps
