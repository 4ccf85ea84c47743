"""One memory that a CPU and a GPU share: what it must hold is counted once, and so is its rate."""

from __future__ import annotations

from typing import Any

import pytest

from moesim.errors import CapacityError, HardwareError
from moesim.fits import check_capacity, required_bytes
from moesim.hardware import load_hardware
from moesim.model import load_model
from moesim.policies.systems.all_gpu import AllGpu
from moesim.policies.systems.llama_cpp import LlamaCpp
from moesim.policy import CACHE, Placement, Pool
from moesim.testing import FakeView
from tests.engine.engine_kit import Copy, Run, Script, cpu, gpu, link, machine, play, sure, tasks, workload

SHARED = ("ryzen-ai-max-395", "m4-max", "gb10")
MIXTRAL = load_model({"base": "mixtral-8x7b", "expert_bits": 4, "other_bits": 4})
ALL = MIXTRAL.experts_bytes_total


def apu(memory: int, **contention: Any) -> Any:
    pair = {"a": "cpu0.experts", "b": "gpu0.experts", "a_rate": sure(0.5), "b_rate": sure(0.5)} | contention
    devices = {"gpu0": {**gpu(memory=memory), "memory_of": "cpu0"}, "cpu0": cpu(memory=memory)}
    return machine(devices, {name: link() for name in ("cpu0->gpu0", "gpu0->cpu0")}, contention=[pair])


@pytest.mark.parametrize("name", SHARED)
def test_weights_on_the_gpu_take_the_memory_once(name: str) -> None:
    """All of a model, and half of it on the CPU, fit a memory as large as the model and what else is there."""
    profile = load_hardware(name)
    for policy in (AllGpu(), LlamaCpp(n_cpu_moe=16), LlamaCpp(n_cpu_moe=0)):
        view = FakeView(MIXTRAL, profile, slots=32 * 8)
        placement = policy.place(view)
        need = required_bytes(MIXTRAL, profile, 0, placement)
        held = sum(
            n_bytes
            for purposes in need.values()
            for purpose, n_bytes in purposes.items()
            if purpose not in ("workspace", "pool:staging")
        )
        assert held == ALL + MIXTRAL.non_expert_bytes


def test_a_cache_of_copies_takes_it_twice() -> None:
    profile = load_hardware(
        {"base": "ryzen-ai-max-395", "devices.cpu0.memory_bytes": 2 * ALL, "devices.gpu0.memory_bytes": 2 * ALL}
    )
    cache = Placement(pools=[Pool("gpu0", CACHE, ALL)])
    with pytest.raises(CapacityError, match=r"cpu0 and gpu0 of ryzen-ai-max-395 share one memory: need .*; gpu0: pool:cache"):
        check_capacity(required_bytes(MIXTRAL, profile, 0, cache), profile, cache, "lru")
    small = Placement(pools=[Pool("gpu0", CACHE, ALL // 2)])
    check_capacity(required_bytes(MIXTRAL, profile, 0, small), profile, small, "lru")


def test_cpu_and_gpu_share_the_rate() -> None:
    """Experts 0 and 1 of a layer at the same time: 100 ns on the GPU and 400 on the CPU, each at half its rate while both run."""
    script = Script({("Routed", 0, 0, 0): [Run(0, [0], "gpu0"), Run(0, [1], "cpu0")]}, copies=[Copy(0, [0], "gpu0")],
                    pools=[Pool("gpu0", "cache", 4000)], routed=lambda e, v: [Run(e.layer, e.active, "cpu0")])  # fmt: skip
    ran = [one for one in tasks(play(script, workload([[[[0, 1], [0, 1]]]], prompt=1), apu(1_000_000))) if "E" in one[3]]
    assert ran[:2] == [(100, 280, "gpu0", "E0x1"), (120, 600, "cpu0", "E1x1")], "80 ns of each go at half speed"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"memory_of": "gpu0"}, "expected a host next to an accelerator, got 'gpu0'"),
        ({"memory_of": "cpu1"}, "unknown device 'cpu1'"),
        ({"memory_bytes": 2**50}, "expected memory_bytes of at most 128000000000, those of cpu0"),
    ],
)
def test_what_is_no_shared_memory_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(HardwareError, match=f"devices.gpu0.memory_of: {says}"):
        load_hardware({"base": "ryzen-ai-max-395", **{f"devices.gpu0.{key}": value for key, value in changes.items()}})


def test_a_shared_rate_must_be_stated() -> None:
    with pytest.raises(
        HardwareError, match=r"expected contention of cpu0.experts with gpu0.experts, got none; add rates, 0.50 each"
    ):
        apu(1_000_000, a="gpu0.side")
