"""MoE-Lightning: layers stream while micro-batches compute; the CPU reads the KV cache.

S. Cao et al., "MoE-Lightning: High-Throughput MoE Inference on Memory-constrained GPUs", ASPLOS 2025 (arXiv:2411.11217); the
artifact's code.

| point | paper says | released code does | we do |
|---|---|---|---|
| plan | a linear program by a roofline model | for each batch, shares of experts and KV cache on the GPU that minimise the longest of link, CPU and GPU | not made: the experiment says the batch, ``expert_share`` the share |
| residents | a share of the weights | int(N x share) lowest ids of each layer; 0 for Mixtral at the planned 5.6 % | as many as the slots hold of each layer, or by ``expert_share`` |
| streaming | in pages, through a double buffer | whole layers, whatever the router chose | the same; a page is an expert |
| order | the next layer's pages between micro-batches | the same | the next layer's experts, ascending, as this layer begins |
| begin of a layer's experts | - | once its pages are there | the same, micro-batch after micro-batch |
| decoding | the CPU reads the KV cache, the GPU does all else | the same | ``attention: cpu``: queries, keys and values cross to the CPU, outputs back |
| prefill | on the GPU, the cache goes to the CPU | the same | the same |
| memory | - | a plan fills 0.86 of the GPU, 0.8 of the CPU | what the profile has |

FlexGen, on whose schedule it builds, is another system and not simulated here.
"""

from __future__ import annotations

from typing import Literal

from moesim.core.units import slots_of
from moesim.errors import CapacityError
from moesim.policies.base import CACHE, PolicyBase, cpu_of, gpu_of, micro_batch_runs, slot_bytes
from moesim.policies.options import option
from moesim.policy import (
    DEMAND,
    KV,
    PREFETCH,
    Action,
    Copy,
    Drop,
    Fetch,
    Fetched,
    LayerBegin,
    LayerEnd,
    Placement,
    Pool,
    Routed,
    View,
)  # fmt: skip


def lowest_residents(n_experts: int, expert_share: float) -> list[int]:
    """Return the experts of a layer that stay: as many as the share makes whole, the lowest ids.

    >>> lowest_residents(8, 0.055884688), lowest_residents(8, 0.3)
    ([], [0, 1])
    """
    return list(range(slots_of(expert_share, n_experts)))


PAGES = "pages"
"""The double buffer of streamed experts."""


class MoELightning(PolicyBase):
    """Layers stream during computation; the CPU reads the KV cache (MoE-Lightning, 2025)."""

    paper = "MoE-Lightning (ASPLOS 2025, arXiv:2411.11217)"
    missing = (
        "the offline plan of batch and shares",
        "batch and micro-batches as planned: the workload says them",
        "pages smaller than an expert, and their turns with activations on the link",
        "a share of the KV cache on the GPU: all of it lies on the CPU",
        "the output projection after the CPU's part of attention: it is computed with the other projections, before",
        "the end of the last pass, which copies the first layer once more",
    )
    expert_share: float | None = option(
        None,
        "Share of the experts' weights that a plan keeps on the GPU; None: the granted cache slots over all experts.",
        ge=0,
        le=1,
    )
    attention: Literal["cpu", "gpu"] = option("cpu", "Who reads the KV cache while decoding, and so where it lies.")

    def place(self, view: View) -> Placement:
        """Put the lowest ids of each layer on the GPU, and the KV cache on the CPU."""
        gpu, model = gpu_of(view, "moe-lightning"), view.model
        self._gpu = gpu
        granted = view.cache_slots(gpu)
        layers, experts = model.n_layers, model.n_experts
        share = self.expert_share
        residents = list(range(min(experts, granted // layers))) if share is None else lowest_residents(experts, share)
        if len(residents) * layers > granted:
            raise CapacityError(
                f"policy moe-lightning on {gpu}: expected at most {granted} experts on the GPU, as the cache slots allow, got "
                f"{len(residents) * layers}; raise cache.ratio to {len(residents)}/{experts} or lower expert_share"
            )
        self._streamed = range(len(residents), experts)
        self._layer = -1
        self._awaited: set[int] = set()  # experts of the present layer that are not there
        self._held: list[Routed] = []  # micro-batches that run once all are
        slot = slot_bytes(view)
        pools = [Pool(gpu, CACHE, len(residents) * layers * slot), Pool(gpu, PAGES, 2 * len(self._streamed) * slot)]
        copies = [Copy(layer, residents, gpu) for layer in range(layers) if residents]
        parts: dict[tuple[str, int], str] = {}
        if self.attention == "cpu":
            cpu = cpu_of(view, "moe-lightning")
            parts = {(KV, layer): cpu for layer in range(layers)}
        return Placement(copies, pools, parts)

    def on_layer_begin(self, event: LayerBegin, view: View) -> list[Action]:
        """Want this layer now, and the one that follows, be it of the next step."""
        layer, gpu, ids = event.layer, self._gpu, self._streamed
        self._layer = layer
        self._awaited = {e for e in ids if not view.is_resident(layer, e, gpu)}
        following = (layer + 1) % view.model.n_layers
        actions: list[Action] = [Fetch(layer, sorted(self._awaited), gpu, DEMAND, PAGES)]
        if following != layer:  # the only layer must be read before it can be copied again
            actions.append(Fetch(following, ids, gpu, PREFETCH, PAGES))
        return actions

    def on_routed(self, event: Routed, view: View) -> list[Action]:
        self._held.append(event)
        return self._run()

    def on_fetched(self, event: Fetched, view: View) -> list[Action]:
        if event.layer == self._layer:
            self._awaited.discard(event.expert)
        return self._run()

    def on_layer_end(self, event: LayerEnd, view: View) -> list[Action]:
        return [Drop(event.layer, self._streamed, self._gpu)]

    def _run(self) -> list[Action]:
        if self._awaited:
            return []
        held, self._held = self._held, []
        return [run for event in held for run in micro_batch_runs(event, event.active, self._gpu)]
