"""The generative model: the same for the same seed, labelled, whole, and moved by its causes in the right direction."""

from __future__ import annotations

import hashlib
import math
from decimal import Decimal, localcontext
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import yaml
from scipy.special import ndtri

from moesim.errors import ConfigError
from moesim.experiment import run_experiment
from moesim.experiment.config import load_config
from moesim.experiment.resolve import Experiment
from moesim.trace import Trace
from moesim.trace.format import SCHEMA_VERSION, read_container, write_container
from moesim.trace.stats.balance import activation_frequency
from moesim.trace.stats.prediction import signal_recall, state_cosine
from moesim.trace.synthesis import ParameterSet, exact, parameter_names, read_parameters, synthesize
from moesim.trace.synthesis import model as synthetic
from moesim.trace.synthesis.exact import Draws, exp, log, normal_quantiles, on_grid, softmax
from moesim.trace.synthesis.figures import measure
from moesim.trace.synthesis.generate import read_gates, route, top_ids
from moesim.trace.synthesis.model import (
    FILE,
    SEED,
    draw_model,
    expert_loads,
    kept_biases,
    key_of,
    request_states,
    workload_offsets,
)
from moesim.trace.synthesis.parameter_set import OPTIONAL, parameter_schema

SMALL = {"n_layers": 4, "n_experts": 8, "top_k": 2}


def parameters(**changed: Any) -> ParameterSet:
    return read_parameters("mixtral-8x7b").replace(**{**dict.fromkeys(OPTIONAL, 0), **SMALL, **changed})


def make(p: ParameterSet, **options: Any) -> Trace:
    return synthesize(p, **{"n_requests": 12, "n_prompt": 8, "n_decode": 64, "seed": 3, "n_calibration": 4, **options})


def figure(name: str, **changed: Any) -> float:
    """One figure, mean over two seeds."""
    return float(np.mean([measure(make(parameters(**changed), seed=seed), [name])[name] for seed in (3, 4)]))


def test_the_same_seed_gives_the_same_bytes_and_another_gives_others(tmp_path: Path):
    p = parameters()
    one = make(p, n_input_requests=2, scores=True).write(tmp_path / "one.safetensors").read_bytes()
    again = make(p, n_input_requests=2, scores=True).write(tmp_path / "again.safetensors").read_bytes()
    assert one == again
    assert make(p, seed=4).digest != make(p, seed=3).digest


def test_arrays_in_files_give_the_same_trace_as_arrays_in_memory(tmp_path: Path):
    options = {"n_input_requests": 3, "scores": True, "n_signal_requests": 5}
    folder = tmp_path / "arrays"
    folder.mkdir()
    for p in (parameters(), parameters(n_experts=32, top_k=4)):  # dense signals, and ids next to scores
        assert make(p, folder=folder, **options).digest == make(p, **options).digest


def test_a_request_does_not_depend_on_how_many_there_are():
    few, many = make(parameters(), n_requests=2), make(parameters(), n_requests=5)
    n = few.n_rows
    np.testing.assert_array_equal(few.experts, many.experts[:n])
    np.testing.assert_array_equal(few.weights, many.weights[:n])
    for name, signal in few.signals.items():
        np.testing.assert_array_equal(signal.scores, many.signals[name].scores[:n])
    assert (many.experts[:n] != many.experts[n : 2 * n]).any()


def test_requests_may_be_made_some_at_a_time():
    options = {"scores": True, "n_input_requests": 4}
    whole, later = make(parameters(), n_requests=4, **options), make(parameters(), first=2, n_requests=2, **options)
    rest = whole.n_rows // 2
    for name in ("experts", "weights", "scores", "phase"):
        np.testing.assert_array_equal(getattr(later, name), getattr(whole, name)[rest:])
    assert later.inputs is not None and whole.inputs is not None
    np.testing.assert_array_equal(later.inputs.values, whole.inputs.values[rest:])
    for name, signal in later.signals.items():
        np.testing.assert_array_equal(signal.scores, whole.signals[name].scores[rest:])
    for name, table in later.tables.items():
        np.testing.assert_array_equal(table, whole.tables[name])
        with pytest.raises(ValueError, match="read-only"):  # they are remembered
            table[0] = 0
    assert (later.header["trace_requests"]["first"], later.header["trace_requests"]["n"]) == (2, 2)


