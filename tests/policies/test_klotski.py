"""Klotski: votes for hot experts, and a layer of two micro-batches to the nanosecond."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moesim.policies.registry import make_policy
from moesim.policies.systems.klotski import hot_experts
from moesim.policy import Drop, Fetched, LayerBegin, LayerEnd, StepBegin
from moesim.records import Records
from moesim.testing import FakeView
from tests.engine.engine_kit import machine, play, tasks, tiny_model, transfers, workload

PAIRS = np.array([
    [6, 5, 1, 0, 0, 0, 0, 0], [1, 7, 6, 0, 0, 0, 0, 0], [0] * 8, [0] * 8, [0] * 8,
    [9, 8, 0, 0, 0, 0, 0, 1], [0, 7, 0, 9, 0, 0, 0, 0], [0] * 8,
])  # fmt: skip


# What each choice is, by hand from the released code's rule: a row's choice in the layer before counts one for both partners.
VECTORS: list[tuple[Any, Any, list[int]]] = [
    ([[0, 1], [1, 5], [5, 6]], PAIRS, [1, 0]),  # 0: 3 votes; 1: 6; 2 and 3: 2 and 1
    ([[0, 6], [6, 1], [2, 6]], PAIRS, [1, 3]),  # 3: three votes of 6; 1: these, and one each of 0, 1 and 2; 0: two
    ([[5, 1], [0, 1], [6, 1], [1, 2]], PAIRS, [1, 2]),  # 1: four votes of 1, and one each of 0, 2, 5 and 6; 2: four; 0: three
    ([[3, 4], [4, 7]], PAIRS, [0, 1]),  # nothing is known of any: the lowest ids
]


@pytest.mark.parametrize(("previous", "table", "chosen"), VECTORS)
def test_rows_of_the_layer_before_vote(previous: Any, table: Any, chosen: list[int]) -> None:
    assert hot_experts(np.array(previous), np.array(table), 2) == chosen


# Two layers; two requests of one row, each a micro-batch: routed to 2 and 0, and to 2 and 3, in layer 0.
ROWS = [[[[2, 0], [1, 0]]], [[[2, 3], [1, 2]]]]
TABLE = np.zeros((2, 4, 4))
TABLE[0, 2] = [0, 6, 4, 0]  # expert 2 is the most popular of layer 0, followed by 3
TABLE[0, 3] = [0, 2, 0, 0]


def run(rows: Any = ROWS, table: Any = TABLE, links: Any = None, **options: Any) -> Records:
    policy = make_policy({"name": "klotski", "n_hot": 1, **options})
    tables = {"coactivation": table} if options.get("calibrated", True) else {}
    return play(policy, workload(rows, micro_batches=2), machine(None, links), tables=tables)


def test_hot_experts_are_copied_during_attention_and_run_first() -> None:
    # gpu0       |DDDD|DDDD|            |22|22|         |00|          |33| next layer
    # cpu0->gpu0 |0/2                   |0/0            |0/3          |
    #            0   100  200          1000            2000          3000
    records = run()
    # A hot copy that is under way when the first gate is done counts as a demand from then on.
    down = [(0, "demand 0/2"), (1000, "demand 0/0"), (2000, "demand 0/3")]
    assert transfers(records)[:3] == [(at, at + 1000, "cpu0->gpu0", what) for at, what in down]
    assert tasks(records)[:6] == [
        (0, 100, "gpu0", "dense"), (100, 200, "gpu0", "dense"), (1000, 1100, "gpu0", "E2x1"), (1100, 1200, "gpu0", "E2x1"),
        (2000, 2100, "gpu0", "E0x1"), (3000, 3100, "gpu0", "E3x1"),
    ]  # fmt: skip
    # Expert 2 has the most votes in layer 1: 1 and 2 are its partners; expert 1 is first.
    assert transfers(records)[3] == (3100, 4100, "cpu0->gpu0", "demand 1/1")


def test_a_hot_expert_that_nobody_wants_is_copied_and_dropped() -> None:
    """Experts 0 and 1 are wanted. Expert 3, the third guess, holds the next layer's copies up, and is dropped as it arrives."""
    table = np.zeros((2, 4, 4))
    table[0, 1] = table[0, 0] = table[0, 3] = [0, 1, 0, 0]
    records = run([[[[0, 1], [0, 1]]], [[[0, 1], [0, 1]]]], table, n_hot=3)
    assert [(t.layer, t.expert) for t in records.transfers][:4] == [(0, 0), (0, 1), (0, 3), (1, 0)]
    assert records.transfers[2].end == records.transfers[3].start == 3000
    assert [(e.layer, e.expert) for e in records.evictions if e.time == 3000] == [(0, 3)]


def test_a_hot_expert_that_is_late_and_hot_again_stays_when_it_arrives() -> None:
    view = FakeView()
    policy = make_policy("klotski")
    view.tables = {"coactivation": np.ones((3, 8, 8)), "activation_frequency": np.ones((4, 8))}
    view.use(policy.place(view))
    for again in (False, True):
        policy.decide(StepBegin(0, "decode", np.zeros(1), True), view)
        (fetch,) = policy.decide(LayerBegin(0, 0), view)
        late = fetch.experts[0]
        view.pend(0, [late], "gpu0")
        list(policy.decide(LayerEnd(0, 0), view))
        if again:
            policy.decide(LayerBegin(1, 0), view)
        arrived = list(policy.decide(Fetched(0, late, "gpu0"), view))
        assert arrived == ([] if again else [Drop(0, (late,), "gpu0")])


def test_the_table_learns_every_row() -> None:
    """Empty at first, so 0 is hot; the second step knows that expert 2 was used in layer 0, and expert 1 after it."""
    row = [[2, 3], [1, 3]]
    records = run([[row, row], [row, row]], calibrated=False)
    begin = {visit.begin for visit in records.layers}
    hot = [(t.layer, t.expert) for t in records.transfers if t.submitted in begin]
    assert hot == [(0, 0), (1, 0), (0, 2), (1, 1)]


def test_merged_kernels_take_the_rows_of_all_micro_batches() -> None:
    records = run(merged=True)
    assert tasks(records)[2:5] == [
        (1000, 1100, "gpu0", "E2x2"), (2000, 2100, "gpu0", "E0x1"), (3000, 3100, "gpu0", "E3x1"),
    ]  # fmt: skip


def test_a_model_of_one_layer_needs_no_pairs() -> None:
    policy = make_policy({"name": "klotski", "calibrated": False})
    rows = [[[[1, 2]], [[1, 2]]]]
    records = play(policy, workload(rows), model=tiny_model(n_layers=1))
    assert [(t.expert, t.submitted) for t in records.transfers] == [(0, 0), (1, 0), (2, 100), (1, 3100), (2, 3100)]


def test_the_hot_table_is_never_copied() -> None:
    """Two slots for the most frequent pairs, (0, 2) and (1, 0): they run at once, and the link brings the others alone."""
    frequency = np.array([[0.1, 0.1, 0.7, 0.1], [0.4, 0.2, 0.2, 0.2]])
    tables = {"coactivation": TABLE, "activation_frequency": frequency}
    policy = make_policy({"name": "klotski", "n_hot": 1, "hot_table": True})
    records = play(policy, workload(ROWS, micro_batches=2), machine(None, None), tables=tables, slots={"gpu0": 2})
    copied = {(t.layer, t.expert) for t in records.transfers}
    assert copied == {(0, 0), (0, 3), (1, 1), (1, 2)}
    assert tasks(records)[2:4] == [(200, 300, "gpu0", "E2x1"), (300, 400, "gpu0", "E2x1")]
