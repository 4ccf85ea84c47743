"""Launches of GPU kernels: what share of a step they are, and what an engine that starts fewer kernels would change.

A profile describes a machine with software. Eager PyTorch starts some fifty kernels a layer one by one; an engine with CUDA
graphs and fused kernels does not. Placements that leave the GPU more or less of a layer differ in what that costs, so their order
hangs on the engine, and not on the machine alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from moesim.core.units import digits
from moesim.hardware.costs.operations import operations
from moesim.studies.advice.setting import Setting

if TYPE_CHECKING:
    from moesim.studies.advice.candidates import Candidate
    from moesim.studies.whatif.limits import Limits

LARGE_SHARE: Final = 0.2
"""Share of a decode step from which on launches are said to decide."""
FEW_US: Final = 35.0
"""Launches of a layer without its experts, us, in an engine with CUDA graphs."""
MANY_TIMES: Final = 2.0
"""Launches so many times `FEW_US` are those of another engine; up to there they may be those of an older GPU with CUDA graphs."""
WHY: Final = "25 operations x 1.4 us, small kernels in a CUDA graph on an A100 80 GB (te42kyfo/gpu-benches), taken over"
_PARTS: Final = ("attention", "dense")


@dataclass(frozen=True)
class Fewer:
    """Placements once more with fewer launches, on the first group of requests."""

    layer_us: float  # launches of a layer without its experts by the profile; with fewer launches they take `FEW_US`
    shares: Mapping[Candidate, float]  # share of a decode step that is launches of the GPU by the profile, of the finalists
    speeds: Mapping[Candidate, tuple[float, float]]  # by the profile, and with fewer launches

    @property
    def fastest(self) -> Candidate:
        """The fastest with fewer launches; of equals the faster one by the profile."""
        return max(self.speeds, key=lambda one: self.speeds[one][::-1])

    @property
    def flips(self) -> bool:
        """The fastest with fewer launches is not the fastest by the profile."""
        return self.speeds[self.fastest][0] < max(speeds[0] for speeds in self.speeds.values())


def gpu_share(limits: Limits) -> float:
    """Share of the time of the processor and the GPU that is not the processor's; what else there is does not count.

    >>> from moesim.studies.whatif.limits import Limits
    >>> gpu_share(Limits({"link": 0.1, "CPU memory": 0.4, "GPU launches": 0.3, "decisions": 0.2}))
    0.5
    """
    parts = limits.by_part
    elsewhere, cpu = parts.get("GPU", 0.0) + parts.get("link", 0.0), parts.get("CPU", 0.0)
    return elsewhere / (elsewhere + cpu) if elsewhere + cpu else 1.0


def launch_share(limits: Limits) -> float:
    """Share of a decode step that is launches of the GPU and the router's way to the host."""
    return limits.shares.get("GPU launches", 0.0)


def layer_us(setting: Setting) -> float:
    """Give what the launches of a layer without its experts take by the profile, us."""
    device = setting.hardware.devices[setting.gpu]
    if device.operations:
        counted = operations(device.operations, device.kind, setting.model)
        return float(device.operation_us) * sum(counted[part] for part in _PARTS)
    return float(device.launch_us) * sum(device.launches.get(part, 1) for part in _PARTS)


def with_fewer(setting: Setting) -> Setting | None:
    """Give the machine with an engine that launches fewer kernels; None if the profile's engine is such a one."""
    taken = layer_us(setting)
    if taken <= MANY_TIMES * FEW_US:
        return None
    device = setting.hardware.devices[setting.gpu]
    key, each = ("operation_us", device.operation_us) if device.operations else ("launch_us", device.launch_us)
    given: dict[str, Any] = {"value": float(each) * FEW_US / taken, "source": "assumed", "why": WHY}
    return replace(setting, hardware_ref={**setting.hardware_ref, f"devices.{setting.gpu}.{key}": given})


def caution(setting: Setting, fewer: Fewer | None) -> str:
    """Warn that the order of placements may be another with fewer launches; empty if nothing speaks for that."""
    if fewer is None:
        return ""
    large = ", ".join(f"{one.title} {100 * share:.0f} %" for one, share in fewer.shares.items())
    ends = (
        f"{fewer.fastest.title} is the fastest, at {digits(fewer.speeds[fewer.fastest][1])} tokens/s"
        if fewer.flips
        else f"{fewer.fastest.title} stays the fastest"
    )
    return (
        f"launches on {setting.gpu} are a large share of decode steps ({large}), by a profile whose software takes "
        f"{fewer.layer_us:.3g} us a layer for them, experts not counted. The ORDER of placements that differ in this share may "
        f"flip with an engine that launches fewer kernels (CUDA graphs, fused kernels, as llama.cpp has). Simulated once more "
        f"with {FEW_US:g} us (assumed: {WHY}), {ends}; a real engine may lie between. Measure, or choose a profile of the engine "
        "that will run"
    )
