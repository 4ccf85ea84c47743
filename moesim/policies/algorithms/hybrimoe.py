"""HybriMoE's decisions as pure functions: splits of a layer, prefetches and recent scores.

A split is built by simulating it, in the paper's form (`queue_plan`) and in that of the released code (`two_ended_plan`). Times
may be integers (nanoseconds, as the policies pass them) or floats.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moesim.policies.base import Costs
from moesim.policies.parts import Plan
from moesim.trace.stats.caches import keep_top, mrs_update

_NEVER = float("inf")
_GPU, _CPU, _LINK = range(3)
_TIES = {"gpu": (_GPU, _CPU, _LINK), "cpu": (_CPU, _GPU, _LINK), "link": (_LINK, _GPU, _CPU)}
_EMPTY: Mapping[int, float] = {}


class Timings(NamedTuple):
    """Costs of the operations of a layer."""

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
    """Split a layer as HybriMoE's paper does, by three timelines; in the order of commitment.

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
    """Split a layer by `queue_plan`; the link is busy until what is on its way has arrived.

    ``waiting``: time until an expert's weights could be on the GPU, less than a transfer if that has begun.

    >>> queue_layer_plan([1, 1, 5, 4, 1], [3, 3, 3, 0, 0], Timings(3, [0, 2, 2, 2, 2, 2], range(6)))
    Plan(gpu=(3, 2), cpu=(0, 1, 4), gpu_total=5, cpu_total=3, loads=(2,))
    """
    active = [e for e, w in enumerate(loads) if w]
    missing = [e for e in active if waiting[e] >= costs.transfer]
    cached = [e for e in active if waiting[e] < costs.transfer]
    ready = {e: waiting[e] for e in cached if waiting[e]}
    return queue_plan(cached, missing, loads, costs, ready, max(ready.values(), default=0), gpu_free, reading)


def _first_there(queue: Sequence[tuple[int, int]], arrival: Mapping[int, float], now: float) -> int:
    """Return the place of a queue's first expert that has arrived, else of the next to arrive."""
    soonest, found = _NEVER, 0
    for place, (_, expert) in enumerate(queue):
        time = arrival.get(expert, 0)
        if time <= now:
            return place
        if time < soonest:
            soonest, found = time, place
    return found


def replay(plan: Plan, loads: Sequence[int], costs: Timings, ready: Mapping[int, float], link_free: float = 0) -> Ends:
    """Run a plan: transfers one after the other, each device its experts in order.

    Experts in ``ready`` arrive then; ``plan.loads``, then other missing GPU experts, are copied from ``link_free`` on.

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


def credit_by_id(scores: NDArray[Any], p: int) -> NDArray[np.float32]:
    """Keep each row's p largest scores as HybriMoE's code does: the largest to the lowest id.

    >>> credit_by_id(np.array([[0.25, 0, 0, 0.5, 0, 0.375]]), 3).tolist()
    [[0.5, 0.0, 0.0, 0.375, 0.0, 0.25]]
    """
    full = np.asarray(scores, np.float32)
    best = np.argsort(-full, axis=-1, kind="stable")[:, :p]
    found = np.zeros_like(full)
    np.put_along_axis(found, np.sort(best, axis=-1), np.take_along_axis(full, best, axis=-1), axis=-1)
    return found


def recent_scores(before: Sequence[float], scores: NDArray[Any], p: int, alpha: float, by_id: bool = False) -> list[float]:
    """Update a layer's scores: S <- alpha TopP(s) + (1 - alpha) S, of rows with their mean.

    ``scores`` has a row for each token; ``by_id`` credits them by `credit_by_id`.

    >>> recent_scores([0.5, 0, 0, 0], np.array([[0.5, 0.25, 0.125, 0.125]]), 2, 0.5)
    [0.5, 0.125, 0.0, 0.0]
    """
    kept = (credit_by_id if by_id else keep_top)(scores, p)
    mean = kept[0] if len(kept) == 1 else kept.mean(axis=0, dtype=np.float64)
    found: list[float] = mrs_update(np.array(before), mean, alpha).tolist()
    return found


def recent_weights(
    before: Sequence[float], ids: NDArray[Any], weights: NDArray[Any], p: int, alpha: float, by_id: bool = False
) -> list[float]:
    """Update a layer's scores by the weights of the chosen experts; all others count 0.

    >>> recent_weights([0.5, 0, 0, 0], np.array([[0, 2], [3, 2]]), np.array([[0.75, 0.25], [0.5, 0.5]]), 1, 0.5)
    [0.4375, 0.0, 0.125, 0.125]
    """
    order = np.argsort(ids, axis=-1)
    ids, weights = (np.take_along_axis(one, order, axis=-1) for one in (ids, weights))
    kept = (credit_by_id if by_id else keep_top)(weights, p)
    total = np.bincount(ids.ravel(), kept.ravel(), len(before))
    found: list[float] = mrs_update(np.array(before), total / len(ids), alpha).tolist()
    return found


def two_ended_plan(order: Sequence[int], cached: Container[int], loads: Sequence[int], costs: Timings) -> Plan:
    """Split a layer as HybriMoE's code does: GPU from a list's head, CPU from its tail.

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
        return self._fixed + self._each * rows


