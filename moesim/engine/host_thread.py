"""The host thread that submits Runs one after another, where a profile says what that takes."""

from __future__ import annotations

from heapq import heappop, heappush

from moesim.engine.lanes import wake
from moesim.engine.machine import Task
from moesim.engine.state import HostThread, State
from moesim.records import DecisionRecord


def take(thread: HostThread, task: Task) -> None:
    """Let a Run wait for its submission; `advance` begins it once all Runs of a decision are there."""
    task.waits += 1
    heappush(thread.queue, (task.key, task))


def advance(state: State, thread: HostThread) -> None:
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
    advance(state, thread)


def _submit(state: State, thread: HostThread, task: Task) -> None:
    if thread.shared and not task.lane.device.is_gpu:
        thread.busy = True
        thread.computing = task
    wake(state, task)


def done(state: State, thread: HostThread, task: Task) -> None:
    """Take note that a Run is done: a shared thread goes on once it has computed it."""
    if task is thread.computing:
        thread.computing = None
        thread.busy = False
        advance(state, thread)
