"""The action that computes: Run, and the groups in which Runs cross to a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from moesim.engine.checks import device_of, fail, unit_of
from moesim.engine.lanes import submit, take_in_turn, wake
from moesim.engine.links import cross
from moesim.engine.machine import Group, Task
from moesim.engine.state import State, gate_input_exists, new_visit, when_gate_input
from moesim.engine.visit import FRESH, STALE, Early, Visit, bits_of
from moesim.errors import unknown_name
from moesim.policy import Run

Groups = dict[tuple[int, int], Group]
"""Device, and layers of state and experts -> the Runs of one decision that cross together."""


def run(state: State, action: Run, groups: Groups) -> None:
    """Make a task of each expert; those of no group are submitted at once."""
    layer, experts, name, rows, inputs_from, part = action
    device = state.by_name.get(name) or device_of(state, name, "Run")
    if not device.computes:
        fail(state, f"Run(L{layer}, {name}): a disk computes nothing", "run experts where the dense part runs")
    if part != "expert":
        what = f"Run(L{layer}, {name}): {unknown_name('part', part, ['expert'])}"
        fail(state, what, "this model has experts of one precision")
    visit = state.visit
    if visit is None or layer != visit.layer or visit.mbs_left == state.n_mbs or inputs_from is not None:
        visit = _visit_for(state, layer, rows, inputs_from, name)
    n_experts = state.model.n_experts
    group: Group | None = None
    if device is not state.dense_at[layer] or device.first_extra or rows is not None:
        read = layer if inputs_from is None else inputs_from
        key = (device.index, read * state.model.n_layers + layer)
        group = groups.get(key)
        if group is None:
            group = groups[key] = Group(visit, device, read)
    now, numbers = state.now, state.task_numbers
    for expert in experts:
        unit = visit.base + expert
        if rows is None:
            served = visit.take(expert) if 0 <= expert < n_experts else 0
            if not served:
                _nothing_to_run(state, layer, expert, name)
        else:
            served = _take_rows(state, visit, expert, rows, inputs_from)
            visit.hold()  # until its task is done
        if group is not None:
            group.union |= served
        n_rows = served.bit_count()
        work = device.expert_ns(n_rows)
        task = Task(next(numbers), "expert", visit.step, layer, state.mb, n_rows, work, now, now, expert, unit, visit, group)
        task.served = served
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
    visit = state.future.get(layer)
    if visit is None:
        visit = state.future[layer] = new_visit(state, layer)
    return visit


def _nothing_to_run(state: State, layer: int, expert: int, name: str) -> NoReturn:
    unit_of(state, layer, expert, "Run")
    what = f"Run(L{layer}/E{expert}, {name}): no row is routed to it, or all have been taken"
    fail(state, what, "run each active expert once; name rows to run another expert instead")


def _take_rows(state: State, visit: Visit, expert: int, rows: Sequence[int], inputs_from: int | None) -> int:
    layer, n_step = visit.layer, state.step_rows
    unit_of(state, layer, expert, "Run")
    if any(not 0 <= r < n_step for r in rows) or len(set(rows)) != len(rows):
        fail(state, f"Run(L{layer}/E{expert}): rows {list(rows)[:8]}", f"name distinct rows in 0..{n_step - 1}")
    stale = inputs_from is not None and inputs_from != layer
    served = bits_of(rows)
    if max(rows) < visit.routed_rows:
        visit.serve(expert, served, STALE if stale else FRESH, stale)
    else:
        visit.early = (*visit.early, Early(expert, served, stale))
    return served


def launch(state: State, group: Group) -> None:
    """Submit a group: at once where the hidden state is, else when its rows have crossed."""
    visit = group.visit
    layer = visit.layer
    group.left = len(group.tasks)
    group.rows = group.union.bit_count()
    home = state.dense_at[group.inputs_from]
    for task in group.tasks:
        task.waits += 1
        if state.thread is not None:
            take_in_turn(state.thread, task)
        submit(state, group.device.main, task)
    visit.hold()  # until its outputs are back

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
    visit = group.visit
    cross(state, group.device, state.dense_at[visit.layer], visit.layer, group.rows, "out", visit.let_go, group)
