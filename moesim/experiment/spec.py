"""One run with everything looked up: what travels from an experiment to workers, the engine, rows and keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moesim.errors import InputError
from moesim.experiment.intervals import Ends
from moesim.experiment.point import Point
from moesim.workload import WorkloadSpec

if TYPE_CHECKING:
    from moesim.hardware import HardwareProfile
    from moesim.model import ModelSpec


@dataclass(frozen=True)
class RunSpec:
    """One run with everything looked up.

    Attributes
    ----------
    index : int
        Its place in the experiment, from 0.
    point : Point
        As written.
    model, hardware, workload
        What the names meant.
    cache_slots : int or None
        Slots of each GPU over all layers; None: to be found from the budget.
    decision_ns : int, ns
        Charged between Routed and the effect of its actions.
    policy_name : str
        Name with its options, unique within the experiment.
    refusal : InputError or None
        Why it cannot be carried out: the trace lacks what the policy needs.
    ends : tuple of Ends
        Machines at the ends of the intervals of the profile's numbers, if the experiment asks for them.
    """

    index: int
    point: Point
    model: ModelSpec
    hardware: HardwareProfile
    workload: WorkloadSpec
    cache_slots: int | None
    decision_ns: int
    policy_name: str
    refusal: InputError | None = None
    ends: tuple[Ends, ...] = ()
