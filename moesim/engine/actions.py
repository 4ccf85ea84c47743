"""Running what a policy returns: validation first, then effect, in the order returned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from operator import index
from typing import Any, NoReturn

from moesim.engine.lanes import launch, submit, submit_next, wake
from moesim.engine.links import enqueue, hasten, path_between, send_message
from moesim.engine.memory import PoolState, Unit
from moesim.engine.state import DeviceState, Group, State, Task, Transfer, device_of, fail, pool_of, short_repr, unit_of, width_of
from moesim.engine.visit import FRESH, LATE, REDUCED, SKIPPED, STALE, Visit, bits_of, rows_of
from moesim.errors import HardwareError, unknown_name
from moesim.policy import DEMAND, Action, Drop, Fetch, Move, Predict, Run, Send, Skip, Work

AHEAD = -(1 << 60)  # added to the number of a task that goes ahead of everything queued (Predict on the main lane)
WRONG_TYPE = "give integers for layers, rows and urgency, sequences of integers for experts, names for devices and pools"
Groups = dict[tuple[Any, ...], Group]
"""Device, layers of state and experts, whether late, part -> the Runs of one decision that cross together."""


def collected(state: State, actions: Iterable[Any]) -> list[Any]:
    """Collect an answer before any of it takes effect."""
    # A generator must not see its own consequences.
    if isinstance(actions, Action):  # a tuple itself: its fields are no actions
        fail(state, f"decide returned a bare {actions!r}", "return a list of actions")
    if isinstance(actions, str) or not isinstance(actions, Iterable):
        fail(state, f"decide returned {short_repr(actions)}", "return a list of actions")
    return list(actions)


def apply(state: State, actions: Iterable[Any]) -> None:
    """Apply the actions returned for one event; Runs that share a device and layer form a group."""
    groups: Groups = {}
    for action in collected(state, actions):
        try:
            if _is_empty(action):
                continue
            if type(action) is Run:
                run(state, action, groups)
            elif type(action) in _APPLY:
                _APPLY[type(action)](state, action)
            else:
                fail(state, f"decide returned {action!r}", "return Fetch, Drop, Move, Run, Skip, Predict, Send or Work")
        except TypeError:
            fail(state, f"decide returned {short_repr(action)}", WRONG_TYPE)
    for group in groups.values():
        launch(state, group)
    submit_next(state)


def _is_empty(action: Any) -> bool:
    if type(action) not in (Fetch, Drop, Move, Run, Skip):
        return False
    return not len(action.experts) or (type(action) in (Run, Skip) and action.rows is not None and not len(action.rows))


# ----------------------------------------------------------------------------------------------------------------- Run
def run(state: State, action: Run, groups: Groups) -> None:
    """Make a task of each expert, in the group of its device and layer."""
    layer, name, rows, late = index(action.layer), action.device, action.rows, bool(action.late)
    inputs_from = None if action.inputs_from is None else index(action.inputs_from)
    device = device_of(state, name, "Run")
    if not device.computes:
        fail(state, f"Run(L{layer}, {name}): a disk computes nothing", "run experts where the dense part runs")
    visit = _visit_for(state, layer, rows, inputs_from, name)
    bits = width_of(state, action.bits, f"Run(L{layer}, {name})")
    into = _next_visit(state, layer, name) if late else visit
    stale = inputs_from is not None and inputs_from != layer
    kind = STALE if stale else LATE if late else FRESH if bits is None else REDUCED
    read = layer if inputs_from is None else inputs_from
    key = (device.name, read, layer, late, index(action.part))
    if key not in groups:
        groups[key] = Group(visit, into, device, read, state.costs.first_extra_ns(name), state.costs.more_rows_table(name))
    group, now = groups[key], state.now
    for expert in map(index, action.experts):
        if rows is None:
            served = visit.unserved[expert]
            if not served:
                _refuse_unrouted(state, layer, expert, name)
        else:
            served = _named_rows(state, layer, expert, rows)
        n_rows, unit = served.bit_count(), Unit(layer, expert, bits)
        work = state.costs.at_bits(bits).expert_ns(name, n_rows)
        visit.serve(expert, served, kind, stale)
        into.hold()  # until its task is done
        group.union |= served
        task = Task(next(state.task_numbers), "expert", visit.step, unit, state.forward.mb, n_rows, work, now, now)
        task.group, task.served = group, served
        group.tasks.append(task)
        if unit in device.memory.copies:
            device.memory.copies[unit].in_use += 1
        elif unit in device.pending:
            device.pending[unit].waiting.append(task)
            task.waits = 1
        else:
            what = f"Run(L{layer}/E{expert}, {name}): not resident and no fetch pending"
            fail(state, what, f"return Fetch(L{layer}/E{expert}, {name}) before it")


def _visit_for(state: State, layer: int, rows: Sequence[int] | None, inputs_from: int | None, name: str) -> Visit:
    """Return the visit that a Run belongs to: the present one, or that of a later layer."""
    now = state.forward.visit
    now_layer = now.layer if now is not None else state.forward.reached + 1
    if not now_layer <= layer < state.model.n_layers:
        what = f"Run(L{layer}, {name}): that layer is over or does not exist"
        fail(state, what, "run experts of this layer or a later one of this step")
    if inputs_from is not None and not 0 <= inputs_from <= layer:
        fail(state, f"Run(L{layer}, {name}): inputs_from={inputs_from}", f"name a layer in 0..{layer}")
    if rows is None and (now is None or layer != now_layer or now.mbs_left == len(state.forward.micro)):
        fail(state, f"Run(L{layer}, {name}): not routed yet", "name its rows, or wait for Routed")
    if rows is None and inputs_from is not None:
        fail(state, f"Run(L{layer}, {name}): inputs_from without rows", "name the rows that read the other state")
    return now if now is not None and layer == now_layer else state.forward.visit_of(layer)


def _next_visit(state: State, layer: int, name: str) -> Visit:
    """Return the visit that late outputs of a layer are added to."""
    if layer + 1 == state.model.n_layers:
        fail(state, f"Run(L{layer}, {name}, late): no layer comes after it", "run the last layer's experts in time")
    return state.forward.visit_of(layer + 1)


def _refuse_unrouted(state: State, layer: int, expert: int, name: str) -> NoReturn:
    unit_of(state, layer, expert, "Run")
    what = f"Run(L{layer}/E{expert}, {name}): no row is routed to it, or all have been taken"
    fail(state, what, "run each active expert once; name rows to run another expert instead")


def _named_rows(state: State, layer: int, expert: int, rows: Sequence[int]) -> int:
    n_step = state.step.n_tokens
    unit_of(state, layer, expert, "Run")
    named = list(map(index, rows))
    if any(not 0 <= r < n_step for r in named) or len(set(named)) != len(named):
        fail(state, f"Run(L{layer}/E{expert}): rows {named[:8]}", f"name distinct rows in 0..{n_step - 1}")
    return bits_of(named)


# --------------------------------------------------------------------------------------------- Fetch, Drop, Move, Send
def fetch(state: State, action: Fetch) -> None:
    """Queue copies of experts, or hasten those that are queued."""
    layer, urgency, name = index(action.layer), index(action.urgency), action.device
    device = device_of(state, name, "Fetch")
    pool = None if device.backing else pool_of(state, device, action.pool, f"Fetch(L{layer}, {name})")
    if urgency < 0:
        fail(state, f"Fetch(L{layer}, {name}): urgency {urgency}", "classes start at 0 (demand)")
    for expert in map(index, action.experts):
        unit = unit_of(state, layer, expert, "Fetch", action.bits)
        if unit in device.pending:
            device.pending[unit].drop_on_arrival = False
            hasten(state, device.pending[unit], urgency)
        elif unit in device.memory.copies and not device.backing:
            device.memory.keep(unit)
        else:
            _new_transfer(state, unit, device, pool, urgency, action.source)


def _new_transfer(
    state: State, unit: Unit, device: DeviceState, pool: PoolState | None, urgency: int, source: str | None
) -> None:  # fmt: skip
    n_bytes = state.model.expert_bytes(unit.layer, unit.bits)
    what = f"Fetch(L{unit.layer}/E{unit.expert}, {device.name})"
    if pool is not None and n_bytes > (capacity := pool.capacity[pool.at(unit.layer)]):
        holds = f"pool '{pool.name}' holds {capacity} bytes, the expert has {n_bytes}"
        fail(state, f"{what}: {holds}", "make the pool at least one expert large")
    names = sources(state, device) if source is None else [source] if source in state.devices else []
    src = next((one for name in names if (one := state.devices[name]) is not device and unit in one.memory.copies), None)
    if src is None:
        known = f"no copy on {source}" if source else "no copy anywhere that can be reached"
        fail(state, f"{what}: {known}", "leave source out, or fetch it to there first")
    src.memory.copies[unit].in_use += 1
    path = path_between(state, src.name, device.name)
    transfer = Transfer(
        next(state.fetch_numbers), unit, n_bytes, n_bytes, path, urgency, state.now, src=src, dst=device, pool=pool
    )
    device.pending[unit] = transfer
    enqueue(state, transfer)


def sources(state: State, device: DeviceState) -> list[str]:
    """Name the devices from which weights can come to `device`, nearest first, then by name."""
    reach = []
    for name in state.devices:
        if name != device.name:
            with suppress(HardwareError):  # no way from there
                reach.append((len(state.costs.path(name, device.name)), name))
    return [name for _, name in sorted(reach)]


def drop(state: State, action: Drop) -> None:
    """Forget copies once idle; cancel what is queued."""
    layer, name = index(action.layer), action.device
    device = device_of(state, name, "Drop")
    if device.backing:
        fail(state, f"Drop(L{layer}, {name}): copies on a backing device stay", "drop copies on other devices only")
    for expert in map(index, action.experts):
        unit = unit_of(state, layer, expert, "Drop", action.bits)
        transfer = device.pending.get(unit)
        if unit in device.memory.copies:
            device.memory.leave(unit, "drop", state.now)
        elif transfer is None:
            fail(state, f"Drop(L{layer}/E{expert}, {name}): neither resident nor being fetched", "drop only what is there")
        elif transfer.started or transfer.waiting:
            transfer.drop_on_arrival = True
        else:
            transfer.link.medium.queue.remove(transfer)
            del device.pending[unit]
            transfer.src.memory.release(unit, state.now)  # type: ignore[union-attr]  # that of an expert has a source


def move(state: State, action: Move) -> None:
    """Relabel copies that are there or on their way."""
    layer, name = index(action.layer), action.device
    device = device_of(state, name, "Move")
    pool = pool_of(state, device, action.pool, f"Move(L{layer}, {name})")
    for expert in map(index, action.experts):
        unit = unit_of(state, layer, expert, "Move", action.bits)
        copy = device.memory.copies.get(unit)
        if unit in device.pending:
            _divert(device.pending[unit], pool)
            continue
        if copy is None:
            what = f"Move(L{layer}/E{expert}, {name}): neither resident nor being fetched"
            fail(state, what, "move only what is there or on its way")
        if copy.pool is not pool and pool.free(layer) < state.model.expert_bytes(layer, unit.bits):
            full = f"Move(L{layer}/E{expert}, {name}): pool '{pool.name}' is full"
            fail(state, full, "Drop or Move something out of it first")
        device.memory.relabel(unit, pool)


def _divert(transfer: Transfer, pool: PoolState) -> None:
    """Let a copy on its way arrive in another pool, which counts its bytes from now on."""
    # If it is in flight, even a full pool counts it.
    transfer.drop_on_arrival = False
    if transfer.last_hop and not transfer.first_chunk and transfer.pool is not None:
        transfer.pool.take(transfer.unit.layer, -transfer.n_bytes)
        pool.take(transfer.unit.layer, transfer.n_bytes)
    transfer.pool = pool


def send(state: State, action: Send) -> None:
    """Queue a message."""
    n_bytes, src, dst, tag = index(action.n_bytes), action.src, action.dst, action.tag
    if src == dst or n_bytes < 1:
        fail(state, f"Send({n_bytes}, {src}, {dst})", "send at least one byte between two devices")
    device_of(state, src, "Send")
    device_of(state, dst, "Send")
    path = path_between(state, src, dst)
    send_message(state, path, n_bytes, DEMAND, lambda: state.instant.sent.append(tag), cause="message")


# -------------------------------------------------------------------------------------------------------- Skip, Predict
def skip(state: State, action: Skip) -> None:
    """Leave open slots of the present layer out."""
    layer, rows = index(action.layer), action.rows
    visit = state.forward.visit
    if visit is None or layer != visit.layer or visit.mbs_left:
        fail(state, f"Skip(L{layer})", "skip slots of the present layer, once it is routed")
    for expert in map(index, action.experts):
        unit_of(state, layer, expert, "Skip")
        named = rows_of(visit.unserved[expert]) if rows is None else list(map(index, rows))
        chosen = bits_of(row for row in named if row >= 0)
        if not chosen or chosen & ~visit.unserved[expert] or chosen.bit_count() != len(named):
            what = f"Skip(L{layer}/E{expert}): rows {named[:8]} are not routed to it, or are served"
            fail(state, what, "skip only open slots")
        visit.serve(expert, chosen, SKIPPED)


def predict(state: State, action: Predict) -> None:
    """Submit the task of a prediction, which waits for the state that it needs."""
    step, layer = index(action.step), index(action.layer)
    source, name, rows = action.source, action.device, state.step.n_tokens
    device = device_of(state, name, "Predict")
    if step != state.step.index:
        what = f"Predict(step {step}, L{layer}): this is step {state.step.index}"
        fail(state, what, "predict within the present step")
    unit_of(state, layer, 0, "Predict")
    predictor = state.predictors.get(source)
    if predictor is None:
        fail(state, f"Predict: {unknown_name('source', source, state.predictors)}", "list it in Policy.needs")
    if action.lane not in ("main", "side"):
        fail(state, f"Predict(L{layer}): lane '{action.lane}'", "lanes are 'main' and 'side'")
    side = f"{name}.side"
    if action.lane == "side" and all(side not in (pair.a, pair.b) for pair in state.costs.hardware.contention):
        what = f"Predict(L{layer}, {name}): the profile has no rate for the side lane"
        fail(state, what, f"measure a contention pair with '{side}', or use lane='main'")
    work = state.costs.predict_ns(name, rows, source)
    answer = (step, layer, source, predictor)
    task = state.new_task("predict", layer, -1, rows, work, lambda: state.instant.predicted.append(answer))
    if action.lane == "main":
        task.key += AHEAD
    needed = predictor.needs_layer(layer)
    if needed is not None and not state.forward.gate_input_exists(needed):
        task.waits = 1
        state.forward.gate_input_waiters[needed].append(lambda: wake(state, task))
    submit(state, device.main if action.lane == "main" else device.side, task)


def work(state: State, action: Work) -> None:
    """Submit operations of the host that occupy a device's lane; those that take no time leave no record."""
    name, n = action.device, index(action.n)
    device = device_of(state, name, "Work")
    if n < 0 or not device.computes:
        fail(state, f"Work({short_repr(action.operation)}, {name}, {n})", "give a number of operations, and a CPU or GPU")
    ns = n * state.costs.operation_ns(action.operation)
    if ns:
        visit = state.forward.visit
        submit(state, device.main, state.new_task("host", -1 if visit is None else visit.layer, -1, 0, ns, lambda: None))


_APPLY: dict[type, Callable[[State, Any], None]] = {
    Fetch: fetch, Drop: drop, Move: move, Send: send, Skip: skip, Predict: predict, Work: work,
}  # fmt: skip
