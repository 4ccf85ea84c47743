"""One layer as it is executed: what a split between GPU and CPU takes once transfers overlap with work.

A plan adds up costs; an execution pipelines. The three resources are serial: the link moves experts one after another, the
GPU computes what is there, the CPU computes the rest. Times are integers (ns) or floats, in one unit. Memory is enough for
every expert that the GPU runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


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

    Both devices take experts in the order given, and the link the ``loads``, after what is ``arriving`` already. ``in_order``: the GPU
    waits for each expert in turn; else it takes the first that is there. It may begin at ``gpu_begin``, the CPU at ``cpu_begin``, and the
    CPU's results take ``cpu_return`` to come back. The makespan counts from the instant at which the layer is routed.

    Of several experts that are ready at one instant the GPU takes the first in ``gpu``; one that arrives at the instant at
    which the GPU becomes free is ready.

    Examples
    --------
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
