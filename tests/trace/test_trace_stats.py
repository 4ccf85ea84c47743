"""Each figure of a trace on a case small enough to do by hand, or against the obvious slow way; the replays of caches."""

from __future__ import annotations

import math
from collections import Counter
from functools import partial
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesim.errors import TraceError
from moesim.policies.parts.replacement import workload_aware_swap
from moesim.testing.traces import synthetic_trace
from moesim.trace import Signal, Trace
from moesim.trace.stats import balance, caches, locality, prediction
from moesim.trace.stats.calibration import Counts
from moesim.trace.stats.trace_stats import stats
from tests.cache_replay import replay_belady, replay_lfu, replay_lru

# ---------------------------------------------------------------------------------------------------- replays


def test_the_plain_replays_by_hand() -> None:
    assert replay_lru([[0, 1], [2, 0]], 2) == [False, False, False, True]  # looked up before the cache changes
    assert replay_lru([[0, 1], [2, 0]], 2, set_wise=False) == [False] * 4  # 2 has pushed 0 out
    sizes = {0: 2, 1: 3, 2: 4}
    assert replay_lru([[0], [1], [0], [2], [1], [0]], 6, sizes=sizes) == [False, False, True, False, False, False]
    assert replay_lru([[2], [2]], 3, sizes=sizes) == [False, False]  # larger than the cache
    assert replay_lfu([[0], [0], [1], [2], [1], [0]], 2) == [False, True, False, False, False, True]  # most uses, then last
    assert replay_lfu([[0], [1], [2], [1]], 2) == [False, False, False, True]
    for replay in (replay_lru, replay_lfu, replay_belady, partial(replay_belady, keep_visit=True)):
        assert replay([[0, 1, 2], [0, 1, 2]], 2) == [False] * 3 + [False, True, True]  # smaller than a visit
        assert replay([[0], [0]], 0) == [False] * 2


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
    rates = caches.layer_hit_rates(rows, n_experts, sizes, list(replays))
    for name, replay in replays.items():
        for i, size in enumerate(sizes):
            for layer in range(3):
                hits = replay(rows[:, layer].tolist(), size)
                assert rates[name][i, layer] == pytest.approx(np.mean(hits)), (name, size)


# ---------------------------------------------------------------------------------------------------- figures


def test_reuse_compares_tokens_of_the_same_request_only() -> None:
    experts = np.array([[[0, 1]], [[1, 2]], [[1, 2]], [[3, 0]]])
    request = np.array([0, 0, 1, 1])
    assert locality.reuse(experts, request, 1, 4) == pytest.approx((1 + 0) / 4)
    assert math.isnan(locality.reuse(experts, request, 2, 4))
    assert math.isnan(locality.reuse(experts[:1], request[:1], 8, 4))


def test_reuse_at_every_lag():
    experts = one_layer([[0, 1], [1, 2], [0, 1], [0, 1]])
    found = locality.reuse_by_lag(experts, np.array([0, 0, 0, 1]), [1, 2, 3], 4)
    assert found[:2, 0].tolist() == [0.5, 1.0]  # {1} and {1}; {0, 1}
    assert np.isnan(found[2, 0])


def test_the_baseline_of_even_routing_is_its_share_of_the_experts() -> None:
    rng = np.random.default_rng(0)
    experts = rng.random((4000, 2, 16)).argsort(axis=2)[:, :, :4]
    assert locality.reuse_baseline(experts, 16) == pytest.approx(4 / 16, abs=0.001)
    assert math.isnan(locality.reuse_baseline(experts[:1], 16))
    assert locality.reuse_baseline(one_layer([[0, 1], [1, 2]]), 3) == 0.5
    three = np.array([[[0]], [[1]], [[1]]])  # of six pairs of different tokens, two share their expert
    assert locality.reuse_baseline(three, 2) == pytest.approx(2 / 6)


