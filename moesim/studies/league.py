"""The fastest released engine in each setting, the best rule if built, by how much, and how surely."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from moesim.core.processes import usable_cores
from moesim.core.progress import Progress
from moesim.core.student import Mean, mean
from moesim.core.units import NS_PER_S, ceil_div, format_memory
from moesim.errors import ConfigError, MoesimError
from moesim.experiment.config import Config, listed, parse_config
from moesim.experiment.report import split_notes, waited
from moesim.experiment.resolve import Experiment, read_inputs
from moesim.experiment.routing import fitted_parameters, lift_to_assume
from moesim.experiment.run import run_experiment
from moesim.experiment.sweep import Point, RunSpec, expand
from moesim.experiment.workers import Workers
from moesim.fits import required_bytes
from moesim.hardware import HardwareProfile, load_hardware
from moesim.metrics.naming import hardware_label, model_label, policy_label
from moesim.model import ModelSpec, load_model
from moesim.policies.registry import make_policy
from moesim.policy import Placement
from moesim.studies.whatif.settings import raw_at
from moesim.trace.made import ASSUMED, MADE

if TYPE_CHECKING:
    from moesim.metrics import Value
    from moesim.trace import Trace


Raw = Mapping[str, Any]
Row = Mapping[str, "Value"]

ENGINE: Final = "llama.cpp"  # whose costs a rule of a paper has: it is ranked as if built there
BUILT: Final = ("readback", "plan")
"""The host's operations in each layer visit of a rule as if built: those of the caches in llama.cpp's forks."""
CONTEXT: Final = 4096  # tokens of a request for which the GPU's memory has room, next to the experts
SCREEN_TOKENS: Final = 64  # decoded in the runs that choose who meets in full
TOKENS: Final = 2048, 512  # decoded at most by all requests together: on draws of requests; at other costs and on other routing
COST_DRAWS: Final = 4  # joint draws of all numbers with intervals
NEAR: Final = 1.5  # systems at most so many times slower than the fastest of the screen meet in full
MOST: Final = {True: 3, False: 2}  # of engines, and of rules, so many at most
LEVEL: Final = 0.95  # of the interval of a margin
NOBODY: Final = "no system ran"
"""Why a setting in which systems were to meet has no best."""
REQUESTS, COSTS, ROUTING, ALONE = "requests", "costs", "routing", "no second system"
"""What makes it uncertain who wins."""


@dataclass(frozen=True)
class System:
    """A system as an experiment has it, and what it is."""

    spec: Mapping[str, Any]
    label: str
    released: bool  # it can be downloaded: it is a part of an engine; otherwise a rule of a paper
    costs_of: str  # engine


def systems_of(config: Config, place: str) -> tuple[list[System], dict[str, str]]:
    """List systems, and those that change what the model computes, which take no part."""
    found, out = [], {}
    for spec in {repr(point.policy): point.policy for point in expand(config, place)}.values():
        made: Any = make_policy(spec, place)
        if made.exact and "oracle:routing" not in made.needs:
            found.append(System(spec, policy_label(spec), bool(made.engine), made.engine or ENGINE))
        else:
            out[policy_label(spec)] = "an oracle" if made.exact else "it changes what the model computes"
    return found, out


@dataclass(frozen=True)
class Setting:
    """One setting in which systems meet: everything but the system, its costs and the routing."""

    spec: ModelSpec
    machine: HardwareProfile  # with the costs of `ENGINE`
    # model, hardware: labels
    model: str
    hardware: str
    batch: int
    whole_memory: bool  # the cache has all of the GPU's memory that `CONTEXT` leaves
    draws: tuple[Raw, ...]  # experiments without policies; one for each draw of requests
    ends: tuple[Raw, ...]  # with the least and the most local routing; none if the routing is given
    left_out: str  # why nobody meets; empty if they do

    def at_most(self, tokens: int) -> int:
        return min(max(SCREEN_TOKENS, tokens), int(self.draws[0]["workload"]["decode_tokens"]))

    def of_length(self, raw: Raw, decode: int) -> Raw:
        """Write an experiment with another number of decoded tokens and the same room for the context."""
        work = {**raw["workload"], "decode_tokens": decode}
        if not self.whole_memory:
            return {**raw, "workload": work}
        prompt = int(work["prompt_tokens"])
        most = max(CONTEXT, prompt + int(raw["workload"]["decode_tokens"]))
        room, full = (self.spec.all_kv_bytes(tokens * self.batch, self.batch) for tokens in (most, prompt + decode))
        memory = self.machine.devices[self.machine.compute].memory_bytes
        return {**raw, "workload": work, "cache": {"budget": memory - room + full}}


def settings_of(config: Config, place: str) -> list[Setting]:
    """List settings; points that differ in policy, trace or seed alone are one."""
    groups: dict[str, list[Point]] = {}
    for point in expand(config, place):
        if None in (point.workload["prompt_tokens"], point.workload["decode_tokens"]):
            raise ConfigError(f"{place}: workload: expected prompt_tokens and decode_tokens of every setting, got none; add them")
        workload = {key: value for key, value in point.workload.items() if key != "seed"}
        key = json.dumps([point.model, point.hardware, point.ratio, point.budget_bytes, workload], sort_keys=True, default=str)
        groups.setdefault(key, []).append(point)
    most = max(int(one) for one in listed(config.workload.batch_size))
    return [_setting(config, points, most, place) for points in groups.values()]


def _setting(config: Config, points: Sequence[Point], requests: int, place: str) -> Setting:
    first = points[0]
    model = load_model(first.model, f"{place}: model")
    machine = load_hardware(first.hardware, f"{place}: hardware", ENGINE)
    written = {json.dumps(raw_at(config, point), sort_keys=True, default=str): None for point in points}
    draws, ends = [json.loads(one) for one in written], []
    if first.trace is None:
        tokens = {"prompt": first.workload["prompt_tokens"], "decode": first.workload["decode_tokens"]}
        sizes = {"requests": requests, **tokens, "scores": True}
        lift, fitted = lift_to_assume(model), fitted_parameters(model)
        shape = {"shape": f"{model.n_layers}x{model.n_experts}x{model.top_k}"}
        usual = {MADE: fitted} if fitted else {MADE: ASSUMED, "lift": lift.middle, **shape}
        for raw in draws:
            raw["trace"] = {**usual, **sizes, "seed": raw["workload"].get("seed") or 0}
        made = draws[0]["trace"]["seed"]
        ends = [{**draws[0], "trace": {MADE: ASSUMED, "lift": d, **shape, **sizes, "seed": made}} for d in (lift.low, lift.high)]
    whole = first.ratio == 1 and first.budget_bytes is None
    batch = int(first.workload["batch_size"])
    labels, why = (model_label(model), hardware_label(machine)), _why_not(model, machine, batch, whole)
    return Setting(model, machine, *labels, batch, whole, tuple(draws), tuple(ends), why)


def _why_not(model: ModelSpec, machine: HardwareProfile, batch: int, whole: bool) -> str:
    """Explain why there is nothing to offload, or no room for it."""
    needed = required_bytes(model, machine, CONTEXT * batch, Placement(), batch)
    experts = model.n_experts * sum(model.expert_bytes(layer) for layer in range(model.n_layers))
    if whole and sum(needed[machine.compute].values()) + experts <= machine.devices[machine.compute].memory_bytes:
        return "all of it fits in the GPU's memory"
    for name in machine.backing:
        if (need := sum(needed[name].values())) > (have := machine.devices[name].memory_bytes):
            return f"it needs {format_memory(need)} of {name}, which has {format_memory(have)}"
    return ""


@cache
def _machine(written: str, engine: str, place: str) -> HardwareProfile:
    return load_hardware(json.loads(written), f"{place}: hardware", engine)


def costed(raw: Raw, system: System, draw: int, place: str) -> dict[str, Any]:
    """Write an experiment with a system's costs: as they are (0), or at a joint draw of all numbers with intervals.

    Draws are log-uniform, each in its own of as many equal parts as there are draws. They are the same for all systems, by the
    number's key. A rule is charged for `BUILT` in each layer visit, with the router's result.
    """
    written = raw["hardware"] if isinstance(raw["hardware"], Mapping) else {"base": raw["hardware"]}
    machine = _machine(json.dumps(written, sort_keys=True, default=str), system.costs_of, place)
    found = {key: number.value for key, number in machine.numbers.items() if isinstance(number.value, int | float)}
    changed: dict[str, Any] = {}
    for key in found if draw else ():
        number = machine.numbers[key]
        if number.interval is not None and not key.endswith("_bytes"):  # a size is no cost: it decides what fits
            found[key] = type(found[key])(_drawn(key, *number.interval, draw))
            changed[key] = {"value": found[key], "source": "assumed", "why": "drawn from its interval"}
    if not system.released:
        value = sum(found.get(f"host_us.{one}", 0) for one in BUILT)
        why = f"{' and '.join(BUILT)} of {ENGINE}, as its caches"
        changed[f"devices.{machine.compute}.router_us"] = {"value": value, "source": "assumed", "why": why}
    return {**raw, "engine": system.costs_of, "hardware": {**written, **changed}}


def _drawn(key: str, low: float, high: float, draw: int) -> float:
    """Draw a number; the ratio of the ends has no logarithm where the least is 0."""
    part = Random(key).sample(range(COST_DRAWS), COST_DRAWS)[draw - 1]
    place = (part + Random(f"{key} {draw}").random()) / COST_DRAWS
    return low * (high / low) ** place if low > 0 else low + (high - low) * place


@dataclass(frozen=True)
class Contest:
    """The result of a setting among engines, or among rules."""

    best: str
    speed: float  # of the best: geometric mean over the draws of requests
    second: str  # the next; empty if nobody else ran
    margin: Mean | None  # speed of the best over that of the second; None without a second
    undone: tuple[str, ...]  # by `REQUESTS`, `COSTS`, `ROUTING` and `ALONE`; empty: it is certain


def near(speeds: Mapping[str, float], factor: float, most: int) -> list[str]:
    """List systems near the best, at least the two fastest.

    >>> near({"lru": 8.1, "dali": 10.0, "on-demand": 3.0, "static": 2.0}, NEAR, 3)
    ['dali', 'lru']
    """
    fastest = sorted(speeds, key=lambda name: -speeds[name])[:most]  # of equals the first
    return [name for place, name in enumerate(fastest) if place < 2 or speeds[name] * factor >= speeds[fastest[0]]]


Speeds = Mapping[str, float]  # by system


def decide(speeds: Mapping[str, Sequence[float]], costs: Sequence[Speeds] = (), routing: Sequence[Speeds] = ()) -> Contest:
    """Decide a setting by each system's speeds on the draws, at other costs and on other routing.

    Of equals the first is the best. The margin has its 95 % interval by Student's t over the draws' ratios, on the scale of their
    logarithms. The order is undone by requests where that holds 1, by costs or routing where anybody is as fast there.

    >>> found = decide({"lru": [8.0, 8.2], "dali": [10.0, 10.1]}, [{"lru": 8.0, "dali": 9.0}, {"lru": 8.0, "dali": 7.0}])
    >>> found.best, round(found.margin.value, 2), found.undone
    ('dali', 1.24, ('costs',))
    """
    means = {name: mean(values, LEVEL).value for name, values in speeds.items()}
    best, *others = sorted(means, key=lambda name: -means[name])
    if not others:
        return Contest(best, means[best], "", None, (ALONE,))
    margin = mean([a / b for a, b in zip(speeds[best], speeds[others[0]], strict=True)], LEVEL)
    undone = [REQUESTS] if margin.n < 2 or margin.value <= margin.factor else []
    for what, rows in ((COSTS, costs), (ROUTING, routing)):
        if any(row.get(best, 0.0) <= max((row.get(name, 0.0) for name in others), default=0.0) for row in rows):
            undone.append(what)
    return Contest(best, means[best], others[0], margin, tuple(undone))


@dataclass
class Meetings:
    """Runs of a league, each once, kept in a folder, so that a stopped league can go on."""

    place: str  # the experiment's file, for messages
    workers: Workers
    folder: Path | None = None  # where runs are kept; None: nowhere
    progress: bool = False
    bar: Progress | None = None  # counts steps of all runs, instead of one bar a call
    n_runs: int = 0  # that were asked for
    n_found: int = 0  # of those that had been run before
    errors: dict[str, str] = field(default_factory=dict)  # why a system did not run, by its label: the first reason
    _known: dict[tuple[str, str], Row | None] = field(default_factory=dict)
    traces: dict[str, Trace] = field(default_factory=dict)

    def rows(self, meetings: Sequence[tuple[str, Sequence[Mapping[str, Any]]]]) -> list[list[Row | None]]:
        """Return the rows of each experiment (JSON without policies); None if one cannot run."""
        keys = [[(raw, json.dumps(one)) for one in systems] for raw, systems in meetings]
        missing = {key: None for one in keys for key in one if key not in self._known}
        by_raw: dict[str, list[str]] = {}
        for raw, system in missing:
            by_raw.setdefault(raw, []).append(system)
        runs = [run for raw, systems in by_raw.items() for run in self._specs(raw, systems)]
        if runs:
            joined = Experiment.joined([(experiment, spec) for experiment, spec, _ in runs])
            done = run_experiment(
                joined, folder=self.folder, progress=self.progress, workers=self.workers, may_fail=True, bar=self.bar
            )
            self.n_runs += len(runs)
            self.n_found += done.n_found
            for (_, _, key), outcome in zip(runs, done.outcomes, strict=True):
                if outcome.failure is None:
                    self._known[key] = outcome.row
                else:
                    self.note(str(outcome.row["policy"]), outcome.failure)
        return [[self._known[key] for key in one] for one in keys]

    def _specs(self, raw: str, systems: Sequence[str]) -> list[tuple[Experiment, RunSpec, tuple[str, str]]]:
        """Resolve a meeting; who cannot run there is known at once."""
        self._known.update({(raw, system): None for system in systems})
        asked = json.loads(raw) | {"policies": [json.loads(system) for system in systems]}
        try:
            experiment = Experiment(parse_config(asked, self.place), self.place, known=self.traces)
        except MoesimError as error:
            for system in asked["policies"]:
                self.note(policy_label(system), error)
            return []
        return [(experiment, spec, (raw, json.dumps(dict(spec.point.policy)))) for spec in experiment.specs]

    def note(self, label: str, error: MoesimError) -> None:
        self.errors.setdefault(label, " ".join(str(error).split()))


PHASES: Final[dict[str, Callable[[Row], float]]] = {
    "decode": lambda row: float(row.get("decode_tokens_per_s") or 0),  # tokens a second of the whole batch
    "prompt": lambda row: NS_PER_S / float(row["ttft_mean_ns"]),  # type: ignore[arg-type]  # first tokens a second of a request
}


@dataclass(frozen=True)
class Cell:
    """A setting in one phase."""

    setting: Setting
    phase: str  # one of `PHASES`
    released: Contest | None = None  # None where nobody met or ran
    rules: Contest | None = None  # as if built in `ENGINE`
    first: Row | None = None  # of the best engine, on the first draw


class Rank(NamedTuple):
    """One system over the settings of a batch size, in the screen."""

    batch_size: int
    missed: int  # settings in which others of its kind ran, and not it
    # median, worst: decode speed of the fastest of its kind over its own
    median: float
    worst: float
    system: str
    settings: int  # in which anybody of its kind ran


def rank(met: Sequence[tuple[int, Mapping[str, float]]]) -> list[Rank]:
    """Sum up settings by batch size and system, least behind first; the incomplete come last.

    >>> [(one.system, one.median, one.missed) for one in rank([(1, {"a": 4.0, "b": 5.0}), (1, {"a": 6.0})])]
    [('a', 1.125, 0), ('b', 1.0, 1)]
    """
    found = []
    for batch in {size for size, _ in met}:
        mine = [speeds for size, speeds in met if size == batch and speeds]
        for system in {name for speeds in mine for name in speeds}:
            behind = [max(speeds.values()) / speeds[system] for speeds in mine if system in speeds]
            found.append(Rank(batch, len(mine) - len(behind), median(behind), max(behind), system, len(mine)))
    return sorted(found)


@dataclass(frozen=True)
class League:
    """Results of a league."""

    cells: Sequence[Cell]  # of all settings, both phases
    # released, rules: ranks in the screen
    released: Sequence[Rank]
    rules: Sequence[Rank]
    never: dict[str, str]  # systems that ran nowhere, and why
    n_runs: int
    n_found: int  # of these that had been run before


def record(cell: Cell) -> dict[str, Any]:
    """Return a cell as a row of a table, every number unrounded."""
    setting, row = cell.setting, cell.first or {}
    found: dict[str, Any] = {"model": setting.model, "hardware": setting.hardware, "batch_size": setting.batch}
    found |= {"phase": cell.phase, "unit": "tokens/s" if cell.phase == "decode" else "first tokens/s"}
    for kind, one in (("", cell.released), ("rule_", cell.rules)):
        margin = one.margin if one else None
        values: list[Any] = (
            [one.best, one.speed, one.second, not one.undone, "; ".join(one.undone)] if one else ["", None, "", None, ""]
        )
        values += [margin.value, margin.value / margin.factor, margin.value * margin.factor] if margin else [None] * 3
        names = "best", "speed", "second", "certain", "undone_by", "margin", "margin_low", "margin_high"
        found |= {f"{kind}{name}": value for name, value in zip(names, values, strict=True)}
    left_out = setting.left_out or ("" if cell.released or cell.rules else NOBODY)
    found["rule_over_best"] = found["rule_speed"] / found["speed"] if found["speed"] and found["rule_speed"] else None
    return found | {
        "draws": len(setting.draws), "cost_draws": COST_DRAWS, "routings": 1 + len(setting.ends), "left_out": left_out,
        "waited_for": waited(row, cell.phase) if row else "", "cached_share": row.get("cache_share"),
        "source_label": row.get("source_label"), "labels": ", ".join(split_notes(row)[0]) if row else "",
    }  # fmt: skip


def league(
    config: Config, place: str, *, folder: Path | None = None, jobs: int | None = None, progress: bool = False,
    begin: Callable[[], object] | None = None,
) -> League:  # fmt: skip
    """Run a league; an experiment's points that differ in trace or seed are draws of a setting."""
    systems, out = systems_of(config, place)
    settings = settings_of(config, place)
    open_ones = [one for one in settings if not one.left_out]
    if not open_ones or not systems:
        why = next((f"{one.model} on {one.hardware}: {one.left_out}" for one in settings), next(iter(out.items()), ""))
        raise ConfigError(f"{place}: expected a setting in which systems meet, got none: {why}")
    # Its runs are short, and this process is busy between them: one process more than cores keeps the cores at work.
    with Workers(jobs or usable_cores() + 1) as workers:
        held = _League(Meetings(place, workers, folder), place, open_ones, systems)
        held.check()
        if begin is not None:
            begin()
        with Progress(held.steps(), enabled=progress) as bar:
            cells = held.cells(bar)
    if not held.ran:
        why = next(iter(held.meetings.errors.values()), "nothing decoded")
        raise ConfigError(f"{place}: expected a system that runs in some setting, got none: {why}")
    errors = held.meetings.errors
    never = out | {one.label: f"ran in no setting: {errors[one.label]}" for one in systems if one.label not in held.ran}
    released, rules = (rank([(one.batch, held.speeds(one, "decode", kind)) for one in open_ones]) for kind in (True, False))
    cells += [Cell(one, phase) for one in settings if one.left_out for phase in PHASES]
    return League(cells, released, rules, never, held.meetings.n_runs, held.meetings.n_found)


