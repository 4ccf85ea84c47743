"""Rules of Strata's windows and of vLLM's expert cache."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from math import inf

import numpy as np

from moesim.records import StepRecord
from moesim.testing.rules.facts import Load, Unit, Visit
from moesim.testing.rules.plans import FreeToken, Plan, by_appearance


class Strata(FreeToken):
    """Strata: the last misses of a window cross the link; after some windows the pairs that gain most swap."""

    frac: float | None = None
    rule, adapt, every, swaps, decay, margin = "balance", "layer", 4, 96, 0.7, 1.5
    ring, stream_min = 384, 1024

    def begin(self, facts: object) -> None:
        table = np.asarray(self.facts.tables["activation_frequency"])
        hottest = np.argsort(-table.ravel(), kind="stable")[: self.slots[0]]
        self.owners: list[Unit | None] = [(int(i) // table.shape[1], int(i) % table.shape[1]) for i in hottest]
        self.counted = {unit for unit in self.owners if unit is not None}
        self.uses = np.zeros(table.shape)
        self.landed: list[Unit] = []
        self.back: dict[int, Unit] = {}
        self.windows = 0
        self.of_256 = round(256 * self.part())

    def part(self) -> float:
        if self.frac is not None:
            return self.frac
        costs, host = self.facts.costs, self.facts.hosts[0]
        cpu, load = costs.expert_ns(self.facts.cpu, 1), costs.fetch_ns(host, self.facts.gpu, None, 0)
        if self.rule == "link":
            return min(0.55, 0.55 * self.facts.model.expert_bytes(0) / load / 20)
        of_link, of_cpu = self.together(self.facts)
        return min(0.6, max(0.1, of_link * cpu / (of_link * cpu + of_cpu * load)))

    def arrived(self, load: Load) -> None:
        self.landed.append(load.unit)

    def put(self, slot: int, unit: Unit) -> None:
        self.owners[slot] = unit
        self.enters.append((self.time, unit))

    def exchange(self, new: Unit, old: Unit) -> None:
        self.leaves.append((self.time, old))
        self.counted.discard(old)
        self.put(self.owners.index(old), new)

    def step(self, step: StepRecord) -> None:
        self.counted.update(unit for unit in self.landed if unit in self.owners)
        self.landed = []
        if step.phase == "prefill":
            n = min(self.ring if step.n_tokens >= self.stream_min else 8, len(self.owners))
            for slot in range(len(self.owners) - n, len(self.owners)):
                unit = self.owners[slot]
                if unit is not None:
                    self.back[slot], self.owners[slot] = unit, None
                    self.counted.discard(unit)
            return
        for slot, unit in self.back.items():
            self.put(slot, unit)
        self.back = {}
        if self.windows and self.windows % self.every == 0:
            self.swap_pairs()
            self.uses *= self.decay
            self.uses[self.uses < 1e-3] = 0
        self.windows += 1

    def swap_pairs(self) -> None:
        n_layers, n_experts = self.facts.model.n_layers, self.facts.model.n_experts
        pairs = []
        for layers in [[*range(n_layers)]] if self.adapt == "any-layer" else [[i] for i in range(n_layers)]:
            units = [(layer, e) for layer in layers for e in range(n_experts)]
            hot = sorted(((self.uses[u], u) for u in units if self.uses[u] >= 2 and u not in self.owners), reverse=True)
            cold = sorted((self.uses[u], u) for u in units if u in self.counted)
            for (many, new), (few, old) in zip(hot, cold, strict=False):
                if many < few + self.margin:
                    break
                pairs.append((many - few, new, old))
        for _, new, old in sorted(pairs, reverse=True)[: self.swaps]:
            self.exchange(new, old)

    def visit(self, visit: Visit) -> Collection[int] | None:
        if visit.phase == "prefill":
            return visit.routing.active
        layer, order = visit.layer, by_appearance(visit)
        self.uses[layer] += visit.routing.rows
        misses = [e for e in order if (layer, e) not in self.counted]
        m = min(len(misses) * self.of_256 // 256, 16)
        crossing = misses[len(misses) - m :]
        on_gpu = [*(e for e in order if e not in misses), *crossing]
        if self.adapt == "fetch-admit":
            idle = sorted((self.uses[u], u) for u in self.counted if u[0] == layer and u[1] not in order)
            for e, (few, old) in zip([e for e in crossing if (layer, e) not in self.owners], idle, strict=False):
                if self.uses[layer, e] <= few:
                    break
                self.exchange((layer, e), old)
        return on_gpu


class Vllm(Plan):
    """vLLM: of each piece's ids, ascending, the absent ones take the place of the least uses over age."""

    prompts, split = True, "token"

    def begin(self, facts: object) -> None:
        self.clocks: dict[int, int] = defaultdict(int)
        self.count: dict[Unit, int] = {}
        self.last: dict[Unit, int] = {}
        self.came: dict[Unit, int] = {}

    def pieces(self, visit: Visit) -> list[list[int]]:
        n, active = self.slots[visit.layer], list(visit.routing.active)
        if len(active) <= n or self.split == "expert":
            return [active[i : i + n] for i in range(0, len(active), n)]
        found: list[set[int]] = [set()]
        for row in visit.routing.experts.tolist():
            if len(found[-1] | set(row)) > n:
                found.append(set())
            found[-1] |= set(row)
        return [sorted(ids) for ids in found]

    def visit(self, visit: Visit) -> Collection[int] | None:
        layer = visit.layer
        for ids in self.pieces(visit):
            spared = {(layer, e) for e in ids}
            for unit in sorted(spared):
                if unit not in self.there:
                    now = self.clocks[layer] + 1
                    self.take(unit, spared, lambda u, now=now: (self.count[u] / (now - self.last.get(u, -inf)), self.came[u]))
                    self.counted.add(unit)
                    self.count[unit], self.came[unit] = 0, self.tick()
                self.clocks[layer] += 1
                self.count[unit] += 1
                self.last[unit] = self.clocks[layer]
        return visit.routing.active
