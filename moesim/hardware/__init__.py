"""Hardware profiles: what a machine is, and what was measured on it, each number with its source."""

from moesim.hardware.build import build_profile
from moesim.hardware.load import hardware_names, load_hardware, override, read_profile
from moesim.hardware.types import LABELS, HardwareProfile, Link, weakest

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
