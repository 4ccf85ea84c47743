"""Calibration tables from held-back tokens of a recording, and weights and scores that nobody recorded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moesim.trace.files
import moesim.trace.stats.calibration
from moesim.cli.main import main
from moesim.errors import InputError, TraceError
from moesim.experiment import run_experiment
from moesim.testing.traces import synthetic_trace
from moesim.trace import GateInputs, Trace
from moesim.trace.calibrating import Additions, extend
from moesim.trace.derived import subset
from moesim.trace.formats.tabular_export import export_csv
from moesim.trace.stats.calibration import Counts, map_rows
from moesim.trace.stats.report import report
from tests.experiment.experiment_kit import resolve, write_trace
from tests.helpers_shared import gpt_oss, shared_file
from tests.trace import import_kit as kit

LAYERS, EXPERTS = 3, 6
PAIRS = np.ones((LAYERS, EXPERTS, EXPERTS), np.float32)


def recorded(n_requests: int = 8, **changes: Any) -> Trace:
    """A trace as an import gives it: no tables, no signals; requests of 4, 5, 6 ... rows of prompt and 3 of decode."""
    prompt = changes.pop("prompt", [4 + r for r in range(n_requests)])
    decode = changes.pop("decode", 3)
    trace = synthetic_trace(LAYERS, EXPERTS, 2, n_requests, prompt, decode)
    names = [f"r{r}" for r in range(n_requests)]
    header = {**trace.header, "label": "measured", "requests": names, "absent": ["calibration tables", "weights"]}
    return replace(trace, **{"header": header, "weights": None} | changes)


def rows_of(trace: Trace, request: int) -> slice:
    first = int(trace.requests.first_row[request])
    return slice(first, first + int(trace.requests.n_prompt[request] + trace.requests.n_decode[request]))


def with_everything() -> Trace:
    trace = synthetic_trace(LAYERS, EXPERTS, 2, 5, [3, 4, 2, 5, 3], 3, scores=True, calibration=True, signals={"gate_next1": 0.8})
    rows = np.array([0, 2, 7, 8, 20], np.int32)
    inputs = GateInputs(rows, np.arange(5 * LAYERS * 4, dtype=np.float16).reshape(5, LAYERS, 4))
    signal = trace.signals["gate_next1"]
    part = replace(signal, rows=signal.rows[5:], scores=signal.scores[5:], ids=None if signal.ids is None else signal.ids[5:])
    return replace(trace, inputs=inputs, signals={"gate_next1": part}, header={**trace.header, "requests": list("abcde")})


@pytest.mark.parametrize("limit", [0, 2**30], ids=["on-disk", "in-memory"])
def test_a_subset_keeps_what_was_recorded(limit: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(moesim.trace.files, "_IN_MEMORY_BYTES", limit)
    whole = with_everything()
    part = subset(whole, [1, 4], folder=tmp_path)
    part.check()
    assert list(tmp_path.iterdir()) == []
    rows = np.concatenate([np.arange(whole.n_rows)[rows_of(whole, request)] for request in (1, 4)])
    assert whole.scores is not None and whole.inputs is not None and part.inputs is not None
    for name in ("experts", "weights", "scores", "phase", "position"):
        np.testing.assert_array_equal(getattr(part, name), getattr(whole, name)[rows])
    assert (part.request == np.repeat([0, 1], [7, 6])).all() and part.header["requests"] == ["b", "e"]
    np.testing.assert_array_equal(rows[part.inputs.rows], np.intersect1d(rows, whole.inputs.rows))
    np.testing.assert_array_equal(part.inputs.values, whole.inputs.values[np.isin(whole.inputs.rows, rows)])
    signal, mine = whole.signals["gate_next1"], part.signals["gate_next1"]
    np.testing.assert_array_equal(rows[mine.rows], np.intersect1d(rows, signal.rows))
    np.testing.assert_array_equal(mine.scores, signal.scores[np.isin(signal.rows, rows)])
    assert set(part.tables) == set(whole.tables)


def test_a_subset_may_end_earlier():
    whole = with_everything()
    part = subset(whole, [0, 3], [2, 7])
    assert part.requests.n_prompt.tolist() == [2, 5] and part.requests.n_decode.tolist() == [0, 2]
    np.testing.assert_array_equal(part.experts[2:], whole.experts[rows_of(whole, 3)][:7])


def test_requests_are_held_back_counted_and_gone():
    whole = recorded()
    found = extend(whole, Additions(share=0.25, seed=3), "t")
    found.check()
    held = sorted(np.random.default_rng(3).permutation(8)[:2].tolist())
    kept = [request for request in range(8) if request not in held]
    assert found.header["requests"] == [f"r{request}" for request in kept]
    np.testing.assert_array_equal(found.experts, np.concatenate([whole.experts[rows_of(whole, r)] for r in kept]))
    rows = np.concatenate([np.arange(whole.n_rows)[rows_of(whole, r)] for r in held])
    for name, chosen in (("activation_frequency", rows), ("activation_frequency_decode", rows[whole.phase[rows] == 1])):
        wanted = [[np.mean(whole.experts[chosen, layer] == expert) for expert in range(EXPERTS)] for layer in range(LAYERS)]
        np.testing.assert_allclose(found.tables[name], wanted, rtol=1e-6)
    pairs = np.zeros((LAYERS, EXPERTS, EXPERTS))
    for row in rows:
        for layer in range(LAYERS - 1):
            for i in whole.experts[row, layer]:
                pairs[layer, i, whole.experts[row, layer + 1]] += 1
    np.testing.assert_array_equal(found.tables["coactivation"], pairs)
    assert found.remarks == ("calibrated on 2 held-back requests (seed 3)",)
    assert [entry["name"] for entry in found.header["calibration_requests"]] == [f"r{request}" for request in held]
    assert [entry["request"] for entry in found.header["calibration_requests"]] == held
    assert found.header["absent"] == ["calibration table expert_maps", "calibration table residual", "weights"]
    facts = {"what": "requests", "share": 0.25, "seed": 3, "n": 2, "of": 8, "rows": len(rows)}
    assert found.header["held_back"] == facts


def test_the_tables_are_those_that_the_recorder_makes():
    counted = {"activation_frequency", "activation_frequency_decode", "activation_matrices", "coactivation", "residual"}
    assert set(Counts(2, 4, 3).tables()) == counted
    rows = np.arange(recorded().n_rows, dtype=np.int32)
    inputs = GateInputs(rows, np.random.default_rng(0).normal(size=(len(rows), LAYERS, 4)).astype(np.float16))
    whole = recorded(inputs=inputs)
    found = extend(whole, Additions(share=0.5), "t")
    assert set(found.tables) == counted
    assert "calibration table" not in " ".join(found.header["absent"]).replace("calibration table expert_maps", "")
    held = np.concatenate([rows[rows_of(whole, entry["request"])] for entry in found.header["calibration_requests"]])
    means = inputs.values[held].astype(np.float64).mean(axis=0)
    np.testing.assert_allclose(found.tables["residual"][:-1], np.diff(means, axis=0), rtol=2e-3, atol=1e-3)
    assert not found.tables["residual"][-1].any()
    assert found.inputs is not None and len(found.inputs.rows) == found.n_rows


def test_each_held_back_request_has_its_activation_matrix():
    whole = recorded()
    found = extend(whole, Additions(share=0.5, seed=1), "t")
    held = [entry["request"] for entry in found.header["calibration_requests"]]
    matrices = found.tables["activation_matrices"]
    assert matrices.shape == (LAYERS, 4, EXPERTS) and matrices.dtype == np.float32
    for place, request in enumerate(held):
        rows = whole.experts[rows_of(whole, request)]
        wanted = [[np.count_nonzero(rows[:, layer] == expert) for expert in range(EXPERTS)] for layer in range(LAYERS)]
        np.testing.assert_array_equal(matrices[:, place], wanted)


def test_expert_maps_are_the_scores_of_single_iterations():
    trace = synthetic_trace(LAYERS, EXPERTS, 2, 4, 5, 3, scores=True)
    found = extend(trace, Additions(share=0.5), "t")
    assert trace.scores is not None
    rows = [8 * entry["request"] + row for entry in found.header["calibration_requests"] for row in (4, 5, 6, 7)]
    np.testing.assert_array_equal(found.tables["expert_maps"], trace.scores[rows].swapaxes(0, 1))
    weighed = replace(trace, scores=None)
    of_weights = extend(weighed, Additions(share=0.5), "t").tables["expert_maps"]
    for place, row in enumerate(rows):
        for layer in range(LAYERS):
            wanted = dict(zip(trace.experts[row, layer].tolist(), np.asarray(trace.weights)[row, layer].tolist(), strict=True))
            assert of_weights[layer, place].tolist() == [wanted.get(expert, 0) for expert in range(EXPERTS)]
    assert "expert_maps" not in extend(replace(weighed, weights=None), Additions(share=0.5), "t").tables


def test_many_iterations_are_thinned_evenly(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(moesim.trace.stats.calibration, "MOST", 3)
    assert map_rows([2, 1], [5, 3]) == [(0, 1), (0, 3), (1, 0)]  # of (0, 1) to (0, 4) and (1, 0) to (1, 2)
    counts = Counts(1, 2, 0)
    for _ in range(5):
        counts.add(np.zeros((2, 1, 1), np.uint8), 1)
    assert counts.tables()["activation_matrices"].shape == (1, 3, 2)


def test_a_trace_with_older_tables_gets_the_newer_ones_beside_them(tmp_path: Path):
    trace = synthetic_trace(LAYERS, EXPERTS, 2, 6, scores=True, calibration=True)
    older = {name: table for name, table in trace.tables.items() if name not in ("activation_matrices", "expert_maps")}
    before = replace(trace, tables=older, header={**trace.header, "calibration_requests": [{"name": "elsewhere"}]})
    found = extend(before, Additions(share=0.5), "t")
    found.check()
    assert set(found.tables) == set(trace.tables) and found.n_requests == 3
    for name, table in older.items():
        np.testing.assert_array_equal(found.tables[name], table)
    assert found.tables["activation_matrices"].shape == (LAYERS, 3, EXPERTS)
    assert [entry.get("name") for entry in found.header["calibration_requests"]] == ["elsewhere", None, None, None]
    assert found.header["held_back"]["tables"] == ["activation_matrices", "expert_maps"]
    found.write(tmp_path / "t.safetensors")
    np.testing.assert_array_equal(Trace.read(tmp_path / "t.safetensors").tables["expert_maps"], found.tables["expert_maps"])


@pytest.mark.parametrize("shape", [(LAYERS, EXPERTS), (LAYERS, 0, EXPERTS), (LAYERS, 2, EXPERTS + 1)])
def test_matrices_of_another_shape_are_refused(shape: tuple[int, ...]):
    wrong = replace(recorded(), tables={"activation_matrices": np.ones(shape, np.float32)})
    with pytest.raises(TraceError, match=r"calibration/activation_matrices: expected shape \(3, at least 1, 6\), got"):
        wrong.check()


def test_the_choice_depends_on_the_seed_alone():
    whole = recorded(12)
    one, again, other = (extend(whole, Additions(share=0.4, seed=seed), "t") for seed in (0, 0, 1))
    assert one.digest == again.digest
    assert one.header["requests"] != other.header["requests"]
    assert one.n_requests == other.n_requests == 12 - 5


@pytest.mark.parametrize(("share", "n"), [(0.01, 1), (0.25, 1), (0.5, 2), (0.99, 3)])
def test_something_is_held_back_and_something_left(share: float, n: int):
    assert extend(recorded(4), Additions(share=share), "t").n_requests == 4 - n


def test_the_end_of_each_request_can_be_held_back():
    whole = recorded(3, decode=[4, 1, 0])
    found = extend(whole, Additions(share=0.5, held_back="ends"), "t")
    found.check()
    assert found.requests.n_prompt.tolist() == [4, 5, 3]  # the last has no decode: its prompt of 6 is cut
    assert found.requests.n_decode.tolist() == [2, 0, 0]
    tails = np.concatenate([whole.experts[rows_of(whole, 0)][-2:], whole.experts[rows_of(whole, 1)][-1:]])
    prompt = whole.experts[rows_of(whole, 2)][-3:]
    wanted = [[np.mean(tails[:, layer] == expert) for expert in range(EXPERTS)] for layer in range(LAYERS)]
    np.testing.assert_allclose(found.tables["activation_frequency_decode"], wanted, rtol=1e-6)
    both = np.concatenate([tails, prompt])
    wanted = [[np.mean(both[:, layer] == expert) for expert in range(EXPERTS)] for layer in range(LAYERS)]
    np.testing.assert_allclose(found.tables["activation_frequency"], wanted, rtol=1e-6)
    assert found.remarks == ("calibrated on the held-back end of each request (6 tokens in all)",)
    assert [entry["first_row"] for entry in found.header["calibration_requests"]] == [6, 5, 3]


def test_without_decoded_tokens_there_is_no_table_of_them():
    found = extend(recorded(decode=0), Additions(share=0.25), "t")
    assert set(found.tables) == {"activation_frequency", "activation_matrices", "coactivation"}
    assert "calibration table activation_frequency_decode" in found.header["absent"]


@pytest.mark.parametrize(
    ("trace", "additions", "words"),
    [
        (recorded(), Additions(), "t: expected something to add, got nothing; give --share, --weights uniform or"),
        (recorded(), Additions(share=0.0), "above 0 and below 1, got 0; for example 0.25"),
        (recorded(), Additions(share=1.0), "above 0 and below 1, got 1"),
        (recorded(), Additions(share=float("nan")), "above 0 and below 1, got nan"),
        (recorded(1), Additions(share=0.5), "t: expected two or more requests, .* got 1; add --hold-back ends"),
        (recorded(1, prompt=1, decode=0), Additions(share=0.5, held_back="ends"), "two or more tokens, got one token each"),
        (recorded(tables={"coactivation": PAIRS, "activation_matrices": PAIRS}), Additions(share=0.5), "got activation_m.*, coa"),
        (synthetic_trace(), Additions(weights=True), "--weights uniform: expected a trace without weights and scores, got"),
        (synthetic_trace(), Additions(scores=True), "--scores uniform: .* got weights in t; leave it out"),
        (synthetic_trace(scores=True), Additions(scores=True), "got scores and weights in t"),
    ],
)  # fmt: skip
def test_what_cannot_be_added_is_refused(trace: Trace, additions: Additions, words: str):
    with pytest.raises(InputError, match=words):
        extend(trace, additions, "t")


@pytest.mark.parametrize("on_disk", [False, True])
def test_made_up_numbers_are_the_same_for_all_chosen(on_disk: bool, tmp_path: Path):
    whole = recorded()
    found = extend(whole, Additions(weights=True, scores=True), "t", tmp_path if on_disk else None)
    assert found.weights is not None and found.scores is not None
    assert (found.weights == np.float16(0.5)).all() and found.weights.shape == whole.experts.shape
    chosen = np.zeros(found.scores.shape, bool)
    np.put_along_axis(chosen, whole.experts.astype(np.int64), True, axis=2)
    assert (found.scores == np.where(chosen, np.float16(0.5), np.float16(0))).all()
    assert found.remarks == ("weights uniform over the chosen", "scores uniform over the chosen")
    assert found.header["absent"] == ["calibration tables"]
    back = Trace.read(found.write(tmp_path / "t.safetensors"))
    assert back.made_up == ("weights", "scores") and back.recorded_weights is None and back.recorded_scores is None


def test_statistics_do_not_take_made_up_numbers_for_recorded_ones():
    whole = recorded()
    bare, made = report(whole), report(extend(whole, Additions(weights=True, scores=True), "t"))
    assert made["remarks"] and not bare["remarks"]
    assert made["caches"]["hit_rate"]["mrs"] is None
    assert made["absent"]["caches.hit_rate.mrs"] == "the trace has neither scores nor weights that were recorded"
    assert made["locality"] == bare["locality"]


def test_an_export_leaves_made_up_weights_out(tmp_path: Path):
    made = extend(kit.trace(weights=None), Additions(weights=True), "t")
    export_csv(made, tmp_path / "a.csv")
    assert (tmp_path / "a.csv").read_text().splitlines()[0] == '"request","position","phase","layer","rank","expert"'


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"made_up": ["weight"]}, "header.made_up: expected some of weights, scores"),
        ({"made_up": 3}, "header.made_up"),
        ({"made_up": [["weights"]]}, "header.made_up"),
        ({"made_up": ["scores", "scores"]}, "header.made_up"),
        ({"held_back": []}, "header.held_back: expected what, one of requests, ends"),
        ({"held_back": {"what": "all"}}, "header.held_back"),
        ({"held_back": {"what": "ends", "n": 1, "of": 2, "rows": True, "seed": 0}}, "header.held_back.rows: expected an integer"),
        ({"held_back": {"what": "ends", "n": 0, "of": 2, "rows": 3, "seed": 0}}, "header.held_back.n: expected an integer of at"),
    ],
)
def test_a_header_that_says_nonsense_is_refused(header: dict[str, Any], words: str):
    trace = recorded()
    with pytest.raises(TraceError, match=words):
        replace(trace, header={**trace.header, **header}).check()


def test_results_say_what_was_added(tmp_path: Path):
    source = Trace.read(write_trace(tmp_path / "whole.safetensors", calibration=False, signals={}))
    bare = replace(source, weights=None, header={k: v for k, v in source.header.items() if k != "sha256"})
    made = extend(bare, Additions(share=0.25, weights=True), "t").write(tmp_path / "made.safetensors")
    policies = ["lru", "fiddler", "hybrimoe-code", "static"]
    rows = {row["policy"]: row for row in run_experiment(resolve(tmp_path, trace=str(made), policies=policies)).rows}
    for row in rows.values():
        assert row["error"] is None
        assert "1 request of 6, calibrated on 2 held-back requests (seed 0), weights uniform over the chosen" in str(row["notes"])
    assert rows["hybrimoe-code"]["source_label"] == "assumed"  # it goes by weights that nobody recorded
    assert "scores of the chosen experts only" in str(rows["hybrimoe-code"]["notes"])
    assert rows["lru"]["source_label"] != "assumed"


def routes(folder: Path, n: int = 4) -> list[str]:
    """Files of vLLM, a request each, of the model of the kit."""
    for request in range(n):
        np.savez(folder / f"{request}.npz", routed_experts=kit.routing(seed=request).astype(np.uint8), n_prompt=kit.PROMPT)
    return [str(folder), "--n-experts", str(kit.EXPERTS), "--model", "tiny"]


def test_importing_and_calibrating_can_be_one_step_or_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source, out, two = routes(tmp_path), tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    more = ["--weights", "uniform", "--scores", "uniform", "--seed", "2"]
    assert main(["trace", "import", *source, "--out", str(out), "--calibrate", "0.5", *more]) == 0
    first = capsys.readouterr().err.splitlines()
    assert first[0] == (
        f"wrote {out} from vllm: 3 layers x 7 experts, top-2, measured, 14 tokens of 2 requests; calibrated on 2 held-back "
        "requests (seed 2); weights uniform over the chosen; scores uniform over the chosen; tables activation_frequency, "
        "activation_frequency_decode, activation_matrices, coactivation, expert_maps"
    )
    assert first[1] == "absent: calibration table residual, gate inputs, signals"
    assert main(["trace", "import", *source, "--out", str(tmp_path / "bare.safetensors")]) == 0
    assert main(["trace", "calibrate", str(tmp_path / "bare.safetensors"), "--out", str(two), "--share", "0.5", *more]) == 0
    assert out.read_bytes() == two.read_bytes()
    capsys.readouterr()
    assert main(["trace", "stats", str(two), "-q"]) == 0
    assert capsys.readouterr().out.count("next to what was recorded") == 3
    assert main(["trace", "stats", str(two), "-q", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["remarks"] == list(Trace.read(two).remarks)
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".npz") == [
        "bare.safetensors", "one.safetensors", "two.safetensors",
    ]  # fmt: skip


def test_options_that_would_do_nothing_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source, bare, out = routes(tmp_path), tmp_path / "bare.safetensors", tmp_path / "out.safetensors"
    assert main(["trace", "import", *source, "--out", str(bare)]) == 0
    capsys.readouterr()
    importing, calibrating = ["trace", "import", *source, "--out", str(out)], ["trace", "calibrate", str(bare), "--out", str(out)]
    for command, words in [
        ([*importing, "--seed", "1"], "--seed 1: expected --calibrate next to it"),
        ([*importing, "--hold-back", "ends"], "--hold-back ends: expected --calibrate next to it"),
        ([*calibrating, "--seed", "1", "--weights", "uniform"], "--seed 1: expected --share next to it"),
        ([*calibrating, "--share", "0.5", "--hold-back", "ends", "--seed", "0"], "expected no seed next to --hold-back ends"),
        ([*calibrating, "--share", "half"], "--share: expected a number, got 'half'"),
        ([*calibrating, "--share", "2"], "bare.safetensors: expected a share to hold back, above 0 and below 1, got 2"),
        ([*calibrating, "--weights", "even"], "'even' is not one of 'uniform'"),
        (calibrating, "bare.safetensors: expected something to add, got nothing"),
        (["trace", "calibrate", str(bare), "--out", str(bare), "--overwrite", "--share", "0.5"], "expected another file than"),
        (["trace", "calibrate", "mini-mixtrall", "--out", str(out), "--share", "0.5"], "mini-mixtrall"),
    ]:
        assert main(command) == 2, command
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and words in lines[0], lines
        assert not out.exists()


def test_a_recording_of_one_request_gives_up_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source, out = shared_file("traces", "bigmoe-on-edge", "qwen.route.csv"), tmp_path / "qwen.safetensors"
    command = ["trace", "import", str(source), "--out", str(out), "--model", "qwen3-30b-a3b", "--calibrate", "0.25"]
    assert main(command) == 2
    assert "qwen.route.csv: expected two or more requests" in capsys.readouterr().err
    assert main([*command, "--hold-back", "ends"]) == 0
    found = Trace.read(out)
    assert (found.requests.n_decode.tolist(), found.header["held_back"]["rows"]) == ([96], 32)
    capsys.readouterr()
    compare = ["compare", "--model", str(tmp_path / "qwen.model.yaml"), "--trace", str(out), "--cache", "0.25", "--prompt", "28"]
    policies = ["--policies", "lru,fiddler,daop-paper,hybrimoe-paper,prescope,dali", "--decode", "4", "-o", "json"]
    assert main([*compare, *policies]) == 1
    rows = {row["policy"]: row for row in json.loads(capsys.readouterr().out)}
    assert [name for name, row in rows.items() if row["error"] is None] == ["lru", "fiddler"]
    assert main([*compare, *policies, "--set", "predictors.*=coactivation"]) == 0
    assert all("* = coactivation" in row["notes"] for row in json.loads(capsys.readouterr().out))


def test_held_back_requests_foretell_the_others():
    """Popular experts of 24 sequences of gpt-oss-20b are popular in the other 72."""
    whole = gpt_oss()
    found = extend(whole, Additions(share=0.25), "gpt-oss-20b")
    assert (found.n_requests, len(found.header["calibration_requests"])) == (72, 24)
    kept = Counts(found.n_layers, found.n_experts, 0)
    kept.add(np.asarray(found.experts), 0)
    shares = kept.tables()["activation_frequency"]
    agreement = [np.corrcoef(a, b)[0, 1] for a, b in zip(found.tables["activation_frequency"], shares, strict=True)]
    assert min(agreement) > 0.5
    shares_and_counts = {"activation_frequency", "activation_frequency_decode", "coactivation"}
    assert set(found.tables) == shares_and_counts | {"activation_matrices", "expert_maps"}
