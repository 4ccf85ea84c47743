"""Lanes of devices, and the host thread that submits Runs to them (rule 4)."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Any

from moesim.engine.contention import FULL
from moesim.engine.machine import DeviceState, Lane, Task
from moesim.engine.state import HostThread, State
from moesim.records import DecisionRecord, TaskRecord

_new: Any = tuple.__new__


def submit(state: State, lane: Lane, task: Task) -> None:
    """Give a lane a task, which may still wait for weights or inputs."""
    task.lane = lane
    if task.waits:
        lane.n_waiting += 1
    else:
        state.carrier.ready(task)


def wake(state: State, task: Task) -> None:
    """Take note that one thing is there that a submitted task waited for."""
    task.waits -= 1
    if not task.waits:
        task.lane.n_waiting -= 1
        task.ready = state.now
        state.carrier.ready(task)


def start_next(state: State, lane: Lane) -> None:
    """Start the first ready task, unless one runs."""
    if lane.task is not None or not lane.queue:
        return
    task = lane.task = heappop(lane.queue)[1]
    task.start = state.now
    if task.unit >= 0:
        read_copy(state, task)
    state.carrier.begin(lane, task)


def read_copy(state: State, task: Task) -> None:
    """Note that a Run reads its copy, and charge the extra of a group's first expert."""
    copy = task.lane.device.memory.copies[task.unit]
    if not copy.used:
        copy.used = True
        if copy.fetch >= 0:
            state.records.used_fetches.add(copy.fetch)
    group = task.group
    if group is not None and group.first_extra:
        task.work += group.first_extra
        group.first_extra = 0


def done(state: State, task: Task, end: int) -> None:
    """Record a task that is done; the loop will tell who must know."""
    lane: Lane = task.lane
    state.records.tasks.append(
        _new(
            TaskRecord,
            (task.start, end, lane.device.name, lane.name, task.kind, task.step, task.layer, task.mb, task.expert, task.rows,
             task.work, task.submitted, task.ready, task.bits),
        )
    )  # fmt: skip
    if task.reads is not None:
        state.layout.streams.read_by(state, task)  # type: ignore[union-attr]  # there are streams if it reads one
    if task.then is None and task.unit < 0:
        state.routed.append(task.mb)  # a dense part: its layer is routed
    else:
        state.finished.append(task)


def reading_share(device: DeviceState, rows: int, bits: float | None) -> int:
    """Return the part of an expert's time that reading its weights takes, in millionths: all of it with one row.

    Of a processor only: what slows a GPU's experts while its links are busy has not been told apart by rows.
    """
    if device.is_gpu or rows <= 1:
        return FULL
    share = device.reading.get((bits, rows))
    if share is None:
        one, all_rows = device.expert_ns[bits](1), device.expert_ns[bits](rows)
        share = device.reading[bits, rows] = max(1, min(FULL, one * FULL // max(1, all_rows)))
    return share


# ------------------------------------------------------------------ the host thread, where a profile says what submitting takes
def take_in_turn(thread: HostThread, task: Task) -> None:
    """Let a Run wait for its submission; `submit_next` begins it once all Runs of a decision are there."""
    task.waits += 1
    heappush(thread.queue, (task.key, task))


def submit_next(state: State, thread: HostThread) -> None:
    """Submit the next Run, unless the thread is busy."""
    while thread.queue and not thread.busy:
        task = heappop(thread.queue)[1]
        if not thread.submit_ns:
            _submit(state, thread, task)
            continue
        thread.busy = True
        now = state.now
        state.records.decisions.append(DecisionRecord(now, now + thread.submit_ns, task.step, task.layer))
        state.carrier.after(thread.submit_ns, lambda task=task: _submitted(state, thread, task))  # type: ignore[misc]


def _submitted(state: State, thread: HostThread, task: Task) -> None:
    thread.busy = False
    _submit(state, thread, task)
    submit_next(state, thread)


def _submit(state: State, thread: HostThread, task: Task) -> None:
    if thread.shared and not task.lane.device.is_gpu:
        thread.busy = True
        thread.computing = task
    wake(state, task)


def computed(state: State, thread: HostThread, task: Task) -> None:
    """Take note that a Run is done: a shared thread goes on once it has computed it."""
    if task is thread.computing:
        thread.computing = None
        thread.busy = False
        submit_next(state, thread)
