"""Everything of a step that is no routed expert, as real computations with a model's real shapes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from moesim.live.kernels.attention import Step, attention
from moesim.live.kernels.fill import generator
from moesim.live.kernels.machine import check_room
from moesim.live.kernels.parts import Tensors, feed_forward, make, normalise
from moesim.live.kernels.plans import dense_bytes, dense_plans, number_bytes, rotary_width
from moesim.model import ModelSpec


class DenseKernel:
    """Attention, routers, shared experts, leading layers, embedding and head of a model, with random weights.

    Biases (but for those of LayerNorm) and attention sinks are left out. Latent attention is computed absorbed in all
    phases. One thread may call `attention` and `leading`, which write the cache and share the positions of a step; the other
    parts only read, and may be called beside them.
    """

    n_bytes: int  # what is allocated for as long as this lives. Intermediate results come on top

    def __init__(
        self,
        model: ModelSpec,
        device: str = "cpu",
        *,
        distinct_layers: int,
        max_rows: int,
        max_kv_tokens: int,
        with_head: bool = True,
        seed: int = 0,
    ) -> None:
        # The type is that of weights, KV cache and hidden states: bfloat16 for 16 bits, float32 for 32.
        self.model, self.device, self.dtype = model, torch.device(device), _dtype(model)
        self.n_bytes = self.required_bytes(
            model, distinct_layers=distinct_layers, max_rows=max_rows, max_kv_tokens=max_kv_tokens, with_head=with_head
        )
        check_room(f"the dense part of model '{model.name}'", self.n_bytes, self.device)
        plans = dense_plans(model, distinct_layers, max_kv_tokens, with_head)
        # Each group has a source of its own: what is in all kernels of a model is the same, however many layers they have.
        self._layers, self._leading, self._ends = (
            [make(plan, self.dtype, self.device, source) for plan in group]
            for group, source in zip(plans, map(generator, range(seed, seed + len(plans))), strict=True)
        )
        self._step = Step(rotary_width(model), max_rows, max_kv_tokens, self.dtype, self.device)

    @staticmethod
    def required_bytes(model: ModelSpec, *, distinct_layers: int, max_rows: int, max_kv_tokens: int, with_head: bool) -> int:
        """Tell what a kernel will allocate, in bytes."""
        return dense_bytes(
            model, distinct_layers=distinct_layers, max_rows=max_rows, max_kv_tokens=max_kv_tokens, with_head=with_head
        )

    def attention(self, layer: int, x: Tensor, sequences: Sequence[tuple[int, int]]) -> Tensor:
        """Norm, attention and residual of one layer; keys and values of the rows go into its cache."""
        self._step.enter(sequences, x.shape[0])
        return attention(self.model, self._layer(layer), self._step, x)

    def router(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """Norm, product, softmax and top-k of one layer's router."""
        w = self._layer(layer)
        normed = normalise(x, w["router_norm"])
        scores = torch.softmax(F.linear(normed, w["router"]), dim=-1, dtype=torch.float32)
        return normed, torch.topk(scores, self.model.top_k).indices.cpu()

    def predict(self, layer: int, x: Tensor) -> Tensor:
        """One more product with a layer's router, and its top-k, as predictors do that reuse gates."""
        return torch.topk(F.linear(x, self._layer(layer)["router"]), self.model.top_k).indices.cpu()

    def shared(self, layer: int, x: Tensor) -> Tensor:
        """All shared experts of one layer together, with their gate if they have one."""
        if not self.model.shared_intermediate:
            raise ValueError(f"model '{self.model.name}' has no shared experts")
        w = self._layer(layer)
        out = feed_forward(x, w, "shared")
        return out.mul_(torch.sigmoid(F.linear(x, w["shared_scale"]))) if self.model.shared_gate else out

    def leading(self, layer: int, x: Tensor, sequences: Sequence[tuple[int, int]]) -> Tensor:
        """One leading dense layer: attention, norm, feed-forward part, residuals."""
        if not 0 <= layer < self.model.n_dense_layers:
            raise IndexError(f"leading layer {layer} of model '{self.model.name}', which has {self.model.n_dense_layers}")
        w = self._leading[layer % len(self._leading)]
        self._step.enter(sequences, x.shape[0])
        x = attention(self.model, w, self._step, x)
        return feed_forward(normalise(x, w["dense_norm"]), w, "dense").add_(x)

    def embed(self, ids: Tensor) -> Tensor:
        """Look tokens up."""
        return F.embedding(ids.to(self.device), self._end("embedding"))

    def head(self, x: Tensor) -> Tensor:
        """Last norm, product with the vocabulary, and the likeliest token of each row."""
        table = self._end("embedding" if self.model.tie_embeddings else "head")
        return F.linear(normalise(x, self._end("last_norm")), table).argmax(dim=-1).cpu()

    def _layer(self, layer: int) -> Tensors:
        if not 0 <= layer < self.model.n_layers:
            raise IndexError(f"layer {layer} of model '{self.model.name}': it has layers 0 to {self.model.n_layers - 1}")
        return self._layers[layer % len(self._layers)]

    def _end(self, name: str) -> Tensor:
        if not self._ends:
            raise ValueError("this kernel was made without embedding and head (with_head)")
        return self._ends[0][name]


def _dtype(model: ModelSpec) -> torch.dtype:
    """Choose the type of weights, KV cache and hidden states: bfloat16 for 16 bits, float32 for 32."""
    return {2: torch.bfloat16, 4: torch.float32}[number_bytes(model)]
