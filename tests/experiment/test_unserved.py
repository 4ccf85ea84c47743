"""A policy that a trace cannot serve is a row that says why and how to go on; the others run, and not on fewer requests."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from moesim.cli.main import main
from moesim.errors import WorkloadError
from moesim.experiment import run_experiment
from moesim.experiment.routing import SCORES, explain, lacking, served
from moesim.policies.registry import POLICIES, make_policy
from moesim.testing.traces import synthetic_trace
from moesim.trace import Trace
from tests.experiment.experiment_kit import resolve, write_trace, write_yaml

COUNT = "count it from tokens that are then left out"
CALIBRATE = "moesim trace calibrate 'a b/t.x'"
ANOTHER = (
    "let another source answer, such as one counted from routing: predictors: {'*': coactivation}, or "
    "--set 'predictors.*=coactivation'"
)
WIDE = {"prompt_tokens": 6, "decode_tokens": 3, "batch_size": 2, "n_batches": 2}


def bare_trace(folder: Path, *, weights: bool = True) -> Path:
    """A trace as an import gives it, 8 requests of Mixtral's shape."""
    found = synthetic_trace(32, 8, 2, 8, 6, 4)
    return (found if weights else replace(found, weights=None)).write(folder / "bare.safetensors")


def partly(folder: Path, covered: int) -> Path:
    """A trace with tables, whose signal ``residual`` covers the first requests only."""
    whole = Trace.read(write_trace(folder / "whole.safetensors"))
    n = covered * 10
    signals = {name: replace(s, rows=s.rows[:n], scores=s.scores[:n]) for name, s in whole.signals.items() if name == "residual"}
    return replace(whole, signals=signals).write(folder / "partly.safetensors")


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_policy_that_lacks_something_is_a_row_and_the_others_run(tmp_path: Path, jobs: int):
    experiment = resolve(tmp_path, trace=str(bare_trace(tmp_path)), policies=["lru", "fiddler", "dali", "on-demand"])
    rows = {row["policy"]: row for row in run_experiment(experiment, jobs=jobs).rows}
    assert list(rows) == ["lru", "fiddler", "dali", "on-demand"]
    assert [name for name, row in rows.items() if row["error"] is None] == ["lru", "on-demand"]
    assert "policy fiddler needs table:activation_frequency; trace '" in str(rows["fiddler"]["error"])
    assert "--set 'predictors.residual=coactivation'" in str(rows["dali"]["error"])
    assert "tpot_mean_ns" not in rows["dali"] and rows["lru"]["tpot_mean_ns"]


def test_what_cannot_be_served_does_not_narrow_the_requests_of_the_others(tmp_path: Path):
    trace = str(partly(tmp_path, 4))
    alone = resolve(tmp_path, trace=trace, policies=["lru"], workload=WIDE)
    beside = resolve(tmp_path, trace=trace, policies=["lru", "dali"], workload=WIDE)  # which is served: four requests carry it
    unserved = resolve(tmp_path, trace=trace, policies=["lru", {"name": "dali", "prefetch_source": "gate_next1"}], workload=WIDE)
    assert [experiment.signals(experiment.specs[0]) for experiment in (alone, beside, unserved)] == [set(), {"residual"}, set()]
    drawn = [experiment.workload(experiment.specs[0]).requests for experiment in (alone, beside, unserved)]
    assert drawn[0] == drawn[2] and set(drawn[1]) == {0, 1, 2, 3}
    # A policy that needs a signal that is there, and a table that is not, narrows nothing either.
    mixed = replace(Trace.read(trace), tables={}).write(tmp_path / "mixed.safetensors")
    prescope = {"name": "prescope", "predictor": "residual"}
    lacking_a_table = resolve(tmp_path, trace=str(mixed), policies=["lru", prescope], workload=WIDE)
    assert lacking_a_table.signals(lacking_a_table.specs[0]) == set()
    assert lacking_a_table.specs[1].refusal is not None


