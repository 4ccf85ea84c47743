"""What a system loses that is used everywhere: how far it is behind the fastest, over all settings in which all systems met."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Everywhere:
    """One system over the settings of a batch size."""

    batch_size: int
    system: str
    settings: int  # in which all systems were asked to run, on the first draw
    ran: int  # of these it ran in so many
    # median, worst: decode speed of the fastest over its own, of those in which it ran
    median: float
    worst: float
    fastest: int  # settings in which nobody was faster


def everywhere(met: Sequence[tuple[int, Mapping[str, float]]]) -> list[Everywhere]:
    """Sum up settings, each with its batch size and decode speeds by system: by batch, those that are least behind first.

    Systems that could not run in every setting come last.

    >>> [(one.system, one.median, one.ran) for one in everywhere([(1, {"a": 4.0, "b": 5.0}), (1, {"a": 6.0})])]
    [('a', 1.125, 2), ('b', 1.0, 1)]
    """
    found = []
    for batch in sorted({size for size, _ in met}):
        mine = [speeds for size, speeds in met if size == batch and speeds]
        for system in dict.fromkeys(name for speeds in mine for name in speeds):
            behind = [max(speeds.values()) / speeds[system] for speeds in mine if system in speeds]
            fastest = sum(one == 1 for one in behind)
            found.append(Everywhere(batch, system, len(mine), len(behind), median(behind), max(behind), fastest))
    return sorted(found, key=lambda one: (one.batch_size, one.settings - one.ran, one.median, one.worst, one.system))
