"""The fastest system at equal GPU memory on each machine, by how much, and how surely."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from moesim.capacity import required_bytes
from moesim.core.processes import usable_cores
from moesim.core.student import Mean, mean
from moesim.core.text import say
from moesim.core.units import NS_PER_S
from moesim.errors import ConfigError, MoesimError
from moesim.experiment.config import Config, parse_config
from moesim.experiment.report import split_notes, waited
from moesim.experiment.resolve import Experiment, read_inputs
from moesim.experiment.run import run_experiment
from moesim.experiment.runner import at_end
from moesim.experiment.sweep import Point, RunSpec, expand
from moesim.experiment.workers import Workers
from moesim.hardware import HardwareProfile, load_hardware
from moesim.metrics.naming import hardware_label, model_label, policy_label
from moesim.model import ModelSpec, load_model
from moesim.policies.registry import make_policy
from moesim.policy import Placement
from moesim.studies.regret import bounds_of
from moesim.studies.whatif.knobs import knob_of
from moesim.studies.whatif.machines import rate_of
from moesim.studies.whatif.settings import Base, raw_at

if TYPE_CHECKING:
    from moesim.metrics import Value
    from moesim.trace import Trace


Raw = Mapping[str, Any]
_LINK = knob_of("link.bytes_per_s")
_CPU_COST = "expert_cost.few_row_flops"


@dataclass(frozen=True)
class Setting:
    """One setting in which systems meet: everything but the system and the draw of routing."""

    spec: ModelSpec
    hardware: str  # label
    batch: int
    memory_bytes: int | None  # of the GPU, for everything; None: `share` says how many experts are cached
    share: float | None  # of all experts; None: what the memory has room for
    ratio: float  # rate of the link over the rate at which the CPU reads experts
    own_ratio: float  # that of the machine as it is
    draws: tuple[str, ...]  # experiments without policies, as JSON; one a draw

    def raws(self) -> list[dict[str, Any]]:
        return [json.loads(draw) for draw in self.draws]

    @property
    def model(self) -> str:
        return model_label(self.spec)

    @property
    def panel(self) -> tuple[str, int]:
        """Model and batch, which have one map."""
        return self.model, self.batch


def settings_of(config: Config, place: str) -> list[Setting]:
    """List settings; points that differ in policy, trace or seed alone are one."""
    groups: dict[str, list[Point]] = {}
    for point in expand(config, place):
        workload = {key: value for key, value in point.workload.items() if key != "seed"}
        key = json.dumps([point.model, point.hardware, point.ratio, point.budget_bytes, workload], sort_keys=True, default=str)
        groups.setdefault(key, []).append(point)
    return [_setting(config, points, place) for points in groups.values()]


def _setting(config: Config, points: Sequence[Point], place: str) -> Setting:
    first = points[0]
    model, machine = load_model(first.model, f"{place}: model"), load_hardware(first.hardware, f"{place}: hardware")
    draws = dict.fromkeys(json.dumps(raw_at(config, point), sort_keys=True) for point in points)
    own = float(ratio_of(machine, place))
    return Setting(
        model, hardware_label(machine), first.workload["batch_size"], first.budget_bytes, first.ratio,
        own, own, tuple(draws),
    )  # fmt: skip


def ratio_of(machine: HardwareProfile, place: str) -> Fraction:
    """Return the rate of large copies over the rate at which the host reads experts."""
    hosts = [device for name, device in machine.devices.items() if name in machine.backing and device.role == "host"]
    links = [link for link in machine.links if link.dst == machine.compute and link.src in machine.backing]
    if not hosts or not links:
        raise ConfigError(
            f"{place}: hardware {machine.name}: expected a host that computes and a link from it to {machine.compute}, got none; "
            "name another machine"
        )
    cost = hosts[0].expert_cost
    reading = cost.read_bytes_per_s if cost is not None else hosts[0].memory_bytes_per_s
    curves = links[0].curves
    return rate_of(curves.get("pinned") or next(iter(curves.values()))) / Fraction(reading)


def map_of(setting: Setting, ratios: Iterable[float], shares: Iterable[float], place: str) -> list[Setting]:
    """Return a setting with other link rates, and memory for other shares of the experts."""
    found = []
    room = {share: _memory(setting, share, place) for share in shares}
    for ratio in ratios:
        factor = Fraction(ratio).limit_denominator(10**6) / Fraction(setting.ratio).limit_denominator(10**9)
        for share, n_bytes in room.items():
            draws = []
            for raw in setting.raws():
                faster = Base(_LINK.scale(Base(raw, place), factor).raw, place)  # type: ignore[misc]
                gpu = faster.profile.compute
                room_there = max(n_bytes, faster.profile.devices[gpu].memory_bytes)
                changed = faster.machine({f"devices.{gpu}.memory_bytes": room_there})
                draws.append(json.dumps({**changed, "cache": {"budget": n_bytes}}, sort_keys=True))
            found.append(replace(setting, memory_bytes=n_bytes, share=share, ratio=ratio, draws=tuple(draws)))
    return found


def _memory(setting: Setting, share: float, place: str) -> int:
    """Count the GPU bytes of all but the experts, and of a share of these."""
    raw, model = setting.raws()[0], setting.spec
    machine = load_hardware(raw["hardware"], f"{place}: hardware")
    work = raw["workload"]
    kv_tokens = work["batch_size"] * (int(work["prompt_tokens"] or 0) + int(work["decode_tokens"] or 0))
    around = sum(required_bytes(model, machine, kv_tokens, Placement(), int(work["batch_size"]))[machine.compute].values())
    experts = model.n_experts * sum(model.expert_bytes(layer) for layer in range(model.n_layers))  # at their full width alone
    return around + math.ceil(share * experts)


def cpu_cost_ends(raw: Raw, place: str) -> list[dict[str, Any]]:
    """Return an experiment at both ends of the CPU's cost a row; none without an interval."""
    machine = load_hardware(raw["hardware"], f"{place}: hardware")
    numbers = {key: one for key, one in machine.numbers.items() if key.endswith(_CPU_COST) and one.interval is not None}
    return [
        {**raw, "hardware": at_end(raw["hardware"], machine, key, end)}
        for key, one in numbers.items()
        for end in one.interval or ()
    ]