Asked = tuple[Setting, Raw, int, int, System]
"""A run: with its decoded tokens and the draw of its costs."""
_ROUTING_STEPS: Final = 2500  # of a run, that take as long as to make routing


@dataclass
class _Heat:
    """Systems of a kind that meet in a phase of a setting."""

    setting: Setting
    phase: str
    systems: list[System]

    def asked(self) -> list[Asked]:
        """Return its runs: draws of requests, draws of costs, routing; of a prompt with one token more."""
        one = self.setting
        full, less = (one.at_most(n // one.batch) if self.phase == "decode" else 1 for n in TOKENS)
        where = [(raw, full, 0) for raw in one.draws] + [(one.draws[0], less, k + 1) for k in range(COST_DRAWS)]
        where += [(raw, less, 0) for raw in one.ends]
        return [(one, *run, system) for run in where for system in self.systems]

    def decided(self, rows: Sequence[Row | None]) -> tuple[Contest, Row] | None:
        """Decide by the rows of what was asked; also return the row of the best on the first draw."""
        n, of, n_draws = len(self.systems), PHASES[self.phase], len(self.setting.draws)
        at = [
            {one.label: of(row) for one, row in zip(self.systems, rows[i : i + n], strict=True) if row is not None}
            for i in range(0, len(rows), n)
        ]
        draws, costs = at[:n_draws], at[n_draws:]
        speeds = {one.label: [row[one.label] for row in draws] for one in self.systems if all(one.label in row for row in draws)}
        if not speeds:
            return None
        found = decide(speeds, costs[:COST_DRAWS], costs[COST_DRAWS:])
        row = rows[[one.label for one in self.systems].index(found.best)]
        return None if row is None else (found, row)


def _steps(asked: Iterable[Asked]) -> int:
    found = 0
    for setting, raw, tokens, _, _ in asked:
        rows = setting.batch * int(raw["workload"]["prompt_tokens"])
        found += ceil_div(rows, int(raw["workload"].get("prefill_chunk") or rows)) + tokens
    return found


class _League:
    def __init__(self, meetings: Meetings, place: str, settings: Sequence[Setting], systems: Sequence[System]) -> None:
        self.meetings, self._place = meetings, place
        self._settings, self._systems = settings, systems
        self._screened: dict[tuple[int, str], dict[str, float]] = {}  # of a setting and phase: speeds by label
        raws = (raw for setting in settings for raw in (*setting.draws, *setting.ends))
        self._routing = {json.dumps(raw["trace"], sort_keys=True, default=str): raw for raw in raws}

    def check(self) -> None:
        """Find all that is wrong before the first run: routing, and engines that do not run on a machine."""
        wrong: dict[str, None] = {}
        for raw in self._routing.values():
            try:
                if not isinstance(raw["trace"], Mapping):
                    read_inputs(raw, self._place, self.meetings.traces, progress=False)
            except MoesimError as error:
                wrong[str(error)] = None
        if wrong:
            raise ConfigError("; ".join(wrong))
        for system, setting in product(self._systems, self._settings):
            try:
                costed(setting.draws[0], system, 0, self._place)
            except MoesimError as error:
                self.meetings.note(system.label, error)

    @property
    def _first(self) -> list[Asked]:
        """Runs of the screen."""
        return [(one, one.draws[0], one.at_most(0), 0, system) for one in self._settings for system in self._systems]

    def steps(self) -> int:
        """Estimate the steps of the whole league; routing counts as steps, too."""
        some = list(self._systems[: sum(MOST.values())])
        self._later = sum(_steps(_Heat(*one, some).asked()) for one in product(self._settings, PHASES))
        return _ROUTING_STEPS * len(self._routing) + _steps(self._first) + self._later

    def speeds(self, setting: Setting, phase: str, released: bool) -> dict[str, float]:
        """Return the speeds of a kind in the screen."""
        mine = {one.label for one in self._systems if one.released == released}
        return {name: speed for name, speed in self._screened[id(setting), phase].items() if name in mine}

    @property
    def ran(self) -> set[str]:
        return {label for speeds in self._screened.values() for label in speeds}

    def _run(self, asked: Sequence[Asked]) -> list[Row | None]:
        meetings: list[tuple[str, list[Mapping[str, Any]]]] = []
        for setting, raw, tokens, draw, system in asked:
            try:
                written = costed(setting.of_length(raw, tokens), system, draw, self._place)
                meetings.append((json.dumps(written, sort_keys=True), [system.spec]))
            except MoesimError:  # noted before the first run
                meetings.append(("", []))
        return [rows[0] if rows else None for rows in self.meetings.rows(meetings)]

    def cells(self, bar: Progress) -> list[Cell]:
        """Make the routing, screen all systems, and let finalists meet."""
        self.meetings.bar = bar
        for raw in self._routing.values():
            bar.describe("making routing")
            read_inputs(raw, self._place, self.meetings.traces, progress=False)
            bar.advance(_ROUTING_STEPS)
        rows = iter(self._run(self._first))
        for setting in self._settings:
            mine = {system.label: row for system in self._systems if (row := next(rows)) is not None}
            for phase, speed in PHASES.items():
                self._screened[id(setting), phase] = {name: speed(row) for name, row in mine.items()}
        named = {one.label: one for one in self._systems}
        heats = [
            _Heat(setting, phase, [named[label] for label in near(self.speeds(setting, phase, released), NEAR, MOST[released])])
            for setting, phase, released in product(self._settings, PHASES, (True, False))
        ]
        asked = [run for heat in heats for run in heat.asked()]
        bar.leave_out(self._later - _steps(asked))
        rows = iter(self._run(asked))
        decided = iter([heat.decided([next(rows) for _ in heat.asked()]) if heat.systems else None for heat in heats])
        pairs = [(next(decided) or (None, None), next(decided) or (None, None)) for _ in heats[::2]]
        where = product(self._settings, PHASES)
        return [Cell(*one, best, rule, first) for one, ((best, first), (rule, _)) in zip(where, pairs, strict=True)]
