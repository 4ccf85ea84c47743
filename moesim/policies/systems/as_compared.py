"""Systems as papers describe them in comparisons, not as their own papers and code do.

Each has no options, and is named for itself and the paper: ``hybrimoe-in-dali`` is what DALI calls HybriMoE.

| point | paper says | released code does | we do |
|---|---|---|---|
| ``hybrimoe-in-dali`` | a static threshold of rows decides between CPU and GPU | a two-ended split | Fiddler's rule in HybriMoE |
| ``ktransformers-in-dali`` | the first layers on the CPU, the others on the GPU | layers by name in 2024, single experts since | ``kt-layer``, its last layers on the GPU |
| ``llama-cpp-in-dali`` | the first layers on the CPU, the others on the GPU | copies for larger batches since 2025 | no such copies |
| ``fiddler-in-dali`` | busy experts on the GPU, "the rest by the CPU in parallel"; 14.3 times slower than DALI | CPU experts after the layer's last copy | the code, which was measured |
| ``ktransformers-in-hybrimoe`` | frequent experts on the GPU; the CPU computes in decode only | the CPU computes prompts, too | as that paper |
| ``hybrimoe-in-prescope`` | a greedy queue over PreScope's hot experts | a cache of its own | the paper's queue; four experts ahead, behind the layer's loads |
| ``fate-in-prescope`` | no compression; PreScope's hot experts and transfers | misses and rare prefetches at 2 bits; starts with the lowest ids | ``fate`` at full width, from its own start |
| ``deepspeed-mii-in-daop`` | below one token a second, not described | ZeRO-Inference for models beyond the GPU | the same |
| ``llama-cpp-in-od-moe`` | on the CPU | splits layers between CPU and GPU | no layer on the GPU |
"""

from __future__ import annotations

from moesim.policies.composed import Composed
from moesim.policies.systems.fate import Fate
from moesim.policies.systems.fiddler import Fiddler
from moesim.policies.systems.hybrimoe import HybriMoEPaper
from moesim.policies.systems.ktransformers import KtLayer
from moesim.policies.systems.llama_cpp import LlamaCpp
from moesim.policies.systems.zero_inference import ZeroInference

DALI = "DALI (2026), a system compared with"
PRESCOPE = "PreScope (2025), a system compared with"


class HybriMoEInDali(HybriMoEPaper, fixed=True):
    """HybriMoE as DALI describes it: a threshold decides between CPU and GPU."""

    paper = DALI
    missing = ("which cache and prefetch DALI left to it is not printed: HybriMoE's own", *HybriMoEPaper.missing)
    assignment = "threshold"


class KTransformersInDali(KtLayer, fixed=True):
    """KTransformers as DALI describes it: the first layers on the CPU, the others on the GPU."""

    paper = DALI
    engine = ""  # the numbers of that paper's machine
    side = "last"


class LlamaCppInDali(LlamaCpp, fixed=True):
    """llama.cpp as DALI describes it: whole layers, and no copies for larger batches."""

    paper = DALI
    engine = ""  # the numbers of that paper's machine
    op_offload = False


class FiddlerInDali(Fiddler, fixed=True):
    """Fiddler as DALI ran it, its released code: CPU experts after the last copy of a layer."""

    paper = DALI
    missing = (
        "how DALI ran Fiddler is not printed: its text has CPU and GPU in parallel, the released code has not",
        *Fiddler.missing,
    )
    serial = True


class KTransformersInHybriMoE(Composed, fixed=True):
    """KTransformers as HybriMoE describes it: hot experts on the GPU, the CPU in decode only."""

    paper = "HybriMoE (2025), a system compared with"
    placement = "frequency-global"
    scope = "global"
    assignment = "resident-in-decode"
    replacement = "static"


class HybriMoEInPreScope(HybriMoEPaper, fixed=True):
    """HybriMoE as PreScope describes it: its queue over PreScope's hot experts, uncached."""

    paper = PRESCOPE
    missing = (
        "which greedy queue PreScope gave it, and how many experts it prefetches, is not printed: that of HybriMoE's paper, and four",
        *HybriMoEPaper.missing,
    )
    placement = "frequency-global"
    scope = "global"
    replacement = "static"
    prefetch = {"name": "predicted", "source": "signal:gate_next1", "size": 4}  # noqa: RUF012


class FateInPreScope(Fate, fixed=True):
    """Fate as PreScope ran it: without compression, so that all experts have their full width."""

    paper = PRESCOPE
    missing = (
        "the hot experts that PreScope gave to all at the start: Fate's caches of each layer start with their lowest ids",
        *Fate.missing,
    )
    compression = False
    low_bits = ()


class DeepSpeedMIIInDaop(ZeroInference, fixed=True):
    """DeepSpeed-MII as DAOP most likely ran it: ZeRO-Inference, which copies every layer."""

    paper = "DAOP (DATE 2025), a system compared with"
    missing = ("how DAOP ran DeepSpeed-MII is not printed", *ZeroInference.missing)


class LlamaCppInOdMoe(LlamaCpp, fixed=True):
    """llama.cpp as OD-MoE ran it: all of it on the CPU."""

    paper = "OD-MoE (2025), a system compared with"
    engine = ""  # the numbers of that paper's machine
    n_gpu_layers = 0
    op_offload = False
