"""KTransformers: who is on the GPU, and exact timelines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moesim.errors import CapacityError
from moesim.policies.registry import make_policy
from moesim.policies.systems.ktransformers import gpu_experts, split_late
from moesim.policy import Drop, Move
from moesim.records import InexactRecord, Records
from moesim.testing import FakeView
from moesim.testing import tiny_model as round_model
from tests.engine.engine_kit import cpu, gpu, link, machine, play, tasks, tiny_model, transfers, workload

TABLE = {"activation_frequency": np.array([[0.1, 0.5, 0.3, 0.8], [0.2, 0.4, 0.9, 0.1]])}
PROMPT = [[[0, 2], [1, 0]], [[2, 3], [0, 1]], [[0, 3], [2, 3]]]  # two tokens of a prompt, one generated


def run(policy: Any, slots: int, requests: Any = (PROMPT,), prompt: int = 2, **more: Any) -> Records:
    return play(make_policy(policy), workload(list(requests), prompt=prompt), slots={"gpu0": slots}, tables=TABLE, **more)


# ------------------------------------------------------------------------------------------------------------ functions


# ------------------------------------------------------------------------------------------------------------ timelines
def test_each_expert_runs_where_it_is() -> None:
    # Uniform: experts 0 and 1 of each layer on the GPU, 2 and 3 on the CPU. Nothing moves.
    records = run("kt-expert", 4)
    assert transfers(records) == [] and records.inexact == []
    where = {(t.layer, t.expert): t.device for t in records.tasks if t.kind == "expert"}
    assert all(device == ("gpu0" if expert < 2 else "cpu0") for (_, expert), device in where.items())


@pytest.mark.parametrize(
    ("policy", "on_gpu"),
    [
        ({"name": "kt-expert", "strategy": "front-loading"}, {(0, 0), (0, 1), (0, 2), (0, 3)}),
        ({"name": "kt-expert", "strategy": "frequency"}, {(0, 1), (0, 3), (1, 1), (1, 2)}),
        ({"name": "kt-expert", "gpu_experts": 1}, {(0, 0), (1, 0)}),
        ("kt-layer", {(0, 0), (0, 1), (0, 2), (0, 3)}),
        ({"name": "kt-layer", "side": "last"}, {(1, 0), (1, 1), (1, 2), (1, 3)}),
    ],
)
def test_placements_of_runs(policy: Any, on_gpu: set[tuple[int, int]]) -> None:
    every = [[[0, 1], [0, 1]], [[2, 3], [2, 3]]]
    records = run(policy, 5 if "kt-layer" in str(policy) else 4, [every], prompt=1)
    seen = {(t.layer, t.expert) for t in records.tasks if t.kind == "expert" and t.device == "gpu0"}
    assert seen == on_gpu


def test_more_experts_than_the_cache_holds_are_refused() -> None:
    assert tasks(run({"name": "kt-expert", "gpu_experts": 2}, 8)) == tasks(run("kt-expert", 4)) != tasks(run("kt-expert", 8))
    with pytest.raises(CapacityError, match="expected at most 2 gpu_experts, as the cache slots allow, got 3; lower it or raise"):
        run({"name": "kt-expert", "gpu_experts": 3}, 5)


def test_a_long_chunk_waits_for_the_whole_layer_on_the_gpu() -> None:
    # Expert 0 of each layer is resident; 1, 2 and 3 come, then the resident's bytes once more: 4000 ns a layer.
    records = run({"name": "kt-expert", "prefill_threshold": 2}, 2)
    first = [t for t in transfers(records) if t[0] < records.steps[0].end]
    assert first[:4] == [
        (100, 1100, "cpu0->gpu0", "demand 0/1"), (1100, 2100, "cpu0->gpu0", "demand 0/2"),
        (2100, 3100, "cpu0->gpu0", "demand 0/3"), (3100, 4100, "cpu0->gpu0", "message"),
    ]  # fmt: skip
    assert tasks(records)[1:4] == [
        (4100, 4200, "gpu0", "E0x1"),
        (4200, 4300, "gpu0", "E2x2"),
        (4300, 4400, "gpu0", "E3x1"),
    ]
    assert len(first) == 8
    assert {t.device for t in records.tasks if t.step == 0} == {"gpu0"}
    assert {t.device for t in records.tasks if t.step == 1 and t.kind == "expert"} == {"gpu0", "cpu0"}  # one row: divided
    assert all(e.reason == "drop" and e.expert > 0 for e in records.evictions)
    assert records.pool_peak_bytes["gpu0", "layer"] == 3000


def test_the_chunk_decides_who_stays_if_asked_to() -> None:
    # Layer 0: the two rows are routed to 0, 2 and 2, 3, so that 2 stays in the place of 0. Layer 1: 1, 0 and 0, 1: 0 stays.
    records = run({"name": "kt-expert", "prefill_threshold": 2, "dynamic_update": True}, 2)
    last = {(t.layer, t.expert): t.device for t in records.tasks if t.step == 1 and t.kind == "expert"}
    assert last == {(0, 0): "cpu0", (0, 3): "cpu0", (1, 2): "cpu0", (1, 3): "cpu0"}
    assert [(e.layer, e.expert, e.pool) for e in records.evictions] == [
        (0, 0, "cache"), (0, 1, "layer"), (0, 3, "layer"), (1, 1, "layer"), (1, 2, "layer"), (1, 3, "layer")
    ]  # fmt: skip
    again = run({"name": "kt-expert", "prefill_threshold": 2, "dynamic_update": True}, 2, [[*PROMPT[:2], [[2, 3], [0, 1]]]])
    assert {(t.layer, t.expert) for t in again.tasks if t.step == 1 and t.device == "gpu0" and t.expert >= 0} == {(0, 2), (1, 0)}


def test_micro_batches_of_a_long_chunk_share_the_buffer() -> None:
    requests = [[[[0, 1], [0, 1]], [[2, 3], [2, 3]]], [[[1, 2], [1, 2]], [[2, 3], [2, 3]]]]
    one = run({"name": "kt-expert", "prefill_threshold": 1}, 2, requests, prompt=1)
    two = play(
        make_policy({"name": "kt-expert", "prefill_threshold": 1}), workload(requests, prompt=1, micro_batches=2),
        slots={"gpu0": 2}, tables=TABLE,
    )  # fmt: skip
    assert len(one.transfers) == len(two.transfers)


def test_a_prompt_must_be_longer_than_kt_layers_threshold_and_as_long_as_kt_experts() -> None:
    for name, threshold, loads in [("kt-layer", 1, 4), ("kt-layer", 2, 0), ("kt-expert", 2, 4), ("kt-expert", 3, 0)]:
        records = run({"name": name, "prefill_threshold": threshold}, 4, [PROMPT[:2]])  # two rows; 4 of 8 experts on the GPU
        assert sum(t.expert >= 0 for t in records.transfers) == loads


def test_deferral_hides_the_cpu_behind_the_next_dense_part() -> None:
    """Four experts of 100 ns a layer on the CPU and a dense part of 100 on the GPU: 500 a layer, and 400 if two may be late."""
    model = tiny_model(n_layers=8, n_experts=8, top_k=4)
    free = {"act_latency_ns": 0, "act_bytes_per_ns": 1e9}
    toy = machine(
        {"gpu0": gpu(), "cpu0": cpu(expert_ns=100, per_row_ns=0)}, {"cpu0->gpu0": link(**free), "gpu0->cpu0": link(**free)}
    )  # fmt: skip
    work = workload([[[[3, 1, 0, 2]] * 8]], n_experts=8, weights=(0.4, 0.3, 0.2, 0.1))
    ends = {}
    for name in ("kt-expert", "kt-expert-deferral"):
        records = play(make_policy(name), work, toy, model=model, slots={"gpu0": 0})
        ends[name] = [x.end - x.begin for x in records.layers]
    assert ends["kt-expert"] == [502] * 8  # a row takes 1 ns there and 1 back
    assert ends["kt-expert-deferral"] == [302, *[400] * 6, 600]  # the last layer waits for what is late, and for its own four
    assert records.inexact == [InexactRecord(0, layer, "late", 2, pytest.approx(0.3, rel=1e-3)) for layer in range(7)]


def test_weights_and_not_ranks_protect() -> None:
    policy = make_policy({"name": "kt-expert-deferral", "max_deferred": 1})
    records = play(policy, workload([[[[2, 3], [2, 3]]]], weights=(0.25, 0.75)), slots={"gpu0": 0})
    assert records.inexact == [InexactRecord(0, 0, "late", 1, 0.25)]


def test_experts_are_in_order_in_whatever_order_they_are_held():
    on_cpu = dict.fromkeys((41, 8, 33, 2, 16))
    assert split_late(np.array([[8, 41, 2, 0]]), 2, on_cpu) == ([8, 41], [2, 16, 33])


@pytest.mark.parametrize("total", [0, 11, 24, 99])
def test_random_experts_are_those_of_one_draw_over_all_layers(total: int) -> None:
    drawn = set(np.random.default_rng(5).permutation(24)[:total].tolist())
    assert gpu_experts("random", total, 3, 8, seed=5) == [
        [e for e in range(8) if layer * 8 + e in drawn] for layer in range(3)
    ]  # fmt: skip


def test_residents_that_a_prompt_replaces_are_told_in_order() -> None:
    """Of 64 experts, since sets of small numbers are in order anyway; 9 is used most, too, and stays."""
    policy: Any = make_policy({"name": "kt-expert", "dynamic_update": True, "prefill_threshold": 5})
    view = FakeView(round_model(n_experts=64), slots=16)
    policy.place(view)
    policy._on_gpu[2], policy._prefill = {9, 33, 2, 40}, True
    policy._long = [np.array([[9, 48], [9, 1]]), np.array([[16, 48], [1, 16]])]
    policy._whole = SimpleNamespace(layer=2, give_up=lambda view, keep: [sorted(keep)])
    gpu0 = policy._gpu
    assert policy.layer_ended(view) == [Drop(2, [2, 33, 40], gpu0), Move(2, [1, 16, 48], gpu0, "cache"), [1, 9, 16, 48]]
    assert policy._on_gpu[2] == {1, 9, 16, 48} and policy._long == []
