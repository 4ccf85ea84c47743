"""Published figures next to simulated ones: the table, what answers it, and whether systems are in the printed order."""

from __future__ import annotations

import csv
import json
import re
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from moesim.cli.main import main
from moesim.core.table import Format
from moesim.errors import ConfigError, InputError
from moesim.experiment.config import load_config
from moesim.experiment.run import run_experiment
from moesim.metrics.naming import CACHE_SETTINGS, SETTINGS
from moesim.studies.papers import answers
from moesim.studies.papers.answers import COLUMN, decision_share, machine_cost, routing_figure, run_clocked
from moesim.studies.papers.compare import Agreement, Compared, agreements, check_answers, choose, compare, figures, variants
from moesim.studies.papers.published import COLUMNS, PUBLISHED, Published, paper_folder, read_published
from moesim.studies.papers.report import report
from moesim.testing.traces import synthetic_trace
from moesim.trace import Trace
from tests.experiment.experiment_kit import resolve, small

FOLDER = paper_folder()
TABLE = FOLDER / PUBLISHED
SHIPPED = read_published(TABLE)
FIGURES = figures(SHIPPED, FOLDER)
EXPERIMENTS = {name: load_config(FOLDER / f"{name}.yaml") for one in FIGURES for name in one.experiments}


def figure(**changes: Any) -> Published:
    texts = dict.fromkeys(COLUMNS, "") | {
        "paper": "x", "figure": "f", "quantity": "speed", "system": "P", "kind": "value", "source": "runs", "input": "a",
        "policy": "p", "metric": "speed",
    }  # fmt: skip
    return Published(**{**texts, "published": 2.0, **changes})  # type: ignore[arg-type]


def ratio(kind: str = "speedup", **changes: Any) -> Published:
    return figure(**{"kind": kind, "over": "Q", "baseline": "q", **changes})


def row(policy: str, speed: float, **changes: Any) -> dict[str, Any]:
    settings = dict.fromkeys((*SETTINGS, *CACHE_SETTINGS), 0)
    shape = {"model": "m (expert_bits=4)", "cache_ratio": 0.5, "batch_size": 1, "error": None, "notes": "n"}
    labels = {"source_label": "synthetic", "routing": "synthetic", "cost_label": "derived"}
    return {"policy": policy, "policy_name": policy, "speed": speed, **settings, **shape, **labels, **changes}


# ------------------------------------------------------------------------------------------------- printed and simulated
def test_a_value_is_the_mean_over_the_runs_that_count():
    rows = [row("p", 3.0), row("p", 5.0, batch_size=4), row("p", 100.0, batch_size=8), row("q", 7.0), row("p", 1.0, error="x")]
    found = compare(figure(where="model=m;batch_size=1|4;cache_ratio=0.5"), {"x/a": rows})
    assert (found.simulated, found.low, found.high, found.n_runs, found.ratio) == (4.0, 3.0, 5.0, 2, 2.0)
    assert (found.costs, found.routing, found.label, found.policies, found.notes) == (
        "derived", "synthetic", "synthetic", ("p",), "n",
    )  # fmt: skip


def test_tokens_per_energy_rest_on_the_watts_too():
    one = row("p", 3.0, energy_j_per_token=50.0, energy_label="assumed")
    found = compare(figure(metric="tokens_per_kj"), {"x/a": [one]})
    assert (found.simulated, found.costs, found.label) == (20.0, "assumed, derived", "assumed, synthetic")
    assert compare(figure(), {"x/a": [one]}).costs == "derived"


def test_a_speedup_compares_like_with_like():
    rows = [row("p", 8.0), row("q", 2.0), row("p", 9.0, batch_size=4), row("q", 1.0, batch_size=4), row("p", 50.0, batch_size=8)]
    found = compare(ratio(), {"x/a": rows})
    assert found.n_runs == 2  # the third setting has no baseline
    assert found.simulated == pytest.approx(6.0)  # geometric mean of 4 and 9
    assert (found.low, found.high) == (4.0, 9.0)


