"""The actions that move things: Fetch, Drop, Move, Send."""

from __future__ import annotations

from operator import index

from moesim.engine.checks import device_of, fail, pool_of, unit_of
from moesim.engine.links import dequeue, enqueue, hasten, send_message
from moesim.engine.machine import DeviceState, Transfer
from moesim.engine.memory import PoolState
from moesim.engine.paths import path_between, sources
from moesim.engine.state import State
from moesim.policy import DEMAND, Drop, Fetch, Move, Send


def fetch(state: State, action: Fetch) -> None:
    """Queue copies of experts, or hasten those that are queued."""
    layer, urgency = index(action.layer), index(action.urgency)
    _, experts, name, _, pool_name, source, bits = action
    device = device_of(state, name, "Fetch")
    pool = None if device.backing else pool_of(state, device, pool_name, f"Fetch(L{layer}, {name})")
    if urgency < 0:
        fail(state, f"Fetch(L{layer}, {name}): urgency {urgency}", "classes start at 0 (demand)")
    for expert in map(index, experts):
        unit = unit_of(state, layer, expert, "Fetch", bits)
        transfer = device.pending.get(unit)
        if transfer is not None:
            _hasten(state, transfer, urgency)
            continue
        copy = device.memory.copies.get(unit)
        if copy is not None and not device.backing:
            device.memory.keep(unit)
        else:
            _new_transfer(state, (layer, expert, unit), device, pool, urgency, source)


def _hasten(state: State, transfer: Transfer, urgency: int) -> None:
    transfer.drop_on_arrival = False
    hasten(state, transfer, urgency)


def _new_transfer(
    state: State, what: tuple[int, int, int], device: DeviceState, pool: PoolState | None, urgency: int, source: str | None
) -> None:  # fmt: skip
    layer, expert, unit = what
    n_bytes = state.weights.n_bytes[unit // state.model.n_experts]
    if pool is not None and n_bytes > (capacity := pool.capacity[layer if pool.per_layer else 0]):
        holds = f"pool '{pool.name}' holds {capacity} bytes, the expert has {n_bytes}"
        fail(state, f"Fetch(L{layer}/E{expert}, {device.name}): {holds}", "make the pool at least one expert large")
    for src in sources(state, device, source):
        copy = src.memory.copies.get(unit)
        if copy is not None and src is not device:
            break
    else:
        known = f"no copy on {source}" if source else "no copy anywhere that can be reached"
        fail(state, f"Fetch(L{layer}/E{expert}, {device.name}): {known}", "leave source out, or fetch it to there first")
    copy.in_use += 1
    path = path_between(state, src.name, device.name)
    transfer = Transfer(
        next(state.fetch_numbers), unit, layer, expert, n_bytes, n_bytes, path, urgency, state.now, path[0], src.name, device,
        pool, bits=state.weights.bits(unit),
    )  # fmt: skip
    device.pending[unit] = transfer
    enqueue(state, path[0], transfer)


def drop(state: State, action: Drop) -> None:
    """Forget copies once idle; cancel what is queued."""
    layer, (_, experts, name, bits) = index(action.layer), action
    device = device_of(state, name, "Drop")
    if device.backing:
        fail(state, f"Drop(L{layer}, {name}): copies on a backing device stay", "drop copies on other devices only")
    for expert in map(index, experts):
        unit = unit_of(state, layer, expert, "Drop", bits)
        if unit in device.memory.copies:
            device.memory.drop(unit, state.now)
            continue
        transfer = device.pending.get(unit)
        if transfer is None:
            fail(state, f"Drop(L{layer}/E{expert}, {name}): neither resident nor being fetched", "drop only what is there")
        if transfer.started or transfer.waiting:
            transfer.drop_on_arrival = True
        else:
            dequeue(transfer)
            del device.pending[unit]
            state.by_name[transfer.src].memory.release(unit, state.now)


def move(state: State, action: Move) -> None:
    """Relabel copies that are there or on their way."""
    layer, (_, experts, name, pool_name, bits) = index(action.layer), action
    device = device_of(state, name, "Move")
    pool = pool_of(state, device, pool_name, f"Move(L{layer}, {name})")
    for expert in map(index, experts):
        unit = unit_of(state, layer, expert, "Move", bits)
        copy, transfer = device.memory.copies.get(unit), device.pending.get(unit)
        if transfer is not None:
            _divert(transfer, pool)
            continue
        if copy is None:
            what = f"Move(L{layer}/E{expert}, {name}): neither resident nor being fetched"
            fail(state, what, "move only what is there or on its way")
        if copy.pool is not pool and pool.free(layer) < state.weights.n_bytes[unit // state.model.n_experts]:
            full = f"Move(L{layer}/E{expert}, {name}): pool '{pool_name}' is full"
            fail(state, full, "Drop or Move something out of it first")
        device.memory.relabel(unit, pool, layer)


def _divert(transfer: Transfer, pool: PoolState) -> None:
    """Let a copy on its way arrive in another pool, which counts its bytes from now on if it is in flight, full or not."""
    transfer.drop_on_arrival = False
    if transfer.hop == len(transfer.path) - 1 and not transfer.first_chunk and transfer.pool is not None:
        transfer.pool.take(transfer.layer, -transfer.n_bytes)
        pool.take(transfer.layer, transfer.n_bytes)
    transfer.pool = pool


def send(state: State, action: Send) -> None:
    """Queue a message."""
    n_bytes, (_, src, dst, tag) = index(action.n_bytes), action
    if src == dst or n_bytes < 1:
        fail(state, f"Send({n_bytes}, {src}, {dst})", "send at least one byte between two devices")
    device_of(state, src, "Send")
    device_of(state, dst, "Send")
    send_message(state, path_between(state, src, dst), n_bytes, DEMAND, lambda: state.sent.append(tag))
