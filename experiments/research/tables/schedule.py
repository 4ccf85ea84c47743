"""One layer as it is executed: what a split between GPU and CPU takes once transfers overlap with work.

A plan adds up costs; an execution pipelines. The three resources are serial: the link moves experts one after another, the
GPU computes what is there, the CPU computes the rest. Times are integers (ns) or floats, in one unit. Memory is enough for
every expert that the GPU runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Piece(NamedTuple):
    """One expert on one resource."""

    expert: int
    start: float
    end: float


class Schedule(NamedTuple):
    """Who did what when; each list in order of time."""

    makespan: float
    gpu: tuple[Piece, ...]
    cpu: tuple[Piece, ...]
    link: tuple[Piece, ...]


class Layer(NamedTuple):
    """The active experts of a layer visit: what each would take where.

    Attributes
    ----------
    gpu_time, cpu_time : sequence of float, shape (n_experts,)
        Compute time of each expert's rows on either device; 0 on both for an expert without rows.
    resident : sequence of bool, shape (n_experts,)
        Whether its weights are on the GPU.
    transfer : float
        Time to move one expert.
    """

    gpu_time: Sequence[float]
    cpu_time: Sequence[float]
    resident: Sequence[bool | int]
    transfer: float

    @property
    def active(self) -> list[int]:
        """Experts with rows, ascending."""
        return [e for e in range(len(self.gpu_time)) if self.gpu_time[e] or self.cpu_time[e]]


def executed_schedule(
    layer: Layer,
    gpu: Sequence[int],
    cpu: Sequence[int],
    loads: Sequence[int] = (),
    *,
    arriving: Mapping[int, float] | None = None,
    in_order: bool = False,
    gpu_begin: float = 0,
    cpu_begin: float = 0,
    cpu_return: float = 0,
) -> Schedule:
    """Execute a split of one layer, as the simulator's engine does.

    Both devices take experts in the order given, and the link the ``loads``, after what is ``arriving`` already.
    ``in_order``: the GPU waits for each expert in turn; else it takes the first that is there. It may begin at
    ``gpu_begin``, the CPU at ``cpu_begin``, and the CPU's results take ``cpu_return`` to come back. The makespan counts
    from the instant at which the layer is routed.

    Of several experts that are ready at one instant the GPU takes the first in ``gpu``; one that arrives at the instant at
    which the GPU becomes free is ready.

    The instance that HybriMoE's figure 5 describes (transfer 3, GPU 2, CPU one a row): planned 5, executed 5.

    >>> layer = Layer([2, 2, 2, 2, 2], [1, 1, 5, 4, 1], [0, 0, 0, 1, 1], 3)
    >>> executed_schedule(layer, gpu=[3, 2], cpu=[0, 1, 4], loads=[2])
    ... # doctest: +NORMALIZE_WHITESPACE
    Schedule(makespan=5,
      gpu=(Piece(expert=3, start=0, end=2), Piece(expert=2, start=3, end=5)),
      cpu=(Piece(expert=0, start=0, end=1), Piece(expert=1, start=1, end=2), Piece(expert=4, start=2, end=3)),
      link=(Piece(expert=2, start=0, end=3),))
    """
    there: dict[int, float] = {e: 0 for e in gpu if layer.resident[e]}
    there.update(arriving or {})
    link = []
    moved = max((arriving or {}).values(), default=0)
    for e in loads:
        link.append(Piece(e, moved, moved + layer.transfer))
        there[e] = moved = moved + layer.transfer
    lacking = [e for e in gpu if e not in there]
    if lacking:
        raise ValueError(f"schedule: expected every expert of the GPU to be there or in loads, got {lacking} in neither")
    on_gpu = _gpu_lane(layer, gpu, there, in_order, gpu_begin)
    on_cpu = []
    now = cpu_begin
    for e in cpu:
        on_cpu.append(Piece(e, now, now + layer.cpu_time[e]))
        now += layer.cpu_time[e]
    ends = ([on_gpu[-1].end] if on_gpu else []) + ([now + cpu_return] if on_cpu else [])
    return Schedule(max(ends, default=0), tuple(on_gpu), tuple(on_cpu), tuple(link))


def _gpu_lane(layer: Layer, gpu: Sequence[int], there: Mapping[int, float], in_order: bool, begin: float) -> list[Piece]:
    lane = []
    left = list(gpu)
    now = begin
    while left:
        ready = left[0] if in_order else next((e for e in left if there[e] <= now), None)
        if ready is None:
            ready = min(left, key=lambda e: there[e])  # ties: the first in the queue
        start = max(now, there[ready])
        now = start + layer.gpu_time[ready]
        lane.append(Piece(ready, start, now))
        left.remove(ready)
    return lane


def best_order(layer: Layer, gpu: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the best order of the GPU's experts and of their transfers, once it is decided which they are.

    Residents by id, then the others by GPU time, longest first (ties: lower id); and these others.

    Link and GPU are a flow shop of two machines in which each expert passes the link first, residents in no time. Johnson's
    rule minimises its makespan over all orders on both machines: first the experts that take less time on the link than on
    the GPU, by ascending time on the link, then the others by descending time on the GPU. As all transfers take the same time,
    "residents, then descending GPU time" is such an order. Taking whatever is ready first cannot be slower: a GPU that is
    never idle while something is ready has done the most work at any time, in whatever order.
    """
    moved = sorted((e for e in gpu if not layer.resident[e]), key=lambda e: (-layer.gpu_time[e], e))
    return [*sorted(e for e in gpu if layer.resident[e]), *moved], moved


