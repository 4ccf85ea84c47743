"""Rules that say what is fetched ahead once a later layer is predicted, and the check of what was."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from moesim.testing.rules.evictions import Judged
from moesim.testing.rules.facts import Facts


class Guess(NamedTuple):
    """Fetch the experts with the most predicted rows, unless they are there; of equals any."""

    source: str
    size: int | None  # None: all that are predicted
    over: str = "all"  # the top of all, of which residents are skipped, or of those that are not there ("non-resident")
    width: int | None = None  # ids of a row; None: as many as the model uses
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
        said = facts.predictors[guess.source].predict(step, 0, task.layer) if step.n_micro == 1 else None
        if said is None:
            continue
        ids = said[0][:, : guess.width or facts.model.top_k].tolist()
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
