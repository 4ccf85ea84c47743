"""A league: every system on the first draw of routing, and whoever comes near the best on the others and at the ends of costs."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from moesim.core.processes import usable_cores
from moesim.core.text import say
from moesim.errors import ConfigError
from moesim.experiment.config import Config
from moesim.experiment.sweep import expand
from moesim.experiment.workers import Workers
from moesim.metrics.naming import policy_label
from moesim.policies.registry import make_policy
from moesim.studies.league.contest import decide, near
from moesim.studies.league.everywhere import Everywhere, everywhere
from moesim.studies.league.fresh import Fresh, on_fresh_draws
from moesim.studies.league.meetings import Meetings, Row, System
from moesim.studies.league.settings import Setting, cpu_cost_ends, map_of, settings_of
from moesim.studies.league.standing import PHASES, Standing
from moesim.studies.regret import bounds_of

SCREEN: Final = 1.5
"""Systems that meet on all machines of a map: at most so many times slower than the best of any corner or of the middle."""
ORACLE: Final = "oracle"


@dataclass(frozen=True)
class League:
    """What came of a league."""

    table: tuple[Standing, ...]  # of the experiment's settings, both phases
    cells: tuple[Standing, ...]  # of the map: decoding
    never: dict[str, str]  # systems that ran nowhere, and why
    n_runs: int
    n_found: int  # of these that had been run before
    everywhere: tuple[Everywhere, ...] = ()  # exact systems over the settings and machines in which all of them met
    fresh: Fresh | None = None  # how the map came out on other draws


def league(
    config: Config, place: str, *, ratios: Sequence[float] = (), shares: Sequence[float] = (), folder: Path | None = None,
    jobs: int | None = None, progress: bool = False, n_fresh: int = 0, begin: Callable[[], object] | None = None,
) -> League:  # fmt: skip
    """Carry out a league of an experiment, whose points that differ in trace or seed alone are draws of one setting.

    The map's axes are the rate of the link over that at which the CPU reads experts, and the share of experts for which the GPU
    has room; without any there is no map. Runs are kept in a folder, so that they are not repeated. With `n_fresh`, best and
    second of each cell meet on so many other draws. All traces are read before the first run;
    then `begin` is called.
    """
    systems = list({repr(point.policy): point.policy for point in expand(config, place)}.values())
    exact = [one for one in systems if make_policy(one, place).exact]
    inexact = [one for one in systems if one not in exact]
    settings = settings_of(config, place)
    # Its runs are short, and this process is busy between them: one process more than cores keeps the cores at work.
    with Workers(jobs or usable_cores() + 1) as workers:
        held = _League(Meetings(place, workers, folder, progress), place, progress)
        maps = _maps(settings, ratios, shares, place) if ratios and shares else {}
        everyone = [*settings, *(cell for cells in maps.values() for cell in cells)]
        held.meetings.read_inputs(draw for setting in everyone for draw in setting.draws)
        if begin is not None:
            begin()
        held.told(f"{len(settings)} settings, {len(systems)} systems")
        table = [held.bounded(one, exact) for one in held.standings(settings, exact, tuple(PHASES), inexact)]
        cells = held.cells(maps, exact, _asked(ratios, shares)) if maps else []
        summed = everywhere(held.met([*settings, *held.asked], exact))
        fresh = None
        if n_fresh and cells:
            held.told(f"{n_fresh} fresh draws")
            fresh = on_fresh_draws(cells, exact, n_fresh, held.meetings)
    if not table:
        why = next(iter(held.meetings.errors.values()), "nothing decoded")
        raise ConfigError(f"{place}: expected a system that runs in some setting, got none: {why}")
    labels = [policy_label(one) for one in systems]
    never = {label: f"ran in no setting: {held.meetings.errors[label]}" for label in labels if label not in held.ran}
    return League(tuple(table), tuple(cells), never, held.meetings.n_runs, held.meetings.n_found, tuple(summed), fresh)


class _League:
    def __init__(self, meetings: Meetings, place: str, progress: bool) -> None:
        self.meetings = meetings
        self.ran: set[str] = set()
        self.asked: list[Setting] = []  # machines of the map in which all systems meet
        self._place = place
        self._progress = progress

    def told(self, text: str) -> None:
        if self._progress:
            say(text)

    def standings(
        self, settings: Sequence[Setting], systems: Sequence[System], phases: Sequence[str], inexact: Sequence[System] = (),
    ) -> list[Standing]:  # fmt: skip
        """Decide settings: all systems on the first draw, whoever is near on the others and at the ends."""
        everyone = [*systems, *inexact]
        first = self._first(settings, everyone)
        chosen = [[one for one in systems if policy_label(one) in _near(rows, systems, phases)] for rows in first]
        self.told(f"other draws of routing: {sum(map(len, chosen))} systems near the best")
        later = [(raw, some) for setting, some in zip(settings, chosen, strict=True) for raw in setting.draws[1:]]
        self.meetings.rows(later)
        ends = [self._ends(setting) if any(_rows_add(setting, phase) for phase in phases) else [] for setting in settings]
        self.told("ends of the CPU's cost a row")
        self.meetings.rows([(raw, some) for raws, some in zip(ends, chosen, strict=True) for raw in raws])
        found = []
        for setting, some, rows, raws in zip(settings, chosen, first, ends, strict=True):
            for phase in phases:
                standing = self._standing(setting, phase, some, raws if _rows_add(setting, phase) else [])
                if standing is not None:
                    found.append(self._compared(standing, rows, inexact))
        return found

    def cells(
        self, maps: Mapping[Panel, Sequence[Setting]], systems: Sequence[System], ends: Collection[tuple[float, float]]
    ) -> list[Standing]:
        """Decide the cells of all maps; all systems meet in the cells at their ends."""
        found: list[Standing] = []
        for (model, batch), cells in maps.items():
            self.told(f"map of {model}, batch {batch}: {len(cells)} machines")
            asked = [one for one in cells if (one.ratio, one.share) in ends]
            self.asked += asked
            near_any = {name for rows in self._first(asked, systems) for name in _near(rows, systems, ("decode",), SCREEN)}
            found += self.standings(cells, [one for one in systems if policy_label(one) in near_any], ("decode",))
        return found

    def met(self, settings: Sequence[Setting], systems: Sequence[System]) -> list[tuple[int, dict[str, float]]]:
        """Give the batch size and the decode speeds of the first draw of settings; an oracle is nobody's equal."""
        rows = self._first(settings, systems)
        return [(setting.batch, _speeds(mine, "decode")) for setting, mine in zip(settings, rows, strict=True)]

    def _first(self, settings: Sequence[Setting], systems: Sequence[System]) -> list[dict[str, Row]]:
        rows = self.meetings.rows([(setting.draws[0], systems) for setting in settings])
        named = [{policy_label(one): row for one, row in zip(systems, mine, strict=True) if row is not None} for mine in rows]
        self.ran.update(name for one in named for name in one)
        return named

    def _ends(self, setting: Setting) -> list[str]:
        return [json.dumps(raw, sort_keys=True) for raw in cpu_cost_ends(setting.raws()[0], self._place)]

    def _standing(self, setting: Setting, phase: str, systems: Sequence[System], ends: Sequence[str]) -> Standing | None:
        of = PHASES[phase]
        rows = self.meetings.rows([(raw, systems) for raw in (*setting.draws, *ends)])
        n_draws = len(setting.draws)
        speeds: dict[str, list[float]] = {}
        for place, one in enumerate(systems):
            mine = [row[place] for row in rows[:n_draws]]
            if all(row is not None for row in mine):
                speeds[policy_label(one)] = [of(row) for row in mine if row is not None]
        if not speeds:
            return None
        at_ends = [
            {policy_label(one): of(row) for one, row in zip(systems, mine, strict=True) if row is not None}
            for mine in rows[n_draws:]
        ]
        contest = decide(speeds, [{name: end[name] for name in end if name in speeds} for end in at_ends])
        best = next(place for place, one in enumerate(systems) if policy_label(one) == contest.best)
        first = rows[0][best]
        assert first is not None
        return Standing(setting, phase, contest, first)

    def _compared(self, standing: Standing, rows: dict[str, Row], inexact: Iterable[System]) -> Standing:
        """Add the fastest system that is not exact."""
        names = {policy_label(one) for one in inexact}
        others = [row for name, row in rows.items() if name in names]
        return replace(standing, inexact=max(others, key=PHASES[standing.phase], default=None))

    def bounded(self, standing: Standing, systems: Sequence[System]) -> Standing:
        """Add the share of the bound."""
        system = next(one for one in systems if policy_label(one) == standing.contest.best)
        return replace(standing, bound=self._bound(standing, system))

    def _bound(self, standing: Standing, system: System) -> float | None:
        experiment = self.meetings.experiment(standing.setting.draws[0], [system])
        slots, makespan = standing.first.get("cache_slots"), standing.first.get("makespan_ns")
        if experiment is None or not isinstance(slots, int) or not isinstance(makespan, int):
            return None
        bounds = bounds_of(experiment, experiment.specs[0], slots)
        return None if bounds is None else bounds.makespan_ns / makespan


