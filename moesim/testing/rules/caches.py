"""Rules that name who leaves a cache, transcribed from papers and from released code."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy as np

from moesim.policy import CACHE
from moesim.testing.rules.facts import Facts, Unit, Visit
from moesim.trace.workload.compose import LayerRouting

EPSILON = 1e-9  # scores closer than this are equal: sums of floating-point numbers depend on their order


def lowest(units: Iterable[Unit], key: Callable[[Unit], Any]) -> list[Unit]:
    """Return all units with the smallest key; almost equal floats count as equal."""
    keyed = [(key(unit), unit) for unit in units]
    if not keyed:
        return []
    least = min(value for value, _ in keyed)
    close = isinstance(least, float)
    return [unit for value, unit in keyed if value == least or (close and abs(value - least) <= EPSILON * max(1.0, abs(least)))]


class Rule:
    """Base of most rules: a clock of uses, and what the present visit is routed to."""

    at_issue = False
    guesses_first = False
    """Of what is not in the cache, what was fetched ahead takes its place before what is loaded."""
    pools: Collection[str] = (CACHE,)
    written_back = False
    there: Collection[Unit] = ()
    spares_routed = False
    """Experts of the present layer visit go only if nothing else is there."""
    in_load_order = False
    """Experts of several rows that are loaded count as used in the order of their loads, not by id."""
    by_rank = True
    """The experts of a visit of one row count as used by rank; else, and of several rows, by id, what is loaded last."""

    def __init__(self, facts: Facts, **options: Any) -> None:
        self.facts = facts
        self.clock = 0
        self.used: dict[Unit, int] = {}  # clock of the last use
        self.inserted: dict[Unit, int] = {}  # clock of the last insertion
        self.visit: Visit | None = None
        self.routed_now: set[Unit] = set()
        self.ranked = False
        for name, value in options.items():
            setattr(self, name, value)
        self.begin(facts)

    def begin(self, facts: Facts) -> None:
        """Prepare what the rule keeps."""

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    def routed(self, visit: Visit) -> None:
        same = self.visit is not None and (self.visit.step, self.visit.layer) == (visit.step, visit.layer)
        self.routed_now = (self.routed_now if same else set()) | set(visit.units)
        self.visit = visit
        self.mark(visit)
        self.count(visit)

    def mark(self, visit: Visit) -> None:
        ids = visit.routing.experts
        ranked = self.ranked = self.by_rank and len(ids) == 1
        ahead = visit.hits | visit.coming if self.guesses_first else ()
        by_id = sorted(visit.routing.active, key=lambda e: ((visit.layer, e) not in self.there, e not in ahead, e))
        order = ids[0].tolist() if ranked else by_id
        for expert in order:
            self.used[visit.layer, expert] = self.tick()

    def count(self, visit: Visit) -> None:
        """Count what the rule counts."""

    def entered(self, unit: Unit) -> None:
        self.inserted[unit] = self.tick()
        if unit not in self.routed_now or (self.in_load_order and not self.ranked):
            self.used[unit] = self.tick()

    def left(self, unit: Unit) -> None:
        """Forget nothing."""

    def victims(self, newcomer: Unit, there: Collection[Unit]) -> Collection[Unit]:
        if self.spares_routed:
            there = [unit for unit in there if unit not in self.routed_now] or there
        return lowest(there, self.key)

    def key(self, unit: Unit) -> Any:
        raise NotImplementedError


class LRU(Rule):
    """The one whose last use is longest ago."""

    def key(self, unit: Unit) -> int:
        return self.used.get(unit, 0)


class FIFO(Rule):
    """The one that has been there longest."""

    def key(self, unit: Unit) -> int:
        return self.inserted.get(unit, 0)


class Whoever(Rule):
    """Whoever: a random choice."""

    def key(self, unit: Unit) -> int:
        return 0


class LFU(Rule):
    """The one used in the fewest layer visits since the start, whether cached or not."""

    scan = False
    """Of equals the first strict minimum of a scan expert by expert, within it layer by layer; else any."""

    def begin(self, facts: Facts) -> None:
        self.counts: dict[Unit, int] = defaultdict(int)

    def count(self, visit: Visit) -> None:
        for unit in visit.units:
            self.counts[unit] += 1

    def key(self, unit: Unit) -> Any:
        return (self.counts[unit], unit[1], unit[0]) if self.scan else self.counts[unit]


class Belady(Rule):
    """The one whose next use is farthest in the future."""

    def key(self, unit: Unit) -> int:
        return -self.facts.next_use(unit, self.visit) if self.visit else 0


class MRS(Rule):
    """HybriMoE, eq. 3: S <- alpha TopP(s) + (1 - alpha) S at each visit, the smallest S leaves."""

    alpha, p, tokens, credit = 0.5, None, "mean", "own"

    def begin(self, facts: Facts) -> None:
        self.s = np.zeros((facts.model.n_layers, facts.model.n_experts))

    def count(self, visit: Visit) -> None:
        routing, n_experts = visit.routing, self.facts.model.n_experts
        p = self.p or 2 * self.facts.model.top_k
        scores = _scores(routing, n_experts)
        if routing.scores is None:
            p = min(p, self.facts.model.top_k)
        if self.tokens == "first":
            scores = scores[:1]
        credited = np.zeros_like(scores)
        for row, given in zip(scores, credited, strict=True):
            best = np.argsort(-row, kind="stable")[:p]
            if self.credit == "by-id":
                given[np.sort(best)] = row[best]
            else:  # of scores equal to the p-th all count: how the paper breaks ties is not stated
                given[:] = np.where(row >= row[best[-1]], row, 0)
        self.s[visit.layer] = self.alpha * credited.mean(axis=0) + (1 - self.alpha) * self.s[visit.layer]

    def key(self, unit: Unit) -> float:
        return float(self.s[unit])


class LayerDistance(LRU):
    """EdgeMoE as described: the least recent of the layer farthest from the present one."""

    distance = "next-pass"

    def key(self, unit: Unit) -> Any:
        now, n_layers = (self.visit.layer if self.visit else self.facts.model.n_layers - 1), self.facts.model.n_layers
        if self.distance == "next-pass":
            return -((unit[0] - now - 1) % n_layers), super().key(unit)
        return -abs(unit[0] - now), unit[0] > now, super().key(unit)


class TwoGenerations(Rule):
    """Stale ones first, then fresh ones, oldest first; a pass makes all stale, a hit fresh."""

    prefetched = "fresh"

    def begin(self, facts: Facts) -> None:
        self.step = -1
        self.fresh: set[Unit] = set()
        self.order: dict[Unit, int] = {}

    def routed(self, visit: Visit) -> None:
        if visit.step != self.step:
            self.step, self.fresh = visit.step, set()
        super().routed(visit)
        for unit in visit.units:
            if unit in self.there and unit not in self.fresh:
                self.fresh.add(unit)
                self.order[unit] = self.tick()

    def entered(self, unit: Unit) -> None:
        self.order[unit] = self.tick()
        if self.step >= 0 and (unit in self.routed_now or self.prefetched == "fresh"):
            self.fresh.add(unit)
        else:
            self.fresh.discard(unit)

    def key(self, unit: Unit) -> Any:
        return unit in self.fresh, self.order.get(unit, 0)


class Directory(Rule):
    """A rule that decides as something is requested: whom it has let go waits to leave."""

    # Resident experts are requested by ascending id, then loaded ones in their order.

    def begin(self, facts: Facts) -> None:
        sizes = [n // facts.model.expert_bytes(0) for n in facts.capacity]
        self.lists = [self.make(size) for size in sizes]
        self.waiting: list[dict[Unit, None]] = [{} for _ in sizes]

    def make(self, size: int) -> Any:
        raise NotImplementedError

    def count(self, visit: Visit) -> None:
        at = visit.layer if self.facts.per_layer else 0
        there = self.lists[at]
        for unit in visit.units:
            if there.holds(unit) or unit in self.waiting[at]:
                self.request(at, unit)

    def entered(self, unit: Unit) -> None:
        at = unit[0] if self.facts.per_layer else 0
        if not self.lists[at].holds(unit):
            self.request(at, unit)

    def request(self, at: int, unit: Unit) -> None:
        gone = self.lists[at].request(unit, self.routed_now if self.spares_routed else set())
        self.waiting[at].pop(unit, None)
        if gone is not None:
            self.waiting[at][gone] = None

    def victims(self, newcomer: Unit, there: Collection[Unit]) -> Collection[Unit]:
        waiting = self.waiting[newcomer[0] if self.facts.per_layer else 0]
        return [unit for unit in waiting if unit in there]

    def left(self, unit: Unit) -> None:
        self.waiting[unit[0] if self.facts.per_layer else 0].pop(unit, None)


def oldest(queue: Iterable[Unit], spared: Collection[Unit]) -> Unit | None:
    """Return the first that is not spared."""
    return next((unit for unit in queue if unit not in spared), None)


class ArcLists:
    """ARC (Megiddo and Modha, FAST 2003, fig. 4), or, with ``fate``, as Fate's port changes it."""

    def __init__(self, size: int, fate: bool) -> None:
        self.c, self.fate, self.p = size, fate, 0.0
        self.t1, self.t2, self.b1, self.b2 = ({} for _ in range(4))  # type: ignore[var-annotated]

    def holds(self, unit: Unit) -> bool:
        return unit in self.t1 or unit in self.t2

    def request(self, unit: Unit, spared: Collection[Unit]) -> Unit | None:
        t1, t2, b1, b2, c = self.t1, self.t2, self.b1, self.b2, self.c
        if self.holds(unit):
            t1.pop(unit, None)
            t2.pop(unit, None)
            t2[unit] = None
            return None
        if unit in b1:
            self.p = min(c, self.p + (len(t1) if self.fate else max(len(b2) / len(b1), 1)))
            gone = self.replace(False, spared)
            del b1[unit]
            t2[unit] = None
            return gone
        if unit in b2:
            self.p = max(0, self.p - (len(t2) if self.fate else max(len(b1) / len(b2), 1)))
            gone = self.replace(not self.fate, spared)
            del b2[unit]
            t2[unit] = None
            return gone
        gone = None
        total = len(t1) + len(t2) + len(b1) + len(b2)
        if len(t1) + len(b1) == c:
            if len(t1) < c:
                del b1[next(iter(b1))]
                gone = self.replace(False, spared)
            else:
                gone = oldest(t1, spared) or next(iter(t1))
                del t1[gone]
        elif total >= c:
            if total >= 2 * c:
                ghosts = b1 if self.fate and b1 else b2
                del ghosts[next(iter(ghosts))]
            gone = self.replace(False, spared)
        t1[unit] = None
        return gone

    def replace(self, of_b2: bool, spared: Collection[Unit]) -> Unit | None:
        first = bool(self.t1) and (len(self.t1) > self.p or (of_b2 and len(self.t1) == self.p))
        lists = [(self.t1, self.b1), (self.t2, self.b2)]
        if not first:
            lists.reverse()
        for allowed in (spared, ()):
            for there, ghosts in lists:
                gone = oldest(there, allowed)
                if gone is not None:
                    del there[gone]
                    ghosts[gone] = None
                    return gone
        return None


