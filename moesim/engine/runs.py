"""The action that computes: Run, and the groups in which Runs cross to a device."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import NoReturn

from moesim.engine.checks import device_of, fail, first_of, unit_of
from moesim.engine.lanes import submit, take_in_turn, wake
from moesim.engine.links import cross
from moesim.engine.machine import Group, Task
from moesim.engine.state import State, gate_input_exists, new_visit, when_gate_input
from moesim.engine.visit import FRESH, LATE, REDUCED, STALE, Early, Visit, bits_of
from moesim.policy import Run

Groups = dict[tuple[int, int, bool, int], Group]
"""Device, layers of state and experts, whether late, part -> the Runs of one decision that cross together."""


def run(state: State, action: Run, groups: Groups) -> None:
    """Make a task of each expert; those of no group are submitted at once."""
    _, experts, name, rows, inputs_from, bits, late, part = action
    layer, late = index(action.layer), bool(late)
    if inputs_from is not None:
        inputs_from = index(inputs_from)
    device = state.by_name.get(name) or device_of(state, name, "Run")
    if not device.computes:
        fail(state, f"Run(L{layer}, {name}): a disk computes nothing", "run experts where the dense part runs")
    visit = state.visit
    if visit is None or layer != visit.layer or visit.mbs_left == state.n_mbs or inputs_from is not None:
        visit = _visit_for(state, layer, rows, inputs_from, name)
    first = visit.base + first_of(state, bits, f"Run(L{layer}, {name})") if bits is not None else visit.base
    bits = state.weights.bits(first)  # None, too, if the full width was asked for by its bits
    into = _next_visit(state, visit, name) if late else visit
    whole = rows is None and bits is None and not late
    kind = LATE if late else FRESH if bits is None else REDUCED
    n_experts = state.model.n_experts
    group: Group | None = None
    if device is not state.layout.dense_at[layer] or device.first_extra or not whole:
        read = layer if inputs_from is None else inputs_from
        key = (device.index, read * state.model.n_layers + layer, late, index(part))
        group = groups.get(key)
        if group is None:
            group = groups[key] = Group(visit, into, device, read)
    now, numbers, expert_ns = state.now, state.task_numbers, device.expert_ns[bits]
    for expert in map(index, experts):
        unit = first + expert
        if rows is None and not (visit.unserved[expert] if 0 <= expert < n_experts else 0):
            _nothing_to_run(state, layer, expert, name)
        if whole:
            served = visit.take(expert)
        else:
            served = visit.unserved[expert] if rows is None else _bits_of_rows(state, layer, expert, rows)
            _serve(visit, expert, served, inputs_from, kind)
            into.hold()  # until its task is done
        if group is not None:
            group.union |= served
        n_rows = served.bit_count()
        work = expert_ns(n_rows)
        task = Task(next(numbers), "expert", visit.step, layer, state.mb, n_rows, work, now, now, expert, unit, into, group)
        task.served, task.bits = served, bits
        copy = device.memory.copies.get(unit)
        if copy is not None:
            copy.in_use += 1
        else:
            transfer = device.pending.get(unit)
            if transfer is None:
                what = f"Run(L{layer}/E{expert}, {name}): not resident and no fetch pending"
                fail(state, what, f"return Fetch(L{layer}/E{expert}, {name}) before it")
            transfer.waiting.append(task)
            task.waits = 1
        if group is None:
            if state.thread is not None:
                take_in_turn(state.thread, task)
            submit(state, device.main, task)
        else:
            group.tasks.append(task)


def _visit_for(state: State, layer: int, rows: Sequence[int] | None, inputs_from: int | None, name: str) -> Visit:
    """Return the visit that a Run belongs to when it is not simply the present, routed layer."""
    now = state.visit
    now_layer = now.layer if now is not None else state.reached + 1
    if not now_layer <= layer < state.model.n_layers:
        what = f"Run(L{layer}, {name}): that layer is over or does not exist"
        fail(state, what, "run experts of this layer or a later one of this step")
    routed = now is not None and layer == now_layer and now.mbs_left < state.n_mbs
    if inputs_from is not None and not 0 <= inputs_from <= layer:
        fail(state, f"Run(L{layer}, {name}): inputs_from={inputs_from}", f"name a layer in 0..{layer}")
    if not routed and rows is None:
        fail(state, f"Run(L{layer}, {name}): not routed yet", "name its rows, or wait for Routed")
    if inputs_from is not None and rows is None:
        fail(state, f"Run(L{layer}, {name}): inputs_from without rows", "name the rows that read the other state")
    if layer == now_layer and now is not None:
        return now
    return _future_visit(state, layer)


def _future_visit(state: State, layer: int) -> Visit:
    visit = state.future.get(layer)
    if visit is None:
        visit = state.future[layer] = new_visit(state, layer)
    return visit


def _next_visit(state: State, visit: Visit, name: str) -> Visit:
    """Return the visit that late outputs of a layer are added to."""
    layer = visit.layer + 1
    if layer == state.model.n_layers:
        fail(state, f"Run(L{visit.layer}, {name}, late): no layer comes after it", "run the last layer's experts in time")
    return _future_visit(state, layer)


def _nothing_to_run(state: State, layer: int, expert: int, name: str) -> NoReturn:
    unit_of(state, layer, expert, "Run")
    what = f"Run(L{layer}/E{expert}, {name}): no row is routed to it, or all have been taken"
    fail(state, what, "run each active expert once; name rows to run another expert instead")


def _bits_of_rows(state: State, layer: int, expert: int, rows: Sequence[int]) -> int:
    n_step = state.step_rows
    unit_of(state, layer, expert, "Run")
    named = list(map(index, rows))
    if any(not 0 <= r < n_step for r in named) or len(set(named)) != len(named):
        fail(state, f"Run(L{layer}/E{expert}): rows {named[:8]}", f"name distinct rows in 0..{n_step - 1}")
    return bits_of(named)


def _serve(visit: Visit, expert: int, rows: int, inputs_from: int | None, kind: int) -> None:
    """Serve some rows, now or once they are routed; what is stale is so before it is anything else."""
    stale = inputs_from is not None and inputs_from != visit.layer
    early = Early(expert, rows, STALE if stale else kind, stale)
    if rows.bit_length() <= visit.routed_rows:
        visit.serve(*early)
    else:
        visit.early = (*visit.early, early)


def launch(state: State, group: Group) -> None:
    """Submit a group: at once where the hidden state is, else when its rows have crossed."""
    visit = group.visit
    layer = visit.layer
    group.left = len(group.tasks)
    group.rows = group.union.bit_count()
    home = state.layout.dense_at[group.inputs_from]
    for task in group.tasks:
        task.waits += 1
        if state.thread is not None:
            take_in_turn(state.thread, task)
        submit(state, group.device.main, task)
    group.into.hold()  # until its outputs are back

    def wake_all() -> None:
        for task in group.tasks:
            wake(state, task)

    def bring_inputs() -> None:
        cross(state, home, group.device, layer, group.rows, "in", wake_all, group)

    ready = gate_input_exists(state, group.inputs_from)
    if not ready and group.inputs_from == layer:  # the micro-batches it reads may be routed, if not all are
        ready = group.union.bit_length() <= visit.routed_rows
    if ready:
        bring_inputs()
    else:
        when_gate_input(state, group.inputs_from, bring_inputs)


def progress(state: State, group: Group) -> None:
    """Take note that one Run of a group is done; with the last, its outputs go back."""
    group.left -= 1
    if group.left:
        return
    layer, into = group.visit.layer, group.into
    cross(state, group.device, state.layout.dense_at[into.layer], layer, group.rows, "out", into.let_go, group)