def test_routing_does_not_depend_on_what_is_kept_beside_it():
    bare = make(parameters(), n_signal_requests=0, n_calibration=0)
    full = make(parameters(), n_input_requests=12, scores=True)
    np.testing.assert_array_equal(bare.experts, full.experts)
    assert not bare.signals
    assert not bare.tables
    assert bare.inputs is None


def test_long_requests_are_made_in_blocks_without_a_seam():
    model = draw_model(parameters(n_layers=2, topic_share=0.0, context_share=1.0, context_persistence=0.99), 0)
    blocks = list(request_states(model, 1, 0, 2500))
    assert [block.shape[1] for block in blocks] == [1024, 1024, 452]
    states = np.concatenate(blocks, axis=1)
    steps = np.linalg.norm(np.diff(states, axis=1), axis=2).mean(axis=0)  # of each token from the one before
    assert steps[[1023, 2047]].max() < 3 * np.median(steps)
    assert np.linalg.norm(states, axis=2).mean() > 3 * np.median(steps)


def test_labels_and_header_say_what_it_is():
    trace = make(parameters())
    trace.check()
    header = trace.header
    assert trace.label == "synthetic"
    assert header["synthesis"]["parameters"] == parameters().stated()
    assert header["synthesis"]["fitted_to"] == parameters().fitted_to
    assert header["seed"] == 3
    assert header["trace_requests"]["stream"] != header["calibration_requests"]["stream"]
    assert header["calibration_requests"]["n"] == 4
    assert trace.requests.n_prompt.tolist() == [8] * 12
    assert trace.requests.n_decode.tolist() == [64] * 12
    assert all(names == ("gate_next1", "gate_next2", "gate_next3", "residual") for names in trace.requests.signals)


def test_routing_and_signals_equal_those_computed_by_hand_from_the_gate_inputs():
    p = parameters(temperature=1.5)
    trace, model = make(p, n_input_requests=2, scores=True), draw_model(p, 3)
    inputs = np.asarray(trace.inputs.values, np.float64)
    gates = np.concatenate([model.gates, np.zeros_like(model.gates)], axis=2).astype(np.float64)  # the other half is not read

    def softmax_of(layer: int, state: np.ndarray) -> np.ndarray:
        logits = p.temperature * (state @ gates[layer].T + model.bias[layer])
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        return powers / powers.sum(axis=1, keepdims=True)

    n = len(inputs)
    residual = trace.tables["residual"].astype(np.float64)
    for layer in range(4):
        own = softmax_of(layer, inputs[:, layer])
        np.testing.assert_allclose(trace.scores[:n, layer], own, atol=4e-3)
        weights = np.sort(own, axis=1)[:, ::-1][:, :2]
        np.testing.assert_allclose(trace.weights[:n, layer], weights / weights.sum(axis=1, keepdims=True), atol=6e-3)
        chosen = np.take_along_axis(own, trace.experts[:n, layer].astype(int), axis=1)
        np.testing.assert_allclose(chosen, weights, atol=4e-3)
        for ahead in (1, 2, 3):
            if layer >= ahead:
                said = softmax_of(layer, inputs[:, layer - ahead])
                np.testing.assert_allclose(trace.signals[f"gate_next{ahead}"].scores[:n, layer], said, atol=4e-3)
        if layer:
            said = softmax_of(layer, inputs[:, layer - 1] + residual[layer - 1])
            np.testing.assert_allclose(trace.signals["residual"].scores[:n, layer], said, atol=4e-3)
    assert not trace.signals["gate_next2"].scores[:, :2].any()
    near = make(parameters(innovation=0.1, first_innovation=0.1))
    one, two, three = (signal_recall(near, near.signals[f"gate_next{n}"]) for n in (1, 2, 3))
    assert one > two > three  # further ahead it is worse