class Arc(Directory):
    """ARC, canonical or Fate's."""

    variant = "canonical"

    def make(self, size: int) -> ArcLists:
        return ArcLists(size, self.variant == "fate")


class S3Lists:
    """S3-FIFO (Yang et al., SOSP 2023) with the constants of moe-speed-of-light's simulator."""

    def __init__(self, size: int) -> None:
        self.n_small = max(1, (size + 5) // 10)
        self.n_main, self.size = size - self.n_small, size
        self.small: dict[Unit, int] = {}
        self.main: dict[Unit, int] = {}
        self.ghost: dict[Unit, None] = {}

    def holds(self, unit: Unit) -> bool:
        return unit in self.small or unit in self.main

    def request(self, unit: Unit, spared: Collection[Unit]) -> Unit | None:
        for queue in (self.small, self.main):
            if unit in queue:
                queue[unit] = min(3, queue[unit] + 1)
                return None
        gone, known = None, unit in self.ghost
        while len(self.small) + len(self.main) >= self.size:
            gone = self.evict(spared) or self.evict(()) or next(iter({**self.small, **self.main}))
        (self.main if known else self.small)[unit] = 0
        self.ghost.pop(unit, None)
        return gone

    def evict(self, spared: Collection[Unit]) -> Unit | None:
        """Let one go; None if all that are there are spared."""
        while any(unit not in spared for unit in (*self.small, *self.main)):
            from_main = len(self.main) > self.n_main or not self.small
            if oldest(self.main if from_main else self.small, spared) is None:
                from_main = not from_main
            queue = self.main if from_main else self.small
            unit = oldest(queue, spared)
            assert unit is not None
            n = queue.pop(unit)
            if from_main and n > 0:
                self.main[unit] = n - 1
            elif from_main:
                return unit
            elif n > 1:
                self.main[unit] = 0
            else:
                self.ghost[unit] = None
                while len(self.ghost) > max(1, self.n_main):
                    del self.ghost[next(iter(self.ghost))]
                return unit
        return None


class S3Fifo(Directory):
    """S3-FIFO."""

    def make(self, size: int) -> S3Lists:
        return S3Lists(size)


class Thread(LFU):
    """MoE-Infinity's code: the lowest count of visits over all layers, by expert, then layer."""

    # The present layer's experts are locked; if all are, the sources do not say who goes.

    scan = True

    def victims(self, newcomer: Unit, there: Collection[Unit]) -> Collection[Unit]:
        spare = [unit for unit in there if unit not in self.routed_now]
        return lowest(spare, self.key) if spare else there


class Activations(Thread):
    """MoE-Infinity's method: the lowest priority by the past sequence most alike so far."""

    # (p + 1e-8) (1 - (j - l) / (L + 1)), p of that sequence.

    def begin(self, facts: Facts) -> None:
        super().begin(facts)
        stored = facts.tables["activation_matrices"].swapaxes(0, 1).astype(np.float64)
        self.shares = _over(stored, stored.sum(axis=2, keepdims=True))
        self.alike = _over(stored, np.linalg.norm(stored, axis=2, keepdims=True))
        self.matrices: dict[int, Any] = {}
        self.step = -1
        self.likeness: dict[int, Any] = {}  # of each sequence of the step: sum of the cosines of the layers so far
        self.priority = np.zeros((facts.model.n_layers, facts.model.n_experts))

    def count(self, visit: Visit) -> None:
        shape, layer = self.priority.shape, visit.layer
        step = self.facts.workload.steps[visit.step]
        if visit.step != self.step:
            self.step, self.likeness = visit.step, {}
        first = step.micro[visit.mb].first_row
        owners = step.requests[first : first + len(visit.routing.experts)].tolist()
        for owner, ids in zip(owners, visit.routing.experts.tolist(), strict=True):
            np.add.at(self.matrices.setdefault(owner, np.zeros(shape))[layer], ids, 1)
        for owner in set(owners):
            row = self.matrices[owner][layer]
            cosines = self.alike[:, layer] @ _over(row, np.linalg.norm(row))
            self.likeness[owner] = self.likeness.get(owner, 0) + cosines
        none = np.zeros(len(self.shares))
        alike = (np.round(self.likeness.get(owner, none), 12) for owner in sorted(set(step.requests.tolist())))
        every = [int(np.argmax(one)) for one in alike]
        far = np.arange(shape[0])[:, None] - layer
        self.priority = np.where(far >= 0, (self.shares[every].mean(axis=0) + 1e-8) * (1 - far / (shape[0] + 1)), 0.0)

    def key(self, unit: Unit) -> Any:
        return float(self.priority[unit])


class FineMoE(Thread):
    """FineMoE's code: the lowest int(probability x visits while cached), without locks."""

    # Nor does it lock the layers that were predicted last.

    prefetch_distance, float_score = 6, False

    def begin(self, facts: Facts) -> None:
        super().begin(facts)
        maps = facts.tables["expert_maps"].astype(np.float64)  # layer, map, expert
        self.maps = _over(maps, maps.sum(axis=2, keepdims=True))
        self.probability = np.zeros((facts.model.n_layers, facts.model.n_experts))
        self.seen: dict[int, list[Any]] = {}  # of each request of the step: the rows so far
        self.protected: range = range(0)

    def count(self, visit: Visit) -> None:
        super().count(visit)
        step, scores = self.facts.workload.steps[visit.step], _scores(visit.routing, self.facts.model.n_experts)
        if visit.layer == 0 and visit.mb == 0:
            self.seen, self.protected = {}, range(0)
        first = step.micro[visit.mb].first_row
        last = {owner: row for row, owner in enumerate(step.requests[first : first + len(scores)].tolist())}
        start, n = visit.layer + 1 + self.prefetch_distance, len(self.probability)
        found = []
        for owner, row in last.items():
            self.seen.setdefault(owner, []).append(scores[row] / scores[row].sum())
            mine = np.concatenate(self.seen[owner])
            theirs = self.maps[: visit.layer + 1].swapaxes(0, 1).reshape(len(self.maps[0]), -1)
            cosines = theirs @ mine / (np.linalg.norm(theirs, axis=1) * np.linalg.norm(mine))
            found.append(self.maps[start:, int(np.argmax(np.round(cosines, 12)))])
        if start < n:
            self.probability[start:] = np.max(found, axis=0)
            self.protected = range(start, n)

    def left(self, unit: Unit) -> None:
        self.counts[unit] = 0
        self.probability[unit] = 0

    def victims(self, newcomer: Unit, there: Collection[Unit]) -> Collection[Unit]:
        idle = [unit for unit in there if unit not in self.routed_now]
        return lowest([unit for unit in idle if unit[0] not in self.protected] or idle or there, self.key)

    def key(self, unit: Unit) -> Any:
        score = self.probability[unit] * self.counts[unit]
        return (float(score) if self.float_score else int(score)), unit


class Hobbit(Rule):
    """HOBBIT as described: the lowest sum of recency, uses, full-width uses and layer nearness."""

    # The forms, each from 0 to 1, are ours. A low copy next to a full one goes first, what was fetched ahead and is
    # awaited last.

    weights = (1.0, 1.0, 1.0, 1.0)

    def begin(self, facts: Facts) -> None:
        self.last: dict[Unit, int] = defaultdict(int)  # steps count from 1
        self.uses: dict[Unit, set[int]] = defaultdict(set)
        self.high: dict[Unit, set[int]] = defaultdict(set)
        self.awaited: set[Unit] = set()
        self.widths: dict[tuple[int, Unit], set[Any]] = defaultdict(set)
        for task in facts.tasks:
            self.widths[task.step, (task.layer, task.expert)].add(task.bits)

    def count(self, visit: Visit) -> None:
        self.awaited = {unit for unit in self.awaited if unit[0] != visit.layer}
        for unit in visit.units:
            if widths := self.widths[visit.step, unit]:  # it was not skipped
                self.last[unit] = visit.step + 1
                self.uses[unit].add(visit.step)
                self.high[unit].update({visit.step} if None in widths else ())

    def entered(self, unit: Unit) -> None:
        if (unit[0], unit[1]) not in self.routed_now:
            self.awaited.add((unit[0], unit[1]))

    def victims(self, newcomer: Unit, there: Collection[Unit]) -> Collection[Unit]:
        needless = [copy for copy in there if len(copy) > 2 and (copy[0], copy[1]) in there]
        others = [copy for copy in there if copy not in needless and (copy[0], copy[1]) not in self.awaited]
        return lowest(needless or others or there, self.key)

    def key(self, unit: Unit) -> float:
        one, now, n = (unit[0], unit[1]), self.visit.step + 1 if self.visit else 1, self.facts.model.n_layers
        near = 1 - ((unit[0] - (self.visit.layer if self.visit else 0) - 1) % n + 1) / n
        parts = self.last[one] / now, len(self.uses[one]) / now, len(self.high[one]) / now, near
        return sum(weight * part for weight, part in zip(self.weights, parts, strict=True))


def _scores(routing: LayerRouting, n_experts: int) -> Any:
    """Return the full scores; the weights of the chosen stand in where a trace has none."""
    if routing.scores is not None:
        return routing.scores.astype(np.float64)
    scores = np.zeros((len(routing.experts), n_experts))
    assert routing.weights is not None, "the policy needs scores or weights"
    np.put_along_axis(scores, routing.experts.astype(np.int64), routing.weights.astype(np.float64), axis=1)
    return scores


def _over(a: Any, b: Any) -> Any:
    return np.divide(a, b, out=np.zeros_like(a), where=np.asarray(b) > 0)