NEAR: Final = 1.15
"""Systems that are at most so many times slower than the best of the first draw meet on the other draws, too."""
MOST: Final = 5
"""Of these so many at most, the fastest."""

LEVEL: Final = 0.95
"""Of the interval of a margin."""

NOISE, CPU_COST, ALONE = "draws of routing", "CPU cost a row", "no second system"
"""Why it is not certain who wins."""


@dataclass(frozen=True)
class Contest:
    """The result of a setting."""

    best: str
    speed: float  # of the best: geometric mean over the draws
    # of the best, of all draws
    least: float
    most: float
    second: str  # the next; empty if nobody else ran
    margin: Mean | None  # speed of the best over that of the second; None without a second
    doubts: tuple[str, ...]  # of `NOISE`, `CPU_COST` and `ALONE`; empty: it is certain

    @property
    def certain(self) -> bool:
        """Whether the best wins beyond the noise, wherever the CPU's cost lies in its interval."""
        return not self.doubts


def near(first: Mapping[str, float], factor: float = NEAR, most: int | None = MOST) -> list[str]:
    """List systems near the best of the first draw, at least the two fastest.

    >>> near({"lru": 8.0, "dali": 10.0, "on-demand": 3.0})
    ['dali', 'lru']
    """
    fastest = sorted(first, key=lambda name: -first[name])[:most]  # of equals the first
    return [name for place, name in enumerate(fastest) if place < 2 or first[name] * factor >= first[fastest[0]]]


