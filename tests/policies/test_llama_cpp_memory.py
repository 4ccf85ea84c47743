"""What llama.cpp needs of a GPU to compute: its runtime's context and compute buffers (-ub)."""

from __future__ import annotations

from typing import Any

import pytest

from moesim.errors import CapacityError
from moesim.fits import check_capacity, required_bytes
from moesim.hardware import load_hardware
from moesim.model import load_model
from moesim.policies.systems.llama_cpp import LlamaCpp, LlamaCppFit, compute_bytes
from moesim.testing import FakeView

MIB = 2**20
QWEN = load_model({"base": "qwen3-30b-a3b", "expert_bits": 4.85, "other_bits": 5.35})


def view(rows: int, machine: Any = "rtx3090-epyc7532", engine: str | None = "llama.cpp") -> FakeView:
    return FakeView(QWEN, load_hardware(machine, engine=engine), slots=48 * 128, max_tokens=rows)


@pytest.mark.parametrize(("rows", "mib"), [(1, 301), (512, 301), (1024, 602), (2048, 1203)])
def test_buffers_grow_with_the_micro_batch_as_measured(rows: int, mib: int) -> None:
    """Measured: 301, 602 and 1203 MiB; short prompts take the buffer of 512 rows."""
    for policy in (LlamaCpp(n_cpu_moe=40), LlamaCppFit()):
        assert round(policy.place(view(rows)).workspace["gpu0"] / MIB) == 330 + mib


def test_hip_takes_more() -> None:
    cuda, hip = (LlamaCpp(n_cpu_moe=40).place(view(512, name, None)) for name in ("rtx5070-ryzen9600x", "rx9070xt-8core"))
    assert hip.workspace["gpu0"] - cuda.workspace["gpu0"] == 70 * MIB


def test_the_output_s_words_are_on_one_gpu() -> None:
    two = LlamaCpp(n_cpu_moe=0).place(view(2048, "rtx3090x2-epyc7532")).workspace
    small = compute_bytes(QWEN, 2048, output=False)
    assert two["gpu1"] - two["gpu0"] == compute_bytes(QWEN, 2048) - small > 0
    none = LlamaCpp(n_gpu_layers=0).place(view(2048)).workspace
    assert none["gpu0"] == 330 * MIB + small


def test_numbers_of_a_paper_have_none() -> None:
    assert LlamaCpp(n_cpu_moe=40).place(view(512, engine=None)).workspace == {}


@pytest.mark.parametrize(("profile", "rows", "counted"), [(1024, 512, False), (1024, 2048, True), (0, 512, True)])
def test_the_profile_s_number_counts_if_it_is_more(profile: int, rows: int, counted: bool) -> None:
    machine = {"base": "rtx3090-epyc7532", "devices.gpu0.workspace_bytes": profile * MIB}
    one = view(rows, machine)
    placement = LlamaCpp(n_cpu_moe=40).place(one)
    need = required_bytes(QWEN, one.costs.hardware, 1024, placement)["gpu0"]
    assert need["workspace"] == (placement.workspace["gpu0"] if counted else profile * MIB)


@pytest.mark.parametrize(
    ("system", "says"), [("linux", "loading would fail; "), ("windows", "Windows would page to host memory, several times")]
)  # fmt: skip
def test_a_placement_that_does_not_fit_is_reported_with_its_sum(system: str, says: str) -> None:
    machine = {"base": "rtx3090-epyc7532", "machine.system": system, "devices.gpu0.memory_bytes": "12 GiB"}
    one = view(2048, machine)
    placement = LlamaCpp(n_cpu_moe=16).place(one)
    need = required_bytes(QWEN, one.costs.hardware, 32768, placement)
    with pytest.raises(CapacityError) as caught:
        check_capacity(need, one.costs.hardware, placement, "llama-cpp")
    assert says in str(caught.value)
    assert "pool:cache 10.91 GiB, kv 3 GiB, workspace 1.497 GiB" in str(caught.value)
