"""Hardware profiles: the parts of a machine and their costs, each number with its source."""

from moesim.hardware.build import build_profile
from moesim.hardware.load import from_numbers, from_parts, hardware_names, load_hardware, read_profile
from moesim.hardware.read import override
from moesim.hardware.types import LABELS, HardwareProfile, Link, weakest

__all__ = [
    "LABELS", "HardwareProfile", "Link", "build_profile", "from_numbers", "from_parts", "hardware_names", "load_hardware",
    "override", "read_profile", "weakest",
]  # fmt: skip