def decide(speeds: Mapping[str, Sequence[float]], ends: Sequence[Mapping[str, float]] = ()) -> Contest:
    """Decide a setting by each system's speeds on the draws and at ends of the CPU's row cost.

    Of equals the first is the best. The margin has its 95 % interval by Student's t over the draws' ratios, on the scale of their
    logarithms. There is doubt where that holds 1, and where at an end anybody is as fast as the best.

    >>> found = decide({"lru": [8.0, 8.2], "dali": [10.0, 10.1]}, [{"lru": 8.0, "dali": 9.0}, {"lru": 8.0, "dali": 7.0}])
    >>> found.best, round(found.margin.value, 2), found.doubts
    ('dali', 1.24, ('CPU cost a row',))
    """
    means = {name: mean(values, LEVEL).value for name, values in speeds.items()}
    ranked = sorted(means, key=lambda name: -means[name])
    best = ranked[0]
    found = best, means[best], min(speeds[best]), max(speeds[best])
    if len(ranked) == 1:
        return Contest(*found, "", None, (ALONE,))
    margin = mean([a / b for a, b in zip(speeds[best], speeds[ranked[1]], strict=True)], LEVEL)
    doubts = []
    if margin.n < 2 or margin.value <= margin.factor:
        doubts.append(NOISE)
    if any(best in end and end[best] <= max((v for name, v in end.items() if name != best), default=0.0) for end in ends):
        doubts.append(CPU_COST)
    return Contest(*found, ranked[1], margin, tuple(doubts))


System = Mapping[str, Any]
"""A policy as an experiment has it: its name and options."""
Row = Mapping[str, "Value"]


@dataclass
class Meetings:
    """Runs of a league, each once, kept in a folder, so that a stopped league can go on."""

    place: str  # the experiment's file, for messages
    workers: Workers
    folder: Path | None = None  # where runs are kept; None: nowhere
    progress: bool = False
    n_runs: int = 0  # that were asked for
    n_found: int = 0  # of those that had been run before
    errors: dict[str, str] = field(default_factory=dict)  # why a system did not run, by its label: the first reason
    _known: dict[tuple[str, str], Row | None] = field(default_factory=dict)
    _traces: dict[str, Trace] = field(default_factory=dict)

    def read_inputs(self, raws: Iterable[str]) -> None:
        for raw in raws:
            read_inputs(json.loads(raw), self.place, self._traces)

    def rows(self, meetings: Sequence[tuple[str, Sequence[System]]]) -> list[list[Row | None]]:
        """Return the rows of each experiment (JSON without policies); None if one cannot run."""
        keys = [[(raw, json.dumps(one)) for one in systems] for raw, systems in meetings]
        missing = {key: None for one in keys for key in one if key not in self._known}
        by_raw: dict[str, list[str]] = {}
        for raw, system in missing:
            by_raw.setdefault(raw, []).append(system)
        runs = [run for raw, systems in by_raw.items() for run in self._specs(raw, systems)]
        if runs:
            joined = Experiment.joined([(experiment, spec) for experiment, spec, _ in runs])
            done = run_experiment(joined, folder=self.folder, progress=self.progress, workers=self.workers, may_fail=True)
            self.n_runs += len(runs)
            self.n_found += done.n_found
            for (_, _, key), outcome in zip(runs, done.outcomes, strict=True):
                if outcome.failure is None:
                    self._known[key] = outcome.row
                else:
                    self._note(str(outcome.row["policy"]), outcome.failure)
        return [[self._known[key] for key in one] for one in keys]

    def _specs(self, raw: str, systems: Sequence[str]) -> list[tuple[Experiment, RunSpec, tuple[str, str]]]:
        """Resolve a meeting; who cannot run there is known at once."""
        experiment = self.experiment(raw, [json.loads(system) for system in systems])
        self._known.update({(raw, system): None for system in systems})
        if experiment is None:
            return []
        return [(experiment, spec, (raw, json.dumps(dict(spec.point.policy)))) for spec in experiment.specs]

    def experiment(self, raw: str, systems: Sequence[System]) -> Experiment | None:
        asked = json.loads(raw) | {"policies": list(systems)}
        try:
            return Experiment(parse_config(asked, self.place), self.place, known=self._traces)
        except MoesimError as error:
            for system in systems:
                self._note(policy_label(system), error)
            return None

    def _note(self, label: str, error: MoesimError) -> None:
        self.errors.setdefault(label, " ".join(str(error).split()))


def decode_speed(row: Row) -> float:
    """Tokens a second of the whole batch while decoding."""
    return float(row.get("decode_tokens_per_s") or 0)


def prompt_speed(row: Row) -> float:
    """First tokens a second of a request."""
    return NS_PER_S / float(row["ttft_mean_ns"])  # type: ignore[arg-type]


PHASES: Final[dict[str, Callable[[Row], float]]] = {"decode": decode_speed, "prompt": prompt_speed}


