"""Everything of a step but routed experts, as real computations of a model's shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from moesim.live.kernels.host import check_room
from moesim.live.kernels.memory import generator, normal_block, tile
from moesim.live.kernels.plans import Plan, dense_bytes, dense_plans, number_bytes, rotary_width, window_of
from moesim.model import ModelSpec

EPSILON = 1e-6  # of the norms


Weights = dict[str, Tensor]


def make(plan: Plan, dtype: torch.dtype, device: torch.device, source: torch.Generator) -> Weights:
    """Allocate a plan's tensors: products of deviation 1/sqrt(inputs), norms 1, biases 0."""
    tensors = {}
    for name, (shape, inputs) in plan.items():
        tensor = torch.empty(shape, dtype=dtype, device=device)
        if inputs:
            tile(tensor.view(-1), normal_block(1 / math.sqrt(inputs), dtype, source))
        else:
            tensor.fill_(1)
            tensor[1:].zero_()
        tensors[name] = tensor
    return tensors


def normalise(x: Tensor, weights: Tensor) -> Tensor:
    """Apply RMSNorm (weights of one row), or LayerNorm (weights, biases)."""
    if weights.shape[0] == 2:
        return F.layer_norm(x, x.shape[-1:], weights[0], weights[1], EPSILON)
    return F.rms_norm(x, x.shape[-1:], weights[0], EPSILON)


def feed_forward(x: Tensor, tensors: Weights, prefix: str) -> Tensor:
    """Compute a feed-forward block planned by `feed_forward_plan`."""
    if f"{prefix}_gate" not in tensors:
        return F.linear(F.gelu(F.linear(x, tensors[f"{prefix}_up"])), tensors[f"{prefix}_down"])
    inner = F.silu(F.linear(x, tensors[f"{prefix}_gate"]), inplace=True).mul_(F.linear(x, tensors[f"{prefix}_up"]))
    return F.linear(inner, tensors[f"{prefix}_down"])


_ROPE_BASE = 10_000.0
_DTYPES = {2: torch.bfloat16, 4: torch.float32}  # by the bytes of a number


