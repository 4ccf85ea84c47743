"""Simulated next to replayed, with a stand-in for the replay whose truth is known: causes, counts, measurements, files."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import typer

from moesim.api import machine
from moesim.cli import validate as command
from moesim.core.files import CHECK, checked_line
from moesim.core.files import FILE as LIST
from moesim.core.table import Format
from moesim.errors import CapacityError, ConfigError, SimulationError
from moesim.experiment.resolve import Experiment
from moesim.experiment.runner import Execution, run_one
from moesim.metrics.breakdown import breakdown
from moesim.metrics.machine import Machine
from moesim.policies.systems.all_cpu import AllCpu
from moesim.policies.systems.caches import FIFO
from moesim.policy import LayerEnd, Ran, Routed
from moesim.records import DecisionRecord, LayerRecord, Records, StepRecord, TaskRecord, TransferRecord
from moesim.studies.validation.facts import RESIDUALS, Facts, facts_of, residual, time_by_cause
from moesim.studies.validation.report import Compared, Report, errors_of, verdict
from moesim.studies.validation.run import FILE, Measurements, Watched, validate
from tests.experiment.experiment_kit import resolve, write_trace, write_yaml
from tests.studies.validation_kit import stand_in

MODEL = {"base": "mixtral-8x7b", "expert_bits": 4, "n_layers": 4}
KINDS = {"gpu0": "gpu", "cpu0": "cpu"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("validation")
    write_trace(path / "small.safetensors", n_layers=4)
    return path


def small(folder: Path, **changes: Any) -> Experiment:
    return resolve(folder, **{"model": MODEL, "policies": ["lru", "fiddler"]} | changes)


# --------------------------------------------------------------------------------------------------------- residual by cause
@pytest.mark.parametrize(
    ("policy", "factors", "cause"),
    [
        ("all-cpu", {"cpu0": 1.2}, "cpu_experts"),
        ("fiddler", {"cpu0": 0.8}, "cpu_experts"),
        ("lru", {"link": 1.1}, "exposed_demand"),
        ("lru", {"gpu0": 2.0, "link": 0.999}, "gpu_experts"),
        ("on-demand", {"dense": 3.0}, "dense"),
        ("dali", {"cpu0": 1.3}, "cpu_experts"),
    ],
)
def test_the_residual_points_at_the_cost_that_is_wrong(folder: Path, tmp_path: Path, policy: str, factors: Any, cause: str):
    experiment = small(folder, policies=[policy])
    (pair,) = validate(experiment, tmp_path, stand_in(**factors), repeats=1).pairs
    one = Compared(replace(pair, predicted=pair.undecided))  # the stand-in decides in no time
    parts = one.residual()
    whole = mean(one.typical.compared_steps) - mean(pair.undecided.compared_steps)
    assert max(parts, key=lambda name: abs(parts[name])) == cause
    assert sum(parts.values()) == pytest.approx(whole, abs=1e-3)
    assert parts[cause] == pytest.approx(whole, rel=0.35)
    slower = next(iter(factors.values())) > 1
    assert (whole > 0) == slower == (one.error("decode_step_ns") < 0)


def test_without_a_difference_there_is_no_residual_but_the_decisions(folder: Path, tmp_path: Path):
    (pair, _) = validate(small(folder), tmp_path, stand_in(), repeats=2).pairs
    assert pair.decision_ns > 0
    undecided = residual(pair.undecided, pair.measured[0])
    moved = undecided["dense"]  # the stand-in is a simulation: of a real replay the runtime's own time is a gap
    assert moved == 4 * 26_100  # four layers of router_us
    assert {cause: ns for cause, ns in undecided.items() if ns} == {"dense": moved, "gap": -moved}
    parts = residual(pair.predicted, pair.measured[0])
    assert parts["decision"] == -pair.decision_ns * len(pair.predicted.layer_ns)  # each layer of a step decides once
    assert sum(parts.values()) < 0


@pytest.mark.parametrize("policy", ["lru", "fiddler", "dali", "mixtral-offloading", "static"])
@pytest.mark.parametrize("decision_us", [0.0, 50.0])
def test_of_a_simulation_the_split_is_that_of_the_metrics(folder: Path, policy: str, decision_us: float):
    workload = {"prompt_tokens": 6, "decode_tokens": 3, "batch_size": 4}
    experiment = small(folder, policies=[policy], workload=workload, decision_us=decision_us)
    outcome = run_one(experiment, experiment.specs[0], keep=True)
    assert outcome.records is not None
    machine, steps = outcome.machine, {s.step for s in outcome.records.steps}
    exact = breakdown(outcome.records, machine.kinds, machine.media).select(steps)
    split = time_by_cause(outcome.records, machine, steps)
    assert {**split, "idle": split["waiting"] + split["gap"]} == {**exact, "waiting": split["waiting"], "gap": split["gap"]}


def layer_with_a_late_thread() -> Records:
    """Dense part; an expert waits for its copy, which a thread notices late; meanwhile the host ends an expert."""
    run = Records(makespan_ns=100)
    run.steps.append(StepRecord(0, 100, 0, "decode", 0, 1, 1, 1.0))
    run.layers.append(LayerRecord(0, 100, 0, 0))
    run.tasks.append(TaskRecord(2, 10, "gpu0", "main", "dense", 0, 0, 0, -1, 1, 8, 0, 0))
    run.decisions.append(DecisionRecord(11, 14, 0, 0))
    run.transfers.append(TransferRecord(15, 60, "cpu0->gpu0", "demand", 0, 7, 100, 0, 11, 0, True, False))
    run.tasks.append(TaskRecord(15, 62, "cpu0", "main", "expert", 0, 0, 0, 3, 1, 47, 11, 11))
    run.tasks.append(TaskRecord(65, 95, "gpu0", "main", "expert", 0, 0, 0, 7, 1, 30, 11, 61))
    return run


def test_late_threads_do_not_hide_what_was_waited_for():
    run = layer_with_a_late_thread()
    found = {cause: ns for cause, ns in time_by_cause(run, Machine(KINDS, ("cpu0->gpu0",)), {0}).items() if ns}
    # 2 to 10, 65 to 95, 15 to 60 and 11 to 14; nothing was busy in 0 to 2, 10 to 11, 14 to 15, 62 to 65 and 95 to 100
    assert found == {"dense": 8, "gpu_experts": 30, "exposed_demand": 45, "decision": 3, "gap": 12, "waiting": 2}
    # What ended last before the expert began was not what it needed, which the exact walk cannot know.
    assert breakdown(run, KINDS).total()["cpu_experts"] == 47


def test_a_transfer_that_waits_for_memory_is_charged_to_what_held_it():
    run = Records(makespan_ns=50)
    run.steps.append(StepRecord(0, 50, 0, "decode", 0, 1, 1, 1.0))
    run.layers.append(LayerRecord(0, 50, 0, 0))
    run.tasks.append(TaskRecord(0, 5, "gpu0", "main", "dense", 0, 0, 0, -1, 1, 5, 0, 0))
    run.tasks.append(TaskRecord(5, 20, "gpu0", "main", "expert", 0, 0, 0, 1, 1, 15, 5, 5))
    run.transfers.append(TransferRecord(21, 40, "cpu0->gpu0", "demand", 0, 2, 100, 0, 5, 0, True, True))
    run.tasks.append(TaskRecord(40, 50, "gpu0", "main", "expert", 0, 0, 0, 2, 1, 10, 5, 40))
    found = {cause: ns for cause, ns in time_by_cause(run, Machine(KINDS, ("cpu0->gpu0",)), {0}).items() if ns}
    assert found == {"dense": 5, "gpu_experts": 25, "exposed_demand": 19, "gap": 1}


# -------------------------------------------------------------------------------------------------------- what must be equal
@pytest.mark.long
def test_where_no_clock_decides_speeds_change_no_count(folder: Path, tmp_path: Path):
    policies = ["on-demand", "lru", "lfu", "fifo", "belady", "random", "static", "fiddler", "all-cpu", "dali"]
    workload = {"prompt_tokens": 6, "decode_tokens": 3, "batch_size": [1, 4]}
    experiment = small(folder, policies=policies, workload=workload, cache={"ratio": 0.75})
    for number, factors in enumerate(({"link": 0.002}, {"gpu0": 30.0}, {"link": 0.3, "cpu0": 4.0})):
        report = Report(validate(experiment, tmp_path / str(number), stand_in(**factors), repeats=1))
        assert report.problems == []
    must = {(one.policy, one.pair.settings["batch_size"]): one.must_be_equal for one in report.compared}
    always = ("on-demand", "lru", "static", "fiddler", "all-cpu")
    assert all(must[name, batch] for name in always for batch in (1, 4))
    by_rank = ("lfu", "fifo", "random", "belady")  # no clock while the cache holds all experts of a visit at once
    assert all(must[name, 1] and not must[name, 4] for name in by_rank)
    assert not must["dali", 1] and not must["dali", 4]


def test_counts_that_a_clock_may_change_do_change(folder: Path, tmp_path: Path):
    """Else the test above would hold whatever the rule said."""
    workload = {"prompt_tokens": 6, "decode_tokens": 4, "batch_size": 4}
    experiment = small(folder, policies=["lru", "random", "dali"], workload=workload, cache={"ratio": 0.75})
    report = Report(validate(experiment, tmp_path, stand_in(link=0.002), repeats=1))
    assert [one.policy for one in report.compared if one.unequal and not one.must_be_equal] == ["dali"]
    assert report.problems == []
    assert set(report.summary()["reported_only"]) == {one.pair.name for one in report.compared if one.unequal}


def test_a_difference_that_must_not_be_is_named(folder: Path, tmp_path: Path):
    experiment = small(folder, cache={"ratio": 0.5})
    report = Report(validate(experiment, tmp_path, stand_in(slots=0.5), repeats=1))
    assert len(report.problems) == 2
    assert report.problems[0].startswith("run 0 (lru, cache 0.5, batch 1): hits: simulated ")
    assert report.problems[0].endswith("these must be equal")


class Peeking:
    """LRU that looks at the clock and wants to know what has run."""

    exact = True
    listens = frozenset({Routed, LayerEnd, Ran})
    needs = frozenset()

    def place(self, view: Any) -> Any:
        self.other = AllCpu()
        return self.other.place(view)

    def decide(self, event: Any, view: Any) -> Any:
        if type(event) is Routed and view.now_ns >= 0:
            return self.other.decide(event, view)
        return ()

    def evict(self, fetch: Any, view: Any) -> None:
        return None


@pytest.mark.long
def test_a_look_at_the_clock_is_noticed(folder: Path, tmp_path: Path):
    experiment = small(folder, policies=[f"{__name__}:Peeking"])
    (pair,) = validate(experiment, tmp_path, stand_in(), repeats=1).pairs
    assert pair.clock == ["is told of Ran", "reads the clock"]
    assert Watched(Peeking()).reasons() == ["is told of Ran"]


class Listing(FIFO):  # type: ignore[misc, valid-type]
    """FIFO that names its victims as lists, which the engine takes."""

    def evict(self, fetch: Any, view: Any) -> Any:
        victim = super().evict(fetch, view)
        return None if victim is None else [*victim, None]


@pytest.mark.long
def test_a_victim_may_be_a_list_and_have_a_width(folder: Path, tmp_path: Path):
    workload = {"prompt_tokens": 6, "decode_tokens": 3, "batch_size": 4}
    experiment = small(folder, policies=["fifo", f"{__name__}:Listing"], workload=workload, cache={"ratio": 0.5})
    ours, theirs = validate(experiment, tmp_path, stand_in(), repeats=1).pairs
    assert theirs.clock == ours.clock == ["evicts what the layer has used by now"]


# -------------------------------------------------------------------------------------------------------------- measurements
class Counting:
    """A stand-in that counts its calls, and fails at one of them."""

    def __init__(self, fail_at: int = 0, error: Exception | None = None) -> None:
        self.inner, self.calls, self.fail_at, self.error = stand_in(), 0, fail_at, error

    def call(self, **given: Any) -> Records:
        self.calls += 1
        if self.calls == self.fail_at and self.error is not None:
            raise self.error
        return self.inner.call(**given)

    @property
    def execution(self) -> Execution:
        return Execution(self.call, True)


def test_a_stopped_validation_goes_on(folder: Path, tmp_path: Path):
    experiment, first, second, third = small(folder), Counting(4, KeyboardInterrupt()), Counting(), Counting()  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        validate(experiment, tmp_path, first.execution, repeats=3)
    path = tmp_path / FILE
    decided = [line for line in path.read_text().splitlines() if "decision_ns" in line]
    path.write_text(path.read_text() + '{"run":1,"repeat":2,"fac')  # the process was stopped in the middle of a line
    found = validate(experiment, tmp_path, second.execution, repeats=3)
    assert (first.calls, second.calls) == (4, 3)
    assert [len(pair.measured) for pair in found.pairs] == [3, 3]
    assert all(json.loads(line) for line in path.read_text().splitlines())
    assert [line for line in path.read_text().splitlines() if "decision_ns" in line] == decided
    validate(experiment, tmp_path, third.execution, repeats=3)
    assert third.calls == 0


def test_replays_are_interleaved_in_an_order_of_their_own(folder: Path, tmp_path: Path):
    experiment = small(folder, policies=["lru", "fiddler", "static", "on-demand"])
    validate(experiment, tmp_path, stand_in(), repeats=4)
    lines = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    replayed = [(line["repeat"], line["run"]) for line in lines if "repeat" in line]
    rounds = [[run for repeat, run in replayed if repeat == r] for r in range(4)]
    assert [repeat for repeat, _ in replayed] == sorted(repeat for repeat, _ in replayed)
    assert all(sorted(one) == [0, 1, 2, 3] for one in rounds)
    assert len({tuple(one) for one in rounds}) > 1


def test_measurements_of_something_else_are_not_gone_on_with(folder: Path, tmp_path: Path):
    validate(small(folder), tmp_path, stand_in(), repeats=1, how={"backend": "cpu"})
    before = (tmp_path / FILE).read_bytes()
    with pytest.raises(ConfigError, match=f"{FILE}: expected measurements of this experiment .key .*--no-resume"):
        validate(small(folder, cache={"ratio": 0.5}), tmp_path, stand_in(), repeats=1, how={"backend": "cpu"})
    with pytest.raises(ConfigError, match=r"how \{'backend': 'cuda'\}"):
        validate(small(folder), tmp_path, stand_in(), repeats=1, how={"backend": "cuda"})
    assert (tmp_path / FILE).read_bytes() == before
    found = validate(small(folder, cache={"ratio": 0.5}), tmp_path, stand_in(), repeats=1, resume=False)
    assert [len(pair.measured) for pair in found.pairs] == [1, 1]
    assert (tmp_path / FILE).read_bytes() != before


@pytest.mark.parametrize(
    ("content", "got"),
    [
        (None, "got: No such file or directory"),
        (b"\xff\n", "line 1: expected a measurement, got a damaged line"),
        (b"", "expected a header and measurements, got nothing"),
        (checked_line({}), "line 1: expected a measurement, got no 'header'"),
        (checked_line({"header": {}}) + b"nonsense\n", "line 2: expected a measurement, got a damaged line"),
        (checked_line({"header": {}}).replace(b"e", b"f", 1), "line 1: expected a measurement, got a damaged line"),
        (
            checked_line({"header": {}}) + checked_line({"run": 0, "repeat": 0, "facts": {"makespan_ns": 3}}),
            "line 2: expected a measurement, got facts",
        ),
    ],
)
def test_damaged_measurements_are_one_line(tmp_path: Path, content: bytes | None, got: str):
    if content is not None:
        (tmp_path / FILE).write_bytes(content)
    with pytest.raises(ConfigError, match=got) as caught:
        Measurements.read(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.long
def test_the_simulated_side_can_be_repeated_anywhere(folder: Path, tmp_path: Path):
    Report(validate(small(folder), tmp_path, stand_in(link=1.05), repeats=2)).write(tmp_path)
    names = ["results.csv", "residuals.csv", "layers.csv", "steps.csv", "tasks.csv", "summary.json", "scatter.png", "README.md"]
    before = {name: (tmp_path / name).read_bytes() for name in names}
    Report(validate(small(folder), tmp_path, None)).write(tmp_path)
    assert {name: (tmp_path / name).read_bytes() for name in names} == before
    with pytest.raises(
        ConfigError, match=r"run 0: expected measurements of .*cache_ratio=0.5.*give the experiment that was measured"
    ):
        validate(small(folder, cache={"ratio": 0.5}), tmp_path, None)


def test_what_has_changed_since_is_said(folder: Path, tmp_path: Path):
    found = validate(small(folder), tmp_path, stand_in(), repeats=1)
    assert found.changed() == []
    assert "changed since" not in Report(found).table(Format.TABLE)
    slower = {"base": "rtx3090-epyc7532", "devices.gpu0.launch_us": {"value": 500, "source": "assumed", "why": "a test"}}
    other = small(folder, hardware=slower)
    first, *rest = (tmp_path / FILE).read_bytes().splitlines(keepends=True)
    changed = first.replace(b'"sha256":"', b'"sha256":"0', 1)  # the model's
    header = {key: value for key, value in json.loads(changed).items() if key != CHECK}
    (tmp_path / FILE).write_bytes(b"".join([checked_line(header), *rest]))
    again = validate(small(folder), tmp_path, None)
    assert again.changed() == ["models mixtral-8x7b (n_layers=4, expert_bits=4)"]
    assert "something else: models mixtral-8x7b" in Report(again).table(Format.TABLE)
    with pytest.raises(ConfigError, match="give the experiment that was measured"):
        validate(other, tmp_path, None)


def test_a_real_replay(tmp_path: Path):
    """What it takes has no meaning at this size; what it does has."""
    pytest.importorskip("torch")
    from moesim.studies.replay import live_execution, live_machine
    from tests.live.live_kit import experiment

    tiny = experiment(tmp_path, policies=["lru", "static", "fiddler", "all-cpu", "dali"])
    with live_machine(tiny, "cpu", "200 MB", None) as machine:
        found = validate(tiny, tmp_path / "out", live_execution(machine), repeats=2)
    report = Report(found)
    assert report.problems == []
    assert sum(one.must_be_equal for one in report.compared) == 4
    for pair in found.pairs:
        for facts in pair.measured:
            assert sum(facts.cause_ns.values()) == sum(facts.durations("d"))
            assert facts.cause_ns["dense"] > 0 < facts.cause_ns["gap"]
            assert facts.decisions[0] == len(facts.phases) * 4


def test_failures_are_named_and_tried_again(folder: Path, tmp_path: Path):
    failing = Counting(2, SimulationError("a call failed"))
    found = validate(small(folder), tmp_path, failing.execution, repeats=2)
    (line,) = found.failures
    assert "replay 1: a call failed" in line
    assert sorted(len(pair.measured) for pair in found.pairs) == [1, 2]
    again = Counting()
    assert validate(small(folder), tmp_path, again.execution, repeats=2).failures == []
    assert again.calls == 1
    assert validate(small(folder, policies=["lru", "fiddler"]), tmp_path, None).failures == []


def test_what_cannot_be_simulated_is_not_replayed(folder: Path, tmp_path: Path):
    counting = Counting()
    with pytest.raises(CapacityError, match=r"small\.yaml"):
        validate(small(folder, policies=["lru"], cache={"budget": "1 GB"}), tmp_path, counting.execution)
    assert counting.calls == 0
    assert list(tmp_path.iterdir()) == []
    found = validate(small(folder, policies=["all-gpu", "lru"], model={**MODEL, "expert_intermediate": 200_000}), tmp_path,
                     counting.execution, repeats=1)  # fmt: skip
    assert counting.calls == len(found.pairs) == 1
    assert "run 0 (all-gpu" in found.failures[0]


def test_a_decision_time_of_the_experiment_is_refused(folder: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"decision_us: expected 0, .* got 5; leave it out"):
        validate(small(folder, decision_us=5.0), tmp_path, stand_in())


# ------------------------------------------------------------------------------------------------------------------- figures
def test_the_figures_of_a_run_and_of_the_machine(folder: Path, tmp_path: Path):
    factors = iter([1.0, 1.0, 1.1, 1.1, 1.2, 1.2])

    def call(**given: Any) -> Records:
        return stand_in(**dict.fromkeys(("link", "gpu0", "cpu0", "dense"), next(factors))).call(**given)

    found = validate(small(folder), tmp_path, Execution(call, True), repeats=3)
    one = Compared(found.pairs[0])
    measured = one.measured("makespan_ns")
    values = [facts.makespan_ns for facts in found.pairs[0].measured]
    assert measured is not None
    assert (measured.low, measured.value, measured.high) == tuple(sorted(values))
    assert measured.spread == pytest.approx((max(values) - min(values)) / measured.value)
    assert one.error("makespan_ns") == pytest.approx(found.pairs[0].predicted.makespan_ns / measured.value - 1)
    errors = errors_of([Compared(pair) for pair in found.pairs], "makespan_ns")
    assert errors is not None
    assert errors == errors_of([Compared(pair) for pair in found.pairs], "makespan_ns")
    assert errors.low <= errors.median <= errors.high <= errors.worst
    assert errors.spread == pytest.approx(0.18, abs=0.03)
    assert one.record()["layer_error"] == pytest.approx(0.09, abs=0.03)


@pytest.mark.parametrize(("median", "words"), [(0.05, "within the goal"), (0.07, "within 10 %"), (0.2, "misses .* and 10 %")])
def test_the_verdict(folder: Path, tmp_path: Path, median: float, words: str):
    errors = errors_of([Compared(pair) for pair in validate(small(folder), tmp_path, stand_in(), repeats=1).pairs])
    assert errors is not None
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(verdict(replace(errors, median=median)))


def test_what_is_kept_is_enough(folder: Path):
    experiment = small(folder)
    for spec in experiment.specs:
        outcome = run_one(experiment, spec, keep=True)
        assert outcome.records is not None
        facts = facts_of(outcome.records, outcome.machine)
        row = outcome.row
        assert facts.makespan_ns == row["makespan_ns"] == sum(facts.step_ns)
        assert facts.hits / facts.lookups == row["resident_rate"]
        assert facts.decode_hits / facts.decode_lookups == row["resident_rate_decode"]
        assert facts.n_bytes["demand"] == row["bytes_demand"]
        assert facts.n_bytes["total"] == row["bytes_total"]
        assert facts.overlap_share == row["overlap_share"]
        assert facts.busy_ns["gpu0.main"] / facts.makespan_ns == pytest.approx(row["utilisation.gpu0"])
        assert sum(facts.cause_ns.values()) == sum(facts.durations("d"))
        assert facts.phases == "pddd"
        assert sum(facts.layer_total_ns) == sum(r.end - r.begin for r in outcome.records.layers)
        assert (
            sum(n for name, (n, _) in facts.tasks.items() if name.startswith("expert")) == row["n_gpu_runs"] + row["n_cpu_runs"]
        )
        assert Facts(**json.loads(json.dumps(vars(facts)))) == facts


def report_of(folder: Path, out: Path) -> Report:
    workload = {"prompt_tokens": 6, "decode_tokens": 3, "batch_size": [1, 4]}
    experiment = small(folder, policies=["lru", "fiddler", "all-cpu"], workload=workload)
    return Report(validate(experiment, out, stand_in(link=1.1, cpu0=0.9), repeats=2))


def read(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


@pytest.mark.long
def test_files_and_table(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    report = report_of(folder, tmp_path / "out")
    written = {path.name for path in report.write(Path("out"))}
    assert written | {FILE, LIST} == {path.name for path in (tmp_path / "out").iterdir()}
    for row in read(tmp_path / "out" / "residuals.csv"):
        whole = sum(float(row[f"{cause}_ns"]) for cause in RESIDUALS)
        assert whole == pytest.approx(float(row["difference_ns"]), abs=1e-3)
    rows = read(tmp_path / "out" / "results.csv")
    assert [row["policy"] for row in rows] == ["lru", "fiddler", "all-cpu"] * 2
    assert all(row["must_be_equal"] == row["equal"] == "True" for row in rows)
    assert len(read(tmp_path / "out" / "layers.csv")) == 6 * 4
    readme = (tmp_path / "out" / "README.md").read_text()
    assert "moesim validate out/experiment.yaml --out out --only-compare" in readme
    assert str(tmp_path) not in readme
    table = report.table(Format.TABLE)
    assert "6 of 6 runs whose decisions depend on no clock" in table
    assert "exposed_demand +" in table
    assert "2 of 2 equal as they must" in table


# ------------------------------------------------------------------------------------------------------------------- command
@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    app = typer.Typer()
    app.command()(command.validate)
    monkeypatch.setattr(machine, "live_machine", lambda *_: nullcontext())
    monkeypatch.setattr(machine, "live_execution", lambda _: stand_in(link=1.2))
    return lambda *arguments: app(args=[str(a) for a in arguments], standalone_mode=False)


def test_the_command(folder: Path, tmp_path: Path, run: Callable[..., Any], capsys: pytest.CaptureFixture[str]):
    path = write_yaml(folder, model=MODEL)
    out = tmp_path / "out"
    assert run(path, "--out", out, "--repeats", 1) == 0  # however far the goal is missed
    assert "misses the goal of 5 %" in capsys.readouterr().out
    before = (out / "results.csv").read_bytes()
    (out / "results.csv").unlink()
    assert run(out / "experiment.yaml", "--out", out, "--only-compare", "-o", "csv") == 0
    assert (out / "results.csv").read_bytes() == before == capsys.readouterr().out.encode()


def test_the_command_fails_where_counts_differ(folder: Path, tmp_path: Path, run: Any, monkeypatch: Any, capsys: Any):
    monkeypatch.setattr(machine, "live_execution", lambda _: stand_in(slots=0.5))
    path = write_yaml(folder, model=MODEL, cache={"ratio": 0.5})
    assert run(path, "--out", tmp_path / "out", "--repeats", 1) == 1
    assert "moesim: run 1 (lru, cache 0.5, batch 1): hits: simulated" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{yaml}"], "expected out FOLDER, got nothing"),
        (["--out", "{tmp}/new"], "expected an experiment, got nothing; name a file, or compare with public=True"),
        (["{yaml}", "--out", "{tmp}/new", "--public"], "public=True: expected no "),
        (["--out", "{tmp}/new", "--public", "--repeats", "2"], "public=True: expected no repeats"),
        (["{yaml}", "--out", "{tmp}/new", "--only-compare", "--repeats", "2"], "only_compare=True: expected no repeats"),
        (["{yaml}", "--out", "{tmp}/new", "--only-compare"], "expected measurements, got: No such file"),
        (
            ["{yaml}", "--out", "{tmp}/other"],
            "expected a new folder or a result of `moesim validate`, got a folder with other files",
        ),
    ],
)
def test_wrong_use_of_the_command_is_one_line(folder: Path, tmp_path: Path, run: Any, arguments: list[str], message: str):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "precious").touch()
    path = write_yaml(folder, model=MODEL)
    with pytest.raises(ConfigError, match=message):
        run(*(text.format(yaml=path, tmp=tmp_path) for text in arguments))
    assert [one.name for one in tmp_path.iterdir()] == ["other"]
    assert [one.name for one in (tmp_path / "other").iterdir()] == ["precious"]
