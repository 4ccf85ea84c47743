"""Setting up a run: the machine's state, the placement, and the check that everything fits."""

from __future__ import annotations

import sys
from collections import defaultdict
from functools import partial
from operator import index as whole
from typing import Any, NamedTuple

from moesim.engine.memory import CopyState, DeviceMemory, PoolState, Unit
from moesim.engine.state import DeviceState, HostThread, Layout, LinkState, Medium, State
from moesim.engine.streams import Streams
from moesim.engine.view import EngineView
from moesim.errors import PolicyError
from moesim.fits import (
    backing_devices,
    by_rows,
    check_capacity,
    check_placement,
    kept_apart,
    kv_bytes_at,
    required_bytes,
    with_kv,
)
from moesim.hardware import HardwareProfile
from moesim.model import ModelSpec
from moesim.policy import LAYER_PARTS, STEP_PARTS, Placement

FIXED = ("weights", "streams", "workspace", "reserved", "experts", "drafts")
"""Purposes whose bytes are in use from start to end."""


class Placed(NamedTuple):
    """Copies of a layer at one width, at the start."""

    device: DeviceState
    pool: PoolState
    layer: int
    bits: float | None
    experts: list[int]


def connect(state: State) -> None:
    """Create a state's machine: devices and links, empty."""
    costs, hardware = state.costs, state.costs.hardware
    if costs.host_expert_ns() or costs.host_shared():
        state.thread = HostThread(costs.host_expert_ns(), costs.host_shared())
    for name, device in hardware.devices.items():
        memory = DeviceMemory(name, state.model, device.memory_bytes, name in hardware.backing, state.records)
        state.devices[name] = DeviceState(device, memory)
    media: dict[str, Medium] = {}
    for link in hardware.links:
        medium = media.setdefault(link.medium or link.name, Medium())
        state.links[link.name] = LinkState(link, state.devices[link.dst], medium)
    state.view = EngineView(state)


def place(state: State) -> list[Placed]:
    """Ask for the placement, check it and apply all of it but the copies, which are returned."""
    placement = state.policy.place(state.view)
    model, hardware = state.model, state.costs.hardware
    check_placement(model, hardware, placement, state.policy_name)
    placement = with_kv(model, hardware, placement, state.workload.spec.kv_place)
    if state.placed is not None:
        state.placed(placement)
    seen = by_rows(hardware, placement)[: 2 if state.workload.max_tokens >= placement.offload_from else 1]
    state.layouts, state.offload_from = tuple(_layout(state, one) for one in seen), placement.offload_from
    state.kv_at = partial(kv_at, model, hardware, placement)
    for name, device in state.devices.items():
        device.backing = device.memory.backing = name in backing_devices(hardware, placement)
    work = state.workload
    needed = required_bytes(
        model, hardware, work.peak_kv_tokens, placement, work.peak_requests, draft_head=work.draft_head
    )  # fmt: skip
    if placement.enforce_capacity:
        check_capacity(needed, hardware, placement, state.policy_name, work.takes_memory)
    for name, device in state.devices.items():
        memory = device.memory
        if placement.enforce_capacity:
            memory.spare = max(0, memory.capacity - sum(needed[name].values()))
        else:
            memory.capacity = memory.spare = sys.maxsize
        memory.used = memory.peak = sum(v for k, v in needed[name].items() if k in FIXED)
    return _copies(state, placement)


def kv_at(model: ModelSpec, hardware: HardwareProfile, placement: Placement, tokens: int, requests: int) -> dict[str, int]:
    """Return the bytes of the KV cache of all layers by device."""
    found: dict[str, int] = {}
    for layer in (*range(model.n_layers), -1):
        for name, n_bytes in kv_bytes_at(model, hardware, placement, layer, tokens, requests).items():
            found[name] = found.get(name, 0) + n_bytes
    return found


def _layout(state: State, placement: Placement) -> Layout:
    hardware, layers = state.costs.hardware, range(state.model.n_layers)

    def at(part: str, layer: int) -> DeviceState:
        return state.devices[placement.parts.get((part, layer), hardware.compute)]

    attention, dense, shared = ([at(part, layer) for layer in layers] for part in LAYER_PARTS)
    apart = kept_apart(hardware, placement)
    core = {layer: state.devices[device] for (_, layer), device in apart.items()}
    streams = Streams(state, placement, apart) if placement.streamed or apart else None
    return Layout(attention, dense, shared, {part: at(part, -1) for part in STEP_PARTS}, core, streams)


def _copies(state: State, placement: Placement) -> list[Placed]:
    """Name the copies, and refuse what is there twice or does not fit."""
    model, who = state.model, f"[policy={state.policy_name}]"
    for pool in placement.pools:
        state.devices[pool.device].memory.pools[pool.name] = PoolState(pool, model.n_layers)
    room = {pool: pool.capacity.copy() for device in state.devices.values() for pool in device.memory.pools.values()}
    there: defaultdict[tuple[Any, ...], set[int]] = defaultdict(set)
    found = []
    for copy in placement.copies:
        device, layer, bits = state.devices[copy.device], copy.layer, None if copy.bits == model.expert_bits else copy.bits
        pool_state, experts, known = device.memory.pools[copy.pool], [*map(whole, copy.experts)], there[copy.device, layer, bits]
        n_bytes = model.expert_bytes(layer, bits)
        for expert in experts:
            if expert in known:
                raise PolicyError(f"place(): L{layer}/E{expert} is placed twice on {copy.device} {who}")
            known.add(expert)
            room[pool_state][pool_state.at(layer)] -= n_bytes
            if room[pool_state][pool_state.at(layer)] < 0:
                full = f"pool '{copy.pool}' of {copy.device} is too small for the copies of layer {layer}"
                raise PolicyError(f"place(): {full} {who}")
        found.append(Placed(device, pool_state, layer, bits, experts))
    return found


def put(state: State, copies: list[Placed]) -> None:
    """Put copies where they are at the start; backing devices have all."""
    model = state.model
    for device in state.devices.values():
        if device.backing:
            device.memory.copies = {
                Unit(layer, expert, bits): CopyState(None, -1) for bits in (None, *model.low_bits)
                for layer in range(model.n_layers) for expert in range(model.n_experts)
            }  # fmt: skip
    for at, pool, layer, bits, experts in copies:
        for expert in experts:
            at.memory.reserve(pool, layer, model.expert_bytes(layer, bits), 0)
            at.memory.arrive(Unit(layer, expert, bits), pool, -1)
