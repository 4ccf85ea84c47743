"""HybriMoE's splits of a layer between CPU and GPU, in the paper's form and in that of the released code.

Both build a plan by simulating it. Times may be integers (nanoseconds, as the policies pass them) or floats.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from moesim.policies.algorithms.assignment import Costs, Plan

_NEVER = float("inf")
_GPU, _CPU, _LINK = range(3)
_TIES = {"gpu": (_GPU, _CPU, _LINK), "cpu": (_CPU, _GPU, _LINK), "link": (_LINK, _GPU, _CPU)}
_EMPTY: Mapping[int, float] = {}


class Timings(NamedTuple):
    """What the operations of a layer cost."""

    transfer: float  # one expert to the GPU
    gpu: Costs  # one expert by its rows
    cpu: Costs | None  # None: nothing is computed on the CPU
    gpu_first: float = 0  # extra for the first expert of a layer
    cpu_first: float = 0


class Reading(NamedTuple):
    """How the paper's words are read."""

    timeline: Literal["completion", "free"] = "completion"
    ties: Literal["gpu", "cpu", "link"] = "gpu"
    count_compute: bool = False
    overtake: bool = True


PAPER = Reading()


class Ends(NamedTuple):
    """When each timeline of a plan ends."""

    gpu: float
    cpu: float
    link: float


def queue_plan(
    cached: Sequence[int],
    missing: Sequence[int],
    loads: Sequence[int],
    costs: Timings,
    ready: Mapping[int, float] = _EMPTY,
    link_free: float = 0,
    gpu_free: float = 0,
    reading: Reading = PAPER,
) -> Plan:
    """Split a layer as HybriMoE's paper does, by simulating three timelines; orders are those of commitment.

    GPU queue: what is there, most rows first. CPU queue: what is not, fewest rows first. Equal rows: lower id first. The operations
    between which it chooses:

    * GPU: the head of its queue, once it is there
    * CPU: the head of its queue; if that is empty, the last of the GPU's
    * link: the last of the CPU queue, which then moves to its place in the GPU queue

    The CPU may take an expert after its transfer was planned; nobody waits for that one. ``ready`` says when those on their way
    arrive, ``link_free`` and ``gpu_free`` when the link can begin another transfer, and the GPU its first expert.

    How the paper is read: ``timeline``, whose operation is committed next, the one whose *operation* would complete first, or the
    timeline that is *free* first; ``ties``, which timeline wins among equals, the others follow as GPU, CPU, link;
    ``count_compute``, a transfer is not complete before its expert could have been computed; ``overtake``, the GPU takes the
    busiest expert that is there when the busiest of all is still on its way, else it waits for that one.

    Experts A B C D E with 1 1 5 4 1 rows; D and E are cached; transfer 3, GPU 2, CPU 1 a row:

    >>> rows = range(6)
    >>> queue_plan([3, 4], [0, 1, 2], [1, 1, 5, 4, 1], Timings(3, [0, 2, 2, 2, 2, 2], rows))
    Plan(gpu=(3, 2), cpu=(0, 1, 4), gpu_total=5, cpu_total=3, loads=(2,))
    """
    transfer, gpu_cost, cpu_cost, gpu_extra, cpu_extra = costs
    timeline, ties, count_compute, overtake = reading
    by_completion, order = timeline == "completion", _TIES[ties]
    gpu_queue = sorted([(-loads[e], e) for e in cached])
    cpu_queue = sorted([(loads[e], e) for e in missing])
    low, high = 0, len(cpu_queue)
    arrival = dict(ready)
    gpu_end, link_end = gpu_free, link_free
    cpu_end: float = 0
    gpu: list[int] = []
    cpu: list[int] = []
    link: list[int] = []
    while gpu_queue or low < high:
        place = 0
        at_gpu = at_cpu = at_link = _NEVER
        if gpu_queue:
            rows, expert = gpu_queue[0]
            start = gpu_end
            if arrival and arrival.get(expert, 0) > gpu_end:
                if overtake:
                    place = _first_there(gpu_queue, arrival, gpu_end)
                    rows, expert = gpu_queue[place]
                start = max(gpu_end, arrival.get(expert, 0))
            at_gpu = start + gpu_cost[-rows] + gpu_extra
        if low < high:
            at_link = link_end + transfer
            if count_compute:
                at_link += gpu_cost[cpu_queue[high - 1][0]]
            if cpu_cost is not None:
                at_cpu = cpu_end + cpu_cost[cpu_queue[low][0]] + cpu_extra
        elif cpu_cost is not None:
            at_cpu = cpu_end + cpu_cost[-gpu_queue[-1][0]] + cpu_extra
        if by_completion:
            a, b, c = at_gpu, at_cpu, at_link
        else:
            a = gpu_end if at_gpu < _NEVER else _NEVER
            b = cpu_end if at_cpu < _NEVER else _NEVER
            c = link_end if at_link < _NEVER else _NEVER
        if a < b and a < c:
            chosen = _GPU
        elif b < a and b < c:
            chosen = _CPU
        elif c < a and c < b:
            chosen = _LINK
        else:
            chosen = min(order, key=(a, b, c).__getitem__)
        if chosen == _GPU:
            gpu.append(gpu_queue.pop(place)[1])
            gpu_end, gpu_extra = at_gpu, 0
        elif chosen == _CPU:
            if low < high:
                cpu.append(cpu_queue[low][1])
                low += 1
            else:
                cpu.append(gpu_queue.pop()[1])
            cpu_end, cpu_extra = at_cpu, 0
        else:
            high -= 1
            rows, expert = cpu_queue[high]
            link_end = arrival[expert] = link_end + transfer
            link.append(expert)
            insort(gpu_queue, (-rows, expert))
    return Plan(tuple(gpu), tuple(cpu), gpu_end, cpu_end, tuple(link))