Panel = tuple[str, int]


def _maps(
    settings: Sequence[Setting], ratios: Sequence[float], shares: Sequence[float], place: str
) -> dict[Panel, list[Setting]]:
    """Make the machines of the map of each model and batch, around the first machine of the experiment."""
    hardware = settings[0].hardware
    bases = {one.panel: one for one in reversed(settings) if one.hardware == hardware}
    return {panel: map_of(bases[panel], ratios, shares, place) for panel in dict.fromkeys(one.panel for one in settings)}


def _rows_add(setting: Setting, phase: str) -> bool:
    """Whether experts have further rows, which could cost more or less: a decode step of one request has one each."""
    return setting.batch > 1 or phase != "decode"


def _near(rows: dict[str, Row], systems: Sequence[System], phases: Iterable[str], factor: float | None = None) -> set[str]:
    """Name the systems near the best in any phase; an oracle is nobody's equal."""
    names = [policy_label(one) for one in systems]
    found: set[str] = set()
    for phase in phases:
        speeds = {name: speed for name, speed in _speeds(rows, phase).items() if name in names}
        found.update(near(speeds) if factor is None else near(speeds, factor, None))
    return found


def _speeds(rows: dict[str, Row], phase: str) -> dict[str, float]:
    return {name: PHASES[phase](row) for name, row in rows.items() if row.get("source_label") != ORACLE}


def _asked(ratios: Sequence[float], shares: Sequence[float]) -> set[tuple[float, float]]:
    """Choose the corners and the middle of a map."""
    middle = ratios[len(ratios) // 2], shares[len(shares) // 2]
    return {(ratio, share) for ratio in (ratios[0], ratios[-1]) for share in (shares[0], shares[-1])} | {middle}
