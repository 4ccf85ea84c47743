"""Rules for the device of each active expert, and the check of where each ran."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Any

from moesim.testing.rules.evictions import Judged
from moesim.testing.rules.facts import Facts, Visit

Rule = Callable[[Facts, Visit], Collection[int] | None]
"""Returns the experts of a visit that an accelerator computes; None where the rule is silent."""


class Costs:
    """Times of a visit's experts: on each device, and until their weights are on the GPU."""

    def __init__(self, facts: Facts, visit: Visit) -> None:
        costs, routing, hosts = facts.costs, visit.routing, facts.costs.hardware.backing
        self.active: Sequence[int] = routing.active
        self.rows: Sequence[int] = routing.rows
        self.load = costs.fetch_ns(hosts[0], facts.gpu, None, visit.layer)
        self.wait = {expert: facts.waits(visit, expert, self.load) for expert in routing.active}
        self.gpu = {expert: costs.expert_ns(facts.gpu, self.rows[expert]) for expert in routing.active}
        self.cpu = {expert: costs.expert_ns(facts.cpu, self.rows[expert]) for expert in routing.active}
        self.first = costs.first_extra_ns(facts.gpu), costs.first_extra_ns(facts.cpu)


def everything(facts: Facts, visit: Visit) -> Collection[int]:
    """All on the GPU."""
    return visit.routing.active


def nothing(facts: Facts, visit: Visit) -> Collection[int]:
    """All on the CPU."""
    return ()


def residents(facts: Facts, visit: Visit) -> Collection[int]:
    """Residents on the GPU, the rest on the CPU: a static split."""
    return visit.hits


def decode_residents(facts: Facts, visit: Visit) -> Collection[int]:
    """The static split in decode; a prompt wholly on the GPU."""
    return visit.hits if visit.phase == "decode" else visit.routing.active


def threshold(facts: Facts, visit: Visit) -> Collection[int]:
    """Fiddler: a missing expert runs on the CPU iff sooner than copy plus GPU; ties to the GPU."""
    costs = Costs(facts, visit)
    return [e for e in costs.active if not costs.wait[e] or costs.cpu[e] >= costs.wait[e] + costs.gpu[e]]


def constants(cpu_ms: float, load_ms: float) -> Rule:
    """Fiddler's code: a missing expert runs on the CPU iff rows x constant < constant of a load."""
    return lambda facts, visit: [
        e for e in visit.routing.active if e in visit.hits or visit.routing.rows[e] * cpu_ms >= load_ms
    ]  # fmt: skip


def greedy(facts: Facts, visit: Visit) -> Collection[int]:
    """DALI, Algorithm 1: by |t_gpu - t_cpu| descending, each to where it ends first."""
    # To the GPU if T_gpu + t_gpu <= T_cpu + t_cpu.
    costs = Costs(facts, visit)
    t_gpu = {e: max(costs.wait[e], costs.gpu[e]) for e in costs.active}
    total_gpu, total_cpu, taken = 0, 0, list[int]()
    for e in sorted(costs.active, key=lambda e: (-abs(t_gpu[e] - costs.cpu[e]), e)):
        on_gpu = total_gpu + t_gpu[e] + (costs.first[0] if not taken else 0)
        on_cpu = total_cpu + costs.cpu[e] + (costs.first[1] if not total_cpu else 0)
        if on_gpu <= on_cpu:
            total_gpu = on_gpu
            taken.append(e)
        else:
            total_cpu = on_cpu
    return taken


def queues(facts: Facts, visit: Visit) -> Collection[int]:
    """HybriMoE's paper: of GPU, CPU, link acts whose next operation ends first; ties in order."""
    costs = Costs(facts, visit)
    rows, ready = costs.rows, {e: costs.wait[e] for e in costs.active}
    there = [e for e in costs.active if costs.wait[e] < costs.load]  # on the GPU, or on the link
    absent = sorted((e for e in costs.active if e not in there), key=lambda e: (rows[e], e))
    at_gpu = at_cpu = 0
    at_link = max((costs.wait[e] for e in there), default=0)  # our reading: the link first ends what it has begun
    n_cpu, taken = 0, list[int]()
    while there or absent:
        there.sort(key=lambda e: (-rows[e], e))
        offers = []
        if there:
            here = [e for e in there if ready[e] <= at_gpu]
            e = here[0] if here else min(there, key=lambda e: ready[e])
            offers.append((max(at_gpu, ready[e]) + costs.gpu[e] + (0 if taken else costs.first[0]), 0, e))
        e = absent[0] if absent else there[-1]
        offers.append((at_cpu + costs.cpu[e] + (0 if n_cpu else costs.first[1]), 1, e))
        if absent:
            offers.append((at_link + costs.load, 2, absent[-1]))
        end, who, e = min(offers)
        if who == 0:
            at_gpu = end
            there.remove(e)
            taken.append(e)
        elif who == 1:
            at_cpu, n_cpu = end, n_cpu + 1
            (absent or there).remove(e)
        else:
            at_link = ready[e] = end
            absent.remove(e)
            there.append(e)
    return taken


