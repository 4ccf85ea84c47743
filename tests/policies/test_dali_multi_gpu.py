"""DALI on several GPUs: with one it is DALI; with two it is what the pure functions and a timeline by hand say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesim.errors import HardwareError
from moesim.policies.parts.assignment import greedy_assignment
from moesim.policies.registry import make_policy
from moesim.policies.systems.dali_multi_gpu import DaliMultiGpu, greedy_multi_assignment
from moesim.testing import FakeView, run_tiny, tiny_machine, tiny_workload
from tests.engine.engine_kit import Oracle, cpu, crossings, gpu, link, machine, play, tasks, transfers, workload

ONE, TWO = tiny_machine(), tiny_machine(2)
COSTS = st.integers(0, 12)


# -------------------------------------------------------------------------------------------------- the pure functions
@st.composite
def layers(draw: Any, n_gpus: int | None = None) -> tuple[list[list[int]], list[int]]:
    n_experts = draw(st.integers(0, 12))
    n = n_gpus or draw(st.integers(1, 4))
    rows = [draw(st.lists(COSTS, min_size=n_experts, max_size=n_experts)) for _ in range(n + 1)]
    return rows[:-1], rows[-1]


@given(layers(n_gpus=1), st.integers(0, 4), st.integers(0, 4))
def test_with_one_gpu_the_greedy_rule_is_algorithm_1(
    costs: tuple[list[list[int]], list[int]], gpu_first: int, cpu_first: int
) -> None:
    gpu_costs, cpu_cost = costs
    one = greedy_assignment(gpu_costs[0], cpu_cost, gpu_first=gpu_first, cpu_first=cpu_first)
    many = greedy_multi_assignment(gpu_costs, cpu_cost, [gpu_first], cpu_first)
    assert many == ((one.gpu,), one.cpu, (one.gpu_total,), one.cpu_total)


@given(layers())
def test_every_expert_goes_once_to_the_device_that_the_rule_says(costs: tuple[list[list[int]], list[int]]) -> None:
    """Replays the rule from its words, one expert at a time, over the plan's own choices."""
    gpu_costs, cpu_cost = costs
    plan = greedy_multi_assignment(gpu_costs, cpu_cost)
    where = {e: g for g, taken in enumerate(plan.gpus) for e in taken} | dict.fromkeys(plan.cpu, -1)
    active = [e for e in range(len(cpu_cost)) if cpu_cost[e] or min(row[e] for row in gpu_costs)]
    assert sorted(where) == active
    totals = [0] * len(gpu_costs)
    on_cpu = 0
    for e in sorted(active, key=lambda e: (-abs(min(row[e] for row in gpu_costs) - cpu_cost[e]), e)):
        after = [total + row[e] for total, row in zip(totals, gpu_costs, strict=True)]
        if min(after) <= on_cpu + cpu_cost[e]:
            assert where[e] == after.index(min(after))
            totals[where[e]] = min(after)
        else:
            assert where[e] == -1
            on_cpu += cpu_cost[e]
    assert (list(plan.gpu_totals), plan.cpu_total) == (totals, on_cpu)


def test_the_greedy_rule_may_copy_what_a_busy_gpu_has() -> None:
    """Expert 3 is on the first GPU, which is to compute 2; the second finishes a copy of it sooner, a tie goes to the first."""
    plan = greedy_multi_assignment([[3, 3, 3, 2, 3], [3, 3, 3, 3, 2]], [1, 1, 5, 4, 1])
    assert plan == (((2,), (3,)), (0, 1, 4), (3, 3), 3)
    tied = greedy_multi_assignment([[3, 3, 3, 2, 3], [3, 3, 3, 5, 2]], [1, 1, 5, 4, 1])
    assert tied.gpus == ((2, 3), (4,))


