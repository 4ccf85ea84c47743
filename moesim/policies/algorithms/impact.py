"""HybriMoE's choice of what to prefetch: the experts whose presence would shorten the plan of a later layer most."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from moesim.policies.algorithms.queues import PAPER, Reading, Timings, queue_plan

Rows = tuple[int, ...]
Makespan = Callable[[int, Rows, Rows], float]
"""Of the plan of a layer, from the rows of its cached experts and of the others, both ascending."""


_KEEP_PLANS = 1 << 14  # planned makespans that are remembered


class QueueMakespans:
    """A `Makespan` by `queue_plan`, with the timings of each layer; the same numbers of rows come again and again."""

    def __init__(self, timings: Sequence[Timings], reading: Reading = PAPER) -> None:
        self.timings, self.reading = timings, reading
        self._planned: dict[tuple[float, Rows, Rows], float] = {}

    def __call__(self, layer: int, cached: Rows, missing: Rows) -> float:
        """Plan a layer."""
        costs = self.timings[layer]
        key = costs.transfer, cached, missing
        found = self._planned.get(key)
        if found is None:
            if len(self._planned) == _KEEP_PLANS:
                self._planned.clear()
            n = len(cached)
            plan = queue_plan(range(n), range(n, n + len(missing)), cached + missing, costs, reading=self.reading)
            found = self._planned[key] = plan.makespan
        return found


class Ahead(NamedTuple):
    """What is predicted of a later layer."""

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
        """Find the expert that would shorten the plan most: among equals more rows, then the lower id."""
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
    """Choose experts of later layers to prefetch, by how much sooner the plan of their layer would end; in the order of choice.

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
