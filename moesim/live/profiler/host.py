"""What a machine says of itself, which is enough for the plan of a measurement; PyTorch is asked only where it is installed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from moesim.live.kernels.machine import (
    available_gpu_bytes,
    available_memory_bytes,
    gpu_power_w,
    gpu_total_bytes,
    package_energy_uj,
)
from moesim.live.profiler.layout import Device


class Host:
    """The machine, as far as nothing is allocated on it."""

    def free_bytes(self, place: str, disk: Path | None = None) -> int | None:
        """Tell what is free now of a place's memory, or of the disk with a folder; None if the system does not say."""
        if place == "disk":
            return shutil.disk_usage(disk or Path()).free
        return available_memory_bytes() if place == "cpu" else available_gpu_bytes(place)

    def capacity_bytes(self, place: str, disk: Path | None = None) -> int:
        """Tell how much a device can hold: the whole memory of a host or GPU, what is free of a disk."""
        if place == "cpu":
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if place.startswith("cuda"):
            return gpu_total_bytes(place) or 0
        return self.free_bytes(place, disk) or 0

    def powered(self, devices: Sequence[Device]) -> list[str]:
        """Name the devices whose power can be read: a GPU, and a processor of which one device has all cores."""
        found = []
        for device in devices:
            if device.kind == "gpu":
                told = gpu_power_w(index_of(device)) is not None
            else:
                told = device.all_cores and package_energy_uj() is not None
            found += [device.name] if told else []
        return found


def index_of(device: Device) -> int:
    """Tell the number of a GPU."""
    return int(device.place.partition(":")[2] or 0)
