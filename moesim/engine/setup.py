"""Setting up a run: the machine's state, the placement, and the check that everything fits."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from moesim.capacity import check_capacity, required_bytes
from moesim.engine.machine import DeviceState, LinkState, Medium
from moesim.engine.memory import DeviceMemory, PoolState
from moesim.engine.state import HostThread, State
from moesim.engine.view import EngineView
from moesim.errors import PolicyError, unknown_name
from moesim.policy import Placement

LAYER_PARTS = ("attention", "dense", "shared")
STEP_PARTS = ("embedding", "leading", "head")
FIXED = ("weights", "workspace", "reserved", "experts")
"""Purposes whose bytes are in use from start to end."""


def connect(state: State) -> None:
    """Give a state its machine: devices and links, empty."""
    model, costs = state.model, state.costs
    submit_ns, shared = costs.host_expert_ns(), costs.host_shared()
    if submit_ns or shared:
        state.thread = HostThread(submit_ns, shared)
    hardware, records = costs.hardware, state.records
    contended = {name for pair in hardware.contention for name in (pair.a, pair.b)}
    for index, (name, device) in enumerate(hardware.devices.items()):
        memory = DeviceMemory(
            name, model.n_layers, model.n_experts, state.expert_bytes, device.memory_bytes, name in hardware.backing,
            records.evictions, records.memory,
        )  # fmt: skip
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


def place(state: State) -> None:
    """Ask the policy for its placement, check it and put it into effect."""
    placement = state.policy.place(state.view)
    if not isinstance(placement, Placement):
        raise _bad(state, f"expected a moesim.policy.Placement, got {placement!r}; return one, Placement() if nothing is cached")
    _check_parts(state, placement)
    _check_pools(state, placement)
    model, costs = state.model, state.costs

    def at(part: str, layer: int) -> DeviceState:
        return state.by_name[placement.parts.get((part, layer), costs.hardware.compute)]

    for layer in range(model.n_layers):
        state.attention_at.append(at("attention", layer))
        state.dense_at.append(at("dense", layer))
        state.shared_at.append(at("shared", layer))
    state.step_parts.update({part: at(part, -1) for part in STEP_PARTS})
    for device in state.attention_at + [state.step_parts["leading"]] * model.n_dense_layers:
        state.kv_layers[device.name] = state.kv_layers.get(device.name, 0) + 1
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
    _place_copies(state, placement)


def _bad(state: State, what: str) -> PolicyError:
    return PolicyError(f"place(): {what} [policy={state.policy_name}]")


def _check_parts(state: State, placement: Placement) -> None:
    n_layers = state.model.n_layers
    for (part, layer), device in placement.parts.items():
        known = LAYER_PARTS if layer >= 0 else STEP_PARTS
        if part not in known or not -1 <= layer < n_layers:
            has = f"layers 0..{n_layers - 1} have {LAYER_PARTS}, -1 has {STEP_PARTS}"
            raise _bad(state, f"no part ({part!r}, {layer}); {has}")
        if device not in state.by_name:
            raise _bad(state, unknown_name("device", device, state.by_name))
    for name, n_bytes in placement.reserved.items():
        if name not in state.by_name:
            raise _bad(state, unknown_name("device", name, state.by_name))
        if n_bytes < 0:
            raise _bad(state, f"reserved on {name}: expected at least 0 bytes, got {n_bytes}")


def _check_pools(state: State, placement: Placement) -> None:
    model = state.model
    names = set()
    for pool in placement.pools:
        if pool.device not in state.by_name:
            raise _bad(state, unknown_name("device", pool.device, state.by_name))
        sizes = pool.sizes(model.n_layers)
        if (pool.device, pool.name) in names or min(sizes, default=0) < 0 or state.by_name[pool.device].backing:
            expected = "expected one pool of that name, at least 0 bytes, on a device that backs no weights"
            raise _bad(state, f"Pool{tuple(pool)}: {expected}")
        if isinstance(pool.n_bytes, Sequence) and (not pool.per_layer or len(sizes) != model.n_layers):
            expected = f"expected per_layer=True and one number of bytes for each of {model.n_layers} layers"
            got = f"got per_layer={pool.per_layer} and {len(sizes)}"
            raise _bad(state, f"Pool('{pool.device}', '{pool.name}'): {expected}, {got}")
        names.add((pool.device, pool.name))
    for copy in placement.copies:
        if (copy.device, copy.pool) not in names:
            raise _bad(state, f"copies of layer {copy.layer} in pool '{copy.pool}' of {copy.device}: declare that pool")
        if not 0 <= copy.layer < model.n_layers or any(not 0 <= e < model.n_experts for e in copy.experts):
            raise _bad(state, f"copies of layer {copy.layer}, experts {list(copy.experts)[:8]}: no such units in {model.name}")


def _place_copies(state: State, placement: Placement) -> None:
    model = state.model
    for pool in placement.pools:
        pools = state.by_name[pool.device].memory.pools
        pools[pool.name] = PoolState(pool.name, pool.sizes(model.n_layers), pool.per_layer)
    for copy in placement.copies:
        memory = state.by_name[copy.device].memory
        pool_state = memory.pools[copy.pool]
        for expert in copy.experts:
            unit = copy.layer * model.n_experts + expert
            if unit in memory.copies:
                raise _bad(state, f"L{copy.layer}/E{expert} is placed twice on {copy.device}")
            if pool_state.free(copy.layer) < state.expert_bytes[copy.layer]:
                raise _bad(state, f"pool '{copy.pool}' of {copy.device} is too small for the copies of layer {copy.layer}")
            memory.reserve(pool_state, copy.layer, 0)
            memory.arrive(unit, pool_state, -1)