def two_ended(facts: Facts, visit: Visit) -> Collection[int]:
    """HybriMoE's code (HSS): cached by rows, then others; GPU from the head, CPU from the tail."""
    costs = Costs(facts, visit)
    if len(visit.routing.experts) > 1:
        return costs.active
    cached = visit.hits | visit.coming
    queue = sorted(visit.routing.experts[0].tolist(), key=lambda e: (e not in cached, -costs.rows[e]))
    total_gpu = total_cpu = moved = 0
    taken: list[int] = []
    n_cpu = 0
    while queue:
        head, tail = queue[0], queue[-1]
        on_gpu = costs.gpu[head] + (0 if taken else costs.first[0])
        on_cpu = costs.cpu[tail] + (0 if n_cpu else costs.first[1])
        if head not in cached and moved + costs.load > total_gpu:
            on_gpu += moved + costs.load - total_gpu
        if total_gpu + on_gpu <= total_cpu + on_cpu:
            moved += costs.load if head not in cached else 0
            total_gpu += on_gpu
            taken.append(queue.pop(0))
        else:
            total_cpu += on_cpu
            n_cpu += 1
            queue.pop()
    return taken


def judged_daop(facts: Facts, source: str, first: int) -> list[Judged]:
    """Judge DAOP's later layers in decode, which run what the layer before has predicted."""
    # The next gate's top-k of each row. If more than half of them are on the CPU, the lowest of these give way to
    # the best on the GPU that were not chosen, as far as there are any. Each runs where it is.
    done: dict[tuple[int, int], Counter[tuple[int, bool]]] = defaultdict(Counter)
    for task in facts.tasks:
        done[task.step, task.layer][task.expert, task.device not in facts.hosts] += task.rows
    known = {(task.step, task.layer): task.end for task in facts.records.tasks if task.kind == "predict"}
    k, found = facts.model.top_k, []
    for visit in facts.visits:
        step, at = facts.workload.steps[visit.step], (visit.step, visit.layer)
        if visit.phase != "decode" or visit.layer < first or step.n_micro > 1 or known.get(at, 0) >= visit.time:
            continue
        said = facts.predictors[source].predict(step, 0, visit.layer)
        assert said is not None and said[1] is not None
        here, due = facts.held(visit.layer, visit.time), Counter[tuple[int, bool]]()
        for ids, scores in zip(said[0][:, :k].tolist(), said[1].tolist(), strict=True):
            best = sorted(here.difference(ids), key=lambda e: (-scores[e], e))
            away = [e for e in ids if e not in here]
            given_up = away[max(k // 2, len(away) - len(best)) :]
            chosen = [e for e in ids if e not in given_up] + best[: len(given_up)]
            due.update((e, e in here) for e in chosen)
        for one in sorted(due | done[at]):
            ok = due[one] == done[at][one]
            where = f"expert {one[0]} on the {'GPU' if one[1] else 'CPU'}"
            text = f"layer {visit.layer} of step {visit.step}: {done[at][one]} rows of {where}, by the rule {due[one]}"
            found.append(Judged("assignment", "decode", ok, "" if ok else "other", text))
    return found


def judged_assignments(facts: Facts, rule: Rule) -> list[Judged]:
    """Judge where each active expert ran; those alike in rows and place stand for each other."""
    places: dict[tuple[int, int, int], dict[int, bool]] = defaultdict(dict)
    for task in facts.tasks:
        places[task.step, task.layer, task.mb][task.expert] = task.device not in facts.hosts
    found = []
    for visit in facts.visits:
        on_gpu = rule(facts, visit)
        if on_gpu is None:
            continue
        done = places[visit.step, visit.layer, visit.mb]
        for alike, here in _classes(visit, done).items():
            ours = [expert for expert in here if done[expert]]
            due = sum(expert in on_gpu for expert in here)
            wrong = abs(len(ours) - due)
            text = (
                f"layer {visit.layer} of step {visit.step}: {len(ours)} of {here} on the GPU, by the rule {due} (rows {alike[0]})"
            )
            found += [Judged("assignment", visit.phase, i >= wrong, "other" if i < wrong else "", text) for i in range(len(here))]
    return found


def _classes(visit: Visit, done: dict[int, bool]) -> dict[tuple[Any, ...], list[int]]:
    """Group the experts of a visit by their rows, and by where their weights are."""
    groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for expert in done:
        rows = visit.routing.rows[expert]
        groups[rows, expert in visit.hits, expert in visit.coming].append(expert)
    return groups