def test_balance() -> None:
    frequency = balance.activation_frequency(np.array([[[0, 1]], [[0, 2]]]), 4)
    assert frequency.tolist() == [[0.5, 0.25, 0.25, 0]]
    assert balance.normalised_entropy(frequency) == pytest.approx(1.5 / 2)
    assert balance.top_over_uniform(frequency) == 2.0


def test_coactivation_counts_rows_of_neighbouring_layers() -> None:
    table = prediction.coactivation(np.array([[[0, 1], [2, 0]], [[0, 2], [2, 1]]]), 3)
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
    assert prediction.coactivation_recall(experts, np.array([0, 0, 1, 1]), 4) == 0.5  # the lower of two equals
    assert prediction.coactivation_recall(experts, np.array([0, 1, 0, 1]), 4) == 0.0
    assert math.isnan(prediction.coactivation_recall(experts, np.zeros(4), 4))


def test_all_figures_of_a_trace() -> None:
    shape = {"n_layers": 3, "n_experts": 16, "top_k": 2, "n_requests": 6}
    trace = synthetic_trace(**shape, prompt=20, decode=50, reuse=0.4, signals={"residual": 0.75})
    found = stats(trace)
    assert (found["n_rows"], found["n_requests"], found["sampled"]) == (300, 6, False)
    assert found["shape"] == {"n_layers": 3, "n_experts": 16, "top_k": 2}
    assert found["reuse@1"] > found["reuse_baseline"] + 0.2
    assert found["next_layer_recall"]["residual"] == pytest.approx(0.75, abs=0.05)
    assert found["next_layer_recall"]["residual"] != prediction.signal_recall(trace, trace.signals["residual"])  # prefill too
    assert 0.8 < found["prefill_decode_cosine"] <= 1
    for lru, lfu, belady in zip(*(found["hit_rate"][p] for p in ("lru", "lfu", "belady")), strict=True):
        assert 0 < max(lru, lfu) <= belady < 1
    assert all(rates[0] < rates[-1] - 0.1 for rates in found["hit_rate"].values())
    assert stats(trace, "prefill")["n_rows"] == 120


def test_a_sample_holds_whole_requests_and_a_phase_may_be_missing() -> None:
    found = stats(synthetic_trace(n_requests=6, prompt=4, decode=50), max_rows=60)
    assert (found["n_rows"], found["n_requests"], found["sampled"]) == (100, 2, True)
    trace = synthetic_trace(prompt=4, decode=0)
    with pytest.raises(TraceError, match="trace statistics: the trace holds no decode rows; choose the other phase"):
        stats(trace)
    with pytest.raises(TraceError, match="expected phase 'prefill' or 'decode', got 'both'"):
        stats(trace, "both")
    assert locality.prefill_decode_cosine(trace) is None


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
    of_ids = np.take_along_axis(trace.scores, trace.experts.astype(np.int64), axis=2)
    assert (of_ids[..., :-1] >= of_ids[..., 1:]).all()
    assert (np.sort(trace.scores, axis=2)[..., -2:] == of_ids[..., ::-1]).all()
    assert trace.scores.astype(np.float64).sum(axis=2) == pytest.approx(1, abs=2e-3)


ROOT_HALF = math.sqrt(0.5)


def trace_of(experts, n_prompt, n_decode, n_experts, **more) -> Trace:
    ids = np.asarray(experts, np.uint8)
    given = {"weights": np.full(ids.shape, 1 / ids.shape[2]), "n_prompt": n_prompt, "n_decode": n_decode, "n_experts": n_experts}
    return Trace.build(experts=ids, **given, model="by-hand", label="synthetic", **more)


def one_layer(ids) -> np.ndarray:
    return np.asarray(ids)[:, None, :]


# ---------------------------------------------------------------------------------------------------- balance


def test_gini_is_half_the_mean_difference_over_the_mean():
    shares = np.array([0.5, 0.3, 0.2, 0.0])
    differences = np.abs(np.subtract.outer(shares, shares)).mean()
    assert balance.gini(shares) == pytest.approx(differences / (2 * shares.mean()))


