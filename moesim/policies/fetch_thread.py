"""One thread that fetches experts: MoE-Infinity's dispatcher, which FineMoE has from it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.errors import CapacityError
from moesim.policies.algorithms.activations import least_visited
from moesim.policies.base import CACHE, PolicyBase, gpu_of, slot_bytes
from moesim.policies.parts import Unit
from moesim.policy import DEMAND, PREFETCH, Action, Drop, Fetch, Fetched, Placement, Pool, Routed, Run, StepBegin, View

if TYPE_CHECKING:
    from numpy.typing import NDArray


class FetchThread(PolicyBase):
    """A global cache, empty at the start; the active experts of a layer go to the GPU one after another, by ascending id.

    Each is looked at when the copies of those before it have arrived, so that a hit waits for the misses before it.
    """

    @property
    def listens(self) -> frozenset[type]:
        """Routing and arrivals."""
        return frozenset({Routed, Fetched})

    def place(self, view: View) -> Placement:
        """Return the empty cache."""
        name, model = type(self).__name__, view.model
        self._gpu = gpu_of(view, name)
        self._slots = min(view.cache_slots(self._gpu), model.n_layers * model.n_experts)
        if not self._slots:
            raise CapacityError(f"policy {name} on {self._gpu}: expected at least 1 cache slot, got 0; raise cache.ratio")
        shape = (model.n_layers, model.n_experts)
        self._visits = np.zeros(shape, np.int64, order="F")  # since the start, cached or not
        self._cached = np.zeros(shape, np.bool_, order="F")
        self._locked = np.zeros(shape, np.bool_, order="F")  # what the present layer visit uses
        self._at = (-1, -1)  # step and layer routed last
        self._turns: deque[Unit] = deque()  # active experts that the thread has not come to
        self._loading: Unit | None = None
        return Placement(pools=[Pool(self._gpu, CACHE, self._slots * slot_bytes(view))])

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

    def lowest(self, may_go: NDArray[np.bool_]) -> Unit | None:
        """Return which of some experts should go first: the one used least, scanned expert by expert over all layers."""
        return least_visited(self._visits, may_go)

    def spare(self) -> NDArray[np.bool_]:
        """Return which experts are cached and may go."""
        return np.asarray(self._cached & ~self._locked)

    def evict(self, fetch: Fetch, view: View) -> Unit | None:
        """Name the lowest expert that is not locked; else of those that have run; else of those that the layer still needs."""
        return self.idle(self.spare(), view) or self.of_the_layer(view)

    def of_the_layer(self, view: View) -> Unit | None:
        """Return the lowest expert where all others are locked: a cache may be smaller than what one layer uses."""
        may_go = self._cached.copy()
        if self._turns:
            may_go[tuple(zip(*self._turns, strict=True))] = False
        return self.idle(may_go, view) or self.idle(self._cached.copy(), view)

    def idle(self, may_go: NDArray[np.bool_], view: View) -> Unit | None:
        """Return the lowest of some cached experts that is not in use, and forget it."""
        while (unit := self.lowest(may_go)) is not None:
            if not view.is_in_use(*unit, self._gpu):
                self.gone(unit)
                return unit
            may_go[unit] = False
        return None

    def gone(self, unit: Unit) -> None:
        """Forget an expert that is evicted."""
        self._cached[unit] = False


class PrefetchingThread(FetchThread):
    """The same, with prefetches: one at a time, as long as nothing is awaited on demand."""

    @property
    def listens(self) -> frozenset[type]:
        """Routing, arrivals and steps."""
        return super().listens | {StepBegin}

    def place(self, view: View) -> Placement:
        """Return the empty cache."""
        self._ahead: Unit | None = None  # a prefetch under way
        return super().place(view)

    def go_on(self, view: View) -> list[Action]:
        """Serve the layer; when nothing is awaited, prefetch the best."""
        if self._ahead is not None and self._cached[self._ahead]:
            self._ahead = None
        actions = super().go_on(view)
        if self._loading is not None:
            if self._ahead == self._loading:
                self._ahead = None  # on demand now
            self.awaited(self._at[1])
            return actions + self._forget_passed(view)
        if self._ahead is None and (unit := self.next_ahead()) is not None:
            self._ahead = unit
            actions.append(Fetch(unit[0], (unit[1],), self._gpu, PREFETCH))
        return actions

    def next_ahead(self) -> Unit | None:
        """Take what is to be prefetched next from the queue; None if nothing is, or there is no slot for it."""
        raise NotImplementedError

    def awaited(self, layer: int) -> None:
        """Take note of an on-demand copy for a layer: what is queued for the layers passed is dropped."""

    @property
    def full(self) -> bool:
        """Whether something must go for a copy."""
        return int(np.count_nonzero(self._cached)) >= self._slots

    def _forget_passed(self, view: View) -> list[Action]:
        """Cancel a prefetch for a layer that is passed, if it has not begun."""
        if self._ahead is None:
            return []
        layer, expert = self._ahead
        if layer >= self._at[1] or not view.is_pending(layer, expert, self._gpu):
            return []
        if view.remaining_ns(layer, expert, self._gpu) < view.costs.fetch_ns(view.host, self._gpu, None, layer):
            return []
        self._ahead = None
        return [Drop(layer, (expert,), self._gpu)]

    def evict(self, fetch: Fetch, view: View) -> Unit | None:
        """Name the lowest expert; for a prefetch, none that the present layer uses."""
        return self.idle(self.spare(), view) if fetch.urgency == PREFETCH else super().evict(fetch, view)
