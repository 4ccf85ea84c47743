"""llama.cpp's op-offload of what is no expert: copied for one use where many rows read it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from moesim.policies.systems.llama_cpp import LlamaCpp
from moesim.policy import LAYER_PARTS, Fetch, Run
from moesim.testing import FakeView, routed
from tests.engine.engine_kit import play, tiny_model, workload


@pytest.mark.parametrize(
    ("options", "rows"),
    [({}, 32), ({"op_offload_min_rows": 7}, 7), ({"op_offload": False}, None), ({"op_offload_rule": "rows-per-expert"}, 32)],
)
def test_it_copies_dense_weights_of_cpu_layers_for_large_batches(options: Any, rows: int | None) -> None:
    """Unlike experts, the others are copied by rows of the batch in ik_llama.cpp, too: each sees all of them."""
    placement = LlamaCpp(n_gpu_layers=3, **options).place(FakeView(slots=16))
    expected = {(part, layer): "gpu0" for part in LAYER_PARTS for layer in (0, 1)}
    assert placement.offloaded == (expected if rows else {})
    assert rows is None or placement.offload_from == rows


def test_the_rows_go_by_the_bytes_of_what_is_multiplied() -> None:
    """64 rows for each byte of a weight: experts of 4 bits, others of 16."""
    policy = LlamaCpp(n_gpu_layers=3, op_offload_rule="rows-per-expert", op_offload_per_byte=64.0)
    view = FakeView(tiny_model(n_layers=4, n_experts=8, expert_bits=4, other_bits=16), slots=16)
    assert policy.place(view).offload_from == 128
    first = [type(next(iter(policy.decide(routed([[0, 1]] * n), view)))) for n in (127, 128)]
    assert first == [Run, Fetch], "32 x 8 / 2 rows are copied"


def test_it_runs_large_batches_of_cpu_layers_on_the_gpu() -> None:
    """A prompt of 4 rows and a step of 1: with all layers on the CPU, and copies from 4 rows on."""
    work = workload([[[[0, 1], [2, 3]]] * 5], prompt=4)
    records = play(LlamaCpp(n_gpu_layers=0, op_offload_min_rows=4), work, slots={})
    done = {(t.step, t.device) for t in records.tasks if t.layer >= 0}
    assert done == {(0, "gpu0"), (1, "cpu0")}
    model = tiny_model()
    copied = sum(t.n_bytes for t in records.transfers if t.link == "cpu0->gpu0")
    dense = sum(model.attention_bytes + model.dense_bytes(layer) for layer in (0, 1))
    assert copied == dense + sum(2 * model.expert_bytes(layer) for layer in (0, 1))
    assert [t.n_bytes for t in records.transfers if t.cause == "write-back"] == [4 * model.kv_bytes(0, 1)] * 2


def ahead(rows: int, **options: Any) -> Any:
    """Run a prompt that routes to experts 0 and 3 of the first layer, 0 and 2 of the second, all on the CPU."""
    work = workload([[[[0, 3], [0, 2]]] * (rows + 1)], prompt=rows)
    return play(LlamaCpp(n_cpu_moe=2, op_offload_min_rows=2, **options), work, slots={})


@pytest.mark.parametrize("slots", [2, 3, 4])
def test_a_prompts_experts_are_copied_ahead_of_their_layer(slots: int) -> None:
    """Of two tensors an expert, into room for 4 to 8 experts; the copies take 1000 ns each, one after the other."""
    records = ahead(4, prefetch_experts_slots=slots)
    copies = [t for t in records.transfers if t.expert >= 0]
    assert [(t.layer, t.expert) for t in copies] == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3)]
    assert copies[0].start == 0 and all(a.end == b.start for a, b in pairwise(copies))
    assert copies[4].start < next(t for t in records.layers if t.layer == 1).begin
    assert {t.device for t in records.tasks if t.expert >= 0 and t.step == 0} == {"gpu0"}


def test_prompts_with_less_than_two_uses_of_an_expert_are_copied_in_time() -> None:
    """3 rows x 2 are less than 2 x 4 experts: only those routed are copied, once the router has chosen, as without buffers."""
    with_buffers, without = ahead(3, prefetch_experts_slots=3), ahead(3)
    assert [(t.start, t.layer, t.expert) for t in with_buffers.transfers] == [
        (t.start, t.layer, t.expert) for t in without.transfers
    ]
    assert len([t for t in without.transfers if t.expert >= 0]) == 4