ENUMERATE_UP_TO = 12  # experts; 2 ** 12 splits take a few ms
_SLACK = 1e-6  # relative tolerance of the solver, taken off its bound


def optimal_schedule(layer: Layer, enumerate_up_to: int = ENUMERATE_UP_TO) -> Schedule:
    """Return the best execution of a layer in which every expert runs whole, on one device.

    A split decides everything: the CPU's time is a sum, and `best_order` gives the best orders of GPU and link. Up
    to ``enumerate_up_to`` active experts every split is tried, and of several the first is taken, counting upwards
    with bit i set if the i-th active expert is on the GPU. If all GPU times are equal, only *how many* residents
    and others the GPU takes matters to the GPU, so it takes those that cost the CPU most. A 0-1 program solves all
    others; RuntimeError if it proves no optimum.

    >>> optimal_schedule(Layer([2, 2, 2, 2, 2], [1, 1, 5, 4, 1], [0, 0, 0, 1, 1], 3)).makespan
    5
    """
    active = layer.active
    if len(active) <= enumerate_up_to:
        chosen = _enumerate(layer, active)
    elif len({layer.gpu_time[e] for e in active}) == 1:
        chosen = _best_counts(layer, active)
    else:
        _, shares = _program(layer, active, whole=True, pipelined=True)
        chosen = [e for e, share in zip(active, shares, strict=True) if share > 0.5]
    gpu, loads = best_order(layer, chosen)
    return executed_schedule(layer, gpu, [e for e in active if e not in set(chosen)], loads)


def _enumerate(layer: Layer, active: Sequence[int]) -> list[int]:
    """Try all splits at once: each expert in turn joins the timelines of the splits that contain it."""
    order, _ = best_order(layer, active)
    codes = np.arange(1 << len(active))
    moved: NDArray[np.float64] = np.zeros(len(codes))
    gpu, cpu = np.zeros(len(codes)), np.zeros(len(codes))
    for e in order:
        taken = (codes >> active.index(e)) & 1 == 1
        if not layer.resident[e]:
            moved += np.where(taken, layer.transfer, 0)
        begin = gpu if layer.resident[e] else np.maximum(gpu, moved)
        gpu = np.where(taken, begin + layer.gpu_time[e], gpu)
        cpu += np.where(taken, 0, layer.cpu_time[e])
    best = int(np.argmin(np.maximum(gpu, cpu)))
    return [e for i, e in enumerate(active) if best >> i & 1]


