"""Replacement parts: what leaves the cache when something else wants its place.

Residency is always asked of the view. What a part keeps is only an order or a count, so it cannot go out of step.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Container, Iterable, Sequence
from typing import Annotated, Any, Final, Literal, cast

from pydantic import Field

from moesim.policies.base import CACHE, Future, layer_residents, scramble
from moesim.policies.options import option
from moesim.policies.parts import Part, Setup, Swap, Unit
from moesim.policy import DEMAND, UPDATE, Fetch, Routed, View

UNROUTED_FIRST: Final = "unrouted-first"
Victims = Annotated[
    Literal["unrouted-first", "idle"],
    Field(
        description="Routed experts of the present layer visit are named only if there are no others, or like any other; they leave "
        "after their run."
    ),
]
UseOrder = Annotated[
    Literal["rank", "id"],
    Field(
        description="Of the experts of one row, the last-ranked counts as used last. Of several rows, which have no common ranks, "
        "and with ``id`` always, what is loaded counts as used after what was cached, each by ascending id: as they are executed."
    ),
]
LfuTies = Annotated[
    Literal["last-use", "id"],
    Field(description="Of equals the one used longest ago, or the one of the lowest layer and id, as a scan finds it."),
]
WindowSize = Annotated[
    int,
    Field(ge=1, description="Visits of a layer in a window; a prefill chunk is one, and so is a decode step of the whole batch."),
]
WindowSwaps = Annotated[int, Field(ge=0, description="Experts replaced at its end.")]
Firing = Annotated[
    Literal["default", "printed"],
    Field(description="At the end of each window, or, as the algorithm is printed, after visits 0, w, 2 w ..."),
]
OnlyIfBetter = Annotated[bool, Field(description="Keep a resident unless its newcomer served more rows.")]
Blocking = Annotated[bool, Field(description="The update's copies queue as demand, so that later demand loads wait for them.")]
Relabel = Annotated[bool, Field(description="A newcomer that is on the GPU as a transient copy is kept instead of copied again.")]


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
    """Return the first unit on a GPU, a spared one only if no other is; None if there is none."""
    is_resident = view.is_resident
    routed = []
    for unit in ranked:
        if unit in spared:
            routed.append(unit)
        elif is_resident(*unit, gpu):
            return unit
    return next((unit for unit in routed if is_resident(*unit, gpu)), None)


def order_of_use(event: Routed) -> Sequence[int]:
    """Return the active experts in the order of use: one row's by rank, several rows' by id.

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


class Admitting(Part):
    """Demand loads enter the cache; keeps the cached experts of each pool in order of insertion."""

    admits = True

    victims: Victims = option(UNROUTED_FIRST)

    def start(self, setup: Setup, residents: Sequence[Sequence[int]] = ()) -> None:
        self._gpu = setup.gpu
        self._per_layer = setup.per_layer
        self._visit = PresentVisit()
        self._members: list[dict[Unit, None]] = [{} for _ in range(setup.view.model.n_layers)]
        for layer, experts in enumerate(residents):
            self.inserted(layer, experts)

    def used(self, event: Routed) -> None:
        self._visit.add(event)

    def inserted(self, layer: int, experts: Sequence[int]) -> None:
        members = self.members(layer)
        for expert in experts:
            members.pop((layer, expert), None)
            members[layer, expert] = None

    def layer_end(self, step: int, layer: int) -> Swap | None:
        return None

    def members(self, layer: int) -> dict[Unit, None]:
        """Return possible victims of a fetch for a layer, in order of insertion, as keys of a dict.

        In one pool for all layers these are of all layers. `victim` deletes the one that it names.
        """
        return self._members[layer if self._per_layer else 0]

    def first_resident(self, ranked: Iterable[Unit], view: View) -> Unit | None:
        """Return the first member there that ``victims`` does not protect, or None."""
        return first_resident(ranked, self._visit.units if self.victims == UNROUTED_FIRST else (), self._gpu, view)


class FIFO(Admitting):
    """The one that has been in the cache longest."""

    def inserted(self, layer: int, experts: Sequence[int]) -> None:
        """Put what is fetched at the end; a prefetch on its way that is asked for keeps its place."""
        members = self.members(layer)
        super().inserted(layer, [expert for expert in experts if (layer, expert) not in members])

    def victim(self, fetch: Fetch, view: View) -> Unit | None:
        members = self.members(fetch.layer)
        unit = self.first_resident(members, view)
        if unit is not None:
            del members[unit]
        return unit


