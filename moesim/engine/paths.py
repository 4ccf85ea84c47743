"""Ways over links, and from where weights can come (rule 5)."""

from __future__ import annotations

from contextlib import suppress

from moesim.engine.machine import DeviceState, LinkState
from moesim.engine.state import State
from moesim.errors import HardwareError


def path_between(state: State, src: str, dst: str) -> tuple[LinkState, ...]:
    """Return the links from one device to another."""
    path = state.paths.get((src, dst))
    if path is None:
        path = state.paths[src, dst] = tuple(state.links[link.name] for link in state.costs.path(src, dst))
    return path


def sources(state: State, device: DeviceState, name: str | None) -> list[DeviceState]:
    """Devices from which weights can come to `device`, nearest first, then by name."""
    if name is not None:
        return [state.by_name[name]] if name in state.by_name else []
    found = state.sources.get(device.name)
    if found is None:
        reach = []
        for other in state.devices:
            if other is not device:
                with suppress(HardwareError):  # no way from there
                    reach.append((len(state.costs.path(other.name, device.name)), other.name))
        found = state.sources[device.name] = [state.by_name[n] for _, n in sorted(reach)]
    return found
