"""Transfers and computation of a layer in turns, as in a program whose copies are synchronous."""

from __future__ import annotations

from collections.abc import Iterable

from moesim.policies.base import STAGING
from moesim.policy import DEMAND, Action, Drop, Fetch, Fetched, Ran, Run


class Turns:
    """Holds the copies and Runs of a layer, and lets go a turn of them at a time.

    A turn of copies brings as many of the layer's experts as the buffer for loads holds, the last one also what is fetched for
    later layers; a turn of computation runs what is there by then, and the buffer is emptied for more. A turn begins when all of the one before is over. So the
    layer ends with computation, and nothing is on its way when the next begins.

    The buffer for loads on ``gpu`` holds ``slots`` experts.
    """

    def __init__(self, gpu: str, slots: int) -> None:
        self._gpu = gpu
        self._slots = slots
        self._layer = -1
        self._copies_next = True
        self._loads: list[int] = []
        self._ahead: list[Fetch] = []
        self._runs: dict[str, list[int]] = {}  # device -> experts in order
        self._buffered: list[int] = []  # loads of the latest turn of copies
        self._awaited: set[tuple[int, int, str]] = set()  # (layer, expert, device) of the present turn

    def hold(self, layer: int, actions: Iterable[Action]) -> list[Action]:
        """Keep the copies and Runs of a layer; return the other actions.

        An expert that several micro-batches load or run is kept once; what one of them runs on the GPU goes there for all.
        """
        self._layer = layer
        now: list[Action] = []
        for action in actions:
            if isinstance(action, Fetch) and action.urgency == DEMAND:
                self._loads += [e for e in action.experts if e not in self._loads]
            elif isinstance(action, Fetch):
                self._ahead.append(action)
            elif isinstance(action, Run):
                runs = self._runs.setdefault(action.device, [])
                runs += [e for e in action.experts if e not in runs]
            else:
                now.append(action)
        return now

    def happened(self, event: Fetched | Ran) -> None:
        """Note that a copy has arrived or a Run has ended."""
        experts = (event.expert,) if isinstance(event, Fetched) else event.experts
        self._awaited.difference_update((event.layer, expert, event.device) for expert in experts)

    def go_on(self) -> list[Action]:
        """Return the next turn if the one before is over; to be asked once all that belongs to the layer is held."""
        actions: list[Action] = []
        while not self._awaited and (self._loads or self._ahead or self._runs):
            actions += self._copy() if self._copies_next else self._compute()
            self._copies_next = not self._copies_next
        return actions

    def _copy(self) -> list[Action]:
        """Load what the buffer holds; with the last loads, fetch for later layers."""
        now, self._loads = self._loads[: self._slots], self._loads[self._slots :]
        fetches = [Fetch(self._layer, now, self._gpu, DEMAND, STAGING)] if now else []
        if not self._loads:
            fetches, self._ahead = fetches + self._ahead, []
        self._awaited = {(fetch.layer, expert, self._gpu) for fetch in fetches for expert in fetch.experts}
        self._buffered = now
        return [*fetches]

    def _compute(self) -> list[Action]:
        """Run what is there; where more is to be loaded, it leaves the buffer as soon as it has run."""
        later, on_gpu = set(self._loads), self._runs.pop(self._gpu, [])
        runs = {device: [e for e in experts if e not in on_gpu] for device, experts in self._runs.items()}
        runs[self._gpu] = [e for e in on_gpu if e not in later]
        self._runs = {self._gpu: [e for e in on_gpu if e in later]} if later else {}
        if later:  # else nothing follows in this layer
            self._awaited = {(self._layer, e, device) for device, experts in runs.items() for e in experts}
        actions: list[Action] = [Run(self._layer, experts, device) for device, experts in runs.items() if experts]
        return [*actions, Drop(self._layer, self._buffered, self._gpu)] if later else actions
