"""Hardware profiles: what a machine is, and what was measured on it, each number with its source."""

from moesim.hardware.load import (
    LABELS,
    HardwareProfile,
    Link,
    build_profile,
    hardware_names,
    load_hardware,
    override,
    read_profile,
    weakest,
)

__all__ = [
    "LABELS",
    "HardwareProfile",
    "Link",
    "build_profile",
    "hardware_names",
    "load_hardware",
    "override",
    "read_profile",
    "weakest",
]
