"""What an advice holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moesim.core.student import Mean
from moesim.studies.advice.candidates import Candidate
from moesim.studies.advice.engines import Command
from moesim.studies.advice.interval import Evidence
from moesim.studies.advice.routing import Routing
from moesim.studies.advice.search import Found
from moesim.studies.advice.setting import Setting

if TYPE_CHECKING:
    from moesim.studies.advice.observed import Observed


@dataclass(frozen=True)
class Judged:
    """A finalist with what is known about its speed."""

    candidate: Candidate  # what it is
    speed: Mean  # simulated decode speed of the whole batch, tokens/s, over requests
    # low, high: interval of the speed to be expected on the machine
    low: float
    high: float
    ratio: float  # to the best runnable placement, on the same requests
    same: bool  # the ratio differs from 1 by no more than it varies between requests
    ttft_s: float  # mean time to the first token
    fresh: float | None  # share of the gate weight of decoding that was served as routed
    # of the time that the processor and the GPU take in decoding, all their work included, how much is not the processor's
    gpu_share: float
    launch_share: float  # of a decode step, how much is launches on the GPU
    crossed: float | None  # speed on other routing over that on this one
    label: str  # weakest source of its numbers
    notes: str  # of its runs
    commands: tuple[Command, ...]  # what to type


@dataclass(frozen=True)
class Advice:
    """The answer.

    Attributes
    ----------
    setting : Setting
        The question, looked up.
    routing, other : Routing
        What was simulated on, and other routing for comparison, if there is some.
    found : Found
        All that was simulated.
    runnable, papers : list of Judged
        Finalists of either class, fastest first.
    evidence : list of Evidence
        What the intervals rest on.
    caution : str
        Why the order may be another with an engine that launches fewer kernels; empty if there is no such reason.
    warnings : list of str
        What else a reader must know.
    observed : Observed or None
        What observed speeds told of the machine, if some were given.
    """

    setting: Setting
    routing: Routing
    other: Routing | None
    found: Found
    runnable: list[Judged]
    papers: list[Judged]
    evidence: list[Evidence]
    caution: str
    warnings: list[str]
    observed: Observed | None = None

    @property
    def best(self) -> Judged:
        """The fastest that can be run; of papers' policies if none can."""
        return (self.runnable or self.papers)[0]
