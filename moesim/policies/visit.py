"""What the present layer visit uses: in which order, and what that means for victims."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Final, Literal, cast

from moesim.policies.parts import Unit
from moesim.policy import Routed, View

Victims = Literal["unrouted-first", "idle"]
UNROUTED_FIRST: Final = "unrouted-first"


class PresentVisit:
    """The experts that the present layer visit is routed to, in all its micro-batches so far."""

    def __init__(self) -> None:
        self._at = (-1, -1)  # step and layer
        self.units: set[Unit] = set()  # these experts with their layer

    def add(self, event: Routed) -> None:
        """Take note of a routed micro-batch; the first of another layer visit begins anew."""
        layer = event.layer
        at, units = (event.step, layer), {(layer, expert) for expert in event.active}
        self.units = self.units | units if at == self._at else units
        self._at = at

    def spared(self, victims: Victims) -> Container[Unit]:
        """Return what goes only if there is nothing else."""
        return self.units if victims == UNROUTED_FIRST else ()


def first_resident(ranked: Iterable[Unit], spared: Container[Unit], gpu: str, view: View) -> Unit | None:
    """Return the first of some units that is on a GPU, one that is spared only if no other is; None if there is none."""
    is_resident = view.is_resident
    routed = []
    for unit in ranked:
        if unit in spared:
            routed.append(unit)
        elif is_resident(*unit, gpu):
            return unit
    return next((unit for unit in routed if is_resident(*unit, gpu)), None)


def order_of_use(event: Routed) -> Sequence[int]:
    """Return the active experts in the order in which they count as used: those of one row by rank, those of several by id.

    >>> from moesim.testing import routed
    >>> order_of_use(routed([[3, 1]])), order_of_use(routed([[3, 1], [0, 3]]))
    ([3, 1], [0, 1, 3])
    """
    if len(event.experts) > 1:
        return event.active
    [ranked] = event.experts.tolist()
    return cast("list[int]", ranked)
