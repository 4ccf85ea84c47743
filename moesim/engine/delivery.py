"""Telling the policy what the router and the predictors said, and charging for its decisions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moesim.engine.actions import apply, collected, tell
from moesim.engine.lanes import submit, wake
from moesim.engine.links import cross
from moesim.engine.state import State, new_task
from moesim.engine.visit import Visit
from moesim.policy import Predicted, Routed
from moesim.records import DecisionRecord, LookupRecord

_new: Any = tuple.__new__


def routed(state: State, mb: int) -> None:
    """A micro-batch of the present layer has been routed: submit its shared experts and ask the policy."""
    if state.deciding:
        state.undecided.append(mb)
        return
    visit = state.visit
    assert visit is not None
    micro = state.micro[mb]
    layer = visit.layer
    experts, weights, scores, rows, active = micro.layers[layer]
    visit.route(experts, weights, rows, active)
    _look_up(state, visit, mb, rows, active)
    state.mb = mb
    if not visit.mbs_left:
        if visit.early:
            visit.serve_early()
        for call in state.gate_input_waiters.pop(layer, ()):
            call()
    if state.model.n_shared > 0:
        _submit_shared(state, visit, mb)
    if Routed not in state.listens:
        return
    event = _new(Routed, (visit.step, layer, mb, experts, weights, scores, rows, active, micro.first_row))
    actions = state.policy.decide(event, state.view)
    if state.options.decision_ns:
        _charge(state, visit, active, collected(state, actions or ()))
    elif actions:
        apply(state, actions)


def predicted(state: State, step: int, layer: int, source: str, predictor: Any) -> None:
    """A prediction has been paid for; one that comes after its step is of no use and is not told."""
    if step != state.step.index or Predicted not in state.listens:
        return
    if state.deciding:
        state.unheard.append(lambda: predicted(state, step, layer, source, predictor))
        return
    for mb in range(state.n_mbs):
        answer = predictor.predict(state.step, mb, layer)
        if answer is not None:
            tell(state, Predicted(step, layer, mb, answer[0], answer[1], source))


def _look_up(state: State, visit: Visit, mb: int, rows: Sequence[int], active: Sequence[int]) -> None:
    """Record which of the active experts are on a GPU, or on their way to one."""
    base, gpus = visit.base, state.gpus
    if len(state.weights.widths) > 1:
        places = [[base + state.weights.first(bits) + e for bits in state.weights.widths] for e in active]
        hits = tuple([int(any(g.memory.resident[unit] for g in gpus for unit in units)) for units in places])
        flying = tuple([int(any(unit in g.pending for g in gpus for unit in units)) for units in places])
    elif len(gpus) == 1:
        resident = gpus[0].memory.resident
        pending = gpus[0].pending
        hits = tuple([resident[base + e] for e in active])
        flying = tuple([1 if base + e in pending else 0 for e in active]) if pending else (0,) * len(hits)
    else:
        hits = tuple([int(any(g.memory.resident[base + e] for g in gpus)) for e in active])
        flying = tuple([int(any(base + e in g.pending for g in gpus)) for e in active])
    of_active = tuple([rows[e] for e in active])
    state.records.lookups.append(
        _new(LookupRecord, (state.now, visit.step, visit.layer, mb, active, of_active, hits, flying))
    )  # fmt: skip


def _charge(state: State, visit: Visit, active: Sequence[int], actions: list[Any]) -> None:
    """Delay the effect of a decision; what the layer needs, there or on its way, stays in use meanwhile.

    Until then the policy hears nothing else: an answer to what happens meanwhile would take effect before the decision on which
    it builds.
    When the decision takes effect it finds these copies as idle as they are without it: what it drops goes at once, so that a
    Fetch of it after that is a copy. What was dropped before, and was still in use, stays until the decision may have run it.
    """
    mb, now = state.mb, state.now
    state.records.decisions.append(DecisionRecord(now, now + state.options.decision_ns, visit.step, visit.layer))
    visit.hold()
    state.deciding = True
    held = []
    firsts = [visit.base + state.weights.first(bits) for bits in state.weights.widths]
    for device in state.devices:
        for unit in [first + expert for first in firsts for expert in active]:
            copy = device.memory.copies.get(unit) or device.pending.get(unit)
            if copy is not None:
                copy.in_use += 1
                held.append((device, unit, copy.fetch))

    def take_effect() -> None:
        state.mb = mb
        dropped = []
        for device, unit, fetch in held:
            copy, coming = device.memory.copies.get(unit), device.pending.get(unit)
            if copy is not None and copy.fetch == fetch:
                if copy.leaves:
                    dropped.append((device, unit))
                else:
                    copy.in_use -= 1
            elif coming is not None and coming.fetch == fetch:  # else it was given up
                coming.in_use -= 1
        apply(state, actions)
        visit.let_go()
        for device, unit in dropped:
            device.memory.release(unit, state.now)
        state.deciding = False
        unheard, state.unheard = state.unheard, []
        for call in unheard:
            call()
        if state.undecided:
            state.routed.append(state.undecided.pop(0))

    state.carrier.after(state.options.decision_ns, take_effect)


def _submit_shared(state: State, visit: Visit, mb: int) -> None:
    """Submit shared experts for every row, before the routed ones of the same device."""
    layer, rows = visit.layer, state.micro[mb].n_rows
    device, home = state.layout.shared_at[layer], state.layout.dense_at[layer]
    visit.hold()

    def done() -> None:
        cross(state, device, home, layer, rows, "out", visit.let_go, task)

    task = new_task(state, "shared", layer, mb, rows, state.costs.shared_ns(device.name, rows), done)
    task.waits = 1
    if state.layout.streams is not None:
        state.layout.streams.read(state, task, "shared")
    submit(state, device.main, task)
    cross(state, home, device, layer, rows, "in", lambda: wake(state, task), task)
