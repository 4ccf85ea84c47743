"""The loop over instants, and the order of things within one (rule 2)."""

from __future__ import annotations

from operator import itemgetter

from moesim.core import collector
from moesim.engine import completion, delivery, lanes, links, steps
from moesim.engine.state import State
from moesim.engine.stuck import explain
from moesim.errors import DeadlockError
from moesim.records import Records

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
    records = state.records
    if len({(task[2], task[3]) for task in records.tasks}) > 1:
        records.tasks.sort(key=_completion)  # independent of which completion of an instant came first
    records.makespan_ns = records.steps[-1].end
    for device in state.devices:
        records.peak_bytes[device.name] = device.memory.peak
        for pool in device.memory.pools.values():
            records.pool_peak_bytes[device.name, pool.name] = pool.peak
    return records


def flush(state: State) -> None:
    """Tell what happened at this instant, in the order of rule 2, then start what can start."""
    while True:
        if state.finished or state.arrived or state.deferred or state.sent:
            completion.take_in(state)
        visit = state.visit
        if visit is not None and visit.open <= 0:
            steps.end_layer(state, visit)
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