@dataclass(frozen=True)
class Standing:
    """The result of a setting in one phase."""

    setting: Setting
    phase: str  # one of `PHASES`
    contest: Contest
    first: Row  # of the best on the first draw
    inexact: Row | None = None  # the fastest of those that change what the model computes, on the first draw
    bound: float | None = None  # lower bound of the makespan over that of the best, on the first draw


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
    """Sum up settings by batch size and system, least behind first; the incomplete come last.

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


UNITS: Final = {"decode": "tokens/s", "prompt": "first tokens/s"}


def record(one: Standing) -> dict[str, Any]:
    """Return a setting as a row of a table, every number unrounded."""
    setting, contest, row, inexact = one.setting, one.contest, one.first, one.inexact
    margin = contest.margin
    return {
        "model": setting.model, "hardware": setting.hardware, "memory_bytes": setting.memory_bytes,
        "cached_share": setting.share, "link_over_cpu": setting.ratio, "machine_ratio": setting.own_ratio,
        "batch_size": setting.batch, "phase": one.phase, "best": contest.best, "speed": contest.speed,
        "speed_least": contest.least, "speed_most": contest.most, "unit": UNITS[one.phase],
        "second": contest.second, "margin": margin.value if margin else None,
        "margin_low": margin.value / margin.factor if margin else None,
        "margin_high": margin.value * margin.factor if margin else None,
        "ttft_s": float(str(row["ttft_mean_ns"])) / NS_PER_S, "draws": len(setting.draws),
        "certain": contest.certain, "doubts": "; ".join(contest.doubts), "waited_for": waited(row, one.phase),
        "bound_share": one.bound, "slots": row.get("cache_slots_used"),
        "source_label": row.get("source_label"), "labels": ", ".join(split_notes(row)[0]),
        "inexact": inexact["policy"] if inexact else "",
        "inexact_speed": PHASES[one.phase](inexact) if inexact else None,
        "inexact_fresh": inexact.get("fidelity_fresh") if inexact else None,
    }  # fmt: skip


SCREEN: Final = 1.5
"""Systems that meet on all machines of a map: at most so many times slower than the best of any corner or of the middle."""
ORACLE: Final = "oracle"


@dataclass(frozen=True)
class League:
    """Results of a league."""

    table: tuple[Standing, ...]  # of the experiment's settings, both phases
    cells: tuple[Standing, ...]  # of the map: decoding
    never: dict[str, str]  # systems that ran nowhere, and why
    n_runs: int
    n_found: int  # of these that had been run before
    everywhere: tuple[Everywhere, ...] = ()  # exact systems over the settings and machines in which all of them met


def league(
    config: Config, place: str, *, ratios: Sequence[float] = (), shares: Sequence[float] = (), folder: Path | None = None,
    jobs: int | None = None, progress: bool = False, begin: Callable[[], object] | None = None,
) -> League:  # fmt: skip
    """Run a league; an experiment's points that differ in trace or seed are draws of a setting."""
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
        held.tell(f"{len(settings)} settings, {len(systems)} systems")
        table = [held.bounded(one, exact) for one in held.standings(settings, exact, tuple(PHASES), inexact)]
        cells = held.cells(maps, exact, _asked(ratios, shares)) if maps else []
        summed = everywhere(held.met([*settings, *held.asked], exact))
    if not table:
        why = next(iter(held.meetings.errors.values()), "nothing decoded")
        raise ConfigError(f"{place}: expected a system that runs in some setting, got none: {why}")
    labels = [policy_label(one) for one in systems]
    never = {label: f"ran in no setting: {held.meetings.errors[label]}" for label in labels if label not in held.ran}
    return League(tuple(table), tuple(cells), never, held.meetings.n_runs, held.meetings.n_found, tuple(summed))


