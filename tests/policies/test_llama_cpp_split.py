"""llama.cpp on several GPUs: layers divided among them (--split-mode layer, --tensor-split)."""

from __future__ import annotations

from typing import Any

import pytest

from moesim import compare
from moesim.errors import CapacityError, ConfigError
from moesim.policies.registry import make_policy
from moesim.policies.systems.llama_cpp import LlamaCpp, LlamaCppFit
from moesim.policy import Placement
from moesim.testing import FakeView, tiny_machine
from tests.engine.engine_kit import cpu, crossings, gpu, link, machine, play, tasks, tiny_model, workload

NAMES = ("cpu0->gpu0", "gpu0->cpu0", "cpu0->gpu1", "gpu1->cpu0")
THROUGH_HOST = machine({"gpu0": gpu(), "gpu1": gpu(), "cpu0": cpu()}, {name: link() for name in NAMES})
PEERS = machine(
    {"gpu0": gpu(), "gpu1": gpu(), "cpu0": cpu()}, {name: link() for name in (*NAMES, "gpu0->gpu1", "gpu1->gpu0")}
)  # fmt: skip
DECODE = workload([[[[0, 1], [0, 1]]] * 2], prompt=1)  # one prompt token, one more; both layers use experts 0 and 1


def view(n_layers: int, slots: int, n_gpus: int = 2) -> FakeView:
    return FakeView(tiny_model(n_layers=n_layers), tiny_machine(n_gpus), slots=4 * slots)


def experts_at(placement: Placement) -> dict[int, str]:
    return {copy.layer: copy.device for copy in placement.copies}


def attention_at(placement: Placement, n_layers: int) -> list[str]:
    return [placement.parts.get(("attention", layer), "gpu0") for layer in range(n_layers)]


@pytest.mark.parametrize(
    ("options", "attention", "experts"),
    [
        # 8 layers and the output are nine parts, of which the first GPU has those that begin in its half: five
        ({"n_cpu_moe": 0}, "00000111", "00000111"),
        ({"n_cpu_moe": 6}, "00000111", "      11"),
        ({"n_cpu_moe": 2, "tensor_split": [3.0, 1.0]}, "00000001", "  000001"),
        ({"n_cpu_moe": 0, "tensor_split": [0.0, 1.0]}, "11111111", "11111111"),
        ({"n_cpu_moe": 0, "tensor_split": [1.0]}, "00000000", "00000000"),
        ({"n_gpu_layers": 5}, "cccc0001", "    0001"),  # of the last four layers and the output
        ({"split_mode": "none"}, "00000000", "00000000"),
        ({}, "00001111", "00001111"),  # by bytes
    ],
)
def test_layers_go_to_gpus_by_their_shares(options: dict[str, Any], attention: str, experts: str) -> None:
    placement = LlamaCpp(**options).place(view(8, slots=8))
    assert "".join("c" if name == "cpu0" else name[-1] for name in attention_at(placement, 8)) == attention
    found = experts_at(placement)
    assert "".join(found.get(layer, " ")[-1] for layer in range(8)) == experts
    assert {copy.device for copy in placement.copies} <= {pool.device for pool in placement.pools}


def test_the_output_is_on_the_gpu_of_the_last_part() -> None:
    placements = [LlamaCpp(**options).place(view(4, 4)) for options in ({"n_cpu_moe": 0}, {"split_mode": "none"})]
    assert [one.parts.get(("head", -1)) for one in placements] == ["gpu1", None]


def test_without_numbers_each_gpu_is_filled() -> None:
    """12 layers, room for the experts of 3 on each GPU: the last 6, three on each."""
    placement = LlamaCpp().place(view(12, slots=3))
    assert experts_at(placement) == {6: "gpu0", 7: "gpu0", 8: "gpu0", 9: "gpu1", 10: "gpu1", 11: "gpu1"}


def test_the_fullest_gpu_must_have_room() -> None:
    with pytest.raises(CapacityError, match=r"policy llama-cpp on gpu1: expected experts of at most 1 layers.* got 2"):
        LlamaCpp(n_cpu_moe=6).place(view(8, slots=1))


@pytest.mark.parametrize("split", [[1.0, 1.0, 1.0], [-1.0, 1.0], [0.0, 0.0], [float("inf"), 1.0], [1e308, 1e308]])
def test_a_split_that_no_machine_has_is_refused(split: list[float]) -> None:
    with pytest.raises(ConfigError, match=r"tensor_split: expected at most 2 numbers .* 2 GPUs \(gpu0, gpu1\), got \["):
        LlamaCpp(n_cpu_moe=0, tensor_split=split).place(view(8, 8))


def test_tensor_parallel_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="split_mode: expected 'layer' or 'none', got 'row'"):
        make_policy({"name": "llama-cpp", "split_mode": "row"})
    assert any("tensor parallel" in one for one in LlamaCpp.missing)


def test_the_automatic_placement_uses_one_gpu() -> None:
    assert LlamaCppFit().place(view(8, 8)) == LlamaCppFit().place(view(8, 8, n_gpus=1))
    assert "several GPUs" in LlamaCppFit.missing


@pytest.mark.parametrize(("toy", "hops"), [(PEERS, 1), (THROUGH_HOST, 2)])
def test_a_token_takes_as_long_as_on_one_gpu_and_the_copies_of_its_hidden_state(toy: Any, hops: int) -> None:
    """Layer 0 on one GPU, layer 1 and the output on the other: capacity, not speed."""
    split = play(LlamaCpp(n_cpu_moe=0, tensor_split=[1.0, 2.0]), DECODE, toy, slots={"gpu0": 8, "gpu1": 8})
    alone = play(LlamaCpp(split_mode="none"), DECODE, toy, slots={"gpu0": 8, "gpu1": 8})
    ends = [[int(end) for end in records.steps.column("end")] for records in (alone, split)]
    assert ends[1] == [end + 20 * hops * (i + 1) for i, end in enumerate(ends[0])], "10 + 10 a row for each hop and step"
    assert {one[2] for one in tasks(split)} == {"gpu0", "gpu1"} and {one[2] for one in tasks(alone)} == {"gpu0"}
    assert len(crossings(split)) - len(crossings(alone)) == 2 * hops


def test_large_batches_of_cpu_experts_are_computed_on_the_first_gpu() -> None:
    rows = workload([[[[0, 1], [0, 1]]] * 5], prompt=4)
    records = play(LlamaCpp(n_cpu_moe=2, op_offload_min_rows=4), rows, THROUGH_HOST, slots={"gpu0": 8, "gpu1": 8})
    experts = {(one.layer, one.device) for one in records.tasks if one.expert >= 0 and not one.step}
    assert experts == {(0, "gpu0"), (1, "gpu0")}
    assert {one.link for one in records.transfers} == {"cpu0->gpu0"}


def test_llama_cpp_copies_from_the_mapped_file_and_pinned_without():
    setting: dict[str, Any] = {"cache": 0.25, "prompt": 64, "decode": 1, "trace": "mini-mixtral", "jobs": 1, "progress": False}

    def seconds(policy: Any, **given: Any) -> float:
        found = compare([policy], hardware="a10-xeon8358", **setting, **given).table
        return float(found["time_exposed_demand_ns"][0])

    mapped, pinned = seconds("llama-cpp"), seconds({"name": "llama-cpp", "mmap": False})
    assert pinned == seconds("llama-cpp", transfer="pinned") < mapped == seconds("llama-cpp", transfer="pageable")
    assert 0.61 * mapped < pinned * 1.01
