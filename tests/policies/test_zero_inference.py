"""ZeRO-Inference on the toy machine, to the nanosecond: every layer is copied whole, with and without look-ahead.

An expert is 1000 bytes, attention 80, router and norms 60, embedding and head 80 and 90; the link moves a byte in a ns.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from moesim.policies.registry import make_policy
from moesim.records import Records
from tests.engine.engine_kit import cpu, gpu, machine, play, tasks, tiny_model, workload

TOKEN = [[0, 2], [1, 0]]  # layer: experts
LAYER = 4000  # ns to copy the four experts of a layer


def run(
    requests: Any = ((TOKEN,),), *, n_layers: int = 2, micro_batches: int = 1, expert_ns: int = 100, **options: Any
) -> Records:
    policy = make_policy({"name": "zero-inference", **options})
    toy = machine({"gpu0": gpu(expert_ns=expert_ns), "cpu0": cpu()})
    return play(policy, workload(requests, micro_batches=micro_batches), toy, model=tiny_model(n_layers=n_layers))


def test_without_look_ahead_copies_and_computing_take_turns() -> None:
    # gpu0       |   |    |DDDDD|                 |00|22|    |DDDDD|                  |00|11|
    # cpu0->gpu0 |emb|attn|     |0/0|0/1|0/2|0/3|       |attn|     |1/0|1/1|1/2|1/3|       |head
    #            0   80  160   260              4260   4460 4540  4640             8640  8840  8930
    records = run()
    begin = [(t.start, t.layer, t.expert) for t in records.transfers]
    assert begin[:2] == [(0, -1, -1), (80, 0, -1)]
    assert begin[2:6] == [(260 + 1000 * e, 0, e) for e in range(4)]
    assert begin[6:] == [(4460, 1, -1), *((4640 + 1000 * e, 1, e) for e in range(4)), (8840, -1, -1)]
    assert {t.cause for t in records.transfers} == {"demand"}
    assert tasks(records) == [
        (80, 80, "gpu0", "embedding"), (160, 260, "gpu0", "dense"), (4260, 4360, "gpu0", "E0x1"), (4360, 4460, "gpu0", "E2x1"),
        (4540, 4640, "gpu0", "dense"), (8640, 8740, "gpu0", "E0x1"), (8740, 8840, "gpu0", "E1x1"), (8930, 8930, "gpu0", "head"),
    ]  # fmt: skip


@pytest.mark.parametrize(("expert_ns", "layer_ns"), [(100, LAYER + 80), (3000, 100 + 2 * 3000)])
def test_with_look_ahead_a_layer_takes_the_longer_of_copying_and_computing(expert_ns: int, layer_ns: int) -> None:
    records = run([[[[0, 1]] * 12] * 2], n_layers=12, expert_ns=expert_ns, depth=1)
    visits = [x for x in records.layers if x.step == 1]
    assert {b.end - a.end for a, b in pairwise(visits[3:])} == {layer_ns}


def test_the_first_pass_copies_no_experts_ahead() -> None:
    ahead = run([[TOKEN] * 2], depth=1)
    asked = [t.submitted for t in ahead.transfers if t.expert >= 0]
    routed = [v.time for v in ahead.lookups]
    assert asked[:8] == [routed[0]] * 4 + [routed[1]] * 4
    assert asked[8:12] == [ahead.steps[1].begin] * 4
    assert asked[12:] == [x.begin for x in ahead.layers if (x.step, x.layer) == (1, 0)] * 4


def test_a_large_router_is_copied_too() -> None:
    """Four experts of a hidden width of five: 20 elements. Router and norms have 60 bytes."""
    sizes = [[t.n_bytes for t in run(persistence_threshold=n).transfers if t.expert < 0] for n in (20, 19)]
    assert sizes == [[80, 80, 80, 90], [80, 80, 60, 80, 60, 90]]


def test_an_offloaded_cache_is_copied_for_each_use() -> None:
    records = run([[TOKEN] * 3], kv="host")
    up = [t.n_bytes for t in records.transfers if t.cause == "write-back"]
    assert up == [8] * 6
    steps = [[t.n_bytes for t in records.transfers if s.begin <= t.start < s.end and t.n_bytes < 60] for s in records.steps]
    old = [sum(sizes) - 2 * 8 for sizes in steps]  # without what goes back
    assert [b - a for a, b in pairwise(old)] == [16, 16]
    assert records.peak_bytes["cpu0"] > run([[TOKEN] * 3]).peak_bytes["cpu0"]


def test_pageable_memory_is_its_own_transfer() -> None:
    model = tiny_model()
    assert make_policy("zero-inference").transfer(model) is None  # type: ignore[attr-defined]
    unpinned: Any = make_policy({"name": "zero-inference", "pinned": False})
    assert unpinned.transfer(model) == ("pageable", None, 0)
