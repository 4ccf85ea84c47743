"""One run with everything looked up: what travels from an experiment to workers, the engine, rows and keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moesim.errors import InputError
from moesim.experiment.intervals import Ends
from moesim.experiment.point import Point
from moesim.trace.workload import WorkloadSpec

if TYPE_CHECKING:
    from moesim.hardware import HardwareProfile
    from moesim.model import ModelSpec


@dataclass(frozen=True)
class RunSpec:
    """One run with everything looked up."""

    index: int  # its place in the experiment, from 0
    point: Point  # as written
    # model, hardware, workload: what the names meant
    model: ModelSpec
    hardware: HardwareProfile
    workload: WorkloadSpec
    cache_slots: int | None  # slots of each GPU over all layers; None: to be found from the budget
    decision_ns: int  # charged between Routed and the effect of its actions
    policy_name: str  # name with its options, unique within the experiment
    refusal: InputError | None = None  # why it cannot be carried out: the trace lacks what the policy needs
    ends: tuple[Ends, ...] = ()  # machines at the ends of the intervals of the profile's numbers, if the experiment asks for them
