"""Lanes of devices, groups of Runs, and the host thread that submits Runs (rules 4 and 8)."""

from __future__ import annotations

from moesim.engine.links import cross
from moesim.engine.state import Group, HostThread, Lane, State, Task
from moesim.records import DecisionRecord, TaskRecord


def submit(state: State, lane: Lane, task: Task) -> None:
    """Submit a task to a lane; it may still wait for weights or inputs."""
    task.lane = lane
    if task.waits:
        lane.n_waiting += 1
    else:
        state.carrier.ready(task)


def wake(state: State, task: Task) -> None:
    """Note that one thing is there that a submitted task waited for."""
    task.waits -= 1
    if not task.waits:
        task.lane.n_waiting -= 1
        task.ready = state.now
        state.carrier.ready(task)


def start_next(state: State, lane: Lane) -> None:
    """Start the ready task that was submitted first, unless one runs."""
    if lane.task is not None or not lane.queue:
        return
    task = lane.task = min(lane.queue, key=lambda one: one.key)
    lane.queue.remove(task)
    task.start = state.now
    if task.group is not None:
        read_copy(state, task)
    state.carrier.begin(lane, task)


def read_copy(state: State, task: Task) -> None:
    """Note that a Run reads its copy, and charge the extra of a group's first expert."""
    copy, group = task.lane.device.memory.copies[task.unit], task.group
    assert group is not None
    copy.used = True
    if copy.fetch >= 0:
        state.records.used_fetches.add(copy.fetch)
    task.work += group.first_extra
    if group.more_rows:
        task.work += group.more_rows[min(group.union.bit_count(), len(group.more_rows) - 1)]
    group.first_extra, group.more_rows = 0, ()


def done(state: State, task: Task, end: int) -> None:
    """Record a task that is done; the loop reports it to who must know."""
    lane, (layer, expert, bits) = task.lane, task.unit
    state.records.tasks.append(
        TaskRecord(
            task.start, end, lane.device.name, lane.name, task.kind, task.step, layer, task.mb, expert, task.rows, task.work,
            task.submitted, task.ready, bits,
        )
    )  # fmt: skip
    if task.reads is not None:
        state.forward.layout.streams.read_by(state, task)
    if task.then is None and task.group is None:
        state.instant.routed.append(task.mb)  # a dense part: its layer is routed
    else:
        state.instant.finished.append(task)


# -------------------------------------------------------------------------------------------------------- groups of Runs
def launch(state: State, group: Group) -> None:
    """Submit a group: at once where the hidden state is, else when its rows have crossed."""
    layer, forward, read = group.visit.layer, state.forward, group.inputs_from
    group.left = len(group.tasks)
    for task in group.tasks:
        task.waits += 1
        if state.thread is not None:
            task.waits += 1  # for its turn
            state.thread.queue.append(task)
        submit(state, group.device.main, task)
    group.into.hold()  # until its outputs are back

    def wake_all() -> None:
        for task in group.tasks:
            wake(state, task)

    def bring_inputs() -> None:
        home = forward.layout.dense_at[read]
        cross(state, home, group.device, layer, group.union.bit_count(), "in", wake_all, group)

    # Of the layer itself, the micro-batches that it reads may be routed, if not all are.
    if forward.gate_input_exists(read) or (read == layer and group.union.bit_length() <= group.visit.routed_rows):
        bring_inputs()
    else:
        forward.gate_input_waiters[read].append(bring_inputs)


def progress(state: State, group: Group) -> None:
    """Note that one Run of a group is done; with the last, its outputs go back."""
    group.left -= 1
    if not group.left:
        home = state.forward.layout.dense_at[group.into.layer]
        rows = group.union.bit_count()
        cross(state, group.device, home, group.visit.layer, rows, "out", group.into.let_go, group)


# ------------------------------------------------------------------ the host thread, where a profile says what submitting takes
def submit_next(state: State) -> None:
    """Submit the Runs whose turn it is, one after another, unless the thread is busy."""
    thread = state.thread
    while thread is not None and thread.queue and not thread.busy:
        task = min(thread.queue, key=lambda one: one.key)
        thread.queue.remove(task)
        if not thread.submit_ns:
            _submit(state, thread, task)
            continue
        thread.busy = True
        layer, now = task.unit.layer, state.now
        state.records.decisions.append(DecisionRecord(now, now + thread.submit_ns, task.step, layer))
        state.carrier.after(thread.submit_ns, lambda task=task: _submitted(state, thread, task))  # type: ignore[misc]


def _submitted(state: State, thread: HostThread, task: Task) -> None:
    thread.busy = False
    _submit(state, thread, task)
    submit_next(state)


def _submit(state: State, thread: HostThread, task: Task) -> None:
    if thread.shared and not task.lane.device.is_gpu:
        thread.busy = True
        thread.computing = task
    wake(state, task)


def computed(state: State, task: Task) -> None:
    """Note that a Run is done: a shared thread goes on once it has computed it."""
    if state.thread is not None and task is state.thread.computing:
        state.thread.computing = None
        state.thread.busy = False
        submit_next(state)
