"""Where experts really are: slots in a device's buffers, and how many buffers there is room for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from moesim.core.units import format_memory
from moesim.errors import CapacityError

if TYPE_CHECKING:
    from moesim.engine.machine import DeviceState

FEWEST = 4
"""Buffers that a device must have at the least: fewer would stay in a processor's cache, or be overwritten while read."""


class Slots:
    """Which buffer of a device holds which unit.

    A device may be granted more slots than there are buffers (weights are random, and as good as any others): the buffers
    then take turns, and two units may share one.
    """

    def __init__(self, device: DeviceState, n_buffers: int) -> None:
        self._device = device
        self._n = n_buffers
        self._free = list(range(n_buffers))[::-1]
        self._slot: dict[int, int] = {}
        self._shared: dict[int, int] = {}  # buffer -> units beyond the first that use it
        self._turn = 0
        self.coming: set[int] = set()  # fetches that have a slot and are not there yet

    def of(self, unit: int) -> int:
        """Buffer of a unit that is resident or on its way."""
        return self._slot[unit]

    def take(self, unit: int) -> int:
        """Give a unit a buffer."""
        if unit in self._slot:
            self._give(unit)
        if not self._free:
            self._sweep()
        if self._free:
            buffer = self._free.pop()
        else:
            self._turn = (self._turn + 1) % self._n
            buffer = self._turn
            self._shared[buffer] = self._shared.get(buffer, 0) + 1
        self._slot[unit] = buffer
        return buffer

    def _sweep(self) -> None:
        """Free the buffers of units that have left the device."""
        memory, pending = self._device.memory, self._device.pending
        for unit in [u for u in self._slot if u not in memory.copies and u not in pending]:
            self._give(unit)

    def _give(self, unit: int) -> None:
        buffer = self._slot.pop(unit)
        if self._shared.get(buffer):
            self._shared[buffer] -= 1
        else:
            self._free.append(buffer)


def share_out(wanted: Mapping[str, int], expert_bytes: int, fixed_bytes: int, budget_bytes: int, where: str) -> dict[str, int]:
    """Find how many buffers each device gets.

    No device gets more than the ``wanted`` buffers, which would give every unit its own. If not all fit, the devices share
    equally what there is. A `CapacityError` says that not even `FEWEST` fit on each device, or all that are wanted.

    >>> share_out({"a": 10, "b": 100}, 10, 50, 1000, "host memory")
    {'a': 10, 'b': 85}
    """
    room = max(0, budget_bytes - fixed_bytes) // expert_bytes
    found: dict[str, int] = {}
    for left, (name, n) in zip(range(len(wanted), 0, -1), sorted(wanted.items(), key=lambda item: item[1]), strict=True):
        found[name] = min(n, room // left)
        room -= found[name]
    fewest = {name: min(n, FEWEST) for name, n in wanted.items()}
    if any(found[name] < fewest[name] for name in wanted):
        needed = fixed_bytes + sum(fewest.values()) * expert_bytes
        raise CapacityError(
            f"replay: expected at least {format_memory(needed, least=True)} of {where} ({format_memory(fixed_bytes)} for the "
            f"dense part and activations, {sum(fewest.values())} experts of {format_memory(expert_bytes)}), got a budget of "
            f"{format_memory(budget_bytes)}; give more, or choose a smaller model or batch"
        )
    return {name: found[name] for name in wanted}