class Step:
    """Where the rows of a forward pass are in their sequences and in the cache, for all layers."""

    def __init__(self, rotary: int, max_rows: int, max_kv_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        self.max_rows, self.max_kv_tokens = max_rows, max_kv_tokens
        self._sequences: tuple[tuple[int, int], ...] | None = None
        self._bands: dict[tuple[int, int, int], Tensor] = {}
        self.spans: list[tuple[int, int, int, int, Tensor | None]] = []
        self._slots = torch.empty(max_rows, dtype=torch.int64, device=device)
        frequencies = _ROPE_BASE ** (-torch.arange(0, rotary, 2, dtype=torch.float32) / rotary)
        angles = torch.arange(max_kv_tokens, dtype=torch.float32)[:, None] * frequencies
        self._table = torch.stack([angles.cos(), angles.sin()]).to(device=device, dtype=dtype)
        self._turns = torch.empty(2, max_rows, rotary // 2, dtype=dtype, device=device)

    def enter(self, sequences: Sequence[tuple[int, int]], n_rows: int) -> None:
        """Prepare for sequences of (new rows, context before); free for those of the last call."""
        key = tuple(sequences)
        if key == self._sequences and n_rows == self.rows:
            return
        rows, tokens = sum(new for new, _ in key), sum(new + before for new, before in key)
        if rows != n_rows or any(new < 1 or before < 0 for new, before in key):
            raise ValueError(f"expected sequences of {n_rows} new rows together, each at least 1, got {list(key)}")
        if rows > self.max_rows or tokens > self.max_kv_tokens:
            raise ValueError(
                f"expected at most {self.max_rows} rows and {self.max_kv_tokens} tokens of KV, got {rows} and {tokens}"
            )
        self._bands.clear()
        positions, slots, spans, masks = [], [], [], dict[tuple[int, int], Tensor]()
        row = slot = 0
        for new, before in key:
            positions.append(torch.arange(before, before + new))
            slots.append(positions[-1] + slot)
            mask = None
            if new > 1 and before:  # causal, but not from the first token on
                mask = masks.get((new, before))
                if mask is None:
                    mask = torch.ones(new, before + new, dtype=torch.bool, device=self._slots.device).tril(before)
                    masks[new, before] = mask
            spans.append((row, row + new, slot, slot + before + new, mask))
            row, slot = row + new, slot + before + new
        self._slots[:rows].copy_(torch.cat(slots))
        torch.index_select(self._table, 1, torch.cat(positions).to(self._slots.device), out=self._turns[:, :rows])
        self._sequences, self.rows, self.spans = key, rows, spans

    rows = 0

    def band(self, new: int, n: int, window: int) -> Tensor:
        """Return which of the last n tokens each of the new ones sees in a window."""
        if (new, n, window) not in self._bands:
            mask = torch.ones(new, n, dtype=torch.bool, device=self._slots.device)
            self._bands[new, n, window] = mask.tril(n - new).triu(n - new - window + 1)
        return self._bands[new, n, window]

    @property
    def slots(self) -> Tensor:
        return self._slots[: self.rows]

    def rotate(self, x: Tensor) -> Tensor:
        """Turn vectors by their rows' positions; shape (rows, heads, rotary)."""
        cos, sin = self._turns[0, : self.rows, None], self._turns[1, : self.rows, None]
        a, b = x.chunk(2, dim=-1)
        return torch.cat((torch.addcmul(a * cos, b, sin, value=-1), torch.addcmul(b * cos, a, sin)), dim=-1)


def attention(model: ModelSpec, w: Weights, step: Step, x: Tensor, window: int | None = None) -> Tensor:
    """Compute one layer's norm, attention and residual; write the new rows into the cache."""
    normed = normalise(x, w["attention_norm"])
    mixed = (_latent if model.kv_lora_rank else _grouped)(model, w, step, normed, window)
    return F.linear(mixed, w["out"]).add_(x)


def _grouped(model: ModelSpec, w: Weights, step: Step, x: Tensor, window: int | None) -> Tensor:
    rows, heads, kv_heads, width = x.shape[0], model.n_heads, model.n_kv_heads, model.head_dim
    q, k, v = torch.split(F.linear(x, w["qkv"]), [heads * width, kv_heads * width, kv_heads * width], dim=1)
    if model.qk_norm == "full":
        q, k = normalise(q, w["q_norm"]), normalise(k, w["k_norm"])
    q, k = q.reshape(rows, heads, width), k.reshape(rows, kv_heads, width)
    if model.qk_norm == "head":
        q, k = normalise(q, w["q_norm"]), normalise(k, w["k_norm"])
    q, k = step.rotate(q), step.rotate(k)
    keys, values = w["kv"]
    keys.index_copy_(1, step.slots, k.transpose(0, 1))
    values.index_copy_(1, step.slots, v.view(rows, kv_heads, width).transpose(0, 1))
    q = q.view(rows, kv_heads, heads // kv_heads, width).permute(1, 2, 0, 3)
    mixed = _attend(step, q, keys, values, 1 / math.sqrt(width), window)
    return mixed.permute(2, 0, 1, 3).reshape(rows, heads * width)


def _latent(model: ModelSpec, w: Weights, step: Step, x: Tensor, window: int | None) -> Tensor:
    # Absorbed: the keys' up-projection is applied to the queries, the values' to what attention returns, so that the
    # cache is read as it is, once for all heads.
    rows, heads, nope, latent = x.shape[0], model.n_heads, model.nope_head_dim, model.kv_lora_rank
    if model.q_lora_rank:
        q = F.linear(normalise(F.linear(x, w["q_down"]), w["q_norm"]), w["q_up"]).view(rows, heads, -1)
    else:
        q = F.linear(x, w["q_up"]).view(rows, heads, -1)
    q_latent = torch.bmm(q[..., :nope].transpose(0, 1), w["k_up"])
    q = torch.cat((q_latent, step.rotate(q[..., nope:]).transpose(0, 1)), dim=-1)
    down = F.linear(x, w["kv_down"])
    new = torch.cat((normalise(down[:, :latent], w["kv_norm"]), step.rotate(down[:, None, latent:])[:, 0]), dim=-1)
    cache = w["kv"][0]
    cache.index_copy_(1, step.slots, new[None])
    # The rotary part goes along as values and is cut off: fused kernels want keys and values of one width.
    mixed = _attend(step, q[None], cache, cache, 1 / math.sqrt(nope + model.rope_head_dim), window)[0, ..., :latent]
    return torch.bmm(mixed, w["v_up"]).transpose(0, 1).reshape(rows, heads * model.v_head_dim)


def _attend(step: Step, q: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None) -> Tensor:
    """Attend within each sequence: q (KV heads, group, rows, width), KV (heads, tokens, width)."""
    # The cache has room for all tokens; of a window only what it sees is read.
    parts = []
    kv_heads, group, _, width = q.shape
    for row, row_end, first, slot_end, mask in step.spans:
        new = row_end - row
        slot = first if window is None else max(first, slot_end - new - window + 1)
        k, v = keys[:, None, slot:slot_end], values[:, None, slot:slot_end]
        if new == 1:  # one row sees everything: the heads of a group are rows, and the cache is read once for all
            one = q[:, :, row].reshape(kv_heads, 1, group, width)
            parts.append(F.scaled_dot_product_attention(one, k, v, scale=scale).transpose(1, 2))
            continue
        n = slot_end - slot
        if window is not None and slot_end - first > window:
            mask = step.band(new, n, window)
        k, v = k.expand(kv_heads, group, n, width), v.expand(kv_heads, group, n, width)  # a view: nothing is repeated
        some = q[:, :, row:row_end]
        parts.append(F.scaled_dot_product_attention(some, k, v, attn_mask=mask, is_causal=mask is None, scale=scale))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


class DenseKernel:
    """Attention, routers, shared experts, leading layers, embedding, head; random weights."""

    # Left out are attention sinks and biases, but those of LayerNorm. Latent attention is absorbed.
    # Only one thread may call `attention` and `leading`, which write the cache.

    n_bytes: int  # what is allocated for as long as this lives. Intermediate results come on top

    def __init__(
        self, model: ModelSpec, device: str = "cpu", *, distinct_layers: int, max_rows: int, max_kv_tokens: int,
        with_head: bool = True, seed: int = 0,
    ) -> None:  # fmt: skip
        # The type is that of weights, KV cache and hidden states: bfloat16 for 16 bits, float32 for 32.
        self.model, self.device, self.dtype = model, torch.device(device), _DTYPES[number_bytes(model)]
        self.n_bytes = dense_bytes(
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

    def attention(self, layer: int, x: Tensor, sequences: Sequence[tuple[int, int]]) -> Tensor:
        """Norm, attention and residual of one layer; the rows' keys and values go into its cache."""
        self._step.enter(sequences, x.shape[0])
        return attention(self.model, self._layer(layer), self._step, x, window_of(self.model.groups[layer][0]))

    def router(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
        w = self._layer(layer)
        normed = normalise(x, w["router_norm"])
        scores = torch.softmax(F.linear(normed, w["router"]), dim=-1, dtype=torch.float32)
        return normed, torch.topk(scores, self.model.top_k).indices.cpu()

    def predict(self, layer: int, x: Tensor) -> Tensor:
        """Product with a layer's router and its top-k, as of predictors that reuse gates."""
        return torch.topk(F.linear(x, self._layer(layer)["router"]), self.model.top_k).indices.cpu()

    def shared(self, layer: int, x: Tensor) -> Tensor:
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
        x = attention(self.model, w, self._step, x, window_of(self.model.leading[layer]))
        return feed_forward(normalise(x, w["dense_norm"]), w, "dense").add_(x)

    def embed(self, ids: Tensor) -> Tensor:
        return F.embedding(ids.to(self.device), self._end("embedding"))

    def head(self, x: Tensor) -> Tensor:
        """Last norm, product with the vocabulary, and the likeliest token of each row."""
        table = self._end("embedding" if self.model.tie_embeddings else "head")
        return F.linear(normalise(x, self._end("last_norm")), table).argmax(dim=-1).cpu()

    def _layer(self, layer: int) -> Weights:
        if not 0 <= layer < self.model.n_layers:
            raise IndexError(f"layer {layer} of model '{self.model.name}': it has layers 0 to {self.model.n_layers - 1}")
        return self._layers[layer % len(self._layers)]

    def _end(self, name: str) -> Tensor:
        if not self._ends:
            raise ValueError("this kernel was made without embedding and head (with_head)")
        return self._ends[0][name]
