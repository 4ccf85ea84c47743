"""Simulate and replay the runs of an experiment, and keep what came of them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesim.core.progress import Progress
from moesim.engine import EngineOptions, simulate
from moesim.errors import ConfigError, InputError, MoesimError, SimulationError
from moesim.experiment.folder import describe
from moesim.experiment.rows import describe_run
from moesim.experiment.runner import SIMULATED, Execution, run_one
from moesim.metrics.outcome import Outcome
from moesim.studies.bench import Clocked
from moesim.studies.validation.facts import Facts, facts_of
from moesim.studies.validation.residual import apart
from moesim.studies.validation.store import FILE, Measurements
from moesim.studies.validation.watch import Watched

if TYPE_CHECKING:
    from moesim.experiment.resolve import Experiment
    from moesim.experiment.spec import RunSpec
    from moesim.metrics import Value

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
        """Run, policy, cache and batch in words."""
        return describe_run(self.settings)


@dataclass(frozen=True)
class Validation:
    """An experiment on both sides.

    Attributes
    ----------
    experiment : Experiment
        What was run.
    header : mapping
        What was said of the measurements when they were taken.
    pairs : list of Pair
        Of the runs that were carried out on both sides.
    failures : list of str
        A line for each run that failed on either.
    """

    experiment: Experiment
    header: Mapping[str, Any]
    pairs: list[Pair]
    failures: list[str] = field(default_factory=list)

    def changed(self) -> list[str]:
        """Name the inputs that are no longer those of the measurements: predictions then are another machine's or model's."""
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
    """Simulate every run, replay it several times, and give both sides.

    The replays are interleaved: every run once, in shuffled order, then all again, so that what changes on the machine in the
    meantime falls on all of them.

    Parameters
    ----------
    experiment : Experiment
        Resolved. Its decision time must be 0: it is measured here.
    folder : Path
        Where measurements are kept as they are taken; those that are there are not taken again.
    execution : Execution or None
        How a replay is done. None: not at all; the simulations are compared with the measurements in the folder.
    repeats : int
        Replays of each run.
    resume : bool
        Go on with the measurements in the folder; else begin anew.
    how : mapping, optional
        What to keep with the measurements about the way they were taken; JSON. Those of another way are not gone on with.
    seed : int
        Of the order of the replays.
    progress : bool
        Show a bar on the terminal.

    Returns
    -------
    Validation

    Raises
    ------
    ConfigError
        If the experiment sets a decision time, or the measurements in the folder are of something else.
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
    """Say what was measured, for readers; a resumed measurement keeps what its beginning said."""
    told = describe(experiment)
    machines = {spec.hardware.name: dict(spec.hardware.machine) for spec in experiment.specs}
    date = time.strftime("%Y-%m-%d", time.gmtime())
    return {"date": date, "moesim": told["moesim"], "machine": machines, "inputs": told["inputs"], "versions": told["versions"]}


_NOT_MEASURED = ("run", "decision_ns", "extrapolate", "repeat", "warm_up")  # nothing that a machine could tell


def _check_same(experiment: Experiment, kept: Measurements) -> None:
    """Measurements are compared with the runs that they were taken of, whatever the simulator has become since."""
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
        """Simulate one run."""
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
        """Raise the first error if every run failed with wrong input: nothing has been measured then."""
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
