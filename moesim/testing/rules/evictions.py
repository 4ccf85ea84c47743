"""Check of who left the cache for each copy, by the rule over all that was there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import Any, NamedTuple, Protocol

from moesim.testing.rules.facts import Copied, Facts, Load, Visit, copied


class CacheRule(Protocol):
    """A rule that hears what happens, and names who leaves a cache as a copy takes a place."""

    at_issue: bool
    """Victims are named as a copy is ordered; else as it starts."""
    pools: Collection[str]
    """Whose copies are the cache's: of those that leave from others none was."""
    written_back: bool
    """A victim leaves once it is copied back, at the latest as its layer is visited again."""

    there: Collection[Copied]
    """The members of the cache of a layer as it is routed."""

    def routed(self, visit: Visit) -> None:
        """Hear of a routed micro-batch."""

    def entered(self, unit: Copied) -> None:
        """Hear that a copy was ordered into the cache, or is there at the start."""

    def victims(self, newcomer: Copied, there: Collection[Copied]) -> Collection[Copied]:
        """Return who of those that are there may leave for a newcomer."""

    def left(self, unit: Copied) -> None:
        """Hear that a copy has left, or is to."""


class Judged(NamedTuple):
    """One decision of a run next to what its rule says."""

    kind: str  # "eviction" | "admission" | "prefetch" | "assignment"
    phase: str
    ok: bool
    why: str  # of one that is not: "in use" (the rule's choice was, and was passed over) or "other"
    text: str


class _Pool:
    """Members of one cache by its decisions, there or on their way, without named victims."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.members: dict[Copied, int] = {}  # with their bytes
        self.ruled: set[Copied] = set()  # as the rule would have them since the last visit
        self.arrives: dict[Copied, int] = {}
        self.going: list[int] = []  # times at which those leave that have been named

    def full(self, n_bytes: int) -> bool:
        return sum(self.members.values()) + n_bytes > self.capacity


def judged_evictions(facts: Facts, rule: CacheRule) -> list[Judged]:
    """Replay a cache rule, and judge every copy that left for another one."""
    # With each visit the rule begins from what is there; until the next it decides over what its own decisions leave.
    # A copy that was named while in use leaves later, at the latest as the visit of its layer ends; so a departure
    # belongs to the decision at whose time it happened, else to one before it.
    return _Replay(facts, rule).run()


class _Replay:
    def __init__(self, facts: Facts, rule: CacheRule) -> None:
        self._facts, self._rule = facts, rule
        self._pools = [_Pool(n_bytes) for n_bytes in facts.capacity]
        for unit in facts.start:
            self._take(unit, facts.model.expert_bytes(unit[0]), 0)
            rule.entered(unit)
        self._gone = defaultdict(list)  # of each cache, who leaves and when; each is taken out as it is accounted for
        for gone in facts.departures:
            if gone.pool in rule.pools:
                self._gone[self._at(copied(gone))].append((copied(gone), gone.time, gone.reason))
        self._last = {self._at((visit.layer, -1)): visit.time for visit in facts.visits}  # who leaves after it, nobody sees
        self._found: list[Judged] = []

    def _at(self, unit: Copied) -> int:
        return unit[0] if self._facts.per_layer else 0

    def _take(self, unit: Copied, n_bytes: int, arrives: int) -> None:
        pool = self._pools[self._at(unit)]
        pool.members[unit] = n_bytes
        pool.ruled.add(unit)
        pool.arrives[unit] = arrives

    def run(self) -> list[Judged]:
        rule = self._rule
        loads = [load for load in self._facts.loads if load.pool in rule.pools or not load.pool]
        events: list[tuple[int, int, int, Any]] = [(visit.time, 0, 0, visit) for visit in self._facts.visits]
        events += [(self._when(load), 1, load.fetch, load) for load in loads]
        events += [(self._when(load) if rule.at_issue else load.start, 2, load.fetch, load) for load in loads]
        for time, what, _, fact in sorted(events, key=lambda event: event[:3]):
            if isinstance(fact, Visit):
                pool = self._pools[self._at((fact.layer, -1))]
                pool.ruled = set(pool.members)
                rule.there = {unit for unit in pool.members if pool.arrives[unit] <= time}
                rule.routed(fact)
            elif what == 1:
                rule.entered(fact.copy)
            else:
                self._decide(fact, time)
        for at, gone in self._gone.items():  # nobody came for whom they left
            self._found += [self._judge(time, unit, None, ()) for unit, time, reason in gone if reason == "evict"]
            del at
        return self._found

    def _when(self, load: Load) -> int:
        """Return when a copy was ordered into the cache, or, if it waited elsewhere, routed to."""
        return self._facts.wanted_at(load) if self._rule.written_back else load.submitted

    def _decide(self, load: Load, time: int) -> None:
        at = self._at(load.copy)
        pool, gone = self._pools[at], self._gone[at]
        for each in [each for each in gone if each[1] < time]:  # for no newcomer: what was given up
            gone.remove(each)
            pool.ruled.discard(each[0])
            self._leave(pool, each[0])
        while pool.full(load.n_bytes):
            there = [unit for unit in pool.ruled if pool.arrives[unit] <= time or self._rule.written_back]
            allowed = self._rule.victims(load.copy, there) if there or not self._rule.at_issue else list(pool.ruled)
            pool.going = [when for when in pool.going if when >= time]
            now = [each for each in gone if each[1] == time and each[0] in pool.members]
            later = [each for each in gone if each[0] in pool.members and self._in_time(each, time)]
            later = [each for i, each in enumerate(later) if each[0] not in {unit for unit, _, _ in later[:i]}]
            one_leaves = set(pool.members.values()) == {load.n_bytes} and not self._rule.at_issue
            if now and not pool.going and one_leaves:
                later = now[:1]  # nobody else can have been named for this copy
            taken = next((each for each in later if each[0] in allowed), later[0] if later else None)
            if taken is None:  # the run ends before, or nobody leaves
                if time < self._last[at]:
                    self._found.append(self._judge(time, None, load.copy, allowed))
                break
            gone.remove(taken)
            pool.going.append(taken[1])
            self._found.append(self._judge(time, taken[0], load.copy, allowed))
            pool.ruled.difference_update((taken[0],) if taken[0] in allowed else list(allowed)[:1])
            self._leave(pool, taken[0])
        self._take(load.copy, load.n_bytes, load.end)

    def _in_time(self, gone: tuple[Copied, int, str], time: int) -> bool:
        layer = gone[0][0]
        until = self._facts.next_visit(layer, time) if self._rule.written_back else self._facts.visit_end(layer, time)
        return gone[1] <= until

    def _leave(self, pool: _Pool, unit: Copied) -> None:
        if pool.members.pop(unit, None) is not None:
            self._rule.left(unit)

    def _judge(self, time: int, unit: Copied | None, newcomer: Copied | None, allowed: Collection[Copied]) -> Judged:
        ok = unit is not None and unit in allowed
        why = "" if ok else "in use" if any(self._facts.in_use((one[0], one[1]), time) for one in allowed) else "other"
        text = f"at {time} {unit} left for {newcomer}; by the rule {sorted(allowed)[:4]}"
        return Judged("eviction", self._facts.phase(time), ok, why, text)