class _League:
    def __init__(self, meetings: Meetings, place: str, progress: bool) -> None:
        self.meetings = meetings
        self.ran: set[str] = set()
        self.asked: list[Setting] = []  # machines of the map in which all systems meet
        self._place = place
        self._progress = progress

    def tell(self, text: str) -> None:
        if self._progress:
            say(text)

    def standings(
        self, settings: Sequence[Setting], systems: Sequence[System], phases: Sequence[str], inexact: Sequence[System] = (),
    ) -> list[Standing]:  # fmt: skip
        """Decide settings: all on the first draw, whoever is near on other draws and at the ends."""
        first = self._first(settings, [*systems, *inexact])
        chosen = [[one for one in systems if policy_label(one) in _near(rows, systems, phases)] for rows in first]
        self.tell(f"other draws of routing: {sum(map(len, chosen))} systems near the best")
        self.meetings.rows([(raw, some) for setting, some in zip(settings, chosen, strict=True) for raw in setting.draws[1:]])
        ends = [
            [json.dumps(raw, sort_keys=True) for raw in cpu_cost_ends(setting.raws()[0], self._place)]
            if any(_rows_add(setting, phase) for phase in phases) else [] for setting in settings
        ]  # fmt: skip
        self.tell("ends of the CPU's cost a row")
        self.meetings.rows([(raw, some) for raws, some in zip(ends, chosen, strict=True) for raw in raws])
        found, names = [], {policy_label(one) for one in inexact}
        for setting, some, rows, raws in zip(settings, chosen, first, ends, strict=True):
            others = [row for name, row in rows.items() if name in names]
            for phase in phases:
                standing = self._standing(setting, phase, some, raws if _rows_add(setting, phase) else [])
                if standing is not None:
                    found.append(replace(standing, inexact=max(others, key=PHASES[phase], default=None)))
        return found

    def cells(
        self, maps: Mapping[Panel, Sequence[Setting]], systems: Sequence[System], ends: Collection[tuple[float, float]]
    ) -> list[Standing]:
        """Decide the cells of all maps; all systems meet in the cells at their ends."""
        found: list[Standing] = []
        for (model, batch), cells in maps.items():
            self.tell(f"map of {model}, batch {batch}: {len(cells)} machines")
            asked = [one for one in cells if (one.ratio, one.share) in ends]
            self.asked += asked
            near_any = {name for rows in self._first(asked, systems) for name in _near(rows, systems, ("decode",), SCREEN)}
            found += self.standings(cells, [one for one in systems if policy_label(one) in near_any], ("decode",))
        return found

    def met(self, settings: Sequence[Setting], systems: Sequence[System]) -> list[tuple[int, dict[str, float]]]:
        rows = self._first(settings, systems)
        return [(setting.batch, _speeds(mine, "decode")) for setting, mine in zip(settings, rows, strict=True)]

    def _first(self, settings: Sequence[Setting], systems: Sequence[System]) -> list[dict[str, Row]]:
        rows = self.meetings.rows([(setting.draws[0], systems) for setting in settings])
        named = [{policy_label(one): row for one, row in zip(systems, mine, strict=True) if row is not None} for mine in rows]
        self.ran.update(name for one in named for name in one)
        return named

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
        first = next(row for one, row in zip(systems, rows[0], strict=True) if policy_label(one) == contest.best)
        assert first is not None
        return Standing(setting, phase, contest, first)

    def bounded(self, standing: Standing, systems: Sequence[System]) -> Standing:
        system = next(one for one in systems if policy_label(one) == standing.contest.best)
        experiment = self.meetings.experiment(standing.setting.draws[0], [system])
        slots, makespan = standing.first.get("cache_slots"), standing.first.get("makespan_ns")
        if experiment is None or not isinstance(slots, int) or not isinstance(makespan, int):
            return standing
        bounds = bounds_of(experiment, experiment.specs[0], slots)
        return standing if bounds is None else replace(standing, bound=bounds.makespan_ns / makespan)


Panel = tuple[str, int]


def _maps(
    settings: Sequence[Setting], ratios: Sequence[float], shares: Sequence[float], place: str
) -> dict[Panel, list[Setting]]:
    """Make the machines of each model's and batch's map, around the first machine."""
    hardware = settings[0].hardware
    bases = {one.panel: one for one in reversed(settings) if one.hardware == hardware}
    return {panel: map_of(bases[panel], ratios, shares, place) for panel in dict.fromkeys(one.panel for one in settings)}


def _rows_add(setting: Setting, phase: str) -> bool:
    """Whether experts have further rows, which a decode step of one request has not."""
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
    middle = ratios[len(ratios) // 2], shares[len(shares) // 2]
    return {(ratio, share) for ratio in (ratios[0], ratios[-1]) for share in (shares[0], shares[-1])} | {middle}
