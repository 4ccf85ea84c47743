"""Devices and links that a machine is measured as, what overlaps on it, and its memory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moesim.errors import ConfigError
from moesim.live.kernels.host import available_gpu_bytes, available_memory_bytes, gpu_power_w, gpu_total_bytes, package_energy_uj


@dataclass(frozen=True)
class Device:
    """A device and its place: ``"cpu"``, ``"disk"`` or such as ``"cuda:0"``; ``fewer`` are other numbers of threads."""

    name: str
    kind: str
    role: str
    place: str
    cores: tuple[int, ...] = ()
    fewer: tuple[int, ...] = ()
    all_cores: bool = False  # of the machine: the power of its processor is this device's

    @property
    def threads(self) -> int | None:
        return len(self.cores) or None


@dataclass(frozen=True)
class Link:
    """A link of a profile, and the cores that copy over it (none: a copy engine, or any core)."""

    name: str
    cores: tuple[int, ...] = ()
    medium: str | None = None

    @property
    def ends(self) -> tuple[str, str]:
        src, _, dst = self.name.partition("->")
        return src, dst


@dataclass(frozen=True)
class Tier:
    """One profile: experts go from ``backing`` to ``compute``; ``like`` are (activity, link, link measured)."""

    suffix: str
    words: str
    compute: str
    backing: str
    devices: tuple[Device, ...]
    links: tuple[Link, ...]
    pairs: tuple[tuple[str, str], ...]
    like: tuple[tuple[str, str, str], ...] = ()


@dataclass(frozen=True)
class Layout:
    """All profiles that one measurement gives."""

    tiers: tuple[Tier, ...]
    disk: Path | None = None

    @property
    def devices(self) -> dict[str, Device]:
        return {device.name: device for tier in self.tiers for device in tier.devices}

    @property
    def links(self) -> dict[str, Link]:
        return {link.name: link for tier in self.tiers for link in tier.links}

    @property
    def computing(self) -> list[Device]:
        devices = self.devices
        return [devices[name] for name in dict.fromkeys(tier.compute for tier in self.tiers)]

    @property
    def has_gpu(self) -> bool:
        return any(device.kind == "gpu" for device in self.devices.values())


def layout_of(cores: Sequence[int], *, gpu: int | None = None, disk: Path | None = None) -> Layout:
    """Decide what a machine is measured as."""
    cores = tuple(cores)
    if gpu is not None:
        if disk is not None:
            raise ConfigError("--disk: expected no disk next to a GPU, whose experts lie in host memory, got one; add --no-gpu")
        return Layout((_gpu_tier(cores, gpu),))
    tiers = [_memory_tier(cores)] if len(cores) > 1 else []
    tiers += [_disk_tier(cores)] if disk is not None else []
    if not tiers:
        raise ConfigError(f"profile measure: expected a GPU, a second core or a disk, got one core ({cores[0]}); give --disk DIR")
    return Layout(tuple(tiers), disk)


def _gpu_tier(cores: tuple[int, ...], index: int) -> Tier:
    half = len(cores) // 2
    host = Device("cpu0", "cpu", "host", "cpu", cores, (half,) if half else (), all_cores=True)
    gpu = Device("gpu0", "gpu", "accelerator", f"cuda:{index}")
    there, back = Link("cpu0->gpu0"), Link("gpu0->cpu0")
    pairs = (
        ("cpu0.experts", there.name), ("gpu0.experts", there.name), (there.name, back.name), ("cpu0.experts", back.name),
        ("gpu0.side", "gpu0.experts"),
    )  # fmt: skip
    return Tier("", "one GPU and its host", "gpu0", "cpu0", (gpu, host), (there, back), pairs)


def _memory_tier(cores: tuple[int, ...]) -> Tier:
    half = len(cores) // 2
    name = "core" if len(cores) == 2 else "cores"
    near = Device(f"{name}0", "cpu", "accelerator", "cpu", cores[:half])
    far = Device(f"{name}1", "cpu", "host", "cpu", cores[half:])
    into, back = f"{far.name}->{near.name}", f"{near.name}->{far.name}"
    carrier = far.cores[-1:]
    experts, dense, others = f"{near.name}.experts", f"{near.name}.dense", f"{far.name}.experts"
    return Tier(
        "",
        "some cores with a bounded cache of experts; the others with all experts in ordinary memory, and with the copying",
        near.name, far.name, (near, far), tuple(Link(link, carrier, "copies") for link in (into, back)),
        ((experts, others), (experts, into), (others, into), (dense, into), (dense, others)),
        tuple((activity, back, into) for activity in (experts, others, dense)),
    )  # fmt: skip


def _disk_tier(cores: tuple[int, ...]) -> Tier:
    fewer = (len(cores) // 2,) if len(cores) > 2 else ()  # of two cores, each alone is a device of the other tier
    host = Device("cpu0", "cpu", "accelerator", "cpu", cores, fewer, all_cores=True)
    read, write = "disk0->cpu0", "cpu0->disk0"
    pairs = (("cpu0.experts", read), ("cpu0.dense", read))
    words = "all cores with a bounded cache of experts in memory; all experts on a disk"
    disk = Device("disk0", "disk", "storage", "disk")
    links = (Link(read, (), "disk0"), Link(write, (), "disk0"))
    return Tier("-disk", words, "cpu0", "disk0", (host, disk), links, pairs)


class Host:
    """The machine, as far as nothing is allocated on it."""

    def free_bytes(self, place: str, disk: Path | None = None) -> int | None:
        """Return what is free of a place's memory, or of a folder's disk; None if the system does not report it."""
        if place == "disk":
            return shutil.disk_usage(disk or Path()).free
        return available_memory_bytes() if place == "cpu" else available_gpu_bytes(place)

    def capacity_bytes(self, place: str, disk: Path | None = None) -> int:
        """Return the whole memory of a host or GPU, or the free space of a disk."""
        if place == "cpu":
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if place.startswith("cuda"):
            return gpu_total_bytes(place) or 0
        return self.free_bytes(place, disk) or 0

    def powered(self, devices: Sequence[Device]) -> list[str]:
        """Name the devices whose power can be read: GPUs, and a processor whose cores are all of one device."""
        found = []
        for device in devices:
            if device.kind == "gpu":
                told = gpu_power_w(index_of(device)) is not None
            else:
                told = device.all_cores and package_energy_uj() is not None
            found += [device.name] if told else []
        return found


def index_of(device: Device) -> int:
    """Return the number of a GPU."""
    return int(device.place.partition(":")[2] or 0)
