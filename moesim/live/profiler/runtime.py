"""The runtime's own time, measured on the runtime itself: a few replays of a middling model on the machine of a tier."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from moesim.hardware import HardwareProfile, build_profile
from moesim.live.machine import LiveMachine
from moesim.live.overhead import runtime_gaps
from moesim.live.profiler.layout import Tier
from moesim.live.profiler.needs import RUNTIME_BYTES


class Runtime:
    """Replays on the machine of one tier."""

    def __init__(self, tier: Tier, disk: Path | None, seed: int) -> None:
        self._hardware = skeleton(tier)
        backend = "cuda" if any(device.place not in ("cpu", "disk") for device in tier.devices) else "cpu"
        gpus = [int(device.place.partition(":")[2]) for device in tier.devices if device.place not in ("cpu", "disk")]
        self._machine = LiveMachine(
            self._hardware, backend=backend, memory_bytes=RUNTIME_BYTES, disk=disk if "disk" in self._places(tier) else None,
            seed=seed, first_gpu=min(gpus, default=0),
        )  # fmt: skip

    @staticmethod
    def _places(tier: Tier) -> set[str]:
        return {device.place for device in tier.devices}

    def gaps_us(self, variant: str) -> dict[str, float]:
        """Measure the median gaps of a variant once, in us; see `moesim.live.overhead.runtime_gaps`."""
        return {name: median(gaps) for name, gaps in runtime_gaps(self._machine, self._hardware, variant).items()}

    def close(self) -> None:
        """End the workers and give the memory back."""
        self._machine.close()


def skeleton(tier: Tier) -> HardwareProfile:
    """Make a profile that has a tier's devices and links, and costs of no meaning: policies are told some, and use none."""

    def some(value: Any) -> dict[str, Any]:
        return {"value": value, "source": "assumed", "why": "needed to run, and decides nothing"}

    def device(kind: str, role: str, cores: tuple[int, ...]) -> dict[str, Any]:
        rates = {} if kind == "disk" else {"memory_bytes_per_s": some(1e10), "flops": some(1e11)}
        return {"kind": kind, "role": role, "memory_bytes": some("1 TB"), **rates, **({"cores": list(cores)} if cores else {})}

    copies = {"latency_us": some(10), "bytes_per_s": some(1e10)}
    return build_profile(
        {
            "name": "skeleton", "description": "devices and links only", "compute": tier.compute, "backing": [tier.backing],
            "devices": {d.name: device(d.kind, d.role, d.cores) for d in tier.devices},
            "links": {
                link.name: {"any": copies, **({"cores": list(link.cores)} if link.cores else {}),
                            **({"medium": link.medium} if link.medium else {})}
                for link in tier.links
            },
        },
        "profile measure",
    )  # fmt: skip
