"""Weights of a Mixture-of-Experts model: shapes in, parameters and bytes out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from moesim.core.table import Facts
from moesim.core.units import ceil_div, format_bytes
from moesim.errors import ModelError
from moesim.model.check import find_problem
from moesim.model.parts import Block, Mixer, Shape, Store, bits_to_bytes

MXFP4_BITS = 4.25  # bits per weight of MXFP4: 4, and a scale of 8 for each block of 32 (OCP Microscaling Formats, v1.0)
SHADOW_BITS = {"int8": 8, "nf4": 4, "int4": 4, "fp16": 16, "bf16": 16}
"""Bits per weight of a quantised copy that predicts, by its name."""


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
    shape : Shape or None
        Layers one by one, of a model whose layers differ: then all sizes come from it, and the widths of attention above are 1.
    notes : tuple of str
        What was left out, assumed or not understood where it was read.
    labels : tuple of str
        What differs from the source, such as ``"top_k=6"``; results carry them.

    Raises
    ------
    ModelError
        If a field is impossible; the message names the key, what was expected, and what it got.

    Notes
    -----
    Without a shape there is no sliding window: KV is reserved at the full length, and attention is costed over it.
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
    shape: Shape | None = None
    notes: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        problem = find_problem({f.name: getattr(self, f.name) for f in fields(self)})
        if problem is not None:
            raise ModelError(f"model '{self.name}': {problem}")

    def facts(self) -> dict[str, Any]:
        """State shapes and sizes."""
        return {
            "name": self.name, "layers": len(self.blocks), "MoE layers": self.n_layers, "experts": self.n_experts,
            "top_k": self.top_k, "shared": self.n_shared, "bytes per expert": format_bytes(self.expert_bytes(0)),
            "all experts": format_bytes(sum(self.expert_bytes(i) for i in range(self.n_layers)) * self.n_experts),
            "the rest": format_bytes(self.non_expert_bytes), "source": self.source,
        }  # fmt: skip

    # ---- layers

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """Layers one by one."""
        if self.shape is not None:
            return self.shape.blocks
        mixer, mlp = self._mixer, self.n_mats * self.hidden * self.dense_intermediate
        attention, norms = self._other_bytes(mixer.params), 2 * self._norm_params
        dense = Block(mixer, False, mlp, norms, attention, self._other_bytes(mlp), self._other_bytes(norms))
        router = self._other_bytes(self.router_params + norms)
        return (dense,) * self.n_dense_layers + tuple(
            Block(mixer, True, 0, norms, attention, 0, router, self._other_bytes(self.shared_params), self.expert_bytes(layer))
            for layer in range(self.n_layers)
        )

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """For each layer with experts: its number among all layers, as engines count them."""
        return tuple(number for number, block in enumerate(self.blocks) if block.routed)

    @cached_property
    def leading(self) -> tuple[Block, ...]:
        """Dense layers before the first with experts."""
        first = next(number for number, block in enumerate(self.blocks) if block.routed)
        whole = (number for number in range(first, 0, -1) if self.blocks[number - 1].dense)
        return self.blocks[: next(whole, 0)]

    @cached_property
    def groups(self) -> tuple[tuple[Block, ...], ...]:
        """For each layer with experts: it and those since the last one; the last has the rest, too."""
        found: list[list[Block]] = [[]]
        for block in self.blocks[len(self.leading) :]:
            found[-1].append(block)
            if block.routed:
                found.append([])
        after = found.pop()
        return (*map(tuple, found[:-1]), *((*last, *after) for last in found[-1:]))

    @cached_property
    def alike(self) -> tuple[int, ...]:
        """For each layer with experts: the first that differs at most in its experts' bytes."""
        first: dict[tuple[Block, ...], int] = {}
        groups = (tuple(replace(block, expert_bytes=0) for block in group) for group in self.groups)
        return tuple(first.setdefault(group, layer) for layer, group in enumerate(groups))

    def _blocks_of(self, layer: int) -> tuple[Block, ...]:
        """Return the blocks of a layer with experts, or all leading ones for -1."""
        if layer < 0:
            return self.leading
        self._check_layer(layer)
        return self.groups[layer]

    @cached_property
    def _mixer(self) -> Mixer:
        """Attention of a model whose layers are alike."""
        kept, read = self.kv_lora_rank + self.rope_head_dim, self.nope_head_dim + self.rope_head_dim + self.v_head_dim
        params = self._latent_params if self.kv_lora_rank else self._grouped_params
        params += self.out_bias * self.hidden + self.attention_sinks * self.n_heads
        if self.kv_lora_rank:
            crosses = self.n_heads * (self.nope_head_dim + self.rope_head_dim) + kept, self.n_heads * self.v_head_dim
            return Mixer("latent", (("all", params),), (Store(kept, 2 * self.n_heads * read),), crosses=crosses)
        store = Store(2 * self.n_kv_heads * self.head_dim, 4 * self.n_heads * self.head_dim)
        query = self.n_heads * self.head_dim
        return Mixer("grouped", (("all", params),), (store,), crosses=(query + 2 * self.n_kv_heads * self.head_dim, query))

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
        if self.shape is not None:
            return self.shape.mats * self.shape.expert_input * self.shape.expert_width
        return self.n_mats * self.hidden * self.expert_intermediate // self.units_per_expert

    @cached_property
    def _expert_biases(self) -> int:
        if self.shape is not None:
            return self.shape.expert_params - self._expert_matrices
        return (self.n_mats - 1) * self.expert_intermediate + self.hidden if self.expert_bias else 0

    # ---- the rest of a layer

    def part_bytes(self, part: str, layer: int) -> int:
        """Bytes of a layer's part: attention (with adjacent dense parts), dense (router), shared.

        Layer -1 has the parts leading, embedding and head.
        """
        if part == "attention":
            return sum(block.mixer_bytes + block.dense_bytes for block in self._blocks_of(layer))
        if part == "dense":
            return sum(block.router_bytes for block in self._blocks_of(layer))
        if part == "shared":
            return sum(block.shared_bytes for block in self._blocks_of(layer))
        return {"leading": self.leading_bytes, "embedding": self.embedding_bytes, "head": self.head_bytes}[part]

    def _mixing_params(self, layer: int) -> int:
        return sum((block.mixer.params if block.mixer else 0) + block.dense for block in self._blocks_of(layer))

    @property
    def attention_params(self) -> int:
        """Parameters of attention in the first layer with experts."""
        return self._mixing_params(0)

    @property
    def attention_bytes(self) -> int:
        """Bytes of the same."""
        return self.part_bytes("attention", 0)

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
    def router_params(self) -> int:
        """Parameters of a router, with projections around experts."""
        if self.shape is not None:
            return self.shape.router_params
        return self.n_experts // self.units_per_expert * (self.hidden + self.router_bias)

    def around_params(self, layer: int) -> int:
        """Parameters of a layer outside attention and experts: router and norms."""
        return self.router_params + sum(block.norms for block in self._blocks_of(layer))

    @property
    def dense_params(self) -> int:
        """Parameters of the first layer with experts beyond attention and experts: router, norms."""
        return self.around_params(0)

    def dense_bytes(self, layer: int = 0) -> int:
        """Bytes of a layer outside attention and experts: router and norms."""
        self._check_layer(layer)
        return self.part_bytes("dense", layer)

    @property
    def shared_params(self) -> int:
        """Parameters of all shared experts of one layer, with their gate; 0 if there are none."""
        if self.shape is not None:
            return self.shape.shared_params
        return self.n_mats * self.hidden * self.shared_intermediate + self.shared_gate * self.hidden

    @property
    def shared_bytes(self) -> int:
        """Bytes of all shared experts of the first layer with experts; 0 if there are none."""
        return self.part_bytes("shared", 0)

    # ---- once per model

    @property
    def leading_params(self) -> int:
        """Parameters of all leading dense layers, attention and norms included."""
        return sum((block.mixer.params if block.mixer else 0) + block.dense + block.norms for block in self.leading)

    @cached_property
    def leading_bytes(self) -> int:
        """Bytes of all leading dense layers together."""
        if self.shape is None:
            return self._other_bytes(self.leading_params)
        return sum(block.mixer_bytes + block.dense_bytes + block.router_bytes for block in self.leading)

    @property
    def embedding_params(self) -> int:
        """Parameters of the embedding, and of tables of which a token reads a row."""
        return self.vocab * self.hidden + (self.shape.lookup_params if self.shape else 0)

    @cached_property
    def embedding_bytes(self) -> int:
        """Bytes of the same."""
        if self.shape is not None:
            return self.shape.embedding_bytes + self.shape.lookup_bytes
        return self._other_bytes(self.embedding_params)

    @property
    def head_params(self) -> int:
        """Parameters that the LM head reads: final norm and output matrix."""
        if self.shape is not None:
            return self.vocab * self.hidden + self.shape.head_params
        return self.vocab * (self.hidden + self.head_bias) + self._norm_params

    @cached_property
    def head_bytes(self) -> int:
        """Bytes that the LM head reads; `non_expert_bytes` counts a tied matrix once only."""
        return self._other_bytes(self.head_params) if self.shape is None else self.shape.head_bytes

    @property
    def non_expert_bytes(self) -> int:
        """Bytes of everything but the routed experts."""
        inner = sum(self.part_bytes(part, i) for part in ("attention", "dense", "shared") for i in range(self.n_layers))
        tied = self.embedding_bytes if self.tie_embeddings else 0
        return inner + self.leading_bytes + self.embedding_bytes + self.head_bytes - tied

    @property
    def total_params(self) -> int:
        """All parameters, a tied matrix counted once."""
        layers = range(self.n_layers)
        inner = sum(self._mixing_params(i) + self.around_params(i) + self.shared_params for i in layers)
        tied = self.vocab * self.hidden if self.tie_embeddings else 0
        return self.experts_params_total + inner + self.leading_params + self.embedding_params + self.head_params - tied

    @property
    def active_params(self) -> int:
        """Parameters but for the experts that a token does not use; the whole embedding is counted.

        Publishers differ: Mixtral's and Qwen3's figures count the embedding, those of gpt-oss leave it out.
        """
        return self.total_params - self.n_layers * (self.n_experts - self.top_k) * self.expert_params

    @property
    def n_bytes(self) -> int:
        """Bytes of all weights."""
        return self.experts_bytes_total + self.non_expert_bytes

    # ---- per token

    def kv_bytes(self, layer: int, n_tokens: int, n_requests: int = 1) -> int:
        """Bytes that a layer (-1: all leading) keeps of requests of so many tokens, with states."""
        mixers = [block.mixer for block in self._blocks_of(layer) if block.mixer]
        each = ceil_div(n_tokens, max(n_requests, 1))
        total = 0
        for store in (store for mixer in mixers for store in mixer.own):
            plain = store.kept is None and store.per == 1
            rows = n_tokens if plain else n_requests * store.rows_kept(each)
            total += rows * bits_to_bytes(store.numbers, self.kv_bits)
        return total + n_requests * sum(mixer.state_bytes for mixer in mixers)

    def new_kv_bytes(self, layer: int, n_tokens: int) -> int:
        """Bytes that so many new tokens add to what a layer keeps, if nothing falls out of a window."""
        mixers = [block.mixer for block in self._blocks_of(layer) if block.mixer]
        stores = (store for mixer in mixers for store in mixer.own)
        return sum(ceil_div(n_tokens * bits_to_bytes(store.numbers, self.kv_bits), store.per) for store in stores)

    def all_kv_bytes(self, n_tokens: int, n_requests: int = 1) -> int:
        """Bytes that all layers keep of requests that have so many tokens together."""
        return sum(self.kv_bytes(layer, n_tokens, n_requests) for layer in range(-1, self.n_layers))

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that all layers, leading ones too, keep of a token where nothing is bounded."""
        stores = (store for block in self.blocks if block.mixer for store in block.mixer.own if store.kept is None)
        return sum(ceil_div(bits_to_bytes(store.numbers, self.kv_bits), store.per) for store in stores)

    def token_bytes(self, n_rows: int, n_tokens: int) -> int:
        """Bytes read by a decoding step of sequences after so many tokens; independent experts."""
        none = self.shape.zero_experts if self.shape else 0
        share = 1 - (1 - self.top_k / (self.n_experts + none)) ** n_rows
        experts = self.n_experts * sum(self.expert_bytes(layer) for layer in range(self.n_layers))
        fixed = self.non_expert_bytes - (0 if self.tie_embeddings else self.embedding_bytes)
        mixers = [block.mixer for block in self.blocks if block.mixer]
        kept = sum(bits_to_bytes(s.numbers, self.kv_bits) * s.rows_read(n_tokens) for mixer in mixers for s in mixer.stores)
        return fixed + round(share * experts) + n_rows * (kept + 2 * sum(mixer.state_bytes for mixer in mixers))

    def core_widths(self, layer: int = 0) -> tuple[int, int]:
        """Numbers of a row that attention's core reads (query, new key and value) and returns."""
        crosses = [block.mixer.crosses for block in self._blocks_of(layer) if block.mixer]
        return sum(there for there, _ in crosses), sum(back for _, back in crosses)

    def activation_bytes(self, n_rows: int) -> int:
        """Bytes of ``n_rows`` hidden states."""
        return bits_to_bytes(n_rows * self.hidden, self.act_bits)

    # ---- helpers

    def figures(self) -> dict[str, object]:
        """Return all fields by name; later ones only where they are used, so that fingerprints stay."""
        later: dict[str, Any] = {"low_bits": (), "units_per_expert": 1, "shape": None}
        values = {name: getattr(self, name) for name in FIELDS}
        kept = {key: value for key, value in values.items() if key not in later or value != later[key]}
        return kept | ({"shape": self.shape.to_dict()} if self.shape else {})

    @property
    def _norm_params(self) -> int:
        return self.hidden * (1 + self.norm_bias)

    def _other_bytes(self, params: int) -> int:
        return bits_to_bytes(params, self.other_bits)

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < self.n_layers:
            raise IndexError(f"layer {layer} of model '{self.name}': it has layers 0 to {self.n_layers - 1}")


