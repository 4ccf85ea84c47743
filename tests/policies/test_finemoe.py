"""FineMoE: the worked examples of its description, its queue and its victims."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moesim.engine import native
from moesim.policies.registry import make_policy
from moesim.policies.systems.finemoe import (
    Trajectories,
    _of_all,
    evicted,
    eviction_scores,
    largest_priorities,
    map_ranks,
)
from moesim.policy import Predicted
from moesim.records import Records
from moesim.testing import routed
from moesim.trace import Signal, Trace
from moesim.trace.predictors import RecordedSignal
from moesim.trace.workload import WorkloadSpec, compose
from tests.engine.engine_kit import cpu, gpu, machine, play, tiny_model

ENGINES = ["simpy", *(["native"] if native.AVAILABLE else [])]

P = np.array([0.35, 0.25, 0.15, 0.10, 0.06, 0.04, 0.03, 0.02])


# ------------------------------------------------------------------------------------------------- functions, by example
@pytest.mark.parametrize(("similarity", "n"), [(0.2, 3), (0.5, 2), (0.9, 2), (1.0, 2), (1.5, 2), (-0.5, 8)])
def test_the_expert_that_passes_the_threshold_is_not_selected(similarity: float, n: int) -> None:
    """Sum .75 <= .8 < .85; only .35 <= .5, raised to top-k; at -.5 the threshold is held at 1."""
    shuffled = np.random.default_rng(3).permutation(8)
    one = P[shuffled][None]
    found = largest_priorities([one], [map_ranks(one)], 0, 1, [similarity], 2)[0] > 2e-6
    assert found.tolist() == [rank < n for rank in shuffled]


def test_every_product_below_one_is_zero_and_ties_go_by_layer_and_id() -> None:
    probability, visits = np.array([[0.5, 0.9], [0.4, 0.3]]), np.array([[3, 1], [2, 3]])
    scores = eviction_scores(probability, visits)
    assert scores.tolist() == [[1, 0], [0, 0]]
    everything = np.ones((2, 2), np.bool_)
    assert evicted(scores, everything) == (0, 1)
    assert evicted(probability * visits, everything) == (1, 0)
    assert evicted(scores, np.zeros((2, 2), np.bool_)) is None


# ----------------------------------------------------------------------------------------------- functions, at random


def test_without_scores_the_weights_of_the_chosen_are_observed() -> None:
    maps = np.array([[[0.75, 0.25, 0, 0], [0, 0.5, 0.5, 0]]])
    past = Trajectories(maps)
    past.begin(np.array([0]))
    event = routed([[1, 2]])._replace(weights=np.array([[0.5, 0.5]]), scores=None)
    assert past.observe(event) == [(1, pytest.approx(1))]
    with pytest.raises(RuntimeError, match="neither"):
        past.observe(event._replace(weights=None))


@pytest.mark.parametrize(
    ("scores", "rows"),
    [
        (None, [[0, 0.5, 0, 0.5], [0.5, 0, 0.5, 0]]),
        ([[0.7, 0.1], [0.2, 0.4]], [[0, 0.1, 0, 0.7], [0.2, 0, 0.4, 0]]),
        ([[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 2, 3, 4], [5, 6, 7, 8]]),
    ],
)
def test_a_prediction_of_some_experts_is_one_of_all(scores: Any, rows: Any) -> None:
    ids = np.array([[3, 1], [0, 2]])
    event = Predicted(0, 0, 0, ids, None if scores is None else np.array(scores, float), "x")
    assert _of_all(event, 4).tolist() == rows


# ------------------------------------------------------------------------------------------------------------ timelines
LAYERS = 4
MAPS = np.array([  # two iterations; layer, expert
    [[0.6, 0.0, 0.4, 0.0], [0.5, 0.3, 0.2, 0.0], [0.1, 0.6, 0.3, 0.0], [0.0, 0.0, 0.3, 0.7]],
    [[0.0, 0.6, 0.0, 0.4], [0.0, 0.2, 0.3, 0.5], [0.0, 0.0, 0.5, 0.5], [0.5, 0.5, 0.0, 0.0]],
])  # fmt: skip


def run(rows: Any, slots: int = 16, dense_ns: int = 9940, **options: Any) -> Records:
    """One request, weights 0.75 and 0.25, four layers of four experts."""
    experts = np.array(rows, np.uint8)
    weights = np.broadcast_to([0.75, 0.25], experts.shape)
    trace = Trace.build(
        experts=experts, weights=weights, n_prompt=[0], n_decode=[len(rows)], n_experts=4, model="tiny", label="synthetic",
        prompt_offset=1,
    )  # fmt: skip
    hardware = machine({"gpu0": gpu(dense_ns=dense_ns), "cpu0": cpu()})
    return play(
        make_policy({"name": "finemoe", **options}), compose(trace, WorkloadSpec(batch_size=1, requests="all")), hardware,
        model=tiny_model(n_layers=LAYERS), slots={"gpu0": slots}, tables={"expert_maps": MAPS.swapaxes(0, 1)},
    )  # fmt: skip


def run_with_signal(
    requests: list[Any],
    said: Any,
    *,
    prompt: int = 0,
    engine: str | None = None,
    predict_ns: int = 0,
    slots: int = 16,
    **options: Any,
) -> Records:
    """Run requests together, of which the signal says ``said``, (rows, layers, experts), in slow dense parts."""
    experts = np.array([row for request in requests for row in request], np.uint8)
    scores = np.asarray(said, np.float16)
    signal = Signal("embedding", np.arange(len(experts), dtype=np.int32), scores, None, 0, None, 0)
    lengths = [len(request) for request in requests]
    trace = Trace.build(
        experts=experts, weights=np.broadcast_to([0.75, 0.25], experts.shape), n_prompt=[prompt] * len(lengths),
        n_decode=[n - prompt for n in lengths], n_experts=4, model="tiny", label="synthetic", prompt_offset=0 if prompt else 1,
        signals={"embedding": signal},
    )  # fmt: skip
    work = compose(trace, WorkloadSpec(batch_size=len(lengths), requests="all"))
    hardware = machine({"gpu0": gpu(dense_ns=9940, predict={"embedding": predict_ns} if predict_ns else None), "cpu0": cpu()})
    return play(
        make_policy({"name": "finemoe", "first_layers": "embedding", **options}), work, hardware, engine=engine,
        model=tiny_model(n_layers=LAYERS), slots={"gpu0": slots}, tables={"expert_maps": MAPS.swapaxes(0, 1)},
        predictors={"signal:embedding": RecordedSignal(trace, "embedding")},
    )  # fmt: skip


def copies(records: Records) -> list[str]:
    return [f"{t.cause[0]} {t.layer}/{t.expert}" for t in records.transfers]


ROW = [[0, 2], [0, 1], [1, 2], [3, 2]]


def test_all_experts_of_the_band_are_queued_selected_ones_first() -> None:
    # Like the first map at layer 0 by 0.95: the threshold is .05, so the two largest of each layer are selected, with
    # .6 and .3 in layer 2, .7 and .3 at 4/5 of it in layer 3. Layer 1 is on demand.
    records = run([ROW], prefetch_distance=1)
    found = copies(records)
    assert found[:2] == ["d 0/0", "d 0/2"]
    assert found[2:6] == ["p 2/1", "p 3/3", "p 2/2", "p 3/2"]  # .6, .56, .3, .24
    assert found[6:10] == ["p 2/0", "p 2/3", "p 3/0", "p 3/1"]  # 1e-6 each
    assert found[10:] == ["d 1/0", "d 1/1"]
    only = copies(run([ROW], prefetch_distance=1, selected_only=True))
    assert only == ["d 0/0", "d 0/2", "p 2/1", "p 3/3", "p 2/2", "p 3/2", "d 1/0", "d 1/1"]


def test_a_new_prediction_puts_its_experts_at_the_end_of_the_queue() -> None:
    # Three copies begin before layer 1 is routed at 6100, so that 3/2 (.24) is next. Layer 1 predicts layer 3 anew and puts its
    # experts behind the unselected of layer 2.
    found = copies(run([ROW], prefetch_distance=1, dense_ns=1940))
    assert found[:5] == ["d 0/0", "d 0/2", "p 2/1", "p 3/3", "p 2/2"]
    assert found[5:9] == ["d 1/0", "d 1/1", "p 2/0", "p 2/3"] and found[9].endswith("3/2")


def test_an_on_demand_copy_drops_what_is_queued_for_its_layer_and_those_before() -> None:
    # Without a distance layer 1 is predicted at layer 0; what is queued for it when it misses is not copied any more.
    records = run([[[0, 2], [3, 2], [1, 2], [3, 2]]], prefetch_distance=0, dense_ns=1940)
    found = copies(records)
    assert found[:2] == ["d 0/0", "d 0/2"] and "d 1/3" in found
    at = found.index("d 1/3")
    assert not any(what.startswith(("p 0/", "p 1/")) for what in found[at:])


def test_candidates_are_protected_and_others_leave_by_score() -> None:
    # Six slots: 0/0 and 0/2, then 2/1, 3/3, 2/2, 3/2. Layer 2 and 3 are candidates: what layer 1 needs replaces layer 0's.
    records = run([ROW], 6, prefetch_distance=1)
    assert [(e.layer, e.expert) for e in records.evictions][:2] == [(0, 0), (0, 2)]


def test_visits_and_probability_are_reset_on_eviction() -> None:
    policy: Any = make_policy({"name": "finemoe", "prefetch_distance": 0})
    experts = np.array([ROW] * 3, np.uint8)
    trace = Trace.build(
        experts=experts, weights=np.full(experts.shape, 0.5), n_prompt=[0], n_decode=[3], n_experts=4, model="tiny",
        label="synthetic", prompt_offset=1,
    )  # fmt: skip
    work = compose(trace, WorkloadSpec(batch_size=1, requests="all"))
    records = play(
        policy, work, model=tiny_model(n_layers=LAYERS), slots={"gpu0": 3}, tables={"expert_maps": MAPS.swapaxes(0, 1)}
    )
    gone = {(e.layer, e.expert) for e in records.evictions} - set(zip(*np.nonzero(policy._cached), strict=True))
    assert len(gone) > 3 and not any(policy._visits[unit] for unit in gone)
    assert policy._visits[3, 3] == 3  # never evicted: of the last layer, and always a candidate
    assert not policy._probability[0].any()  # layer 0 is never predicted


# The map that is found for the first layers: layer, expert. The other layers are of no account.
FOUND = np.array([[0.6, 0.0, 0.4, 0.0], [0.4, 0.3, 0.2, 0.1], [0.25] * 4, [0.25] * 4])


@pytest.mark.parametrize("engine", ENGINES)
def test_the_first_layers_are_prefetched_by_the_closest_embedding_before_they_are_routed(engine: str) -> None:
    # Alike by 1/16: the threshold is .9375. Layer 0: only .6 is below it, raised to k, 0 and 2. Layer 1, at 2/3 (1 - 1/3): sums
    # of .4, .7, .9 are below it, so 0, 1 and 2 with .267, .2, .133. The rest has 1e-6 each.
    records = run_with_signal([[ROW]], [FOUND / 16], prefetch_distance=2, engine=engine)
    assert copies(records)[:8] == ["p 0/0", "p 0/2", "p 1/0", "p 1/1", "p 1/2", "p 0/1", "p 0/3", "p 1/3"]
    assert [t.start for t in records.transfers[:8]] == [2 + 1000 * n for n in range(8)]  # a prediction takes 1 ns at least
    assert [(lookup.time, lookup.hits) for lookup in records.lookups[:2]] == [(10_002, (1, 1)), (20_202, (1, 1))]
    assert [(t.kind, t.layer) for t in records.tasks if t.kind == "predict"] == [("predict", 0), ("predict", 1)]
    only = run_with_signal([[ROW]], [FOUND / 16], prefetch_distance=2, selected_only=True, engine=engine)
    assert copies(only)[:5] == ["p 0/0", "p 0/2", "p 1/0", "p 1/1", "p 1/2"] and only.transfers[5].layer > 1
    alike = run_with_signal([[ROW]], [FOUND], prefetch_distance=2, selected_only=True, engine=engine)
    assert copies(alike)[:4] == ["p 0/0", "p 0/2", "p 1/0", "p 1/1"] and alike.transfers[4].layer > 1  # only k of each


def test_of_several_requests_the_last_rows_count_and_the_largest_priority() -> None:
    # Two prompts of two rows in one step; first rows say otherwise. Layer 0 only (d = 1): .6 and .4 of one request, .5, .3 of
    # the other, whose similarity of 1/4 leaves more than k where sums are at most .75: .5 only.
    junk, other = np.eye(4)[[3, 3, 3, 3]], np.tile([0.0, 0.5, 0.2, 0.3], (4, 1))
    records = run_with_signal(
        [[ROW, ROW], [ROW, ROW]], [junk, FOUND, junk, other / 4], prompt=2, prefetch_distance=1, selected_only=True
    )
    assert copies(records)[:4] == ["p 0/0", "p 0/1", "p 0/2", "p 0/3"]  # .6, .5, .4, .3
    # Each by its own similarity: of 1/16 the sums of .4, .7 and .9 are below the threshold, so that .2 is chosen, too.
    third = np.tile([0.1, 0.4, 0.3, 0.2], (4, 1))
    records = run_with_signal(
        [[ROW, ROW], [ROW, ROW]], [junk, FOUND, junk, third / 16], prompt=2, prefetch_distance=1, selected_only=True
    )
    assert copies(records)[:4] == ["p 0/0", "p 0/1", "p 0/2", "p 0/3"]  # .6, .4, .4, .2


@pytest.mark.parametrize(("at", "start"), [((5, 0), 1), ((5, 2), 3), ((4, 3), 0), ((-1, -1), 0)])
def test_a_prediction_of_the_first_layers_is_of_those_that_have_not_begun(at: tuple[int, int], start: int) -> None:
    """The last of three layers, in step 5; each of two requests with its own similarity."""
    policy: Any = make_policy("finemoe")
    asked: list[Any] = []
    policy._predict = lambda maps, ranks, similarities, start, end: asked.append((similarities, start, end))
    policy._probability, policy._requests, policy._said = np.zeros((4, 4)), np.array([7, 3]), {}
    policy._n_first, policy._at = 3, at
    for layer in range(3):
        assert asked == []
        scores = np.array([[0.25, 0.25, 0, 0], [0.5, 0, 0, 0.25]])
        policy._foreseen(Predicted(5, layer, 0, np.zeros((2, 2), int), scores, "told"))
    assert asked == [([0.5, 0.75], start, 3)]