def test_a_uniform_router_is_drawn_exactly():
    """All ways to give two tokens two of three experts each are equally likely: 9 of them, 7 outcomes of the counts."""
    pairs = list(combinations(range(3), 2))
    expected = Counter(tuple((*one, *two).count(e) for e in range(3)) for one in pairs for two in pairs)
    drawn = balance.uniform_counts(np.random.default_rng(0), 2, 3, 2, (40_000,))
    assert (drawn.sum(axis=1) == 4).all()
    shares = Counter(map(tuple, drawn.tolist()))
    assert {counts: n / len(drawn) for counts, n in shares.items()} == pytest.approx(
        {counts: n / 9 for counts, n in expected.items()}, abs=0.01
    )
    drawn = balance.uniform_counts(np.random.default_rng(1), [[50], [400]], 16, 4, (2, 3000))
    assert (drawn.sum(axis=2) == [[200], [1600]]).all()
    assert drawn.mean(axis=1) == pytest.approx(np.array([[12.5] * 16, [100] * 16]), rel=0.02)
    # A binomial of n and k / N for each expert.
    assert drawn.var(axis=(1, 2)) == pytest.approx(np.array([50, 400]) * 0.25 * 0.75, rel=0.05)


def test_loads_count_rows_of_a_group():
    experts = np.array([[[0, 1], [2, 0]], [[0, 2], [2, 1]], [[1, 2], [0, 1]]])
    assert balance.loads(experts, np.array([0, 0, 1]), 3).tolist() == [[[2, 1, 1], [1, 1, 2]], [[0, 1, 1], [1, 1, 0]]]


# --------------------------------------------------------------------------------------------------- locality


def test_reuse_by_rank_with_all_scores_and_with_the_chosen_only():
    scores = np.array([[0.1, 0.4, 0.3, 0.2], [0.5, 0.3, 0.1, 0.1], [0.0, 0.1, 0.2, 0.7]], np.float16)[:, None]
    ranked = locality.by_score(scores)
    assert ranked[:, 0].tolist() == [[1, 2, 3, 0], [0, 1, 2, 3], [3, 2, 1, 0]]
    experts, request = ranked[:, :, :2], np.zeros(3, int)
    # Token 1 uses {0, 1}: ranks 1 and 4 of token 0. Token 2 uses {3, 2}: ranks 3 and 4 of token 1.
    assert locality.reuse_by_rank(ranked, experts, request, 4)[:, 0].tolist() == [0.5, 0.0, 0.5, 1.0]
    assert locality.reuse_by_rank(experts, experts, request, 4)[:, 0].tolist() == [0.5, 0.0]
    assert np.isnan(locality.reuse_by_rank(experts, experts, np.arange(3), 4)).all()


def test_scores_sort_as_numbers_do():
    scores = np.random.default_rng(0).random((200, 2, 12)).astype(np.float16)
    scores[::3, :, 4] = scores[::3, :, 7]
    assert (locality.by_score(scores) == np.argsort(-scores.astype(np.float32), axis=-1, kind="stable")).all()


def test_segments_are_whole_and_within_a_request():
    rows, number = locality.segments(np.array([0, 0, 0, 1, 1, 2]), 2)
    assert rows.tolist() == [0, 1, 3, 4]
    assert number.tolist() == [0, 0, 1, 1]


def test_srp_and_sch_of_one_segment():
    """Three tokens use {0, 1}, {0, 2}, {0, 3}: groups of 1, 2, 3, 4 serve 3, 4, 5, 6 of the 6 activations."""
    counts = balance.loads(one_layer([[0, 1], [0, 2], [0, 3]]), np.zeros(3, int), 5)
    srp, sch = locality.segment_best(counts, 3, 2, [1, 2, 4])
    f1 = [2 * served / (3 * (g + 2)) for g, served in enumerate((3, 4, 5, 6, 6), start=1)]
    assert srp.tolist() == [pytest.approx(max(f1))] == [pytest.approx(2 / 3)]
    assert sch[:, 0].tolist() == pytest.approx([3 / 6, 4 / 6, 1.0])