def test_a_gain_is_in_percent_and_its_ratio_is_one_of_speeds():
    found = compare(ratio("gain", published=50.0), {"x/a": [row("p", 3.0), row("q", 1.0)]})
    assert (found.simulated, found.ratio) == (pytest.approx(200.0), pytest.approx(2.0))


@pytest.mark.parametrize(("kind", "speed", "holds"), [("below", 1.9, True), ("below", 2.0, False), ("above", 2.1, True)])
def test_a_bound_holds_or_not(kind: str, speed: float, holds: bool):
    assert compare(figure(kind=kind), {"x/a": [row("p", speed)]}).agrees is holds


def test_a_place_is_one_among_the_policies_of_a_setting():
    rows = [row("p", 5.0), row("q", 7.0), row("r", 6.0), row("p", 5.0, batch_size=4), row("q", 1.0, batch_size=4)]
    found = compare(figure(kind="place", published=1.0), {"x/a": rows})
    assert (found.low, found.high, found.simulated) == (1.0, 3.0, 2.0)
    turned = compare(figure(kind="place", metric="1/speed", where="batch_size=1"), {"x/a": rows})
    assert turned.simulated == 1.0


def test_less_is_better_where_the_metric_says_so():
    assert compare(ratio(metric="1/speed"), {"x/a": [row("p", 2.0), row("q", 3.0)]}).simulated == 1.5


def test_a_baseline_may_come_from_another_experiment():
    found = compare(ratio(baseline_input="b"), {"x/a": [row("p", 6.0)], "x/b": [row("q", 3.0, model="m")]})
    assert found.simulated == 2.0


@pytest.mark.parametrize("key", ["transfer_curve", "prefill_chunk", "decision_ns", "seed"])
def test_runs_that_differ_in_any_setting_are_not_compared(key: str):
    assert compare(ratio(), {"x/a": [row("p", 8.0), row("q", 2.0, **{key: 1})]}).simulated is None


def test_without_runs_there_is_no_figure():
    assert compare(figure(source="", policy=""), {"x/a": [row("", 1.0)]}).simulated is None
    nothing = compare(figure(), {})
    assert (nothing.ratio, nothing.agrees) == (None, None)


def test_an_unknown_metric_or_setting_is_told():
    with pytest.raises(ConfigError, match=r"^t: x/f: unknown metric 'sped'; did you mean 'speed'\?"):
        compare(figure(metric="sped"), {"x/a": [row("p", 1.0)]}, "t")
    with pytest.raises(ConfigError, match=r"^t: x/f: where: unknown setting 'batchsize'; did you mean 'batch_size'\?"):
        compare(figure(where="batchsize=1"), {"x/a": [row("p", 1.0)]}, "t")


def test_variants_stand_beside_the_first_policy():
    rows = [
        row("p", 0.0, decode_tokens_per_s=10.0, ttft_mean_ns=8.0, fidelity_fresh_decode=1.0),
        row("p", 0.0, decode_tokens_per_s=10.0, ttft_mean_ns=8.0, fidelity_fresh_decode=1.0, batch_size=4),
        row("q", 0.0, decode_tokens_per_s=20.0, ttft_mean_ns=16.0, fidelity_fresh_decode=0.9),
        row("q", 0.0, decode_tokens_per_s=80.0, ttft_mean_ns=16.0, fidelity_fresh_decode=0.8, batch_size=4),
        row("q", 0.0, decode_tokens_per_s=80.0, ttft_mean_ns=16.0, fidelity_fresh_decode=0.1, batch_size=8),  # p has no such run
    ]
    first, second = variants("a", rows)
    assert (first.policy, first.n_settings, first.decode, first.prefill) == ("p", 2, 1.0, 1.0)
    assert (second.n_settings, second.decode, second.low, second.high) == (2, pytest.approx(4.0), 2.0, 8.0)
    assert (second.prefill, second.fidelity) == (0.5, 0.8)