@pytest.mark.parametrize(
    ("name", "changed", "seed"),
    [
        ("mixtral-8x7b", {"n_topics": 2}, 10),  # equal topics on the grid
        ("qwen3-30b-a3b", {"popularity_tail": 4.0, "n_layers": 4}, 1),  # loads of all but some experts underflow
        ("qwen3-30b-a3b", {"popularity": 3.0, "popularity_tail": -4.0, "n_layers": 4}, 1),  # loads of some do
        ("mixtral-8x7b", {"popularity": 3.0, "popularity_tail": 4.0, "popularity_spread": 1.0}, 1),
    ],
)
def test_extreme_parameters_that_are_accepted_give_finite_models(name: str, changed: dict[str, Any], seed: int):
    p = read_parameters(name).replace(**changed)
    model = draw_model(p, seed)
    assert all(np.isfinite(part).all() for part in (model.gates, model.bias, model.mean, model.topics, model.shares))
    loads = expert_loads(p, Draws(seed))
    np.testing.assert_allclose(loads.sum(axis=1), 1)
    assert loads.min() > 0
    assert loads.max() <= 0.95 / p.top_k * (1 + 1e-6)
    chosen = np.asarray(synthesize(p, n_requests=4, n_prompt=0, n_decode=200, seed=seed, n_calibration=1).experts)
    assert all(len(np.unique(chosen[:, layer])) > p.top_k for layer in range(p.n_layers))


def test_many_experts_are_stored_as_the_best_twice_top_k():
    dense, sparse = make(parameters(n_experts=16)), make(parameters(n_experts=17))
    assert dense.signals["residual"].ids is None
    assert sparse.signals["residual"].ids.shape[2] == sparse.signals["residual"].scores.shape[2] == 4
    scores = sparse.signals["residual"].scores[:, 1:].astype(np.float32)
    assert (np.diff(scores, axis=2) <= 0).all()


def test_weights_are_made_as_the_architecture_makes_them():
    logits = np.asarray([[2.0, 0.0, 1.0]], np.float32)
    ids, over_top = route(logits, 2, renormalise=True)
    _, over_all = route(logits, 2, renormalise=False)
    assert ids.tolist() == [[0, 2]]
    np.testing.assert_allclose(over_top[0], np.exp([2, 1]) / np.exp([2, 1]).sum(), rtol=1e-6)
    np.testing.assert_allclose(over_all[0], np.exp([2, 1]) / np.exp([2, 0, 1]).sum(), rtol=1e-6)


def test_calibration_tables_come_from_other_requests():
    trace = make(parameters(), n_requests=4)
    other = make(parameters(), n_requests=8)
    for name in ("activation_frequency", "coactivation", "residual"):  # they do not change with the requests of the trace
        np.testing.assert_array_equal(trace.tables[name], other.tables[name])
    assert trace.tables["coactivation"][:-1].sum() == 3 * 4 * (64 + 128) * 4  # layers x requests x rows x pairs
    own = activation_frequency(np.asarray(trace.experts), 8)
    assert not np.allclose(own, trace.tables["activation_frequency"], atol=1e-3)


def test_expert_maps_are_the_scores_of_the_calibration_requests():
    trace = make(parameters(), scores=True)
    maps = trace.tables["expert_maps"].astype(np.float64)
    assert maps.shape == (4, 4 * 129, 8)  # the prompt's last row and 128 decoded ones of 4 requests
    np.testing.assert_allclose(maps.sum(axis=2), 1, atol=2e-3)
    decoded = maps.reshape(4, 4, 129, 8)[:, :, 1:].reshape(4, -1, 8)
    chosen = np.argsort(-decoded, axis=2)[:, :, :2]
    used = np.stack([np.bincount(layer.ravel(), minlength=8) for layer in chosen]) / chosen[0].size
    np.testing.assert_allclose(used, trace.tables["activation_frequency_decode"], atol=2e-3)
    assert "expert_maps" not in make(parameters()).tables


