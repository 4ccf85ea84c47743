"""Routing that is chosen for a model: recorded, with its statistics, assumed over a range, or none."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import moesim.experiment.routing as choice
from moesim.cli.main import main
from moesim.core.yaml_reader import read_yaml_value
from moesim.errors import ConfigError
from moesim.experiment.config import WorkloadConfig, parse_config
from moesim.experiment.report import _best, at_lifts, over_lifts, uncertain_orders
from moesim.experiment.resolve import Experiment
from moesim.experiment.routing import read_trace, routing_labels, routing_notes
from moesim.experiment.run import run_experiment
from moesim.metrics.naming import read_policy_label
from moesim.model import builtin_models, load_model
from moesim.policies.registry import POLICIES, make_policy
from moesim.testing.traces import synthetic_trace
from moesim.trace import trace_names
from moesim.trace.made import EVEN, ROUTING
from moesim.trace.synthesis import lift, parameter_names
from moesim.trace.synthesis.lift import assumed, expected, measured_lift, tabulate
from tests.experiment.experiment_kit import small

SIZES = {"requests": 2, "prompt": 3, "decode": 2, "scores": True}
OWN = ("mixtral-8x7b", "qwen2-57b-a14b", "deepseek-v2-lite", "gpt-oss-20b", "qwen3-30b-a3b")

needs_traces = pytest.mark.skipif(
    not {"mini-mixtral", "mini-qwen3"} <= set(trace_names()), reason="the shipped traces are not here"
)


@pytest.mark.parametrize("name", builtin_models())
def test_every_built_in_model_gets_routing_with_its_statistics_or_assumed_at_three_lifts(name: str):
    model = load_model(name)
    written, why = choice.choose_trace(model, SIZES)
    assert isinstance(written, dict) and {key: written[key] for key in SIZES} == SIZES
    if written["synthesize"] == "assumed":
        assert name not in OWN
        middle, low, high = written["lift"]
        assert low < middle < high and "assumed routing, 3 runs for each setting" in why and f"{middle:.2f}" in why
        written = {**written, "lift": middle}
    else:
        assert written["synthesize"] in parameter_names() and "synthetic, with the statistics of" in why
        assert name not in OWN or written["synthesize"] == name
    assert choice.fits(read_trace(choice.for_model(written, model), "test"), model)


@needs_traces
def test_miniatures_are_taken_for_signals_alone():
    model = load_model("qwen3-30b-a3b")
    assert choice.choose_trace(model, SIZES)[0] == {"synthesize": "qwen3-30b-a3b", **SIZES}
    name, why = choice.choose_trace(model, SIZES, signals=True)
    assert "routing of a miniature in the shape of qwen3-30b-a3b; it fits" in why
    assert name == "mini-qwen3" and "it has the signals that are asked for, not the model's hit rates" in why


@pytest.mark.parametrize(
    ("text", "found"),
    [("0.61@16", (0.61, 16)), (" 61 % @ 16 ", (0.61, 16)), (".5@1", (0.5, 1)), ("99.5%@999999", (0.995, 999_999)),
     ("1@3", None), ("100%@3", None), ("0@3", None), ("0.5@0", None), ("0.5", None), ("-0.5@3", None), ("0.5@3x", None)],
)  # fmt: skip
def test_a_hit_rate_is_a_share_or_percent_with_slots(text: str, found: tuple[float, int] | None):
    if found:
        assert choice.read_hit_rate(text, "x") == found
        return
    with pytest.raises(ConfigError, match=r"^x: expected a hit rate and the slots of each layer"):
        choice.read_hit_rate(text, "x")


def test_a_counted_hit_rate_fixes_the_lift_and_narrows_its_range():
    model = load_model("qwen3-30b-a3b")
    written, why = choice.choose_trace(model, SIZES, hit_rate="61%@16")
    assert written["lift"] == [2.39, 2.09, 2.69]  # ln(.61 / .39) - ln(16 / 112)
    assert "d = 2.39 (2.09 to 2.69) of 61 % hits with 16 of 128 experts" in why and "less uncertain" not in why
    assert choice.choose_trace(model, SIZES, hit_rate="61 % @ 16") == (written, why)
    assert "sizes from 12 to 64 are less uncertain" in choice.choose_trace(model, SIZES, hit_rate="61%@8")[1]
    for impossible in ("99.9%@1", "1%@32"):  # lifts of 11.8 and -3.5
        with pytest.raises(ConfigError, match=r"--hit-rate: expected .* % hits with .* of 128 experts, got"):
            choice.choose_trace(model, SIZES, hit_rate=impossible)
    for wrong in ("61@16", "0.61", "61%", "0%@16", "100%@16", "61%@0", "61%@128", "a@b"):
        with pytest.raises(ConfigError, match="--hit-rate: expected"):
            choice.choose_trace(model, SIZES, hit_rate=wrong)


def test_the_law_of_lifts_by_experts_and_vintage():
    for name, n_experts, ends in [
        ("mixtral-8x22b", 8, (0.0, 0.43, 1.03)), ("qwen3-next", 512, (1.6, 2.6, 3.6)), ("olmoe-1b-7b", 64, (1.43, 2.03, 2.63)),
        ("unheard-of", 64, (1.03, 2.03, 3.03)),
    ]:  # fmt: skip
        assert tuple(expected(name, n_experts))[:3] == ends


@pytest.mark.parametrize(
    ("n_experts", "top_k"),
    [(8, 2), (16, 1), (64, 6), *(pytest.param(n, 8, marks=pytest.mark.long) for n in (128, 256))],
)
def test_assumed_routing_has_the_lift_that_is_asked_for(n_experts: int, top_k: int):
    for wanted in (0.6, 1.6, 2.6):
        found = measured_lift(assumed(20, n_experts, top_k, wanted), 5)
        assert abs(found - wanted) < 0.25, (wanted, found)


def test_a_lift_is_of_the_nearest_sizes(monkeypatch: pytest.MonkeyPatch):
    asked: list[list[int]] = []
    monkeypatch.setattr(
        lift, "layer_hit_rates", lambda _, n, sizes, __: asked.append(sizes) or {"lru": np.full((len(sizes), 2), 0.5)}
    )
    for n_experts, top_k in ((60, 4), (12, 4), (5, 4)):
        measured_lift(assumed(2, n_experts, top_k, 1.6), 5, n_requests=1)
    assert asked == [[8, 15, 22], [6], [2]], "12.5, 25 and 37.5 % that have room for more than a token's"


@pytest.mark.long
def test_the_table_of_lifts_is_what_is_simulated():
    file = Path(lift.__file__).with_name(lift.FILE)
    shipped = read_yaml_value(file.read_text(), file.name)["table"]["lift"]
    np.testing.assert_allclose(tabulate(), shipped, rtol=0, atol=1e-3)


def test_assumed_routing_in_a_comparison_is_the_middle_with_the_range(capsys: pytest.CaptureFixture[str]):
    asked = ["compare", "--model", "{base: olmoe-1b-7b, expert_bits: 4}", "--cache", "0.25", "--prompt", "2", "--decode", "24"]
    asked += ["--set", "trace={synthesize: assumed, lift: [1.4, 2.0, 2.6], requests: 2, prompt: 2, decode: 24, scores: true}"]
    assert main([*asked, "--policies", "lru,lfu", "-o", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["policy"], row["trace"].split("-")[2]) for row in rows] == [
        (policy, f"lift{lift}") for lift in ("1.4", "2", "2.6") for policy in ("lru", "lfu")
    ]
    assert {row["source_label"] for row in rows} == {"assumed"} and "assumed routing (lift 2)" in rows[2]["notes"]
    folded = over_lifts(rows)
    assert [row["trace"] for row in folded] == [row["trace"] for row in rows[2:4]]
    lru = [row["decode_tokens_per_s"] for row in rows if row["policy"] == "lru"]
    assert lru == sorted(lru) and at_lifts(folded[0], "decode_tokens_per_s") == lru  # more locality, more hits, more speed
    assert main([*asked, "--policies", "lru,lfu"]) == 0
    table = capsys.readouterr().out
    assert f"{min(lru):.3g} to {max(lru):.3g}" in table and table.count("lru  ") == 1


@pytest.mark.parametrize("prompt", [True, False])
def test_even_routing_is_assumed_where_a_prompt_depends_on_it(prompt: bool):
    trace: Any = SimpleNamespace(model=ROUTING[EVEN], label="synthetic", origin="synthetic")
    workload: Any = SimpleNamespace(steps=SimpleNamespace(of_prefill=lambda: iter(["a step"] * prompt)))
    assert routing_labels(trace, workload) == ["assumed"] * prompt
    assert routing_notes(trace, workload, trace) == ["prompts use experts evenly" if prompt else "no routing assumed"]


def test_orders_that_change_with_the_lift_are_not_ranked():
    def row(policy: str, lift: float, speed: float) -> dict[str, object]:
        return {"policy": policy, "trace": f"synthetic-assumed-lift{lift:g}-2x4x1-1x0+9-seed0", "decode_tokens_per_s": speed}

    rows = [row("a", 1, 5.0), row("b", 1, 6.0), row("c", 1, 1.0), row("a", 2, 7.0), row("b", 2, 6.5), row("c", 2, 2.0)]
    rows += [row("a", 3, 9.0), row("b", 3, 7.0), row("c", 3, 3.0)]
    folded = over_lifts(rows)
    assert uncertain_orders(folded) == ["order not certain over the assumed lifts: a and b (cache 0 B)"]
    assert _best(folded) == []
    assert _best(over_lifts([one for one in rows if one["policy"] != "b"])) == [0]
    stopped = over_lifts([*rows[:3], *rows[3:5]])  # a run of c is missing, as after --fail-fast
    assert len(uncertain_orders(stopped)) == 1


def test_fixed_placements_at_batch_1_run_without_routing(capsys: pytest.CaptureFixture[str]):
    asked = ["compare", "--model", "{base: qwen1.5-moe, expert_bits: 4}", "--cache", "0.25", "--decode", "4", "-o", "json"]
    asked += ["--policies", "llama-cpp,all-cpu,kt-layer"]
    assert main([*asked, "--prompt", "0"]) == 0
    printed = capsys.readouterr()
    assert "does not depend on routing" in printed.err and "evenly" not in printed.err
    assert all("no routing assumed" in row["notes"] and row["source_label"] != "synthetic" for row in json.loads(printed.out))
    assert main([*asked, "--prompt", "3"]) == 0
    printed = capsys.readouterr()
    assert "a prompt is assumed to use experts evenly" in printed.err
    assert all("prompts use experts evenly" in row["notes"] for row in json.loads(printed.out))
    assert main([*asked, "--batch", "2"]) == 0
    assert "assumed routing, 3 runs" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", [*sorted(name for name in POLICIES if make_policy(name).routing_free), "exllamav3(cpu_layers=2)"]
)
def test_what_counts_as_fixed_decodes_as_fast_whatever_the_routing(name: str):
    policy = read_policy_label(name, "test")
    assert make_policy(policy).routing_free
    raw = {
        "model": {"base": "olmoe-1b-7b", "expert_bits": 4}, "hardware": "rtx3090-epyc7532", "cache": {"ratio": 1.0},
        "trace": {"synthesize": ["even", "assumed"], "requests": 1, "decode": 6}, "policies": [policy],
        "workload": {"prompt_tokens": 0, "decode_tokens": 6},
    }  # fmt: skip
    even, other = run_experiment(Experiment(parse_config(raw, "test"), "test")).rows
    assert even["error"] is None and even["makespan_ns"] == other["makespan_ns"]


@needs_traces
def test_compare_without_a_trace_for_several_models(capsys: pytest.CaptureFixture[str]):
    few = ["--policies", "fiddler", "--cache", "0.25", "--prompt", "4", "--decode", "2", "--batch", "1,2", "-o", "json"]
    assert main(["compare", "--model", "gpt-oss-20b,olmoe-1b-7b", *few]) == 0
    printed = capsys.readouterr()
    rows = json.loads(printed.out)
    models = {row["model"]: row["trace"].split("-")[1] for row in rows}
    assert models["gpt-oss-20b"] == "gpt" and len(printed.err.splitlines()) == 2


def test_an_experiment_without_a_trace_gets_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    raw = small(tmp_path, model="gpt-oss-20b", policies=["lru"])
    del raw["trace"]
    raw |= {"workload": {"batch_size": 1, "prompt_tokens": 2, "decode_tokens": 2}}
    file = tmp_path / "a.yaml"
    file.write_text(json.dumps(raw))
    assert main(["run", str(file), "--out", str(tmp_path / "out"), "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["trace"] == "synthetic-gpt-oss-20b-16x2+2-seed0"
    assert main(["run", str(file), "--out", str(tmp_path / "out"), "-o", "json"]) == 0
    assert "1 of 1 runs were in" in capsys.readouterr().err


@needs_traces
def test_what_compare_cannot_choose(capsys: pytest.CaptureFixture[str]):
    for options, words in [
        (["--model", "mixtrall"], "compare: --model: unknown model 'mixtrall'"),
        (
            ["--model", "qwen3-30b-a3b", "--trace", "mini-mixtral"],
            "choose one of that shape, such as mini-qwen3, or choose another",
        ),
        (
            ["--model", "gpt-oss-20b", "--trace", "mini-mixtral"],
            "make one of that shape up: trace: {synthesize: gpt-oss-20b, requests: 8, prompt: 64, decode: 64}",
        ),
        (["--model", "glm-4.5-air", "--trace", "mini-mixtral"], "make one of that shape up: trace: {synthesize: assumed, "),
        (["--model", "gpt-oss-20b", "--batch", "0"], "--batch: expected an integer of at least 1"),
        (["--trace", "mini-mixtral", "--hit-rate", "50%@2"], "expected trace or hit_rate, got both"),
        (["--trace", "{synthesize: assumed, decode: 64, lift: 9}"], "lift: expected a number from 0 to 4.5, got 9"),
        (["--trace", "{synthesize: assumed, decode: 64, hit_rate: 0.5}"], "expected hit_rate and slots together"),
        (["--trace", "{synthesize: mixtral-8x7b, decode: 64, lift: 1}"], "trace.lift: expected it with synthesize: assumed"),
        (["--trace", "{synthesize: even, decode: 64, shape: 3x4}"], "trace.shape: expected layers x experts x top_k"),
    ]:
        assert main(["compare", "--policies", "lru", "--cache", "0.25", *options]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert words in line, line


@needs_traces
@pytest.mark.parametrize(
    ("policies", "more", "name", "words"),
    [
        ("lru, hybrimoe-paper", [], "synthetic-mixtral-8x7b-16x4+2-seed0", "synthetic, with the statistics of mixtral-8x7b"),
        ("lru, prescope", [], "mini-mixtral", "it has the signals that are asked for"),
        (
            "prescope",
            ["predictors.learned=synthetic:0.94"],
            "synthetic-mixtral-8x7b-16x4+2-seed0",
            "synthetic, with the statistics of mixtral-8x7b",
        ),
        ("dali", ["predictors.*=learned"], "mini-mixtral", "it has the signals that are asked for"),
    ],
)
def test_mixtral_is_made_up_unless_a_policy_reads_what_only_recordings_have(
    policies: str, more: list[str], name: str, words: str, capsys: pytest.CaptureFixture[str]
):
    asked = ["--policies", policies, "--cache", "0.25", "--prompt", "4", "--decode", "2", "-o", "json"]
    assert main(["compare", *asked, *(part for one in more for part in ("--set", one))]) == 0
    printed = capsys.readouterr()
    rows = json.loads(printed.out)
    assert {row["trace"] for row in rows} == {name} and all(row["error"] is None for row in rows)
    (line,) = printed.err.splitlines()
    assert words in line
    assert not any("scores of the chosen" in str(row["notes"]) for row in rows)


@pytest.mark.parametrize("more", [{"closed": 4}, {"closed": 1, "drafts": {"n": 2, "accept": 0.5, "by": "ngram"}}])
def test_steps_of_served_requests_have_several_rows_which_depend_on_routing(tmp_path: Path, more: dict[str, Any]):
    raw = small(tmp_path, model="qwen1.5-moe", policies=["llama-cpp"])
    del raw["trace"]
    raw["workload"] = {"prompt_tokens": 4, "answer_tokens": 4, "n_requests": 4} | more
    (line,) = choice.choose_traces(raw, "test")
    assert raw["trace"]["synthesize"] == "assumed" and "assumed routing, 3 runs" in line


def test_too_many_tokens_are_not_made_up_for_other_seeds(tmp_path: Path):
    raw = small(tmp_path, model="gpt-oss-20b", policies=["lru"])
    del raw["trace"]
    raw["workload"] = {"batch_size": 1, "prompt_tokens": 8192, "decode_tokens": 64}
    choice.choose_traces(raw, "test")
    assert raw["trace"]["requests"] == 1
    raw["workload"]["batch_size"] = 10
    del raw["trace"]
    raw["workload"]["prompt_tokens"] = 64
    choice.choose_traces(raw, "test")
    assert raw["trace"]["requests"] == 20


def test_a_trace_of_the_model_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = load_model("mixtral-8x7b")
    (tmp_path / "traces").mkdir()
    monkeypatch.setattr("moesim.trace.trace.data_dirs", lambda kind: [tmp_path / kind])
    made = synthetic_trace(32, 8, 2, 2)
    for name, header in {
        "another": {"label": "measured", "model": "another"},
        "made-up": {"model": model.name},
        "miniature": {"label": "measured", "miniature": True, "miniature_of": model.name},
        "own": {"label": "measured", "model": model.name},
        "small": None,
    }.items():
        trace = synthetic_trace(2, 8, 2, 2) if header is None else replace(made, header={**made.header, **header})
        trace.write(tmp_path / "traces" / f"{name}.safetensors")
    (tmp_path / "traces" / "broken.safetensors").write_bytes(b"x" * 100)
    assert [name for name, _ in choice.traces_of_shape(model)] == ["own", "miniature", "made-up", "another"]
    assert choice.choose_trace(model, SIZES) == (
        "own", "trace own, routing of mixtral-8x7b; it fits mixtral-8x7b: 32 layers of 8 experts, top 2",
    )  # fmt: skip


def test_sizes_of_made_up_routing_suffice_for_every_workload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    raw = small(tmp_path, model="gpt-oss-20b", policies=["lru"])
    del raw["trace"]
    raw["workload"] = {"batch_size": [1, 3], "n_batches": 2, "prompt_tokens": [5, 9], "decode_tokens": 4}
    lines = choice.choose_traces(raw, "test")
    assert raw["trace"] == {"synthesize": "gpt-oss-20b", "requests": 16, "prompt": 9, "decode": 4, "scores": True}
    assert len(lines) == 1 and "scores: true}" in lines[0]
    experiment = Experiment(parse_config(raw, "test"), "test")
    assert len(experiment.specs) == 4
    many = WorkloadConfig(batch_size=40, prompt_tokens=5, decode_tokens=3)
    for most, requests in ((80 * 8, 80), (80 * 8 - 1, 40)):  # twice as many, if no more tokens are to be made up than that
        monkeypatch.setattr(choice, "MAX_TOKENS", most)
        assert choice._sizes(many) == {"requests": requests, "prompt": 5, "decode": 3, "scores": True}
    raw = {**small(tmp_path, model="gpt-oss-20b"), "workload": {}, "cache": {}}
    del raw["trace"]
    with pytest.raises(ConfigError, match="test: cache: expected ratio or budget"):
        choice.choose_traces(raw, "test")
