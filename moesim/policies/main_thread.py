"""The one thread of a program that swaps, computes and waits: what it still does in a layer, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

Pair = tuple[int, int]  # (expert that comes to the GPU, expert that leaves it)
Awaited = tuple[int, int, str]  # (layer, expert, device): an arrival on a GPU, the end of a Run on a CPU


class MainThread:
    """Swaps of a layer pair by pair, then its experts on one device, then on the other; waits in between where it is told to."""

    def __init__(self) -> None:
        self.begin_step()

    def begin_step(self) -> None:
        """Forget what was to be done."""
        self._swaps: deque[Pair] = deque()
        self._experts: dict[str, list[int]] = {"gpu": [], "cpu": []}
        self._awaited: set[Awaited] = set()

    def add_swaps(self, pairs: Iterable[Pair]) -> None:
        """Swap these, one pair after the other."""
        self._swaps.extend(pairs)

    def add_experts(self, gpu: Iterable[int], cpu: Iterable[int]) -> None:
        """Execute these; an expert that is to be executed already takes the rows of all micro-batches so far."""
        taken = {*self._experts["gpu"], *self._experts["cpu"]}
        self._experts["gpu"] += [e for e in gpu if e not in taken]
        self._experts["cpu"] += [e for e in cpu if e not in taken]

    def leave_out(self, expert: int) -> None:
        """Do not execute an expert whose rows another Run takes."""
        for experts in self._experts.values():
            if expert in experts:
                experts.remove(expert)

    def wait_for(self, what: Iterable[Awaited]) -> None:
        """Do nothing more before all of these have happened."""
        self._awaited.update(what)

    def happened(self, what: Awaited) -> bool:
        """Note that something has happened; say whether the thread has waited for it."""
        waited = what in self._awaited
        self._awaited.discard(what)
        return waited

    def steps(self, *, cpu_first: bool) -> Iterator[tuple[Pair | None, str, list[int]]]:
        """Give what the thread does now: a pair to swap, or a device and the experts that it executes."""
        while self._swaps and not self._awaited:
            yield self._swaps.popleft(), "", []
        for device in ("cpu", "gpu") if cpu_first else ("gpu", "cpu"):
            if self._experts[device] and not self._awaited:
                experts, self._experts[device] = self._experts[device], []
                yield None, device, experts