@settings(max_examples=50)
@given(seed=st.integers(0, 2**32), length=st.integers(1, 5))
def test_srp_is_the_best_of_all_groups(seed: int, length: int):
    rng = np.random.default_rng(seed)
    ids = rng.random((length, 5)).argsort(axis=1)[:, :2]
    best = best_hits = 0.0
    for size in range(1, 6):
        for group in combinations(range(5), size):
            right = int(np.isin(ids, group).sum())
            precision, recall = right / (length * size), right / ids.size
            best = max(best, 2 * precision * recall / (precision + recall) if right else 0.0)
            best_hits = max(best_hits, recall if size == 3 else 0.0)
    srp, sch = locality.segment_best(balance.loads(one_layer(ids), np.zeros(length, int), 5), length, 2, [3])
    assert (srp[0], sch[0, 0]) == (pytest.approx(best), pytest.approx(best_hits))


def test_similarity_of_prompt_and_answer():
    """Prompts use {0}, {0, 1}; answers {0}, {1}: cosines 1 and sqrt(1/2); crosswise 0 and sqrt(1/2)."""
    trace = trace_of(one_layer([[0], [0], [0], [1], [1]]), [1, 2], [1, 1], 3)
    found = locality.phase_similarity(trace)
    assert found["request"].tolist() == [0, 1]
    assert found["by_request"].tolist() == pytest.approx([1.0, ROOT_HALF])
    assert found["other_requests"] == pytest.approx(ROOT_HALF / 2)
    assert found["by_layer"].tolist() == pytest.approx([(1 + ROOT_HALF) / 2])


def test_similarity_by_window():
    trace = trace_of(one_layer([[0], [0], [0], [0], [1], [0], [1], [1], [1]]), [1, 1], [5, 2], 3)
    found = locality.window_similarity(trace, 2)
    # The first windows are {0, 0} after {0} and {1, 1} after {1}, the second {0, 1} of the first request only.
    assert found["value"] == pytest.approx([1.0, ROOT_HALF])
    assert found["n_requests"] == [2, 1]
    assert found["other_requests"][0] == 0 and np.isnan(found["other_requests"][1])
    assert locality.window_similarity(trace, 6) is None
    prefill = trace_of(one_layer([[0], [1]]), [1, 1], [0, 0], 3)
    assert locality.phase_similarity(prefill) is locality.window_similarity(prefill) is None


# --------------------------------------------------------------------------------------------------- batching


def test_batches_are_of_different_requests_and_end_with_the_shortest():
    request = np.repeat([0, 1, 2], [4, 2, 3])
    made = balance.compose(request, 2)
    assert len(made) == 1
    members = request[made[0]]
    assert (members == members[0]).all()
    assert len(set(members[0])) == 2
    assert len(made[0]) == min(np.bincount(request)[members[0]])
    assert (np.diff(made[0], axis=0) == 1).all()
    assert balance.compose(request, 4) == []
    assert sorted(np.concatenate(balance.compose(request, 1)).ravel()) == list(range(9))


def test_distinct_experts():
    experts = one_layer([[0, 1], [2, 3], [1, 2], [2, 3]])
    pair = [np.array([[0, 2], [1, 3]])]
    assert balance.workloads(experts[:, 0][pair[0]], 4).tolist() == [[1, 2, 1, 0], [0, 0, 2, 2]]
    assert balance.distinct_experts(experts, pair, 4).tolist() == [2.5]
    assert balance.uniform_distinct(4, 2, 1) == 2.0
    # Two of the four rows use experts 1, three use 2, one 0, two 3: 1 - (1 - p)² of each.
    assert balance.independent_distinct(experts, 4, 2) == pytest.approx(7 / 16 + 12 / 16 + 15 / 16 + 12 / 16)


def test_uniform_expectation_is_what_uniform_rows_do():
    rows = caches.uniform_rows(8000, 2, 16, 4)
    assert all(len(set(row)) == 4 for row in rows[:50, 0].tolist())
    made = balance.compose(np.repeat(np.arange(80), 100), 8)
    assert balance.distinct_experts(rows, made, 16).mean() == pytest.approx(balance.uniform_distinct(16, 4, 8), rel=0.005)


