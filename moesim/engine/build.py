"""Setting up a run: the machine's state, the placement, and the check that everything fits."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from moesim.engine.devices import DeviceState
from moesim.engine.links import Medium
from moesim.engine.memory import DeviceMemory, PoolState
from moesim.errors import CapacityError, PolicyError, unknown_name
from moesim.policy import Placement
from moesim.units import format_bytes

if TYPE_CHECKING:
    from moesim.engine.core import Engine
    from moesim.hardware import HardwareProfile
    from moesim.model import ModelSpec

LAYER_PARTS = ("attention", "dense", "shared")
STEP_PARTS = ("embedding", "leading", "head")
FIXED = ("weights", "workspace", "reserved", "experts")
"""Purposes whose bytes are in use from start to end."""


def build(engine: Engine) -> None:
    """Create devices and links, ask the policy for its placement, check it and put it into effect."""
    _machine(engine)
    placement = engine.policy.place(engine.view)
    if not isinstance(placement, Placement):
        raise _bad(engine, f"expected a moesim.policy.Placement, got {placement!r}; return one, Placement() if nothing is cached")
    _check_parts(engine, placement)
    for layer in range(engine.model.n_layers):
        engine.attention_at.append(_at(engine, placement, "attention", layer))
        engine.dense_at.append(_at(engine, placement, "dense", layer))
        engine.shared_at.append(_at(engine, placement, "shared", layer))
    for part in STEP_PARTS:
        engine.step_parts[part] = _at(engine, placement, part, -1)
    for device in engine.attention_at:
        engine.kv_layers[device.name] = engine.kv_layers.get(device.name, 0) + 1
    leading = engine.step_parts["leading"].name
    if engine.model.n_dense_layers:
        engine.kv_layers[leading] = engine.kv_layers.get(leading, 0) + engine.model.n_dense_layers
    needed = required_bytes(engine.model, engine.costs.hardware, engine.workload.peak_kv_tokens, placement)
    if placement.enforce_capacity:
        check_capacity(needed, engine.costs.hardware, engine.policy_name)
    _put_in_place(engine, placement, needed)


def _machine(engine: Engine) -> None:
    hardware = engine.costs.hardware
    model = engine.model
    for index, (name, device) in enumerate(hardware.devices.items()):
        memory = DeviceMemory(
            name, model.n_layers, model.n_experts, engine.expert_bytes, device.memory_bytes, name in hardware.backing,
            engine.records.evictions, engine.records.memory,
        )  # fmt: skip
        state = DeviceState(engine, name, index, device.role, name in hardware.backing, memory)
        engine.by_name[name] = state
        engine.devices.append(state)
        if state.is_gpu:
            engine.gpus.append(state)
    media: dict[str, Medium] = {}
    for link in hardware.links:
        medium = media.setdefault(link.medium or link.name, Medium())
        engine.links.append(engine.make_link(link, engine.by_name[link.dst], medium))
    engine.media = list(media.values())


def _at(engine: Engine, placement: Placement, part: str, layer: int) -> DeviceState:
    return engine.by_name[placement.parts.get((part, layer), engine.costs.hardware.compute)]


def _bad(engine: Engine, what: str) -> PolicyError:
    return PolicyError(f"place(): {what} [policy={engine.policy_name}]")


def _check_parts(engine: Engine, placement: Placement) -> None:
    model = engine.model
    for (part, layer), device in placement.parts.items():
        known = LAYER_PARTS if layer >= 0 else STEP_PARTS
        if part not in known or not -1 <= layer < model.n_layers:
            last = model.n_layers - 1
            raise _bad(engine, f"no part ({part!r}, {layer}); layers 0..{last} have {LAYER_PARTS}, -1 has {STEP_PARTS}")
        if device not in engine.by_name:
            raise _bad(engine, unknown_name("device", device, engine.by_name))
    for name, n_bytes in placement.reserved.items():
        if name not in engine.by_name:
            raise _bad(engine, unknown_name("device", name, engine.by_name))
        if n_bytes < 0:
            raise _bad(engine, f"reserved on {name}: expected at least 0 bytes, got {n_bytes}")
    names = set()
    for pool in placement.pools:
        if pool.device not in engine.by_name:
            raise _bad(engine, unknown_name("device", pool.device, engine.by_name))
        sizes = pool.sizes(model.n_layers)
        if (pool.device, pool.name) in names or min(sizes, default=0) < 0 or engine.by_name[pool.device].backing:
            expected = "expected one pool of that name, at least 0 bytes, on a device that backs no weights"
            raise _bad(engine, f"Pool{tuple(pool)}: {expected}")
        if isinstance(pool.n_bytes, Sequence) and (not pool.per_layer or len(sizes) != model.n_layers):
            expected = f"expected per_layer=True and one number of bytes for each of {model.n_layers} layers"
            raise _bad(
                engine, f"Pool('{pool.device}', '{pool.name}'): {expected}, got per_layer={pool.per_layer} and {len(sizes)}"
            )
        names.add((pool.device, pool.name))
    for copy in placement.copies:
        if (copy.device, copy.pool) not in names:
            raise _bad(engine, f"copies of layer {copy.layer} in pool '{copy.pool}' of {copy.device}: declare that pool")
        if not 0 <= copy.layer < model.n_layers or any(not 0 <= e < model.n_experts for e in copy.experts):
            raise _bad(engine, f"copies of layer {copy.layer}, experts {list(copy.experts)[:8]}: no such units in {model.name}")


def required_bytes(
    model: ModelSpec, hardware: HardwareProfile, peak_kv_tokens: int, placement: Placement
) -> dict[str, dict[str, int]]:
    """Bytes that each device must have, by purpose.

    Parameters
    ----------
    model, hardware : ModelSpec, HardwareProfile
    peak_kv_tokens : int
        Largest sum of the final lengths of the requests that are active together.
    placement : Placement
        Pools count with their whole size.

    Returns
    -------
    dict of str to dict of str to int
        Device -> purpose (``"weights"``, ``"kv"``, ``"workspace"``, ``"reserved"``, ``"pool:<name>"``) -> bytes.
    """
    need: dict[str, dict[str, int]] = {name: {} for name in hardware.devices}

    def add(device: str, purpose: str, n_bytes: int) -> None:
        if n_bytes:
            need[device][purpose] = need[device].get(purpose, 0) + n_bytes

    def at(part: str, layer: int) -> str:
        return placement.parts.get((part, layer), hardware.compute)

    for layer in range(model.n_layers):
        add(at("attention", layer), "weights", model.attention_bytes)
        add(at("attention", layer), "kv", model.kv_bytes_per_token_per_layer * peak_kv_tokens)
        add(at("dense", layer), "weights", model.dense_bytes(layer))
        add(at("shared", layer), "weights", model.shared_bytes)
    add(at("leading", -1), "weights", model.leading_bytes)
    add(at("leading", -1), "kv", model.n_dense_layers * model.kv_bytes_per_token_per_layer * peak_kv_tokens)
    add(at("embedding", -1), "weights", model.embedding_bytes)
    tied = model.tie_embeddings and at("head", -1) == at("embedding", -1)
    add(at("head", -1), "weights", model.head_bytes - (model.embedding_bytes if tied else 0))
    for pool in placement.pools:
        add(pool.device, f"pool:{pool.name}", sum(pool.sizes(model.n_layers)))
    for name, n_bytes in placement.reserved.items():
        add(name, "reserved", n_bytes)
    experts = sum(model.expert_bytes(layer) for layer in range(model.n_layers)) * model.n_experts
    for name, device in hardware.devices.items():
        add(name, "workspace", device.workspace_bytes)
        if name in hardware.backing:
            add(name, "experts", experts)
    return need


def check_capacity(needed: Mapping[str, Mapping[str, int]], hardware: HardwareProfile, policy_name: str) -> None:
    """Raise CapacityError if a device is too small for what it must hold."""
    for name, purposes in needed.items():
        total = sum(purposes.values())
        capacity = hardware.devices[name].memory_bytes
        if total > capacity:
            parts = ", ".join(f"{k} {format_bytes(v)}" for k, v in sorted(purposes.items(), key=lambda p: -p[1]))
            raise CapacityError(
                f"{name} of {hardware.name}: needs {format_bytes(total)} ({parts}), has {format_bytes(capacity)}; "
                f"lower the cache ratio, the batch or the context, or choose fewer bits [policy={policy_name}]"
            )


def _put_in_place(engine: Engine, placement: Placement, needed: Mapping[str, Mapping[str, int]]) -> None:
    n_experts = engine.model.n_experts
    for device in engine.devices:
        memory = device.memory
        if placement.enforce_capacity:
            memory.spare = memory.capacity - sum(needed[device.name].values())
        else:
            memory.capacity = memory.spare = sys.maxsize
        fixed = sum(v for k, v in needed[device.name].items() if k in FIXED)
        memory.used = memory.peak = fixed
    for pool in placement.pools:
        state = PoolState(pool.name, pool.sizes(engine.model.n_layers), pool.per_layer)
        engine.by_name[pool.device].memory.pools[pool.name] = state
    for copy in placement.copies:
        memory = engine.by_name[copy.device].memory
        pool_state = memory.pools[copy.pool]
        for expert in copy.experts:
            unit = copy.layer * n_experts + expert
            if unit in memory.copies:
                raise _bad(engine, f"L{copy.layer}/E{expert} is placed twice on {copy.device}")
            if not pool_state.has_room(copy.layer, engine.expert_bytes[copy.layer]):
                raise _bad(engine, f"pool '{copy.pool}' of {copy.device} is too small for the copies of layer {copy.layer}")
            memory.reserve(pool_state, copy.layer, 0)
            memory.arrive(unit, pool_state, -1)
