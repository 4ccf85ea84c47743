"""What an action names must be there; how an error says where it happened."""

from __future__ import annotations

from typing import NoReturn

from moesim.core.units import format_ns
from moesim.engine.memory import PoolState, Unit
from moesim.engine.state import DeviceState, State
from moesim.errors import PolicyError, unknown_name, unknown_width


def fail(state: State, what: str, remedy: str) -> NoReturn:
    """Raise the error of a policy at this moment."""
    forward = state.forward
    step = 0 if forward is None else forward.step.index
    layer = -1 if forward is None else forward.reached if forward.visit is None else forward.visit.layer
    fail_at(state.now, step, layer, what, remedy, state.policy_name)


def fail_at(now: int, step: int, layer: int, what: str, remedy: str, policy_name: str) -> NoReturn:
    """Raise the error of a policy at a moment of a run."""
    raise PolicyError(f"t={format_ns(now)}, step {step}, layer {layer}: {what}; {remedy} [policy={policy_name}]")


def short_repr(value: object) -> str:
    """Write a value in one short line."""
    return " ".join(repr(value).split())[:80]


def device_of(state: State, name: str, what: str) -> DeviceState:
    """Find a device by name."""
    if name not in state.devices:
        fail(state, f"{what}: {unknown_name('device', name, state.devices)}", "name a device of the profile")
    return state.devices[name]


def unit_of(state: State, layer: int, expert: int, what: str, bits: float | None = None) -> Unit:
    """Name an expert at a width."""
    n_layers, n_experts = state.model.n_layers, state.model.n_experts
    if not (0 <= layer < n_layers and 0 <= expert < n_experts):
        allowed = f"layers are 0..{n_layers - 1}, experts 0..{n_experts - 1}"
        fail(state, f"{what}(L{layer}/E{expert}): no such unit", allowed)
    return Unit(layer, expert, width_of(state, bits, f"{what}(L{layer}/E{expert})"))


def width_of(state: State, bits: float | None, what: str) -> float | None:
    """Return a width of the model's; None of the full one."""
    if bits is None:
        return None
    full, *others = state.model.widths
    if bits == full:
        return None
    if bits not in others:
        found, remedy = unknown_width(bits, state.model.widths)
        fail(state, f"{what}: {found}", remedy)
    return bits


def pool_of(state: State, device: DeviceState, name: str, what: str) -> PoolState:
    """Find a pool of a device by name."""
    if name not in device.memory.pools:
        known = unknown_name("pool", name, device.memory.pools)
        fail(state, f"{what}: {known}", f"declare Pool('{device.name}', '{name}', ...) in place()")
    return device.memory.pools[name]