def test_correlation_of_workloads():
    """Two requests. Steps: {0, 1} + {0, 2}, the same again, then {3, 1} + {3, 2}."""
    experts = one_layer([[0, 1], [0, 1], [3, 1], [0, 2], [0, 2], [3, 2]])
    found = balance.workload_correlation(experts, [np.array([[0, 3], [1, 4], [2, 5]])], 4)
    first, last = [1, 0, 0, -1], [-1, 0, 0, 1]  # loads 2 1 1 0 and 0 1 1 2, less their mean
    assert np.dot(first, last) == -2
    assert found["matrix"] == pytest.approx(np.array([[1, 1, -1], [1, 1, -1], [-1, -1, 1]]))
    assert found["adjacent"] == pytest.approx(0)
    assert math.isnan(found["distant"])
    assert found["kept"] == pytest.approx((1 + 0.5) / 2)  # busiest: {0, 1}, {0, 1}, {3, 1}
    assert balance.workload_correlation(experts, [np.array([[0, 3]])], 4) is None
    rng, steps = np.random.default_rng(0), np.arange(400).reshape(50, 8)
    many = one_layer([rng.permutation(64)[:3] for _ in range(400)])
    loads = balance.workloads(many[:, 0][steps], 64)
    best = [set(sorted(range(64), key=lambda e, load=load: -load[e])[:3]) for load in loads]  # of equals the lower ones
    kept = np.mean([len(now & then) / 3 for now, then in pairwise(best)])
    assert balance.workload_correlation(many, [steps], 64)["kept"] == pytest.approx(kept)


# ------------------------------------------------------------------------------------------------- prediction


def test_signal_recall_by_layer_skips_layers_without_source():
    experts = np.array([[[0], [1]], [[0], [2]], [[0], [0]]], np.uint8)
    said = Signal("s", np.array([1, 2], np.int32), np.ones((2, 2, 1), np.float16), np.array([[[0], [2]], [[0], [1]]], np.uint8))
    trace = trace_of(experts, [1], [2], 3, signals={"s": said})
    by_layer = prediction.signal_recall_by_layer(trace, said)
    assert np.isnan(by_layer[0]) and by_layer[1] == 0.5
    assert prediction.signal_recall_by_layer(trace, said, np.array([2]))[1] == 0.0
    assert np.isnan(prediction.signal_recall_by_layer(trace, said, np.array([0]))).all()


@settings(max_examples=50)
@given(seed=st.integers(0, 2**32), n=st.integers(1, 6))
def test_among_best_is_a_stable_sort(seed: int, n: int):
    rng = np.random.default_rng(seed)
    scores, ids = rng.integers(0, 4, (5, 6)).astype(float), rng.integers(0, 6, (5, 3))
    best = np.argsort(-scores, axis=1, kind="stable")[:, :n]
    assert (prediction.among_best(scores, ids, n) == (ids[:, :, None] == best[:, None, :]).any(axis=2)).all()


@pytest.mark.parametrize(
    ("said", "true", "n", "found", "chance"),
    [
        ([3, 1, 0, 0], [3, 0, 1, 0], 1, 1.0, 0.25),
        ([0, 3, 1, 0], [3, 0, 1, 0], 1, 0.0, 0.25),
        ([1, 1, 0, 0], [0, 2, 0, 0], 1, 0.0, 0.25),  # of equals the lower id is named
        ([0, 1, 0, 0], [1, 1, 1, 0], 1, 1.0, 0.75),  # a tie for the first place: any of three
        ([2, 1, 0, 0], [2, 0, 1, 1], 2, 0.5, 0.75),
        ([1, 0, 0, 0], [1, 0, 0, 0], 2, 1.0, 0.5),  # one expert is in use: naming it is all there is to name
        ([1, 0, 0, 0], [1, 1, 0, 0], 2, 0.5, 0.5),  # expert 1 was not predicted, though it has the next id
    ],
)
def test_busiest_experts(said, true, n, found, chance):
    a, b = prediction.busiest_found(np.array([said]), np.array([true]), n)
    assert (a[0], b[0]) == (pytest.approx(found), pytest.approx(chance))