FIELDS = tuple(f.name for f in fields(ModelSpec) if f.name != "notes")  # names of all fields, in order

DEFAULTS = {f.name: f.default for f in fields(ModelSpec) if f.name in FIELDS and f.default is not MISSING}
"""Default values of the fields that have one."""


def of_shape(shape: Shape, fields: Mapping[str, Any]) -> ModelSpec:
    """Return the specification of a model that was read layer by layer."""
    # `fields` are those that layers lack: precisions, and attention's widths if alike in all layers. If
    # they have all of it, the shape is left out: the model is as one written by its fields.
    routed = [block for block in shape.blocks if block.routed]
    first = next(number for number, block in enumerate(shape.blocks) if block.routed)
    width = shape.blocks[first - 1].dense // (shape.mats * shape.hidden) if first else 0
    values: dict[str, Any] = {"n_heads": 1, "n_kv_heads": 1, "head_dim": 1} | dict(fields) | {
        "name": shape.name, "n_layers": len(routed), "n_experts": shape.n_experts, "top_k": shape.top_k, "hidden": shape.hidden,
        "expert_intermediate": shape.expert_width, "vocab": shape.vocab, "n_dense_layers": first if width else 0,
        "dense_intermediate": width, "n_shared": shape.n_shared, "tie_embeddings": shape.tied, "kv_bits": shape.kv_bits,
        "shared_intermediate": shape.shared_params // (shape.mats * shape.hidden), "n_mats": shape.mats, "source": shape.source,
        "notes": shape.notes,
    }  # fmt: skip
    found = replace(
        ModelSpec(**values), shape=shape, expert_bytes_by_layer=tuple(block.expert_bytes for block in routed),
        expert_bits=round(sum(block.expert_bytes for block in routed) * 8 / (len(routed) * shape.expert_params), 4),
    )  # fmt: skip
    if bits := fields.get("expert_bits"):
        matrices = shape.mats * shape.expert_input * shape.expert_width
        each = bits_to_bytes(matrices, bits) + bits_to_bytes(shape.expert_params - matrices, fields["other_bits"])
        if {block.expert_bytes for block in routed} == {each}:
            found = replace(found, expert_bits=bits, expert_bytes_by_layer=None)
    found = replace(found, other_bits=round(found.non_expert_bytes * 8 / (found.total_params - found.experts_params_total), 4))
    if "n_heads" in fields:
        plain = ModelSpec(**values)
        same = plain.total_params == found.total_params and plain.n_bytes == found.n_bytes
        if same and plain.leading_params == found.leading_params and plain.all_kv_bytes(2**20) == found.all_kv_bytes(2**20):
            return plain
    return found
