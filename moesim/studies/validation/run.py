"""Simulate and replay the runs of an experiment, and keep the measurements."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from moesim.core.files import Journal, OutputFolder
from moesim.core.progress import Progress
from moesim.engine import EngineOptions, simulate
from moesim.errors import ConfigError, InputError, MoesimError, SimulationError
from moesim.experiment.folder import describe
from moesim.experiment.report import describe_run
from moesim.experiment.runner import SIMULATED, Execution, run_one
from moesim.metrics.outcome import Outcome
from moesim.policy import Action, Fetch, LayerBegin, LayerEnd, Placement, Policy, Routed, Run, StepBegin, StepEnd, Victim, View
from moesim.studies.bench import Clocked
from moesim.studies.validation.facts import Facts, apart, facts_of
from moesim.trace.workload.spec import SERVED

if TYPE_CHECKING:
    from moesim.experiment.resolve import Experiment
    from moesim.experiment.sweep import RunSpec
    from moesim.metrics import Value


ORDERED: Final = frozenset({StepBegin, LayerBegin, Routed, LayerEnd, StepEnd})
"""Events whose order the workload fixes; when any other comes, a clock says."""

Unit = tuple[int, int]
_NOT_YET: Final = 1 << 30


class Watched:
    """A policy observed for anything that could make its decisions depend on a clock."""

    # That is: an event whose order a clock decides; a look at the time, or at a copy on its way; and a
    # victim that another moment would have changed: before it others were passed over as in use, or the
    # present layer has just used it, unless all else idle in its pool was to be used later. A pool that
    # is empty whenever a layer begins does not matter: all of it goes.

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.exact = policy.exact
        self.listens = policy.listens
        self.needs = policy.needs
        self._view = _WatchedView()
        self._found = {f"is told of {event.__name__}" for event in policy.listens - ORDERED}
        self._pools: dict[tuple[str, str], str] = {}  # what was found in each pool
        self._empty: set[tuple[str, str]] = set()  # pools that have been empty at every layer so far
        self._visit = (-1, -1)
        self._order: dict[Unit, int] = {}  # active experts of the visit by their place in the Runs; before those, a high number
        self._per_layer: dict[tuple[str, str], bool] = {}

    def reasons(self) -> list[str]:
        """Return why decisions may depend on a clock; empty if they do not."""
        lasting = {words for pool, words in self._pools.items() if pool not in self._empty}
        return sorted(self._found | lasting)

    def place(self, view: View) -> Placement:
        placement = self._policy.place(self._view.of(view))
        self._per_layer = {(pool.device, pool.name): pool.per_layer for pool in placement.pools}
        self._empty = set(self._per_layer)
        self._view.seen.clear()
        return placement

    def decide(self, event: Any, view: View) -> Iterable[Action]:
        if type(event) is Routed:
            self._begin(event, view)
        answer = tuple(self._policy.decide(event, self._view.of(view)))
        self._found |= self._view.seen
        self._view.seen.clear()
        for action in answer:
            if type(action) is Run and len(action.experts) and (action.layer, action.experts[0]) in self._order:
                first = sum(place != _NOT_YET for place in self._order.values())
                self._order |= {(action.layer, expert): first + i for i, expert in enumerate(action.experts)}
        return answer

    def _begin(self, event: Routed, view: View) -> None:
        if (event.step, event.layer) != self._visit:
            self._visit = (event.step, event.layer)
            self._order = {}
            self._empty -= {pool for pool in self._empty if view.residents(*pool)}
        self._order |= {(event.layer, expert): _NOT_YET for expert in event.active}

    def evict(self, fetch: Fetch, view: View) -> Victim | None:
        victim = self._policy.evict(fetch, self._view.of(view))
        in_use = self._view.seen & {_WatchedView.PINNED}
        self._found |= self._view.seen - in_use
        self._view.seen.clear()
        if victim is not None:
            unit = victim[0], victim[1]  # any sequence, perhaps with bits
            if in_use:
                self._pools[fetch.device, fetch.pool] = "passes over victims that are in use"
            elif unit in self._order and not self._is_first(unit, fetch, view):
                self._pools[fetch.device, fetch.pool] = "evicts what the layer has used by now"
        return victim

    def _is_first(self, victim: Unit, fetch: Fetch, view: View) -> bool:
        """Whether all else idle in the pool was to be used after the victim, in this visit."""
        layer = fetch.layer if self._per_layer[fetch.device, fetch.pool] else None
        held: list[Any] = view.residents(fetch.device, fetch.pool, layer)
        units: list[Unit] = [unit if layer is None else (layer, unit) for unit in held]
        idle = [(at, expert) for at, expert in units if not view.is_in_use(at, expert, fetch.device)]
        return all(self._order.get(unit, -1) >= self._order[victim] for unit in idle)


class _WatchedView:
    PINNED: Final = "asks whether a copy is in use"

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self._view: Any = None

    def of(self, view: Any) -> Any:
        self._view = view
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)

    @property
    def now_ns(self) -> int:
        self.seen.add("reads the clock")
        return int(self._view.now_ns)

    def remaining_ns(self, layer: int, expert: int, device: str) -> int:
        left = int(self._view.remaining_ns(layer, expert, device))
        if left:
            self.seen.add("asks when a copy arrives")
        return left

    def is_pending(self, layer: int, expert: int, device: str) -> bool:
        pending = bool(self._view.is_pending(layer, expert, device))
        if pending:
            self.seen.add("asks whether a copy is on its way")
        return pending

    def is_in_use(self, layer: int, expert: int, device: str) -> bool:
        pinned = bool(self._view.is_in_use(layer, expert, device))
        if pinned:
            self.seen.add(self.PINNED)
        return pinned


FILE: Final = "measurements.jsonl"
OWNER: Final = "validate"
_MUST_MATCH: Final = ("key", "how")


class Measurements:
    """Measurements in a folder: a line of what was measured, then one a decision time or replay."""

    def __init__(self, folder: Path, header: Mapping[str, Any]) -> None:
        self._journal = Journal(OutputFolder(folder, OWNER), FILE, durable=True)
        self.path = self._journal.path
        self.header = dict(header)
        self.decision_ns: dict[int, int] = {}  # median time of a decision, by run
        self.replays: dict[tuple[int, int], Facts] = {}  # by run and repeat
        self._lines: list[dict[str, Any]] = []
        self._begun = False  # whether the file holds the header and these lines

    @classmethod
    def resume(cls, folder: Path, header: Mapping[str, Any]) -> Measurements:
        if not (folder / FILE).exists():
            return cls(folder, header)
        found = cls.read(folder)
        for name in _MUST_MATCH:
            if found.header.get(name) != header[name]:
                raise ConfigError(
                    f"{found.path}: expected measurements of this experiment ({name} {header[name]}), got others "
                    f"({found.header.get(name)}); choose another --out, or measure anew with --no-resume"
                )
        return found

    @classmethod
    def read(cls, folder: Path) -> Measurements:
        path = folder / FILE
        try:
            lines = Journal(OutputFolder(folder, OWNER), FILE).read()
        except OSError as error:
            raise ConfigError(f"{path}: expected measurements, got: {error.strerror}; measure without --only-compare") from None
        found: Measurements | None = None
        for number, content in enumerate(lines, start=1):
            try:
                if content is None:
                    raise ValueError("a damaged line")
                if found is None:
                    found = cls(folder, content["header"])
                    found._begun = True
                else:
                    found._take(content)
            except (ValueError, KeyError, TypeError) as error:
                got = f"no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
                raise ConfigError(f"{path}: line {number}: expected a measurement, got {got}; remove it") from None
        if found is None:
            raise ConfigError(f"{path}: expected a header and measurements, got nothing; measure anew with --no-resume")
        return found

    def add_decisions(self, run: int, label: str, digest: str, took_ns: list[int]) -> None:
        ordered = sorted(took_ns) or [0]
        at = [ordered[round(share * (len(ordered) - 1))] for share in (0.1, 0.5, 0.9)]
        self._append(
            {"run": run, "label": label, "digest": digest, "decision_ns": at[1], "decision_p10_p90_ns": [at[0], at[2]],
             "n_decisions": len(took_ns)}
        )  # fmt: skip

    def add_replay(self, run: int, repeat: int, facts: Facts) -> None:
        self._append({"run": run, "repeat": repeat, "facts": asdict(facts)})

    def label(self, run: int) -> tuple[str, str]:
        return next(((line["label"], line["digest"]) for line in self._lines if line.get("run") == run), ("", ""))

    def of_run(self, run: int) -> list[Facts]:
        return [facts for (index, _), facts in sorted(self.replays.items(), key=lambda item: item[0]) if index == run]

    def _take(self, line: dict[str, Any]) -> None:
        run = int(line["run"])
        if "repeat" in line:
            known = {f.name for f in fields(Facts)}
            if set(line["facts"]) != known:
                raise ValueError(f"facts {', '.join(sorted(set(line['facts']) ^ known))}")
            self.replays[run, int(line["repeat"])] = Facts(**line["facts"])
        else:
            _ = (line["label"], line["digest"])
            self.decision_ns[run] = int(line["decision_ns"])
        self._lines.append(line)

    def _append(self, line: dict[str, Any]) -> None:
        self._take(line)
        if not self._begun:
            self._journal.begin({"header": self.header})
            self._begun = True
        self._journal.append(line)


REPEATS = 3


@dataclass(frozen=True)
class Pair:
    """Both sides of one run."""

    settings: Mapping[str, Value]  # what the run is, as in the rows of a result
    label: str  # the weakest source of the simulation's numbers
    decision_ns: int  # median time in which its policy answered a Routed event
    # predicted, undecided: simulated with that time charged to each decision, and without
    predicted: Facts
    undecided: Facts
    clock: list[str]  # why the policy's decisions may depend on when things end; empty if they do not
    measured: list[Facts]  # the replays

    @property
    def name(self) -> str:
        return describe_run(self.settings)


@dataclass(frozen=True)
class Validation:
    """An experiment on both sides."""

    experiment: Experiment  # what was run
    header: Mapping[str, Any]  # what was said of the measurements when they were taken
    pairs: list[Pair]  # of the runs that were carried out on both sides
    failures: list[str] = field(default_factory=list)  # a line for each run that failed on either

    def changed(self) -> list[str]:
        """Name the inputs that changed since the measurements: predictions are of another machine."""
        now, then = self.experiment.inputs(), self.header.get("inputs", {})
        return [
            f"{kind} {name}" for kind, found in now.items() for name, one in found.items()
            if kind in then and then[kind].get(name, {}).get("sha256") != one["sha256"]
        ]  # fmt: skip


def validate(
    experiment: Experiment,
    folder: Path,
    execution: Execution | None,
    *,
    repeats: int = REPEATS,
    resume: bool = True,
    how: Mapping[str, Any] | None = None,
    seed: int = 0,
    progress: bool = False,
) -> Validation:
    """Simulate every run, replay it several times, and return both sides.

    The replays are interleaved: every run once, in shuffled order (`seed`), then all again, so that what changes on the machine
    in the meantime falls on all of them. Measurements are kept in the folder as they are taken, with `how`; with
    `resume` those that are there are not taken again. Without an `execution` simulations are compared with those in the folder.
    """
    for spec in experiment.specs:
        if spec.point.decision_us:
            raise ConfigError(
                f"{experiment.place}: decision_us: expected 0, since a validation measures how long decisions take, got "
                f"{spec.point.decision_us:g}; leave it out"
            )
    if execution is None:
        kept = Measurements.read(folder)
        _check_same(experiment, kept)
    else:
        header = {"key": describe(experiment)["key"], "how": dict(how or {}), **_about(experiment)}
        kept = (Measurements.resume if resume else Measurements)(folder, header)
    simulator = _Simulator(experiment, kept)
    n_replays = 0 if execution is None else repeats
    n_steps = {spec.index: len(experiment.workload(spec).steps) for spec in experiment.specs}
    with Progress((3 + n_replays) * sum(n_steps.values()), enabled=progress) as bar:
        for spec in experiment.specs:
            bar.describe(f"simulating {spec.policy_name}")
            simulator.add(spec, measure=execution is not None)
            bar.advance(3 * n_steps[spec.index])
        simulator.check()
        failed: dict[int, str] = {}
        for repeat in range(n_replays):
            assert execution is not None
            order = [spec for spec in experiment.specs if spec.index not in simulator.failed]
            random.Random(seed + repeat).shuffle(order)
            for spec in order:
                bar.describe(f"replaying {spec.policy_name}, {repeat + 1} of {repeats}")
                if (spec.index, repeat) not in kept.replays:
                    outcome = run_one(experiment, spec, keep=True, execution=execution)
                    if outcome.records is None:
                        failed[spec.index] = f"{describe_run(outcome.row)}: replay {repeat + 1}: {outcome.failure}"
                    else:
                        kept.add_replay(spec.index, repeat, facts_of(outcome.records, outcome.machine))
                bar.advance(n_steps[spec.index])
    pairs = [replace(pair, measured=measured) for index, pair in simulator.pairs.items() if (measured := kept.of_run(index))]
    lacking = [f"{pair.name}: no replay was kept" for index, pair in simulator.pairs.items() if not kept.of_run(index)]
    failures = [*simulator.failed.values(), *(failed.values() if execution is not None else lacking)]
    return Validation(experiment, kept.header, pairs, failures)


def _about(experiment: Experiment) -> dict[str, Any]:
    told = describe(experiment)
    machines = {spec.hardware.name: dict(spec.hardware.machine) for spec in experiment.specs}
    date = time.strftime("%Y-%m-%d", time.gmtime())
    return {"date": date, "moesim": told["moesim"], "machine": machines, "inputs": told["inputs"], "versions": told["versions"]}


# Nothing that depends on a machine, or that no replay has.
_NOT_MEASURED = (
    "run", "decision_ns", "extrapolate", "engine_profile", "repeat", "warm_up", "arrivals", "closed", "kv", *SERVED
)  # fmt: skip


def _check_same(experiment: Experiment, kept: Measurements) -> None:
    """Compare measurements only with the runs that they were taken of."""
    for spec in experiment.specs:
        wanted = (_label(spec), experiment.workload(spec).digest)
        if spec.index in kept.decision_ns and kept.label(spec.index) != wanted:
            raise ConfigError(
                f"{kept.path}: run {spec.index}: expected measurements of {wanted[0]} (workload {wanted[1][:12]}), got those of "
                f"{kept.label(spec.index)[0]} ({kept.label(spec.index)[1][:12]}); give the experiment that was measured"
            )


def _label(spec: RunSpec) -> str:
    return " ".join(f"{key}={value}" for key, value in spec.row().items() if key not in _NOT_MEASURED)


class _Simulator:
    """Simulates runs: for the time of decisions, with it, and without."""

    def __init__(self, experiment: Experiment, kept: Measurements) -> None:
        self._experiment = experiment
        self._kept = kept
        self.pairs: dict[int, Pair] = {}
        self.failed: dict[int, str] = {}
        self._errors: list[MoesimError] = []

    def add(self, spec: RunSpec, *, measure: bool) -> None:
        try:
            if measure and spec.index not in self._kept.decision_ns:
                _, timed = self._simulate(spec, Clocked, 0)
                digest = self._experiment.workload(spec).digest
                self._kept.add_decisions(spec.index, _label(spec), digest, timed.routed_ns)
            decision_ns = self._kept.decision_ns.get(spec.index)
            if decision_ns is None:
                raise SimulationError(f"no decision time was measured (see {FILE})")
            undecided, at_once = self._simulate(spec, Watched, 0)
            predicted, watched = self._simulate(spec, Watched, decision_ns)
        except MoesimError as error:
            self._errors.append(error)
            self.failed[spec.index] = f"{describe_run(spec.row())}: {error}"
            return
        clock = set(at_once.reasons()) | set(watched.reasons())
        if set(predicted[1].transfers) - {"demand", "activation"}:
            clock.add("moves weights that no layer waits for")
        label = str(predicted[0].row["source_label"])
        facts = (predicted[1], undecided[1])
        self.pairs[spec.index] = Pair(spec.row(), label, decision_ns, *facts, sorted(clock), [])

    def check(self) -> None:
        """Raise the first error if every run failed with wrong input: nothing was measured then."""
        if not self.pairs and all(isinstance(error, InputError) for error in self._errors):
            raise type(self._errors[0])(f"{self._experiment.place}: {self._errors[0]}")

    def _simulate(self, spec: RunSpec, observer: Callable[[Any], Any], decision_ns: int) -> tuple[tuple[Outcome, Facts], Any]:
        seen: list[Any] = []

        def call(**arguments: Any) -> Any:
            seen.append(observer(arguments["policy"]))
            options = EngineOptions(decision_ns=decision_ns)
            return simulate(**{**arguments, "policy": seen[0], "options": options})

        outcome = run_one(self._experiment, spec, keep=True, execution=replace(SIMULATED, call=call))
        if outcome.failure is not None:
            raise outcome.failure
        assert outcome.records is not None
        return (outcome, apart(facts_of(outcome.records, outcome.machine), spec.hardware)), seen[0]
