"""Systems that a release of an engine ships, and that fill the GPU's memory themselves: placed by size, or with a cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True)
class Shipped:
    """One of them."""

    family: str  # in results
    policy: Mapping[str, Any]  # as in an experiment
    what: str  # where experts are, in words
    margin_bytes: int = 0  # of the GPU's memory, that it leaves free unless told otherwise
    frees: bool = False  # what is on the GPU takes no host memory


SHIPPED: Final = (
    Shipped(
        "llama-cpp-fit",
        {"name": "llama-cpp-fit"},
        "experts of the first layers on the GPU, as many as llama.cpp finds to fit, the others on the CPU",
        margin_bytes=2**30,  # --fit-target is 1024 MiB unless set (ggml-org/llama.cpp, common/fit.cpp at 08033df02c)
        frees=True,
    ),
    Shipped(
        "llama-cpp-cache",
        {"name": "llama-cpp-cache"},
        "experts of all layers in host memory, those used last in a cache on the GPU, which computes them",
    ),
    Shipped(
        "llama-cpp-class-lru",
        {"name": "llama-cpp-cache", "eviction": "class-lru"},
        "experts of all layers in host memory, those used last or often in a cache on the GPU, which computes them",
    ),
    Shipped(
        "freetoken-offload",
        {"name": "freetoken", "backend": "offload"},
        "experts of all layers in host memory, those used last in a cache on the GPU, which computes all",
    ),
    Shipped(
        "freetoken-hybrid",
        {"name": "freetoken", "backend": "hybrid"},
        "experts of all layers in host memory, those used last in a cache on the GPU; link and CPU share what is missing",
    ),
)
