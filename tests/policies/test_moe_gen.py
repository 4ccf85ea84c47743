"""MoE-Gen: the cycle of experts through its buffers, to the nanosecond."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from moesim.policies.registry import make_policy
from moesim.policies.systems.moe_gen import MoEGen
from moesim.policy import Placement, View
from moesim.records import Records
from tests.engine.engine_kit import cpu, gpu, link, machine, play, tiny_model, workload


class ExpertsOnly(MoEGen):
    """With attention's weights and the KV cache on the GPU, so that nothing but experts is on the link."""

    def place(self, view: View) -> Placement:
        return replace(super().place(view), streamed={})


def run(
    requests: Any, *, n_layers: int = 1, n_experts: int = 4, policy: Any = None, x: int = 1000, g: int = 100, attention: int = 60,
    **more: Any,
) -> Records:  # fmt: skip
    """Run on a machine on which copying an expert takes x, computing it g, and attention 40 more than told."""
    toy = machine(
        {"gpu0": gpu(expert_ns=g, attention_ns=attention), "cpu0": cpu()},
        {"cpu0->gpu0": link(latency_ns=x - 1000), "gpu0->cpu0": link()},
    )
    model = tiny_model(n_layers=n_layers, n_experts=n_experts)
    work = workload(requests, n_experts=n_experts, **more)
    return play(policy or make_policy("moe-gen"), work, toy, model=model)


# ----------------------------------------------------------------------------------------------------------- a layer's time
@pytest.mark.parametrize(("g", "attention", "layer_us"), [(3, 60, 112), (6, 120, 168)])
def test_a_layer_takes_the_longer_of_link_and_computing(g: int, attention: int, layer_us: int) -> None:
    """N = 8, x = 14: the link's 112 against 84; with twice the batch the GPU's 168: 1.33 times the rows a second."""
    rows = [[[2 * i, 2 * i + 1]] * 12 for i in range(4)]  # all experts are routed to
    records = run(
        [rows], n_layers=12, n_experts=8, policy=ExpertsOnly(), x=14_000, g=1000 * g, attention=1000 * attention - 40, prompt=4
    )
    ends = [visit.end for visit in records.layers]
    assert {b - a for a, b in pairwise(ends[3:])} == {1000 * layer_us}
    assert max(8 * 14, 8 * g + attention) == layer_us


# ------------------------------------------------------------------------------------------------------------- restatement


# --------------------------------------------------------------------------------------------------------------- timelines
def test_an_expert_runs_once_for_all_micro_batches() -> None:
    records = run([[[[0, 1]]], [[[0, 3]]]], policy=ExpertsOnly(), micro_batches=2)
    assert [(t.expert, t.rows) for t in records.tasks if t.expert >= 0] == [(0, 2), (1, 1), (3, 1)]
    assert next(t.start for t in records.tasks if t.expert == 3) == 4000, (
        "expert 3 is there after the two that nobody else asked for"
    )


def test_attention_and_its_cache_are_streamed_too() -> None:
    records = run([[[[0, 1]] * 2] * 3], n_layers=2)
    others = [t for t in records.transfers if t.expert < 0 and t.cause != "write-back"]
    steps = [[t.n_bytes for t in others if step.begin <= t.start < step.end] for step in records.steps]
    assert all(sizes.count(80) == 2 for sizes in steps), "the weights of each layer in each pass"
    caches = [sum(sizes) - 160 for sizes in steps]
    assert caches[1] - caches[0] == caches[2] - caches[1] == 2 * 8, "of each layer eight bytes more a token"
    assert sum(t.cause == "write-back" for t in records.transfers) == 6


def test_the_cpu_may_read_the_cache() -> None:
    policy = make_policy({"name": "moe-gen", "attention": "cpu"})
    records = run([[[[0, 1]]] * 2], policy=policy)
    assert [t.device for t in records.tasks if t.kind == "attention"] == ["gpu0", "cpu0"] * 2, "projections, then the cache"
    assert {t.n_bytes for t in records.transfers if t.expert < 0} == {80}
