"""Systems as papers describe them when they compare with them, which is not always as these systems' own papers and code do.

Each stands for one word of one paper, has no options, and is named for both: ``hybrimoe-in-dali`` is what DALI calls HybriMoE.
Where a paper compares with a system as it is, name that system.

| point | paper says | released code does | we do |
|---|---|---|---|
| ``hybrimoe-in-dali`` | a static threshold of rows decides between CPU and GPU | a two-ended split | Fiddler's rule in HybriMoE |
| ``ktransformers-in-dali`` | the first layers on the CPU, the others on the GPU | layers by name in 2024, single experts since | ``kt-layer``, its last layers on the GPU |
| ``llama-cpp-in-dali`` | the first layers on the CPU, the others on the GPU | copies for larger batches since 2025 | no such copies |
| ``fiddler-in-dali`` | busy experts on the GPU, "the rest by the CPU in parallel"; 14.3 times slower than DALI | CPU experts after the layer's last copy | as the code, since that was measured |
| ``ktransformers-in-hybrimoe`` | frequent experts on the GPU; the CPU computes in decode only | the CPU computes prompts, too | as that paper says |
| ``hybrimoe-in-prescope`` | a greedy queue over PreScope's hot experts | a cache of its own | the paper's queue; four experts ahead, behind the layer's loads |
| ``fate-in-prescope`` | compression off; PreScope's hot experts and transfers | misses and rare prefetches at 2 bits; starts with the lowest ids | ``fate`` with all at full width, from its own start |
| ``deepspeed-mii-in-daop`` | below one token a second, not described | ZeRO-Inference for models beyond the GPU | the same |
| ``llama-cpp-in-od-moe`` | on the CPU | splits layers between CPU and GPU | no layer on the GPU |
"""

from __future__ import annotations

from typing import Any

from moesim.policies.composed import Composed
from moesim.policies.declare import option_parameters
from moesim.policies.systems.fate import Fate
from moesim.policies.systems.fiddler import Fiddler
from moesim.policies.systems.hybrimoe import HybriMoEPaper
from moesim.policies.systems.ktransformers import KtLayer
from moesim.policies.systems.llama_cpp import LlamaCpp
from moesim.policies.systems.zero_inference import ZeroInference


def _as_in(paper: str, base: Any, name: str, text: str, missing: tuple[str, ...] = (), **chosen: Any) -> Any:
    """Name a choice of options of a policy, all of them fixed."""
    missing = (*missing, *getattr(base, "missing", ()))
    return base.preset(name, text, fixed=tuple(option_parameters(base)), paper=paper, missing=missing, **chosen)


DALI = "DALI (2026), a system compared with"
HybriMoEInDali = _as_in(
    DALI, HybriMoEPaper, "HybriMoEInDali", "HybriMoE as DALI describes it: a threshold decides between CPU and GPU.",
    ("which cache and prefetch DALI left to it is not printed: HybriMoE's own",), assignment="threshold",
)  # fmt: skip
KTransformersInDali = _as_in(
    DALI, KtLayer, "KTransformersInDali", "KTransformers as DALI describes it: the first layers on the CPU, the others on the GPU.",
    side="last",
)  # fmt: skip
LlamaCppInDali = _as_in(
    DALI, LlamaCpp, "LlamaCppInDali", "llama.cpp as DALI describes it: whole layers, and no copies for larger batches.",
    op_offload=False,
)  # fmt: skip
FiddlerInDali = _as_in(
    DALI, Fiddler, "FiddlerInDali", "Fiddler as DALI ran it, its released code: CPU experts after the last copy of a layer.",
    ("how DALI ran Fiddler is not printed: its text has CPU and GPU in parallel, the released code has not",), serial=True,
)  # fmt: skip
KTransformersInHybriMoE = _as_in(
    "HybriMoE (2025), a system compared with", Composed, "KTransformersInHybriMoE",
    "KTransformers as HybriMoE describes it: frequent experts on the GPU; the CPU computes others in decode only.",
    placement="frequency-global", scope="global", assignment="resident-in-decode", replacement="static",
)  # fmt: skip
HybriMoEInPreScope = _as_in(
    "PreScope (2025), a system compared with", HybriMoEPaper, "HybriMoEInPreScope",
    "HybriMoE as PreScope describes it: its queue over PreScope's hot experts, without a cache of its own.",
    ("which greedy queue PreScope gave it, and how many experts it prefetches, is not printed: that of HybriMoE's paper, and four",),
    placement="frequency-global", scope="global", replacement="static",
    prefetch={"name": "predicted", "source": "signal:gate_next1", "size": 4},
)  # fmt: skip
FateInPreScope = _as_in(
    "PreScope (2025), a system compared with", Fate, "FateInPreScope",
    "Fate as PreScope ran it: without compression, so that all experts have their full width.",
    ("the hot experts that PreScope gave to all at the start: Fate's caches of each layer start with their lowest ids",),
    compression=False, low_bits=(),
)  # fmt: skip
DeepSpeedMIIInDaop = _as_in(
    "DAOP (DATE 2025), a system compared with", ZeroInference, "DeepSpeedMIIInDaop",
    "DeepSpeed-MII as DAOP most likely ran it: ZeRO-Inference, which copies every layer in every pass.",
    ("how DAOP ran DeepSpeed-MII is not printed",),
)  # fmt: skip
LlamaCppInOdMoe = _as_in(
    "OD-MoE (2025), a system compared with", LlamaCpp, "LlamaCppInOdMoe", "llama.cpp as OD-MoE ran it: all of it on the CPU.",
    n_gpu_layers=0, op_offload=False,
)  # fmt: skip
