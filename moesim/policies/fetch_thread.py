"""One thread that fetches experts: MoE-Infinity's dispatcher, which FineMoE has from it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np

from moesim.errors import CapacityError
from moesim.policies.algorithms.activations import least_visited
from moesim.policies.base import CACHE, PolicyBase, gpu_of, slot_bytes
from moesim.policies.parts import Unit
from moesim.policy import DEMAND, Action, Fetch, Fetched, Placement, Pool, Routed, Run, StepBegin, View


class FetchThread(PolicyBase):
    """A global cache, empty at the start; the active experts of a layer go to the GPU one after another, by ascending id.

    Each is looked at when the copies of those before it have arrived, so that a hit waits for the misses before it.
    """

    listens = frozenset({Routed, Fetched})

    def place(self, view: View) -> Placement:
        """Return the empty cache."""
        name, model = type(self).__name__, view.model
        self._gpu = gpu_of(view, name)
        slots = min(view.cache_slots(self._gpu), model.n_layers * model.n_experts)
        if not slots:
            raise CapacityError(f"policy {name} on {self._gpu}: expected at least 1 cache slot, got 0; raise cache.ratio")
        shape = (model.n_layers, model.n_experts)
        self._visits = np.zeros(shape, np.int64)  # since the start, cached or not
        self._cached = np.zeros(shape, np.bool_)
        self._locked = np.zeros(shape, np.bool_)  # what the present layer visit uses
        self._at = (-1, -1)  # step and layer routed last
        self._turns: deque[Unit] = deque()  # active experts that the thread has not come to
        self._loading: Unit | None = None
        self._slots = slots
        return Placement(pools=[Pool(self._gpu, CACHE, slots * slot_bytes(view))])

    def decide(self, event: Any, view: View) -> Iterable[Action]:
        """Let the thread go on, with the experts of a routed layer or after an arrival."""
        if type(event) is Routed:
            self.routed(event)
            return self.go_on(view)
        if type(event) is StepBegin:
            self.step_begin(event)
            return ()
        unit = event.layer, event.expert
        self._cached[unit] = True
        if self._loading == unit:
            self._loading = None
        return self.go_on(view)

    def step_begin(self, event: StepBegin) -> None:
        """Take note of a step; only told to those that listen."""

    def routed(self, event: Routed) -> None:
        """Queue and lock the active experts."""
        layer = event.layer
        if self._at != (event.step, layer):
            self._at = (event.step, layer)
            self._locked[:] = False
        self._locked[layer, event.active] = True
        waiting = set(self._turns)  # of an earlier micro-batch: its Run takes the rows of both
        self._turns.extend((layer, expert) for expert in event.active if (layer, expert) not in waiting)

    def go_on(self, view: View) -> list[Action]:
        """Run what is there until an expert is not; begin its copy."""
        actions: list[Action] = []
        while self._turns and self._loading is None:
            unit = layer, expert = self._turns.popleft()
            self._visits[unit] += 1
            if not view.is_resident(layer, expert, self._gpu):
                self._loading = unit
            # Of a resident a Fetch does nothing, unless it is evicted before a decision takes effect.
            actions += [Fetch(layer, (expert,), self._gpu, DEMAND), Run(layer, (expert,), self._gpu)]
        return actions

    def ranks(self) -> Any:
        """Return what cached experts are ranked by, (n_layers, n_experts); the lowest goes first."""
        return self._visits

    def evict(self, fetch: Fetch, view: View) -> Unit | None:
        """Name the lowest expert that is not locked; else of those that have run; else of those that the layer still needs."""
        return self.lowest(self._cached & ~self._locked, view) or self.of_the_layer(view)

    def of_the_layer(self, view: View) -> Unit | None:
        """Return the lowest expert where all others are locked: a cache may be smaller than what one layer uses."""
        may_go = self._cached.copy()
        if self._turns:
            may_go[tuple(zip(*self._turns, strict=True))] = False
        return self.lowest(may_go, view) or self.lowest(self._cached.copy(), view)

    def lowest(self, may_go: Any, view: View) -> Unit | None:
        """Return the lowest of some cached experts that is not in use, and forget it."""
        while (unit := least_visited(self.ranks(), may_go)) is not None:
            if not view.is_in_use(*unit, self._gpu):
                self._cached[unit] = False
                return unit
            may_go[unit] = False
        return None