# ----------------------------------------------------------------------------------------------------------- one GPU
OPTIONS: list[dict[str, Any]] = [
    {},
    {"w_size": 1, "u_size": 2},
    {"w_size": 3, "u_size": 2},
    {"w_size": 2, "u_size": 8, "prefetch_size": 3},
    {"w_size": 1, "u_size": 1, "prefetch_size": 2, "prefetch_source": "synthetic:0.4"},
    {"u_size": 0, "prefetch_size": 0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("batch", "micro_batches", "decision_ns"), [(1, 1, 0), (4, 1, 0), (4, 4, 700)])
def test_on_one_gpu_it_is_dali(options: dict[str, Any], batch: int, micro_batches: int, decision_ns: int) -> None:
    one = make_policy({"name": "dali", **options})
    many = make_policy({"name": "dali-multi-gpu", **options})
    work = tiny_workload(one, batch, micro_batches)
    for slots in (0, 4, 12, 32):
        assert run_tiny(many, work, slots, decision_ns, hardware=ONE) == run_tiny(one, work, slots, decision_ns, hardware=ONE)


# ---------------------------------------------------------------------------------------------------------- two GPUs


def test_no_expert_is_cached_twice() -> None:
    policy = DaliMultiGpu(w_size=1, u_size=2)
    records = run_tiny(policy, tiny_workload(policy, 4), 12, hardware=TWO)
    residents = [gpu.members for gpu in policy._gpus]  # at the end, after many swaps
    assert sum(e.pool == "cache" for e in records.evictions) > 20
    for first, second in zip(*residents, strict=True):
        assert (len(first), len(second)) == (3, 3)
        assert not first & second


def test_each_gpu_has_its_pools_and_the_residents_are_dealt_out() -> None:
    view = FakeView(hardware=TWO, slots=12)
    policy = DaliMultiGpu(seed=3, prefetch_size=2)
    placement = policy.place(view)
    assert {(pool.device, pool.name) for pool in placement.pools} == {
        (device, name) for device in ("gpu0", "gpu1") for name in ("cache", "staging", "prefetch")
    }
    on = {(c.layer, c.device): set(c.experts) for c in placement.copies}
    assert all(len(on[layer, "gpu0"] | on[layer, "gpu1"]) == 6 for layer in range(4))
    DaliMultiGpu().place(FakeView(hardware=TWO, slots=32))  # 8 slots a layer each, 8 experts: 4 each
    with pytest.raises(HardwareError, match=r"n_gpus: expected at most the 2 GPUs of the hardware profile, got 3"):
        DaliMultiGpu(n_gpus=3).place(view)


# Three tokens, two layers of four experts, as in test_policies_by_hand; an expert takes 100 on a GPU, 1600 on this slow CPU,
# 1000 over a link; a row takes 20 across each link, so 40 between the GPUs.
TOKENS = [[[0, 2], [1, 0]], [[2, 3], [0, 1]], [[0, 3], [2, 3]]]
DEVICES = {"gpu0": gpu(predict={"told": 10}), "gpu1": gpu(), "cpu0": cpu(expert_ns=1500)}
LINKS = {name: link() for g in ("gpu0", "gpu1") for name in (f"cpu0->{g}", f"{g}->cpu0")}
TOY = machine(DEVICES, LINKS)


def played(slots: Sequence[int], **options: Any) -> Any:
    return play(
        make_policy({"name": "dali-multi-gpu", **options}), workload([TOKENS]), TOY,
        slots={"gpu0": slots[0], "gpu1": slots[1]}, predictors={"told": Oracle()},
    )  # fmt: skip


def test_two_links_load_at_once() -> None:
    """Residents: layer 0: 3 | 1, layer 1: 0 | 1 (seed 0). Nothing is prefetched or replaced."""
    records = played((2, 2), prefetch_size=0, u_size=0)
    # Token 0, layer 0: 0 and 2 cost 1000 on either GPU and 1600 on the CPU: one each. Layer 1: both are resident.
    assert transfers(records)[:2] == [(100, 1100, "cpu0->gpu0", "demand 0/0"), (100, 1100, "cpu0->gpu1", "demand 0/2")]
    assert tasks(records)[:6] == [
        (0, 100, "gpu0", "dense"),
        (1100, 1200, "gpu0", "E0x1"),
        (1100, 1200, "gpu1", "E2x1"),
        (1240, 1340, "gpu0", "dense"),  # once the output of gpu1 is back
        (1340, 1440, "gpu0", "E0x1"),
        (1380, 1480, "gpu1", "E1x1"),
    ]
    assert crossings(records)[:4] == [
        (100, 120, "gpu0->cpu0", "in", 1),
        (120, 140, "cpu0->gpu1", "in", 1),
        (1200, 1220, "gpu1->cpu0", "out", 1),
        (1220, 1240, "cpu0->gpu0", "out", 1),
    ]
    # Token 1, layer 0: 3 is on gpu0 (difference 1500, first), 2 then ends at 1000 on gpu1. Token 2, layer 1: 2 and 3, one each.
    assert transfers(records)[2:] == [
        (1620, 2620, "cpu0->gpu1", "demand 0/2"),
        (3140, 4140, "cpu0->gpu1", "demand 0/0"),
        (4380, 5380, "cpu0->gpu0", "demand 1/2"),
        (4380, 5380, "cpu0->gpu1", "demand 1/3"),
    ]
    assert [s.end for s in records.steps] == [1520, 3040, 5520]
    assert {t.device for t in records.tasks} == {"gpu0", "gpu1"}


def test_predictions_and_swaps_are_dealt_out_in_turns() -> None:
    """Layer 1 of token 2 uses 2 and 3, both nowhere: told so at 3150, the first goes to gpu0, the second to gpu1."""
    records = played((2, 2), prefetch_size=1, prefetch_source="told", u_size=0)
    # The link of gpu1 first finishes 0 of layer 0; then it begins ahead of time, at 4140, what layer 1 demands at 4380.
    assert transfers(records)[3:] == [
        (3140, 4140, "cpu0->gpu1", "demand 0/0"),
        (3150, 4150, "cpu0->gpu0", "prefetch 1/2"),
        (4140, 5140, "cpu0->gpu1", "demand 1/3"),
    ]
    # After two visits layer 0 has the scores 1 0 2 1: 2 for 3 on gpu0, 0 for 1 on gpu1.
    swapped = played((2, 2), prefetch_size=0, w_size=2, u_size=1)
    assert [(e.time, e.device, e.expert) for e in swapped.evictions if e.pool == "cache" and e.layer == 0] == [
        (2760, "gpu0", 3),
        (2760, "gpu1", 1),
    ]
    arrivals = [t for t in transfers(swapped) if t[0] == 2760]
    assert arrivals == [(2760, 3760, "cpu0->gpu0", "update 0/2"), (2760, 3760, "cpu0->gpu1", "demand 0/0")]
