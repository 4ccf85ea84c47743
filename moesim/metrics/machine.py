"""The part of a hardware profile that is needed after a run: kinds of devices, links, power."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from moesim.hardware import HardwareProfile, weakest

_KINDS = {"accelerator": "gpu", "host": "cpu", "storage": "disk"}


@dataclass(frozen=True)
class Machine:
    """The part of a hardware profile that is needed after a run.

    Attributes
    ----------
    kinds : mapping of str to str
        Each device is a ``"gpu"`` (an accelerator, whatever it is made of), a ``"cpu"`` (a host) or a
        ``"disk"``.
    links : tuple of str
        Names of all links, ``"src->dst"``.
    media : mapping of str to str
        Medium of each link that shares one with others.
    power_w : mapping of str to (float, float), W
        Idle and busy power of each device; empty where a figure is lacking.
    platform_w : float, W
        Power of the rest of the machine.
    energy_label : str or None
        Weakest source label of the power figures; None without figures.
    """

    kinds: Mapping[str, str]
    links: tuple[str, ...]
    media: Mapping[str, str] = field(default_factory=dict)
    power_w: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    platform_w: float = 0.0
    energy_label: str | None = None

    @classmethod
    def of(cls, hardware: HardwareProfile) -> Machine:
        """Read a hardware profile; the power figures count only if no device lacks them."""
        devices = hardware.devices
        power_w = {n: (d.idle_w, d.busy_w) for n, d in devices.items() if d.idle_w is not None and d.busy_w is not None}
        complete = len(power_w) == len(devices)
        keys = (*(f"devices.{name}.{key}" for name in devices for key in ("idle_w", "busy_w")), "platform_w")
        return cls(
            kinds={name: _KINDS[device.role] for name, device in devices.items()},
            links=tuple(link.name for link in hardware.links),
            media={link.name: link.medium for link in hardware.links if link.medium is not None},
            power_w=power_w if complete else {},
            platform_w=hardware.platform_w or 0.0,
            energy_label=weakest(hardware.numbers[key].source for key in keys if key in hardware.numbers) if complete else None,
        )


def machine_of(hardware: HardwareProfile | Machine) -> Machine:
    """Return what a run ran on, a profile or a `Machine`, as a `Machine`."""
    return hardware if isinstance(hardware, Machine) else Machine.of(hardware)
