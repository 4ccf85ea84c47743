"""The loop over instants, and the order of things within one (rule 2)."""

from __future__ import annotations

from operator import attrgetter, itemgetter
from typing import Any

from moesim.core import collector
from moesim.engine import delivery, lanes, links, runs, steps
from moesim.engine.actions import tell
from moesim.engine.machine import Transfer
from moesim.engine.state import State
from moesim.engine.stuck import explain
from moesim.errors import DeadlockError
from moesim.policy import Fetched, Ran, Sent, SharedRan
from moesim.records import Records

_new: Any = tuple.__new__
_completion = itemgetter(1, 0, 2, 3)  # end, start, device, lane of a TaskRecord


def run(state: State) -> Records:
    """Carry out all steps."""
    with collector.paused():
        steps.next_step(state)
        flush(state)
        while not state.over:
            if not state.carrier.next_instant():
                raise DeadlockError(explain(state))
            flush(state)
            if state.sink is not None and not state.over and len(state.records.tasks) >= state.piece and _at_step_end(state):
                _order(state.records)
                state.sink(state.records, _settled(state))
                state.records.clear()
    records = state.records
    links.cut_off(state)
    _order(records)
    records.makespan_ns = records.steps[-1].end
    for device in state.devices:
        records.peak_bytes[device.name] = device.memory.peak
        for pool in device.memory.pools.values():
            records.pool_peak_bytes[device.name, pool.name] = pool.peak
    return records


def _at_step_end(state: State) -> bool:
    """Whether a step has ended at this instant, of which all is written now."""
    steps = state.records.steps
    return bool(steps) and steps[-1].end == state.now


def _settled(state: State) -> int:
    """Return the time before which nothing starts that is not written yet."""
    running = (lane.task.start for device in state.devices for lane in (device.main, device.side) if lane.task is not None)
    return min([state.now, *running, *(link.start for link in state.links.values() if link.current is not None)])


def _order(records: Records) -> None:
    if len({(task[2], task[3]) for task in records.tasks}) > 1:
        records.tasks.sort(key=_completion)  # independent of which completion of an instant came first


def flush(state: State) -> None:
    """Tell what happened at this instant, in the order of rule 2, then start what can start."""
    while True:
        if state.finished or state.arrived or state.deferred or state.sent:
            take_in(state)
        visit = state.visit
        if visit is not None and visit.open <= 0:  # below 0: Runs name more rows than slots are open, which `end_layer` refuses
            steps.end_layer(state, visit)
        elif state.goes_on is not None:
            call, state.goes_on = state.goes_on, None
            call()
        elif state.routed:
            mbs, state.routed = state.routed, []
            for mb in sorted(mbs) if len(mbs) > 1 else mbs:
                delivery.routed(state, mb)
        elif state.predicted:
            found, state.predicted = state.predicted, []
            for prediction in found:
                delivery.predicted(state, *prediction)
        elif not (state.finished or state.arrived or state.deferred or state.sent):
            break
    if state.blocked:
        state.media_to_start += state.blocked
        state.blocked = []
    if state.media_to_start:
        media, state.media_to_start = state.media_to_start, []
        for medium in media:
            if not links.start_next(state, medium) and medium not in state.blocked:
                state.blocked.append(medium)
    if state.lanes_to_start:
        for lane in state.lanes_to_start:
            lanes.start_next(state, lane)
        state.lanes_to_start.clear()


def take_in(state: State) -> None:
    """Take in completions, in the order of submission."""
    finished, arrived = state.finished, state.arrived
    if finished:
        state.finished = []
        if len(finished) > 1:
            finished.sort(key=attrgetter("key"))
        for task in finished:
            if task.unit < 0:
                if task.layer < 0:
                    state.goes_on = task.then
                else:
                    task.then()
                continue
            task.lane.device.memory.release(task.unit, state.now)
            task.visit.let_go()  # type: ignore[union-attr]  # the task of an expert has one
            if task.group is not None:
                runs.progress(state, task.group)
            if state.thread is not None:
                lanes.computed(state, state.thread, task)
    if arrived:
        state.arrived = []
        if len(arrived) > 1:
            arrived.sort(key=attrgetter("fetch"))
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
        lanes.wake(state, task)
    if transfer.drop_on_arrival:
        dst.memory.drop(unit, now)
