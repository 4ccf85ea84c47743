"""Regret of policies; what looking ahead is worth; two runs side by side."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from moesim.api.caches import layers_table
from moesim.cli.diff import diff as command
from moesim.cli.regret import regret
from moesim.cli.trace_lookahead import trace_lookahead
from moesim.core.record_table import RecordTable
from moesim.core.table import Format
from moesim.errors import ConfigError
from moesim.experiment import run_experiment
from moesim.experiment.config import parse_config
from moesim.experiment.folder import Output
from moesim.experiment.resolve import Experiment
from moesim.experiment.routing import read_trace
from moesim.experiment.runner import run_one
from moesim.experiment.workers import Workers
from moesim.hardware.costs import CostModel
from moesim.metrics.breakdown import CAUSES, Breakdown, Window
from moesim.metrics.outcome import Outcome
from moesim.plots.studies import lookahead
from moesim.policies.registry import POLICIES, make_part, make_policy
from moesim.records import Records, StepRecord
from moesim.studies.diff import OUTSIDE, PHASES, Diff, find_run, most_different, text_of
from moesim.studies.lookahead import Line, look_ahead, records, relation, see_layers
from moesim.studies.regret import DECISIONS, ORDERS, Regret, derive, instant_links, regrets, replaceable
from moesim.studies.regret import table as regret_table
from moesim.testing.traces import synthetic_trace
from tests.experiment.experiment_kit import resolve, small, write_trace, write_yaml


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Regret]:
    folder = tmp_path_factory.mktemp("regret")
    policies = ["lru", "dali", "on-demand", {"name": "random", "seed": 3}]
    return regrets(resolve(folder, policies=policies, workload={"batch_size": 4, "prompt_tokens": 6, "decode_tokens": 2}))


def test_what_can_be_replaced(tmp_path: Path):
    policies = ["lru", "dali", "on-demand", "static", {"name": "dali", "prefetch_size": 0}]
    specs = resolve(tmp_path, policies=policies).specs
    lists = [replaceable(spec) for spec in specs]
    assert lists[0] == ("replacement", "assignment", "bandwidth")
    assert lists[1] == DECISIONS
    assert lists[2] == ("bandwidth",)
    assert lists[3] == ("assignment", "bandwidth")
    assert "prediction" not in lists[4]


def test_every_oracle_of_the_registry_can_be_built(tmp_path: Path):
    """What a policy names in `oracles` are options that it, or the policy named there, takes."""
    (spec,) = resolve(tmp_path, policies=["lru"]).specs
    for name in POLICIES:
        of_name = replace(spec, point=replace(spec.point, policy={"name": name}))
        both = frozenset(replaceable(of_name)) & {"replacement", "assignment"}
        for chosen in (both, *(frozenset({one}) for one in both)):
            make_policy(derive(of_name, chosen).point.policy)


def test_oracles_change_options_predictors_and_links_and_nothing_else(tmp_path: Path):
    experiment = resolve(tmp_path, policies=["dali", {"name": "random", "seed": 3}], predictors={"residual": "synthetic:0.5"})
    dali, by_chance = experiment.specs
    changed = derive(dali, frozenset({"prediction", "assignment"}))
    assert changed.point.predictors == {"*": "oracle"}
    assert changed.point.policy["assignment"] == "exact"
    assert changed.hardware is dali.hardware
    assert changed.policy_name == dali.policy_name
    assert experiment.workload(changed) is experiment.workload(dali)
    assert derive(by_chance, frozenset({"replacement"})).point.policy == {"name": "belady"}  # which takes no seed
    assert derive(dali, frozenset()) == dali


def test_links_without_time_move_weights_in_a_nanosecond_and_activations_as_before(tmp_path: Path):
    (spec,) = resolve(tmp_path, policies=["lru"]).specs
    before, after = spec.hardware, instant_links(spec.hardware)
    for link, other in zip(before.links, after.links, strict=True):
        costs = [CostModel(spec.model, machine, transfer=next(iter(link.curves))) for machine in (before, after)]
        assert costs[1].transfer_ns(other, spec.model.expert_bytes(0)) == 1 < costs[0].transfer_ns(link, 1)
        assert costs[0].activation_ns(link, 3) == costs[1].activation_ns(other, 3)


def test_both_orders_begin_and_end_at_the_same_makespan(found: list[Regret]):
    for one in found:
        for order in ("forward", "reversed"):
            steps = [step for step in one.steps if step.order == order and step.replaced]
            names = [step.decision for step in steps]
            assert names == sorted(names, key=DECISIONS.index, reverse=order == "reversed")
            assert steps[0].before_ns == one.row["makespan_ns"]
            assert steps[-1].after_ns == one.all_replaced_ns
            assert all(a.after_ns == b.before_ns for a, b in pairwise(steps))
        assert sum(s.saved_ns or 0 for s in one.steps if s.order == "forward") == sum(
            s.saved_ns or 0 for s in one.steps if s.order == "reversed"
        )


def test_a_step_is_the_run_that_it_says(found: list[Regret], tmp_path: Path):
    """DALI with a perfect prediction and the exact assignment, run through the experiment file instead."""
    workload = {"batch_size": 4, "prompt_tokens": 6, "decode_tokens": 2}
    policies = [{"name": "dali", "assignment": "exact"}]
    (one,) = resolve(tmp_path, policies=policies, workload=workload).specs
    experiment = resolve(tmp_path, policies=[*policies, "dali"], workload=workload)
    assert run_one(experiment, experiment.specs[0]).row["makespan_ns"] == found[1].alone("assignment").after_ns
    told = replace(one, point=replace(one.point, predictors={"*": "oracle"}, policy={"name": "dali"}))
    assert run_one(experiment, told).row["makespan_ns"] == found[1].alone("prediction").after_ns


def test_a_prediction_that_is_replaced_is_still_paid_for(tmp_path: Path):
    experiment = resolve(tmp_path, policies=["dali"])
    spec = experiment.specs[0]
    paid = []
    for one in (spec, derive(spec, frozenset({"prediction"}))):
        records = run_one(experiment, one, keep=True).records
        assert records is not None
        paid.append([task.work for task in records.tasks if task.kind == "predict"])
    assert paid[0] == paid[1]
    assert sum(paid[0]) > 0


def test_what_a_policy_does_not_decide_is_never_told_as_zero(found: list[Regret]):
    lru = found[0]
    assert not lru.alone("prediction").replaced
    assert lru.alone("prediction").saved_ns is None
    lines = regret_table(found, Format.MD).splitlines()
    first = next(line for line in lines if line.startswith("| lru | forward"))
    assert first.split(" | ")[3] == "-"
    records = json.loads(regret_table(found, Format.JSON))
    assert len(records) == len(found) * len(ORDERS) * len(DECISIONS)
    row = next(r for r in records if (r["policy"], r["order"], r["decision"]) == ("lru", "forward", "prediction"))
    assert (row["replaced"], row["after_ns"], row["saved_ns"]) == (False, None, None)
    assert {r["source_label"] for r in records} == {"oracle"}


def test_bounds_stand_beside(found: list[Regret]):
    for one in found:
        makespan = one.row["makespan_ns"]
        assert one.bounds is not None
        assert isinstance(makespan, int)
        assert 0 < one.bounds.makespan_ns <= makespan
        assert one.all_replaced_ns is not None
        assert one.bounds.without_link_time_ns <= one.all_replaced_ns
        for step in (step for step in one.steps if step.replaced):  # each against the bound of the machine that it is on
            assert step.after_ns is not None
            bound = one.bounds.without_link_time_ns if step.instant_links else one.bounds.makespan_ns
            assert step.after_ns >= bound
    assert found[0].best_hit_rate is not None
    assert float(found[0].row["hit_rate"] or 0) <= found[0].best_hit_rate
    assert found[0].best_hit_rate == found[1].best_hit_rate  # the same slots


def test_what_runs_on_links_without_time_is_told_as_another_machine(found: list[Regret]):
    lru = found[0]
    assert lru.bounds is not None
    records = {(r["order"], r["decision"]): r for r in lru.records()}
    assert records["forward", "prediction"]["links"] is None  # LRU has none
    assert records["forward", "replacement"]["links"] == records["alone", "assignment"]["links"] == "as they are"
    assert {r["links"] for (order, _), r in records.items() if order == "reversed"} == {None, "without time"}
    assert records["forward", "bandwidth"]["links"] == records["alone", "bandwidth"]["links"] == "without time"
    for record in records.values():
        assert record["all_replaced_links"] == "without time"
        assert record["lower_bound_ns"] == lru.bounds.makespan_ns
        assert record["lower_bound_instant_links_ns"] == lru.bounds.compute_ns < record["lower_bound_ns"]
    lines = [line.strip("| ").split(" | ") for line in regret_table(found, Format.MD).splitlines()]
    forward, backward, alone = (cells for cells in lines if cells[0] == "lru")
    assert ["ms*" in cell or " s*" in cell for cell in forward[2:9]] == [False, False, False, False, True, True, False]
    assert ["ms*" in cell or " s*" in cell for cell in backward[2:9]] == [False, False, True, True, True, True, False]
    assert forward[8] == alone[8] != alone[9]
    assert sum("another machine, whose links take no time" in line[0] for line in lines) == 1


def test_a_policy_that_is_not_exact_has_no_bound(tmp_path: Path):
    names = [name for name in POLICIES if not make_policy(name).exact]
    if not names:
        pytest.skip("all policies are exact")
    (one,) = regrets(resolve(tmp_path, policies=names[:1], workload={"prompt_tokens": 6, "decode_tokens": 2}))
    assert one.bounds is None
    assert one.row["fidelity_fresh"] is not None


def test_a_slower_run_with_an_oracle_is_told_as_such(found: list[Regret]):
    lru = found[0]
    makespan = lru.row["makespan_ns"]
    assert isinstance(makespan, int)
    worse = tuple(
        replace(step, after_ns=makespan + makespan // 10) if step.order == "alone" and step.decision == "replacement" else step
        for step in lru.steps
    )
    slower = replace(lru, steps=worse)
    assert slower.alone("replacement").saved_ns == -(makespan // 10)
    assert "(+10.0 %)" in regret_table([slower], Format.MD)


def test_a_run_that_fails_is_told_and_ends_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def broken(*arguments: Any) -> None:
        raise RuntimeError("no future")

    monkeypatch.setattr(type(make_part("replacement", "belady")), "start", broken)
    one, other = regrets(resolve(tmp_path, policies=["lru", "on-demand"]))
    assert one.alone("replacement").after_ns is None
    assert one.alone("bandwidth").after_ns is not None
    assert any("with the oracle of replacement" in error and "no future" in error for error in one.errors)
    assert "failed" in regret_table([one], Format.MD)
    assert not other.errors


def test_regret_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    drawn: list[str] = []
    monkeypatch.setattr("moesim.plots.style.pictures", lambda figure, name: drawn.append(name) or {})
    file = write_yaml(tmp_path, policies=["lru", "on-demand"], cache={"ratio": [0.25, 0.5]})
    code = regret(file, "lru", [], small=False, jobs=1, out=tmp_path / "out", form=Format.TABLE)
    said = capsys.readouterr()
    assert code == 0
    assert "forward" in said.out
    assert "reversed" in said.out
    assert "on-demand" not in said.out
    rows = list(csv.DictReader((tmp_path / "out" / "regret.csv").read_text().splitlines()))
    assert len(rows) == 2 * len(ORDERS) * len(DECISIONS)
    assert drawn == ["regret-0", "regret-1"]  # one a setting
    with pytest.raises(ConfigError, match=r"small.yaml: policies: .*'lfu'"):
        regret(file, "lfu", [], small=True, jobs=1, out=None, form=Format.TABLE)


def _line(trace: str, ratio: int, half: float) -> Line:
    """Give a line whose gap is closed on a straight line up to twice the window of its half."""
    return Line(trace, trace, 4 * ratio, 0.5, 4, 10, {0: 100, round(2 * half): 0}, 0)


def test_the_gap_closed_and_the_window_of_half_of_it_by_hand():
    one = Line("m", "t", 2, 0.25, 2, 10, {0: 100, 1: 90, 2: 70, 4: 50, 8: 41}, 40)
    assert [round(one.closed(window), 3) for window in one.misses] == [0, 0.167, 0.5, 0.833, 0.983]
    assert one.half == 2
    other = Line("m", "t", 2, 0.25, 2, 10, {0: 100, 1: 90, 4: 60}, 40)
    assert other.half == pytest.approx(1 + 3 * (0.5 - 1 / 6) / (4 / 6 - 1 / 6))
    assert Line("m", "t", 2, 0.25, 2, 10, {0: 100, 1: 90}, 40).half is None
    assert math.isnan(Line("m", "t", 2, 0.25, 2, 10, {0: 40, 1: 40}, 40).closed(1))


@pytest.mark.parametrize(("exponent", "confirms"), [(1.39, True), (1.2, False)])
def test_a_power_law_is_found_again(exponent: float, confirms: bool):
    """Five traces whose exponents lie around it: the interval holds it, and the published one only where it is that one."""
    lines = [
        _line(f"trace{i}", ratio, 1000 * ratio ** (exponent + off))
        for i, off in enumerate((-0.04, -0.02, 0.0, 0.02, 0.04))
        for ratio in (2, 4, 8)
    ]
    found = relation(lines)
    assert found is not None
    assert (found.exponent, found.factor, found.n) == (pytest.approx(exponent, abs=1e-3), pytest.approx(1000, rel=0.01), 15)
    assert exponent - 0.04 <= found.low < exponent < found.high <= exponent + 0.04
    assert found.confirms is confirms


def test_too_few_sizes_say_nothing():
    lines = [Line("m", "t", slots, 0.5, 4, 10, {0: 100, 1: 0}, 0) for slots in (8, 16)]
    assert relation(lines) is None
    assert relation([lines[0]] * 5) is None


def test_lines_of_a_trace_hold_what_the_counting_says():
    trace = synthetic_trace(n_layers=2, n_experts=8, top_k=2, n_requests=2, prompt=2, decode=12)
    lines = look_ahead(trace, "made", shares=(0.25, 0.5), windows=(1, 4))
    assert [(one.slots, one.tokens, list(one.misses)) for one in lines] == [(2, 24, [0, 1, 4]), (4, 24, [0, 1, 4])]
    for one in lines:
        assert one.misses[0] >= one.misses[1] >= one.misses[4] >= one.fewest > 0
    assert lines[0].fewest > lines[1].fewest
    assert len(records(lines)) == 6


def test_the_command_writes_table_data_and_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    paths = []
    for seed in (0, 1):
        trace = synthetic_trace(n_layers=2, n_experts=16, top_k=2, n_requests=2, prompt=2, decode=40, seed=seed)
        paths.append(str(trace.write(tmp_path / f"made{seed}.safetensors")))
    trace_lookahead(paths, max_tokens=60, out=tmp_path / "out", form=Format.MD)
    said = capsys.readouterr().out
    assert said.count("made0") == said.count("made1") == 5
    assert "published: 0.51 (slots / k)^1.39" in said
    frame = pd.read_csv(tmp_path / "out" / "lookahead.csv")
    drawing = lookahead.drawing(frame)
    left, right = drawing.figure.axes
    assert len(left.lines) == 1  # one model
    halves = frame.drop_duplicates(["trace", "slots"])["half_window_tokens"]
    assert np.allclose(sorted(right.lines[0].get_ydata()), sorted(halves))  # type: ignore[arg-type]


def test_layers_ahead_close_a_share_of_the_gap():
    """Two layers close no less than one; a machine that is too small says so."""
    with Workers(1) as workers:
        made = read_trace("mini-mixtral", "x")
        found, missing = see_layers("mini-mixtral", made, "rtx3090-epyc7532", workers, layers=(1, 2), shares=(0.25,))
        none, why = see_layers("mini-mixtral", made, "rtx5070-ryzen9600x", workers, layers=(1,), shares=(0.75,))
    assert (missing, none) == ([], []) and "mini-mixtral, 75% cached: gpu0 of rtx5070" in why[0]
    one, two = found
    assert one.on_demand == two.on_demand < one.tokens_per_s <= two.tokens_per_s
    assert 0 < one.closed <= two.closed < 1
    assert one.label == "oracle"
    said = layers_table(found, why, Format.MD)
    assert "| mini-mixtral | 25 % |" in said and why[0] in said


def outcome(folder: Path, **changes: Any) -> Outcome:
    experiment = resolve(folder, **changes)
    return run_one(experiment, experiment.specs[0], keep=True)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, Outcome]:
    folder = tmp_path_factory.mktemp("diff")
    return outcome(folder, policies=["lru"]), outcome(folder, policies=["fiddler"], cache={"ratio": 0.5})


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    raw = small(folder, policies=["lru", "fiddler", {"name": "fiddler", "rule": "code"}], plots=[], timeline=None)
    experiment = Experiment(parse_config(raw, "small.yaml"), "small.yaml")
    Output(experiment, folder / "three").write(run_experiment(experiment, folder=folder / "three"))
    return folder / "three"


def makespans(two: tuple[Outcome, Outcome]) -> list[int]:
    found = [one.row["makespan_ns"] for one in two]
    assert all(isinstance(ns, int) for ns in found)
    return found  # type: ignore[return-value]


def test_every_way_of_adding_up_gives_the_difference_of_the_makespans(two: tuple[Outcome, Outcome]):
    found, (a, b) = Diff.of(*two), makespans(two)
    *causes, total = found.times()
    assert (total.a, total.b, total.difference) == (a, b, b - a)
    assert sum(entry.difference for entry in causes) == b - a
    assert sum(entry.difference for entry in found.layers()) == b - a
    by_phase = [entry for phase in PHASES for entry in found.times(phase) if entry.key != "total"]
    assert sum(entry.difference for entry in by_phase) == b - a
    assert sum(difference for _, difference, _ in most_different(found.layers(), 99)) == b - a
    assert all(isinstance(entry.difference, int) for entry in (*causes, *found.layers(), *by_phase))
    assert b != a


def test_times_for_each_token(two: tuple[Outcome, Outcome]):
    found = Diff.of(*two)
    decode = {entry.key: entry for entry in found.times("decode", per_token=True)}
    for side, one in zip(("a", "b"), two, strict=True):
        assert getattr(decode["total"], side) == pytest.approx(1e9 / float(one.row["decode_tokens_per_s"] or 0))
        assert sum(getattr(e, side) for key, e in decode.items() if key != "total") == pytest.approx(
            getattr(decode["total"], side)
        )
    assert found.times("between steps", per_token=True)[-1].a == 0


def test_what_lies_between_steps_counts(two: tuple[Outcome, Outcome]):
    ns = np.zeros((2, len(CAUSES)), np.int64)
    ns[0, 0], ns[1, -1] = 70, 30
    records = Records(steps=RecordTable(StepRecord, [StepRecord(0, 70, 0, "decode", 0, 1, 1, 0.0)]), makespan_ns=100)
    made = replace(
        two[0], records=records, split=Breakdown(RecordTable(Window, [Window(0, 70, 0, -1), Window(70, 100, -1, -1)]), ns)
    )
    found = Diff.of(made, made)
    assert [found.a.ns(phase) for phase in PHASES] == [0, 70, 30]


def test_settings_that_differ_are_all_that_do(two: tuple[Outcome, Outcome]):
    keys = {entry.key for entry in Diff.of(*two).settings()}
    assert {"policy", "cache_ratio", "cache_slots"} <= keys
    assert not keys & {"model", "hardware", "trace", "batch_size", "workload_digest"}
    assert Diff.of(two[0], two[0]).settings() == []


def test_the_layers_where_most_of_it_arises(two: tuple[Outcome, Outcome]):
    found = Diff.of(*two)
    most = most_different(found.layers(), 5)
    assert len(most) == 5
    sizes = [abs(difference) for _, difference, _ in most]
    assert sizes == sorted(sizes, reverse=True)
    layer, difference, causes = most[0]
    assert difference == found.b.ns(layer=layer) - found.a.ns(layer=layer)
    assert {entry.layer for entry in found.layers()} <= {OUTSIDE, *range(32)}
    assert abs(causes[0].difference) == max(abs(entry.difference) for entry in causes)


def test_bytes_and_rates(two: tuple[Outcome, Outcome]):
    found = Diff.of(*two)
    demand = next(entry for entry in found.bytes() if entry.key == "bytes_demand")
    assert demand.difference == int(two[1].row["bytes_demand"] or 0) - int(two[0].row["bytes_demand"] or 0)
    rates = {entry.key: entry.difference for entry in found.rates()}
    assert rates["hit_rate"] == pytest.approx(float(two[1].row["hit_rate"] or 0) - float(two[0].row["hit_rate"] or 0))


def test_models_with_other_layers_are_compared_by_cause_only(tmp_path: Path):
    a = outcome(tmp_path, policies=["lru"])
    other = write_trace(tmp_path / "other.safetensors", n_layers=16)
    model = {"base": "mixtral-8x7b", "expert_bits": 4, "n_layers": 16}
    b = outcome(tmp_path, policies=["lru"], trace=str(other), model=model)
    found = Diff.of(a, b)
    assert (found.by_layer, found.layers()) == (False, [])
    assert sum(e.difference for e in found.times() if e.key != "total") == makespans((a, b))[1] - makespans((a, b))[0]
    text = text_of(found, "a", "b", Format.TABLE)
    assert "by layer: not compared, for the models have 32 and 16 layers" in text


# ----------------------------------------------------------------------------------------------------------------- command


def test_runs_by_number_and_by_policy(results: Path):
    assert find_run(f"{results}:2").row["policy"] == "fiddler(rule=code)"
    assert find_run(f"{results}:lru").row["run"] == 0
    assert find_run(f"{results}:fiddler").row["run"] == 1  # the name with its options comes first
    assert find_run(f"{results}:fiddler(rule=code)").row["run"] == 2


@pytest.mark.parametrize(
    ("which", "words"),
    [
        ("", "expected one run, got 3 (0, 1, 2)"),
        (":7", "expected a run from 0 to 2, got 7"),
        (":lrv", "did you mean 'lru'?"),
        ("x:1", "got no such folder"),
    ],
)
def test_runs_that_are_not_there(results: Path, which: str, words: str):
    with pytest.raises(ConfigError) as error:
        find_run(f"{results}{which}")
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_the_command(results: Path, capsys: pytest.CaptureFixture[str]):
    assert command(f"{results}:lru", f"{results}:fiddler", Format.TABLE) == 0
    text = capsys.readouterr().out
    for part in (
        "settings that differ",
        "time by cause",
        "layers with the largest difference",
        "bytes over links",
        "synthetic routing",
    ):
        assert part in text
    assert command(f"{results}:lru", f"{results}:fiddler", Format.MD) == 0
    assert "### time by cause\n\n|  | A | B | B - A | change |" in capsys.readouterr().out


@pytest.mark.parametrize("form", [Format.JSON, Format.JSONL])
def test_for_programs(results: Path, capsys: pytest.CaptureFixture[str], form: Format):
    command(f"{results}:lru", f"{results}:fiddler", form)
    out = capsys.readouterr().out
    rows = json.loads(out) if form is Format.JSON else [json.loads(line) for line in out.splitlines()]
    whole = [r for r in rows if r["section"] == "time" and r["phase"] is None and not r["per_token"]]
    total = next(r for r in whole if r["key"] == "total")
    assert total["difference"] == sum(r["difference"] for r in whole if r["key"] != "total")
    assert {r["label_a"] for r in rows} == {f"{find_run(f'{results}:lru').row['source_label']}, synthetic routing"}