def test_workload_recall_composes_the_requests_that_a_signal_covers():
    """Three requests of two decode rows; the signal covers two of them, and is wrong in one row of layer 1."""
    experts = np.zeros((6, 2, 1), np.uint8)
    experts[:, 1, 0] = [1, 2, 1, 2, 3, 3]
    rows = np.arange(4, dtype=np.int32)
    ids = experts[:4].copy()
    ids[0, 1] = 3
    said = Signal("s", rows, np.ones(ids.shape, np.float16), ids)
    trace = trace_of(experts, [0, 0, 0], [2, 2, 2], 4, signals={"s": said})
    alone, pair = prediction.workload_recall(trace, said, np.arange(6), [1, 2, 4], [1, 4])
    assert (alone.batch_size, alone.n_steps, alone.n) == (1, 4, (1,))
    assert np.isnan(alone.by_layer[0, 0]) and alone.by_layer[0, 1] == 0.75
    # Step 0: loads 1 -> 2 rows; predicted 1 and 3, of equals the lower id: right. Step 1: right.
    assert (pair.batch_size, pair.n_steps, pair.by_layer[0, 1]) == (2, 2, 1.0)
    assert pair.chance.tolist() == [0.25]
    assert prediction.workload_recall(trace, said, np.array([4, 5]), [1], [1]) == []
    many = synthetic_trace(n_requests=9, prompt=0, decode=30, signals={"gate_next1": 0.5})
    usual, *seeded = (
        prediction.workload_recall(many, many.signals["gate_next1"], np.arange(many.n_rows), [4], [2], **seed)
        for seed in ({}, {"seed": 0}, {"seed": 1})
    )
    assert [repr(one) == repr(usual) for one in seeded] == [True, False]


def test_cosine_of_states_with_and_without_residual():
    states = np.array([[[1, 0], [1, 1], [0, 0]], [[0, 2], [2, 2], [1, 0]]], np.float16)
    assert prediction.state_cosine(states).tolist() == pytest.approx([ROOT_HALF, ROOT_HALF / 2])
    residual = np.array([[0, 1], [0, -1], [9, 9]])  # (1, 1) and (0, 3) against (1, 1) and (2, 2)
    assert prediction.state_cosine(states, residual)[0] == pytest.approx((1 + ROOT_HALF) / 2)


# ----------------------------------------------------------------------------------------------------- caches


def test_mrs_follows_equation_3():
    scores = np.array([0.5, 0.25, 0.15, 0.1])
    assert caches.keep_top(scores, 2).tolist() == pytest.approx([0.5, 0.25, 0, 0])
    assert caches.keep_top(scores, 4).tolist() == pytest.approx(scores.tolist())
    moved = caches.mrs_update(np.array([0.0, 0.0, 0.4, 0.0]), np.array([0.5, 0.25, 0, 0]))
    assert moved.tolist() == pytest.approx([0.25, 0.125, 0.2, 0])


