"""Routing that is chosen for a model: a trace of its shape, else made up by parameters of it, else a line with commands."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import moesim.experiment.routing as choice
from moesim.cli.main import main
from moesim.errors import ConfigError, TraceError
from moesim.experiment.config import WorkloadConfig, parse_config
from moesim.experiment.resolve import Experiment
from moesim.experiment.routing import read_trace
from moesim.model import builtin_models, load_model
from moesim.testing.traces import synthetic_trace
from moesim.trace import trace_names
from tests.experiment.experiment_kit import small

SIZES = {"requests": 2, "prompt": 3, "decode": 2}
MADE_UP = ("gpt-oss-20b", "qwen2-57b-a14b", "mixtral-8x7b")
NONE = ("phi-3.5-moe", "qwen1.5-moe", "olmoe", "gpt-oss-120b")
SHIPPED = {
    "deepseek-v2-lite": "mini-deepseek-v2-lite", "moonlight-16b-a3b": "mini-deepseek-v2-lite", "qwen3-30b-a3b": "mini-qwen3",
}  # fmt: skip

needs_traces = pytest.mark.skipif(
    not {"mini-mixtral", "mini-qwen3"} <= set(trace_names()), reason="the shipped traces are not here"
)


@needs_traces
@pytest.mark.parametrize("name", builtin_models())
def test_every_built_in_model_gets_routing_or_a_line_with_commands(name: str):
    model = load_model(name)
    if name in NONE:
        with pytest.raises(TraceError, match=rf"compare: expected routing of {name} .* got none, .*'moesim trace record MODEL"):
            choice.choose_trace(model, SIZES, "compare")
        return
    written, why = choice.choose_trace(model, SIZES, "compare")
    assert written == SHIPPED.get(name, {"synthesize": name, **SIZES})
    assert choice.fits(read_trace(written, "test"), model)
    assert (name in MADE_UP) == ("made up" in why)
    assert choice.shape_of(model) in why or "mini-mixtral flatters caches" in why


@needs_traces
@pytest.mark.parametrize(("model", "name"), [("qwen3-30b-a3b", "mini-qwen3"), ("moonlight-16b-a3b", "mini-deepseek-v2-lite")])
def test_compare_without_a_trace_says_which_it_took(model: str, name: str, capsys: pytest.CaptureFixture[str]):
    few = ["--policies", "fiddler", "--cache", "0.25", "--decode", "2", "-o", "json"]
    assert main(["compare", "--model", model, *few]) == 0
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert line.startswith(f"trace {name}, routing of a miniature in the shape of ") and f"it fits {model}: " in line
    (row,) = json.loads(printed.out)
    of = " of deepseek-v2-lite" if model.startswith("moonlight") else ""
    assert row["trace"] == name and str(row["notes"]).split(", ")[0] == f"miniature{of}"


@needs_traces
def test_compare_without_a_trace_for_several_models(capsys: pytest.CaptureFixture[str]):
    few = ["--policies", "fiddler", "--cache", "0.25", "--prompt", "4", "--decode", "2", "--batch", "1,2", "-o", "json"]
    assert main(["compare", "--model", "gpt-oss-20b,deepseek-v2-lite", *few]) == 0
    printed = capsys.readouterr()
    rows = json.loads(printed.out)
    assert {(row["model"], row["trace"]) for row in rows} == {
        ("gpt-oss-20b", "synthetic-gpt-oss-20b-16x4+2-seed0"), ("deepseek-v2-lite", "mini-deepseek-v2-lite"),
    }  # fmt: skip
    assert len(printed.err.splitlines()) == 2 and "synthetic routing of gpt-oss-20b" in rows[0]["notes"]


@needs_traces
def test_what_compare_cannot_choose(capsys: pytest.CaptureFixture[str]):
    for options, words in [
        (["--model", "olmoe"], "compare: expected routing of olmoe (16 layers of 64 experts, top 8), got none"),
        (["--model", "mixtrall"], "compare: --model: unknown model 'mixtrall'"),
        (
            ["--model", "qwen3-30b-a3b", "--trace", "mini-mixtral"],
            "choose one of that shape, such as mini-qwen3, or choose another",
        ),
        (
            ["--model", "gpt-oss-20b", "--trace", "mini-mixtral"],
            "make one of that shape up: trace: {synthesize: gpt-oss-20b, requests:",
        ),
        (["--model", "olmoe", "--trace", "mini-mixtral"], "import it with 'moesim trace import FILE --model olmoe"),
        (["--model", "gpt-oss-20b", "--batch", "0"], "--batch: expected an integer of at least 1"),
    ]:
        assert main(["compare", "--policies", "lru", "--cache", "0.25", *options]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert words in line, line


@needs_traces
@pytest.mark.parametrize(
    ("policies", "more", "name", "words"),
    [
        ("lru, hybrimoe-paper", [], "synthetic-mixtral-8x7b-16x4+2-seed0", "made up with the statistics of mixtral-8x7b"),
        ("lru, prescope", [], "mini-mixtral", "it flatters caches, but has the signals that are needed"),
        (
            "prescope",
            ["predictors.learned=synthetic:0.94"],
            "synthetic-mixtral-8x7b-16x4+2-seed0",
            "mini-mixtral flatters caches",
        ),
        ("dali", ["predictors.*=learned"], "mini-mixtral", "has the signals that are needed"),
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
    assert choice.choose_trace(model, SIZES, "t") == (
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