def test_loads_come_out_as_the_popularity_says():
    p = parameters(n_experts=16, popularity=0.8, popularity_tail=-0.5, topic_concentration=100.0, topic_persistence=0.0)
    loads = expert_loads(p, Draws(0))
    np.testing.assert_allclose(loads.sum(axis=1), 1)
    trace = make(p, n_requests=60, n_calibration=0)
    used = activation_frequency(np.asarray(trace.experts), 16)
    np.testing.assert_allclose(np.sort(used, axis=1), np.sort(loads, axis=1), atol=0.02)
    most = parameters(popularity=3.0, popularity_tail=2.0)
    assert expert_loads(most, Draws(0)).max() <= 0.95 / 2 + 1e-6  # no expert is used by every token


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("reuse@1", {"context_persistence": (0.1, 0.8)}),
        ("reuse@8", {"topic_share": (0.05, 0.5)}),
        ("reuse@8", {"topic_persistence": (0.1, 0.99), "topic_share": (0.5, 0.5), "topic_concentration": (5.0, 5.0)}),
        ("reuse@8", {"topic_concentration": (5.0, 0.01), "topic_share": (0.5, 0.5), "topic_persistence": (0.5, 0.5)}),
        ("lru@50", {"topic_share": (0.05, 0.6)}),
        ("top_over_uniform", {"popularity": (0.05, 0.8)}),
        ("entropy", {"popularity": (0.8, 0.05)}),
        ("recall@gate_next1", {"innovation": (0.4, 0.02), "first_innovation": (0.4, 0.02)}),
        ("recall@coactivation", {"spectrum": (0.0, 3.0)}),
        ("recall@coactivation", {"innovation": (0.6, 0.01), "first_innovation": (0.6, 0.01)}),
        ("top_weight", {"temperature": (0.3, 3.0)}),
    ],
)
def test_a_cause_moves_its_statistic(name: str, change: dict[str, tuple[float, float]]):
    low, high = (figure(name, **{key: pair[end] for key, pair in change.items()}) for end in (0, 1))
    assert high > low + 0.01


def test_the_residual_corrects_a_drifting_mean():
    still = {"innovation": 0.05, "first_innovation": 0.05, "mean_share": 0.6, "unread_share": 0.0, "mean_read": 1.0}
    drifting = make(parameters(mean_turn=0.4, first_turn=0.4, **still))
    gate, residual = (signal_recall(drifting, drifting.signals[name]) for name in ("gate_next1", "residual"))
    assert residual > gate + 0.1
    quiet = make(parameters(mean_turn=0.0, first_turn=0.0, **still))
    assert abs(signal_recall(quiet, quiet.signals["gate_next1"]) - signal_recall(quiet, quiet.signals["residual"])) < 0.01
    assert signal_recall(quiet, quiet.signals["gate_next1"]) == pytest.approx(residual, abs=0.03)


def test_cosines_of_gate_inputs_follow_from_their_shares():
    p = parameters(
        innovation=0.19, first_innovation=0.19, mean_share=0.5, mean_turn=0.36, first_turn=0.36, unread_share=0.1,
        spectrum=0.0, width=256,
    )  # fmt: skip
    trace = make(p, n_input_requests=12, n_calibration=16)
    raw = state_cosine(trace.inputs.values)
    corrected = state_cosine(trace.inputs.values, trace.tables["residual"])
    np.testing.assert_allclose(raw, 0.4 * 0.9 + 0.5 * 0.8, atol=0.03)  # state x sqrt(1 - 0.19), mean x sqrt(1 - 0.36)
    np.testing.assert_allclose(corrected, 0.4 * 0.9 + 0.5, atol=0.03)


def reuse_by_layer(trace: Trace) -> np.ndarray:
    chosen = np.asarray(trace.experts)
    return (chosen[1:, :, :, None] == chosen[:-1, :, None, :]).any(axis=3).mean(axis=(0, 2))


def test_statistics_along_a_request_are_those_of_every_layer():
    p = parameters(n_layers=12, innovation=0.3)
    same = reuse_by_layer(make(p, n_requests=40, n_signal_requests=0, n_calibration=0))
    assert same.std() < 0.03
    assert abs(same[:4].mean() - same[-4:].mean()) < 0.02


def test_layers_differ_by_as_much_as_their_spreads_say_and_in_the_same_way_for_every_seed():
    spread = parameters(n_layers=12, topic_share=0.3, locality_spread=0.9, popularity=0.4, popularity_spread=0.3)
    for seed in (1, 2):
        model = draw_model(spread, seed)
        logits = np.sort(np.log(model.shares[:, 0] / (1 - model.shares[:, 0])))
        quantiles = ndtri((np.arange(12) + 0.5) / 12)
        np.testing.assert_allclose((logits - np.log(0.3 / 0.7)) / 0.9, quantiles, atol=1e-6)
        same = reuse_by_layer(make(spread, seed=seed, n_requests=40, n_signal_requests=0, n_calibration=0))
        assert same.max() - same.min() > 0.1
        assert np.corrcoef(same, model.shares[:, 0])[0, 1] > 0.8
    assert not np.array_equal(draw_model(spread, 1).shares, draw_model(spread, 2).shares)  # in another order
    alike = draw_model(spread.replace(locality_spread=0.0, popularity_spread=0.0), 1)
    assert len(np.unique(alike.shares, axis=0)) == 1


