"""Whether a map holds on draws of routing that had no part in it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from moesim.core.student import mean
from moesim.metrics.naming import policy_label
from moesim.studies.league.contest import LEVEL, NOISE
from moesim.studies.league.standing import Standing, decode_speed

if TYPE_CHECKING:
    from moesim.studies.league.meetings import Meetings, System

FIRST_SEED: Final = 1000
"""Of the fresh draws; those of an experiment are below."""


@dataclass(frozen=True)
class Fresh:
    """How cells of a map came out on fresh draws: best against second."""

    n_draws: int
    # certain, kept: cells that were certain, and those of them whose best is faster over the fresh draws as well
    certain: int
    kept: int
    # noisy, even: cells that were hatched for the draws, and those of them where the fresh draws' 95 % interval holds 1 or less
    noisy: int
    even: int

    def text(self) -> str:
        """Say it in one line."""
        return (
            f"on {self.n_draws} fresh draws the best is faster than the second in {self.kept} of {self.certain} cells that were "
            f"certain; of {self.noisy} hatched for the draws, {self.even} are not decided there either"
        )


def fresh_draws(raw: str, n: int) -> list[str]:
    """Give an experiment with other seeds of its routing; of a trace that is a file, with other requests."""
    found = []
    for seed in range(FIRST_SEED, FIRST_SEED + n):
        changed = json.loads(raw)
        if isinstance(changed["trace"], dict):
            changed["trace"]["seed"] = seed
        else:
            changed["workload"]["seed"] = seed
        found.append(json.dumps(changed, sort_keys=True))
    return found


def on_fresh_draws(cells: Sequence[Standing], systems: Sequence[System], n: int, meetings: Meetings) -> Fresh:
    """Let best and second of every cell meet again."""
    named = {policy_label(one): one for one in systems}
    pairs = [(cell, [named[cell.contest.best], named[cell.contest.second]]) for cell in cells if cell.contest.second]
    answers = iter(meetings.rows([(raw, pair) for cell, pair in pairs for raw in fresh_draws(cell.setting.draws[0], n)]))
    certain = kept = noisy = even = 0
    for cell, _ in pairs:
        rows = [next(answers) for _ in range(n)]
        ratios = [decode_speed(a) / decode_speed(b) for a, b in rows if a and b]
        if not ratios:
            continue
        margin = mean(ratios, LEVEL)
        if cell.contest.certain:
            certain, kept = certain + 1, kept + (margin.value > 1)
        elif NOISE in cell.contest.doubts:
            noisy, even = noisy + 1, even + (margin.value <= margin.factor)
    return Fresh(n, certain, kept, noisy, even)
