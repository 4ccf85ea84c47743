"""Replacement parts: what leaves the cache when something else wants its place.

Residency is always asked of the view. What a part keeps is only an order or a count, so it cannot go out of step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

from moesim.policies.algorithms.caching import workload_aware_swap
from moesim.policies.algorithms.drawing import scramble
from moesim.policies.base import CACHE, Range, layer_residents
from moesim.policies.parts import Part, Setup, Swap, Unit
from moesim.policies.visit import UNROUTED_FIRST, PresentVisit, Victims, first_resident, order_of_use
from moesim.policy import DEMAND, UPDATE, Fetch, Routed, View

UseOrder = Literal["rank", "id"]
Firing = Literal["default", "printed"]


class Admitting(Part):
    """Demand loads enter the cache; keeps the cached experts of each pool in order of insertion."""

    admits = True
    swaps = False

    victims: Victims = UNROUTED_FIRST
    """Routed experts of the present layer visit are named only if there are no others, or like any other; they leave after their run."""

    def start(self, setup: Setup, residents: Sequence[Sequence[int]] = ()) -> None:
        self._gpu = setup.gpu
        self._per_layer = setup.per_layer
        self._visit = PresentVisit()
        self._members: list[dict[Unit, None]] = [{} for _ in range(setup.view.model.n_layers)]
        for layer, experts in enumerate(residents):
            self.inserted(layer, experts)

    def used(self, event: Routed) -> None:
        """Take note of the layer visit."""
        self._visit.add(event)

    def inserted(self, layer: int, experts: Sequence[int]) -> None:
        members = self.members(layer)
        for expert in experts:
            members.pop((layer, expert), None)
            members[layer, expert] = None

    def layer_end(self, step: int, layer: int) -> Swap | None:
        """Replace nothing: replacement happens on demand."""
        return None

    def members(self, layer: int) -> dict[Unit, None]:
        """Give the experts among which a fetch for a layer has its victim.

        Parameters
        ----------
        layer : int
            That of the fetch.

        Returns
        -------
        dict of (int, int) to None
            Layer and expert of each as keys, in order of insertion; of all layers if the cache is one pool for all. `victim`
            deletes the one that it names.
        """
        return self._members[layer if self._per_layer else 0]

    def first_resident(self, ranked: Iterable[Unit], view: View) -> Unit | None:
        """Find the first of some members that is there.

        Parameters
        ----------
        ranked : iterable of (int, int)
            Layer and expert of each, in the order in which they should go.
        view : View
            As given to `victim`.

        Returns
        -------
        (int, int) or None
            The first that is there, in use or not, and that the option ``victims`` does not protect; None if there is none.
        """
        return first_resident(ranked, self._visit.units if self.victims == UNROUTED_FIRST else (), self._gpu, view)


class FIFO(Admitting):
    """The one that has been in the cache longest."""

    def inserted(self, layer: int, experts: Sequence[int]) -> None:
        """Put what is fetched at the end; a prefetch on its way that is asked for keeps its place."""
        members = self.members(layer)
        super().inserted(layer, [expert for expert in experts if (layer, expert) not in members])

    def victim(self, fetch: Fetch, view: View) -> Unit | None:
        """Name the first in order of insertion, and forget it."""
        members = self.members(fetch.layer)
        unit = self.first_resident(members, view)
        if unit is not None:
            del members[unit]
        return unit


class LRU(FIFO, fixed=("victims",)):
    """The one whose last use is longest ago; being fetched ahead counts as a use.

    The active experts of a layer are marked together, before anything is evicted for that layer, so that all others go first.
    """

    use_order: UseOrder = "rank"
    """Of the experts of one row, the last-ranked counts as used last. Of several rows, which have no common ranks, and with
    ``id`` always, what is loaded counts as used after what was cached, each by ascending id: as they are executed."""

    def start(self, setup: Setup, residents: Sequence[Sequence[int]] = ()) -> None:
        """Begin with the residents, used in ascending order."""
        self._present: list[Unit] = []  # what a single row that was routed last uses, by rank
        super().start(setup, residents)

    def used(self, event: Routed) -> None:
        """Move the cached ones among the active to the recent end."""
        super().used(event)
        layer = event.layer
        by_rank = self.use_order == "rank" and len(event.experts) == 1
        units = [(layer, expert) for expert in (order_of_use(event) if by_rank else event.active)]
        self._present = units if by_rank else []
        self._mark(layer, units)

    def inserted(self, layer: int, experts: Sequence[int]) -> None:
        """Put what is fetched at the recent end; what is loaded on demand takes its place in the order of the visit."""
        Admitting.inserted(self, layer, experts)
        if self._present and self._present[0][0] == layer:
            self._mark(layer, self._present)

    def _mark(self, layer: int, units: Iterable[Unit]) -> None:
        members = self.members(layer)
        for unit in units:
            if unit in members:
                del members[unit]
                members[unit] = None


class RandomVictim(Admitting):
    """Any resident, with equal chance, from a counter and a seed: the same choices in every run."""

    seed: int = 0
    """Of the draws."""

    def start(self, setup: Setup, residents: Sequence[Sequence[int]] = ()) -> None:
        """Begin with the counter at 0."""
        super().start(setup, residents)
        self._asked = 0

    def victim(self, fetch: Fetch, view: View) -> Unit | None:
        """Draw among the residents, and forget the one drawn."""
        gpu, is_resident = self._gpu, view.is_resident
        members = self.members(fetch.layer)
        routed = self._visit.spared(self.victims)
        for group in ((unit for unit in members if unit not in routed), (unit for unit in members if unit in routed)):
            there = [unit for unit in group if is_resident(*unit, gpu)]
            if there:
                self._asked += 1
                unit = there[scramble((self.seed << 32) + self._asked) % len(there)]
                del members[unit]
                return unit
        return None


class Static(Part):
    """Nothing is ever evicted; demand loads go through the staging pool."""

    admits = False
    swaps = False

    def start(self, setup: Setup, residents: Sequence[Sequence[int]] = ()) -> None:
        """Keep nothing."""

    def used(self, event: Routed) -> None:
        """Take no note."""

    def inserted(self, layer: int, experts: Sequence[int]) -> None:
        """Take no note: what is prefetched into free slots stays."""

    def victim(self, fetch: Fetch, view: View) -> Unit | None:
        """Name none."""
        return None

    def layer_end(self, step: int, layer: int) -> Swap | None:
        """Replace nothing."""
        return None


class WorkloadAware(Static):
    """DALI's Algorithm 2: every window, the residents with the fewest rows make room for those with the most."""

    swaps = True

    w_size: Annotated[int, Range(1)] = 4
    """Visits of a layer in a window; a prefill chunk is one, and so is a decode step of the whole batch."""
    u_size: Annotated[int, Range(0)] = 1
    """Experts replaced at its end."""
    firing: Firing = "default"
    """At the end of each window, or, as the algorithm is printed, after visits 0, w, 2 w ..."""
    only_if_better: bool = False
    """Keep a resident unless its newcomer served more rows."""
    blocking: bool = False
    """The update's copies queue as demand, so that later demand loads wait for them."""
    relabel: bool = False
    """A newcomer that is on the GPU as a transient copy is kept instead of copied again."""

    def start(self, setup: Setup, residents: Sequence[Sequence[int]] = ()) -> None:
        """Begin with empty windows."""
        model = setup.view.model
        self._gpu = setup.gpu
        self._scores = [[0] * model.n_experts for _ in range(model.n_layers)]
        self._visits = [0] * model.n_layers
        self._members = [set(experts) for experts in residents]

    def used(self, event: Routed) -> None:
        """Add the rows of this layer to its window."""
        scores, loads = self._scores[event.layer], event.rows
        for expert in event.active:
            scores[expert] += loads[expert]

    def layer_end(self, step: int, layer: int) -> Swap | None:
        """Replace the u_size lowest residents by the u_size highest others when a window is over."""
        visit = self._visits[layer]
        self._visits[layer] = visit + 1
        if (visit if self.firing == "printed" else visit + 1) % self.w_size:
            return None
        members = self._members[layer]
        victims, newcomers = workload_aware_swap(self._scores[layer], members, self.u_size, self.only_if_better)
        self._scores[layer] = [0] * len(self._scores[layer])
        if not victims:
            return None
        members.difference_update(victims)
        members.update(newcomers)
        return Swap(victims, newcomers, DEMAND if self.blocking else UPDATE, self.relabel)

    def victim(self, fetch: Fetch, view: View) -> Unit | None:
        """Name a copy that was replaced while it was on its way, and then asked for once more."""
        for expert in layer_residents(view, self._gpu, CACHE, fetch.layer):
            if expert not in self._members[fetch.layer] and not view.is_in_use(fetch.layer, expert, self._gpu):
                return fetch.layer, expert
        return None