def test_requests_begin_their_decode_alike_and_not_their_prompt():
    trace = make(parameters(opening=4.0), n_requests=60, n_prompt=20, n_decode=40, n_signal_requests=0, n_calibration=0)
    chosen = np.sort(np.asarray(trace.experts).reshape(60, 60, 4, 2), axis=3)
    same = (chosen[1:] == chosen[:-1]).all(axis=3).mean(axis=(0, 2))  # by position
    assert same[20] > 0.99  # the first decoded token
    assert same[:20].max() < 0.3
    assert same[20 + 24 :].max() < 0.3
    assert same[20:23].mean() > same[23:26].mean() + 0.05 > same[26:44].mean() + 0.05


def plain(p: ParameterSet, **options: Any) -> Trace:
    return make(p, **{"n_signal_requests": 0, "n_calibration": 0, **options})


def test_requests_of_one_workload_prefer_the_same_experts():
    p = parameters(n_experts=32, popularity=0.1, topic_share=0.3)
    alike = plain(p.replace(workload_spread=0.8), n_requests=16)
    groups = plain(p.replace(workload_spread=0.8, workload_requests=4), n_requests=16)
    one, four, none = (measure(trace, ["share@25", "distinct@4"]) for trace in (alike, groups, plain(p, n_requests=16)))
    assert one["distinct@4"] == pytest.approx(four["distinct@4"], rel=0.05)  # neighbours are of one workload
    assert none["distinct@4"] > 1.1 * one["distinct@4"]
    assert one["share@25"] > four["share@25"] + 0.05 > none["share@25"] + 0.05  # four workloads prefer different ones
    first = np.asarray(groups.experts)[: 4 * 72]
    np.testing.assert_array_equal(np.asarray(alike.experts)[: 4 * 72], first)


def test_the_first_layers_tell_workloads_apart_least():
    model = draw_model(parameters(n_layers=12, n_experts=64, workload_spread=0.5, shallow=1.0, shallow_layers=2.0), 1)
    spreads = np.asarray(workload_offsets(model, 0)).std(axis=1)
    np.testing.assert_allclose(spreads, 0.5 * (1 - np.exp(-np.arange(12) / 2)), atol=0.12)
    assert spreads[0] == 0


def test_loads_over_many_workloads_are_still_those_of_the_popularity():
    p = parameters(n_experts=16, popularity=0.8, popularity_tail=-0.5, topic_concentration=100.0, topic_persistence=0.0)
    trace = plain(p.replace(workload_spread=0.7, workload_requests=1), n_requests=300, n_decode=16)
    used = activation_frequency(np.asarray(trace.experts), 16)
    np.testing.assert_allclose(np.sort(used, axis=1), np.sort(expert_loads(p, Draws(0)), axis=1), atol=0.02)


def test_the_first_layers_are_less_local_in_every_seed():
    p = parameters(n_layers=12, topic_share=0.4, locality_spread=0.3, shallow=3.0, shallow_layers=1.5)
    for seed in (1, 2, 3):
        same = reuse_by_layer(plain(p, seed=seed, n_requests=40))
        assert same.argmin() == 0
        assert same[0] < same[4:].mean() - 0.05
    only, none = (draw_model(p.replace(**changed), 1).shares for changed in ({"shallow_layers": 0.0}, {"shallow": 0.0}))
    np.testing.assert_array_equal(only[1:], none[1:])
    ends = p.replace(locality_spread=0.0)  # without the ladder the fade is seen alone
    logits = np.log(draw_model(ends, 1).shares / (1 - draw_model(ends, 1).shares))
    start = np.log([0.4 / 0.6, p.context_share / (1 - p.context_share)])
    np.testing.assert_allclose(logits, start - 3 * np.exp(-np.arange(12) / 1.5)[:, None], atol=1e-9)


def test_the_first_layers_are_the_most_evenly_used_in_every_seed():
    p = parameters(n_layers=12, n_experts=16, popularity=0.5, popularity_spread=0.3, shallow=1.0, shallow_layers=1.0)
    for seed in (1, 2, 3):
        used = activation_frequency(np.asarray(plain(p, seed=seed, n_requests=40).experts), 16)
        assert used.max(axis=1)[0] < used.max(axis=1)[3:].mean()


