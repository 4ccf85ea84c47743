"""Weights of a Mixture-of-Experts model: shapes in, parameters and bytes out."""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, fields
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any

from moesim.core.table import Facts
from moesim.core.units import format_bytes
from moesim.errors import ModelError
from moesim.model.check import find_problem

MXFP4_BITS = 4.25  # bits per weight of MXFP4: 4, and a scale of 8 for each block of 32 (OCP Microscaling Formats, v1.0)
SHADOW_BITS = {"int8": 8, "nf4": 4, "int4": 4, "fp16": 16, "bf16": 16}
"""Bits per weight of a quantised copy that predicts, by its name."""


@lru_cache(maxsize=4096)  # asked for each layer of each run, and few answers differ
def bits_to_bytes(count: int, bits: float) -> int:
    """Bytes of ``count`` numbers of ``bits`` bits each, rounded up once.

    The decimal form of ``bits`` counts: 4.85 means 485/100, not the nearest binary fraction.

    >>> bits_to_bytes(176_160_768, 16), bits_to_bytes(32, 4.25), bits_to_bytes(100, 4.8)
    (352321536, 17, 60)
    """
    return math.ceil(count * Fraction(str(bits)) / 8)


@dataclass(frozen=True)
class ModelSpec(Facts):
    """Shapes and precisions of one model.

    Attributes
    ----------
    name : str
        Name in results.
    n_layers : int
        Layers with experts, indexed from 0.
    n_experts, top_k : int
        Routed experts of a layer, and how many of them serve a token.
    hidden, expert_intermediate : int
        Width of the residual stream, and of one routed expert.
    n_heads, n_kv_heads, head_dim : int
        Query heads, key/value heads, and width of a query head (for latent attention
        ``nope_head_dim + rope_head_dim``).
    vocab : int
        Rows of the embedding.
    n_dense_layers, dense_intermediate : int
        Leading layers without experts, and the width of their feed-forward part (0 if there are none).
    n_shared, shared_intermediate : int
        Shared experts of a layer, and the width of all of them together (0 if there are none).
    q_lora_rank, kv_lora_rank, rope_head_dim, nope_head_dim, v_head_dim : int
        Latent attention if ``kv_lora_rank`` is positive; all 0 for grouped-query attention. ``q_lora_rank``
        may be 0 in both.
    tie_embeddings : bool
        The LM head is the embedding matrix.
    expert_bits, other_bits : float, bits per weight
        Precision of the routed experts' matrices, and of everything else (biases of experts included).
    kv_bits, act_bits : float, bits per number
        Precision of the KV cache, and of activations that cross links.
    n_mats : int
        Matrices of an expert: 3 (gate, up, down) or 2 (up, down).
    expert_bias, qkv_bias, out_bias, router_bias, head_bias, norm_bias : bool
        Which biases exist; ``norm_bias`` means LayerNorm instead of RMSNorm.
    qk_norm : {"none", "head", "full"}
        Norm of queries and keys: none, one vector of ``head_dim`` each, or over all heads.
    shared_gate : bool
        The shared experts' output is scaled by a learned gate (``hidden`` weights).
    attention_sinks : bool
        One learned sink per query head.
    low_bits : tuple of float, bits per weight
        Fewer bits at which every routed expert exists besides, in falling order; an experiment writes
        ``expert_bits: [4, 2]``. Only policies that ask for them use them.
    units_per_expert : int
        1: an expert is copied and runs whole. ``n_mats``: each of its matrices is a unit of its own, and ``n_experts``
        and ``top_k`` count units; a model that is written in YAML still gives experts.
    expert_bytes_by_layer : tuple of int or None, bytes, shape (n_layers,)
        Bytes of one expert for each layer where quantisation is mixed; None: from ``expert_bits``.
    source : str
        Where the figures come from.
    labels : tuple of str
        What differs from the source, such as ``"top_k=6"``; results carry them.

    Raises
    ------
    ModelError
        If a field is impossible; the message names the key, what was expected, and what it got.

    Notes
    -----
    A sliding window is ignored: KV is reserved at the full length, and attention is costed over it.
    Byte counts round up once per quantity. The parameter count is that of the published checkpoint.
    """

    name: str
    n_layers: int
    n_experts: int
    top_k: int
    hidden: int
    expert_intermediate: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab: int
    n_dense_layers: int = 0
    dense_intermediate: int = 0
    n_shared: int = 0
    shared_intermediate: int = 0
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    rope_head_dim: int = 0
    nope_head_dim: int = 0
    v_head_dim: int = 0
    tie_embeddings: bool = False
    expert_bits: float = 16
    other_bits: float = 16
    kv_bits: float = 16
    act_bits: float = 16
    n_mats: int = 3
    expert_bias: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    router_bias: bool = False
    head_bias: bool = False
    norm_bias: bool = False
    qk_norm: str = "none"
    shared_gate: bool = False
    attention_sinks: bool = False
    expert_bytes_by_layer: tuple[int, ...] | None = None
    low_bits: tuple[float, ...] = ()
    units_per_expert: int = 1
    source: str = ""
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        problem = find_problem({f.name: getattr(self, f.name) for f in fields(self)})
        if problem is not None:
            raise ModelError(f"model '{self.name}': {problem}")

    def facts(self) -> dict[str, Any]:
        return {
            "name": self.name, "layers": self.n_layers + self.n_dense_layers, "MoE layers": self.n_layers,
            "experts": self.n_experts, "top_k": self.top_k, "shared": self.n_shared,
            "bytes per expert": format_bytes(self.expert_bytes(0)),
            "all experts": format_bytes(sum(self.expert_bytes(i) for i in range(self.n_layers)) * self.n_experts),
            "the rest": format_bytes(self.non_expert_bytes), "source": self.source,
        }  # fmt: skip

    # ---- routed experts

    @property
    def expert_params(self) -> int:
        """Parameters of one routed expert, biases included."""
        return self._expert_matrices + self._expert_biases

    @property
    def experts_params_total(self) -> int:
        """Parameters of all routed experts of all layers."""
        return self.n_layers * self.n_experts * self.expert_params

    @property
    def widths(self) -> tuple[float, ...]:
        """Bits at which every routed expert exists, the full width first."""
        return (self.expert_bits, *self.low_bits)

    def expert_bytes(self, layer: int = 0, bits: float | None = None) -> int:
        """Bytes of one routed expert of a layer, at the full width or another."""
        self._check_layer(layer)
        if bits is None or bits == self.expert_bits:
            return self._whole_bytes if self.expert_bytes_by_layer is None else self.expert_bytes_by_layer[layer]
        return self._bytes_at(bits)

    @cached_property
    def experts_bytes_total(self) -> int:
        """Bytes of all routed experts of all layers, at all widths."""
        return self.n_experts * sum(self.expert_bytes(layer, bits) for bits in self.widths for layer in range(self.n_layers))

    @cached_property
    def _whole_bytes(self) -> int:
        return self._bytes_at(self.expert_bits)

    def _bytes_at(self, bits: float) -> int:
        return bits_to_bytes(self._expert_matrices, bits) + self._other_bytes(self._expert_biases)

    @cached_property
    def _expert_matrices(self) -> int:
        return self.n_mats * self.hidden * self.expert_intermediate // self.units_per_expert

    @cached_property
    def _expert_biases(self) -> int:
        return (self.n_mats - 1) * self.expert_intermediate + self.hidden if self.expert_bias else 0

    # ---- the rest of a layer

    @property
    def attention_params(self) -> int:
        """Parameters of one layer's attention: projections, biases, query and key norms, sinks."""
        params = self._latent_params if self.kv_lora_rank else self._grouped_params
        return params + self.out_bias * self.hidden + self.attention_sinks * self.n_heads

    @property
    def _grouped_params(self) -> int:
        q, kv = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        params = self.hidden * (2 * q + 2 * kv) + self.qkv_bias * (q + 2 * kv)
        return params + {"none": 0, "head": 2 * self.head_dim, "full": q + kv}[self.qk_norm]

    @property
    def _latent_params(self) -> int:
        q_width = self.n_heads * (self.nope_head_dim + self.rope_head_dim)
        down = self.kv_lora_rank + self.rope_head_dim
        params = self.hidden * down + self.kv_lora_rank  # down-projection, norm of the latent
        params += self.kv_lora_rank * self.n_heads * (self.nope_head_dim + self.v_head_dim)
        params += self.n_heads * self.v_head_dim * self.hidden
        if self.q_lora_rank:
            params += self.q_lora_rank * (self.hidden + 1 + q_width)
        else:
            params += self.hidden * q_width
        return params + self.qkv_bias * (self.q_lora_rank + down)

    @cached_property
    def attention_bytes(self) -> int:
        """Bytes of one layer's attention weights."""
        return self._other_bytes(self.attention_params)

    @cached_property
    def dense_params(self) -> int:
        """Parameters of a MoE layer outside attention and experts: router and the two norms."""
        return self.n_experts // self.units_per_expert * (self.hidden + self.router_bias) + 2 * self._norm_params

    def dense_bytes(self, layer: int = 0) -> int:
        """Bytes of a MoE layer outside attention and experts: router and the two norms."""
        self._check_layer(layer)
        return self._other_bytes(self.dense_params)

    @property
    def shared_params(self) -> int:
        """Parameters of all shared experts of one layer, with their gate; 0 if there are none."""
        return self.n_mats * self.hidden * self.shared_intermediate + self.shared_gate * self.hidden

    @cached_property
    def shared_bytes(self) -> int:
        """Bytes of all shared experts of one layer; 0 if there are none."""
        return self._other_bytes(self.shared_params)

    # ---- once per model

    @property
    def leading_params(self) -> int:
        """Parameters of all leading dense layers, attention and norms included."""
        mlp = self.n_mats * self.hidden * self.dense_intermediate
        return self.n_dense_layers * (self.attention_params + mlp + 2 * self._norm_params)

    @cached_property
    def leading_bytes(self) -> int:
        """Bytes of all leading dense layers together."""
        return self._other_bytes(self.leading_params)

    @property
    def embedding_params(self) -> int:
        """Parameters of the embedding."""
        return self.vocab * self.hidden

    @cached_property
    def embedding_bytes(self) -> int:
        """Bytes of the embedding."""
        return self._other_bytes(self.embedding_params)

    @property
    def head_params(self) -> int:
        """Parameters that the LM head reads: final norm and output matrix."""
        return self.vocab * (self.hidden + self.head_bias) + self._norm_params

    @cached_property
    def head_bytes(self) -> int:
        """Bytes that the LM head reads; `non_expert_bytes` counts a tied matrix once only."""
        return self._other_bytes(self.head_params)

    @property
    def non_expert_bytes(self) -> int:
        """Bytes of everything but the routed experts."""
        per_layer = self.attention_bytes + self.dense_bytes() + self.shared_bytes
        tied = self.embedding_bytes if self.tie_embeddings else 0
        return self.n_layers * per_layer + self.leading_bytes + self.embedding_bytes + self.head_bytes - tied

    @property
    def total_params(self) -> int:
        """All parameters, a tied matrix counted once."""
        per_layer = self.attention_params + self.dense_params + self.shared_params
        tied = self.embedding_params if self.tie_embeddings else 0
        rest = self.leading_params + self.embedding_params + self.head_params - tied
        return self.experts_params_total + self.n_layers * per_layer + rest

    @property
    def active_params(self) -> int:
        """Parameters but for the experts that a token does not use; the whole embedding is counted.

        Publishers differ: Mixtral's and Qwen3's figures count the embedding, those of gpt-oss leave it out.
        """
        return self.total_params - self.n_layers * (self.n_experts - self.top_k) * self.expert_params

    # ---- per token

    @cached_property
    def kv_bytes_per_token_per_layer(self) -> int:
        """Bytes of KV of one token in one layer, or of the latent and the rotary key."""
        if self.kv_lora_rank:
            return bits_to_bytes(self.kv_lora_rank + self.rope_head_dim, self.kv_bits)
        return bits_to_bytes(2 * self.n_kv_heads * self.head_dim, self.kv_bits)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV that one token leaves in all layers, leading dense ones included."""
        return (self.n_layers + self.n_dense_layers) * self.kv_bytes_per_token_per_layer

    @property
    def core_widths(self) -> tuple[int, int]:
        """Numbers of a row that attention's core reads (query, new key and value) and returns."""
        if self.kv_lora_rank:
            query = self.n_heads * (self.nope_head_dim + self.rope_head_dim)
            return query + self.kv_lora_rank + self.rope_head_dim, self.n_heads * self.v_head_dim
        query = self.n_heads * self.head_dim
        return query + 2 * self.n_kv_heads * self.head_dim, query

    def activation_bytes(self, n_rows: int) -> int:
        """Bytes of ``n_rows`` hidden states."""
        return bits_to_bytes(n_rows * self.hidden, self.act_bits)

    # ---- helpers

    def figures(self) -> dict[str, object]:
        """Return all fields by name; later ones only where they are used, so that fingerprints stay."""
        later = {"low_bits": (), "units_per_expert": 1}
        values = {name: getattr(self, name) for name in FIELDS}
        return {key: value for key, value in values.items() if key not in later or value != later[key]}

    @property
    def _norm_params(self) -> int:
        return self.hidden * (1 + self.norm_bias)

    def _other_bytes(self, params: int) -> int:
        return bits_to_bytes(params, self.other_bits)

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < self.n_layers:
            raise IndexError(f"layer {layer} of model '{self.name}': it has layers 0 to {self.n_layers - 1}")


FIELDS = tuple(f.name for f in fields(ModelSpec))  # names of all fields, in order

DEFAULTS = {f.name: f.default for f in fields(ModelSpec) if f.default is not MISSING}
"""Default values of the fields that have one."""
