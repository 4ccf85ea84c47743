"""Rules of caches that decide as a whole: who enters, who leaves, who computes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

from moesim.policy import CACHE
from moesim.records import LayerRecord, StepRecord
from moesim.testing.rules.assignments import Costs, judged_assignments
from moesim.testing.rules.caches import ArcLists
from moesim.testing.rules.evictions import Judged
from moesim.testing.rules.facts import Facts, Load, Unit, Visit


class Plan:
    """Hears what happens in order, and notes who should enter and leave from then on."""

    pools: Collection[str] = (CACHE,)
    """Whose copies are the cache's."""
    last_rows = 10**9
    """Steps of more rows pass by the cache; so do prompts, if ``prompts`` is false."""
    prompts = False
    admits = True
    """Who enters is part of the rule."""
    streams_prompts = False
    """Copies for a prompt pass through slots of the cache."""

    def __init__(self, facts: Facts, **options: Any) -> None:
        self.facts, self.time, self.at = facts, 0, 0
        self.enters: list[tuple[int, Unit]] = []
        self.leaves: list[tuple[int, Unit]] = []
        self.slots = [n // facts.model.expert_bytes(0) for n in facts.capacity]
        self.there: dict[Unit, int] = {}  # with their slots; those on their way, too
        self.used: dict[Unit, float] = {}
        self.clock = 0
        self.counted: set[Unit] = set()  # those that count as there
        self.free = [list(range(n)) for n in self.slots]
        for name, value in options.items():
            setattr(self, name, value)
        for unit in facts.start:
            self.there[unit] = self.free[self.pool(unit)].pop(0)
            self.counted.add(unit)
            self.used[unit] = self.tick()
        self.begin(facts)

    def begin(self, facts: Facts) -> None:
        """Prepare what the rule keeps."""

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    def pool(self, unit: Unit) -> int:
        return unit[0] if self.facts.per_layer else 0

    def step(self, step: StepRecord) -> None:
        """Hear that a step begins."""

    def visit(self, visit: Visit) -> Collection[int] | None:
        """Hear of a routed micro-batch; return what the GPU computes, or None if the rule is silent."""
        raise NotImplementedError

    def end(self, layer: LayerRecord) -> None:
        """Hear that a visit of a layer is over."""

    def over(self, step: StepRecord) -> None:
        """Hear that a step is over."""

    def arrived(self, load: Load) -> None:
        """Hear that a copy has arrived."""

    def passes(self, visit: Visit) -> bool:
        """Whether a visit passes by the cache."""
        rows = self.facts.records.steps[visit.step].n_tokens
        return rows > self.last_rows or (visit.phase == "prefill" and not self.prompts)

    def swap(self, newcomer: Unit, victim: Unit | None) -> None:
        """Let a newcomer take the place of a victim, or a free one, the lowest."""
        if victim is not None:
            self.leaves.append((self.time, victim))
            self.counted.discard(victim)
            self.free[self.pool(victim)].append(self.there.pop(victim))
        self.there[newcomer] = self.free[self.pool(newcomer)].pop(-1 if victim is not None else 0)
        self.enters.append((self.time, newcomer))

    def take(self, newcomer: Unit, spared: Collection[Unit], key: Any = None) -> bool:
        """Let a newcomer in: into a free slot, or for the smallest key; ties to the lowest slot."""
        if self.free[self.pool(newcomer)]:
            self.swap(newcomer, None)
            return True
        may = [u for u in self.counted if self.pool(u) == self.pool(newcomer) and u not in spared]
        if not may:
            return False
        self.swap(newcomer, min(may, key=lambda u: ((key or self.used.__getitem__)(u), self.there[u])))
        return True


def by_appearance(visit: Visit) -> list[int]:
    """Return the active experts in the order in which the rows' choices first name them."""
    return list(dict.fromkeys(visit.routing.experts.ravel().tolist()))


class LlamaCppCache(Plan):
    """llama.cpp PR 29887: hits by first appearance, then misses by id; the least recent leaves."""

    prompts, last_rows, by_id = True, 32, False

    def passes(self, visit: Visit) -> bool:
        rows = self.facts.records.steps[visit.step].n_tokens
        return rows > 32 or min(rows * self.facts.model.top_k, self.facts.model.n_experts) > self.slots[0]

    def visit(self, visit: Visit) -> Collection[int] | None:
        if self.passes(visit):
            return None
        order = list(visit.routing.active) if self.by_id else by_appearance(visit)
        now = {(visit.layer, e) for e in order}
        hits = [(visit.layer, e) for e in order if (visit.layer, e) in self.there]
        misses = [(visit.layer, e) for e in visit.routing.active if (visit.layer, e) not in self.there]
        for unit in hits:
            self.used[unit] = self.tick()
        for unit in misses:
            self.take(unit, now)
            self.counted.add(unit)
            self.used[unit] = self.tick()
        return order


class Fabric(LlamaCppCache):
    """QVAC fabric: the same with hits by id, for every call whose experts fit."""

    by_id = True

    def passes(self, visit: Visit) -> bool:
        return len(visit.routing.active) > self.slots[0]


class Dfa(Plan):
    """moe-speed-of-light: a miss enters iff its decayed score beats the victim's by over kappa."""

    # It counts 2 steps on.

    kappa, half_life, inserts = 0.0, 16.0, None

    def begin(self, facts: Facts) -> None:
        self.t = -1
        self.issued: dict[Unit, int] = {}
        self.come: set[Unit] = set()
        self.scores: dict[Unit, tuple[float, int]] = {}

    def step(self, step: StepRecord) -> None:
        if step.phase != "decode":
            return
        self.t += 1
        for unit in [u for u, t in self.issued.items() if t <= self.t - 2 and u in self.come and u in self.there]:
            del self.issued[unit]
            self.counted.add(unit)

    def arrived(self, load: Load) -> None:
        self.come.add(load.unit)

    def score(self, unit: Unit) -> float:
        value, t = self.scores.get(unit, (0.0, 0))
        return value * float(2 ** ((t - self.t) / self.half_life))

    def visit(self, visit: Visit) -> Collection[int] | None:
        if self.passes(visit):
            return None
        now = set(visit.units)
        for unit in now:
            self.scores[unit] = self.score(unit) + 1, self.t
        hits, n = [e for e in visit.routing.active if (visit.layer, e) in self.counted], 0
        for unit in [(visit.layer, e) for e in by_appearance(visit) if e not in hits]:
            if unit in self.there or n == self.inserts:
                continue
            may = [u for u in self.counted if u[0] == visit.layer and u not in now]
            if not self.free[visit.layer]:
                worst = min(may, key=lambda u: (self.score(u), self.there[u]), default=None)
                if worst is None or not self.score(unit) > self.score(worst) + self.kappa:
                    continue
            self.take(unit, now, self.score)
            self.issued[unit] = self.t
            self.come.discard(unit)
            n += 1
        return hits


class Pooled(Plan):
    """leloch's pool: an expert enters after 2 missed rows, in a full pool after 8."""

    # At most 8 a visit; the CPU computes misses.

    last_rows, admit_free, admit_full, inserts, hot = 1, 2, 8, 8, None

    def begin(self, facts: Facts) -> None:
        self.missed: dict[Unit, int] = defaultdict(int)
        self.uses: dict[Unit, int] = defaultdict(int)

    def arrived(self, load: Load) -> None:
        if load.unit in self.there:
            self.counted.add(load.unit)

    def visit(self, visit: Visit) -> Collection[int] | None:
        if self.passes(visit):
            return None
        now, hits, n = set(visit.units), [e for e in visit.routing.active if (visit.layer, e) in self.counted], 0
        whole = self.hot is not None and self.slots[0] >= self.facts.model.n_layers * self.facts.model.n_experts
        for unit in [(visit.layer, e) for e in by_appearance(visit)]:
            rows = visit.routing.rows[unit[1]]
            if unit in self.counted:
                self.used[unit] = self.tick()
                self.uses[unit] += rows
            elif unit not in self.there:
                self.missed[unit] += rows
                wanted = 1 if whole else self.admit_free if self.free[0] else max(self.admit_free, self.admit_full)
                if self.missed[unit] >= wanted and n < self.inserts and self.take(unit, now, self.rank):
                    n, self.missed[unit], self.uses[unit] = n + 1, 0, 0
                    self.used[unit] = self.tick()
        return hits

    def rank(self, unit: Unit) -> Any:
        return (self.hot is not None and self.uses[unit] > self.hot, self.used[unit])


class TwoUploads(Plan):
    """llama.cpp PR 27861 and its forks: a worker fills slots with misses, which count from the step after the copy on."""

    last_rows, inserts, dup_upload, early, admit, window = 1, 2, True, False, 1, 16

    def begin(self, facts: Facts) -> None:
        layers = range(facts.model.n_layers)
        self.seen: list[dict[int, None]] = [{} for _ in layers]
        self.held: list[list[int | None]] = [[None] * self.slots[layer] for layer in layers]
        self.stack = [[*range(self.slots[layer])][::-1] for layer in layers]
        self.filling: list[dict[int, int]] = [{} for _ in layers]  # slot -> expert
        self.where: list[dict[int, int]] = [{} for _ in layers]  # expert -> slot
        self.at_slot: dict[Unit, int] = {}  # layer and slot -> its stamp
        self.log: dict[Unit, list[int]] = defaultdict(list)  # tokens of its misses
        self.tokens = [0 for _ in layers]
        self.jobs: list[tuple[Unit, int]] = []  # the first one is under way, if `busy`
        self.ended: list[tuple[Unit, int]] = []
        self.copies: set[Unit] = set()
        self.busy = False
        pieces = [t.end for t in facts.records.transfers if t.last and not t.left and t.cause in ("update", "message")]
        self.ends = sorted(pieces, reverse=True)

    def go_on(self) -> None:
        """End the uploads that have ended by now; begin the next."""
        if self.jobs and not self.busy:
            self.upload(self.time)
        while self.busy and self.ends and self.ends[-1] <= self.time:
            at, self.busy = self.ends.pop(), False
            self.ended.append(self.jobs.pop(0))
            if self.jobs:
                self.upload(at)

    def over(self, step: StepRecord) -> None:
        self.go_on()

    def upload(self, at: int) -> None:
        self.busy, unit = True, self.jobs[0][0]
        if unit not in self.copies:
            self.copies.add(unit)
            self.enters.append((at, unit))

    def oldest(self, layer: int, slots: Iterable[int]) -> int:
        return min(slots, key=lambda slot: self.at_slot[layer, slot])

    def evict(self, layer: int, slot: int) -> None:
        expert, self.held[layer][slot] = self.held[layer][slot], None
        self.where[layer].pop(expert, None)  # type: ignore[arg-type]
        unit: Any = (layer, expert)
        if expert not in self.held[layer] and not (self.busy and self.jobs[0][0] == unit):
            self.copies.discard(unit)
            self.leaves.append((self.time, unit))

    def step(self, step: StepRecord) -> None:
        if step.phase == "prefill" or step.n_tokens > self.last_rows:
            return
        self.go_on()
        for (layer, expert), slot in self.ended:
            del self.filling[layer][slot]
            self.held[layer][slot], self.where[layer][expert] = expert, slot
            self.at_slot[layer, slot] = self.tick()
        self.ended = []
        for layer, seen in enumerate(self.seen):
            where, filling = self.where[layer], self.filling[layer]
            while self.early and len(self.stack[layer]) < self.inserts and where:
                self.stack[layer].append(self.oldest(layer, where.values()))
                self.evict(layer, self.stack[layer][-1])
            again = self.dup_upload and self.admit == 1
            turns = [e for e in reversed(seen) if self.admit == 1 or (e not in where and e not in filling.values())]
            for expert in turns[: 0 if self.early else self.inserts]:
                idle = [s for s in range(self.slots[layer]) if s not in filling]
                if expert in where or (expert in filling.values() and not again) or not idle:
                    continue
                empty = next((s for s in idle if self.held[layer][s] is None), None)
                slot = self.oldest(layer, idle) if empty is None else empty
                if empty is None:
                    self.evict(layer, slot)
                filling[slot] = expert
                self.jobs.append(((layer, expert), slot))
            seen.clear()
        self.go_on()

    def visit(self, visit: Visit) -> Collection[int] | None:
        self.go_on()
        if self.passes(visit):
            return None
        layer, where, filling = visit.layer, self.where[visit.layer], self.filling[visit.layer]
        hits = [e for e in by_appearance(visit) if e in where]
        for e in hits:
            self.at_slot[layer, where[e]] = self.tick()
        roomy = len(self.stack[layer]) > self.inserts or not where
        empty = self.slots[layer] - len(where) - len(filling)
        for row in visit.routing.experts.tolist():
            self.tokens[layer] += 1
            for e in (e for e in row if e not in where):
                log, now = self.log[layer, e], self.tokens[layer]
                if self.admit > 1 and not self.early and (e in filling.values() or len(self.seen[layer]) < empty):
                    enters = e not in filling.values()
                else:
                    log.append(now)
                    often = len(log) >= self.admit and now - log[-self.admit] < self.window
                    enters = self.admit == 1 or often or (self.early and roomy)
                if enters:
                    self.seen[layer].setdefault(e)
        issued = [e for e in self.seen[layer] if self.early and e not in filling.values()]
        for expert in issued[: min(self.inserts, len(self.stack[layer]))]:
            filling[slot := self.stack[layer].pop()] = expert
            self.jobs.append(((layer, expert), slot))
        self.go_on()
        return hits


class Streamed(Plan):
    """llama.cpp PR 25294: misses take the slots of the experts chosen least; large calls go in waves."""

    prompts, preload = True, True

    def begin(self, facts: Facts) -> None:
        layers, self.calls = range(facts.model.n_layers), 0
        self.owner: list[list[int | None]] = [[None] * self.slots[layer] for layer in layers]
        self.counts: dict[Unit, int] = defaultdict(int)

    def enter(self, layer: int, expert: int, kept: set[int | None]) -> None:
        """Read an expert into the slot of one that need not stay."""
        owner = self.owner[layer]
        may = [s for s, e in enumerate(owner) if e is None or e not in kept]
        if not may:
            return
        slot = min(may, key=lambda slot: self.rank(layer, owner[slot]))
        if (gone := owner[slot]) is not None:
            self.leaves.append((self.time, (layer, gone)))
        owner[slot] = expert
        self.enters.append((self.time, (layer, expert)))
        self.used[layer, expert] = self.tick()

    def rank(self, layer: int, expert: int | None) -> tuple[float, float]:
        return (-1, 0) if expert is None else (self.counts[layer, expert], self.used[layer, expert])

    def visit(self, visit: Visit) -> Collection[int] | None:
        layer, k, owner = visit.layer, self.facts.model.top_k, self.owner[visit.layer]
        choices, ranked = visit.routing.experts.ravel().tolist(), by_appearance(visit)
        whole = min(len(choices), self.facts.model.n_experts) <= len(owner)
        size = len(ranked) if whole else (len(owner) - k) // 2
        self.calls += 1
        for e in ranked if whole else ():
            self.counts[layer, e] += 1
        if whole and self.calls % (64 * self.facts.model.n_layers) == 0:
            self.counts = defaultdict(int, {unit: n // 2 for unit, n in self.counts.items()})
        waves = [ranked[i : i + size] for i in range(0, len(ranked), size)]
        before: list[int] = []
        for wave, after in zip(waves, [*waves[1:], []], strict=True):
            parked = before[: max(0, k - len(wave))]
            read_ahead = {e for e in wave if e in owner} if wave is not waves[0] else set()
            kept: set[int | None] = {*parked, *(e for e in after if e in owner), *read_ahead}
            for e in wave:
                if e not in owner:
                    self.enter(layer, e, kept)
                kept.add(e)
            for e in after if self.preload else ():
                if e not in owner:
                    self.enter(layer, e, kept)
                    kept.add(e)
            for e in choices:
                if e in wave:
                    self.used[layer, e] = self.tick()
            before = [*wave, *parked]
        return ranked


class Colibri(Plan):
    """colibri: memory's slots of each layer by lru or lfru with pins, or the GPU's hottest, exchanged every 16 tokens."""

    prompts, memory, lfru, cap, hot, warmup, counted_rows = True, False, False, 0, 0, 5, True

    def begin(self, facts: Facts) -> None:
        self.heat: dict[Unit, int] = defaultdict(int)
        self.rows: dict[Unit, int] = defaultdict(int)
        self.on_gpu = {(copy.layer, e) for copy in facts.placement.copies for e in copy.experts}
        self.coming: set[Unit] = set()
        self.held: list[list[int]] = [[] for _ in range(facts.model.n_layers)]
        self.pins: set[Unit] = set()
        self.tokens = 0
        self.on_cpu = {(t.step, t.layer, t.expert) for t in facts.tasks if t.device == facts.hosts[0]}

    def arrived(self, load: Load) -> None:
        if load.unit in self.coming:
            self.coming.discard(load.unit)
            self.on_gpu.add(load.unit)

    def over(self, step: StepRecord) -> None:
        if self.counted_rows and self.hot and self.tokens >= self.warmup:
            self.counted_rows = False
            for layer in range(self.facts.model.n_layers):
                ranked = sorted((-n, e) for (at, e), n in self.rows.items() if at == layer)
                self.pins.update((layer, e) for _, e in ranked[: self.hot])

    def visit(self, visit: Visit) -> Collection[int] | None:
        layer, held = visit.layer, self.held[visit.layer]
        for e in visit.routing.experts.ravel().tolist():
            self.heat[layer, e] += 1
            self.rows[layer, e] += self.counted_rows
        for _ in visit.routing.experts if layer == 0 else ():
            self.tokens += 1
            if self.tokens % 16 == 0 and self.on_gpu and not self.memory:
                self.exchange()
        for e in by_appearance(visit):
            if (visit.step, layer, e) not in self.on_cpu:
                continue
            if e not in held:
                if len(held) < self.cap:
                    held.append(e)
                else:
                    free = [o for o in held if (layer, o) not in self.pins] or held
                    gone = min(free, key=lambda o: self.key(layer, o))
                    held[held.index(gone)] = e
                    self.leaves += [(self.time, (layer, gone))] if self.memory else []
                self.enters += [(self.time, (layer, e))] if self.memory else []
                self.tick()
            self.used[layer, e] = self.tick()
        return None

    def key(self, layer: int, expert: int) -> float:
        used = self.used[layer, expert]
        return 256 * self.rows[layer, expert] + max(0, 255 - self.clock + used) if self.lfru else used

    def exchange(self) -> None:
        """Let the hottest in memory take the place of the coldest, if it is that much hotter."""
        ready = [(layer, e) for layer, held in enumerate(self.held) for e in held]
        ready = [unit for unit in ready if unit not in self.on_gpu and unit not in self.coming]
        if not ready:
            return
        hot = min(ready, key=lambda unit: (-self.heat[unit], unit))
        cold = min(self.on_gpu, key=lambda unit: (self.heat[unit], unit))
        if self.heat[hot] > self.heat[cold] + self.heat[cold] // 4 + 4:
            self.on_gpu.discard(cold)
            self.coming.add(hot)
            self.leaves.append((self.time, cold))
            self.enters.append((self.time, hot))


class FreeToken(Plan):
    """FreeToken: of m misses the link takes the f near m p that is done first, newest first."""

    # Stamps are by call; those used last go before others.

    backend, streams_prompts = "auto", True

    def begin(self, facts: Facts) -> None:
        self.active_at: dict[Unit, int] = {}
        cpu, load = facts.costs.expert_ns(facts.cpu, 1), facts.costs.fetch_ns(facts.hosts[0], facts.gpu, None, 0)
        self.fetch_all = self.backend == "offload" or (self.backend == "auto" and load <= 2 * cpu)
        link, host = self.together(facts)
        self.share = link / load / (link / load + host / cpu)

    def together(self, facts: Facts) -> tuple[float, float]:
        link = next(one.name for one in facts.costs.hardware.links if (one.src, one.dst) == (facts.hosts[0], facts.gpu))
        for pair in facts.costs.contention:
            rates = {pair.a: pair.a_rate_ppm / 1e6, pair.b: pair.b_rate_ppm / 1e6}
            if {link, f"{facts.cpu}.experts"} <= rates.keys():
                return rates[link], rates[f"{facts.cpu}.experts"]
        return 1.0, 1.0

    def visit(self, visit: Visit) -> Collection[int] | None:
        stamp = self.tick()
        if self.passes(visit):
            self.lose(visit)
            return visit.routing.active
        units = visit.units
        hits = [u for u in units if u in self.there]
        misses = sorted((u for u in units if u not in self.there), key=lambda u: (-self.active_at.get(u, -1), u))
        m, p = len(misses), self.share
        low = int(m * p)
        f = m if self.fetch_all else min((low, min(low + 1, m)), key=lambda f: (max(f * (1 - p), (m - f) * p), f))
        for unit in hits:
            self.used[unit] = stamp
        taken = [u for u in misses[:f] if self.take(u, units)]
        for unit in taken:
            self.counted.add(unit)
            self.used[unit] = stamp
        self.active_at.update(dict.fromkeys(units, visit.step))
        return [e for _, e in (*hits, *taken)]

    def lose(self, visit: Visit) -> None:
        """Lose what is cached in the slots through which a prompt is streamed."""
        n = self.facts.model.n_experts
        buffer = 2 * n if self.slots[0] >= 2 * n else n
        for unit in [u for u, slot in self.there.items() if slot < buffer]:
            self.free[0].append(self.there.pop(unit))
            self.counted.discard(unit)
        self.free[0].sort()


class Windows(Plan):
    """DALI, Algorithm 2: after w visits a layer's u idlest residents give way to the u busiest."""

    w_size, u_size, firing, only_if_better = 4, 1, "default", False

    def begin(self, facts: Facts) -> None:
        self.sums = [[0] * facts.model.n_experts for _ in range(facts.model.n_layers)]
        self.visits = [0] * facts.model.n_layers

    def visit(self, visit: Visit) -> Collection[int] | None:
        for expert, rows in enumerate(visit.routing.rows):
            self.sums[visit.layer][expert] += rows
        return None

    def end(self, layer: LayerRecord) -> None:
        at, s = layer.layer, self.sums[layer.layer]
        self.visits[at] += 1
        if (self.visits[at] - (self.firing == "printed")) % self.w_size:
            return
        inside = sorted((e for of, e in self.there if of == at), key=lambda e: (s[e], e))
        outside = sorted((e for e in range(len(s)) if (at, e) not in self.there), key=lambda e: (-s[e], e))
        for old, new in list(zip(inside, outside, strict=False))[: self.u_size]:
            if not self.only_if_better or s[new] > s[old]:
                self.swap((at, new), (at, old))
        self.sums[at] = [0] * len(s)


class Daop(Plan):
    """DAOP, Algorithm 1: in a prompt the i-th busiest and i-th idlest swap if w > 1.05 w'."""

    pools = (CACHE, "leaving")
    mixed, streams, factor, predicted = False, False, 1.05, 0  # the first layer that is predicted; 0: none is

    def begin(self, facts: Facts) -> None:
        self.rows = np.zeros((facts.model.n_layers, facts.model.n_experts), np.int64)  # of the prompt's chunks so far

    def step(self, step: StepRecord) -> None:
        if step.step == 0 or self.facts.workload.steps[step.step - 1].last_chunk:
            self.rows[:] = 0

    def visit(self, visit: Visit) -> Collection[int] | None:
        here = {e for of, e in self.there if of == visit.layer}
        step = self.facts.workload.steps[visit.step]
        self.rows[visit.layer] += visit.routing.rows
        rows = self.rows[visit.layer].tolist()
        if visit.phase == "prefill" and step.last_chunk:
            every = range(len(rows))
            hot = sorted((e for e in every if e not in here), key=lambda e: (-rows[e], e))
            cold = sorted(
                (e for e in every if self.mixed or e in here), key=lambda e: (rows[e] if e in here else rows[e] * 10**6, e)
            )
            for new, old in list(zip(hot, cold, strict=False))[: len(rows) // 2]:
                if old in here and rows[new] > self.factor * rows[old]:
                    self.swap((visit.layer, new), (visit.layer, old))
        here = {e for of, e in self.there if of == visit.layer}
        if visit.phase == "decode":
            return None if 0 < self.predicted <= visit.layer else here
        if not self.streams:
            return here
        costs = Costs(self.facts, visit)
        return [e for e in costs.active if e in here or costs.cpu[e] >= costs.load + costs.gpu[e]]


class Fixed(Plan):
    """Nothing enters, and nothing leaves."""

    def visit(self, visit: Visit) -> Collection[int] | None:
        return None


class Heat(Plan):
    """WackMall: at times the coldest resident outside the S hottest gives way to one of these."""

    # After steps of one token.

    decay, hyst, dwell, floor = 0.999, 1.3, 0, 5

    def begin(self, facts: Facts) -> None:
        self.heat = np.zeros((facts.model.n_layers, facts.model.n_experts))
        self.rows = np.zeros_like(self.heat)
        self.updates = self.generated = self.since = 0
        self.rate: float | None = None
        self.stays: dict[Unit, int] = defaultdict(int)
        share = sum(self.slots) / self.heat.size
        self.target = min(max(0.8 * share**0.6, 0.2), 0.9)

    def arrived(self, load: Load) -> None:
        self.stays[load.unit] = -1  # it counts from the next exchange on

    def visit(self, visit: Visit) -> Collection[int] | None:
        self.rows[visit.layer] += visit.routing.rows
        return None if visit.phase == "prefill" else [e for of, e in self.counted if of == visit.layer]

    def over(self, step: StepRecord) -> None:
        self.generated = self.generated + 1 if step.phase == "decode" else 0
        self.updates += 1
        self.heat += self.rows * (5 if 0 < self.generated <= 3 else 1)
        if self.updates % 2 == 0:
            self.heat *= self.decay**2
        hits, uses = sum(float(self.rows[unit]) for unit in self.counted), float(self.rows.sum())
        self.rows[:] = 0
        if step.n_tokens > 1:
            return
        self.rate = hits / uses if self.rate is None else 0.9 * self.rate + 0.1 * hits / uses
        self.since += 1
        if self.since < min(max(self.floor + int(27 * (self.rate / self.target - 1) / 5), self.floor), 32):
            return
        self.since = 0
        for layer, n in enumerate(self.slots):
            self.exchange(layer, n)

    def exchange(self, layer: int, n: int) -> None:
        mine = [unit for unit in self.there if unit[0] == layer]
        self.counted.update(unit for unit in mine if self.stays[unit] == -1)
        for unit in mine:
            self.stays[unit] += 1
        hottest = sorted(((layer, e) for e in range(self.heat.shape[1])), key=lambda u: (-self.heat[u], u))
        others = [unit for unit in hottest if unit not in self.there]
        there = [unit for unit in mine if unit in self.counted]
        if not others or not there:
            return
        hot = self.heat[others[0]]
        if hot > min(self.heat[unit] for unit in there):
            may = [unit for unit in there if unit not in hottest[:n] and self.stays[unit] >= self.dwell]
            cold = min(may, key=lambda u: (self.heat[u], u), default=None)
            if cold is not None and hot >= self.hyst * self.heat[cold]:
                self.leaves.append((self.time, cold))
                self.counted.discard(cold)
                self.free[layer].append(self.there.pop(cold))
        entering = [unit for unit in others if unit in hottest[:n]]
        if self.free[layer] and entering:
            self.swap(entering[0], None)
            self.stays[entering[0]] = -2


class Bypass(Plan):
    """MIN with bypass: a miss enters a free slot, or for who is used last, if used sooner."""

    prompts = True

    def visit(self, visit: Visit) -> Collection[int] | None:
        self.now = visit
        at = visit.layer
        kept = {unit for unit in self.there if unit[0] == at}
        hits = [unit for unit in visit.units if unit in kept]
        for unit in (unit for unit in visit.units if unit not in hits):
            if len(kept) < self.slots[at]:
                if self.enters_free(unit):
                    kept.add(unit)
                continue
            victim = self.worst(kept)
            if victim is not None and self.better(unit, victim):
                kept = kept - {victim} | {unit}
        for unit in [unit for unit in self.there if unit[0] == at and unit not in kept]:
            self.leaves.append((self.time, unit))
            self.free[at].append(self.there.pop(unit))
        for unit in sorted(kept - self.there.keys()):
            self.swap(unit, None)
        return [e for of, e in (*hits, *(kept & set(visit.units)))]

    def use(self, unit: Unit) -> int:
        return self.facts.next_use(unit, self.now)

    def enters_free(self, unit: Unit) -> bool:
        return self.use(unit) < 1 << 62

    def worst(self, kept: Collection[Unit]) -> Unit | None:
        return min(kept, key=lambda u: (-self.use(u), u), default=None)

    def better(self, unit: Unit, victim: Unit) -> bool:
        return self.enters_free(unit) and self.use(unit) < self.use(victim)


class Windowed(Bypass):
    """Windowed Belady: experts unused within W steps go first, the lowest decayed score first."""

    window, half_life, kappa = 4, 16.0, 0.0

    def begin(self, facts: Facts) -> None:
        self.scores: dict[Unit, tuple[float, int]] = {}
        self.visits = [0] * facts.model.n_layers

    def visit(self, visit: Visit) -> Collection[int] | None:
        self.visits[visit.layer] += 1
        for unit in visit.units:
            self.scores[unit] = self.score(unit) + 1, self.visits[visit.layer]
        return super().visit(visit)

    def score(self, unit: Unit) -> float:
        value, t = self.scores.get(unit, (0.0, 0))
        return value * float(2 ** ((t - self.visits[unit[0]]) / self.half_life))

    def beyond(self, unit: Unit) -> bool:
        return self.use(unit) > self.now.step + self.window

    def enters_free(self, unit: Unit) -> bool:
        return True

    def worst(self, kept: Collection[Unit]) -> Unit | None:
        far = [unit for unit in kept if self.beyond(unit)]
        return min(far, key=lambda u: (self.score(u), u)) if far else super().worst(kept)

    def better(self, unit: Unit, victim: Unit) -> bool:
        if not self.beyond(unit):
            return self.beyond(victim) or self.use(unit) < self.use(victim)
        return self.beyond(victim) and self.score(unit) > self.score(victim) + self.kappa


class Fate(Plan):
    """Fate's port: each row's picks are asked of its ARC in order."""

    # What that lets go leaves, if active as its layer ends.

    pools, admits = (CACHE, "even", "odd"), False

    def begin(self, facts: Facts) -> None:
        self.arcs = [ArcLists(n, fate=True) for n in self.slots]
        self.ended: dict[int, int] = {}
        self.here: set[Unit] = set(self.there)
        self.cached: set[Unit] = set(self.there)
        for layer, expert in self.there:
            self.arcs[layer].request((layer, expert), ())

    def arrived(self, load: Load) -> None:
        self.here.add(load.unit)
        if load.submitted < self.ended.get(load.unit[0], 0):  # for a layer that is over
            self.go([load.unit])

    def visit(self, visit: Visit) -> Collection[int] | None:
        arc = self.arcs[visit.layer]
        if arc.c:
            for expert in visit.routing.experts.ravel().tolist():
                arc.request((visit.layer, expert), ())
        self.go(unit for unit in self.cached if unit[0] == visit.layer and unit not in visit.units)
        return visit.routing.active

    def end(self, layer: LayerRecord) -> None:
        self.ended[layer.layer] = layer.end
        self.go(unit for unit in self.here if unit[0] == layer.layer)
        self.cached.update(unit for unit in self.here if unit[0] == layer.layer)

    def go(self, units: Iterable[Unit]) -> None:
        for unit in [unit for unit in units if not self.arcs[unit[0]].holds(unit)]:
            self.leaves.append((self.time, unit))
            self.here.discard(unit)
            self.cached.discard(unit)


def judged_plan(facts: Facts, plan: Plan) -> list[Judged]:
    """Replay a plan, and judge every copy that came or left, and where experts were computed."""
    events: list[tuple[int, float, Any]] = [(step.begin, 3, step) for step in facts.records.steps]
    events += [(visit.time, 4, visit) for visit in facts.visits]
    events += [(step.end, 2.5, step) for step in facts.records.steps]
    events += [(layer.end, 2, layer) for layer in facts.records.layers]
    events += [(load.end, 1, load) for load in facts.loads if load.pool in plan.pools]
    on_gpu: dict[tuple[int, int, int], Collection[int] | None] = {}
    hear: dict[float, Any] = {1: plan.arrived, 2: plan.end, 2.5: plan.over, 3: plan.step}
    for time, what, fact in sorted(events, key=lambda event: event[:2]):
        plan.time = time
        if what == 4:
            on_gpu[fact.step, fact.layer, fact.mb] = plan.visit(fact)
        else:
            hear[what](fact)
    judged = ("decode",) if plan.streams_prompts else ("prefill", "decode")
    # Of a guess that is there to the end nobody knows whether the cache has kept it.
    loads = [one for one in facts.loads if one.pool in (*plan.pools, "") and facts.phase(one.submitted) in judged]
    came = [(load.end, load.unit, load.pool != "") for load in loads]
    went = [(gone.time, (gone.layer, gone.expert), True) for gone in facts.departures if gone.pool in plan.pools]
    return [
        *(_matched("admission", facts, plan.enters, came) if plan.admits else ()),
        *_matched("eviction", facts, plan.leaves, [one for one in went if facts.phase(one[0]) in judged]),
        *judged_assignments(facts, lambda _, visit: on_gpu[visit.step, visit.layer, visit.mb]),
    ]


def _matched(
    kind: str, facts: Facts, due: Iterable[tuple[int, Unit]], done: Sequence[tuple[int, Unit, bool]]
) -> list[Judged]:  # fmt: skip
    """Pair each due decision with what ends next of it."""
    # Copies may queue, and who leaves may be in use.
    left, found = sorted(done), []
    for time, unit in due:
        if time >= facts.records.makespan_ns:
            continue  # the run is over
        hit = next((one for one in left if one[1] == unit and time <= one[0]), None)
        if hit is None and facts.busy_until_the_end(time):
            continue
        if hit is not None:
            left.remove(hit)
        text = f"at {time} {unit} was due" if hit is None else ""
        found.append(Judged(kind, facts.phase(time), hit is not None, "" if hit else "other", text))
    wrong = [(time, unit) for time, unit, certain in left if certain]
    return found + [Judged(kind, facts.phase(time), False, "other", f"at {time} {unit} was not due") for time, unit in wrong]
