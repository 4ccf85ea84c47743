"""llama.cpp's op-offload of what is no expert: copied for one use where many rows read it."""

from __future__ import annotations

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
