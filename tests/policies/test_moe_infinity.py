"""MoE-Infinity: its functions against restatements, its fetch thread to the nanosecond, and its replacement over a whole run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moesim.policies.algorithms.activations import least_visited
from moesim.policies.registry import make_policy
from moesim.records import Records
from moesim.testing import check_policy
from tests.engine.engine_kit import play, tasks, tiny_model, transfers, workload

TOKEN = [[0, 2], [1, 0]]  # layer: experts


def run(requests: Any, slots: int = 8, name: Any = "moe-infinity-code", **more: Any) -> Records:
    return play(make_policy(name), workload(requests, **more), slots={"gpu0": slots})


# ------------------------------------------------------------------------------------------------------------ functions
@pytest.mark.parametrize("seed", range(30))
def test_the_first_strict_minimum_of_a_scan_expert_by_expert_goes(seed: int) -> None:
    draw = np.random.default_rng(seed)
    shape = int(draw.integers(1, 6)), int(draw.integers(1, 9))
    visits, may_go = draw.integers(0, 4, shape), draw.random(shape) < 0.6
    found = None
    for expert in range(shape[1]):
        for layer in range(shape[0]):
            if may_go[layer, expert] and (found is None or visits[layer, expert] < visits[found]):
                found = layer, expert
    assert least_visited(visits, may_go) == found


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


def test_copies_are_made_one_after_another_in_ascending_order() -> None:
    records = run([[TOKEN]])
    assert transfers(records) == [
        (100, 1100, "cpu0->gpu0", "demand 0/0"), (1100, 2100, "cpu0->gpu0", "demand 0/2"),
        (2300, 3300, "cpu0->gpu0", "demand 1/0"), (3300, 4300, "cpu0->gpu0", "demand 1/1"),
    ]  # fmt: skip
    assert [t.submitted for t in records.transfers] == [100, 1100, 2300, 3300]
    assert tasks(records)[1:3] == [(1100, 1200, "gpu0", "E0x1"), (2100, 2200, "gpu0", "E2x1")]


def replayed(requests: list[Any], slots: int) -> list[tuple[int, int]]:
    """The rules, without an engine: what is evicted, for steps of one row and a cache larger than two layers' experts."""
    counts: dict[tuple[int, int], int] = {}
    cached: set[tuple[int, int]] = set()
    gone = []
    for request in requests:
        for row in request:
            for layer, experts in enumerate(row):
                for expert in sorted(experts):
                    if (layer, expert) not in cached:
                        if len(cached) == slots:
                            free = [one for one in cached if one[0] != layer or one[1] not in experts]
                            victim = min(free, key=lambda one: (counts[one], one[1], one[0]))
                            cached.remove(victim)
                            gone.append(victim)
                        cached.add((layer, expert))
                    counts[layer, expert] = counts.get((layer, expert), 0) + 1
    return gone


@pytest.mark.parametrize(("seed", "slots"), [(seed, slots) for seed in range(6) for slots in (3, 5, 7)])
def test_the_lowest_count_of_the_whole_run_goes_over_all_layers(seed: int, slots: int) -> None:
    draw = np.random.default_rng(seed)
    rows = [[draw.permutation(4)[:2].tolist() for _ in range(2)] for _ in range(25)]
    records = run([rows[:12], rows[12:]], slots, batch_size=1)
    expected = replayed([rows[:12], rows[12:]], slots)
    assert [(one.layer, one.expert) for one in records.evictions] == expected and len(expected) > 3


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


@pytest.mark.parametrize("victims", ["unrouted-first", "idle"])
def test_it_keeps_the_contract(victims: str) -> None:
    check_policy(lambda: make_policy({"name": "moe-infinity-code", "victims": victims}))
