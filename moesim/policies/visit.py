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
        self._routed: list[Sequence[int]] = []  # experts of each micro-batch
        self._units: set[Unit] | None = None  # all of them, once asked for

    def add(self, event: Routed) -> None:
        """Take note of a routed micro-batch; the first of another layer visit begins anew."""
        at = event.step, event.layer
        self._routed = [*self._routed, event.active] if at == self._at else [event.active]
        self._at, self._units = at, None

    @property
    def units(self) -> set[Unit]:
        """Return these experts with their layer."""
        if self._units is None:
            layer = self._at[1]
            self._units = {(layer, expert) for experts in self._routed for expert in experts}
        return self._units

    def spared(self, victims: Victims) -> set[Unit]:
        """Return what goes only if nothing else is idle."""
        return self.units if victims == UNROUTED_FIRST else set()


def first_idle(ranked: Iterable[Unit], spared: Container[Unit], gpu: str, view: View) -> Unit | None:
    """Return the first of some units that is on a GPU and idle, one that is spared only if no other is; None if there is none."""
    is_resident, is_in_use = view.is_resident, view.is_in_use
    routed = []
    for unit in ranked:
        if unit in spared:
            routed.append(unit)
        elif is_resident(*unit, gpu) and not is_in_use(*unit, gpu):
            return unit
    return next((unit for unit in routed if is_resident(*unit, gpu) and not is_in_use(*unit, gpu)), None)


def order_of_use(event: Routed) -> Sequence[int]:
    """Return the active experts in the order in which they count as used: those of one row by rank, those of several by id.

    Examples
    --------
    >>> from moesim.testing import routed
    >>> order_of_use(routed([[3, 1]])), order_of_use(routed([[3, 1], [0, 3]]))
    ([3, 1], [0, 1, 3])
    """
    if len(event.experts) > 1:
        return event.active
    [ranked] = event.experts.tolist()
    return cast("list[int]", ranked)