class LRU(FIFO):
    """The one whose last use is longest ago; being fetched ahead counts as a use.

    The active experts of a layer are marked together, before anything is evicted for that layer, so that all others go first.
    """

    victims: Victims = UNROUTED_FIRST
    use_order: UseOrder = option("rank")

    def start(self, setup: Setup, residents: Sequence[Sequence[int]] = ()) -> None:
        self._present: list[Unit] = []  # what a single row that was routed last uses, by rank
        super().start(setup, residents)

    def used(self, event: Routed) -> None:
        super().used(event)
        layer = event.layer
        by_rank = self.use_order == "rank" and len(event.experts) == 1
        units = [(layer, expert) for expert in (order_of_use(event) if by_rank else event.active)]
        self._present = units if by_rank else []
        self._mark(layer, units)

    def inserted(self, layer: int, experts: Sequence[int]) -> None:
        """Put prefetches at the recent end, and demand loads in the visit's order of use."""
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

    seed: int = option(0, "Of the draws.")

    def start(self, setup: Setup, residents: Sequence[Sequence[int]] = ()) -> None:
        super().start(setup, residents)
        self._asked = 0

    def victim(self, fetch: Fetch, view: View) -> Unit | None:
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

    def start(self, setup: Setup, residents: Sequence[Sequence[int]] = ()) -> None:
        """Keep nothing."""

    def used(self, event: Routed) -> None:
        """Take no note."""

    def inserted(self, layer: int, experts: Sequence[int]) -> None:
        """Take no note: what is prefetched into free slots stays."""

    def victim(self, fetch: Fetch, view: View) -> Unit | None:
        return None

    def layer_end(self, step: int, layer: int) -> Swap | None:
        return None


def workload_aware_swap(
    scores: Sequence[int], resident: Iterable[int], u_size: int, only_if_better: bool = False
) -> tuple[list[int], list[int]]:
    """Choose the replacements of DALI's Algorithm 2 at a window's end, by rows served in it.

    The victims are the lowest residents (lowest first), the newcomers the highest non-residents (highest first), ``u_size`` pairs or
    fewer. ``only_if_better`` keeps a resident unless its newcomer's score is higher; the paper swaps in any case.

    >>> workload_aware_swap([5, 0, 1, 7, 4, 0, 6, 2], [0, 1, 2, 3], u_size=2)
    ([1, 2], [6, 4])
    """
    inside = sorted(set(resident))
    member = set(inside)
    outside = [expert for expert in range(len(scores)) if expert not in member]
    count = min(u_size, len(inside), len(outside))
    victims = sorted(inside, key=lambda expert: scores[expert])[:count]
    newcomers = sorted(outside, key=lambda expert: -scores[expert])[:count]
    if only_if_better:
        better = [(out, new) for out, new in zip(victims, newcomers, strict=True) if scores[new] > scores[out]]
        return [out for out, _ in better], [new for _, new in better]
    return victims, newcomers


class WorkloadAware(Static):
    """DALI's Algorithm 2: every window, the residents with the fewest rows are replaced."""

    w_size: WindowSize = option(4)
    u_size: WindowSwaps = option(1)
    firing: Firing = option("default")
    only_if_better: OnlyIfBetter = option(False)
    blocking: Blocking = option(False)
    relabel: Relabel = option(False)

    def start(self, setup: Setup, residents: Sequence[Sequence[int]] = ()) -> None:
        model = setup.view.model
        self._gpu = setup.gpu
        self._scores = [[0] * model.n_experts for _ in range(model.n_layers)]
        self._visits = [0] * model.n_layers
        self._members = [set(experts) for experts in residents]

    def used(self, event: Routed) -> None:
        scores, loads = self._scores[event.layer], event.rows
        for expert in event.active:
            scores[expert] += loads[expert]

    def layer_end(self, step: int, layer: int) -> Swap | None:
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


class _Ranked(Admitting):
    """Members by a rank that changes when used: the lowest goes first, then the least recent."""

    # Within a visit, experts count as used in the order of `order_of_use`; being fetched ahead counts as a use.

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

    ties: LfuTies = option(
        "last-use", "Of equals the one used longest ago, or the one of the lowest layer and id, as a scan finds it."
    )

    def start(self, setup: Setup, residents: Sequence[Sequence[int]] = ()) -> None:
        model = setup.view.model
        self._counts = [[0] * model.n_experts for _ in range(model.n_layers)]
        super().start(setup, residents)

    def used(self, event: Routed) -> None:
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
        self._future = future

    def start(self, setup: Setup, residents: Sequence[Sequence[int]] = ()) -> None:
        self._now = (-1, -1)
        super().start(setup, residents)

    def used(self, event: Routed) -> None:
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
