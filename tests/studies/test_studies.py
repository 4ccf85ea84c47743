"""The regret of policies."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from moesim.cli.regret import regret
from moesim.cli.regret import table as regret_table
from moesim.core.table import Format
from moesim.errors import ConfigError
from moesim.experiment.runner import run_one
from moesim.hardware.costs import CostModel
from moesim.plots.studies import regret_waterfall
from moesim.policies.registry import POLICIES, make_part, make_policy
from moesim.studies.regret import DECISIONS, ORDERS, Regret, combinations, derive, instant_links, regrets, replaceable
from tests.experiment.experiment_kit import resolve, write_yaml


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


def test_the_figure_and_its_data_have_both_bounds(found: list[Regret]):
    frame = pd.DataFrame(found[0].records())
    labels = regret_waterfall(frame).axes[0].get_legend_handles_labels()[1]
    assert {"lower bound, links as they are", "lower bound, links without time"} <= set(labels)
    data = regret_waterfall.drawing(frame).data
    assert (data["lower_bound_instant_links_s"] < data["lower_bound_s"]).all()
    assert set(data["links"].dropna()) == {"as they are", "without time"}
    assert "another machine" in regret_waterfall.drawing(frame).caption


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
    assert "(-10.0 %)" in regret_table([slower], Format.MD)


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


def test_processes_do_not_change_the_result(tmp_path: Path):
    """Of a policy, too, whose oracle is another one that the experiment does not name."""
    experiment = resolve(tmp_path, policies=["lru"], workload={"prompt_tokens": 6, "decode_tokens": 1})
    assert regrets(experiment, jobs=2) == regrets(experiment)


def test_combinations_of_nothing_but_links():
    assert combinations(["bandwidth"]) == {
        ("forward", "bandwidth"): (frozenset(), frozenset({"bandwidth"})),
        ("reversed", "bandwidth"): (frozenset(), frozenset({"bandwidth"})),
        ("alone", "bandwidth"): (frozenset(), frozenset({"bandwidth"})),
    }


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
    with pytest.raises(ConfigError, match=r"--policies: .*'lfu'"):
        regret(file, "lfu", [], small=True, jobs=1, out=None, form=Format.TABLE)


def test_the_waterfall_has_two_rows_a_policy(found: list[Regret]):
    figure = regret_waterfall(pd.DataFrame([record for one in found for record in one.records()]))
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert len(labels) == 2 * len(found)
    legend = figure.axes[0].get_legend()
    assert legend is not None
    said = [text.get_text() for text in legend.get_texts()]
    assert said.index("bandwidth") < said.index("all oracles, links without time")
