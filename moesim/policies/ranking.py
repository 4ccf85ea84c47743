"""Replacement parts that go by a rank of each expert: LFU, and Belady's optimum."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any

from moesim.policies.base import Future
from moesim.policies.parts import Setup, Unit
from moesim.policies.replacement import Admitting
from moesim.policy import Fetch, Routed, View


class _Ranked(Admitting):
    """Members by a rank that changes only when they are used: the lowest goes first."""

    def start(self, setup: Setup, residents: Sequence[Sequence[int]] = ()) -> None:
        self._orders: dict[int, list[tuple[Any, Unit]]] = {}  # pool -> its members by rank, made at the first question
        self._ranks: dict[Unit, Any] = {}
        super().start(setup, residents)

    def used(self, event: Routed) -> None:
        self._renew(event.layer, event.active)

    def inserted(self, layer: int, experts: Sequence[int]) -> None:
        super().inserted(layer, experts)
        self._renew(layer, experts)

    def victim(self, fetch: Fetch, view: View) -> Unit | None:
        at, gpu = fetch.layer if self._per_layer else 0, self._gpu
        order = self._orders.get(at)
        if order is None:
            self._ranks.update((unit, self._rank(unit)) for unit in self._members[at])
            order = self._orders[at] = sorted((self._ranks[unit], unit) for unit in self._members[at])
        for i, (_, unit) in enumerate(order):
            if view.is_resident(*unit, gpu) and not view.is_pinned(*unit, gpu):
                del order[i], self._ranks[unit], self._members[at][unit]
                return unit
        return None

    def _renew(self, layer: int, experts: Sequence[int]) -> None:
        at = layer if self._per_layer else 0
        order, members, ranks = self._orders.get(at), self._members[at], self._ranks
        if order is None:
            return
        for unit in ((layer, expert) for expert in experts):
            if unit in members:
                if unit in ranks:
                    del order[bisect_left(order, (ranks[unit], unit))]
                ranks[unit] = self._rank(unit)
                insort(order, (ranks[unit], unit))

    def _rank(self, unit: Unit) -> Any:
        raise NotImplementedError


class LFU(_Ranked):
    """The one used in the fewest layer visits since the start, whether cached or not; ties to the lower layer and id."""

    def start(self, setup: Setup, residents: Sequence[Sequence[int]] = ()) -> None:
        """Begin with no visit counted."""
        model = setup.view.model
        self._counts = [[0] * model.n_experts for _ in range(model.n_layers)]
        super().start(setup, residents)

    def used(self, event: Routed) -> None:
        """Count one visit for each active expert."""
        counts = self._counts[event.layer]
        for expert in event.active:
            counts[expert] += 1
        super().used(event)

    def _rank(self, unit: Unit) -> int:
        return self._counts[unit[0]][unit[1]]


class Belady(_Ranked):
    """The one whose next use is farthest in the future; ties to the one longest in the cache."""

    needs = frozenset({"oracle:routing"})
    _future: Future | None = None

    def bind_oracle(self, future: Future) -> None:
        """Keep the future."""
        self._future = future

    def start(self, setup: Setup, residents: Sequence[Sequence[int]] = ()) -> None:
        """Begin before the first step."""
        self._now = (-1, -1)
        self._since: dict[Unit, int] = {}  # the number of its last insertion
        self._n_inserted = 0
        super().start(setup, residents)

    def used(self, event: Routed) -> None:
        """Remember the present step and layer."""
        self._now = (event.step, event.layer)
        super().used(event)

    def inserted(self, layer: int, experts: Sequence[int]) -> None:
        """Note the order of insertion, too."""
        for expert in experts:
            self._n_inserted += 1
            self._since[layer, expert] = self._n_inserted
        super().inserted(layer, experts)

    def _rank(self, unit: Unit) -> tuple[int, int, int]:
        if self._future is None:
            raise RuntimeError("belady: bind_oracle was not called before the run")
        step, layer = self._now
        of_layer, expert = unit
        # A layer that is still to come in this step may use it in this very step.
        next_use = self._future.next_use(of_layer, expert, step if of_layer <= layer else step - 1)
        return -next_use, -of_layer, self._since[unit]
