"""Replacement parts: what leaves the cache when something else wants its place.

Residency is always asked of the view. What a part keeps is only an order or a count, so it cannot go out of step.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import Annotated, Literal

from moesim.policies.algorithms.caching import belady_victim, workload_aware_swap
from moesim.policies.base import CACHE, Future, Range, layer_residents
from moesim.policies.parts import Part, Setup, Swap
from moesim.policy import DEMAND, UPDATE, Fetch, Routed, View

_WORD = (1 << 64) - 1


class _Admitting(Part):
    """Demand loads enter the cache; keeps the cached experts of each pool in order of insertion."""

    admits = True

    def start(self, setup: Setup, residents: Sequence[Sequence[int]] = ()) -> None:
        self._gpu = setup.gpu
        self._per_layer = setup.per_layer
        self._members: list[dict[tuple[int, int], None]] = [{} for _ in range(setup.view.model.n_layers)]
        for layer, experts in enumerate(residents):
            self.inserted(layer, experts)

    def used(self, event: Routed) -> None:
        """Take no note."""

    def inserted(self, layer: int, experts: Sequence[int]) -> None:
        members = self._members[layer if self._per_layer else 0]
        for expert in experts:
            members.pop((layer, expert), None)
            members[layer, expert] = None

    def layer_end(self, step: int, layer: int, busy: Container[int] = ()) -> Swap | None:
        """Replace nothing: replacement happens on demand."""
        return None

    def victim(self, fetch: Fetch, view: View) -> tuple[int, int] | None:
        """Choose among the idle residents, and forget the one chosen."""
        unit = self._choose(self._idle(fetch.layer, view))
        if unit is not None:
            del self._members[fetch.layer if self._per_layer else 0][unit]
        return unit

    def _idle(self, layer: int, view: View) -> Iterator[tuple[int, int]]:
        gpu = self._gpu
        for unit in self._members[layer if self._per_layer else 0]:
            if view.is_resident(*unit, gpu) and not view.is_pinned(*unit, gpu):
                yield unit

    def _choose(self, idle: Iterator[tuple[int, int]]) -> tuple[int, int] | None:
        raise NotImplementedError


class FIFO(_Admitting):
    """The one that has been in the cache longest."""

    def _choose(self, idle: Iterator[tuple[int, int]]) -> tuple[int, int] | None:
        return next(idle, None)


class LRU(FIFO):
    """The one whose last use is longest ago; being fetched counts as a use.

    The active experts of a layer are marked together, ascending, before anything is evicted for that layer.
    """

    def used(self, event: Routed) -> None:
        """Move the cached ones among the active to the recent end."""
        layer = event.layer
        members = self._members[layer if self._per_layer else 0]
        for expert in event.active:
            if (layer, expert) in members:
                del members[layer, expert]
                members[layer, expert] = None


class LFU(_Admitting):
    """The one used in the fewest layer visits since the start, whether cached or not; ties to the lower layer and id."""

    def start(self, setup: Setup, residents: Sequence[Sequence[int]] = ()) -> None:
        """Begin with no visit counted."""
        super().start(setup, residents)
        model = setup.view.model
        self._counts = [[0] * model.n_experts for _ in range(model.n_layers)]

    def used(self, event: Routed) -> None:
        """Count one visit for each active expert."""
        counts = self._counts[event.layer]
        for expert in event.active:
            counts[expert] += 1

    def _choose(self, idle: Iterator[tuple[int, int]]) -> tuple[int, int] | None:
        return min(idle, key=lambda unit: (self._counts[unit[0]][unit[1]], unit), default=None)


class RandomVictim(_Admitting):
    """Any idle one, with equal chance, from a counter and a seed: the same choices in every run."""

    def __init__(self, *, seed: int = 0) -> None:
        self.seed = seed

    def start(self, setup: Setup, residents: Sequence[Sequence[int]] = ()) -> None:
        """Begin with the counter at 0."""
        super().start(setup, residents)
        self._asked = 0

    def _choose(self, idle: Iterator[tuple[int, int]]) -> tuple[int, int] | None:
        units = list(idle)
        if not units:
            return None
        self._asked += 1
        return units[_mix((self.seed << 32) + self._asked) % len(units)]


class Belady(_Admitting):
    """The one whose next use is farthest in the future; ties to the one longest in the cache."""

    needs = frozenset({"oracle:routing"})
    _future: Future | None = None

    def bind_oracle(self, future: Future) -> None:
        """Keep the future."""
        self._future = future

    def start(self, setup: Setup, residents: Sequence[Sequence[int]] = ()) -> None:
        """Begin before the first step."""
        super().start(setup, residents)
        self._now = (-1, -1)

    def used(self, event: Routed) -> None:
        """Remember the present step and layer."""
        self._now = (event.step, event.layer)

    def _choose(self, idle: Iterator[tuple[int, int]]) -> tuple[int, int] | None:
        units = list(idle)
        return belady_victim(units, self._next_use) if units else None

    def _next_use(self, unit: tuple[int, int]) -> tuple[int, int]:
        if self._future is None:
            raise RuntimeError("belady: bind_oracle was not called before the run")
        step, layer = self._now
        of_layer, expert = unit
        # A layer that is still to come in this step may use it in this very step.
        return self._future.next_use(of_layer, expert, step if of_layer <= layer else step - 1), of_layer


class Static(Part):
    """Nothing is ever evicted; demand loads go through the staging pool."""

    admits = False

    def start(self, setup: Setup, residents: Sequence[Sequence[int]] = ()) -> None:
        """Keep nothing."""

    def used(self, event: Routed) -> None:
        """Take no note."""

    def inserted(self, layer: int, experts: Sequence[int]) -> None:
        """Take no note: what is prefetched into free slots stays."""

    def victim(self, fetch: Fetch, view: View) -> tuple[int, int] | None:
        """Name none."""
        return None

    def layer_end(self, step: int, layer: int, busy: Container[int] = ()) -> Swap | None:
        """Replace nothing."""
        return None


class WorkloadAware(Static):
    """DALI's Algorithm 2: every window, the residents with the fewest rows make room for those with the most.

    Parameters
    ----------
    w_size : int
        Visits of a layer in a window; a prefill chunk is one, and so is a decode step of the whole batch.
    u_size : int
        Experts replaced at its end.
    firing : {"default", "printed"}
        At the end of each window, or, as the algorithm is printed, after visits 0, w, 2 w ...
    only_if_better : bool
        Keep a resident unless its newcomer served more rows.
    blocking : bool
        The update's copies queue as demand, so that later demand loads wait for them.
    relabel : bool
        A newcomer that is on the GPU as a transient copy is kept instead of copied again.
    """

    def __init__(
        self,
        *,
        w_size: Annotated[int, Range(1)] = 4,
        u_size: Annotated[int, Range(0)] = 1,
        firing: Literal["default", "printed"] = "default",
        only_if_better: bool = False,
        blocking: bool = False,
        relabel: bool = False,
    ) -> None:
        self.w_size = w_size
        self.u_size = u_size
        self.firing = firing
        self.only_if_better = only_if_better
        self.blocking = blocking
        self.relabel = relabel

    def start(self, setup: Setup, residents: Sequence[Sequence[int]] = ()) -> None:
        """Begin with empty windows."""
        model = setup.view.model
        self._gpu = setup.gpu
        self._scores = [[0] * model.n_experts for _ in range(model.n_layers)]
        self._visits = [0] * model.n_layers
        self._members = [set(experts) for experts in residents]

    def used(self, event: Routed) -> None:
        """Add the rows of this layer to its window."""
        scores, loads = self._scores[event.layer], event.loads
        for expert in event.active:
            scores[expert] += loads[expert]

    def layer_end(self, step: int, layer: int, busy: Container[int] = ()) -> Swap | None:
        """Replace the u_size lowest residents by the u_size highest others when a window is over.

        What is ``busy``, on its way to another pool though its layer is over (over a slow link even from a step before), is
        left for a later window: another fetch of it would not change the pool that it arrives in.
        """
        visit = self._visits[layer]
        self._visits[layer] = visit + 1
        if (visit if self.firing == "printed" else visit + 1) % self.w_size:
            return None
        members = self._members[layer]
        victims, newcomers = workload_aware_swap(self._scores[layer], members, self.u_size, self.only_if_better)
        self._scores[layer] = [0] * len(self._scores[layer])
        pairs = [(out, new) for out, new in zip(victims, newcomers, strict=True) if new not in busy]
        if not pairs:
            return None
        victims, newcomers = [out for out, _ in pairs], [new for _, new in pairs]
        members.difference_update(victims)
        members.update(newcomers)
        return Swap(victims, newcomers, DEMAND if self.blocking else UPDATE, self.relabel)

    def victim(self, fetch: Fetch, view: View) -> tuple[int, int] | None:
        """Name a copy that was replaced while it was on its way, and then asked for once more."""
        for expert in layer_residents(view, self._gpu, CACHE, fetch.layer):
            if expert not in self._members[fetch.layer] and not view.is_pinned(fetch.layer, expert, self._gpu):
                return fetch.layer, expert
        return None


def _mix(x: int) -> int:
    """Scramble 64 bits (the finaliser of SplitMix64: Steele, Lea, Flood, OOPSLA 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & _WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _WORD
    return x ^ (x >> 31)