@pytest.mark.parametrize("spread", [0.0, 0.5])
def test_prompts_are_less_local_and_answers_do_not_depend_on_it(spread: float):
    p = parameters(topic_share=0.5, locality_spread=spread)
    options = {"n_requests": 30, "n_prompt": 64, "n_decode": 64}
    before, after = (np.asarray(plain(one, **options).experts).reshape(30, 128, 4, 2) for one in (p, p.replace(prompt_loss=2.0)))
    np.testing.assert_array_equal(before[:, 64:], after[:, 64:])
    same = [(x[:, 1:64, :, :, None] == x[:, :63, :, None, :]).any(axis=4).mean() for x in (before, after)]
    assert same[1] < same[0] - 0.03


def test_decode_resembles_the_prefill_of_its_own_request_more_than_that_of_others():
    trace = make(parameters(popularity=0.05, topic_share=0.5, topic_concentration=0.002), n_requests=8, n_prompt=96, n_decode=96)
    chosen = np.asarray(trace.experts).reshape(8, 2, 96, 4, 2)
    loads = np.stack([[activation_frequency(part, 8) for part in request] for request in chosen])
    loads /= np.linalg.norm(loads, axis=3, keepdims=True)
    cosine = np.einsum("ale,ble->ab", loads[:, 0], loads[:, 1]) / 4
    own, others = np.diag(cosine).mean(), cosine[~np.eye(8, dtype=bool)].mean()
    assert own > others + 0.1


WRONG = [{"n_requests": 0}, {"n_prompt": -1}, {"n_prompt": 0, "n_decode": 0}, {"n_calibration": -1}, {"seed": -1}, {"first": -1}]


@pytest.mark.parametrize("wrong", WRONG)
def test_impossible_counts_are_refused(wrong: dict[str, int]):
    with pytest.raises(ConfigError, match="expected at least"):
        make(parameters(), **wrong)
    with pytest.raises(ConfigError, match="expected at most 2147483647 rows of all requests, got 3000000000"):
        make(parameters(), n_requests=1000, n_prompt=10**6, n_decode=2 * 10**6)


def test_read_gates_is_linear_in_the_input():
    model = draw_model(parameters(), 0)
    states = on_grid(next(iter(request_states(model, 1, 0, 5))))
    nothing = np.zeros((4, 1))
    zero = read_gates(model, np.zeros_like(states), nothing)
    twice = read_gates(model, 2 * states, nothing) - zero
    np.testing.assert_allclose(twice, 2 * (read_gates(model, states, nothing) - zero), atol=1e-4)


def test_an_experiment_runs_on_a_synthetic_trace(tmp_path: Path):
    name = "mixtral-8x7b"
    trace = synthesize(read_parameters(name), n_requests=2, n_prompt=4, n_decode=6, seed=1, n_calibration=2)
    trace.write(tmp_path / "made.safetensors")
    (tmp_path / "e.yaml").write_text(
        f"model: {{base: {name}, expert_bits: 4}}\nhardware: rtx3090-epyc7532\ntrace: {tmp_path}/made.safetensors\n"
        "workload: {batch_size: 2, prompt_tokens: 4, decode_tokens: 4}\ncache: {ratio: 0.25}\n"
        "policies: [lru, belady]\n"
    )
    experiment = Experiment(load_config(tmp_path / "e.yaml"), str(tmp_path / "e.yaml"))
    rows = run_experiment(experiment).rows
    assert [row["error"] for row in rows] == [None, None]
    assert {row["source_label"] for row in rows} <= {"synthetic", "oracle"}  # the weakest of routing and costs
    assert {row["routing"] for row in rows} == {"synthetic"}  # whatever the label is
    assert all(str(row["notes"]).startswith(f"synthetic routing of {name}") for row in rows)


