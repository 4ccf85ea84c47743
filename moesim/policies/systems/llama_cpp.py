"""llama.cpp: whole layers, or the experts of whole layers, on the CPU or on the GPU; nothing is cached.

ggml-org/llama.cpp; options ``--n-gpu-layers``, ``--n-cpu-moe`` and ``--no-op-offload``. Without any, recent versions search what
fits: `moesim.policies.systems.llama_cpp_fit`.

Idea: weights live where they are put at the start, and are computed there. Only for larger batches are the weights of the CPU's
layers copied to the GPU for one use.

| point | paper says | released code does | we do |
|---|---|---|---|
| n_gpu_layers | - | the last n layers, the output layer counting as one; the others keep all they own on the CPU | the same |
| n_cpu_moe | - | experts of the first m layers on the CPU, attention and shared experts on the GPU; ``--cpu-moe``: of all | the same; as many as there are layers |
| neither given | - | everything on the GPU; recent versions search: ``llama-cpp-fit`` | n_cpu_moe such that the rest fits the cache slots |
| layer numbers | - | dense leading layers count | the same; they form one part: on the GPU if all of them are |
| large batches | - | from 32 rows on, used experts of CPU layers are copied, computed on the GPU and forgotten | the same (``op_offload``, ``op_offload_min_rows``) |
| large batches in ik_llama.cpp | - | experts only where rows x top-k >= 32 x experts (PR #520); by bytes of a weight instead of 32 (#1813) | ``op_offload_rule: rows-per-expert``; ``op_offload_per_byte`` |
| large batches: other weights | - | those of CPU layers are copied to the GPU for each use; attention follows them | the same, but not the output layer; attention reads a copy of the KV cache in prefill, and runs where the cache is while decoding [choice] |
| prompts | - | micro-batches of 512 rows (``--ubatch-size``) | the same, or the workload's ``prefill_chunk`` |
| overlap of CPU and GPU | - | none within a token | none between dense part and experts; shared experts may overlap |
| token embedding | - | on the CPU | the same |
| cache | HybriMoE's table says LFU | none | none |
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from moesim.errors import CapacityError
from moesim.policies.algorithms.llama_cpp import first_layers_on_gpu, rows_to_offload
from moesim.policies.base import (
    CACHE,
    STAGING,
    PolicyBase,
    Range,
    cpu_of,
    gpu_of,
    idle_resident,
    layer_residents,
)
from moesim.policies.past_the_cache import LLAMA_CPP_PROMPT_ROWS
from moesim.policies.systems.on_demand import staging_pool
from moesim.policy import DEMAND, LAYER_PARTS, Action, Copy, Drop, Fetch, LayerEnd, Placement, Pool, Routed, Run, View


class LlamaCpp(PolicyBase):
    """Whole layers, or their experts, on the CPU or the GPU, fixed at the start (llama.cpp)."""

    paper = "llama.cpp (ggml-org/llama.cpp)"
    prompt_rows = LLAMA_CPP_PROMPT_ROWS
    missing: ClassVar[tuple[str, ...]] = (
        "op_offload of the output layer, which large numbers of sequences would make",
        "copying the KV cache of dense leading layers: large steps read it at the GPU's rate",
        "copying dense leading layers one tensor at a time: the buffer holds all of them",
        "waiting of shared experts on the GPU for the CPU's experts (sequential graph splits)",
        "a part of the dense leading layers on the GPU",
        "overrides of other tensors by a pattern (-ot): the experts of whole layers only",
        "op_offload: the routed ids are read back before the copies, which waits for the GPU",
    )

    n_gpu_layers: Annotated[int, Range(0)] | None = None
    """Layers on the GPU, counted from the end with the output layer as one; None: all."""
    n_cpu_moe: Annotated[int, Range(0)] | None = None
    """The first so many layers have their experts on the CPU. None: no layer if ``n_gpu_layers`` is given, else as few layers
    as leave experts that fit the cache slots."""
    op_offload: bool = True
    """Copy the experts of CPU layers to the GPU for larger batches."""
    op_offload_rule: Literal["rows", "rows-per-expert"] = "rows"
    """Larger by rows of a micro-batch, or by rows that an expert gets on average (ik_llama.cpp)."""
    op_offload_min_rows: Annotated[int, Range(1)] = 32
    """So many rows, of either kind, from which on it does."""
    op_offload_per_byte: Annotated[float, Range(0)] | None = None
    """So many rows an expert for each byte of a weight instead, rounded down (ik_llama.cpp #1813)."""
    staging_slots: Annotated[int, Range(1)] | None = None
    """Experts of the pool for such copies; None: the model's top_k, but at least 2."""

    @property
    def listens(self) -> frozenset[type]:
        """Routing, and the end of layers whose experts may have been copied."""
        return frozenset({Routed, LayerEnd} if self.op_offload else {Routed})

    def place(self, view: View) -> Placement:
        """Put layers where the two options say."""
        self._begin(view, "llama-cpp")
        cpu, model = self._cpu, view.model
        first_dense, first_expert, whole = self._split(view)
        parts = {(part, layer): cpu for layer in range(first_dense) for part in LAYER_PARTS}
        if model.n_dense_layers and not whole:
            parts["leading", -1] = cpu
        placement = self._placed(view, range(first_expert, model.n_layers))
        offloaded = dict.fromkeys(parts, self._gpu) if self.op_offload else {}
        if self.n_gpu_layers == 0:
            parts["head", -1] = cpu
        return replace(placement, parts={**placement.parts, **parts}, offloaded=offloaded, offload_from=self._dense_from)

    def _begin(self, view: View, name: str) -> None:
        self._gpu, self._cpu = gpu_of(view, name), cpu_of(view, name)
        self._offload_from = self._dense_from = self.op_offload_min_rows
        if self.op_offload_rule == "rows-per-expert":
            model, by_byte = view.model, self.op_offload_per_byte
            each, rows = (
                self.op_offload_min_rows if by_byte is None else int(by_byte * bits / 8)
                for bits in (model.expert_bits, model.other_bits)
            )
            self._offload_from, self._dense_from = rows_to_offload(model.n_experts, model.top_k, each), max(1, rows)

    def _placed(self, view: View, on_gpu: range) -> Placement:
        """Put the experts of some layers on the GPU, the token embedding on the CPU."""
        gpu, model = self._gpu, view.model
        self._on_gpu = on_gpu
        n_bytes = model.n_experts * sum(model.expert_bytes(layer) for layer in on_gpu)
        pools = [Pool(gpu, CACHE, n_bytes)]
        if self.op_offload and len(on_gpu) < model.n_layers:
            pools.append(staging_pool(view, gpu, self.staging_slots))
        everyone = tuple(range(model.n_experts))
        return Placement([Copy(layer, everyone, gpu) for layer in on_gpu], pools, {("embedding", -1): self._cpu})

    def _split(self, view: View) -> tuple[int, int, bool]:
        """Return the first MoE layer whose dense part, and the first whose experts, are on the GPU; and whether all layers are."""
        model = view.model
        leading = model.n_dense_layers
        slots = view.cache_slots(self._gpu) // model.n_experts  # in whole layers
        firsts = first_layers_on_gpu(leading + model.n_layers, self.n_gpu_layers, self.n_cpu_moe or 0)
        first_dense, first_expert = (max(0, first - leading) for first in firsts)
        if self.n_gpu_layers is None and self.n_cpu_moe is None:
            first_expert = max(0, model.n_layers - slots)
        asked = model.n_layers - first_expert
        if asked > slots:
            raise CapacityError(
                f"policy llama-cpp on {self._gpu}: expected experts of at most {slots} layers, as the cache slots allow, "
                f"got {asked}; raise cache.ratio to {asked}/{model.n_layers}, lower n_gpu_layers or raise n_cpu_moe"
            )
        return first_dense, first_expert, not firsts[0]

    def decide(self, event: Any, view: View) -> Iterable[Action]:
        """Run experts where they are, or copy them first if there are many rows."""
        layer = event.layer
        if type(event) is LayerEnd:
            held = layer_residents(view, self._gpu, STAGING, layer) if layer not in self._on_gpu else None
            return (Drop(layer, held, self._gpu),) if held else ()
        if layer in self._on_gpu:
            return (Run(layer, event.active, self._gpu),)
        if self.op_offload and len(event.experts) >= self._offload_from:
            return (
                Fetch(layer, event.active, self._gpu, DEMAND, STAGING),
                Run(layer, event.active, self._gpu),
            )
        return (Run(layer, event.active, self._cpu),)

    def evict(self, fetch: Fetch, view: View) -> tuple[int, int] | None:
        """Give up a copy that has been computed."""
        return idle_resident(view, fetch)
