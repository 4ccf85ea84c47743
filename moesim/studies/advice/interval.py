"""How far the truth may lie from a simulated speed: from figures that were measured, and from the requests that were simulated.

What comes from the costs are order statistics of measured over simulated speeds (`residuals`). With n figures like the one that
is predicted, the next lies between the k-th smallest and the k-th largest with a probability of at least 1 - 2 k / (n + 1),
whatever their distribution (split conformal prediction); k is the largest that keeps the level.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from moesim.core.student import Mean, mean
from moesim.studies.advice.residuals import Residual

LEVEL: Final = 0.8
"""Of intervals of speeds. The table has some ten figures of a kind: more than 0.8 cannot be had from so few."""

SAME_LEVEL: Final = 0.95
"""At which two placements are told apart."""


@dataclass(frozen=True)
class Evidence:
    """What measured speeds say about simulated ones of a kind."""

    # low, high: measured over simulated speed, between which figures of this kind lie
    low: float
    high: float
    n: int  # figures that this rests on
    what: str  # which these are
    # probability that another figure of the kind lies in between, at least; smaller than `LEVEL` if there are too few
    level: float


_WORDS: Final = {
    ("derived", "cpu"): "published decode speeds with experts on the processor",
    ("derived", "gpu"): "published decode speeds with no expert on the processor",
    ("measured", "any"): "replays on two measured machines, which have no GPU",
}


def evidence(residuals: Sequence[Residual], profile: str, experts: str) -> Evidence:
    """Find between which ratios measured over simulated speeds of a kind lie.

    >>> ten = [Residual(str(i), "derived", "cpu", 0.7 + 0.05 * i) for i in range(10)]
    >>> found = evidence(ten, "derived", "cpu")
    >>> round(found.low, 2), round(found.high, 2), found.n, round(found.level, 2)
    (0.7, 1.15, 10, 0.82)
    """
    kind = "any" if profile == "measured" else experts
    ratios = sorted(one.ratio for one in residuals if one.profile == profile and one.experts == kind)
    if not ratios:
        raise ValueError(f"expected residuals of {profile} profiles with experts on {kind}, got none")
    n = len(ratios)
    beyond = max(1, math.floor((n + 1) * (1 - LEVEL) / 2 + 1e-9))
    return Evidence(ratios[beyond - 1], ratios[n - beyond], n, _WORDS[profile, kind], 1 - 2 * beyond / (n + 1))


def mixed(cpu: Evidence, gpu: Evidence, gpu_share: float) -> tuple[float, float]:
    """Combine the evidence for a placement that works on both sides.

    Errors are weighted by shares of time, as if both sides were wrong the same way, which is the wider reading.

    >>> side = dict(n=9, what="", level=0.8)
    >>> mixed(Evidence(0.8, 1.0, **side), Evidence(0.4, 1.0, **side), 0.5)
    (0.5333333333333333, 1.0)
    """
    low = 1 / ((1 - gpu_share) / cpu.low + gpu_share / gpu.low)
    high = 1 / ((1 - gpu_share) / cpu.high + gpu_share / gpu.high)
    return low, high


def interval(speed: Mean, costs: tuple[float, float], routing: float = 1.0) -> tuple[float, float]:
    """Put all that is known to be uncertain into one interval.

    Independent errors: half widths on the logarithmic scale add up as squares. The costs' half widths are about their own
    middle, for simulated speeds are too high more often than too low.

    >>> low, high = interval(Mean(20.0, 1.0, 5), (0.5, 1.0))
    >>> round(low, 6), round(high, 6)
    (10.0, 20.0)
    """
    middle = math.sqrt(costs[0] * costs[1])
    half = math.hypot(math.log(costs[1] / middle), math.log(speed.factor), math.log(routing))
    return speed.value * middle / math.exp(half), speed.value * middle * math.exp(half)


def indistinguishable(best: Sequence[float], other: Sequence[float]) -> bool:
    """Whether two placements differ by no more than their ratio varies between requests; not known of a single request."""
    ratio = mean([b / a for a, b in zip(best, other, strict=True)], SAME_LEVEL)
    return ratio.n > 1 and abs(math.log(ratio.value)) <= math.log(ratio.factor)
