"""QVAC fabric's expert cache: its worked example, and which steps it serves."""

from __future__ import annotations

import pytest

from moesim.policies.registry import make_policy
from tests.engine.engine_kit import play, tiny_model, workload
from tests.policies.caches_kit import FAST, Step, happened, run


def test_least_recently_used_over_all_layers() -> None:
    # As in llama.cpp's cache: 4 takes the slot of layer 0's 3, and 0 that of layer 1's 2.
    records = run("fabric-lru", [[[3, 1], [2, 5]], [[1, 4], [5, 0]]], 4, layers=2)
    assert happened(records, 2) == [
        Step([[1, 3], [2, 5]], [(0, 1), (0, 3), (1, 2), (1, 5)], []),
        Step([[1, 4], [0, 5]], [(0, 4), (1, 0)], [(0, 3), (1, 2)]),
    ]


def test_hits_are_stamped_by_id() -> None:
    # 5 and 2 are hits, 5 first by rank; by id 2 has been used longer ago, and leaves.
    records = run("fabric-lru", [[5, 2], [5, 2], [7, 8]], 3)
    assert [e.expert for e in records.evictions] == [2]


@pytest.mark.parametrize(
    ("rows", "slots", "device"),
    [
        ([[0, 1], [2, 3]], 4, "gpu0"),
        ([[0, 1], [2, 3]], 3, "cpu0"),  # four experts do not fit
        ([[0, 1], [0, 1], [1, 0]], 3, "gpu0"),  # of three rows, with two experts
        ([[0, 1], [2, 3]] * 16, 3, "gpu0"),  # op-offload
    ],
)
def test_which_prompts_the_cache_serves(rows: list[list[int]], slots: int, device: str) -> None:
    work = workload([[[row] for row in rows] + [[[0, 1]]]], prompt=len(rows), n_experts=8)
    records = play(make_policy("fabric-lru"), work, FAST, model=tiny_model(n_layers=1, n_experts=8), slots={"gpu0": slots})
    assert {t.device for t in records.tasks if t.expert >= 0 and t.step == 0} == {device}
    again = [t for t in records.transfers if t.expert >= 0 and t.submitted >= records.steps[1].begin]
    assert len(again) == (0 if len({e for row in rows for e in row}) <= slots else 2)
