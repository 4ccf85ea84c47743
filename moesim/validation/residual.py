"""What a difference between measured and predicted time is made of: the same split by cause of both, subtracted."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from moesim.metrics.causes import CAUSES
from moesim.metrics.chain import WAITING, Chain, Record
from moesim.metrics.machine import Machine
from moesim.metrics.utilisation import common_ns, length, union
from moesim.records import Records

if TYPE_CHECKING:
    from moesim.hardware import HardwareProfile
    from moesim.validation.facts import Facts

GAP: Final = "gap"
RESIDUALS: Final = (*(cause for cause in CAUSES if cause != "idle"), WAITING, GAP)
"""Causes of a residual: those of `moesim.metrics.causes`, with idle time cut in two.

``gap``: no lane and no link was busy, and nobody decided: the cost of passing work on. ``waiting``: nothing that was needed was
under way, but something else was.
"""


def time_by_cause(records: Records, machine: Machine, steps: Collection[int]) -> dict[str, int]:
    """Split the time of some steps by cause.

    Parameters
    ----------
    records : Records
        Of a simulation or a replay.
    machine : Machine
        What it ran on.
    steps : collection of int
        Their numbers.

    Returns
    -------
    dict of str to int, ns
        Each of `RESIDUALS`; they add up to the duration of these steps.
    """
    charged = Chain(records, machine.kinds, machine.media).split(steps)
    found = {cause: charged.get(cause, 0) for cause in RESIDUALS}
    everything: list[Record] = [*records.tasks, *records.transfers, *records.activations, *records.decisions]
    until = max([records.makespan_ns, *(r.end for r in everything)])
    occupied = union(((r.start, r.end) for r in everything), until)
    asked = union(((s.begin, s.end) for s in records.steps if s.step in steps), until)
    # Where nothing was busy, the walk can have charged nothing but waiting: so this never exceeds it.
    found[GAP] = length(asked) - common_ns(asked, occupied)
    found[WAITING] -= found[GAP]
    assert sum(found.values()) == length(asked)
    return found


def apart(facts: Facts, hardware: HardwareProfile) -> Facts:
    """Tell the runtime's own time of a simulation apart from the dense part.

    A profile has it as ``router_us``, which the simulator adds to each layer's dense part; in a replay nothing is busy then.

    Parameters
    ----------
    facts : Facts
        Of a simulation.
    hardware : HardwareProfile
        What it ran on.

    Returns
    -------
    Facts
        The same, with that time under `GAP`.
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
    """Split the difference of the mean decode step, measured less predicted.

    Parameters
    ----------
    predicted, measured : Facts
        Of the same run.

    Returns
    -------
    dict of str to float, ns
        By cause, as in `RESIDUALS`; they add up to the difference of the means of `Facts.compared_steps`.
    """
    return {cause: _mean(measured, cause) - _mean(predicted, cause) for cause in RESIDUALS}


def _mean(facts: Facts, cause: str) -> float:
    return facts.cause_ns.get(cause, 0) / len(facts.compared_steps)


def largest(parts: Mapping[str, float]) -> str:
    """Name the cause with the largest share of a difference."""
    return max(parts, key=lambda cause: abs(parts[cause]))
