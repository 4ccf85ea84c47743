"""Policies on a fake view with literal events (no engine), and the common checks over the whole registry."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moesim.errors import CapacityError
from moesim.model.keys import read_model
from moesim.policies.registry import make_policy, policy_info
from moesim.policies.systems.all_cpu import AllCpu
from moesim.policies.systems.all_gpu import AllGpu
from moesim.policies.systems.fiddler import Fiddler
from moesim.policies.systems.llama_cpp import LlamaCpp
from moesim.policies.systems.mixtral_offloading import MixtralOffloading
from moesim.policies.systems.on_demand import OnDemand
from moesim.policy import Drop, Fetch, Fetched, LayerEnd, Move, Placement, Run
from moesim.testing import (
    GPU_NS,
    TRANSFER_NS,
    FakeView,
    routed,
    run_tiny,
    tiny_model,
    tiny_workload,
)

EXPERT = tiny_model().expert_bytes(0)


def place(policy: Any, view: FakeView) -> Placement:
    """Start a policy on a fake view."""
    placement: Placement = policy.place(view)
    view.use(placement)
    return placement


def frequency(*top: tuple[int, int]) -> dict[str, Any]:
    """A calibration table in which these (layer, expert) pairs are the most frequent, in this order."""
    table = np.full((4, 8), 0.01)
    for rank, pair in enumerate(top):
        table[pair] = 1 - rank / 100
    return {"activation_frequency": table}


# ------------------------------------------------------------------------------------------------- the whole registry
@pytest.mark.parametrize("name", [info.name for info in policy_info() if info.target.startswith("moesim.")])
def test_experts_of_any_layer_fit_the_pools(name: str) -> None:
    """Those of the second layer are the largest: what a pool holds is counted in these."""
    policy = make_policy(name)
    sizes = (EXPERT // 2, EXPERT, EXPERT // 4, EXPERT // 2)
    low_bits = getattr(type(policy), "low_bits", ())
    slots = 28 if name == "llama-cpp-ssd" else 16
    records = run_tiny(policy, tiny_workload(policy, 2), slots, expert_bytes_by_layer=sizes, low_bits=low_bits)
    assert {layer.layer for layer in records.layers} == set(range(4))


# --------------------------------------------------------------------------------------------------------- on-demand
def test_on_demand_fetches_runs_and_drops() -> None:
    view, policy = FakeView(), OnDemand()
    assert [(p.name, p.n_bytes) for p in place(policy, view).pools] == [("staging", 2 * EXPERT)]
    assert list(policy.decide(routed([[1, 3], [3, 0]]), view)) == [
        Fetch(0, [0, 1, 3], "gpu0", 0, "staging"),
        Run(0, [0, 1, 3], "gpu0"),
    ]
    view.put(0, [0, 1], "gpu0", "staging")
    view.hold(0, [0], "gpu0")
    assert policy.evict(Fetch(0, [3], "gpu0", 0, "staging"), view) == (0, 1)
    view.hold(0, [1], "gpu0")
    assert policy.evict(Fetch(0, [3], "gpu0", 0, "staging"), view) is None
    assert list(policy.decide(LayerEnd(0, 0), view)) == [Drop(0, [0, 1], "gpu0")]


# -------------------------------------------------------------------------------------------------- all-gpu, all-cpu
def test_all_gpu_places_everything_and_only_runs() -> None:
    view, policy = FakeView(slots=0), AllGpu(assume_fits=True)
    placement = place(policy, view)
    assert not placement.enforce_capacity
    assert placement.pools[0].n_bytes == 4 * 8 * EXPERT
    assert list(policy.decide(routed([[1, 3]]), view)) == [Run(0, [1, 3], "gpu0")]


def test_all_cpu_places_nothing_and_only_runs() -> None:
    view, policy = FakeView(), AllCpu()
    assert place(policy, view) == Placement()
    assert list(policy.decide(routed([[1, 3]]), view)) == [Run(0, [1, 3], "cpu0")]


# ------------------------------------------------------------------------------------------------ mixtral-offloading
def swap(victim: int, newcomer: int, layer: int = 0) -> list[Any]:
    """What one swap of Mixtral-Offloading looks like."""
    return [
        Move(layer, (victim,), "gpu0", "buffer"),
        Fetch(layer, (victim,), "cpu0", 2, source="gpu0"),
        Drop(layer, (victim,), "gpu0"),
        Fetch(layer, (newcomer,), "gpu0", 0, "cache"),
        Run(layer, (newcomer,), "gpu0"),
    ]


def test_mixtral_offloading_swaps_each_miss_with_the_least_recently_used() -> None:
    view, policy = FakeView(slots=16), MixtralOffloading()
    placement = place(policy, view)
    assert [tuple(copy.experts) for copy in placement.copies] == [(4, 5, 6, 7)] * 4
    actions = list(policy.decide(routed([[4, 5], [6, 7], [0, 1]]), view))
    assert actions == [Run(0, [4, 5, 6, 7], "gpu0"), *swap(4, 0), *swap(5, 1)]


@pytest.mark.parametrize("buffer_size", [2, 4])
def test_mixtral_offloading_reloads_within_a_layer(buffer_size: int) -> None:
    """Small cache, many micro-batches: an expert is loaded, evicted and planned again before its layer ends."""
    policy = MixtralOffloading(buffer_size=buffer_size)
    shape = {"n_experts": 24, "top_k": 4}
    records = run_tiny(policy, tiny_workload(policy, 6, 6, n_requests=6, **shape), slots=8, decision_ns=300, **shape)
    assert len(records.steps) > 8


def test_mixtral_offloading_without_room_is_refused() -> None:
    with pytest.raises(CapacityError, match=r"at least 1 cache slots a layer, got 0 .*set cache.ratio to at least 1/8"):
        MixtralOffloading().place(FakeView(slots=3))


# ----------------------------------------------------------------------------------------------------------- fiddler
def test_fiddler_places_the_globally_most_frequent() -> None:
    view = FakeView(slots=3, tables=frequency((2, 5), (2, 1), (0, 7)))
    placement = place(Fiddler(), view)
    assert [(c.layer, list(c.experts)) for c in placement.copies] == [(0, [7]), (2, [1, 5])]
    assert [(p.name, p.n_bytes) for p in placement.pools] == [("cache", 3 * EXPERT), ("placeholder", EXPERT)]


def test_fiddler_streams_an_expert_only_if_the_cpu_would_take_as_long() -> None:
    """Transfer plus GPU is 5 us, a row on the CPU 1 us: 4 rows stay, 5 rows tie and go to the GPU."""
    assert TRANSFER_NS + GPU_NS == 5000
    view, policy = FakeView(slots=1, tables=frequency((0, 7))), Fiddler()
    place(policy, view)
    rows = [[1, 7]] * 4 + [[2, 7]] * 5
    assert list(policy.decide(routed(rows), view)) == [
        Fetch(0, [2], "gpu0", 0, "placeholder"),
        Run(0, [7, 2], "gpu0"),
        Run(0, (1,), "cpu0"),
    ]


def test_fiddler_code_uses_its_own_constants() -> None:
    view, policy = FakeView(slots=1, tables=frequency((0, 7))), Fiddler(rule="code")
    place(policy, view)
    assert policy.plan(0, [0, 9, 10, 0, 0, 0, 0, 1]).gpu == (2, 7)


def test_fiddler_serial_holds_the_cpu_until_the_last_copy_has_arrived() -> None:
    view, policy = FakeView(slots=1, tables=frequency((0, 7))), Fiddler(serial=True)
    place(policy, view)
    rows = [[1, 7]] * 4 + [[2, 3]] * 5
    actions = list(policy.decide(routed(rows), view))
    assert actions == [Fetch(0, [2, 3], "gpu0", 0, "placeholder"), Run(0, [7, 2, 3], "gpu0")]
    assert list(policy.decide(Fetched(0, 2, "gpu0"), view)) == []
    assert list(policy.decide(Fetched(0, 3, "gpu0"), view)) == [Run(0, [1], "cpu0")]


def test_fiddler_copies_from_pageable_memory_if_asked_to() -> None:
    model = tiny_model()
    assert Fiddler().transfer(model) is None
    assert Fiddler(pageable=True).transfer(model) == ("pageable", None, 0)


# --------------------------------------------------------------------------------------------------------- llama.cpp


def test_llama_cpp_fits_the_experts_of_whole_layers_by_default() -> None:
    view = FakeView(slots=23)
    placement = place(LlamaCpp(), view)
    assert [copy.layer for copy in placement.copies] == [2, 3]
    assert placement.parts == {("embedding", -1): "cpu0"}


def test_llama_cpp_counts_gpu_layers_from_the_end_with_the_output_as_one() -> None:
    placement = place(LlamaCpp(n_gpu_layers=3), FakeView(slots=16))
    assert [copy.layer for copy in placement.copies] == [2, 3]
    on_cpu = {layer for (part, layer), device in placement.parts.items() if part == "attention"}
    assert on_cpu == {0, 1}
    assert ("head", -1) not in placement.parts
    everything = place(LlamaCpp(n_gpu_layers=0), FakeView())
    assert everything.parts["head", -1] == "cpu0"
    assert ("head", -1) not in everything.offloaded and ("attention", 3) in everything.offloaded


def test_llama_cpp_keeps_attention_on_the_gpu_with_cpu_experts() -> None:
    placement = place(LlamaCpp(n_cpu_moe=3), FakeView(slots=16))
    assert [copy.layer for copy in placement.copies] == [3]
    assert ("attention", 0) not in placement.parts


def test_llama_cpp_counts_leading_layers() -> None:
    model = tiny_model(n_dense_layers=1, dense_intermediate=512)
    placement = place(LlamaCpp(n_cpu_moe=3), FakeView(model, slots=16))
    assert [copy.layer for copy in placement.copies] == [2, 3]
    placement = place(LlamaCpp(n_gpu_layers=5), FakeView(model, slots=32))
    assert len(placement.copies) == 4
    assert placement.parts["leading", -1] == "cpu0"
    assert ("leading", -1) not in place(LlamaCpp(n_gpu_layers=6), FakeView(model, slots=32)).parts


@pytest.mark.parametrize(("n", "on_gpu"), [(0, [0, 1, 2]), (1, [0, 1, 2]), (2, [1, 2]), (3, [1, 2]), (4, [2]), (5, [2]), (6, [])])
def test_llama_cpp_counts_dense_layers_between_those_with_experts(n: int, on_gpu: list[int]) -> None:
    """Its pattern has the number of a block among all, and layers 1, 3 and 5 of these six have experts."""
    placement = place(LlamaCpp(n_cpu_moe=n), FakeView(INTERLEAVED, slots=24))
    assert [copy.layer for copy in placement.copies] == on_gpu


def test_llama_cpp_counts_gpu_layers_among_all_layers() -> None:
    for n, dense in ((7, []), (6, []), (5, [0]), (4, [0]), (3, [0, 1]), (2, [0, 1]), (1, [0, 1, 2])):
        parts = place(LlamaCpp(n_gpu_layers=n), FakeView(INTERLEAVED, slots=24)).parts
        assert [layer for part, layer in parts if part == "attention"] == dense
        assert (("leading", -1) in parts) == (n < 7)


INTERLEAVED = read_model(
    {
        "vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 96,
        "interleave_moe_layer_step": 2, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    },
    None, "interleaved", "config.json",
)  # fmt: skip


def test_llama_cpp_streams_large_batches_only() -> None:
    view, policy = FakeView(slots=24), LlamaCpp()
    place(policy, view)
    assert list(policy.decide(routed([[0, 1]] * 31), view)) == [Run(0, [0, 1], "cpu0")]
    assert list(policy.decide(routed([[0, 1]] * 32), view)) == [Fetch(0, [0, 1], "gpu0", 0, "staging")]
    assert list(policy.decide(Fetched(0, 0, "gpu0"), view)) == []  # a split is computed when all its inputs are there
    assert list(policy.decide(Fetched(0, 1, "gpu0"), view)) == [Run(0, [0, 1], "gpu0")]
    assert list(policy.decide(routed([[0, 1]] * 32, layer=1), view)) == [Run(1, [0, 1], "gpu0")]


def test_llama_cpp_beyond_the_cache_slots_is_refused() -> None:
    with pytest.raises(CapacityError, match=r"at most 2 layers.*got 3; raise cache.ratio to 3/4"):
        LlamaCpp(n_cpu_moe=1).place(FakeView(slots=16))
