"""A small model and machines for the tests of costs."""

from __future__ import annotations

from typing import Any

from moesim.hardware import HardwareProfile, build_profile
from moesim.hardware.costs import CostModel
from moesim.model import ModelSpec


def tiny_model(**changes: Any) -> ModelSpec:
    """A small model with one leading dense layer and a shared expert; 64 x 128 experts of 49 152 bytes."""
    fields: dict[str, Any] = {
        "name": "tiny", "n_layers": 2, "n_experts": 4, "top_k": 2, "hidden": 64, "expert_intermediate": 128,
        "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "vocab": 1000, "n_dense_layers": 1,
        "dense_intermediate": 256, "n_shared": 1, "shared_intermediate": 128,
    }  # fmt: skip
    return ModelSpec(**fields | changes)


def number(value: Any, source: str = "published") -> dict[str, Any]:
    key = {"published": "ref", "spec-sheet": "ref", "derived": "how", "assumed": "why"}[source]
    return {"value": value, "source": source, key: f"a {source} number"}


def link(latency_us: float = 10, bytes_per_s: float = 1e9, **more: Any) -> dict[str, Any]:
    curve = {"latency_us": number(latency_us), "bytes_per_s": number(bytes_per_s)}
    return {"pinned": curve} | more


def machine(gpu: dict[str, Any] | None = None, cpu: dict[str, Any] | None = None, **top: Any) -> HardwareProfile:
    """gpu0: 10 GB/s, 1 TFLOP/s, 5 us a launch; cpu0: 1 GB/s, 0.1 TFLOP/s."""
    gpu0 = {
        "kind": "gpu", "memory_bytes": number("1 GiB"), "memory_bytes_per_s": number(10e9),
        "flops": number(1e12, "spec-sheet"), "launch_us": number(5),
    }  # fmt: skip
    cpu0 = {"kind": "cpu", "memory_bytes": number("8 GiB"), "memory_bytes_per_s": number(1e9), "flops": number(1e11)}
    raw: dict[str, Any] = {
        "name": "machine", "description": "for tests", "compute": "gpu0", "backing": ["cpu0"],
        "devices": {"gpu0": gpu0 | (gpu or {}), "cpu0": cpu0 | (cpu or {})},
        "links": {"cpu0->gpu0": link(), "gpu0->cpu0": link(20)},
    }  # fmt: skip
    return build_profile(raw | top, "hardware_profiles/x.yaml")


def curve(form: str, first: int = 1, last: int = 64, **numbers: Any) -> dict[str, Any]:
    shape = {"hidden": 64, "intermediate": 128, "bits": 16}
    written = {key: number(value) for key, value in numbers.items()}
    return {"experts": [{"shape": shape, "form": form, "range": [first, last]} | written]}


def costs(profile: HardwareProfile, model: ModelSpec | None = None, **options: Any) -> CostModel:
    return CostModel(model or tiny_model(), profile, **options)
