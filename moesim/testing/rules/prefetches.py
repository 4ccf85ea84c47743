"""Rules for prefetches after a prediction, PreScope's plan included, and their check."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from math import floor
from typing import NamedTuple

import numpy as np

from moesim.testing.rules.assignments import judged_assignments
from moesim.testing.rules.evictions import Judged
from moesim.testing.rules.facts import Facts, Visit


class Guess(NamedTuple):
    """Fetch the experts with the most predicted rows, unless they are there; of equals any."""

    source: str
    size: int | None  # None: all that are predicted
    over: str = "all"  # the top of all, of which residents are skipped, or of those that are not there ("non-resident")
    more: int = 0  # ids of a row beyond those that the model uses
    first: bool = False  # the first predicted one of the only row, not the one with the most rows


def judged_prefetches(facts: Facts, guess: Guess) -> list[Judged]:
    """Judge what was fetched ahead for each layer that was predicted before it was routed."""
    routed = {(visit.step, visit.layer): visit.time for visit in facts.visits if visit.mb == 0}
    found = []
    for task in facts.records.tasks:
        until = routed.get((task.step, task.layer), 0)
        if task.kind != "predict" or task.end >= until:
            continue
        step = facts.workload.steps[task.step]
        width = facts.model.top_k + guess.more
        source = facts.predictors[f"{guess.source}:top{width}" if guess.more else guess.source]
        said = source.predict(step, 0, task.layer) if step.n_micro == 1 else None
        if said is None:
            continue
        ids = said[0][:, :width].tolist()
        counts = Counter(expert for row in ids for expert in row)
        there = facts.held(task.layer, task.end)
        if guess.first:
            counts = Counter({expert: -place for place, expert in enumerate(ids[0])})
        over = [e for e in counts if guess.over == "all" or e not in there]
        ranks = sorted((counts[e] for e in over), reverse=True)
        least = ranks[min(guess.size or len(ranks), len(ranks)) - 1] if ranks else 0
        may = {e for e in over if counts[e] >= least}
        due = {e for e in may if counts[e] > least or len(may) <= (guess.size or len(may))} - there
        ahead = [load.unit[1] for load in facts.loads if load.unit[0] == task.layer and task.end <= load.submitted < until]
        if any(piece.start <= until < piece.end for piece in facts.records.transfers):
            due = set()  # what the link has not come to is given up with the layer, without a record
        at, phase = f"layer {task.layer} of step {task.step}", step.phase
        found += [Judged("prefetch", phase, e in may, "" if e in may else "other", f"{at}: {e} was not due") for e in ahead]
        found += [Judged("prefetch", phase, False, "other", f"{at}: {e} was due") for e in sorted(due.difference(ahead))]
    return found


def judged_by_impact(facts: Facts, lookahead: int) -> list[Judged]:
    """Judge HybriMoE's prefetches by the next gates' choice on the present state, as published."""
    named: dict[tuple[int, int], list[tuple[int, set[int]]]] = defaultdict(list)  # step and layer -> when it is known, and who
    for task in facts.records.tasks:
        if task.kind == "predict":
            now = max(visit.layer for visit in facts.visits if visit.step == task.step and visit.time <= task.submitted)
            source = facts.predictors[f"signal:gate_next{task.layer - now}"]
            said = source.predict(facts.workload.steps[task.step], 0, task.layer) if task.layer - now <= lookahead else None
            ids = set() if said is None else set(said[0][:, : facts.model.top_k].ravel().tolist())
            named[task.step, task.layer].append((task.end, ids))
    found = []
    for load in facts.loads:
        step = facts.step(load.submitted)
        routed = next(visit.time for visit in facts.visits if (visit.step, visit.layer) == (step.step, load.unit[0]))
        if load.submitted < routed:
            ok = any(time <= load.submitted and load.unit[1] in ids for time, ids in named[step.step, load.unit[0]])
            text = f"at {load.submitted} {load.unit} was fetched ahead"
            found.append(Judged("prefetch", step.phase, ok, "" if ok else "other", text))
    return found


def judged_od_moe(facts: Facts, source: str, workers: str) -> list[Judged]:
    """Judge OD-MoE's decoding: group l mod n loads and computes the shadow's experts of layer l."""
    names = sorted(
        (name for name in facts.costs.hardware.devices if name.startswith(workers) and name not in facts.hosts), key=_number
    )
    size, found = facts.model.top_k, []
    groups = [names[i : i + size] for i in range(0, len(names) - size + 1, size)]
    visits = {(visit.step, visit.layer): visit for visit in facts.visits if visit.phase == "decode"}
    for task in facts.tasks:
        if (task.step, task.layer) in visits:
            ok = task.device in groups[task.layer % len(groups)]
            text = f"expert {task.expert} of layer {task.layer} in step {task.step} on {task.device}"
            found.append(Judged("assignment", "decode", ok, "" if ok else "other", text))
    for piece in facts.records.transfers:
        step = facts.step(piece.submitted)
        visit = visits.get((step.step, piece.layer))
        if piece.expert < 0 or not piece.last or visit is None or piece.submitted >= visit.time or piece.cause == "update":
            continue
        said = facts.predictors[source].predict(facts.workload.steps[step.step], 0, piece.layer)
        ok = (
            said is not None
            and piece.expert in said[0][:, :size].ravel()
            and piece.link.endswith(tuple(groups[piece.layer % len(groups)]))
        )
        text = f"at {piece.submitted} expert {piece.expert} of layer {piece.layer} went over {piece.link}"
        found.append(Judged("prefetch", "decode", ok, "" if ok else "other", text))
    return found


def judged_klotski(facts: Facts, n_hot: int | None) -> list[Judged]:
    """Judge Klotski's hot experts, by votes of the layer before."""
    # Each choice of a row there votes for the k that it was used with most so far.
    pairs, k, found = facts.tables["coactivation"].astype(np.float64), facts.model.top_k, []
    first, before = pairs[0].sum(axis=1) / k, np.zeros((0, k), np.int64)
    for layer in sorted(facts.records.layers, key=lambda one: one.begin):
        at = layer.layer
        votes = np.zeros_like(first) if at else first
        for used in before.ravel().tolist() if at else ():
            votes[np.argsort(-pairs[at - 1][used], kind="stable")[:k]] += 1
        hot = set(np.argsort(-votes, kind="stable")[: n_hot or k].tolist())
        micro = facts.workload.steps[layer.step].micro
        routed = next(visit.time for visit in facts.visits if (visit.step, visit.layer) == (layer.step, at))
        ahead = {load.unit[1] for load in facts.loads if load.unit[0] == at and layer.begin <= load.submitted < routed}
        for expert in sorted(hot | ahead):
            ok = expert in hot and (expert in ahead or expert in facts.held(at, layer.begin))
            text = f"layer {at} of step {layer.step}: {sorted(ahead)} were fetched ahead, {sorted(hot)} were due"
            found.append(Judged("prefetch", facts.phase(layer.begin), ok, "" if ok else "other", text))
        rows = np.concatenate([part.experts[:, at] for part in micro]).astype(np.int64)
        if at:
            np.add.at(pairs[at - 1], (np.repeat(before, k, axis=1).ravel(), np.tile(rows, (1, k)).ravel()), 1)
        else:
            np.add.at(first, rows.ravel(), 1)
        before = rows
    return found