# ------------------------------------------------------------------------------------------------------- rank agreement
def value(system: str, printed: float, simulated: float | None, **changes: Any) -> Compared:
    return Compared(figure(system=system, published=printed, **changes), simulated)


def factor(system: str, over: str, printed: float, simulated: float, kind: str = "speedup", **changes: Any) -> Compared:
    return Compared(ratio(kind, system=system, over=over, published=printed, **changes), simulated)


def only(*compared: Compared) -> Agreement:
    (found,) = agreements(compared)
    return found


def test_three_values_have_an_order_by_hand():
    found = only(value("A", 4, 40.0), value("C", 2, 20.0), value("B", 3, 10.0))
    assert found.systems == ("A", "B", "C")
    assert (found.order, found.pairs, found.wrong) == ("A > B > C", 3, (("B", "C"),))
    assert found.tau == pytest.approx(1 / 3)  # two pairs agree, one does not
    assert found.verdict == "tau 0.33, 2 of 3 pairs agree"


@pytest.mark.parametrize(
    ("simulated", "verdict"), [(1.5, "1 pair, agrees"), (0.9, "1 pair, disagrees"), (1.0, "1 pair, simulated equal")]
)
def test_two_systems_are_one_pair(simulated: float, verdict: str):
    found = only(factor("A", "B", 2.0, simulated))
    assert (found.systems, found.tau, found.verdict) == (("A", "B"), None, verdict)


def test_what_is_simulated_to_be_equal_neither_agrees_nor_disagrees():
    found = only(value("A", 4, 2.0), value("B", 3, 2.0), value("C", 2, 3.0))
    assert (found.tied, found.wrong) == ((("A", "B"),), (("A", "C"), ("B", "C")))
    assert found.amiss == "A > C; B > C; A > B (simulated equal)"
    assert found.tau == pytest.approx(-2 / 6**0.5)  # tau-b: one pair is tied when simulated
    assert found.verdict == "tau -0.82, 0 of 3 pairs agree"
    chain = only(factor("A", "B", 3.0, 0.1), factor("B", "C", 2.0, 10.0))  # A and C differ by rounding only
    assert chain.tied == (("A", "C"),)


def test_ratios_of_one_system_over_others_order_the_others():
    found = only(factor("A", "slow", 4.0, 1.2), factor("A", "fast", 1.3, 1.5), factor("A", "middle", 2.0, 1.3))
    assert found.systems == ("A", "fast", "middle", "slow")
    assert set(found.wrong) == {("fast", "middle"), ("fast", "slow"), ("middle", "slow")}
    assert found.tau == pytest.approx(0.0)  # three pairs each way


def test_gains_on_top_of_each_other_are_a_chain():
    steps = [factor("a", "none", 4.0, 1.2), factor("b", "a", 9.0, -2.0, "gain"), factor("c", "b", 38.0, 10.0, "gain")]
    found = only(*steps)
    assert found.order == "c > b > a > none"
    assert found.wrong == (("b", "a"),)
    assert found.tau == pytest.approx(4 / 6)


def test_a_value_and_ratios_over_it_are_on_one_scale():
    found = only(value("A", 4.0, 8.0), factor("A", "B", 100.0, 300.0, "gain"), value("C", 3.0, 1.0))
    assert found.order == "A > C > B"  # B is printed to be 2 and simulated to be 2
    assert found.wrong == (("C", "B"),)


def test_systems_that_nothing_connects_are_ranked_apart():
    found = agreements([factor("A", "B", 2.0, 3.0), factor("C", "D", 2.0, 0.5)])
    assert [(one.systems, one.verdict) for one in found] == [
        (("A", "B"), "1 pair, agrees"), (("C", "D"), "1 pair, disagrees"),
    ]  # fmt: skip