def _best_counts(layer: Layer, active: Sequence[int]) -> list[int]:
    """Choose how many residents and how many others the GPU takes; each time those that cost the CPU most."""
    by_cost = sorted(active, key=lambda e: (-layer.cpu_time[e], e))
    residents = [e for e in by_cost if layer.resident[e]]
    others = [e for e in by_cost if not layer.resident[e]]
    each, total = layer.gpu_time[active[0]], sum(layer.cpu_time[e] for e in active)

    def makespan(kept: int, moved: int) -> float:
        gpu = (kept + moved) * each
        if moved:
            gpu = max(gpu, layer.transfer + moved * each, moved * layer.transfer + each)
        taken = sum(layer.cpu_time[e] for e in residents[:kept]) + sum(layer.cpu_time[e] for e in others[:moved])
        return max(gpu, total - taken)

    counts = [(kept, moved) for kept in range(len(residents) + 1) for moved in range(len(others) + 1)]
    kept, moved = min(counts, key=lambda pair: makespan(*pair))
    return residents[:kept] + others[:moved]


def layer_lower_bound(layer: Layer, *, pipelined: bool = True) -> float:
    """Return a time that no execution of a layer can beat.

    Parameters
    ----------
    layer : Layer
        Costs and residents.
    pipelined : bool
        Count that an expert is computed after it has been moved; else only the total work of each resource.

    Returns
    -------
    float
        At most `optimal_schedule`, also if experts could be split between the devices.

    Notes
    -----
    Let y(e) be 1 if the GPU runs expert e and 0 if the CPU does, and let the experts that are not resident be numbered 1 .. m by
    GPU time, longest first. Whatever the schedule, its makespan T satisfies::

        sum of g(e) y(e) over all e                                <= T       the GPU's work
        sum of c(e) (1 - y(e)) over all e                          <= T       the CPU's work
        x (y(1) + ... + y(k)) + g(k) y(k) + ... + g(m) y(m)        <= T       for k = 1 .. m

    The first two are totals. For the third let the schedule have T, and re-order its transfers by Johnson's rule,
    which does not make it longer (`best_order`). If k is moved, it arrives after y(1) + ... + y(k) transfers, and k
    .. m are all computed after that. If k is not moved, the sum is at most that of the last j < k that is moved,
    which has the same transfers and at least the same computations; and if there is none, it is a part of the GPU's
    work. The bound is the least T over 0 <= y <= 1, a linear program, so it is at most the least T over whole
    experts. Without ``pipelined`` the third line is x times all y, the link's work.

    >>> layer = Layer([2, 2, 2, 2, 2], [1, 1, 5, 4, 1], [0, 0, 0, 1, 1], 3)
    >>> round(layer_lower_bound(layer), 3), round(layer_lower_bound(layer, pipelined=False), 3)
    (3.913, 3.667)
    """
    active = layer.active
    if not active:
        return 0.0
    bound, _ = _program(layer, active, whole=False, pipelined=pipelined)
    return bound * (1 - _SLACK)


def _program(layer: Layer, active: Sequence[int], *, whole: bool, pipelined: bool) -> tuple[float, NDArray[np.float64]]:
    """Solve the program of `layer_lower_bound`, over whole experts or shares of them: the least T and the GPU's shares."""
    # scipy.optimize takes long to import, and few need it.
    from scipy.optimize import Bounds, LinearConstraint, milp

    n = len(active)
    place = {e: i for i, e in enumerate(active)}
    gpu = np.array([layer.gpu_time[e] for e in active], dtype=np.float64)
    cpu = np.array([layer.cpu_time[e] for e in active], dtype=np.float64)
    scale = max(gpu.max(), cpu.max(), layer.transfer)
    rows, limits = [gpu, -cpu], [0.0, -float(cpu.sum())]
    moved = [place[e] for e in best_order(layer, active)[1]]
    for k in range(len(moved)) if pipelined else ([len(moved) - 1] if moved else []):
        row = np.zeros(n)
        row[moved[: k + 1]] += layer.transfer
        if pipelined:
            row[moved[k:]] += gpu[moved[k:]]
        rows.append(row)
        limits.append(0.0)
    table = np.column_stack([np.array(rows), np.full(len(rows), -scale)]) / scale
    result = milp(
        c=np.append(np.zeros(n), 1.0),
        constraints=LinearConstraint(table, ub=np.array(limits) / scale),
        integrality=np.append(np.full(n, int(whole)), 0),
        bounds=Bounds(np.zeros(n + 1), np.append(np.ones(n), np.inf)),
        options={"mip_rel_gap": 0.0},
    )
    if not result.success:
        raise RuntimeError(f"schedule of {n} experts: HiGHS found no optimum: {result.message}")
    return float(result.x[n]) * float(scale), result.x[:n]
