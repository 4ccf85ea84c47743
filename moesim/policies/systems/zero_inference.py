"""ZeRO-Inference: the model lies in host memory; every pass copies each layer to the GPU.

DeepSpeed, ZeRO stage 3 with parameters offloaded (``partitioned_param_coordinator.py`` at 00a31c9946), and the inference example
of DeepSpeedExamples. R. Y. Aminabadi et al., "DeepSpeed-Inference: Enabling Efficient Inference of Transformer Models at
Unprecedented Scale", SC 2022 (arXiv:2207.00032), describes the method for dense models.

| point | paper says | released code does | we do |
|---|---|---|---|
| experts | - | a MoE block is one leaf: all its experts are copied before it, whatever the router chose | the same |
| other weights | streamed layer by layer | each submodule's tensors are copied before it | attention, shared experts, leading layers, embedding and head, each before it runs |
| small tensors | - | up to 1e5 elements stay on the GPU | norms stay; the router up to ``persistence_threshold`` elements |
| look-ahead | - | in recorded order within a window; with both known settings less than one expert | ``depth: 0``, none; ``depth: 1``, the next layer, as a larger window would have it |
| first pass | - | records the order, copies nothing ahead | the same, of experts |
| copies awaited at a time | - | two at most | one layer's, and the next's with ``depth: 1`` |
| after use | - | released, unless small or used again within 1e9 elements | experts at the end of the layer, the rest after use |
| prefill and decode | - | every pass copies every layer | the same |
| memory of the host | - | ``pin_memory`` false; the example pins | ``pinned``: as the example; false: as the default |
| KV cache | - | on the GPU, or offloaded (``--kv-offload``) | ``kv``: on the GPU, or in host memory and copied for each use |
| cache, CPU | - | no cache of experts, the CPU computes nothing | the same |
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Literal

from moesim.model import ModelSpec
from moesim.policies.base import PolicyBase, gpu_of, layer_residents, slot_bytes
from moesim.policies.options import option
from moesim.policy import (
    DEMAND,
    KV,
    LAYER_PARTS,
    PREFETCH,
    STEP_PARTS,
    Action,
    Copies,
    Drop,
    Fetch,
    Fetched,
    LayerBegin,
    LayerEnd,
    Placement,
    Pool,
    Routed,
    Run,
    StepBegin,
    View,
)  # fmt: skip

PERSISTENCE_THRESHOLD = 100_000
"""``stage3_param_persistence_threshold``, elements."""
LAYERS = "layers"
"""The pool of the layers that are on the GPU."""


class ZeroInference(PolicyBase):
    """All weights in host memory; every pass copies each whole layer (ZeRO-Inference, 2022)."""

    paper = "ZeRO-Inference (DeepSpeed, SC 2022, arXiv:2207.00032)"
    missing: ClassVar[tuple[str, ...]] = (
        "the one tensor that a window smaller than a layer copies ahead",
        "with depth 1 in the first pass, nothing but experts is kept from being copied ahead",
        "the hooks around each submodule, which run in Python: they take no time",
        "several GPUs, among which each tensor is divided; NVMe's own buffers",
        "how the KV cache is offloaded was not read: kv host copies it before attention and its new entries back",
    )
    depth: int = option(0, "Layers that are copied ahead; 0 is what both known settings come to.", ge=0, le=1)
    persistence_threshold: int = option(PERSISTENCE_THRESHOLD, "Elements up to which a router stays on the GPU.", ge=0)
    kv: Literal["gpu", "host"] = option("gpu", "Where the KV cache lies; on the host it is copied for each use.")
    pinned: bool = option(True, "Copies from pinned memory, or whatever curve the experiment names; False: from pageable memory.")

    def place(self, view: View) -> Placement:
        self._gpu, model = gpu_of(view, "zero-inference"), view.model
        self._held: set[int] = set()  # experts that run once all of their layer are there
        self._awaited = -1  # experts of the present layer that are under way; -1: not asked for
        self._layer = -1
        parts = {(part, layer): self._gpu for layer in range(model.n_layers) for part in LAYER_PARTS}
        parts |= {(part, -1): self._gpu for part in STEP_PARTS}
        streamed = {at: view.host for at in parts if at[0] != "dense" or not self._router_stays(model)}
        if self.kv == "host":
            streamed |= {(KV, layer): view.host for layer in range(model.n_layers)}
        size = (self.depth + 1) * model.n_experts * slot_bytes(view)
        return Placement(pools=[Pool(self._gpu, LAYERS, size)], parts=parts, streamed=streamed, stream_depth=self.depth)

    def _router_stays(self, model: ModelSpec) -> bool:
        return model.n_experts * model.hidden <= self.persistence_threshold

    def transfer(self, model: ModelSpec) -> Copies | None:
        return None if self.pinned else Copies("pageable")

    def on_step_begin(self, event: StepBegin, view: View) -> Iterable[Action]:
        return self._ahead(event.step, 0, view)

    def on_layer_begin(self, event: LayerBegin, view: View) -> Iterable[Action]:
        return self._ahead(event.step, event.layer + 1, view)

    def _ahead(self, step: int, layer: int, view: View) -> Iterable[Action]:
        """Copy a layer ahead, but not in the first pass, which records the order."""
        return (self._copy(layer, view, PREFETCH),) if self.depth and step and layer < view.model.n_layers else ()

    def _copy(self, layer: int, view: View, urgency: int) -> Fetch:
        return Fetch(layer, range(view.model.n_experts), self._gpu, urgency, LAYERS)

    def on_routed(self, event: Routed, view: View) -> list[Action]:
        """Copy the whole layer; run what is routed once it is there."""
        self._held.update(event.active)
        actions: list[Action] = []
        if self._awaited < 0:
            self._layer = event.layer
            self._awaited = view.model.n_experts - len(layer_residents(view, self._gpu, LAYERS, event.layer))
            actions.append(self._copy(event.layer, view, DEMAND))
        return [*actions, *self._run()]

    def on_fetched(self, event: Fetched, view: View) -> list[Action]:
        if self._awaited < 0 or event.layer != self._layer:
            return []
        self._awaited -= 1
        return self._run()

    def on_layer_end(self, event: LayerEnd, view: View) -> Iterable[Action]:
        self._awaited = -1
        return (Drop(event.layer, layer_residents(view, self._gpu, LAYERS, event.layer), self._gpu),)

    def _run(self) -> list[Action]:
        if self._awaited or not self._held:
            return []
        held, self._held = sorted(self._held), set()
        return [Run(self._layer, held, self._gpu)]
