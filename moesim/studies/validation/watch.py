"""Policies under observation: whether what they decide could depend on a clock.

What a policy decides is the same in a simulation and in a replay if nothing that it is told or asks for depends on when things
end. That is seen in a run rather than listed by name: see `Watched`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from moesim.policy import Action, Fetch, LayerBegin, LayerEnd, Placement, Policy, Routed, Run, StepBegin, StepEnd, Victim, View

ORDERED: Final = frozenset({StepBegin, LayerBegin, Routed, LayerEnd, StepEnd})
"""Events whose order the workload fixes; when any other comes, a clock says."""

Unit = tuple[int, int]
_NOT_YET: Final = 1 << 30


class Watched:
    """A policy that is observed for anything that could make its decisions depend on a clock.

    Such is: an event whose order a clock decides (`Fetched`, `Ran`, `Sent`, `Predicted`); a look at the time; the news that a
    copy is on its way; and a victim that another moment would have changed. The latter is one before which others were passed
    over because they were in use, or one that the present layer has just used, unless all else that is idle in its pool was to
    be used later: then, at an earlier moment, nothing would have been idle, and the fetch would have waited for the same victim.
    None of this matters in a pool that is empty whenever a layer begins, such as a staging pool: whatever goes first, all goes.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.exact = policy.exact
        self.listens = policy.listens
        self.needs = policy.needs
        self._view = _WatchedView()
        self._found = {f"is told of {event.__name__}" for event in policy.listens - ORDERED}
        self._pools: dict[tuple[str, str], str] = {}  # what was found in each pool
        self._empty: set[tuple[str, str]] = set()  # pools that have been empty at every layer so far
        self._visit = (-1, -1)
        self._order: dict[Unit, int] = {}  # active experts of the visit by their place in the Runs; before those, a high number
        self._per_layer: dict[tuple[str, str], bool] = {}

    def reasons(self) -> list[str]:
        """Say why decisions may depend on a clock; empty if they do not."""
        lasting = {words for pool, words in self._pools.items() if pool not in self._empty}
        return sorted(self._found | lasting)

    def place(self, view: View) -> Placement:
        """Pass on the question for the start; nothing has a time yet."""
        placement = self._policy.place(self._view.of(view))
        self._per_layer = {(pool.device, pool.name): pool.per_layer for pool in placement.pools}
        self._empty = set(self._per_layer)
        self._view.seen.clear()
        return placement

    def decide(self, event: Any, view: View) -> Iterable[Action]:
        """Pass an event on."""
        if type(event) is Routed:
            self._begin(event, view)
        answer = tuple(self._policy.decide(event, self._view.of(view)))
        self._found |= self._view.seen
        self._view.seen.clear()
        for action in answer:
            if type(action) is Run and len(action.experts) and (action.layer, action.experts[0]) in self._order:
                first = sum(place != _NOT_YET for place in self._order.values())
                self._order |= {(action.layer, expert): first + i for i, expert in enumerate(action.experts)}
        return answer

    def _begin(self, event: Routed, view: View) -> None:
        if (event.step, event.layer) != self._visit:
            self._visit = (event.step, event.layer)
            self._order = {}
            self._empty -= {pool for pool in self._empty if view.residents(*pool)}
        self._order |= {(event.layer, expert): _NOT_YET for expert in event.active}

    def evict(self, fetch: Fetch, view: View) -> Victim | None:
        """Pass on the question for a victim."""
        victim = self._policy.evict(fetch, self._view.of(view))
        in_use = self._view.seen & {_WatchedView.PINNED}
        self._found |= self._view.seen - in_use
        self._view.seen.clear()
        if victim is not None:
            unit = victim[0], victim[1]  # any sequence, perhaps with bits
            if in_use:
                self._pools[fetch.device, fetch.pool] = "passes over victims that are in use"
            elif unit in self._order and not self._is_first(unit, fetch, view):
                self._pools[fetch.device, fetch.pool] = "evicts what the layer has used by now"
        return victim

    def _is_first(self, victim: Unit, fetch: Fetch, view: View) -> bool:
        """Whether all else that is idle in the pool was to be used after the victim, in this visit."""
        layer = fetch.layer if self._per_layer[fetch.device, fetch.pool] else None
        held: list[Any] = view.residents(fetch.device, fetch.pool, layer)
        units: list[Unit] = [unit if layer is None else (layer, unit) for unit in held]
        idle = [(at, expert) for at, expert in units if not view.is_in_use(at, expert, fetch.device)]
        return all(self._order.get(unit, -1) >= self._order[victim] for unit in idle)


class _WatchedView:
    """A view that notes which of its answers came from a clock; the rest is passed on."""

    PINNED: Final = "asks whether a copy is in use"

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self._view: Any = None

    def of(self, view: Any) -> Any:
        self._view = view
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)

    @property
    def now_ns(self) -> int:
        self.seen.add("reads the clock")
        return int(self._view.now_ns)

    def remaining_ns(self, layer: int, expert: int, device: str) -> int:
        left = int(self._view.remaining_ns(layer, expert, device))
        if left:
            self.seen.add("asks when a copy arrives")
        return left

    def is_pending(self, layer: int, expert: int, device: str) -> bool:
        pending = bool(self._view.is_pending(layer, expert, device))
        if pending:
            self.seen.add("asks whether a copy is on its way")
        return pending

    def is_in_use(self, layer: int, expert: int, device: str) -> bool:
        pinned = bool(self._view.is_in_use(layer, expert, device))
        if pinned:
            self.seen.add(self.PINNED)
        return pinned

    is_pinned = is_in_use  # the old name, for one version
