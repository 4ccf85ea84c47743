"""Models whose layers differ: windows, states, dense layers in between, dense parts next to experts; both engines agree."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from moesim.engine.native import AVAILABLE
from moesim.hardware import load_hardware
from moesim.hardware.costs import CostModel
from moesim.model.keys import read_model
from moesim.policy import KV, Placement, Run
from tests.engine.engine_kit import Script, assert_same, cpu, gpu, machine, play, workload
from tests.hardware.costs_kit import costs as costs_of
from tests.hardware.costs_kit import machine as costs_machine
from tests.hardware.costs_kit import number

N_EXPERTS, N_LAYERS = 4, 3
BASE = {
    "vocab_size": 50, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": N_EXPERTS,
    "num_experts_per_tok": 2, "moe_intermediate_size": 8, "dtype": "bfloat16", "num_hidden_layers": N_LAYERS,
}  # fmt: skip
MODELS = {
    "window": {"model_type": "new", "sliding_window": 4, "layer_types": ["sliding", "full", "sliding"]},
    "interleaved": {"model_type": "new", "num_hidden_layers": 6, "interleave_moe_layer_step": 2, "intermediate_size": 16},
    "parallel": {"model_type": "gemma4", "intermediate_size": 24},
    "state": {
        "model_type": "qwen3_next", "full_attention_interval": 3, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
        "linear_key_head_dim": 4, "linear_value_head_dim": 4, "linear_conv_kernel_dim": 4,
    },
    "blocks": {
        "model_type": "nemotron_h", "hybrid_override_pattern": "ME*EM-E", "intermediate_size": 16, "mamba_num_heads": 2,
        "mamba_head_dim": 8, "n_groups": 1, "ssm_state_size": 4, "conv_kernel": 4,
    },
}  # fmt: skip


def model_of(name: str) -> Any:
    return read_model({**BASE, **MODELS[name]}, None, name, "config.json")


@pytest.mark.parametrize("n_requests", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_both_engines_and_the_parts_by_hand(name: str, n_requests: int) -> None:
    model = model_of(name)
    assert model.n_layers == N_LAYERS and model.shape is not None
    toy = machine({"gpu0": gpu(), "cpu0": cpu()})
    requests = [[[[(row + layer) % 4, (row + layer + 1) % 4] for layer in range(N_LAYERS)] for row in range(9)]] * n_requests
    work = workload(requests, prompt=6)
    run = lambda event, view: [Run(event.layer, event.active, "cpu0")]  # noqa: E731
    found = play(Script(routed=run), work, toy, model=model, engine="simpy")
    if AVAILABLE:
        assert_same(found, play(Script(routed=run), work, toy, model=model, engine="native"))
    costs = CostModel(model, toy)
    for step in work.steps:
        for layer in range(N_LAYERS):
            (task,) = [t for t in found.tasks if (t.step, t.layer, t.kind) == (step.index, layer, "dense")]
            rows, micro = step.n_tokens, step.micro[0]
            assert task.work == costs.dense_ns("gpu0", rows, layer) + costs.attention_ns(
                "gpu0", rows, micro.work2, n_requests, layer
            )
    held = model.all_kv_bytes(9 * n_requests, n_requests)
    assert found.peak_bytes["gpu0"] == model.non_expert_bytes + held


def test_a_cache_that_is_kept_elsewhere_is_reached_by_the_rows_of_each_layer() -> None:
    """Gemma: four heads of 8 and two cached ones; where all tokens are seen four of 16 and one."""
    wide = {
        "layer_types": ["sliding", "full", "sliding"],
        "sliding_window": 4,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
    }
    model = read_model({**BASE, **MODELS["parallel"], **wide}, None, "gemma", "config.json")
    assert [model.core_widths(layer) for layer in range(3)] == [(32 + 2 * 16, 32), (64 + 2 * 16, 64), (32 + 2 * 16, 32)]
    toy = machine({"gpu0": gpu(), "cpu0": cpu()})
    placement = Placement(parts={(KV, layer): "cpu0" for layer in range(3)})
    requests = [[[[0, 1]] * N_LAYERS] * 4]
    found = []
    for engine in ["simpy", *(["native"] if AVAILABLE else [])]:
        policy = Script(routed=lambda event, view: [Run(event.layer, event.active, "cpu0")])
        policy.place = lambda view: placement  # type: ignore[method-assign]
        found.append(play(policy, workload(requests), toy, model=model, engine=engine))
    assert {x.rows for x in found[0].activations if x.layer == 1 and x.direction == "hidden"} >= {3, 2}
    for other in found[1:]:
        assert_same(found[0], other)


def test_attention_in_a_window_stops_growing() -> None:
    model = model_of("window")
    costs = CostModel(model, load_hardware("a10-xeon8358"))
    befores = (1, 2, 3, 5000, 10**8)
    times = [[costs.attention_ns("gpu0", 1, 2 * before + 1, 1, layer) for before in befores] for layer in (0, 1)]
    assert times[0][2:] == [times[0][2]] * 3
    assert all(first <= second for first, second in pairwise(times[1])) and times[1][-1] > times[1][0]


def test_a_layer_pays_for_those_before_it() -> None:
    """Interleaved: half of the layers are dense, and each layer with experts takes along the one before."""
    model, alone = model_of("interleaved"), read_model({**BASE, "model_type": "new"}, None, "alone", "config.json")
    assert [len(group) for group in model.groups] == [1, 2, 2] and len(model.leading) == 1
    toy = machine({"gpu0": gpu(), "cpu0": cpu()})
    costs, plain = CostModel(model, toy), CostModel(alone, toy)
    one = plain.attention_ns("gpu0", 1, 21, 1)
    assert costs.attention_ns("gpu0", 1, 21, 1, 0) == one
    assert costs.attention_ns("gpu0", 1, 21, 1, 1) > 2 * one


@pytest.mark.parametrize("name", MODELS)
def test_a_dense_block_is_read_once_and_computed_by_rows(name: str) -> None:
    """At 10 GB/s and 1 TFLOP/s; the blocks without what mixes rows."""
    blocks = [replace(block, mixer=None) for group in model_of(name).groups for block in group]
    slow = costs_of(costs_machine(gpu={"launch_us": number(0)}), model_of(name))
    fast = costs_of(costs_machine(gpu={"launch_us": number(0), "memory_bytes_per_s": number(1e18)}), model_of(name))
    for block in blocks:
        assert slow._block_ns("gpu0", block, 1, 0, 1) == -(-block.dense_bytes // 10)
        assert fast._block_ns("gpu0", block, 4000, 0, 1) == -(-2 * 4000 * block.dense // 1000)
    assert any(block.dense for block in blocks) == (name in ("interleaved", "parallel", "blocks"))
