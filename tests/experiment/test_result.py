"""Result folders: complete or not at all, and the same bytes for the same inputs."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import yaml

from moesim.core.files import FILE
from moesim.errors import ConfigError
from moesim.experiment import folder, run_experiment
from moesim.experiment.config import parse_config
from moesim.experiment.folder import Output, describe
from moesim.experiment.store import DATASET, INPUTS, RECORDS, SmallInputs, read_summary
from moesim.metrics.machine import Machine
from moesim.testing import tiny_machine
from tests.experiment.experiment_kit import resolve, small

RUN = {"run": 0, "policy": "lru"}

EVERYTHING = {"plots": ["decode_speed", "hit_rate", "breakdown", "gantt"], "frames": True, "cache": {"ratio": [0.25, 0.5]}}


def write(folder: Path, out: Path, jobs: int = 1, **changes) -> Path:
    experiment = resolve(folder, **changes)
    output = Output(experiment, out)
    output.write(run_experiment(experiment, jobs=jobs, keep=output.kept.get, folder=out))
    return out


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def shown(folder: Path) -> list[str]:
    """Name the files of a result, but for those that grow run by run."""
    return [name for name in content(folder) if name.split("/")[0] not in (DATASET, RECORDS)]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("result")
    return write(folder, folder / "out", **EVERYTHING)


def test_the_folder_holds_what_was_asked_for(result: Path):
    names = ("breakdown", "decode_speed", "gantt", "hit_rate")
    plots = [f"plots/{name}.{kind}" for name in names for kind in ("csv", "pdf", "png", "txt")]
    frames = ["frames/layers.parquet", "frames/steps.parquet"]
    rest = ["runs.parquet", "summary.json", "timeline.json"]
    assert shown(result) == [FILE, "config.resolved.yaml", *frames, INPUTS, *plots, *rest]
    assert len(list((result / DATASET).iterdir())) == 1
    assert len(list((result / RECORDS).iterdir())) == 4


def test_the_same_inputs_give_the_same_bytes_with_any_number_of_processes(result: Path):
    again = write(result.parent, result.parent / "again", jobs=2, **EVERYTHING)
    first, second = content(result), content(again)
    assert list(first) == list(second)
    assert [name for name in first if first[name] != second[name]] == []


@pytest.mark.parametrize(
    ("content", "got"),
    [
        ([1], "no runs in it"), ({}, "no runs in it"), ({"runs": {}}, "no runs in it"), ({"runs": [[]]}, "runs[0] is no mapping"),
        ({"runs": [RUN, {"policy": "lru"}]}, "runs[1] has no number of its run or no policy"),
        ({"runs": [RUN | {"run": True}]}, "runs[0] has no number of its run or no policy"),
        ({"runs": [RUN | {"policy": None}]}, "runs[0] has no number of its run or no policy"),
        ({"runs": [RUN, RUN | {"x": [1]}]}, "runs[1].x is no plain value"), ({"runs": [RUN | {"x": None, "y": 0.5}]}, None),
    ],
)  # fmt: skip
def test_what_is_no_summary_is_refused_with_its_place(content: Any, got: str | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("moesim.experiment.store.read_verified", lambda path: json.dumps(content).encode())
    if got is None:
        assert read_summary(Path("out")) == content
        return
    with pytest.raises(ConfigError) as error:
        read_summary(Path("out"))
    assert str(error.value) == f"out/summary.json: expected the summary of a result, got: {got}; run it again"


@pytest.mark.parametrize(
    ("written", "below"),
    [("data/a.safetensors", "data/a.safetensors"), ("a.safetensors", "a.safetensors"), ("data/a", "data/a"),
     ("a", "traces/a.safetensors"), ("../a.safetensors", "../a.safetensors")],
)  # fmt: skip
def test_where_the_trace_of_a_result_may_be(written: str, below: str):
    name, own = Path(below).name, Path("/x/y")
    usual = [written, own / below, Path("/x") / below, Path("/") / below]
    assert [*folder._places(written, own, None)] == [*usual, own / name, Path("/x") / name]
    at = Path("/inputs")
    assert [*folder._places(written, own, at)] == [at / below, at / name, *usual, at / name, own / name, Path("/x") / name]


def test_a_trace_that_was_an_object_may_be_any_of_the_inputs():
    there: Any = SimpleNamespace(glob=lambda pattern: [Path(f"{name}{pattern[1:]}") for name in "bca"])
    assert [*folder._places("given:1", Path("/x"), there)] == [Path(f"{name}.safetensors") for name in "abc"]
    assert [*folder._places("given:1", Path("/x"), None)] == []


def test_runs_and_summary_agree(result: Path):
    frame = pd.read_parquet(result / "runs.parquet")
    rows = read_summary(result)["runs"]
    assert len(frame) == len(rows) == 4
    assert frame["policy"].tolist() == [row["policy"] for row in rows]
    assert frame["makespan_ns"].tolist() == [row["makespan_ns"] for row in rows]
    assert frame["makespan_ns"].dtype == "int64"


def test_the_resolved_configuration_names_every_input_by_hash(result: Path):
    resolved = yaml.safe_load((result / "config.resolved.yaml").read_text())
    assert set(resolved["inputs"]) == {"models", "hardware", "traces"}
    for kind in resolved["inputs"].values():
        for entry in kind.values():
            assert len(entry["sha256"]) == 64
    assert resolved["key"] == read_summary(result)["key"]
    assert resolved["versions"]["simpy"]
    assert resolved["experiment"]["workload"]["batch_size"] == 1


def test_frames_add_up_to_the_runs(result: Path):
    runs = pd.read_parquet(result / "runs.parquet").set_index("run")
    steps = pd.read_parquet(result / "frames" / "steps.parquet")
    layers = pd.read_parquet(result / "frames" / "layers.parquet")
    assert (steps.groupby("run")["end"].max() == runs["makespan_ns"]).all()
    assert (layers.groupby("run")["n_active"].sum() == runs["n_lookups"]).all()
    hits = layers.groupby("run")["n_hits"].sum() / layers.groupby("run")["n_active"].sum()
    assert hits.tolist() == pytest.approx(runs["hit_rate"].tolist())
    assert len(layers) == 32 * len(steps)


def test_the_key_follows_what_decides_the_results_and_nothing_else(tmp_path: Path):
    key = describe(resolve(tmp_path))["key"]
    assert describe(resolve(tmp_path, name="other", plots=["hit_rate"], frames=True, output="x"))["key"] == key
    assert describe(resolve(tmp_path, workload={"prompt_tokens": 6, "decode_tokens": 2}))["key"] != key
    assert describe(resolve(tmp_path, model="mixtral-8x7b"))["key"] != key
    hardware = {"base": "rtx3090-epyc7532", "devices": {"gpu0": {"launch_us": 1}}}
    assert describe(resolve(tmp_path, hardware=hardware))["key"] != key


def test_a_row_has_a_machine_only_if_its_name_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    machines = {"one": tiny_machine(), "same": tiny_machine(), "two": tiny_machine(2)}
    monkeypatch.setattr(folder, "load_hardware", lambda written, place: machines[written])

    def named(*written: str, name: str = "tiny") -> object:
        config = parse_config(small(tmp_path, hardware=list(written)), "x")
        return folder._machine(config, "x", SmallInputs(), {"hardware": name})

    assert named("one") == named("one", "same") == Machine.of(machines["one"]) != Machine.of(machines["two"])
    assert named("one", "two") is named("two", "one") is named("one", name="other") is None
