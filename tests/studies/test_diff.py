"""Two runs side by side: everything adds up, and what differs is found."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moesim.cli.diff import diff as command
from moesim.cli.diff import text_of
from moesim.core.record_table import RecordTable
from moesim.core.table import Format
from moesim.errors import ConfigError
from moesim.experiment import run_experiment
from moesim.experiment.config import parse_config
from moesim.experiment.folder import Output
from moesim.experiment.resolve import Experiment
from moesim.experiment.runner import run_one
from moesim.metrics.breakdown import Breakdown
from moesim.metrics.causes import CAUSES
from moesim.metrics.critical_path import Window
from moesim.metrics.outcome import Outcome
from moesim.records import Records, StepRecord
from moesim.studies.diff import OUTSIDE, PHASES, Diff, find_run, most_different
from tests.experiment.experiment_kit import resolve, small, write_trace


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


def test_long_settings_are_whole(two: tuple[Outcome, Outcome]):
    a, b = two
    words = " ".join(f"word{n}" for n in range(40))
    longer = replace(b, row={**b.row, "notes": words})
    for form in (Format.TABLE, Format.MD):
        text = text_of(Diff.of(a, longer), "a", "b", form)
        assert [one for one in text.split() if one.startswith("word")] == words.split()
        assert form is Format.MD or max(map(len, text.splitlines())) < 200


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


def test_a_run_compared_with_itself_differs_in_nothing(two: tuple[Outcome, Outcome]):
    found = Diff.of(two[0], two[0])
    assert found.layers() == []
    assert all(entry.difference in (0, None) for entry in found.entries())


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


@pytest.mark.parametrize("text", ["", ":1", "nowhere", "nowhere:1"])
def test_no_folder(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="expected a result folder"):
        find_run(text)


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