def test_the_schema_of_parameter_files_states_what_is_checked(tmp_path: Path):
    schema = parameter_schema()["properties"]
    raw = yaml.safe_load(read_parameters("mixtral-8x7b").to_yaml())
    assert set(raw) <= set(schema)
    values = raw["fitted"] | raw["assumed"]
    for name, one in schema["fitted"]["properties"].items():
        assert one["description"]
        assert ("default" in one) or name in values
        for end, step in (("minimum", -1), ("maximum", 1)):
            changed = {"fitted": {}, "assumed": {**values, name: one[end] + step}}
            (tmp_path / "p.yaml").write_text(yaml.safe_dump(raw | changed))
            with pytest.raises(ConfigError, match=rf"{name}: expected .* from {one['minimum']:g} to {one['maximum']:g}, got"):
                read_parameters(str(tmp_path / "p.yaml"))


LOGITS = (4 * Draws(5).normals(50, 64)).astype(np.float32)


def digests() -> list[str]:
    """Digest every array of a model and a trace of each shipped parameter set; router biases are found anew."""
    points = np.linspace(-30, 30, 60_001)
    found = [digest("exp", exp(points)), digest("log", log(points[points > 0])), digest("softmax", softmax(LOGITS))]
    for name in parameter_names():
        p = read_parameters(name).replace(n_layers=5)
        trace = synthesize(p, n_requests=3, n_prompt=9, n_decode=40, seed=2, n_input_requests=1, n_calibration=2, scores=True)
        arrays: dict[str, Any] = {"experts": trace.experts, "weights": trace.weights, "scores": trace.scores}
        model = draw_model(p, 2)
        arrays |= {"inputs": trace.inputs.values, **trace.tables, "gates": model.gates, "bias": model.bias, "mean": model.mean}
        arrays |= {"topics": model.topics, "spread": model.spread, "shares": model.shares, "innovation": model.innovation}
        for signal in trace.signals.values():
            arrays[f"{signal.name} scores"] = signal.scores
            if signal.ids is not None:
                arrays[f"{signal.name} ids"] = signal.ids
        found += [digest(f"{name}: {array_name}", array) for array_name, array in arrays.items()]
    return found


def digest(name: str, array: Any) -> str:
    return f"{name} {hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()}"


def test_a_matrix_product_of_numbers_on_the_grid_has_no_rounding_errors() -> None:
    draws = Draws(1)
    left, right = on_grid(8 * draws.normals(20, 512)), on_grid(8 * draws.normals(512, 20))
    units = exact.GRID**2
    whole = np.rint(left / exact.GRID).astype(object) @ np.rint(right / exact.GRID).astype(object)  # Python's integers
    np.testing.assert_array_equal((left @ right / units).astype(np.int64), whole.astype(np.int64))
    np.testing.assert_array_equal((left[:, ::-1] @ right[::-1]), left @ right)


def test_exp_and_log_are_right_to_some_last_bits() -> None:
    points = np.concatenate([np.linspace(-40, 40, 4001), [0.0, 1e-12, -1e-12, 700.0, -700.0]])
    with localcontext() as context:
        context.prec = 40
        for x, found in zip(points, exp(points), strict=True):
            assert abs(Decimal(float(found)) / Decimal(float(x)).exp() - 1) < Decimal("2e-15")
        for x, found in zip(np.exp(points), log(np.exp(points)), strict=True):
            wanted = Decimal(float(x)).ln()
            assert abs(Decimal(float(found)) - wanted) < Decimal("2e-15") * max(1, abs(wanted))


def test_normal_quantiles_are_so_coarse_that_errors_of_a_library_cannot_change_them() -> None:
    """Half a grid step is where rounding turns: no quantile is within 1e-12 of it, and `inv_cdf` is right to 1e-15."""
    places = np.asarray([NormalDist().inv_cdf((i + 0.5) / 2**16) for i in range(2**15)])
    steps = places * 2**20
    nearest = np.abs(steps - np.floor(steps) - 0.5).min() / 2**20
    assert nearest > 1e-12
    np.testing.assert_array_equal(exact._NORMAL64[: 2**15], np.rint(steps) / 2**20)
    np.testing.assert_array_equal(exact._NORMAL, exact._NORMAL64)  # float32 holds them all
    np.testing.assert_allclose(normal_quantiles(7), [NormalDist().inv_cdf((i + 0.5) / 7) for i in range(7)], atol=1e-6)


