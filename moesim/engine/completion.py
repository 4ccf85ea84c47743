"""Taking in what has ended at an instant: first all states and memory, then what the policy is told of it (rule 2)."""

from __future__ import annotations

from typing import Any

from moesim.engine import host_thread, runs
from moesim.engine.actions import tell
from moesim.engine.lanes import wake
from moesim.engine.machine import Task, Transfer
from moesim.engine.state import State
from moesim.policy import Fetched, Ran, Sent, SharedRan

_new: Any = tuple.__new__


def _submission(task: Task) -> int:
    return task.key


def _fetch_number(transfer: Transfer) -> int:
    return transfer.fetch


def take_in(state: State) -> None:
    """Take in completions, in the order of submission."""
    finished, arrived = state.finished, state.arrived
    if finished:
        state.finished = []
        if len(finished) > 1:
            finished.sort(key=_submission)
        for task in finished:
            if task.unit < 0:
                task.then()
                continue
            task.lane.device.memory.release(task.unit, state.now)
            task.visit.open -= 1  # type: ignore[union-attr]  # the task of an expert has one
            if task.group is not None:
                runs.progress(state, task.group)
            if state.thread is not None:
                host_thread.done(state, state.thread, task)
    if arrived:
        state.arrived = []
        if len(arrived) > 1:
            arrived.sort(key=_fetch_number)
        for transfer in arrived:
            _arrive(state, transfer)
    if state.deferred:
        deferred, state.deferred = state.deferred, []
        for call in deferred:
            call()
    if arrived and Fetched in state.listens:
        for transfer in arrived:
            if transfer.unit >= 0:
                tell(state, _new(Fetched, (transfer.layer, transfer.expert, transfer.dst.name)))
    if finished and Ran in state.listens:
        for task in finished:
            if task.unit >= 0:
                tell(state, _new(Ran, (task.step, task.layer, (task.expert,), task.lane.device.name)))
    if finished and SharedRan in state.listens:
        for task in finished:
            if task.kind == "shared":
                tell(state, _new(SharedRan, (task.step, task.layer, task.mb, task.lane.device.name)))
    if state.sent:
        sent, state.sent = state.sent, []
        for tag in sent:
            tell(state, _new(Sent, (tag,)))


def _arrive(state: State, transfer: Transfer) -> None:
    unit, now = transfer.unit, state.now
    if unit < 0:
        transfer.on_arrival()
        return
    dst = transfer.dst
    if transfer.transit is not None:
        transfer.transit.memory.hold(-transfer.n_bytes, now)
    del dst.pending[unit]
    state.by_name[transfer.src].memory.release(unit, now)
    if dst.backing:
        return
    copy = dst.memory.arrive(unit, transfer.pool, transfer.fetch)
    copy.in_use = transfer.in_use
    for task in transfer.waiting:
        copy.in_use += 1
        wake(state, task)
    if transfer.drop_on_arrival:
        dst.memory.drop(unit, now)