def test_of_two_bounds_no_order_is_known():
    bounds = [value("X", 1, 0.5, kind="below"), value("Y", 1, 0.1, kind="below")]
    assert agreements(bounds) == []
    found = only(value("A", 4, 3.0), *bounds)
    assert (found.order, found.pairs, found.wrong) == ("A > X = Y", 2, ())
    assert found.tau == pytest.approx(2 / 6**0.5)  # tau-b: one pair is tied in print
    assert only(value("A", 4, 3.0), value("B", 2, 1.0), value("X", 3, 0.5, kind="below")).systems == ("A", "B")
    assert only(value("A", 4, 3.0), value("X", 5, 9.0, kind="above")).verdict == "1 pair, agrees"


def test_readings_are_ranked_apart_and_share_what_belongs_to_any():
    rows = [value("A", 3, 3.0, reading="one"), value("A", 3, 1.0, reading="two"), value("B", 2, 2.0)]
    assert [(one.reading, one.verdict) for one in agreements(rows)] == [("one", "1 pair, agrees"), ("two", "1 pair, disagrees")]


def test_only_what_is_comparable_is_ranked():
    apart = [
        value("A", 3, 3.0),
        value("B", 2, 1.0, setting="s"),
        value("C", 2, 1.0, quantity="q"),
        value("D", 2, 1.0, figure="g"),
    ]
    assert agreements(apart) == []
    assert agreements([value("A", 3, 3.0), value("B", 2, None)]) == []
    assert agreements([value("A", 3, 3.0, kind="place"), value("B", 2, 1.0, kind="place")]) == []
    assert agreements([value("A", 3, 3.0, source="costs"), value("B", 2, 1.0, source="costs")]) == []


# ------------------------------------------------------------------------------------------------- traces, costs, decisions
def test_figures_of_a_trace(tmp_path: Path):
    trace = tmp_path / "t.safetensors"
    shape: dict[str, Any] = {"n_layers": 2, "n_experts": 4, "top_k": 2, "n_requests": 8, "prompt": 4, "decode": 3}
    synthetic_trace(**shape, signals={"gate_next1": 1.0}, scores=True).write(trace)
    read = Trace.read(trace)

    def told(name: str, **arguments: str) -> float:
        found, label = routing_figure(str(trace), name, arguments, "t")
        assert label == "synthetic"
        return found

    assert told("recall", signal="gate_next1") == 100
    assert told("workload_recall", signal="gate_next1", batch_size="8", n="1") == 100
    assert told("active_experts", tokens="1") == 2
    prompts = read.experts[(read.phase == 0)].reshape(8, 4, 2, 2)
    distinct = [len(set(prompts[i, :2, layer].ravel())) for i in range(8) for layer in range(2)]
    assert told("active_experts", tokens="2") == pytest.approx(sum(distinct) / 16)
    assert told("all_active", tokens="2") == pytest.approx(100 * sum(n == 4 for n in distinct) / 16)
    assert told("hit_rate", policy="lru", share="0.75") > told("hit_rate", policy="lru", share="0.5") > 0
    assert told("hit_rate", policy="belady", share="0.5") >= told("hit_rate", policy="mrs", share="0.5") > 0
    assert 0 < told("prefill_decode_similarity") <= 100