def test_draws_are_normal_uniform_and_in_any_order() -> None:
    values = Draws(3, 1).normals(400, 500).astype(np.float64)
    assert abs(values.mean()) < 5 / math.sqrt(values.size)
    assert abs(values.var() - 1) < 5 * math.sqrt(2 / values.size)
    assert abs((values**4).mean() - 3) < 0.1
    uniform = Draws(3, 2).uniforms(10_000)
    assert 0 <= uniform.min() < 0.001 < 0.999 < uniform.max() < 1
    assert sorted(Draws(3, 3).order(50)) == list(range(50))
    np.testing.assert_array_equal(Draws(3, 1).normals(5), values[0, :5])
    assert not np.array_equal(Draws(3, 4).normals(5), Draws(4, 3).normals(5))


def test_raw_bits_are_those_of_the_published_generator() -> None:
    """PCG64 (XSL-RR) and SeedSequence, which NumPy promises to keep: the first words of a stream, as they always were."""
    assert Draws(0, 1, 2, 3).raw(2).tolist() == [14132204965377392889, 15059639776266241494]


def test_softmax_is_right_to_the_precision_of_float16() -> None:
    found = softmax(LOGITS).astype(np.float64)
    powers = np.exp(LOGITS.astype(np.float64) - LOGITS.max(axis=1, keepdims=True))
    wanted = powers / powers.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(found, wanted, rtol=3e-4, atol=5e-8)
    np.testing.assert_allclose(found.sum(axis=1), 1, atol=1e-6)


def found_anew(name: str, monkeypatch: pytest.MonkeyPatch) -> np.ndarray[Any, Any]:
    """Find the biases of shipped parameters as if none were kept."""
    found = []
    balanced = synthetic.balanced_bias

    def noted(*arguments: Any) -> Any:
        found.append(balanced(*arguments))
        return found[-1].copy()  # the model goes on with it in place

    with monkeypatch.context() as patch:
        patch.setattr(synthetic, "kept_biases", lambda p, seed: None)
        patch.setattr(synthetic, "balanced_bias", noted)
        synthetic.draw_model(read_parameters(name), SEED)
    return found[0]


# `pytest tests/trace/test_synthesis.py --regenerate -m '' -n 0` finds biases anew, after a change to shipped parameters.
@pytest.mark.long
def test_all_can_be_found_again(regenerate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {key_of(read_parameters(name)): found_anew(name, monkeypatch) for name in parameter_names()}
    if regenerate:
        models = {key_of(read_parameters(name)): name for name in parameter_names()}
        write_container(FILE, found, {"schema_version": SCHEMA_VERSION, "models": models, "seed": SEED})
    kept, _ = read_container(FILE)
    assert kept.keys() == found.keys()
    for key, biases in found.items():
        np.testing.assert_array_equal(kept[key], biases)


def test_some_can_be_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = kept_biases(read_parameters("mixtral-8x7b"), SEED)
    np.testing.assert_array_equal(kept, found_anew("mixtral-8x7b", monkeypatch))


def test_shipped_parameters_have_kept_biases_and_others_none() -> None:
    for name in parameter_names():
        p = read_parameters(name)
        kept = kept_biases(p, SEED)
        assert kept is not None and kept.shape == (p.n_layers, p.n_experts)
        others = (p.replace(popularity=p.popularity * 1.01), p.replace(topic_share=p.topic_share + 0.01))
        assert kept_biases(p, SEED + 1) is None and all(kept_biases(other, SEED) is None for other in others)


@pytest.mark.parametrize(("n_experts", "n"), [(128, 8), (64, 6), (512, 16), (100, 7), (33, 2), (64, 16)])
def test_the_largest_logits_come_best_first_whatever_is_near_or_equal(n_experts: int, n: int) -> None:
    rng = np.random.default_rng(n_experts)
    logits = rng.standard_normal((40, n_experts), dtype=np.float32)
    best = np.argsort(logits, axis=1)[:, -n:]  # worst first
    for row in range(20):  # of the first ten rows the best differ by a last bit each, of the others they are equal
        for worse, better in pairwise(best[row]):
            logits[row, better] = np.nextafter(logits[row, worse], np.float32(9)) if row < 10 else logits[row, worse]
    logits[20:25] = np.abs(logits[20:25])
    logits[25:30] = -np.abs(logits[25:30])
    logits[30] = np.where(np.arange(n_experts) < n, -0.0, -1.0)
    logits[30, 0] = 0.0
    np.testing.assert_array_equal(top_ids(logits, n), np.argsort(-logits, axis=1, kind="stable")[:, :n])
