"""Check whether a league's map holds on draws of routing that had no part in it."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from experiments.research.tables.command import parser, run
from moesim.core.files import OutputFolder, check_own_folder
from moesim.core.student import mean
from moesim.errors import ConfigError
from moesim.experiment.config import load_config
from moesim.experiment.sweep import expand, quick
from moesim.experiment.workers import Workers
from moesim.metrics.naming import policy_label
from moesim.studies.league import LEVEL, NOISE, Meetings, Standing, System, decode_speed, league

FIRST_SEED: Final = 1000
"""Of the fresh draws; those of an experiment are below."""


@dataclass(frozen=True)
class Fresh:
    """Cells of a map on fresh draws: best against second."""

    n_draws: int
    # certain, kept: cells that were certain, and those of them whose best is faster over the fresh draws as well
    certain: int
    kept: int
    # noisy, even: cells that were hatched for the draws, and those of them where the fresh draws' 95 % interval holds 1 or less
    noisy: int
    even: int

    def text(self) -> str:
        """Return it in one line."""
        return (
            f"on {self.n_draws} fresh draws the best is faster than the second in {self.kept} of {self.certain} cells that were "
            f"certain; of {self.noisy} hatched for the draws, {self.even} are not decided there either"
        )


def fresh_draws(raw: str, n: int) -> list[str]:
    """Return an experiment with other seeds of its routing; of a trace that is a file, with other requests."""
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Let best and second of every cell of a league's map meet on other draws of routing.

    --out is the folder of `moesim league`, whose runs are not repeated.
    """
    options = parser("experiments.research.tables.fresh_draws", main.__doc__, jobs=True)
    options.add_argument("experiment", nargs="?", type=Path, default=Path("league"), help="default: league")
    options.add_argument("--draws", type=int, default=20, help="number of fresh draws")
    options.add_argument("--hardware", help="another machine: a name, or the file of a profile")
    options.add_argument("--ratios", type=float, nargs="+", default=[0.125, 0.25, 0.5, 1.0], help="of the map")
    options.add_argument("--shares", type=float, nargs="+", default=[0.1, 0.25, 0.5, 0.75], help="of the map")
    options.add_argument("--quick", action="store_true", help="first value of each sweep and at most 4 decode tokens")
    return run(_draw, options, arguments)


def _draw(given: Namespace) -> None:
    place, out = str(given.experiment), given.out
    config = load_config(given.experiment, [f"hardware={given.hardware}"] if given.hardware else [])
    config = quick(config, place) if given.quick else config
    begin = None
    if out is not None:
        check_own_folder(out, "league")
        begin = OutputFolder(out, "league").mark
    folder = None if out is None else out / "runs"
    axes = sorted(given.ratios), sorted(given.shares)
    found = league(config, place, ratios=axes[0], shares=axes[1], folder=folder, jobs=given.jobs, progress=True, begin=begin)
    if not found.cells:
        raise ConfigError(f"fresh_draws: {place}: expected a map with cells, got none; give --ratios and --shares")
    systems = list({repr(point.policy): point.policy for point in expand(config, place)}.values())
    with Workers(given.jobs) as workers:
        fresh = on_fresh_draws(found.cells, systems, given.draws, Meetings(place, workers, folder, progress=True))
    print(fresh.text())


if __name__ == "__main__":
    sys.exit(main())