@pytest.mark.parametrize(("true", "found"), [([[1, 2], [1, 0]], (100, 100)), ([[3, 2], [3, 0]], (0, 50))])
def test_the_busiest_experts_by_coactivation(tmp_path: Path, true: list[list[int]], found: tuple[float, float]):
    # In held-back requests expert i is followed by i + 1 and i + 2 alike. So rows of 0 and 1 say 2 and then 1, and rows of 1 and
    # 3, which say all alike, 0 and 1: expert 1 is said 8 times, 0 and 2 are said 4 times.
    pairs = np.zeros((2, 4, 4), np.int64)
    for i in range(4):
        pairs[0, i, [(i + 1) % 4, (i + 2) % 4]] = 5
    rows = np.array([[[0, 1], true[0]]] * 4 + [[[1, 3], true[1]]] * 4, np.uint8)
    fields: dict[str, Any] = {"n_prompt": [0] * 8, "n_decode": [1] * 8, "n_experts": 4, "model": "m", "label": "synthetic"}
    trace = tmp_path / "t.safetensors"
    made = Trace.build(experts=rows, weights=np.full(rows.shape, 0.5), tables={"coactivation": pairs}, prompt_offset=1, **fields)
    made.write(trace)
    arguments = [{"signal": "coactivation", "batch_size": "8", "n": n} for n in "12"]
    assert tuple(routing_figure(str(trace), "workload_recall", one, "t")[0] for one in arguments) == found


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("recal", {}, "t: unknown statistic of a trace 'recal'; did you mean 'recall'?"),
        ("recall", {"sinal": "x"}, "t: recall: expected the arguments signal, got sinal"),
        ("recall", {"signal": "gate"}, "t: recall: unknown signal 'gate'"),
        (
            "workload_recall",
            {"signal": "gate_next1", "batch_size": "b", "n": "1"},
            "batch_size: expected an integer of at least 1",
        ),
        ("workload_recall", {"signal": "gate_next1", "batch_size": "9", "n": "1"}, "expected 9 requests with signal"),
        ("active_experts", {"tokens": "5"}, "expected prompts of at least 5 tokens, got none"),
        ("hit_rate", {"policy": "fifo", "share": "0.5"}, "unknown policy 'fifo'"),
        ("hit_rate", {"policy": "lru", "share": "1"}, "expected some of the 4 experts and not all, got 1"),
        ("hit_rate", {"policy": "lru", "share": "x"}, "share: expected a number, got 'x'"),
    ],
)
def test_a_wrong_figure_of_a_trace_is_told(tmp_path: Path, name: str, arguments: dict[str, str], message: str):
    trace = tmp_path / "t.safetensors"
    synthetic_trace(2, 4, 2, 8, 4, 3, signals={"gate_next1": 1.0}).write(trace)
    with pytest.raises(InputError) as error:
        routing_figure(str(trace), name, arguments, "t")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_costs_of_a_machine_are_those_of_its_profile():
    mixtral = {"model": "mixtral-8x7b"}
    assert machine_cost("a6000-i9-10980xe", "expert_ms", {**mixtral, "device": "cpu0"}, "t") == (8.5, "published")
    value, label = machine_cost("a100-xeon6326", "copy_ms", {**mixtral, "transfer": "pageable"}, "t")
    assert (value, label) == (pytest.approx(39.87), "derived")
    one, two = (machine_cost("a100-xeon6326", "expert_ms", {**mixtral, "rows": n}, "t")[0] for n in ("1", "512"))
    assert two > one
    copied = machine_cost("a100-xeon6326", "copied_over_cpu", {**mixtral, "transfer": "pageable"}, "t")[0]
    cpu = machine_cost("a100-xeon6326", "expert_ms", {**mixtral, "device": "cpu0"}, "t")[0]
    assert copied == pytest.approx((39.87 + one) / cpu, rel=1e-4)
    assert machine_cost("a100-xeon6326", "expert_mib", mixtral, "t")[0] == 336
    assert machine_cost("a100-xeon6326", "block_ms", mixtral, "t")[0] > 2 * one
    assert 0 < machine_cost("a100-xeon6326", "activation_ms", mixtral, "t")[0] < 1


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("expert", {"model": "mixtral-8x7b"}, "t: unknown cost 'expert'"),
        ("expert_ms", {"model": "mixtral-8x7b", "row": "1"}, "t: expert_ms: unknown argument 'row'; did you mean 'rows'?"),
        ("expert_ms", {}, "t: expert_ms: expected the argument model, got none"),
        ("expert_ms", {"model": "mixtral-8x7b", "rows": "0"}, "rows: expected an integer of at least 1, got '0'"),
        ("expert_ms", {"model": "mixtral-8x7b", "device": "gpu9"}, "unknown device 'gpu9'"),
    ],
)
def test_a_wrong_cost_is_told(name: str, arguments: dict[str, str], message: str):
    with pytest.raises(InputError) as error:
        machine_cost("a100-xeon6326", name, arguments, "t")
    assert message in str(error.value)