def test_a_workload_too_large_for_a_signal_refuses_only_who_needs_it(tmp_path: Path):
    trace = str(partly(tmp_path, 3))
    workload = {**WIDE, "batch_size": [1, 2]}
    experiment = resolve(tmp_path, trace=trace, policies=["lru", "dali"], workload=workload)
    assert [type(spec.refusal) for spec in experiment.specs] == [type(None)] * 3 + [WorkloadError]
    assert [experiment.signals(spec) for spec in experiment.specs] == [{"residual"}] * 2 + [set()] * 2
    rows = run_experiment(experiment).rows
    assert "3 of the 8 recorded qualify" in str(rows[3]["error"]) and "set workload.reuse: shifted" in str(rows[3]["error"])
    assert "2 requests of the 3 with signal residual" in str(rows[0]["notes"]) and "4 requests of 8" in str(rows[2]["notes"])
    # What no request suffices for is wrong for all, and nothing runs.
    with pytest.raises(WorkloadError, match=r"small.yaml: workload: expected 32 distinct requests"):
        resolve(tmp_path, trace=trace, policies=["lru", "dali"], workload={**WIDE, "batch_size": 16})


def test_the_table_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = write_yaml(tmp_path, trace=str(bare_trace(tmp_path)), policies=["lru", "fiddler"])
    assert main(["run", str(path), "--out", str(tmp_path / "out")]) == 1
    printed = capsys.readouterr()
    assert printed.out.splitlines()[2].split() == ["fiddler", "failed"]
    assert printed.out.splitlines()[-1] == "failed: fiddler: policy fiddler needs table:activation_frequency"
    assert re.search(r"^moesim: run 1 \(fiddler, .*\): policy fiddler needs .*; count it from tokens", printed.err, re.MULTILINE)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [run["error"] is None for run in summary["runs"]] == [True, False]
    assert main(["run", str(path), "--out", str(tmp_path / "out"), "--dry-run"]) == 0
    assert "cannot run: run 1 (fiddler, cache 0.25, batch 1): policy fiddler needs" in capsys.readouterr().out
    assert main(["run", str(path), "--out", str(tmp_path / "out")]) == 1
    assert "1 of 2 runs were in" in capsys.readouterr().err