def _number(name: str) -> tuple[int, str]:
    return int("".join(filter(str.isdigit, name)) or 0), name


# ------------------------------------------------------------------------------ PreScope, Algorithm 1: loads and prefetches
class PreSched(NamedTuple):
    """Decisions of a layer visit, as our reading has them."""

    on_gpu: Collection[int]
    ahead: Sequence[int]  # absent experts that are predicted in the next layer, hottest first
    most: int  # of these to prefetch; or one fewer, by how often predictions came true


def presched(facts: Facts, visit: Visit, source: str) -> PreSched:
    """Plan a visit by its prediction: eq. 4 over both layers, 5 and 2 over this, 7 for the next."""
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
    return PreSched([*there, *current[first:]], ahead, fits)


def judged_presched(facts: Facts, source: str) -> list[Judged]:
    """Judge where experts were computed, and what was fetched ahead."""
    plans = {(visit.step, visit.layer): presched(facts, visit, source) for visit in facts.visits}
    found = []
    for visit in facts.visits:
        due = plans[visit.step, visit.layer]
        ends = facts.visit_end(visit.layer, visit.time)
        loads = [load.unit[1] for load in facts.loads if load.unit[0] == visit.layer + 1 and visit.time <= load.submitted < ends]
        text = f"layer {visit.layer} of step {visit.step}: {loads} were fetched ahead, {due.most} of {due.ahead} were due"
        found += [Judged("prefetch", visit.phase, e in due.ahead[: due.most], "other", text) for e in loads]
    return found + judged_assignments(facts, lambda _, visit: plans[visit.step, visit.layer].on_gpu)
