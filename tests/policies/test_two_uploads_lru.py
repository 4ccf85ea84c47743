"""Uploads between steps (llama.cpp PR 27861): the worked examples, uploads of what is on its way, and the rules of two forks."""

from __future__ import annotations

import pytest

from moesim.metrics.hits import hit_rates
from moesim.policies.registry import make_policy
from tests.engine.engine_kit import cpu, gpu, link, machine, play, tiny_model, workload
from tests.policies.caches_kit import copied, run, served

ONE = {"name": "two-uploads-lru", "inserts": 1}
LATE = machine({"gpu0": gpu(), "cpu0": cpu()}, {"cpu0->gpu0": link(0.7), "gpu0->cpu0": link()})
"""An upload takes 1429 ns, a step of one layer with a miss about 500."""


def test_the_newest_miss_takes_its_turn_even_if_it_is_there_by_now() -> None:
    steps = [[0, 1], [0, 1], [0, 2], [0, 2], [0, 2], [0, 2], [0, 2]]
    records = run(ONE, steps, 2)
    assert copied(records) == [(1, 1), (3, 2), (5, 0)]
    assert [sorted(step) for step in served(records)] == [[], [], [], [], [2], [2], [0, 2]]
    # In the steps of the uploads, 1, 3 and 5, what has just come is there as well, and is not used before the next step.
    rates = hit_rates(records, {"gpu0": "gpu", "cpu0": "cpu"})
    assert (rates["hit_rate"], rates["resident_rate"]) == (4 / 14, 7 / 14)
    two = run("two-uploads-lru", steps, 2)
    assert [0 in step for step in served(two)] == [False, False, True, True, True, True, True]


def test_an_upload_counts_from_the_step_after_its_end_on() -> None:
    # It goes on from the second step's begin, at 560, until 1560, within the third step: that step does not find it.
    once = {"name": "two-uploads-lru", "dup_upload": False}
    records = run(once, [[0], [0], [0], [0]], 2, hardware=machine({"gpu0": gpu(), "cpu0": cpu()}))
    assert [(t.start, t.end) for t in records.transfers] == [(560, 1560)]
    assert [step.begin for step in records.steps] == [0, 560, 1120, 1680]
    assert served(records) == [[], [], [], [0]]


def test_what_is_on_its_way_is_uploaded_again_and_lost_with_its_first_slot() -> None:
    # Two slots, an upload takes three steps. 0 misses four times, so that both slots are filled with it, one after the other.
    # Both count as 1 gets the slot used longer ago, the first: so 0 does not count as there, though the second slot holds it.
    steps = [[0]] * 8 + [[1], [0], [0]]
    policy = make_policy(ONE)
    work = workload([[[step] for step in steps]], n_experts=8, weights=[1.0])
    records = play(policy, work, LATE, model=tiny_model(n_layers=1, n_experts=8, top_k=1), slots={"gpu0": 2})
    assert [(t.start, t.end, t.cause) for t in records.transfers][:2] == [(560, 1989, "update"), (1989, 3418, "message")]
    assert [step.begin for step in records.steps][8:10] == [3120, 3680]
    assert served(records)[7:] == [[0], [], [], []]
    assert [e for e in records.evictions if e.time <= 3680] == []
    assert policy.counters["duplicate_copies"] == 1  # type: ignore[attr-defined]
    once = {**ONE, "dup_upload": False}
    assert served(run(once, steps, 2, hardware=LATE))[7:] == [[0], [], [0], [0]], "uploaded once, it stays"


def test_after_a_second_upload_of_what_was_coming_others_are_uploaded() -> None:
    # 1 misses in the step that begins at 3120; its upload begins with the next, and counts from the step after its end on.
    work = workload([[[[expert]] for expert in (0,) * 8 + (1,) * 8]], n_experts=8, weights=[1.0])
    policy = make_policy(ONE)
    records = play(policy, work, LATE, model=tiny_model(n_layers=1, n_experts=8, top_k=1), slots={"gpu0": 2})
    third = records.transfers[2]
    assert (third.start, third.end, third.cause, third.expert) == (3680, 5109, "update", 1)
    assert [step.begin for step in records.steps][9:13] == [3680, 4240, 4800, 5360]
    assert served(records)[8:] == [[]] * 4 + [[1]] * 4


# --------------------------------------------------------------------------------------------------------------- two forks
EARLY = {**ONE, "early": True}


def test_an_early_upload_fills_a_slot_that_was_emptied_between_steps() -> None:
    # Three slots. 0 and 1 miss in step 0, and one upload a layer visit begins in that step: 0; then 1; then 2, into the last
    # empty slot. Before step 3 the expert used longest ago, 1, leaves for the next upload, which is 1 again.
    records = run(EARLY, [[0, 1], [0, 1], [0, 2], [0, 1], [0, 1]], 3)
    assert copied(records) == [(0, 0), (1, 1), (2, 2), (3, 1)]
    assert [sorted(step) for step in served(records)] == [[], [0], [0], [0], [0, 1]]
    assert [(gone.layer, gone.expert) for gone in records.evictions] == [(0, 1), (0, 2)]


def test_an_early_upload_is_not_issued_again_while_it_is_on_its_way() -> None:
    records = run(EARLY, [[0]] * 6, 2, hardware=LATE)
    assert [(t.expert, t.cause) for t in records.transfers] == [(0, "update")]
    assert served(records) == [[], [], [], [0], [0], [0]]


def test_an_early_upload_that_replaces_waits_for_the_second_miss_within_the_window() -> None:
    # Both slots are empty as 0 misses. As 1 misses there is no more than the one slot for the next upload.
    steps = [[0], [1], [2], [1], [2], [2], [1]]
    gated = {**EARLY, "admit": 2, "window": 3}
    assert copied(run(gated, steps, 2)) == [(0, 0), (3, 1), (4, 2)]
    assert copied(run({**gated, "window": 2}, steps, 2)) == [(0, 0), (5, 2)], "two steps are not less than two"


@pytest.mark.parametrize(("window", "copies"), [(3, [(1, 0), (4, 1)]), (2, [(1, 0)])])
def test_an_upload_that_replaces_waits_for_the_third_miss_within_the_window(window: int, copies: list[tuple[int, int]]) -> None:
    # 0 takes the empty slot. 1 misses in steps 1, 2 and 3, that is, two tokens apart; its upload follows between steps.
    records = run({**ONE, "admit": 3, "window": window}, [[0], [1], [1], [1], [1], [1], [2]], 1)
    assert copied(records) == copies
    assert served(records)[5] == ([1] if window == 3 else [])


def test_uploads_under_way_take_no_turn_of_the_gate() -> None:
    # Of the two misses of each step the newer, 1, is on its way from step 1 on: the turn is that of 0.
    records = run({**ONE, "admit": 2}, [[0, 1]] * 3, 2, hardware=LATE)
    assert [t.expert for t in records.transfers] == [1, 0]
    assert records.transfers[1].submitted == 1429 + records.transfers[0].submitted