def test_mrs_keeps_what_the_router_scored_high_though_it_was_not_used():
    """Expert 1 is used once and scored second ever after: with two places LRU loses it to 2, MRS does not."""
    scores = np.array([[0.3, 0.5, 0.2, 0.0], [0.5, 0.4, 0.1, 0.0], [0.2, 0.3, 0.5, 0.0], [0.3, 0.5, 0.2, 0.0]])[:, None]
    experts = scores.argmax(axis=2)[:, :, None]  # 1, 0, 2, 1
    # S after each row, p = 2: (.15 .25 0 0), (.325 .325 0 0), (.1625 .3125 .25 0): row 2 pushes expert 0 out.
    assert caches.mrs_hits(experts, scores, 2, [2])[0, 0] == 1 / 4
    assert caches.layer_hit_rates(experts, 4, [2])["lru"][0, 0] == 0


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), p=st.integers(1, 6))
def test_mrs_is_the_obvious_one(seed: int, p: int):
    rng = np.random.default_rng(seed)
    scores = rng.dirichlet(np.ones(6), (20, 2))
    experts = locality.by_score(scores)[:, :, :2]
    rates = caches.mrs_hits(experts, scores, p, range(7))
    for size in range(7):
        for layer in range(2):
            held: set[int] = set()
            s, hits = np.zeros(6), 0
            for row in range(20):
                hits += len(held & set(experts[row, layer].tolist()))
                own = scores[row, layer].astype(np.float32)
                s = 0.5 * np.where(own >= np.sort(own)[-p], own, 0) + 0.5 * s
                held |= set(experts[row, layer].tolist())
                held = set(sorted(held, key=lambda e: (-s[e], -e))[:size])
            assert rates[size, layer] == pytest.approx(hits / 40)


def test_mrs_says_what_it_goes_by():
    experts = one_layer([[2, 0], [1, 2]])
    full = np.array([[[0.4, 0.05, 0.5, 0.05]], [[0.1, 0.5, 0.4, 0.0]]])
    with_scores = trace_of(experts, [0], [2], 4, scores=full)
    scores, basis = caches.mrs_scores(with_scores, np.arange(2))
    assert basis == "full scores, p = 2 k" and scores is not None
    assert scores[1, 0].tolist() == pytest.approx([0.1, 0.5, 0.4, 0], abs=1e-3)
    scores, basis = caches.mrs_scores(trace_of(experts, [0], [2], 4), np.array([1]))
    assert basis == "weights of the chosen only, p = k" and scores is not None
    assert scores.tolist() == [[[0, 0.5, 0.5, 0]]]


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), u_size=st.integers(0, 3), n_rows=st.integers(1, 23))
def test_workload_aware_is_the_policys_algorithm(seed: int, u_size: int, n_rows: int):
    rng = np.random.default_rng(seed)
    experts = rng.random((n_rows, 2, 6)).argsort(axis=2)[:, :, :2]
    rates = caches.workload_aware_hits(experts, 6, range(7), u_size, w_size=3, seed=5)
    order = np.random.default_rng(5).random((2, 6)).argsort(axis=1)
    for size in range(7):
        for layer in range(2):
            held = set(order[layer, :size].tolist())
            scores, hits = [0] * 6, 0
            for row in range(n_rows):
                for e in experts[row, layer].tolist():
                    hits += e in held
                    scores[e] += 1
                if (row + 1) % 3 == 0:
                    out, new = workload_aware_swap(scores, held, u_size)
                    held = (held - set(out)) | set(new)
                    scores = [0] * 6
            assert rates[size, layer] == pytest.approx(hits / (2 * n_rows))


def test_replacements_of_the_papers_models_and_static_contents():
    assert [caches.default_u_size(n) for n in (4, 8, 16, 60, 64, 128)] == [1, 1, 2, 7, 8, 8]
    frequency = np.array([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6]])
    assert caches.static_hits(frequency, frequency, [0, 1, 3]).tolist() == [[0, 0], [0.5, 0.6], [1.0, pytest.approx(1.0)]]
    assert caches.static_hits(frequency, np.array([[0, 1, 0], [1, 1, 1]]), [1]).tolist() == [[0.3, 0.2]]


def test_any_cache_without_foresight_hits_its_share_of_a_uniform_router():
    rows = caches.uniform_rows(3000, 4, 16, 4, seed=3)
    rates = caches.layer_hit_rates(rows, 16, [4, 8])
    rates["workload-aware"] = caches.workload_aware_hits(rows, 16, [4, 8], 2)
    for policy in ("lru", "lfu", "workload-aware"):
        assert rates[policy].mean(axis=1) == pytest.approx(np.array([0.25, 0.5]), abs=0.01), policy
    assert (rates["belady"].mean(axis=1) > [0.35, 0.6]).all()