def test_decisions_are_clocked_and_nothing_else_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    clock = count(0, 1000)  # a real one may stand still from one tick to the next
    monkeypatch.setattr(answers, "time", SimpleNamespace(process_time_ns=clock.__next__))
    experiment = resolve(tmp_path, policies=["lru", "dali"])
    plain, clocked = run_experiment(experiment).rows, run_clocked(experiment)
    assert [one["makespan_ns"] for one in clocked] == [one["makespan_ns"] for one in plain]
    assert sum(one[COLUMN] for one in clocked) == 1000 * (next(clock) // 2000)
    assert all(one[COLUMN] > 0 and 0 < decision_share(one) < 1 for one in clocked)
    assert all("decisions measured" in one["notes"] for one in clocked)


# ------------------------------------------------------------------------------------------------------------ the table
GOOD = {
    "paper": "x", "figure": "f", "quantity": "speed", "system": "P", "kind": "value", "unit": "x", "published": "2",
    "source": "runs", "input": "a", "policy": "p", "metric": "m",
}  # fmt: skip


def write_table(path: Path, *rows: dict[str, str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "ratio"}, ":2: unknown kind 'ratio'"),
        ({"source": "run"}, ":2: unknown source 'run'; did you mean 'runs'?"),
        ({"published": "many"}, ":2: published: expected a number, got 'many'"),
        ({"published": "nan"}, ":2: published: expected a number, got 'nan'"),
        ({"published": "0"}, ":2: published: expected more than 0, got 0"),
        ({"figure": ""}, ":2: figure: expected a name, got nothing"),
        ({"kind": "speedup", "baseline": "q"}, ":2: over: expected the other system of the ratio, got ''"),
        ({"over": "Q"}, ":2: over: expected nothing for a value, got 'Q'"),
        ({"kind": "gain", "over": "Q"}, ":2: baseline: expected it for source 'runs' and kind 'gain', got nothing"),
        ({"baseline": "q"}, ":2: baseline: expected nothing for source 'runs' and kind 'value', got 'q'"),
        ({"policy": ""}, ":2: policy: expected it for source 'runs' and kind 'value', got nothing"),
        ({"source": "trace"}, ":2: policy: expected nothing for source 'trace' and kind 'value', got 'p'"),
        ({"source": "", "input": "", "policy": "", "metric": ""}, ":2: remark: expected it for source ''"),
        (
            {"source": "costs", "policy": "", "kind": "place"},
            ":2: kind: expected value, below or above for source 'costs', got place",
        ),
        ({"where": "model"}, ":2: where: expected key=value parts with ; between them, got 'model'"),
    ],
)
def test_a_wrong_row_is_told(tmp_path: Path, changes: dict[str, str], message: str):
    path = write_table(tmp_path / PUBLISHED, GOOD | changes)
    with pytest.raises(ConfigError) as error:
        read_published(path)
    assert str(error.value).startswith(f"{path}{message}")
    assert "\n" not in str(error.value)


