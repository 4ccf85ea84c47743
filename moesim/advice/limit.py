"""What a placement is limited by, and whether the profile's software is what limits it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from moesim.advice.setting import Setting
from moesim.costs import CostModel
from moesim.units import NS_PER_S

_LINK: Final = ("exposed_demand", "exposed_prefetch", "exposed_other_transfer")


def gpu_share(rows: Sequence[Mapping[str, Any]]) -> float:
    """Of the time for which decoding waits for experts, the share that is not the processor's: GPU and link.

    Parameters
    ----------
    rows : sequence of mapping
        Runs of one placement.

    Returns
    -------
    float
        1 if no time is spent on experts at all.
    """

    def time(*causes: str) -> int:
        return sum(int(row[f"decode_time_{cause}_ns"]) for row in rows for cause in causes)

    elsewhere, cpu = time("gpu_experts", *_LINK), time("cpu_experts")
    return elsewhere / (elsewhere + cpu) if elsewhere + cpu else 1.0


def fixed_times(setting: Setting) -> str:
    """Warn of a profile whose GPU spends most of an expert's time neither reading nor computing.

    Parameters
    ----------
    setting : Setting
        Model and machine.

    Returns
    -------
    str
        Empty if it does not.
    """
    model, device = setting.model, setting.hardware.devices[setting.gpu]
    taken = CostModel(model, setting.hardware).expert_ns(setting.gpu, 1)
    reading = model.expert_bytes(0) * NS_PER_S / device.memory_bytes_per_s
    computing = 2 * model.expert_params * NS_PER_S / device.flops
    if max(reading, computing) >= taken / 2:
        return ""
    return (
        f"one expert takes {taken / 1000:.0f} us on {setting.gpu}, of which reading its weights is {reading / 1000:.0f} us: "
        "this profile is of software with long fixed times on the GPU. An engine without them is faster, and may want more "
        "experts there; advice for it needs a profile of that engine"
    )