CODE_CPU_PER_ROW = {"deepseek": 1.0, "mixtral": 0.2, "qwen2": 0.8}
"""Time of a row of an expert on the CPU: in the released code for DeepSeek, in its comments for the others."""
CODE_COSTS = Timings(0.41791011235117914, PerRow(0.5), PerRow(0, CODE_CPU_PER_ROW["deepseek"]), 0, 0.79)
"""The constants of the released code, the same for every model and, by its comment, to be tested; presumably milliseconds."""


Rows = tuple[int, ...]
Makespan = Callable[[int, Rows, Rows], float]
"""Of the plan of a layer, from the rows of its cached experts and of the others, both ascending."""


def queue_makespan(costs: Timings, cached: Rows, missing: Rows, reading: Reading = PAPER) -> float:
    """Return a layer's makespan by `queue_plan`, from the rows of cached and of other experts.

    >>> queue_makespan(Timings(3, [0, 2, 2, 2, 2, 2], range(6)), (1, 4), (1, 1, 5))
    5
    """
    n = len(cached)
    return queue_plan(range(n), range(n, n + len(missing)), cached + missing, costs, reading=reading).makespan


class Ahead(NamedTuple):
    """Prediction of a later layer."""

    layer: int
    cached: Sequence[int]  # rows of each predicted expert that is on the GPU or on its way
    missing: Sequence[tuple[int, int]]  # (expert, rows) of the others


class _Layer:
    """A later layer while experts are chosen for it."""

    def __init__(self, ahead: Ahead, makespan: Makespan, candidates: int) -> None:
        self.layer = ahead.layer
        self._cached = sorted(ahead.cached)
        self._missing = sorted([(rows, -expert) for expert, rows in ahead.missing])
        self._makespan = makespan
        self._candidates = candidates
        self._end = makespan(self.layer, tuple(self._cached), self._rows())
        self.measure()

    def _rows(self, without: int = -1) -> Rows:
        return tuple([rows for place, (rows, _) in enumerate(self._missing) if place != without])

    def measure(self) -> None:
        """Find the expert that would shorten the plan most; of equals more rows, then the lower id."""
        self.gain: float = 0
        left, before = self._candidates, 0
        for place in range(len(self._missing) - 1, -1, -1):
            rows = self._missing[place][0]
            if rows == before:
                continue  # the same gain, and a higher id
            if not left:
                break
            left -= 1
            before = rows
            cached = tuple(sorted([*self._cached, rows]))
            end = self._makespan(self.layer, cached, self._rows(place))
            if self._end - end > self.gain:
                self.gain, self._place, self._next_end = self._end - end, place, end

    def take(self) -> int:
        """Count that expert as cached from now on, and return it."""
        rows, expert = self._missing.pop(self._place)
        insort(self._cached, rows)
        self._end = self._next_end
        self.measure()
        return -expert


def impact_driven(
    ahead: Sequence[Ahead],
    makespan: Makespan,
    transfer: float,
    idle: float,
    budget: Literal["ends", "begins", "none"] = "ends",
    candidates: int = 8,
) -> list[tuple[int, int]]:
    """Choose prefetches, in order, by how much sooner their layers' plans would end.

    The paper (2025) names the idea and gives no formula. Here: gain of an expert is the makespan of its layer without it minus
    the makespan with it in the cache. The largest positive gain is taken (ties: nearer layer, more rows, lower id), the gains of
    that layer are measured again, and so on. Experts with equal rows have equal gains, so one of them is measured, for at most
    ``candidates`` numbers of rows in each layer, from the highest down.

    ``ahead`` are predictions, nearest layer first; ``idle`` is the time for which the link has nothing else to do before the
    present layer ends; the last transfer must end, or begin, within it (``budget``), or whatever gains is fetched.

    Experts 7 and 8 with 2 rows each are missing in layer 1, where everything missing costs 3 a row:

    >>> ahead = [Ahead(1, (), ((8, 2), (7, 2))), Ahead(2, (1,), ((5, 1),))]
    >>> impact_driven(ahead, lambda layer, cached, missing: 3 * sum(missing), transfer=4, idle=9)
    [(1, 7), (1, 8)]
    """

    def fits(left: float) -> bool:
        return budget == "none" or (left >= transfer if budget == "ends" else left > 0)

    if not fits(idle):
        return []
    layers = [_Layer(one, makespan, candidates) for one in ahead if one.missing]
    chosen: list[tuple[int, int]] = []
    while layers and fits(idle):
        best = max(layers, key=lambda one: one.gain)
        if best.gain <= 0:
            break
        chosen.append((best.layer, best.take()))
        idle -= transfer
    return chosen