def test_the_command_that_a_message_names_is_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Whatever is missing, typing what the messages say makes every policy run."""
    monkeypatch.chdir(tmp_path)
    trace, options, n_typed = str(bare_trace(tmp_path, weights=False)), {}, 0
    policies = ["lru", "fiddler", "hybrimoe-code", "daop-paper", "dali", "prescope", "hybrimoe-paper"]
    workload = {"prompt_tokens": 6, "decode_tokens": 2}
    for _ in range(4):
        experiment = resolve(tmp_path, trace=trace, policies=policies, workload=workload, predictors=options)
        refusals = {spec.policy_name: str(spec.refusal) for spec in experiment.specs if spec.refusal is not None}
        if not refusals:
            break
        texts = " ".join(refusals.values())
        options |= dict(found.split("=") for found in re.findall(r"--set 'predictors\.([^']+)'", texts))
        for command in re.findall(r"moesim (trace calibrate \S+ (?:--\S+ \S+ )+--out \S+)", texts)[:1]:
            words = shlex.split(command)
            n_typed += 1
            assert main(words) == 0
            trace = str(tmp_path / words[-1])
    assert not refusals and n_typed == 2  # tables, and weights
    results = run_experiment(experiment)
    assert [row["policy"] for row in results.rows if row["error"] is None] == policies


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_whatever_a_policy_needs_the_message_names_a_way(name: str):
    bare = replace(synthetic_trace(4, 8, 2, 4), weights=None)
    missing = lacking(bare, make_policy(name).needs)
    assert missing == sorted(make_policy(name).needs - {"oracle:routing"})
    if missing:
        text = explain(bare, "t", missing)
        assert text.startswith(f"needs {', '.join(missing)}; trace 't' has none; ")
        for kind, way in (
            ("table:", "trace calibrate t --share"),
            ("signal:", "--set 'predictors."),
            ("scores", "--weights uniform"),
        ):
            assert (way in text) == any(need.startswith(kind) for need in missing)


def test_one_command_adds_all_that_can_be_added():
    bare = replace(synthetic_trace(4, 8, 2, 4), weights=None)
    text = explain(bare, "t", ["scores-or-weights", "table:coactivation"])
    assert text.endswith(
        "count it from tokens that are then left out and make up weights that nobody recorded: moesim trace calibrate t "
        "--share 0.25 --weights uniform --out t-calibrated-uniform.safetensors"
    )
    assert "--scores uniform" in explain(bare, "t", ["scores"])


@pytest.mark.parametrize(
    ("n_requests", "signals", "missing", "ways"),
    [
        (1, [], ["table:coactivation"], [f"{COUNT}: {CALIBRATE} --share 0.25 --hold-back ends --out t-calibrated"]),
        (2, [], ["table:coactivation"], [f"{COUNT}: {CALIBRATE} --share 0.25 --out t-calibrated"]),
        (2, [], ["scores"], [f"make up weights that nobody recorded: {CALIBRATE} --scores uniform --out t-uniform"]),
        (2, [], ["scores", "table:mine"], ["choose a trace that has it"]),
        (2, [], ["signal:x"], [ANOTHER.replace("*", "x")]),
        (2, [], ["signal:x", "signal:y", "table:mine"], ["choose a trace that has it", ANOTHER]),
        (2, ["residual"], ["signal:y"], ["unknown signal 'y'; known: residual", ANOTHER.replace("*", "y")]),
        (2, [], ["signal:embedding"], ["moesim trace calibrate makes embedding of one recorded with --keep-embeddings",
                                       f"or {ANOTHER}".replace("*", "embedding")]),
    ],
)  # fmt: skip
def test_the_ways_out_in_full(n_requests: int, signals: list[str], missing: list[str], ways: list[str]):
    trace = replace(synthetic_trace(2, 8, 2, n_requests, signals=dict.fromkeys(signals, 0.5)), weights=None)
    told = explain(trace, "a b/t.x", missing).replace(".safetensors", "")
    assert told == f"needs {', '.join(missing)}; trace 'a b/t.x' has none; {'; '.join(ways)}"


def test_policies_that_a_trace_cannot_serve_are_grouped_by_the_way_out():
    bare = replace(synthetic_trace(4, 8, 2, 4), weights=None)
    needs = {name: make_policy(name).needs - {"oracle:routing"} for name in POLICIES}
    first, *others = served(bare, "t")
    assert first == f"serves {sum(not of for of in needs.values())} of {len(POLICIES)} policies"
    groups = [
        {name: {one for one in of if one.startswith("signal:") == signal} for name, of in needs.items()} for signal in (0, 1)
    ]
    assert others == [
        f"{', '.join(name for name, of in group.items() if of)}: {explain(bare, 't', sorted(set().union(*group.values())))}"
        for group in groups
    ]
    assert others[0] != others[1] and served(synthetic_trace(4, 8, 2, 4), "t")[0] != first


def test_needs_that_no_command_can_serve_are_named():
    bare = synthetic_trace(4, 8, 2, 4)
    assert lacking(bare, SCORES) == ["scores"]
    assert "moesim trace record --scores" in explain(bare, "t", ["scores"])
    assert explain(bare, "t", ["table:mine"]).endswith("choose a trace that has it")
    assert explain(bare, "t", ["weather"]).endswith("choose a trace that has it")
    some = synthetic_trace(4, 8, 2, 4, calibration=True)
    del some.tables["activation_frequency_decode"]
    assert "has nothing of the kind; choose another" in explain(some, "t", ["table:activation_frequency_decode"])
