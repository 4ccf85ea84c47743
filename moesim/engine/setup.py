"""Setting up a run: the machine's state, the placement, and the check that everything fits."""

from __future__ import annotations

import sys
from operator import index as whole
from typing import NamedTuple

from moesim.capacity import by_rows, check_capacity, check_placement, kept_apart, kv_device, required_bytes
from moesim.engine.machine import DeviceState, LinkState, Medium
from moesim.engine.memory import CopyState, DeviceMemory, PoolState
from moesim.engine.state import HostThread, Layout, State
from moesim.engine.streams import Streams
from moesim.engine.view import EngineView
from moesim.errors import PolicyError
from moesim.policy import LAYER_PARTS, STEP_PARTS, Placement

FIXED = ("weights", "streams", "workspace", "reserved", "experts")
"""Purposes whose bytes are in use from start to end."""


def connect(state: State) -> None:
    """Give a state its machine: devices and links, empty."""
    costs = state.costs
    submit_ns, shared = costs.host_expert_ns(), costs.host_shared()
    if submit_ns or shared:
        state.thread = HostThread(submit_ns, shared)
    hardware, records = costs.hardware, state.records
    contended = {name for pair in hardware.contention for name in (pair.a, pair.b)}
    for index, (name, device) in enumerate(hardware.devices.items()):
        memory = DeviceMemory(
            name, state.weights, device.memory_bytes, name in hardware.backing, records.evictions, records.memory
        )
        found = state.by_name[name] = DeviceState(device, index, memory, costs, contended)
        state.devices.append(found)
        if found.is_gpu:
            state.gpus.append(found)
    media: dict[str, Medium] = {}
    for link in hardware.links:
        medium = media.setdefault(link.medium or link.name, Medium())
        state.links[link.name] = LinkState(link, state.by_name[link.dst], medium, costs, contended)
        medium.links.append(state.links[link.name])
    state.view = EngineView(state)


class Placed(NamedTuple):
    """Copies of a layer at one width, at the start."""

    device: DeviceState
    pool: PoolState
    units: list[int]


def place(state: State) -> list[Placed]:
    """Ask the policy for its placement, check it, and put all of it into effect but the copies, which are returned."""
    placement = state.policy.place(state.view)
    model, costs = state.model, state.costs
    check_placement(model, costs.hardware, placement, state.policy_name)
    if state.placed is not None:
        state.placed(placement)

    seen = by_rows(costs.hardware, placement)[: 2 if state.workload.max_tokens >= placement.offload_from else 1]
    state.layouts = tuple(_layout(state, one) for one in seen)
    state.layout, state.offload_from = state.layouts[0], placement.offload_from
    caches = [kv_device(costs.hardware, placement, layer) for layer in range(model.n_layers)]
    for name in caches + [state.layout.step_parts["leading"].name] * model.n_dense_layers:
        state.kv_layers[name] = state.kv_layers.get(name, 0) + 1
    needed = required_bytes(model, costs.hardware, state.workload.peak_kv_tokens, placement)
    if placement.enforce_capacity:
        check_capacity(needed, costs.hardware, state.policy_name)
    for device in state.devices:
        memory = device.memory
        if placement.enforce_capacity:
            memory.spare = memory.capacity - sum(needed[device.name].values())
        else:
            memory.capacity = memory.spare = sys.maxsize
        memory.used = memory.peak = sum(v for k, v in needed[device.name].items() if k in FIXED)
    return _copies(state, placement)


def _layout(state: State, placement: Placement) -> Layout:
    hardware, layers = state.costs.hardware, range(state.model.n_layers)

    def at(part: str, layer: int) -> DeviceState:
        return state.by_name[placement.parts.get((part, layer), hardware.compute)]

    attention, dense, shared = ([at(part, layer) for layer in layers] for part in LAYER_PARTS)
    apart = kept_apart(hardware, placement)
    core = {layer: state.by_name[device] for (_, layer), device in apart.items()}
    streams = Streams(state, placement, apart) if placement.streamed or apart else None
    return Layout(attention, dense, shared, {part: at(part, -1) for part in STEP_PARTS}, core, streams)


def _copies(state: State, placement: Placement) -> list[Placed]:
    """Number the copies, and take their bytes of the pools; refuse what is there twice or does not fit."""
    model, who = state.model, f"[policy={state.policy_name}]"
    for pool in placement.pools:
        pools = state.by_name[pool.device].memory.pools
        pools[pool.name] = PoolState(pool.name, pool.sizes(model.n_layers), pool.per_layer, pool.landing)
    there: dict[str, set[int]] = {device.name: set() for device in state.devices}
    found = []
    for copy in placement.copies:
        device, known = state.by_name[copy.device], there[copy.device]
        pool_state = device.memory.pools[copy.pool]
        n_bytes, free = model.expert_bytes(copy.layer, copy.bits), pool_state.free(copy.layer)
        first = state.weights.first(copy.bits) + copy.layer * model.n_experts
        units = [first + whole(expert) for expert in copy.experts]
        for unit in units:
            if unit in known:
                raise PolicyError(f"place(): L{copy.layer}/E{unit - first} is placed twice on {copy.device} {who}")
            free -= n_bytes
            if free < 0:
                full = f"pool '{copy.pool}' of {copy.device} is too small for the copies of layer {copy.layer}"
                raise PolicyError(f"place(): {full} {who}")
            known.add(unit)
        pool_state.take(copy.layer, len(units) * n_bytes)
        found.append(Placed(device, pool_state, units))
    return found


def put(state: State, copies: list[Placed]) -> None:
    """Put copies where they are at the start; backing devices have all."""
    for device in state.devices:
        if device.backing:
            device.memory.copies = {unit: CopyState(None, -1) for unit in range(len(state.weights))}
    for device, pool, units in copies:
        for unit in units:
            device.memory.add(state.weights.n_bytes[unit // state.model.n_experts], 0)
            device.memory.arrive(unit, pool, -1)
