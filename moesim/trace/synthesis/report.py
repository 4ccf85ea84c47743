"""How well synthetic traces match their targets: target, fit and error of every figure, on seeds of one's choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from moesim.trace.synthesis.fit import simulate

if TYPE_CHECKING:
    from moesim.trace.synthesis.parameter_set import ParameterSet
    from moesim.trace.synthesis.target_figures import Figure, Targets

COLUMNS = ("figure", "source", "target", "fit", "error", "worst", "tolerance", "role", "met")
HELD_OUT = ("held out", "error there")  # more columns, where some requests were held out
RIGHT = ("target", "fit", "error", "worst", "tolerance", *HELD_OUT)


@dataclass(frozen=True)
class Match:
    """One figure beside what synthetic traces have."""

    figure: Figure
    found: tuple[float, ...]  # one for each seed
    held_out: float | None = None  # the figure of requests that were held out; None if there are none

    @property
    def mean(self) -> float:
        """Mean over seeds."""
        return float(np.mean(self.found))

    @property
    def error(self) -> float:
        """Mean less target."""
        return self.mean - self.figure.value

    @property
    def worst(self) -> float:
        """Error of the seed that is farthest off."""
        return max((value - self.figure.value for value in self.found), key=abs)

    @property
    def met(self) -> bool:
        """Whether every seed is within the tolerance."""
        return abs(self.worst) <= self.figure.tolerance


def report(
    parameters: ParameterSet, targets: Targets, seeds: Sequence[int], held_out: Mapping[str, float] | None = None
) -> list[Match]:
    """Compare synthetic traces with targets."""
    names = [figure.name for figure in targets.figures]
    found = [simulate(parameters, targets, seed, names) for seed in seeds]
    return [
        Match(figure, tuple(each[figure.name] for each in found), (held_out or {}).get(figure.name)) for figure in targets.figures
    ]


def cells(matches: Sequence[Match]) -> list[list[str]]:
    """Write matches as rows of text below `COLUMNS`, longer by `HELD_OUT` where some requests were held out."""
    return [
        [
            m.figure.name,
            m.figure.source,
            f"{m.figure.value:.3f}",
            f"{m.mean:.3f}",
            f"{m.error:+z.3f}",
            f"{m.worst:+z.3f}",
            f"{m.figure.tolerance:.3f}",
            "fitted" if m.figure.fitted else "check",
            "yes" if m.met else f"no, off by {abs(m.worst):.3f}",
            *([] if m.held_out is None else [f"{m.held_out:.3f}", f"{m.mean - m.held_out:+z.3f}"]),
        ]
        for m in matches
    ]