def test_a_wrong_file_is_told(tmp_path: Path):
    path = tmp_path / PUBLISHED
    with pytest.raises(ConfigError, match="expected the table of published results, got: No such file"):
        read_published(path)
    path.write_text("a,b\n")
    with pytest.raises(ConfigError, match="expected the columns paper,figure,ref"):
        read_published(path)
    path.write_text(",".join(COLUMNS) + "\nx,y\n")
    with pytest.raises(ConfigError, match="expected 20 fields, got another number"):
        read_published(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy": "lra"}, "t: x/f: unknown policy of x/a.yaml 'lra'; did you mean 'lru'?"),
        (
            {"policy": "lru", "where": "batch_size=7"},
            "t: x/f: where: expected settings of some run of x/a.yaml, got 'batch_size=7'",
        ),
        ({"policy": "lru", "where": "batch=7"}, "t: x/f: where: unknown setting 'batch'"),
        ({"source": "trace", "policy": "", "metric": "recal"}, "t: x/f: unknown statistic of a trace 'recal'"),
        ({"source": "costs", "policy": "", "metric": "speed"}, "t: x/f: unknown cost 'speed'"),
    ],
)
def test_a_dead_row_is_told_before_anything_runs(tmp_path: Path, changes: dict[str, str], message: str):
    path = tmp_path / "a.yaml"
    path.write_text(yaml.safe_dump(small(tmp_path)))
    with pytest.raises(ConfigError) as error:
        check_answers([figure(**changes)], {"x/a": load_config(path)}, "t")
    assert str(error.value).startswith(message)


# ------------------------------------------------------------------------------------------------------- what is shipped
def test_no_shipped_row_is_dead():
    check_answers(SHIPPED, EXPERIMENTS, str(TABLE))


def test_figures_have_names_of_their_own_and_every_experiment_belongs_to_one():
    names = [f"{one.paper}/{one.name}" for one in FIGURES]
    assert len(set(names)) == len(names)
    there = {str(p.relative_to(FOLDER).with_suffix("")) for p in FOLDER.rglob("*.yaml") if not p.name.startswith("_")}
    assert {name for one in FIGURES for name in one.experiments} == there


def test_figures_are_chosen_by_name(tmp_path: Path):
    assert {one.paper for one in choose(FIGURES, ["dali"])} == {"dali"}
    assert [one.name for one in choose(FIGURES, ["hybrimoe/fig9", "daop/table1"])] == ["fig9", "table1"]
    assert choose(FIGURES, []) == FIGURES
    with pytest.raises(ConfigError, match=r"papers: unknown figure 'hybrimoe/fig99'; did you mean 'hybrimoe/fig9'\?"):
        choose(FIGURES, ["hybrimoe/fig99"])
    with pytest.raises(ConfigError, match="papers: unknown paper 'hybrid'"):
        choose(FIGURES, ["hybrid"])
    with pytest.raises(ConfigError, match=r"x/f: input: unknown experiment 'x/a'"):
        figures([figure()], tmp_path)


# ------------------------------------------------------------------------------------------------------------ the command
SPEED = "decode_tokens_per_s"


