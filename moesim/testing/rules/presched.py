"""PreScope, Algorithm 1: which absent experts of a layer are loaded, and how many of the next one are prefetched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from math import floor
from typing import NamedTuple

from moesim.testing.rules.assignments import judged_assignments
from moesim.testing.rules.evictions import Judged
from moesim.testing.rules.facts import Facts, Visit


class Plan(NamedTuple):
    """Decisions of a layer visit, as our reading has them."""

    on_gpu: Collection[int]
    ahead: Sequence[int]  # absent experts that are predicted in the next layer, hottest first
    most: int  # of these to prefetch; or one fewer, by how often predictions came true


def plan(facts: Facts, visit: Visit, source: str) -> Plan:
    """Plan a visit as its prediction comes in: eq. 4 over both layers, eq. 5 and 2 over this one, eq. 7 for the next."""
    tasks, costs = facts.records.tasks, facts.costs
    asked = next((t for t in tasks if (t.kind, t.step, t.layer) == ("predict", visit.step, visit.layer + 1)), None)
    now, rows, step = visit.time if asked is None else asked.end, visit.routing.rows, facts.workload.steps[visit.step]
    predicted: Counter[int] = Counter()
    if asked is not None and (said := facts.predictors[source].predict(step, 0, visit.layer + 1)) is not None:
        predicted.update(e for row in said[0][:, : facts.model.top_k].tolist() for e in row)
        for expert in facts.held(visit.layer + 1, now):
            predicted.pop(expert, None)
    there = visit.hits | visit.coming
    current = sorted((e for e in visit.routing.active if e not in there), key=lambda e: (rows[e], e))
    ahead = sorted(predicted, key=lambda e: (-predicted[e], e))
    c = [costs.expert_ns(facts.cpu, rows[e]) for e in current]
    x = costs.fetch_ns(facts.hosts[0], facts.gpu, None, visit.layer)
    busiest = rows[current[-1]] if current else predicted[ahead[0]] if ahead else 0
    g = costs.expert_ns(facts.gpu, busiest) if busiest else 0
    dense = sum(
        t.work for t in tasks if (t.step, t.layer) == (visit.step, visit.layer) and t.kind in ("attention", "dense", "shared")
    )
    alpha = max((load.end - now for load in facts.loads if load.start < now < load.end), default=0)
    every = sorted([(rows[e], 0, e) for e in current] + [(predicted[e], 1, e) for e in ahead])
    queue, spent = [], dense
    for k, (tokens, next_layer, expert) in enumerate(every):
        spent += costs.expert_ns(facts.cpu, tokens)
        if alpha + (len(every) - k) * x + g < spent:
            queue.append((next_layer, expert))
    first = len(current)
    for i in (current.index(expert) for next_layer, expert in queue if not next_layer):
        if alpha + (len(current) - i) * x + g < sum(c[:i]):
            first = i
            break
    else:
        if current and max(alpha + x + g, sum(c[:-1])) < sum(c):
            first = len(current) - 1
    gap = sum(c[:first]) - alpha - (len(current) - first) * x
    fits = min(max(floor((gap + dense) / x + 0.5), 0), len(ahead)) if any(next_layer for next_layer, _ in queue) else 0
    return Plan([*there, *current[first:]], ahead, fits)


def judged_presched(facts: Facts, source: str) -> list[Judged]:
    """Judge where experts were computed, and what was fetched ahead."""
    plans = {(visit.step, visit.layer): plan(facts, visit, source) for visit in facts.visits}
    found = []
    for visit in facts.visits:
        due = plans[visit.step, visit.layer]
        ends = facts.visit_end(visit.layer, visit.time)
        loads = [load.unit[1] for load in facts.loads if load.unit[0] == visit.layer + 1 and visit.time <= load.submitted < ends]
        text = f"layer {visit.layer} of step {visit.step}: {loads} were fetched ahead, {due.most} of {due.ahead} were due"
        found += [Judged("prefetch", visit.phase, e in due.ahead[: due.most], "other", text) for e in loads]
    return found + judged_assignments(facts, lambda _, visit: plans[visit.step, visit.layer].on_gpu)
