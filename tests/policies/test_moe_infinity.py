"""MoE-Infinity: its fetch thread to the nanosecond, and its prefetches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moesim.policies.registry import make_policy
from moesim.policies.systems.moe_infinity import least_visited, remaining_priority
from moesim.policy import PREFETCH, Drop, StepBegin
from moesim.records import Records
from moesim.testing import FakeView, routed
from tests.engine.engine_kit import cpu, gpu, machine, play, tasks, tiny_model, transfers, workload

TOKEN = [[0, 2], [1, 0]]  # layer: experts


def run(requests: Any, slots: int = 8, name: Any = "moe-infinity-code", **more: Any) -> Records:
    return play(make_policy(name), workload(requests, **more), slots={"gpu0": slots})


# ------------------------------------------------------------------------------------------------------------ functions
def test_the_first_strict_minimum_of_a_scan_expert_by_expert_goes() -> None:
    for seed in range(1000):
        draw = np.random.default_rng(seed)
        shape = int(draw.integers(1, 6)), int(draw.integers(1, 9))
        visits, may_go = draw.integers(0, 4, shape), draw.random(shape) < 0.6
        found = None
        for expert in range(shape[1]):
            for layer in range(shape[0]):
                if may_go[layer, expert] and (found is None or visits[layer, expert] < visits[found]):
                    found = layer, expert
        assert least_visited(visits, may_go) == found


def test_the_priority_decays_with_the_distance() -> None:
    for seed in range(1000):
        draw = np.random.default_rng(seed)
        n_layers, n_experts = int(draw.integers(1, 9)), int(draw.integers(1, 9))
        p, at = draw.random((n_layers, n_experts)), int(draw.integers(0, n_layers))
        found = remaining_priority(p, at)
        for layer in range(n_layers):
            for expert in range(n_experts):
                wanted = (p[layer, expert] + 1e-8) * (1 - (layer - at) / (n_layers + 1)) if layer >= at else 0.0
                assert found[layer, expert] == wanted


# ------------------------------------------------------------------------------------------------- the released engine
def test_a_hit_waits_for_the_misses_before_it() -> None:
    # The first token loads 2 and 3 of layer 0. The second is routed to 3 and 1: 1 is copied first, though 3 is there.
    records = run([[[[2, 3], [0, 1]], [[3, 1], [0, 1]]]])
    second = [t for t in tasks(records) if t[0] >= records.steps[1].begin]
    begin = second[0][0]
    assert [(start - begin, what) for start, _, _, what in second] == [
        (0, "dense"), (1100, "E1x1"), (1200, "E3x1"), (1300, "dense"), (1400, "E0x1"), (1500, "E1x1"),
    ]  # fmt: skip
    assert {t.cause for t in records.transfers} == {"demand"}


@pytest.mark.parametrize("slots", [1, 2])
def test_a_cache_smaller_than_a_layer_gives_up_what_has_run(slots: int) -> None:
    records = run([[[[0, 1], [0, 1]]], [[[2, 3], [2, 3]]]], slots)
    assert [(t.layer, t.expert) for t in records.transfers] == [(layer, expert) for layer in (0, 1) for expert in range(4)]
    assert records.pool_peak_bytes["gpu0", "cache"] == slots * 1000


@pytest.mark.parametrize(("victims", "gone"), [("unrouted-first", [(1, 0), (1, 1), (0, 0)]), ("idle", [(1, 0), (1, 2), (1, 3)])])
def test_experts_of_the_layer_that_have_run_are_locked_or_not(victims: str, gone: list[tuple[int, int]]) -> None:
    """Layer 1 loads four experts into one free slot. When the third comes, the first has run and was used least of all."""
    first, last = [[[0, 1], [0, 1]]] * 2, ([[[0, 1], [2, 3]]], [[[0, 1], [4, 5]]])
    policy = make_policy({"name": "moe-infinity-code", "victims": victims})
    work = workload([first + last[0], first + last[1]], n_experts=8)
    records = play(policy, work, model=tiny_model(n_experts=8), slots={"gpu0": 5})
    assert [(one.layer, one.expert) for one in records.evictions] == gone


# ------------------------------------------------------------------------------------------------------------ the method
LIKE = [[[5, 0, 3, 0], [4, 0, 4, 0]], [[0, 1, 0, 7], [0, 6, 0, 2]]]  # sequence, layer: tokens of each expert
MATRICES = {"activation_matrices": np.array(LIKE, np.float32).swapaxes(0, 1)}


def paper(requests: Any, slots: int = 8, dense_ns: int = 40, **options: Any) -> Records:
    hardware = machine({"gpu0": gpu(dense_ns=dense_ns), "cpu0": cpu()})
    policy = make_policy({"name": "moe-infinity-paper", **options})
    return play(policy, workload(requests), hardware, slots={"gpu0": slots}, tables=MATRICES)


def copies(records: Records) -> list[str]:
    return [f"{t.cause} {t.layer}/{t.expert}" for t in records.transfers]


def test_on_demand_copies_come_first_and_then_the_best_of_the_closest_sequence() -> None:
    # Routed to 0 and 2 of layer 0, the token is like the first sequence: shares of layer 1 are .5 and .5 for 0 and 2, at
    # priority 2/3 of it; 1 and 3 of layer 0 have 1e-8, of layer 1 2/3 of that. Layer 1 begins at 7100 and takes 5000, in
    # which five copies end; the sixth is under way as the run ends.
    records = paper([[TOKEN]], dense_ns=4940)
    assert transfers(records)[:2] == [(5000, 6000, "cpu0->gpu0", "demand 0/0"), (6000, 7000, "cpu0->gpu0", "demand 0/2")]
    ended = [t for t in records.transfers if not t.left]
    assert copies(records)[2 : len(ended)] == ["prefetch 1/0", "prefetch 1/2", "prefetch 0/1", "prefetch 0/3", "prefetch 1/1"]
    assert copies(records)[len(ended) :] == ["prefetch 1/3"]
    assert [v.hits for v in records.lookups] == [(0, 0), (1, 1)]


def test_the_lowest_priority_goes_and_a_prefetch_replaces_only_what_is_lower() -> None:
    # Two slots hold 0/0 and 0/2 (.625 and .375), which the layer uses: locked. Layer 1 is passed to; then they are worth 0.
    rows = [[[0, 2], [0, 2]], [[0, 2], [0, 2]]]
    records = paper([rows], 2, 4940)
    assert copies(records)[:4] == ["demand 0/0", "demand 0/2", "demand 1/0", "demand 1/2"]
    assert [(e.layer, e.expert) for e in records.evictions][:2] == [(0, 0), (0, 2)]
    # Three slots: at layer 0 the third takes 1/0, and nothing better is left that could take its place.
    records = paper([rows[:1]], 3, 4940)
    assert copies(records)[:4] == ["demand 0/0", "demand 0/2", "prefetch 1/0", "demand 1/2"]
    more = paper([rows[:1]], 3, 4940, replaces="any")
    assert copies(more)[:4] == ["demand 0/0", "demand 0/2", "prefetch 1/0", "prefetch 1/2"]


def test_the_released_mask_takes_the_first_matrix_in_the_first_pass() -> None:
    row = [[3, 1], [1, 3]]  # like the second sequence
    assert copies(paper([[row]], dense_ns=4940, begin="next"))[2:4] == ["prefetch 1/1", "prefetch 1/3"]
    assert copies(paper([[row]], dense_ns=4940, begin="next", mask="later"))[2:4] == ["prefetch 1/0", "prefetch 1/2"]


def test_only_so_many_matrices_are_kept_and_those_of_the_run_may_be_added() -> None:
    row = [[3, 1], [1, 3]]
    assert copies(paper([[row]], dense_ns=4940, begin="next", capacity=1))[2:4] == ["prefetch 1/0", "prefetch 1/2"]
    other = [[3, 1], [2, 0]]
    work = workload([[other] * 3, [other] * 3], batch_size=1)
    hardware = machine({"gpu0": gpu(dense_ns=4940), "cpu0": cpu()})
    found = {}
    for online in (False, True):
        policy = make_policy({"name": "moe-infinity-paper", "online": online, "begin": "next"})
        found[online] = play(policy, work, hardware, slots={"gpu0": 3}, tables=MATRICES)
    assert copies(found[False]) != copies(found[True])


@pytest.mark.parametrize(("late_ns", "given_up"), [(0, True), (1, False), (-1, True)])
def test_a_prefetch_for_a_layer_passed_is_given_up_if_it_has_not_begun(late_ns: int, given_up: bool) -> None:
    view = FakeView(slots=4, tables={"activation_matrices": np.ones((4, 1, 8), np.float32)})
    policy = make_policy("moe-infinity-paper")
    view.use(policy.place(view))
    policy.decide(StepBegin(0, "decode", np.zeros(1, np.int32), True), view)
    view.put(0, [0, 1], "gpu0")
    ahead = policy.decide(routed([[0, 1]]), view)[-1]
    assert (ahead.layer, ahead.urgency) == (0, PREFETCH)
    view.pend(0, ahead.experts, "gpu0", view.costs.fetch_ns(view.host, "gpu0", None, 0) - late_ns)
    dropped = Drop(0, ahead.experts, "gpu0") in policy.decide(routed([[2, 3]], layer=1), view)
    assert dropped is given_up
