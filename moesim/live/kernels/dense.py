"""Everything of a step that is no routed expert, as real computations with a model's real shapes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from moesim.live.kernels.attention import Step, attention, attention_plan, cache_plan, rotary_width
from moesim.live.kernels.errors import KernelError
from moesim.live.kernels.fill import generator
from moesim.live.kernels.machine import check_room
from moesim.live.kernels.parts import Plan, Tensors, feed_forward, feed_forward_plan, make, matrix, norm_of, normalise, plan_bytes
from moesim.model import ModelSpec

_DTYPES = {16: torch.bfloat16, 32: torch.float32}


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
        plans = _plans(model, distinct_layers, max_kv_tokens, with_head)
        # Each group has a source of its own: what is in all kernels of a model is the same, however many layers they have.
        self._layers, self._leading, self._ends = (
            [make(plan, self.dtype, self.device, source) for plan in group]
            for group, source in zip(plans, map(generator, range(seed, seed + len(plans))), strict=True)
        )
        self._step = Step(rotary_width(model), max_rows, max_kv_tokens, self.dtype, self.device)

    @staticmethod
    def required_bytes(model: ModelSpec, *, distinct_layers: int, max_rows: int, max_kv_tokens: int, with_head: bool) -> int:
        """Tell what a kernel will allocate, in bytes."""
        dtype = _dtype(model)
        if min(distinct_layers, max_rows, max_kv_tokens) < 1:
            raise ValueError("expected at least one distinct layer, row, and token of KV")
        plans = _plans(model, distinct_layers, max_kv_tokens, with_head)
        weights = sum(plan_bytes(plan, dtype) for group in plans for plan in group)
        return weights + Step.required_bytes(rotary_width(model), max_rows, max_kv_tokens, dtype)

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
    dtype = _DTYPES.get(int(model.other_bits)) if model.other_bits in _DTYPES else None
    if dtype is None:
        raise KernelError(f"model '{model.name}': expected other_bits of 16 or 32, got {model.other_bits:g}; choose one of them")
    if model.kv_bits != model.other_bits:
        raise KernelError(
            f"model '{model.name}': expected kv_bits equal to other_bits ({model.other_bits:g}) to measure or replay,"
            f" got {model.kv_bits:g}; set kv_bits to it"
        )
    if rotary_width(model) % 2:
        raise KernelError(f"model '{model.name}': expected an even width to rotate, got {rotary_width(model)}; change head_dim")
    return dtype


def _plans(model: ModelSpec, distinct: int, max_kv_tokens: int, with_head: bool) -> tuple[list[Plan], list[Plan], list[Plan]]:
    """Plan the layers, the leading layers, and what is there once."""
    mixing = attention_plan(model) | cache_plan(model, max_kv_tokens)
    layer = mixing | {"router_norm": norm_of(model), "router": matrix(model.n_experts, model.hidden)}
    if model.shared_intermediate:
        layer |= feed_forward_plan(model, model.shared_intermediate, "shared")
        if model.shared_gate:
            layer["shared_scale"] = matrix(1, model.hidden)
    leading = mixing | {"dense_norm": norm_of(model)} | feed_forward_plan(model, model.dense_intermediate, "dense")
    ends = {"embedding": matrix(model.vocab, model.hidden), "last_norm": norm_of(model)}
    if not model.tie_embeddings:
        ends["head"] = matrix(model.vocab, model.hidden)
    return (
        [layer] * min(distinct, model.n_layers),
        [leading] * min(distinct, model.n_dense_layers),
        [ends] if with_head else [],
    )
