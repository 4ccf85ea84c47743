"""How many bytes a placement needs on each device, and whether they are there."""

from __future__ import annotations

from collections.abc import Mapping

from moesim.core.units import format_bytes
from moesim.errors import CapacityError
from moesim.hardware import HardwareProfile
from moesim.model import ModelSpec
from moesim.policy import Placement


def required_bytes(
    model: ModelSpec, hardware: HardwareProfile, peak_kv_tokens: int, placement: Placement
) -> dict[str, dict[str, int]]:
    """Bytes that each device must have, by purpose; pools count with their whole size.

    Purposes are ``"weights"``, ``"kv"``, ``"workspace"``, ``"reserved"``, ``"experts"`` and ``"pool:<name>"``.
    `peak_kv_tokens` is the largest sum of the final lengths of the requests that are active together.
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
