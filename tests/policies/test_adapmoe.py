"""AdapMoE: its dynamic program against brute force, its expected loads against enumeration, and exact timelines."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import numpy as np
import pytest

from moesim.errors import CapacityError, ConfigError
from moesim.policies.registry import make_policy
from moesim.policies.systems.adapmoe import cache_sizes, expected_loads, gating_threshold, leaves_second_out
from moesim.policies.systems.mixtral_offloading import mixtral_offloading_plan
from moesim.records import Records
from moesim.trace import Trace
from moesim.trace.workload import WorkloadSpec, compose
from tests.engine.engine_kit import Oracle, cpu, gpu, link, machine, play, tasks, tiny_model, transfers, workload

TOY = {"gpu0": gpu(predict={"told": 10, "wrong": 10, "first": 10}), "cpu0": cpu()}
TOKEN = [[0, 2], [1, 0]]  # layer: experts


class Says(Oracle):
    """Always says an expert, and then the next."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self._first = first

    def predict(self, step: Any, mb: int, layer: int) -> tuple[Any, None]:
        return np.zeros_like(step.micro[mb].layers[layer].experts) + np.arange(self._first, self._first + 2), None


def run(
    requests: Any = ((TOKEN,),), slots: int = 4, hardware: Any = None, prompt: int = 0, decision_ns: int = 0, **options: Any
) -> Records:
    policy = make_policy({"name": "adapmoe", "source": "told", **options})
    work = workload(list(requests), prompt=prompt)
    predictors = {"told": Oracle(), "wrong": Says(2), "first": Says(0)}
    return play(
        policy, work, hardware or machine(TOY), predictors=predictors, slots={"gpu0": slots}, decision_ns=decision_ns
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ functions
def test_sizes_are_the_best_and_of_equals_the_smallest_from_the_last_layer_on() -> None:
    draw = np.random.default_rng(7)
    for _ in range(1000):
        n_layers, n_experts = int(draw.integers(1, 5)), int(draw.integers(1, 5))
        loads = draw.integers(0, 4, size=(n_layers, n_experts + 1)).tolist()  # many ties
        total = int(draw.integers(n_layers, n_layers * n_experts + 3))
        spent = min(total, n_layers * n_experts)
        every = [sizes for sizes in product(range(1, n_experts + 1), repeat=n_layers) if sum(sizes) == spent]
        cost = [sum(of[size] for of, size in zip(loads, sizes, strict=True)) for sizes in every]
        best = [sizes for sizes, one in zip(every, cost, strict=True) if one == min(cost)]
        assert cache_sizes(loads, total) == list(min(best, key=lambda sizes: sizes[::-1]))


def test_the_second_of_two_is_left_out_if_its_renormalised_weight_is_below_the_threshold() -> None:
    draw = np.random.default_rng(8)
    found = []
    for weights in draw.random((1000, 2)):
        threshold = gating_threshold(sensitivity := float(draw.uniform(0.005, 0.2)))
        _, second = weights / weights.sum()
        found.append(leaves_second_out(*weights.tolist(), threshold))
        assert found[-1] == (second < np.sqrt(0.005 / sensitivity))
    assert 200 < sum(found) < 800
    assert not leaves_second_out(0.5, 0.5, gating_threshold(0.02)), "equal is not below"


@pytest.mark.parametrize("size", range(6))
@pytest.mark.parametrize(("accuracy", "single"), [(0.0, 0.0), (1.0, 0.0), (0.4, 0.0), (0.4, 0.3), (0.4, 1.0)])
def test_expected_loads_are_those_of_all_caches_and_tokens(size: int, accuracy: float, single: float) -> None:
    n, totals = 5, []
    for cached in combinations(range(n), size):
        one = np.mean([e not in cached for e in range(n)]) * (1 - accuracy)
        missing = [sum(e not in cached for e in token) for token in combinations(range(n), 2)]
        two = np.mean([m - accuracy * (m > 0) for m in missing])  # a right prefetch saves one load
        totals.append(single * one + (1 - single) * two)
    assert expected_loads(size, n, accuracy, single) == pytest.approx(np.mean(totals))


def test_the_first_layer_gets_most_of_the_cache() -> None:
    loads = [[expected_loads(size, 8, accuracy) for size in range(9)] for accuracy in [0.0] + [0.86] * 31]
    sizes = cache_sizes(loads, 64)
    assert sizes[:2] == [8, 2] and sum(sizes) == 64 and min(sizes) == 1
    draw = np.random.default_rng(9)
    for _ in range(20):  # the code's table lies within these bounds: 8, 2, 2 and so on without adaptive gating
        loads[1:] = [[expected_loads(size, 8, accuracy) for size in range(9)] for accuracy in draw.uniform(0.566, 0.939, 31)]
        sizes = cache_sizes(loads, 64)
        assert sizes[0] == 8 and sorted(sizes[1:]) == [1] * 6 + [2] * 25
    with pytest.raises(CapacityError, match="expected at least a slot a layer, 32 in all, got 31"):
        cache_sizes(loads, 31)
    assert gating_threshold(0.005) == 1


# ------------------------------------------------------------------------------------------------------------ timelines
def test_one_prefetch_goes_behind_the_demand_loads_and_no_victim_goes_back() -> None:
    # Of 4 slots the first layer gets 3: 1, 2 and 3; the second gets 1: expert 3. The guess for it is 1, its first by rank.
    records = run()
    assert records.pool_peak_bytes["gpu0", "cache"] == 4000
    assert transfers(records) == [
        (100, 1100, "cpu0->gpu0", "demand 0/0"),
        (1100, 2100, "cpu0->gpu0", "demand 1/1"),  # a prefetch until layer 1 is routed at 1300
        (2100, 3100, "cpu0->gpu0", "demand 1/0"),
    ]
    assert [t.submitted for t in records.transfers] == [100, 110, 2100]
    assert [(e.layer, e.expert) for e in records.evictions] == [(0, 1), (1, 3), (1, 1)]


@pytest.mark.parametrize("decision_ns", [0, 50])
def test_a_layer_waits_for_the_prefetch_for_it_right_or_wrong(decision_ns: int) -> None:
    # Of 6 slots the first layer gets 4, the second 2 and 3, which its token is routed to. The guess 0 comes all the same.
    # gpu0       |DDDDD|P|00|11|DDDDD|        |22|33|
    # cpu0->gpu0       |     1/0              |
    #            0    100 110  310   410     1110      1310
    records = run([[[[0, 1], [2, 3]]]], slots=6, source="first", decision_ns=decision_ns)
    (copy,) = records.transfers
    assert (copy.cause, copy.layer, copy.expert) == ("prefetch", 1, 0)
    assert [t[0] for t in tasks(records) if t[3] in ("E2x1", "E3x1")] == [copy.end, copy.end + 100]
    assert [(e.layer, e.expert, e.pool, e.used) for e in records.evictions] == [(1, 0, "ahead", False)]
    if not decision_ns:
        assert copy.end == 1110 and records.steps[0].end == 1310
    # A right one is awaited by what is there, too: 0 is a hit of layer 1, and 1 comes.
    records = run([[[[0, 1], [3, 1]]]], slots=6, decision_ns=decision_ns)
    (copy,) = records.transfers
    assert (copy.cause, copy.layer, copy.expert) == ("demand", 1, 1)
    assert [t[0] for t in tasks(records) if t[3] in ("E3x1", "E1x1")][-2:] == [copy.end, copy.end + 100]


def test_the_second_expert_is_left_out_below_the_threshold() -> None:
    # The weights are 0.75 and 0.25: below sqrt(0.005 / 0.07), not below sqrt(0.005 / 0.08).
    fast = machine(TOY, {"cpu0->gpu0": link(100), "gpu0->cpu0": link(100)})
    records = run(hardware=fast, sensitivity=0.07)
    assert [(t.layer, t.expert) for t in records.tasks if t.kind == "expert"] == [(0, 0), (1, 1)]
    assert {(r.kind, r.slots) for r in records.inexact} == {("skipped", 1)} and len(records.inexact) == 2
    assert run(hardware=fast, sensitivity=0.08).inexact == []
    assert run([[TOKEN], [TOKEN]], hardware=fast, sensitivity=0.07).inexact == [], "two rows in a step"


def test_a_right_guess_takes_its_place_before_demand_loads() -> None:
    # Layer 1 keeps expert 3, then the guess 1, which gives way to 0: the other way round 1 would stay.
    records = run([[TOKEN, [[0, 2], [0, 1]]]])
    assert [(e.layer, e.expert) for e in records.evictions if e.layer == 1][:2] == [(1, 3), (1, 1)]
    plan = mixtral_offloading_plan([4, 5, 6, 7], [0, 1, 2, 6], 6, prefetched={2})
    assert plan.compute == (6, 2, 0, 1)
    assert plan.swaps == ((4, 2), (5, 0), (7, 1))
    assert plan.order == (6, 2, 0, 1)


def test_gating_needs_gate_weights() -> None:
    assert make_policy({"name": "adapmoe", "sensitivity": 0.05}).needs == {"signal:gate_next1", "scores-or-weights"}
    assert make_policy("adapmoe").needs == {"signal:gate_next1"}
    policy = make_policy({"name": "adapmoe", "source": "told", "sensitivity": 0.05})
    trace = Trace.build(
        experts=np.array([TOKEN], np.uint8),
        n_prompt=[0],
        n_decode=[1],
        n_experts=4,
        model="tiny",
        label="synthetic",
        prompt_offset=1,
    )
    work = compose(trace, WorkloadSpec(batch_size=1, requests="all"))
    with pytest.raises(ConfigError, match="policy adapmoe: sensitivity: expected a trace with gate weights, got one without"):
        play(policy, work, machine(TOY), predictors={"told": Oracle()}, slots={"gpu0": 4})


def test_more_than_two_experts_a_token_are_refused() -> None:
    work = workload([[[[0, 1, 2], [0, 1, 2]]]], weights=[0.5, 0.3, 0.2])
    policy = make_policy({"name": "adapmoe", "source": "told", "sensitivity": 0.05})
    with pytest.raises(ConfigError, match=r"sensitivity: expected null for tiny, which has 3 experts a token and not one or two"):
        play(policy, work, machine(TOY), model=tiny_model(top_k=3), predictors={"told": Oracle()}, slots={"gpu0": 4})
