"""What a difference between measured and predicted time is made of: the same split by cause of both, subtracted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from moesim.studies.validation.facts import GAP, RESIDUALS, Facts

if TYPE_CHECKING:
    from moesim.hardware import HardwareProfile


def apart(facts: Facts, hardware: HardwareProfile) -> Facts:
    """Tell the runtime's own time of a simulation apart from the dense part.

    A profile has it as ``router_us``, which the simulator adds to each layer's dense part; in a replay nothing is busy then.
    """
    n_steps = len(facts.step_ns)
    router_ns = sum(
        round(device.router_us * 1000) * facts.tasks.get(f"dense@{name}", [0])[0] * len(facts.compared_steps) // n_steps
        for name, device in hardware.devices.items()
    )
    found = dict(facts.cause_ns)
    moved = min(router_ns, found["dense"])
    return replace(facts, cause_ns={**found, "dense": found["dense"] - moved, GAP: found[GAP] + moved})


def residual(predicted: Facts, measured: Facts) -> dict[str, float]:
    """Split the difference of the mean decode step, measured less predicted."""
    return {cause: _mean(measured, cause) - _mean(predicted, cause) for cause in RESIDUALS}


def _mean(facts: Facts, cause: str) -> float:
    return facts.cause_ns.get(cause, 0) / len(facts.compared_steps)


def largest(parts: Mapping[str, float]) -> str:
    """Name the cause with the largest share of a difference."""
    return max(parts, key=lambda cause: abs(parts[cause]))
