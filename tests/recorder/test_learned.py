"""The learned predictor: it learns what can be learnt, keeps training and trace apart, and gives the same again."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from moesim.cli.trace_learn import trace_learn
from moesim.errors import ConfigError
from moesim.recorder import RecordError
from moesim.recorder.learned import (
    Features,
    Gated,
    LearnedOptions,
    Predictors,
    accuracy,
    balanced_focal_loss,
    check_no_shared_requests,
    check_same_model,
    eighths,
    fitted_groups,
    hot_accuracy,
    learned_signal,
    load_predictors,
    network,
    predict,
    rate_share,
    save_predictors,
    train_predictors,
)
from moesim.trace import GateInputs, Signal, Trace
from moesim.trace.stats.prediction import recall, top_ids
from tests.recorder.learned_kit import EXPERTS, LAYERS, QUICK, TOP_K, synthetic


def trace_of(n_rows: int, seed: int, requests: list[dict[str, Any]], n_experts: int = EXPERTS, **more: Any) -> Trace:
    inputs, experts, weights = synthetic(n_rows, seed, n_experts)
    each = n_rows // len(requests)
    parts: dict[str, Any] = {
        "experts": experts, "weights": weights, "n_prompt": [each - 5] * len(requests),
        "n_decode": [5] * len(requests), "n_experts": n_experts, "model": "tiny", "label": "measured",
        "inputs": GateInputs(np.arange(n_rows, dtype=np.int32), inputs),
        "header": {"trace_requests": requests},
    }  # fmt: skip
    return Trace.build(**{**parts, **more})


def requests_of(first: int, n: int) -> list[dict[str, Any]]:
    return [{"text_sha256": f"{first + i:064x}", "n_prompt": 5} for i in range(n)]


@pytest.fixture(scope="module")
def trained() -> Predictors:
    return train_predictors(*synthetic(800, 0), EXPERTS, QUICK)


def recall_of(scores: np.ndarray, experts: np.ndarray) -> np.ndarray:
    return recall(np.argsort(-scores, axis=-1, kind="stable")[..., :TOP_K], experts)[1:]


# --- learning


def test_it_learns_a_nonlinear_function_of_the_state(trained: Predictors) -> None:
    inputs, experts, weights = synthetic(400, 1)
    scores = predict(trained, inputs, experts, weights)
    assert scores.shape == (400, LAYERS, EXPERTS) and not scores[:, 0].any()
    counts = np.stack([np.bincount(experts[:, n].ravel(), minlength=EXPERTS) for n in range(LAYERS)])
    baseline = recall_of(np.broadcast_to(counts, scores.shape), experts)
    assert (recall_of(scores, experts) > baseline + 0.15).all()
    shuffled = predict(trained, inputs[::-1], experts, weights)  # it is the state that tells
    assert (recall_of(shuffled, experts) < recall_of(scores, experts) - 0.15).all()


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    data = synthetic(200, 0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        options = dataclasses.replace(QUICK, epochs=2)
        before = torch.random.get_rng_state()
        paths = [save_predictors(train_predictors(*data, EXPERTS, options), tmp_path / f"{i}") for i in range(2)]
        other = save_predictors(train_predictors(*data, EXPERTS, dataclasses.replace(options, seed=1)), tmp_path / "other")
        assert torch.equal(torch.random.get_rng_state(), before)  # the caller's chance is left alone
    finally:
        torch.set_num_threads(threads)
    assert paths[0].read_bytes() == paths[1].read_bytes() != other.read_bytes()


def test_saved_predictors_predict_the_same(trained: Predictors, tmp_path: Path) -> None:
    data = synthetic(50, 2)
    again = load_predictors(save_predictors(dataclasses.replace(trained, facts={"n_tokens": 3}), tmp_path / "p.safetensors"))
    assert (again.options, again.groups, again.facts) == (trained.options, trained.groups, {"n_tokens": 3})
    np.testing.assert_array_equal(predict(again, *data), predict(trained, *data))


def test_no_more_rows_than_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    fit = Features.fit.__func__
    monkeypatch.setattr(Features, "fit", classmethod(lambda cls, states, n: seen.append(len(states)) or fit(cls, states, n)))
    options = dataclasses.replace(QUICK, epochs=1, batch_tokens=16, max_batches=3)
    train_predictors(*synthetic(100, 0), EXPERTS, options)
    assert seen == [48] * (LAYERS - 1)


# --- parts


def test_features_by_hand() -> None:
    rng = np.random.default_rng(0)
    states = (rng.normal(size=(500, 3)) * [10, 1, 0.1] + [5, 0, -5]).astype(np.float32)
    features = Features.fit(states, 2)
    read = features.of(states, np.array([[1, 3]] * 500), np.array([[0.75, 0.25]] * 500), 4).numpy()
    assert read.shape == (500, 2 + 8)
    np.testing.assert_allclose(np.cov(read[:, :2].T), np.eye(2), atol=0.01)  # decorrelated, of unit variance
    for number in range(2):  # the directions of most variance are here the axes, in order
        centred = states[:, number] - states[:, number].mean()
        assert abs(np.corrcoef(read[:, number], centred)[0, 1]) > 0.99
    assert read[0, 2:].tolist() == [0, 1, 0, 1, 0, 0.75, 0, 0.25]
    assert Features.fit(states, 256).components.shape == (3, 3)  # limited by the width


def test_loss_by_hand() -> None:
    options = LearnedOptions(focal_weight=0.5, focal_power=2.0, least_frequency=0.5)
    logits, wanted = torch.tensor([[0.0, np.log(3.0)]]), torch.tensor([[1.0, 0.0]])
    bce = [np.log(2), np.log(4)]  # p of what happened: 1/2 and 1/4
    frequency = torch.tensor([0.9, 0.1])  # relative to uniform 1.8 and 0.2, the latter raised to 0.5
    by_hand = [bce[0] / 1.8 + 0.5 * 0.25 * bce[0], bce[1] / 0.5 + 0.5 * 0.5625 * bce[1]]
    assert float(balanced_focal_loss(logits, wanted, frequency, options)) == pytest.approx(np.mean(by_hand), rel=1e-5)


def test_learning_rate_by_hand() -> None:
    options = LearnedOptions(epochs=30, warmup_epochs=5)
    shares = [rate_share(epoch, options) for epoch in (0, 1, 5, 17.5, 30)]
    assert shares == pytest.approx([0, 0.2, 1, 0.5, 0])


def test_the_middle_group_has_the_gated_residual() -> None:
    options = LearnedOptions(dropout=0.0)
    names = {
        group: {n.partition(".")[0] for n, _ in network(group, 4, 8, options).named_parameters()} for group in ("input", "middle")
    }
    assert names == {"input": {"first", "last"}, "middle": {"first", "residual", "gate", "last"}}
    model = Gated(4, 8, options).eval()
    x = torch.ones(1, 4)
    state = model.first(x)
    with torch.no_grad():
        model.gate.weight.zero_()
        model.gate.bias.fill_(-100.0)  # closed: the residual is not heard
        torch.testing.assert_close(model(x), model.last(state))
        model.gate.bias.fill_(100.0)
        torch.testing.assert_close(model(x), model.last(state + model.residual(state)))


def test_sizes_are_those_of_the_paper() -> None:
    """0.5 to 2.8 MB a layer, for 64 experts and states at least 512 wide."""
    for group, components, size in (("input", 256, 0.69), ("middle", 512, 2.85)):
        model = network(group, components + 2 * 64, 64, LearnedOptions())
        assert sum(p.numel() for p in model.parameters()) * 4 / 1e6 == pytest.approx(size, abs=0.02)


def test_groups() -> None:
    assert eighths(32) == ("input",) * 4 + ("middle",) * 24 + ("output",) * 4
    assert eighths(4) == ("input", "middle", "middle", "output")
    accuracy = np.array([0.0, 0.3, 0.35, 0.8, 0.82, 0.81, 0.8, 0.6, 0.6])
    assert fitted_groups(accuracy) == ("input",) * 3 + ("middle",) * 4 + ("output",) * 2


def test_hot_accuracy_by_hand() -> None:
    true = np.array([[[0]], [[0]], [[1]], [[1]], [[2]], [[3]], [[4]], [[5]]])  # one batch, one layer, experts 0 to 5 used
    said = np.array([[[0]], [[0]], [[1]], [[2]], [[9]], [[9]], [[9]], [[7]]])  # named: 9, 0, then 1 and 2
    assert hot_accuracy(said, true, 10, 8, 0).tolist() == [0.75]
    assert np.isnan(hot_accuracy(said, true, 6, 8, 0)).all()
    tie = np.array([[[e]] for e in (0, 0, 1, 1, 2, 3, 4, 5, 6, 7)])  # six of 0..7 are not determined
    assert hot_accuracy(tie, tie, 10, 10, 0).tolist() == [1.0]


# --- traces


def test_the_signal_and_its_accuracy(trained: Predictors) -> None:
    trace, calibration = trace_of(200, 3, requests_of(10, 4)), trace_of(100, 4, requests_of(0, 4))
    signal = learned_signal(trained, trace)
    assert signal.ids is None and (signal.lookahead, signal.needs_layer_offset, signal.first_layer) == (1, 1, 1)
    dense = predict(trained, trace.inputs.values, trace.experts, trace.weights)
    np.testing.assert_allclose(signal.scores, dense, atol=1e-3)
    gate = Signal("gate_next1", signal.rows[50:], np.ones((150, LAYERS, EXPERTS), np.float16))  # names 0 and 1 always
    both = dataclasses.replace(trace, signals={"learned": signal, "gate_next1": gate})
    both.check()
    rows = accuracy(both, calibration, trained.groups, batch_tokens=50)
    assert [(row["group"], row["layers"]) for row in rows] == [("middle", "1-2"), ("output", "3-3"), ("all", "1-3")]
    true = trace.experts[50:]
    mine = recall(top_ids(signal, slice(50, None), TOP_K), true)
    assert rows[0]["learned recall"] == pytest.approx(mine[1:3].mean())
    assert rows[1]["gate_next1 recall"] == pytest.approx((true[:, 3] < 2).mean())
    common = np.argsort(-np.bincount(calibration.experts[:, 3].ravel(), minlength=EXPERTS), kind="stable")[:TOP_K]
    assert rows[1]["frequency recall"] == pytest.approx(np.isin(true[:, 3], common).mean())
    assert rows[2]["n_tokens"] == 150 and 0 < rows[2]["gate_next1 hot"] <= rows[2]["learned hot"] <= 1


def test_many_experts_are_stored_as_the_best_2k() -> None:
    trace = trace_of(40, 0, requests_of(0, 2), n_experts=20)
    predictors = train_predictors(*synthetic(60, 1, 20), 20, dataclasses.replace(QUICK, epochs=1))
    signal = learned_signal(predictors, trace)
    assert signal.ids.shape == signal.scores.shape == (40, LAYERS, 2 * TOP_K)
    dense = predict(predictors, trace.inputs.values, trace.experts, trace.weights)[:, 1:]
    np.testing.assert_array_equal(signal.ids[:, 1:], np.argsort(-dense, axis=-1, kind="stable")[..., :4])
    dataclasses.replace(trace, signals={"learned": signal}).check()


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"text_sha256": "a", "tokens_sha256": "b"}, {"text_sha256": "c", "tokens_sha256": "b", "n_decode": 4}),
        ({"file": "x.py", "start": 5, "n_prompt": 64}, {"file": "x.py", "start": 5, "n_prompt": 128}),
    ],
)
def test_a_shared_request_is_refused(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    apart = {key: f"{value}!" for key, value in ours.items()}
    check_no_shared_requests(
        {"trace_requests": [apart, ours]},
        {"trace_requests": [apart | {"start": 6}] if "file" in ours else [{"text_sha256": "z"}]},
        ("a", "b"),
    )
    with pytest.raises(RecordError, match=r"b: trace_requests\[1\]: expected .* got request 0 of a; record other prompts"):
        check_no_shared_requests({"trace_requests": [ours]}, {"trace_requests": [apart, theirs]}, ("a", "b"))


@pytest.mark.parametrize("listed", [None, [], [{"n_prompt": 3}], [7]])
def test_requests_that_nobody_can_tell_apart_are_refused(listed: Any) -> None:
    with pytest.raises(RecordError, match=r"a: header.trace_requests.*: expected"):
        check_no_shared_requests({"trace_requests": listed}, {"trace_requests": requests_of(0, 1)}, ("a", "b"))


def test_traces_that_do_not_fit_are_refused(trained: Predictors) -> None:
    trace = trace_of(40, 0, requests_of(0, 2))
    other = dataclasses.replace(trace, header={**trace.header, "model": "large"})
    with pytest.raises(RecordError, match="a: model: expected 'large' as in b, got 'tiny'"):
        check_same_model(trace, other, ("a", "b"))
    with pytest.raises(RecordError, match="b: inputs: expected the inputs of the routers, got none"):
        check_same_model(trace, dataclasses.replace(trace, inputs=None), ("a", "b"))
    with pytest.raises(RecordError, match="a: weights: expected gate weights, got none"):
        check_same_model(dataclasses.replace(trace, weights=None), trace, ("a", "b"))
    inputs, experts, weights = synthetic(10, 0)
    with pytest.raises(RecordError, match="expected 4 layers of width 8, got 4 of 5"):
        predict(trained, inputs[..., :5], experts, weights)
    with pytest.raises(RecordError, match=r"expected inputs .* got \(10, 4, 8\), \(10, 3, 2\)"):
        train_predictors(inputs, experts[:, :3], weights, EXPERTS)
    with pytest.raises(RecordError, match="expected ids below 4, got 7"):
        train_predictors(inputs, experts, weights, 4)
    with pytest.raises(RecordError, match="at least 2 layers and 2 tokens, got 1 and 10"):
        train_predictors(inputs[:, :1], experts[:, :1], weights[:, :1], EXPERTS)


@pytest.mark.parametrize(
    ("name", "value", "wanted"), [("epochs", 0, "at least 1"), ("dropout", 1.5, "0 to 0.99"), ("noise", -1.0, "at least 0")]
)
def test_bad_options(name: str, value: float, wanted: str) -> None:
    with pytest.raises(RecordError, match=f"learned predictor: {name}: expected {wanted}, got {value}"):
        LearnedOptions(**{name: value})


@pytest.mark.parametrize("content", [b"", b"not safetensors at all", None])
def test_a_file_that_is_no_predictor(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "p"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RecordError, match=r"p: expected a learned predictor, got .*; train it again"):
        load_predictors(path)


def test_a_flipped_bit_is_never_read(trained: Predictors, tmp_path: Path) -> None:
    data, rng = save_predictors(trained, tmp_path / "p").read_bytes(), random.Random(1)
    for _ in range(40):
        at = rng.randrange(len(data))
        (tmp_path / "p").write_bytes(data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :])
        with pytest.raises(RecordError, match=r"p: expected a learned predictor, got .*; train it again"):
            load_predictors(tmp_path / "p")


# --- the command


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    names = str(tmp_path / "c.safetensors"), str(tmp_path / "t.safetensors")
    trace_of(60, 0, requests_of(0, 3)).write(names[0])
    trace_of(40, 1, requests_of(5, 2)).write(names[1])
    return names


def run(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(trace_learn)
    return CliRunner().invoke(app, [*arguments, "--epochs", "2", "--option", "width=16", "--option", "rate_outer=0.01"])


def test_the_command(files: tuple[str, str], tmp_path: Path) -> None:
    out, kept = tmp_path / "out.safetensors", tmp_path / "p.safetensors"
    result = run(files[0], "--for", files[1], "--out", str(out), "--predictor", str(kept), "-o", "json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert [row["group"] for row in rows] == ["middle", "output", "all"] and rows[0]["n_tokens"] == 40
    trace = Trace.read(out)
    assert trace.header["learned"]["trained_on"] == requests_of(0, 3)
    assert trace.header["learned"]["options"]["width"] == 16 and trace.has_signal("learned", 1)
    signal = learned_signal(load_predictors(kept), Trace.read(files[1]))
    np.testing.assert_array_equal(trace.signals["learned"].scores, signal.scores)
    text = run(files[0], "--for", files[1], "--out", str(out), "--overwrite").stdout
    assert f"{rows[2]['learned recall']:.4f}" in text


def test_the_command_refuses(files: tuple[str, str], tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    leaking = run(files[0], "--for", files[0], "--out", str(out))
    assert isinstance(leaking.exception, RecordError) and "was not trained on" in str(leaking.exception)
    bare = run(files[0], "--for", files[1], "--out", str(out), "--groups", "fitted")
    assert isinstance(bare.exception, RecordError) and "expected 'gate_next1'" in str(bare.exception)
    for text, message in (("widht=3", "NAME=VALUE with one of batch_tokens"), ("batch_tokens=x", "expected int after")):
        wrong = run(files[0], "--for", files[1], "--out", str(out), "--option", text)
        assert isinstance(wrong.exception, ConfigError) and message in str(wrong.exception.of_command)
    for where, message in (
        (["--out", files[1]], "add --overwrite"),  # the trace that the predictions are for
        (["--out", str(out), "--predictor", files[0]], f"--predictor {files[0]}: expected nothing there"),
        (["--out", str(out), "--predictor", str(out)], "expected another file than --out"),
        (["--out", str(tmp_path)], "expected a file to write, got a folder"),
    ):
        before = Path(files[0]).read_bytes(), Path(files[1]).read_bytes()
        wrong = run(files[0], "--for", files[1], *where)
        assert isinstance(wrong.exception, ConfigError) and message in str(wrong.exception.of_command)
        assert (Path(files[0]).read_bytes(), Path(files[1]).read_bytes()) == before
    assert not out.exists()