def queue_layer_plan(
    loads: Sequence[int], waiting: Sequence[float], costs: Timings, gpu_free: float = 0, reading: Reading = PAPER
) -> Plan:
    """Split a layer by `queue_plan`; what is on its way arrives when the link says, and the link is busy until then.

    ``waiting`` is the time until an expert's weights could be on the GPU: 0 if resident, less than a transfer if that has begun.

    >>> queue_layer_plan([1, 1, 5, 4, 1], [3, 3, 3, 0, 0], Timings(3, [0, 2, 2, 2, 2, 2], range(6)))
    Plan(gpu=(3, 2), cpu=(0, 1, 4), gpu_total=5, cpu_total=3, loads=(2,))
    """
    active = [e for e, w in enumerate(loads) if w]
    missing = [e for e in active if waiting[e] >= costs.transfer]
    cached = [e for e in active if waiting[e] < costs.transfer]
    ready = {e: waiting[e] for e in cached if waiting[e]}
    return queue_plan(cached, missing, loads, costs, ready, max(ready.values(), default=0), gpu_free, reading)


def _first_there(queue: Sequence[tuple[int, int]], arrival: Mapping[int, float], now: float) -> int:
    """Return the place of the first expert of a queue that has arrived; if none has, of the one that arrives first."""
    soonest, found = _NEVER, 0
    for place, (_, expert) in enumerate(queue):
        time = arrival.get(expert, 0)
        if time <= now:
            return place
        if time < soonest:
            soonest, found = time, place
    return found


def replay(plan: Plan, loads: Sequence[int], costs: Timings, ready: Mapping[int, float], link_free: float = 0) -> Ends:
    """Carry out a plan: transfers one after the other, each device its experts in order.

    Experts in ``ready`` need no transfer and arrive then. Transfers go in the order of ``plan.loads`` from ``link_free`` on; GPU experts
    neither there nor in ``ready`` follow in GPU order.

    >>> costs = Timings(3, [0, 2, 2], range(3))
    >>> replay(Plan((0, 1), (2,), 0, 0), [1, 1, 2], costs, {0: 0})
    Ends(gpu=5, cpu=2, link=3)
    """
    arrival = dict(ready)
    link = link_free
    for expert in (*plan.loads, *plan.gpu):
        if expert not in arrival:
            link = arrival[expert] = link + costs.transfer
    gpu: float = 0
    for place, expert in enumerate(plan.gpu):
        gpu = max(gpu, arrival[expert]) + costs.gpu[loads[expert]] + (0 if place else costs.gpu_first)
    cpu: float = 0
    if costs.cpu is not None and plan.cpu:
        cpu = costs.cpu_first + sum([costs.cpu[loads[e]] for e in plan.cpu])
    return Ends(gpu, cpu, link)
