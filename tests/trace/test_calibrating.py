"""Embeddings of tokens in a trace, and the signal of the closest held-back iteration that calibration makes of them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moesim.trace.files
import moesim.trace.stats.calibration
from moesim.cli.main import main
from moesim.errors import TraceError
from moesim.experiment import run_experiment
from moesim.testing.traces import synthetic_trace
from moesim.trace import GateInputs, Trace, shards
from moesim.trace.calibrating import Additions, extend
from moesim.trace.derived import split_experts, subset
from moesim.trace.stats.calibration import closest, embedding_signal, of_iterations
from tests.experiment.experiment_kit import resolve, write_trace

LAYERS, EXPERTS, HIDDEN = 3, 6, 4
PROMPT, DECODE = [3, 4, 2, 5, 3, 0], [3, 2, 4, 0, 3, 2]


def recorded(seed: int = 0, *, scores: bool = True) -> Trace:
    """Return a trace as a recording is; few tokens, so that embeddings repeat."""
    rng = np.random.default_rng(seed)
    trace = synthetic_trace(LAYERS, EXPERTS, 2, len(PROMPT), PROMPT, DECODE, seed, scores=scores)
    vocabulary = rng.integers(-3, 4, (7, HIDDEN))
    vocabulary[0] = 0
    return replace(trace, embeddings=vocabulary[rng.integers(0, 7, trace.n_rows)].astype(np.float16))


def test_they_are_kept_in_a_file_and_a_trace_without_is_as_it_was(tmp_path: Path) -> None:
    trace = recorded()
    back = Trace.read(trace.write(tmp_path / "a.safetensors"))
    assert back.embeddings is not None and back.embeddings.dtype == np.float16
    np.testing.assert_array_equal(back.embeddings, np.asarray(trace.embeddings))
    assert back.digest == trace.digest
    without = replace(trace, embeddings=None)
    assert trace.digest != without.digest == synthetic_trace(LAYERS, EXPERTS, 2, 6, PROMPT, DECODE, scores=True).digest
    assert b"embeddings" not in without.write(tmp_path / "b.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (np.zeros((5, HIDDEN), np.float16), r"t: embeddings: expected shape \(31, 4\), got \(5, 4\)"),
        (np.zeros((31, 2, 2), np.float16), r"t: embeddings: expected \(31, hidden\) values, got shape \(31, 2, 2\)"),
        (np.zeros((31, 0), np.float16), r"t: embeddings: expected \(31, hidden\) values, got shape \(31, 0\)"),
        (np.zeros((31, HIDDEN), np.float32), "t: embeddings: expected float16, got float32"),
        (np.full((31, HIDDEN), np.inf, np.float16), r"t: embeddings\[0, 0\]: expected a finite number, got inf"),
    ],
)
def test_others_are_refused(wrong: Any, says: str) -> None:
    with pytest.raises(TraceError, match=says):
        replace(recorded(), embeddings=wrong).check("t")


def test_parts_of_a_trace_keep_theirs(tmp_path: Path) -> None:
    trace = recorded()
    embeddings = np.asarray(trace.embeddings)
    ends = np.cumsum(np.add(PROMPT, DECODE)).tolist()
    part = subset(trace, [1, 4])
    np.testing.assert_array_equal(np.asarray(part.embeddings), embeddings[[*range(ends[0], ends[1]), *range(ends[3], ends[4])]])
    np.testing.assert_array_equal(np.asarray(split_experts(trace, 3, "t").embeddings), embeddings)
    listed = [{"n": number} for number in range(6)]
    shards.write_manifest(tmp_path, {"options": {}, "header": {}, "n_requests": 6})
    for first, stop in ((0, 2), (2, 6)):
        piece = subset(trace, range(first, stop))
        piece = replace(piece, header=piece.header | {"trace_requests": listed[first:stop]})
        piece.write(shards.shard_path(tmp_path, first, stop))
    np.testing.assert_array_equal(np.asarray(shards.read_shards(tmp_path).embeddings), embeddings)


# ------------------------------------------------------------------------------------------------- the signal, restated


def own_embedding(trace: Trace, row: int) -> list[float]:
    """Of an iteration: a decoded token's own; of a prompt's row the mean of the prompt up to it."""
    values = np.asarray(trace.embeddings, np.float64).tolist()
    if trace.phase[row] == 1:
        return list(values[row])
    rows = [other for other in range(row + 1) if trace.request[other] == trace.request[row]]
    return [sum(values[other][i] for other in rows) / len(rows) for i in range(HIDDEN)]


def cosine(a: list[float], b: list[float]) -> float:
    length = math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))
    return sum(x * y for x, y in zip(a, b, strict=True)) / length if length else 0.0


def restated(whole: Trace, kept: list[int], held: list[int]) -> tuple[Any, list[float]]:
    """Return the scores of each kept row, and its similarity; `held` are the rows whose maps are stored, in order."""
    found, similarities = np.zeros((len(kept), LAYERS, EXPERTS)), []
    for place, row in enumerate(kept):
        values = [round(cosine(own_embedding(whole, past), own_embedding(whole, row)), 12) for past in held]
        past, similarity = held[values.index(max(values))], min(max(max(values), 0), 1)
        for layer in range(LAYERS):
            scores = [float(x) for x in np.asarray(whole.scores)[past, layer]]
            found[place, layer] = [similarity * score / sum(scores) for score in scores]
        similarities.append(similarity)
    return found, similarities


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_each_row_gets_the_map_of_the_closest_held_back_iteration(
    seed: int, on_disk: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if on_disk:
        monkeypatch.setattr(moesim.trace.files, "_IN_MEMORY_BYTES", 0)
        monkeypatch.setattr(moesim.trace.stats.calibration, "_ROWS", 2)
    whole = recorded(seed)
    found = extend(whole, Additions(share=0.4, seed=seed), "t", tmp_path)
    found.check()
    gone = [entry["request"] for entry in found.header["calibration_requests"]]
    first = whole.requests.first_row.tolist()
    kept = [row for row in range(whole.n_rows) if whole.request[row] not in gone]
    held = [first[r] + i for r in gone for i in range(max(0, PROMPT[r] - 1), PROMPT[r] + DECODE[r])]
    wanted, similarities = restated(whole, kept, held)
    signal = found.signals["embedding"]
    assert signal.rows.tolist() == list(range(len(kept))) and signal.ids is None
    assert (signal.lookahead, signal.needs_layer_offset, signal.first_layer) == (0, None, 0)
    np.testing.assert_allclose(signal.scores, wanted, rtol=2**-10, atol=1e-6)
    sums = np.asarray(signal.scores, np.float64).sum(axis=2)
    np.testing.assert_allclose(sums, np.repeat(np.array(similarities)[:, None], LAYERS, axis=1), atol=1e-3)
    assert all(found.has_signal("embedding", request) for request in range(found.n_requests))
    assert len({round(similarity, 6) for similarity in similarities}) > 2


def test_ends_that_are_held_back_count_as_iterations_of_their_whole_request() -> None:
    whole = recorded(3)
    found = extend(whole, Additions(share=0.5, held_back="ends"), "t")
    spans = [(entry["request"], entry["first_row"]) for entry in found.header["calibration_requests"]]
    first = whole.requests.first_row.tolist()
    cut = dict(spans)
    kept = [first[r] + i for r in range(6) for i in range(cut.get(r, PROMPT[r] + DECODE[r]))]
    held = [first[r] + i for r, start in spans for i in range(max(start, PROMPT[r] - 1), PROMPT[r] + DECODE[r])]
    np.testing.assert_allclose(found.signals["embedding"].scores, restated(whole, kept, held)[0], rtol=2**-10, atol=1e-6)


def test_the_signal_needs_embeddings_and_maps_and_is_shared_by_units_of_an_expert() -> None:
    for changes, there in (({"embeddings": None}, False), ({"scores": None, "weights": None}, False), ({"scores": None}, True)):
        found = extend(replace(recorded(), **changes), Additions(share=0.5), "t")
        assert ("embedding" in found.signals) == there  # maps may be of weights
    found = extend(recorded(), Additions(share=0.5), "t")
    traces = (found, split_experts(found, 3, "t"))
    whole, units = (np.asarray(trace.signals["embedding"].scores, np.float64).sum(axis=2) for trace in traces)
    np.testing.assert_allclose(units, whole, atol=2e-3)


def test_of_equals_the_first_and_nothing_is_like_zeros() -> None:
    past = np.array([[0.0, 0.0], [0.1, 0.1], [3 * 0.1, 3 * 0.1], [-1.0, 1.0]])  # the third is closer by rounding alone
    index, cosine_of = closest(past, np.array([[1 / 7, 1 / 7], [0.0, 0.0], [0.0, 2.0]]))
    assert index.tolist() == [1, 0, 1]
    np.testing.assert_allclose(cosine_of, [1, 0, math.sqrt(0.5)], atol=1e-15)
    trace = replace(recorded(), embeddings=np.ones((31, HIDDEN), np.float16))  # what is opposite is not alike at all
    assert not embedding_signal(trace, -np.ones((1, HIDDEN)), np.ones((LAYERS, 1, EXPERTS)), None).scores.any()


# ------------------------------------------------------------------------------------------------- in an experiment


def test_from_embeddings_to_a_run(tmp_path: Path) -> None:
    """Before calibration the policy is refused with the way out; after it, it runs."""
    write_trace(tmp_path / "small.safetensors", calibration=False, signals={}, scores=True)
    policies = [{"name": "finemoe", "first_layers": "embedding"}]
    with pytest.raises(TraceError, match="moesim trace calibrate makes embedding of one recorded with --keep-embeddings; or let"):
        resolve(tmp_path, policies=policies)
    trace = Trace.read(tmp_path / "small.safetensors")
    whole = replace(trace, embeddings=np.random.default_rng(0).normal(size=(trace.n_rows, HIDDEN)).astype(np.float16))
    path = str(whole.write(tmp_path / "whole.safetensors"))
    with pytest.raises(TraceError, match="moesim trace calibrate makes embedding of this trace; or let"):
        resolve(tmp_path, policies=policies, trace=path)
    calibrated = str(tmp_path / "calibrated.safetensors")
    assert main(["trace", "calibrate", path, "--share", "0.25", "--out", calibrated]) == 0
    rows = run_experiment(resolve(tmp_path, policies=[*policies, "finemoe"], trace=calibrated)).rows
    assert [row["error"] for row in rows] == [None, None]
    assert rows[0]["time_predict_ns"] > 0 == rows[1]["time_predict_ns"]
    assert rows[0]["makespan_ns"] != rows[1]["makespan_ns"]


def test_calibration_takes_the_steps_between_gate_inputs_dimension_by_dimension() -> None:
    trace = synthetic_trace(n_layers=3, n_experts=8, top_k=2, n_requests=4, prompt=2, decode=3)
    values = np.square(np.arange(3))[:, None] * np.arange(1, 5) / 8  # of each layer, the same for all rows
    inputs = np.broadcast_to(values, (trace.n_rows, 3, 4)).astype(np.float16)
    with_inputs = replace(trace, inputs=GateInputs(np.arange(trace.n_rows, dtype=np.int32), inputs))
    found = extend(with_inputs, Additions(share=0.5), "t").tables["residual"]
    np.testing.assert_array_equal(found, [*np.diff(values, axis=0), [0] * 4])


@pytest.mark.parametrize(("limit", "is_file"), [(79, True), (80, False)])
def test_what_is_large_is_made_in_a_file(limit: int, is_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moesim.trace.files, "_IN_MEMORY_BYTES", limit)
    made = moesim.trace.files.empty((2, 5), np.dtype(np.float64), tmp_path)
    assert (made.shape, made.base is not None) == ((2, 5), is_file)


def test_a_row_of_a_prompt_counts_as_the_mean_up_to_it() -> None:
    rows = np.array([[2, 0], [4, 2], [0, 7], [5, 6]], np.float16)
    assert of_iterations(rows, 3).tolist() == [[2, 0], [3, 1], [2, 3], [5, 6]]
