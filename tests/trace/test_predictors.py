"""What each source of predictions says."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from moesim.errors import ConfigError
from moesim.testing.traces import synthetic_trace
from moesim.trace import Signal, Trace
from moesim.trace import predictors as synthetic_predictor
from moesim.trace.predictors import (
    Coactivation,
    Frequency,
    Oracle,
    PredictorSet,
    RecordedSignal,
    Synthetic,
    make_predictor,
    uniform,
)
from moesim.trace.workload import WorkloadSpec, compose

SHAPE = {"n_layers": 3, "n_experts": 32, "top_k": 4, "prompt": 6, "decode": 5}
TRACE = synthetic_trace(**SHAPE, n_requests=4, calibration=True, signals={"residual": 0.8})
DENSE = synthetic_trace(n_layers=3, n_experts=8, top_k=2, prompt=6, decode=5, signals={"gate_next1": 0.7})
WORKLOAD = compose(TRACE, WorkloadSpec(batch_size=4, micro_batches=2))
PREFILL, *DECODE = WORKLOAD.steps


def recall_of(predictor: Synthetic | RecordedSignal | Oracle) -> float:
    found = wanted = 0
    for step in WORKLOAD.steps:
        for mb, micro in enumerate(step.micro):
            for layer in range(1, 3):
                answer = predictor.predict(step, mb, layer)
                routed = micro.layers[layer].experts
                found += int((routed[:, :, None] == answer[0][:, None, :]).sum())
                wanted += routed.size
    return found / wanted


def test_a_recorded_signal_is_looked_up_by_row() -> None:
    signal = TRACE.signals["residual"]
    predictor = RecordedSignal(TRACE, "residual")
    for mb, requests in ((0, (0, 1)), (1, (2, 3))):
        answer = predictor.predict(DECODE[1], mb, 2)
        rows = [int(WORKLOAD.admitted[r].decode_rows[1]) for r in requests]
        assert np.array_equal(answer[0], signal.ids[rows, 2, :4])
        assert np.array_equal(answer[1], signal.scores[rows, 2, :4])
    wide = RecordedSignal(TRACE, "residual", width=8).predict(DECODE[1], 0, 2)
    assert wide[0].shape == (2, 8)


def test_a_dense_signal_gives_its_best_ids_beside_all_scores() -> None:
    ids, scores = RecordedSignal(DENSE, "gate_next1").predict(compose(DENSE, WorkloadSpec(batch_size=2)).steps[0], 0, 1)
    assert (ids.shape, scores.shape) == ((12, 2), (12, 8))
    best = np.sort(scores.astype(np.float64), axis=1)[:, ::-1][:, :2]
    assert np.array_equal(np.take_along_axis(scores.astype(np.float64), ids, axis=1), best)


def partly(rows: list[int], **facts: int | None) -> Trace:
    scores = np.zeros((len(rows), DENSE.n_layers, DENSE.n_experts), np.float16)
    signal = Signal("shadow", np.array(rows, np.int32), scores, **facts)
    return replace(DENSE, signals={"shadow": signal})


def test_what_a_signal_does_not_cover_is_not_predicted() -> None:
    trace = partly([*range(6, 11), *range(17, 21)])  # decode of request 0, and of request 1 but for its last row
    predictor = RecordedSignal(trace, "shadow")
    steps = compose(trace, WorkloadSpec(batch_size=2, requests=(0, 1))).steps
    assert predictor.predict(steps[0], 0, 1) is None
    assert predictor.predict(steps[1], 0, 1) is not None
    assert predictor.predict(steps[1], 0, 0) is None  # before its first layer
    assert predictor.predict(steps[5], 0, 1) is None


def test_which_state_a_prediction_needs() -> None:
    def asked(predictor: object) -> list[int | None]:
        return [predictor.needs_layer(layer) for layer in range(3)]

    assert asked(RecordedSignal(TRACE, "residual")) == [None, 0, 1]
    two_ahead = partly([0], lookahead=2, needs_layer_offset=2, first_layer=2)
    assert asked(RecordedSignal(two_ahead, "shadow")) == [None, None, 0]
    assert asked(RecordedSignal(partly([0], needs_layer_offset=None, first_layer=0), "shadow")) == [None] * 3
    assert asked(Oracle()) == asked(Frequency(TRACE)) == [None] * 3
    assert asked(Coactivation(TRACE)) == asked(Synthetic(32, 0.5)) == [None, 0, 1]


def test_frequency_ranks_by_the_calibration_of_the_phase() -> None:
    predictor = Frequency(TRACE)
    for step, table in ((PREFILL, "activation_frequency"), (DECODE[0], "activation_frequency_decode")):
        ids, scores = predictor.predict(step, 1, 2)
        assert ids.shape == (step.micro[1].n_rows, 4)
        assert scores.shape == (step.micro[1].n_rows, 32)
        assert np.array_equal(ids[0], np.argsort(-TRACE.tables[table][2], kind="stable")[:4])
        assert np.array_equal(ids[-1], ids[0])
        assert scores[0].sum() == pytest.approx(1)


def test_running_counts_hold_the_past_only_whatever_the_order_of_questions() -> None:
    for layer in range(1, 3):
        predictor = Frequency(TRACE, WORKLOAD)
        assert predictor.predict(PREFILL, 0, layer) is None
        late = predictor.predict(DECODE[3], 0, layer)
        early = predictor.predict(DECODE[1], 0, layer)
        again = predictor.predict(DECODE[3], 1, layer)
        rows = np.concatenate([s.rows for s in WORKLOAD.steps[:2]])
        counts = np.bincount(TRACE.experts[rows, layer].ravel(), minlength=32)
        assert np.allclose(early[1][0], counts / counts.sum())
        assert np.array_equal(late[0][0], again[0][0])


def test_coactivation_adds_up_what_follows_each_expert() -> None:
    table = np.zeros((3, 8, 8))
    table[0, 2, 5] = table[0, 3, 5] = 1
    table[0, 2, 1] = 3
    trace = replace(DENSE, tables={"coactivation": table})
    experts = trace.experts.copy()
    experts[:, 0] = [2, 3]
    trace = replace(trace, experts=experts)
    step = compose(trace, WorkloadSpec()).steps[0]
    ids, scores = Coactivation(trace).predict(step, 0, 1)
    assert scores[0].tolist() == [0, 0.75, 0, 0, 0, 1.25, 0, 0]
    assert ids[0].tolist() == [5, 1]
    assert Coactivation(trace).predict(step, 0, 0) is None
    with pytest.raises(ConfigError, match="the trace has no calibration table 'coactivation'"):
        Coactivation(DENSE)


def test_running_coactivation_counts_the_steps_before() -> None:
    predictor = Coactivation(TRACE, WORKLOAD)
    assert predictor.predict(PREFILL, 0, 1) is None
    answer = predictor.predict(DECODE[0], 0, 1)
    before = np.zeros((32, 32))
    for row in PREFILL.rows:
        before[np.ix_(TRACE.experts[row, 0], TRACE.experts[row, 1])] += 1
    shares = before / np.maximum(before.sum(axis=1, keepdims=True), 1)
    assert np.allclose(answer[1][0], shares[TRACE.experts[DECODE[0].rows[0], 0]].sum(axis=0))


@pytest.mark.parametrize("recall", [0.0, 0.5, 0.9, 1.0])
def test_a_synthetic_prediction_has_the_recall_asked_for(recall: float) -> None:
    predictor = Synthetic(32, recall, seed=3)
    assert recall_of(predictor) == pytest.approx(recall, abs=0.06)
    assert predictor.label == "synthetic" and Oracle().label == "oracle" and recall_of(Oracle()) == 1.0
    for step in WORKLOAD.steps:
        answer = predictor.predict(step, 0, 1)
        ordered = np.sort(answer[0], axis=1)
        assert (ordered[:, 1:] > ordered[:, :-1]).all()  # distinct
        assert ordered.max() < 32


def test_a_synthetic_prediction_may_have_a_recall_of_its_own_in_each_layer() -> None:
    def wrong(recalls: float | list[float], layer: int) -> float:
        predictor, parts = Synthetic(32, recalls, seed=3), []
        for step in WORKLOAD.steps:
            answer = predictor.predict(step, 0, layer)
            parts.append((answer[0] != step.micro[0].layers[layer].experts).mean())
        return float(np.mean(parts))

    trace = synthetic_trace(n_layers=5, n_experts=32, top_k=4, prompt=6, decode=5)
    step = compose(trace, WorkloadSpec(batch_size=4)).steps[0]
    named = make_predictor("synthetic:1,0,0.5", trace, WORKLOAD, seed=3)
    assert named.name == "synthetic:1,0,0.5"
    assert named.predict(step, 0, 0) is None
    for layer, recall in ((1, 1.0), (2, 0.0), (3, 0.5), (4, 0.5)):  # the first is about layer 1, the last repeats
        flat, by_layer = Synthetic(32, recall, seed=3).predict(step, 0, layer), named.predict(step, 0, layer)
        assert np.array_equal(flat[0], by_layer[0])
    assert (wrong([1.0, 0.0], 1), wrong([1.0, 0.0], 2)) == (0.0, 1.0)


def test_a_synthetic_prediction_depends_on_its_place_only() -> None:
    split, whole = WORKLOAD, compose(TRACE, WorkloadSpec(batch_size=4))
    one, two = Synthetic(32, 0.5, seed=1), Synthetic(32, 0.5, seed=1)
    places = [(i, layer) for i in range(3) for layer in (1, 2)]
    together = {p: two.predict(whole.steps[p[0]], 0, p[1]) for p in reversed(places)}
    for i, layer in places:
        parts = [one.predict(split.steps[i], mb, layer) for mb in (0, 1)]
        expected = together[i, layer]
        assert np.array_equal(np.concatenate([p[0] for p in parts if p is not None]), expected[0])
    other = Synthetic(32, 0.5, seed=2).predict(PREFILL, 0, 1)
    first = one.predict(PREFILL, 0, 1)
    assert not np.array_equal(other[0], first[0])
    step = compose(synthetic_trace(n_layers=2, n_experts=4, top_k=3), WorkloadSpec()).steps[0]  # hardly any expert is left
    assert all(len(set(row)) == 3 for row in Synthetic(4, 0.0).predict(step, 0, 1)[0].tolist())


def test_the_draws_are_even_and_fixed() -> None:
    draws = uniform(7, 0, np.array([4, 5]), np.arange(2000), 5)
    assert draws.mean() == pytest.approx(0.5, abs=0.01)
    assert np.histogram(draws, bins=10, range=(0, 1))[0].std() < 90
    independent = np.corrcoef(draws.swapaxes(1, 2).reshape(10, 2000))
    assert abs(independent - np.eye(10)).max() < 0.08
    assert np.array_equal(uniform(7, 0, np.array([5]), np.arange(5, 9), 5)[0], draws[1, 5:9])
    # A change here changes every result that was made with a synthetic predictor.
    golden = [2780430541989070, 8225704849019949, 6377781199279171]
    assert (uniform(0, 0, np.array([1]), np.array([0]), 3) * 2**53).astype(int).tolist() == [[golden]]


def test_large_steps_are_drawn_layer_by_layer_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    together = [Synthetic(32, 0.5).predict(PREFILL, 1, layer) for layer in (1, 2)]
    monkeypatch.setattr(synthetic_predictor, "_CELLS_AT_ONCE", 0)
    apart = [Synthetic(32, 0.5).predict(PREFILL, 1, layer) for layer in (1, 2)]
    for one, other in zip(together, apart, strict=True):
        assert np.array_equal(one[0], other[0])


def test_predictors_by_name() -> None:
    assert isinstance(make_predictor("residual", TRACE, WORKLOAD), RecordedSignal)
    assert isinstance(make_predictor("signal:residual", TRACE, WORKLOAD), RecordedSignal)
    assert make_predictor("synthetic:0.8", TRACE, WORKLOAD).name == "synthetic:0.8"
    assert make_predictor("oracle", TRACE, WORKLOAD).label == "oracle"
    for kind in ("frequency", "coactivation"):
        assert make_predictor(kind, TRACE, WORKLOAD).predict(PREFILL, 0, 1) is not None  # calibrated
        assert make_predictor(f"{kind}:running", TRACE, WORKLOAD).predict(PREFILL, 0, 1) is None
        untabled = compose(DENSE, WorkloadSpec())
        assert make_predictor(kind, DENSE, untabled).predict(untabled.steps[0], 0, 1) is None  # counts


def test_sources_that_could_be_asked_for_are_listed_once() -> None:
    found = PredictorSet(TRACE, WORKLOAD, {"signal:learned": "oracle", "residual": "oracle"}, 0)
    names = ["oracle", "frequency", "coactivation", "synthetic:<recall>", "residual", "signal:learned"]
    assert ([*found], len(found), found.labels) == (names, 6, ())
    assert found["signal:learned"] is found["signal:learned"] and found.labels == ("oracle",)
    found._made = {f"source{i}": SimpleNamespace(label=label) for i, label in enumerate("hcfaebdg")}  # type: ignore[assignment]
    assert found.labels == tuple("abcdefgh")


RECALL = "expected a recall such as synthetic:0.8, or one a layer such as synthetic:0.4,0.7,0.8"
KNOWN = "known: coactivation, frequency, oracle, residual, synthetic:<recall>"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("residul", f"unknown predictor 'residul'; did you mean 'residual'? {KNOWN}"),
        ("signal:gate", "unknown signal 'gate'; known: residual"),
        ("synthetic:high", f"predictor 'synthetic:high': {RECALL}"),
        ("synthetic:0.5,", f"predictor 'synthetic:0.5,': {RECALL}"),
        ("synthetic:0.5,-1", "predictor synthetic: expected a recall from 0 to 1, got -1.0"),
        ("synthetic:1.5", "predictor synthetic: expected a recall from 0 to 1, got 1.5"),
        ("frequency:soon", f"unknown predictor 'frequency:soon'; did you mean 'frequency'? {KNOWN}"),
    ],
)
def test_a_name_that_means_nothing_is_an_error(source: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        make_predictor(source, TRACE, WORKLOAD)
