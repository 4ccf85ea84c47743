"""QVAC fabric's expert cache: one LRU over all layers, planned once a layer and step.

tetherto/qvac-fabric-llm.cpp: src/llama-moe-cache.cpp at 06560fb745 (PR 232), a fork of llama.cpp.

| decision | code | ours |
|---|---|---|
| token embedding | on the CPU, as of llama.cpp | the same |
| prompts, as of llama.cpp | micro-batches of 512 rows | the same |
| which layers | all expert tensors on the host, in the most common layout; the others use plain offload | all layers |
| slots | what fits; off by default, and with fewer than a token has experts | the granted slots; with fewer no token is served |
| planned calls | decoding, predicted tokens, prompts whose experts fit the slots | any step whose experts fit; the first micro-batch decides, what then finds no slot runs on the CPU |
| hits | ascending id, stamped by a clock | the same |
| misses | ascending id: the first empty slot, else the smallest stamp not in use, of equals the lowest slot | the same |
| who computes | the GPU, once all uploads are there | the same |
| other calls | do not touch the cache | the same; from 32 tokens on the GPU computes them, as in llama.cpp, else the CPU |
"""

from __future__ import annotations

from moesim.policies.cpu_cache import LLAMA_CPP_OFFLOAD_ROWS, LLAMA_CPP_PROMPT_ROWS, BackgroundCache, PastTheCache
from moesim.policy import View


class FabricLru(BackgroundCache, fixed=True):
    """One LRU over all layers for steps that fit; the GPU computes all (QVAC fabric, PR 232)."""

    paper = "QVAC fabric (tetherto/qvac-fabric-llm.cpp, PR 232)"
    engine = "llama.cpp"
    missing = (
        "layers with another layout than the most common one, and layers partly on the GPU, which use plain offload",
        "whether calls that do not fit read cached experts, which the file read does not say: they do here",
    )
    copied_now = "all"
    hit_order = "id"
    miss_order = "id"
    scope = "global"
    overlap = False
    prefill = "fitting"
    _name = "fabric-lru"
    _embedding_on_cpu = True
    each_layer = ("readback", "plan")
    prompt_rows = LLAMA_CPP_PROMPT_ROWS

    def _prompts(self, view: View, slots: int) -> PastTheCache:
        return PastTheCache("fitting", 0, self._gpu, self._cpu, LLAMA_CPP_OFFLOAD_ROWS)
