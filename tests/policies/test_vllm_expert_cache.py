"""vLLM's expert cache by hand: scores, and batches in pieces."""

from __future__ import annotations

from typing import Any

import pytest

from moesim.errors import CapacityError
from moesim.policies.registry import make_policy
from moesim.records import Records
from tests.engine.engine_kit import machine, play, tiny_model, workload
from tests.policies.caches_kit import copied, run


def left(records: Records) -> list[int]:
    return [gone.expert for gone in records.evictions]


def test_the_least_uses_over_age_leave_but_nobody_of_the_call() -> None:
    """Three slots. Clocks after the steps: 2, 4, 6, 8.

    At 5: 1 has 1/4, 2 has 1/2, so 1 leaves for 3. At 6: 0 has 3/2, 2 has 1/3, 3 has 1, so 2 leaves for 1. At 7: 0 has 3/3, 3 has
    1/2, and 1, which has just come, is spared.
    """
    records = run("vllm-expert-cache", [[0, 1], [2, 0], [3, 0], [4, 1]], 3)
    assert copied(records) == [(0, 0), (0, 1), (1, 2), (2, 3), (3, 1), (3, 4)]
    assert left(records) == [1, 2, 3]


def test_of_equal_scores_the_one_that_came_first_leaves() -> None:
    """At 4 both 0 and 1 have been used twice and once: 2/(4-1+1), and 1/(4-3+1)."""
    steps = [[0], [0], [1], [2], [3]]
    records = run("vllm-expert-cache", steps, 3, least=8)
    assert left(records) == [1], "1/(4-3+1) and 2/(4-2+1): 1/2 and 2/3"
    assert left(run("vllm-expert-cache", [[0], [0], [0], [1], [2], [3]], 3)) == [1], "3/3, 1/2, 1/1"
    assert left(run("vllm-expert-cache", [[0], [0], [1], [2]], 2)) == [0], "2/(3-2+1) and 1/(3-3+1): 1 each"


def test_uses_that_fade_are_kept() -> None:
    """0 has 1.75 at its third use, 0.875 when 1 has its first: it leaves; of uses over age 1 would (3/2, 1/1)."""
    steps = [[0], [0], [0], [1], [2]]
    assert left(run({"name": "vllm-expert-cache", "eviction": "ewma", "decay": 0.5}, steps, 2)) == [0]
    assert left(run("vllm-expert-cache", steps, 2)) == [1]
    assert left(run({"name": "vllm-expert-cache", "eviction": "ewma"}, steps, 2)) == [1], "2.997 and 1"


def prompt(split: str, slots: int = 2) -> tuple[Records, Any]:
    """Run a prompt of three rows on the toy machine, where a copy takes 1000 ns."""
    rows = [[[0, 1]], [[1, 2]], [[0, 1]], [[0, 1]]]
    policy = make_policy({"name": "vllm-expert-cache", "split": split})
    work = workload([rows], prompt=3, n_experts=4)
    return play(policy, work, machine(), model=tiny_model(n_layers=1), slots={"gpu0": slots}), policy


@pytest.mark.parametrize(
    ("split", "experts", "pieces", "tasks"),
    [
        ("token", [0, 1, 2, 0], 3, [(0, 1), (1, 1), (1, 1), (2, 1), (0, 1), (1, 1)]),
        ("expert", [0, 1, 2], 2, [(0, 2), (1, 3), (2, 1)]),
    ],
)
def test_a_prompt_goes_in_pieces_that_fit(split: str, experts: list[int], pieces: int, tasks: list[Any]) -> None:
    """By rows {0, 1}, {1, 2}, {0, 1}, which fetches 0 twice; by experts {0, 1}, {2}."""
    records, policy = prompt(split)
    first = [(t.expert, t.start) for t in records.transfers if records.steps[0].begin <= t.submitted < records.steps[0].end]
    assert [expert for expert, _ in first] == experts
    done = [t for t in records.tasks if t.expert >= 0 and t.step == 0]
    assert [(t.expert, t.rows) for t in done] == tasks
    assert first[2][1] >= done[1].end, "a piece's copies begin when the one before it is done"
    assert policy.counters["pieces"] == pieces + 1
    assert prompt(split, 3)[1].counters["pieces"] == 2, "three fit"


def test_fewer_slots_than_a_row_needs_are_refused() -> None:
    with pytest.raises(CapacityError, match="expected at least 2 cache slots a layer, got 1"):
        prompt("token", 1)