@pytest.fixture
def own_paper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A paper of one figure, in the current folder: three systems, a bound, a cost, and one that is not here."""
    folder = tmp_path / "experiments" / "papers"
    made = small(tmp_path, policies=["on-demand", "lru", {"name": "fiddler"}], timeline=None)
    shared = {key: made.pop(key) for key in ("model", "hardware", "trace")}
    rows = [
        GOOD | {"system": "Fiddler", "published": "9", "policy": "fiddler", "metric": SPEED, "why": "ours is slow"},
        GOOD | {"kind": "gain", "system": "Fiddler", "over": "LRU", "published": "50", "policy": "fiddler", "baseline": "lru",
                "metric": SPEED},
        GOOD | {"kind": "below", "system": "on demand", "published": "1e6", "policy": "on-demand", "metric": SPEED},
        GOOD | {"kind": "value", "system": "other", "source": "", "input": "", "policy": "", "metric": "", "remark": "not here"},
        GOOD | {"figure": "t", "quantity": "size", "source": "costs", "input": "rtx3090-epyc7532", "policy": "",
                "metric": "expert_mib", "where": "model=mixtral-8x7b", "published": "336"},
    ]  # fmt: skip
    write_table(folder / PUBLISHED, *rows)
    (folder / "x").mkdir()
    (folder / "x" / "_shared.yaml").write_text(yaml.safe_dump(shared))
    (folder / "x" / "a.yaml").write_text(yaml.safe_dump({"include": "_shared.yaml", **made}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert main(["papers", *arguments, "-o", "json"]) == 0
    return list(json.loads(capsys.readouterr().out))


def test_a_paper_is_run_and_told(own_paper: Path, capsys: pytest.CaptureFixture[str]):
    records = told(capsys, "-j", "1")
    shown = [one for one in records if one["table"] == "figure"]
    assert [one["n_runs"] for one in shown] == [1, 1, 1, 0, 1]
    assert all(one["simulated"] is not None and one["ratio"] is not None for one in shown if one["source"])
    assert [one["agrees"] for one in shown][2:] == [True, None, True]
    assert shown[0]["routing"] == "synthetic"
    (order,) = [one for one in records if one["table"] == "rank"]
    assert order["n_systems"] == 2  # a bound above all the others says nothing
    assert order["systems"] == "Fiddler > LRU"


def test_a_figure_is_listed_and_chosen(own_paper: Path, capsys: pytest.CaptureFixture[str]):
    assert told(capsys, "--list") == [
        {"figure": "x/f", "ref": "", "printed": 4, "comparable": 3, "experiments": "x/a.yaml", "runs": 3},
        {"figure": "x/t", "ref": "", "printed": 1, "comparable": 1, "experiments": "", "runs": 0},
    ]
    (cost,) = told(capsys, "x/t")
    assert (cost["figure"], cost["simulated"], cost["costs"], cost["quick"]) == ("t", 336.0, "published", False)
    assert main(["papers", "y"]) == 2
    assert capsys.readouterr().err == "moesim: papers: unknown paper 'y'; known: x\n"


def test_what_has_been_run_is_not_run_again(own_paper: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    first = told(capsys, "-j", "1", "--out", "out")
    assert (own_paper / "out" / "x" / "a" / "summary.json").is_file()

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("it was run before")

    monkeypatch.setattr("moesim.experiment.run.run_one", never)
    assert main(["papers", "-j", "1", "--out", "out", "-o", "json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == first
    assert err == "3 of 3 runs were in out/x/a already\n"


def test_a_shipped_figure_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    records = told(capsys, "daop/speed", "daop/table1", "--quick", "-j", "1")
    shown = [one for one in records if one["table"] == "figure"]
    assert all(one["simulated"] is not None for one in shown)
    assert {one["reading"] for one in records if one["table"] == "rank"} >= {
        "DAOP and Fiddler by their papers", "DAOP and Fiddler by their code",
    }  # fmt: skip
    assert all(one["routing"] == "synthetic" and "synthetic routing" in one["notes"] for one in shown if one["source"] == "runs")


def test_remarks_that_a_terminal_has_no_room_for_are_notes_below(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once, by its number; a wide terminal, and what is no terminal, keep them in their column."""
    found = [value("a", 2.0, 2.0, remark="the paper does not print its batch, so that we take four and say so here"),
             value("b", 2.0, 2.0, remark="the paper does not print its batch, so that we take four and say so here"),
             value("c", 2.0, 2.0, remark="another remark")]  # fmt: skip
    whole = report(found, [], [], Format.TABLE)
    assert whole.count("the paper does not print") == 2 and whole.splitlines()[0].split()[-1] == "remark"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    lines = re.sub(r"\x1b\[\d*m", "", report(found, [], [], Format.TABLE)).splitlines()
    assert lines[0].split()[-1] == "note" and max(map(len, lines[: lines.index("") + 3])) <= 80
    begin = lines.index("") + 1
    assert lines[begin : begin + 3] == [
        "1 the paper does not print its batch, so that we take four and say so here", "2 another remark", "",
    ]  # fmt: skip
    assert [line.split()[-1] for line in lines[1 : lines.index("")] if line.split()[-1] in "12"] == ["1", "1", "2"]
    monkeypatch.setenv("COLUMNS", "300")
    assert "the paper does not print" in report(found, [], [], Format.TABLE).splitlines()[1]
