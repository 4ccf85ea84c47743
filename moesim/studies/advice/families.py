"""Ways of placing experts that engines have, each with one number to vary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from moesim.studies.advice.setting import PREFILL_CHUNK, Asked, Setting

PREFILL: Final = "+prefill"
"""Family that does the same, but computes prompts on the GPU, layer by layer."""
UPDATE: Final = "+update"
"""Family that, besides, keeps on the GPU what the latest prompt used most."""
SHARED: Final = {16.0: "BF16", 8.0: "FP8"}
"""kt-kernel's methods for weights that CPU and GPU share, by bits: only with these are whole layers copied to the GPU."""
NOT_SHARED: Final = (
    "kt-kernel copies whole layers to the GPU only from weights that the CPU reads, too: of 16 bits (BF16) or 8 (FP8); of 4 "
    "bits (RAWINT4) its README names those of Kimi-K2-Thinking only"
)
EXLLAMAV3_PAGE: Final = 256
"""Tokens by which exllamav3's cache grows (PAGE_SIZE, constants.py of 1.6.5)."""


@dataclass(frozen=True)
class Family:
    """Placements that differ in one number."""

    name: str  # in results
    policy: Callable[[int], Mapping[str, Any]]  # number -> policy with its options, as in an experiment
    # low, high: range of the number
    low: int
    high: int
    more: int  # whether a larger number puts more on the GPU, or less
    frees: bool  # what is on the GPU takes no host memory
    fullest: bool = False  # only the most that fits is tried: speed goes one way, and the least is like that of another family
    like: str = ""  # name of the family whose number it takes; empty: its own is searched
    never: str = ""  # why no engine can do it in this setting; empty if one can
    kv_page: int = 1  # tokens by which the engine's KV cache grows


def families_of(setting: Setting, *, counted: bool) -> list[Family]:
    """List the families that the processors of a machine allow; some need activations that were ``counted`` before."""
    families = [Family("all-gpu", lambda number: {"name": "all-gpu"}, 0, 0, 1, True)]
    if not setting.host_computes:  # no processor beside the accelerator
        return families
    model = setting.model
    n_layers = model.n_dense_layers + model.n_layers
    families += [
        Family("expert-layers", lambda n: {"name": "llama-cpp", "n_cpu_moe": n}, model.n_dense_layers, n_layers, -1, True),
        Family("whole-layers", lambda n: {"name": "llama-cpp", "n_gpu_layers": n}, 0, n_layers + 1, 1, True),
        Family(
            "exllamav3-layers",
            lambda n: {"name": "exllamav3", "cpu_layers": n},
            1,
            model.n_layers,
            -1,
            True,
            kv_page=EXLLAMAV3_PAGE,
        ),
        Family(
            "exllamav3-split",
            lambda n: {"name": "exllamav3", "cpu_split": n},
            1,
            model.n_experts - 1,
            -1,
            False,
            kv_page=EXLLAMAV3_PAGE,
        ),
    ]
    strategies = {"expert-set": "uniform", "front-expert-set": "front-loading"}
    strategies |= {"frequent-expert-set": "frequency"} if counted else {}
    for name, strategy in strategies.items():
        families += _kt_kernel(name, strategy, setting)
    return families


def _kt_kernel(name: str, strategy: str, setting: Setting) -> list[Family]:
    """One of kt-kernel's strategies; also with its ways of computing prompts, if there are prompts for them.

    From the front, each further layer changes a step by as much, and whole layers have nothing to exchange.
    """
    front, some = strategy == "front-loading", setting.model.n_experts - 1

    def family(adds: str, low: int, high: int, **options: Any) -> Family:
        written = {"name": "kt-expert", "strategy": strategy, **options}
        like, never = (name, NOT_SHARED) if adds else ("", "")
        never = "" if shared_method(setting) else never
        return Family(name + adds, lambda n: {**written, "gpu_experts": n}, low, high, 1, False, front, like, never)

    found = [family("", 1, some) if front else family("", 0, some + 1)]
    if (rows := threshold(setting.asked)) is not None:
        found.append(family(PREFILL, 1 if front else 0, some, prefill_threshold=rows))
        if not front:
            found.append(family(UPDATE, 1, some, prefill_threshold=rows, dynamic_update=True))
    return found


def threshold(asked: Asked) -> int | None:
    """Rows of a full chunk of the prompts, which is then computed on the GPU; None if decoding has as many."""
    rows = min(asked.batch * asked.prompt, PREFILL_CHUNK)
    return rows if rows > asked.batch else None


def shared_method(setting: Setting) -> str | None:
    """Name kt-kernel's method for weights of as many bits that CPU and GPU share; None if it has none."""
    model = setting.model
    whole = setting.asked.gguf is None and model.expert_bytes_by_layer is None
    return SHARED.get(float(model.expert_bits)) if whole else None
