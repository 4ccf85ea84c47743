"""Experiments on synthetic routing that is made for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moesim.cli.main import main
from moesim.errors import ConfigError
from moesim.experiment.config import parse_config
from moesim.experiment.resolve import Experiment
from moesim.experiment.routing import read_trace
from moesim.trace.made import made_schema, read_made

MADE = {"synthesize": "mixtral-8x7b", "requests": 2, "prompt": 6, "decode": 5}


def experiment(**changes: Any) -> Experiment:
    raw = {
        "model": {"base": "mixtral-8x7b", "expert_bits": 4}, "hardware": "rtx3090-epyc7532", "trace": MADE,
        "workload": {"batch_size": 2}, "cache": {"ratio": 0.25}, "policies": ["lru"],
    }  # fmt: skip
    return Experiment(parse_config(raw | changes, "a.yaml"), "a.yaml")


def test_the_trace_is_made_as_asked_and_named_after_it():
    found = experiment(trace=MADE | {"scores": True})
    trace = found.trace(found.specs[0])
    assert (trace.label, len(trace.request), trace.n_layers, trace.n_experts) == ("synthetic", 22, 32, 8)
    assert trace.scores is not None
    (name,) = found.inputs()["traces"]
    assert name == "synthetic-mixtral-8x7b-2x6+5-seed0"


def test_a_policy_that_does_not_exist_is_refused_before_routing_is_made_up(monkeypatch: pytest.MonkeyPatch):
    def never(*_: Any) -> None:
        raise AssertionError("made up")

    monkeypatch.setattr("moesim.experiment.resolve.read_trace", never)
    raw = {"model": "mixtral-8x7b", "hardware": "rtx3090-epyc7532", "trace": MADE, "cache": {"ratio": 0.25}}
    config = parse_config(raw | {"policies": ["lru", "/"]}, "a.yaml")
    with pytest.raises(ConfigError, match=r"a.yaml: policies\[1\]: unknown policy '/'"):
        Experiment(config, "a.yaml", imports=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"promt": 3}, "a.yaml: trace: unknown key 'promt'; did you mean 'prompt'"),
        ({"requests": 0}, "a.yaml: trace.requests: expected an integer of at least 1, got 0"),
        ({"decode": "5"}, "a.yaml: trace.decode: expected an integer of at least 0, got '5'"),
        ({"scores": 1}, "a.yaml: trace.scores: expected true or false, got 1"),
        ({"synthesize": 3}, "a.yaml: trace.synthesize: expected the name of a parameter file, got 3"),
        ({"prompt": 0, "decode": 0}, "a.yaml: trace: "),
    ],
)
def test_wrong_ways_to_make_one(changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError) as error:
        read_trace(MADE | changes, "a.yaml")
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_the_schema_states_types_bounds_and_defaults_of_what_is_read():
    keys = made_schema()["properties"]
    for key, one in keys.items():
        assert one["description"]
        kind = one["anyOf"][0]
        if key != "synthesize":
            assert getattr(read_made({"synthesize": "x"}, "a.yaml"), key) == one.get("default")
        if kind["type"] == "integer":
            if key != "slots":  # which is for assumed routing alone
                assert getattr(read_made(MADE | {key: kind["minimum"]}, "a.yaml"), key) == kind["minimum"]
            with pytest.raises(ConfigError, match=f"trace.{key}: expected an integer of at least {kind['minimum']}"):
                read_made(MADE | {key: kind["minimum"] - 1}, "a.yaml")
        else:
            with pytest.raises(ConfigError, match=f"trace.{key}: expected"):
                read_made(MADE | {key: 1}, "a.yaml")


def test_runs_say_that_their_routing_is_synthetic(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    raw = experiment().config.model_dump(mode="json")
    path = tmp_path / "a.yaml"
    path.write_text(json.dumps({key: value for key, value in raw.items() if key != "timeline"}))
    assert main(["run", str(path), "--quick", "--out", str(tmp_path / "out"), "-o", "json"]) == 0, capsys.readouterr().err
    (row,) = json.loads(capsys.readouterr().out)
    assert row["routing"] == row["source_label"] == "synthetic"
    assert row["trace"] == "synthetic-mixtral-8x7b-2x6+4-seed0"
