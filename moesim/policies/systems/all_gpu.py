"""All experts on the GPU: no offloading, the upper bound of speed where the model fits.

| point | we do |
|---|---|
| placement | every expert on one GPU; the cache ratio is ignored |
| several GPUs | ``gpus: all``: equal shares of consecutive layers, as Accelerate's ``device_map="auto"`` |
| model does not fit | an error; ``assume_fits`` runs and labels the result |
| transfers | none |
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from moesim.policies.base import CACHE, PolicyBase, gpu_of
from moesim.policies.options import option
from moesim.policy import LAYER_PARTS, Action, Copy, Placement, Pool, Routed, Run, View


class AllGpu(PolicyBase):
    """Every expert on a GPU, nothing offloaded."""

    routing_free = True
    gpus: Literal["one", "all"] = option(
        "one", "One GPU, or all of them with consecutive layers on each; hidden states cross from one to the next."
    )
    engine: str = option("", "Engine whose costs it has, such as vllm; empty: those of the machine's profile.")
    assume_fits: bool = option(False, "Run as if the GPU's memory were large enough; labels the result ``assumes-memory``.")

    def place(self, view: View) -> Placement:
        model = view.model
        chosen = view.gpus if self.gpus == "all" and view.gpus else [gpu_of(view, "all-gpu")]
        each = -(-model.n_layers // len(chosen))
        self._at = [chosen[layer // each] for layer in range(model.n_layers)]  # layer -> GPU
        everyone = tuple(range(model.n_experts))
        n_bytes = dict.fromkeys(self._at, 0)
        for layer, gpu in enumerate(self._at):
            n_bytes[gpu] += len(everyone) * model.expert_bytes(layer)
        parts = {(part, layer): gpu for layer, gpu in enumerate(self._at) for part in LAYER_PARTS}
        ends = {("embedding", -1): self._at[0], ("leading", -1): self._at[0], ("head", -1): self._at[-1]}
        return Placement(
            copies=[Copy(layer, everyone, gpu) for layer, gpu in enumerate(self._at)],
            pools=[Pool(gpu, CACHE, size) for gpu, size in n_bytes.items()],
            parts=parts | ends if self.gpus == "all" else {},
            enforce_capacity=not self.assume_fits,
            host_experts="others",
        )

    def on_routed(self, event: Routed, view: View) -> Iterable[Action]:
        return (Run(event.layer, event.active, self._at[event.layer]),)
