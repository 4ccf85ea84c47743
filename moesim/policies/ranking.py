"""Replacement parts that go by a rank of each expert: LFU, and Belady's optimum."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any, Literal

from moesim.policies.base import Future
from moesim.policies.parts import Setup, Unit
from moesim.policies.parts.replacement import Admitting
from moesim.policies.visit import order_of_use
from moesim.policy import Fetch, Routed, View

LfuTies = Literal["last-use", "id"]


class _Ranked(Admitting):
    """Members by a rank that changes only when they are used: the lowest goes first, of equals the one used longest ago.

    Within a visit, experts count as used in the order of `order_of_use`; being fetched ahead counts as a use.
    """

    def start(self, setup: Setup, residents: Sequence[Sequence[int]] = ()) -> None:
        self._orders: dict[int, list[tuple[Any, Unit]]] = {}  # pool -> its members by rank, made at the first question
        self._ranks: dict[Unit, Any] = {}
        self._last: dict[Unit, int] = {}  # the number of its last use
        self._n_uses = 0
        super().start(setup, residents)

    def used(self, event: Routed) -> None:
        super().used(event)
        layer = event.layer
        for expert in order_of_use(event):
            self._n_uses += 1
            self._last[layer, expert] = self._n_uses
        self._renew(layer, event.active)

    def inserted(self, layer: int, experts: Sequence[int]) -> None:
        super().inserted(layer, experts)
        for unit in ((layer, expert) for expert in experts):
            if unit not in self._visit.units:
                self._n_uses += 1
                self._last[unit] = self._n_uses
        self._renew(layer, experts)

    def victim(self, fetch: Fetch, view: View) -> Unit | None:
        at = fetch.layer if self._per_layer else 0
        members, ranks = self._members[at], self._ranks
        order = self._orders.get(at)
        if order is None:
            ranks.update((unit, self._rank(unit)) for unit in members)
            order = self._orders[at] = sorted((ranks[unit], unit) for unit in members)
        found = self.first_resident((unit for _, unit in order), view)
        if found is not None:
            del order[bisect_left(order, (ranks[found], found))], ranks[found], members[found]
        return found

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
    """The one used in the fewest layer visits since the start, whether cached or not."""

    ties: LfuTies = "last-use"
    """Of equals the one used longest ago, or the one of the lowest layer and id, as a scan finds it."""

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

    def _rank(self, unit: Unit) -> tuple[int, int]:
        return self._counts[unit[0]][unit[1]], self._last[unit] if self.ties == "last-use" else 0


class Belady(_Ranked):
    """The one whose next use is farthest in the future; of equals the one used longest ago."""

    needs = frozenset({"oracle:routing"})
    _future: Future | None = None

    def bind_oracle(self, future: Future) -> None:
        """Keep the future."""
        self._future = future

    def start(self, setup: Setup, residents: Sequence[Sequence[int]] = ()) -> None:
        """Begin before the first step."""
        self._now = (-1, -1)
        super().start(setup, residents)

    def used(self, event: Routed) -> None:
        """Remember the present step and layer."""
        self._now = (event.step, event.layer)
        super().used(event)

    def _rank(self, unit: Unit) -> tuple[int, int, int]:
        if self._future is None:
            raise RuntimeError("belady: bind_oracle was not called before the run")
        step, layer = self._now
        of_layer, expert = unit
        # A layer that is still to come in this step may use it in this very step.
        next_use = self._future.next_use(of_layer, expert, step if of_layer <= layer else step - 1)
        return -next_use, -of_layer, self._last[unit]
