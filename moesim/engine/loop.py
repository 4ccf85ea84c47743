"""The loop over instants, the order within one (rule 2), and deadlocks (rule 10)."""

from __future__ import annotations

from moesim.core.processes import paused
from moesim.core.units import format_bytes, format_ns
from moesim.engine import lanes, links, steps
from moesim.engine.state import State, Transfer
from moesim.engine.steps import report
from moesim.errors import DeadlockError
from moesim.policy import Fetched, Ran, Sent, SharedRan
from moesim.records import Records


def run(state: State) -> Records:
    """Run all steps."""
    records = state.records
    with paused():
        steps.next_step(state)
        flush(state)
        while not state.over:
            if not state.carrier.next_instant():
                raise DeadlockError(explain(state))
            flush(state)
            _hand_out(state)
    links.cut_off(state)
    _order(records)
    records.makespan_ns = records.steps[-1].end
    for name, device in state.devices.items():
        records.peak_bytes[name] = device.memory.peak
        for pool in device.memory.pools.values():
            records.pool_peak_bytes[name, pool.name] = pool.peak
    return records


def _hand_out(state: State) -> None:
    """Hand a piece of records out at the end of a step, when all of its instant is written."""
    records = state.records
    if state.sink is None or state.over or len(records.tasks) < state.piece or not len(records.steps):
        return
    if records.steps[-1].end == state.now:
        running = [lane.task for device in state.devices.values() for lane in (device.main, device.side)]
        starts = [task.start for task in running if task is not None]
        starts += [link.start for link in state.links.values() if link.current is not None]
        _order(records)
        state.sink(records, min([state.now, *starts]))  # before which nothing starts that is not written yet
        records.clear()


def _order(records: Records) -> None:
    """Sort tasks by completion, whichever of an instant came first, once several lanes ran any."""
    if len({(task.device, task.lane) for task in records.tasks}) > 1:
        records.tasks.sort(key=lambda task: (task.end, task.start, task.device, task.lane))


def flush(state: State) -> None:
    """Report what happened at this instant, in the order of rule 2, then start what can start."""
    instant = state.instant
    while True:
        taken = take_in(state)
        visit = None if state.forward is None else state.forward.visit  # none: the first request has not arrived
        if visit is not None and visit.open <= 0:  # below 0: Runs name more rows than slots are open, which is refused
            steps.end_layer(state, visit)
        elif instant.goes_on is not None:
            call, instant.goes_on = instant.goes_on, None
            call()
        elif instant.routed:
            mbs, instant.routed = sorted(instant.routed), []
            for mb in mbs:
                steps.routed(state, mb)
        elif instant.predicted:
            found, instant.predicted = instant.predicted, []
            for prediction in found:
                steps.predicted(state, *prediction)
        elif not taken:
            break
    media, instant.media, instant.blocked = instant.media + instant.blocked, [], []
    for medium in media:
        if not links.start_next(state, medium) and medium not in instant.blocked:
            instant.blocked.append(medium)
    for lane in instant.lanes:
        lanes.start_next(state, lane)
    instant.lanes.clear()


def take_in(state: State) -> bool:
    """Take in completions in the order of submission, and report them; False if there are none."""
    instant = state.instant
    if not (instant.finished or instant.arrived or instant.deferred or instant.sent):
        return False
    finished, instant.finished = sorted(instant.finished, key=lambda task: task.key), []
    for task in finished:
        if task.group is not None:
            task.lane.device.memory.release(task.unit, state.now)
            task.group.into.let_go()
            lanes.progress(state, task.group)
            lanes.computed(state, task)
        elif task.unit.layer < 0:
            instant.goes_on = task.then
        else:
            task.then()  # type: ignore[misc]  # dense parts, which have none, are `routed`
    arrived, instant.arrived = sorted(instant.arrived, key=lambda transfer: transfer.fetch), []
    for transfer in arrived:
        _arrive(state, transfer)
    deferred, instant.deferred = instant.deferred, []
    for call in deferred:
        call()
    for transfer in arrived if Fetched in state.listens else ():
        if transfer.dst is not None:
            report(state, Fetched, transfer.unit.layer, transfer.unit.expert, transfer.dst.name)
    for task in finished if Ran in state.listens else ():
        if task.group is not None:
            report(state, Ran, task.step, task.unit.layer, (task.unit.expert,), task.lane.device.name)
    for task in finished:
        if task.kind == "shared":
            report(state, SharedRan, task.step, task.unit.layer, task.mb, task.lane.device.name)
    sent, instant.sent = instant.sent, []
    for tag in sent:
        report(state, Sent, tag)
    return True


def _arrive(state: State, transfer: Transfer) -> None:
    unit, now, src, dst, pool = transfer.unit, state.now, transfer.src, transfer.dst, transfer.pool
    if src is None or dst is None:
        transfer.on_arrival()  # type: ignore[misc]  # a message has it
        return
    if transfer.transit is not None:
        transfer.transit.memory.hold(-transfer.n_bytes, now)
    del dst.pending[unit]
    src.memory.release(unit, now)
    if pool is None:  # a write-back
        return
    copy = dst.memory.arrive(unit, pool, transfer.fetch)
    copy.in_use = transfer.in_use
    for task in transfer.waiting:
        copy.in_use += 1
        lanes.wake(state, task)
    if transfer.drop_on_arrival:
        dst.memory.leave(unit, "drop", now)


def explain(state: State) -> str:
    """Explain who waits for what, if nothing can happen."""
    visit = state.forward.visit
    layer = visit.layer if visit is not None else -1
    waits = []
    for link in state.links.values():
        for transfer in [one for one in link.medium.queue if one.link is link][:4]:
            dst, pool, unit = transfer.dst, transfer.pool, transfer.unit
            if dst is None or pool is None:
                waits.append(f"a transfer of {format_bytes(transfer.n_bytes)} waits on {link.name}")
                continue
            if transfer.last_hop:
                used, capacity = pool.used[pool.at(unit.layer)], pool.capacity[pool.at(unit.layer)]
                # Only the head of each urgency class of a link asks; that it was asked for, and waits, is noted.
                asked = "evict returned None" if transfer.waited_memory else "evict is asked for those before it first"
                there = f"in pool '{pool.name}' ({format_bytes(used)} of {format_bytes(capacity)} used, {asked})"
            else:
                spare = format_bytes(max(0, link.to.memory.spare))
                there = f"on {link.to.name} on its way ({spare} claimed by nobody)"
            what = f"Fetch(L{unit.layer}/E{unit.expert}, {dst.name}, urgency={transfer.urgency})"
            waits.append(f"{what} waits for memory {there}")
    for name, device in state.devices.items():
        for transfer in device.pending.values():
            for task in transfer.waiting[:2]:
                waits.append(f"Run(L{task.unit.layer}/E{task.unit.expert}, {name}) waits for its fetch")
        if device.main.n_waiting and not device.pending:
            waits.append(f"{device.main.n_waiting} tasks on {name} wait for inputs")
    if visit is not None and any(visit.unserved.values()):
        left = sorted(e for e, rows in visit.unserved.items() if rows)
        n_slots = sum(rows.bit_count() for rows in visit.unserved.values())
        waits.append(f"layer {layer} has {n_slots} unserved slots of experts {left[:8]}: no Run or Skip names them")
    where = f"t={format_ns(state.now)}, step {state.step.index}, layer {layer}"
    who = "; ".join(waits) or "no work is queued"
    return f"{where}: nothing can happen and work remains: {who} [policy={state.policy_name}]"
