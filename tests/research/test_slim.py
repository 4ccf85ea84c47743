"""What a miniature's trace leaves out: rounding keeps sums, order and the choice of experts."""

from __future__ import annotations

import numpy as np

from miniature.slim import SCORE_PARTS, WEIGHT_PARTS, slim
from moesim.trace import Signal, Trace

N, LAYERS, EXPERTS, TOP_K = 40, 3, 16, 4


def recorded() -> Trace:
    rng = np.random.default_rng(3)
    scores = rng.dirichlet(np.full(EXPERTS, 0.2), (N, LAYERS))  # many shares below a part
    best = np.argsort(-scores, axis=-1)
    weights = np.take_along_axis(scores, best[..., :TOP_K], -1)
    ids = best[..., : 2 * TOP_K].astype(np.uint8)
    known = np.take_along_axis(scores, best[..., : 2 * TOP_K], -1).astype(np.float16)
    rows = np.arange(N, dtype=np.int32)
    signals = [
        Signal("gate_next1", rows, known, ids, first_layer=0),
        Signal("shadow-int8", rows, known, ids, first_layer=0),
        Signal("residual", rows, scores.astype(np.float16), first_layer=0),
    ]
    return Trace.build(
        model="m",
        label="measured",
        n_prompt=[N // 4, N // 4],
        n_decode=[N // 4, N // 4],
        experts=best[..., :TOP_K],
        n_experts=EXPERTS,
        weights=weights / weights.sum(axis=-1, keepdims=True),
        scores=scores,
        signals={signal.name: signal for signal in signals},
        tables={"coactivation": np.zeros((LAYERS, EXPERTS, EXPERTS))},
    )


def test_weights_are_parts_with_sum_and_order_kept() -> None:
    trace = recorded()
    slimmed = slim(trace)
    slimmed.check()
    assert slimmed.weights is not None
    assert trace.weights is not None
    parts = slimmed.weights.astype(np.float64) * WEIGHT_PARTS
    np.testing.assert_array_equal(parts, np.rint(parts))
    np.testing.assert_array_equal(parts.sum(axis=-1), WEIGHT_PARTS)
    assert parts.min() >= 1
    assert (np.diff(parts, axis=-1) <= 0).all()
    assert np.abs(parts / WEIGHT_PARTS - trace.weights).max() <= TOP_K / WEIGHT_PARTS
    np.testing.assert_array_equal(slimmed.experts, trace.experts)


def test_scores_are_parts_and_may_be_nothing() -> None:
    slimmed = slim(recorded())
    assert slimmed.scores is not None
    parts = slimmed.scores.astype(np.float64) * SCORE_PARTS
    np.testing.assert_array_equal(parts, np.rint(parts))
    np.testing.assert_array_equal(parts.sum(axis=-1), SCORE_PARTS)
    assert parts.min() == 0


def test_signals_keep_decode_rows_the_best_ids_and_a_few_bits() -> None:
    trace = recorded()
    slimmed = slim(trace)
    for name, most in (("gate_next1", 6), ("shadow-int8", TOP_K)):
        signal, before = slimmed.signals[name], trace.signals[name]
        kept = np.asarray(trace.phase)[before.rows] == 1
        assert kept.sum() == len(signal.rows) == N // 2
        assert signal.ids is not None
        assert before.ids is not None
        np.testing.assert_array_equal(signal.ids, before.ids[kept][..., :most])
        exact = before.scores[kept][..., :most].astype(np.float64)
        assert (np.abs(signal.scores - exact) <= exact / 16 + 2.0**-18).all()
        assert (np.diff(signal.scores, axis=-1) <= 0).all()
        assert (signal.scores.view(np.uint16) & 0x7F == 0).all()  # seven of the ten bits are gone
