"""What names of an action must be, and how an error says where it happened."""

from __future__ import annotations

from typing import NoReturn

from moesim.core.units import format_ns
from moesim.engine.machine import DeviceState
from moesim.engine.memory import PoolState
from moesim.engine.state import State
from moesim.errors import PolicyError, unknown_name, unknown_width


def fail(state: State, what: str, remedy: str) -> NoReturn:
    """Raise the error of a policy at this moment."""
    layer = state.visit.layer if state.visit is not None else state.reached
    fail_at(state.now, state.step.index, layer, what, remedy, state.policy_name)


def fail_at(now: int, step: int, layer: int, what: str, remedy: str, policy_name: str) -> NoReturn:
    """Raise the error of a policy at a moment of a run."""
    raise PolicyError(f"t={format_ns(now)}, step {step}, layer {layer}: {what}; {remedy} [policy={policy_name}]")


def short_repr(value: object) -> str:
    """Write a value in one short line."""
    return " ".join(repr(value).split())[:80]


def device_of(state: State, name: str, what: str) -> DeviceState:
    """Find a device by name."""
    device = state.by_name.get(name)
    if device is None:
        fail(state, f"{what}: {unknown_name('device', name, state.by_name)}", "name a device of the profile")
    return device


def unit_of(state: State, layer: int, expert: int, what: str, bits: float | None = None) -> int:
    """Number an expert over all layers and widths."""
    n_layers, n_experts = state.model.n_layers, state.model.n_experts
    if not (0 <= layer < n_layers and 0 <= expert < n_experts):
        allowed = f"layers are 0..{n_layers - 1}, experts 0..{n_experts - 1}"
        fail(state, f"{what}(L{layer}/E{expert}): no such unit", allowed)
    return first_of(state, bits, f"{what}(L{layer}/E{expert})") + layer * n_experts + expert


def first_of(state: State, bits: float | None, what: str) -> int:
    """Number the first unit of a width."""
    if bits is None:
        return 0
    widths = state.weights.widths
    if bits not in widths:
        found, remedy = unknown_width(bits, widths)
        fail(state, f"{what}: {found}", remedy)
    return state.weights.first(bits)


def pool_of(state: State, device: DeviceState, name: str, what: str) -> PoolState:
    """Find a pool of a device by name."""
    pool = device.memory.pools.get(name)
    if pool is None:
        known = unknown_name("pool", name, device.memory.pools)
        fail(state, f"{what}: {known}", f"declare Pool('{device.name}', '{name}', ...) in place()")
    return pool
