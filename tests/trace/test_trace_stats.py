"""Figures of a trace, and the replays of caches over it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesim.errors import TraceError
from moesim.testing.traces import synthetic_trace
from moesim.trace.stats.caches import layer_hit_rates
from moesim.trace.stats.calibration import Counts
from moesim.trace.stats.prediction import coactivation, coactivation_recall, signal_recall
from moesim.trace.stats.trace_stats import (
    activation_frequency,
    normalised_entropy,
    prefill_decode_cosine,
    reuse,
    reuse_baseline,
    stats,
    top_over_uniform,
)
from tests.cache_replay import replay_belady, replay_lfu, replay_lru

visits_of = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True), min_size=1, max_size=8)


# ---------------------------------------------------------------------------------------------------- replays


def test_a_visit_is_looked_up_before_the_cache_changes() -> None:
    visits = [[0, 1], [2, 0]]
    assert replay_lru(visits, 2) == [False, False, False, True]
    assert replay_lru(visits, 2, set_wise=False) == [False] * 4  # 2 has pushed 0 out


def test_lru_counts_bytes() -> None:
    sizes = {0: 2, 1: 3, 2: 4}
    assert replay_lru([[0], [1], [0], [2], [1], [0]], 6, sizes=sizes) == [
        False,
        False,
        True,
        False,
        False,
        False,
    ]
    assert replay_lru([[2], [2]], 3, sizes=sizes) == [False, False]  # larger than the cache


def test_lfu_keeps_what_was_used_most_and_then_last() -> None:
    assert replay_lfu([[0], [0], [1], [2], [1], [0]], 2) == [False, True, False, False, False, True]
    assert replay_lfu([[0], [1], [2], [1]], 2) == [False, False, False, True]


def test_a_cache_smaller_than_a_visit() -> None:
    assert replay_lru([[0, 1, 2], [0, 1, 2]], 2) == [False] * 3 + [False, True, True]
    assert replay_lfu([[0, 1, 2], [0, 1, 2]], 2) == [False] * 3 + [False, True, True]
    assert replay_belady([[0, 1, 2], [0, 1, 2]], 2) == [False] * 3 + [False, True, True]
    assert replay_belady([[0, 1, 2], [0, 1, 2]], 2, keep_visit=True) == [False] * 3 + [False, True, True]
    assert replay_lru([[0], [0]], 0) == replay_belady([[0], [0]], 0) == replay_lfu([[0], [0]], 0) == [False] * 2


def slow_lfu(visits: Sequence[Sequence[int]], capacity: int) -> list[bool]:
    cached: set[int] = set()
    uses: dict[int, int] = {}
    last: dict[int, int] = {}
    hits = []
    for visit in visits:
        hits += [key in cached for key in visit]
        for key in visit:
            uses[key], last[key] = uses.get(key, 0) + 1, len(last) + sum(uses.values())
            cached.add(key)
        for key in sorted(cached, key=lambda k: (k in visit, uses[k], last[k]))[: max(0, len(cached) - capacity)]:
            cached.remove(key)
    return hits


@settings(max_examples=200)
@given(visits=visits_of, capacity=st.integers(0, 5))
def test_lfu_is_the_obvious_one(visits: list[list[int]], capacity: int) -> None:
    assert replay_lfu(visits, capacity) == slow_lfu(visits, capacity)
    singles = [[key] for visit in visits for key in visit]
    assert replay_lfu(visits, capacity, set_wise=False) == slow_lfu(singles, capacity)


@settings(max_examples=60)
@given(data=st.data())
def test_the_fast_layer_caches_are_the_plain_replays(data: st.DataObject) -> None:
    n_experts = data.draw(st.integers(3, 9))
    top_k = data.draw(st.integers(1, 3))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    rows = rng.random((data.draw(st.integers(1, 30)), 3, n_experts)).argsort(axis=2)[:, :, :top_k].astype(np.uint8)
    sizes = list(range(n_experts + 1))
    replays: dict[str, Any] = {"lru": replay_lru, "lfu": replay_lfu, "belady": replay_belady}
    replays["belady-visit"] = partial(replay_belady, keep_visit=True)
    rates = layer_hit_rates(rows, n_experts, sizes, list(replays))
    for name, replay in replays.items():
        for i, size in enumerate(sizes):
            for layer in range(3):
                hits = replay(rows[:, layer].tolist(), size)
                assert rates[name][i, layer] == pytest.approx(np.mean(hits)), (name, size)


# ---------------------------------------------------------------------------------------------------- figures


def test_reuse_compares_tokens_of_the_same_request_only() -> None:
    experts = np.array([[[0, 1]], [[1, 2]], [[1, 2]], [[3, 0]]])
    request = np.array([0, 0, 1, 1])
    assert reuse(experts, request, 1, 4) == pytest.approx((1 + 0) / 4)
    assert math.isnan(reuse(experts, request, 2, 4))
    assert math.isnan(reuse(experts[:1], request[:1], 8, 4))


def test_the_baseline_of_even_routing_is_its_share_of_the_experts() -> None:
    rng = np.random.default_rng(0)
    experts = rng.random((4000, 2, 16)).argsort(axis=2)[:, :, :4]
    assert reuse_baseline(experts, 16) == pytest.approx(4 / 16, abs=0.001)
    assert math.isnan(reuse_baseline(experts[:1], 16))
    three = np.array([[[0]], [[1]], [[1]]])  # of six pairs of different tokens, two share their expert
    assert reuse_baseline(three, 2) == pytest.approx(2 / 6)


def test_balance() -> None:
    frequency = activation_frequency(np.array([[[0, 1]], [[0, 2]]]), 4)
    assert frequency.tolist() == [[0.5, 0.25, 0.25, 0]]
    assert normalised_entropy(frequency) == pytest.approx(1.5 / 2)
    assert top_over_uniform(frequency) == 2.0


def test_coactivation_counts_rows_of_neighbouring_layers() -> None:
    table = coactivation(np.array([[[0, 1], [2, 0]], [[0, 2], [2, 1]]]), 3)
    assert table[0].tolist() == [[1, 1, 2], [1, 0, 1], [0, 1, 1]]
    assert not table[1].any()


def test_calibration_counts_rows_of_prompts_and_answers_apart() -> None:
    counts = Counts(2, 4, 0)
    counts.add(np.array([[[0, 1], [2, 3]], [[0, 2], [2, 3]], [[3, 1], [0, 3]]]), 2)
    counts.add(np.array([[[0, 3], [1, 2]]]), 0)
    assert {name: counts.arrays[name].tolist() for name in ("prefill", "decode", "rows")} == {
        "prefill": [[2, 1, 1, 0], [0, 0, 2, 2]], "decode": [[1, 1, 0, 2], [1, 1, 1, 1]], "rows": [4],
    }  # fmt: skip
    assert counts.arrays["pairs"][0].tolist() == [[0, 1, 3, 2], [1, 0, 1, 2], [0, 0, 1, 1], [1, 1, 1, 1]]
    tables = counts.tables()
    assert tables["activation_frequency"].tolist() == [[0.375, 0.25, 0.125, 0.25], [0.125, 0.125, 0.375, 0.375]]
    assert tables["activation_frequency_decode"].tolist() == [[0.25, 0.25, 0, 0.5], [0.25] * 4]
    assert tables["activation_matrices"].tolist() == [[[2, 2, 1, 1], [1, 0, 0, 1]], [[1, 0, 2, 3], [0, 1, 1, 0]]]


def test_coactivation_recall_is_of_requests_it_has_not_seen() -> None:
    experts = np.array([[[0], [1]], [[0], [2]], [[0], [1]], [[0], [2]]])
    assert coactivation_recall(experts, np.array([0, 0, 1, 1]), 4) == 0.5  # the lower of two equals
    assert coactivation_recall(experts, np.array([0, 1, 0, 1]), 4) == 0.0
    assert math.isnan(coactivation_recall(experts, np.zeros(4), 4))


def test_all_figures_of_a_trace() -> None:
    trace = synthetic_trace(
        n_layers=3,
        n_experts=16,
        top_k=2,
        n_requests=6,
        prompt=20,
        decode=50,
        reuse=0.4,
        signals={"residual": 0.75},
    )
    found = stats(trace)
    assert (found["n_rows"], found["n_requests"], found["sampled"]) == (300, 6, False)
    assert found["shape"] == {"n_layers": 3, "n_experts": 16, "top_k": 2}
    assert found["reuse@1"] > found["reuse_baseline"] + 0.2
    assert found["next_layer_recall"]["residual"] == pytest.approx(0.75, abs=0.05)
    assert found["next_layer_recall"]["residual"] != signal_recall(trace, trace.signals["residual"])  # prefill too
    assert 0.8 < found["prefill_decode_cosine"] <= 1
    for lru, lfu, belady in zip(*(found["hit_rate"][p] for p in ("lru", "lfu", "belady")), strict=True):
        assert 0 < max(lru, lfu) <= belady < 1
    assert stats(trace, "prefill")["n_rows"] == 120


def test_a_sample_holds_whole_requests() -> None:
    trace = synthetic_trace(n_requests=6, prompt=4, decode=50)
    found = stats(trace, max_rows=60)
    assert (found["n_rows"], found["n_requests"], found["sampled"]) == (100, 2, True)


def test_a_phase_that_is_missing() -> None:
    trace = synthetic_trace(prompt=4, decode=0)
    with pytest.raises(TraceError, match="trace statistics: the trace holds no decode rows; choose the other phase"):
        stats(trace)
    with pytest.raises(TraceError, match="expected phase 'prefill' or 'decode', got 'both'"):
        stats(trace, "both")
    assert prefill_decode_cosine(trace) is None


# --------------------------------------------------------------------------------------------- made-up traces


def test_a_made_up_trace_is_reproducible_and_says_what_it_is() -> None:
    one, again, other = (synthetic_trace(seed=s, calibration=True) for s in (1, 1, 2))
    assert one.digest == again.digest != other.digest
    assert one.label == "synthetic"
    one.check()
    assert one.tables["activation_frequency"].sum(axis=1) == pytest.approx(1)
    assert one.tables["coactivation"].shape == (4, 8, 8)


def test_skew_and_reuse_do_what_they_say() -> None:
    def made(skew: float, reused: float) -> dict[str, float]:
        return stats(synthetic_trace(n_experts=32, top_k=4, decode=200, skew=skew, reuse=reused))

    assert made(0, 0)["entropy"] > 0.99 > made(1.5, 0)["entropy"]
    assert made(0, 0)["reuse@1"] == pytest.approx(4 / 32, abs=0.02)
    assert made(0, 0.5)["reuse@1"] == pytest.approx(0.5 + 0.5 * 4 / 32, abs=0.05)


def test_scores_agree_with_the_ids() -> None:
    trace = synthetic_trace(scores=True, reuse=0.8)
    assert trace.scores is not None
    of_ids = np.take_along_axis(trace.scores, trace.experts.astype(np.int64), axis=2)
    assert (of_ids[..., :-1] >= of_ids[..., 1:]).all()
    assert (np.sort(trace.scores, axis=2)[..., -2:] == of_ids[..., ::-1]).all()
    assert trace.scores.astype(np.float64).sum(axis=2) == pytest.approx(1, abs=2e-3)
