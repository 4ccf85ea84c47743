"""Shapes, planned tensors and bytes of kernels, without PyTorch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

from moesim.errors import InputError
from moesim.model import ModelSpec
from moesim.model.parts import Block


class KernelError(InputError):
    """A model or a precision that cannot be computed for real on this machine."""


PAGE: Final = 4096  # bytes to which every buffer is aligned, so that files can be read straight into it
_BYTES: Final = {16: 2, 32: 4}  # of a number, by the bits of a model's other weights


class Planned(NamedTuple):
    """A tensor before it exists: its shape, and the inputs of a product with it (0: a norm)."""

    shape: tuple[int, ...]
    inputs: int


Plan = dict[str, Planned]


@dataclass(frozen=True)
class ExpertShape:
    """Shape on which a routed expert's computation depends."""

    # hidden, intermediate: widths of the residual stream and of the expert
    hidden: int
    intermediate: int
    bits: float  # of one weight: 4, 8, 16 or 32
    n_mats: int  # 3 (gate, up, down) or 2 (up, down)
    n_bytes: int  # of one expert, `ModelSpec.expert_bytes()`

    @classmethod
    def of(cls, model: ModelSpec) -> ExpertShape:
        if model.expert_bytes_by_layer is not None:
            raise KernelError(
                f"model '{model.name}': expected one precision for the experts of all layers, got expert_bytes_by_layer;"
                " leave it out to measure or replay"
            )
        if kinds := _not_computed(model):
            raise KernelError(
                f"model '{model.name}': expected layers of plain attention and experts to measure or replay, got {kinds}; "
                "choose another model"
            )
        if model.units_per_expert > 1:
            raise KernelError(
                f"model '{model.name}': expected whole experts, got units_per_expert: {model.units_per_expert}; leave it out to"
                " measure or replay"
            )
        if model.expert_bits not in (4, 8, 16, 32):
            raise KernelError(
                f"model '{model.name}': expected expert_bits of 4, 8, 16 or 32 to measure or replay,"
                f" got {model.expert_bits:g}; choose the nearest"
            )
        return cls(model.hidden, model.expert_intermediate, model.expert_bits, model.n_mats, model.expert_bytes())


def _not_computed(model: ModelSpec) -> str:
    """Name what no kernel computes: attention of another kind, dense parts between layers, projections around experts."""
    mixers = [block.mixer for block in model.blocks]
    kinds = dict.fromkeys("no attention" if mixer is None else mixer.kind for mixer in mixers)
    odd = [kind for kind in kinds if kind.partition(", window")[0] not in ("grouped", "latent")]
    if odd or model.shape is None:
        return " and ".join(odd)
    if model.head_dim == 1:
        return "attention of several widths"
    if any(len(group) > 1 or group[0].dense for group in model.groups):
        return "dense parts between them or next to experts"
    return "experts of another input width" if model.shape.expert_input != model.hidden else ""


def window_of(block: Block) -> int | None:
    """Return how many tokens a layer's attention sees at most."""
    return block.mixer.stores[0].kept if block.mixer and block.mixer.stores else None


def buffer_bytes(n: int, n_bytes: int) -> int:
    """Return what ``n`` flat buffers, each on a page of its own, will allocate."""
    return n * round_up(n_bytes) + PAGE


def round_up(n_bytes: int) -> int:
    """Round up to whole pages."""
    return -(-n_bytes // PAGE) * PAGE


def matrix(out: int, inputs: int) -> Planned:
    """Plan a matrix of a linear layer."""
    return Planned((out, inputs), inputs)


def norm_of(model: ModelSpec) -> Planned:
    """Plan a norm of the residual stream: LayerNorm with a bias, or RMSNorm."""
    return Planned((1 + model.norm_bias, model.hidden), 0)


def feed_forward_plan(model: ModelSpec, width: int, prefix: str) -> Plan:
    """Plan a feed-forward block: three matrices (SwiGLU) or two (GELU), as the model's experts."""
    plan = {f"{prefix}_up": matrix(width, model.hidden), f"{prefix}_down": matrix(model.hidden, width)}
    return plan if model.n_mats == 2 else {f"{prefix}_gate": matrix(width, model.hidden), **plan}


def attention_plan(model: ModelSpec) -> Plan:
    """Plan one layer's norm and attention; biases and sinks are left out."""
    hidden, heads = model.hidden, model.n_heads
    plan = {"attention_norm": norm_of(model)}
    if not model.kv_lora_rank:
        q, kv = heads * model.head_dim, model.n_kv_heads * model.head_dim
        plan |= {"qkv": matrix(q + 2 * kv, hidden), "out": matrix(hidden, q)}
        if model.qk_norm != "none":
            full = model.qk_norm == "full"
            plan |= {name: Planned((1, width if full else model.head_dim), 0) for name, width in (("q_norm", q), ("k_norm", kv))}
        return plan
    q, latent = heads * (model.nope_head_dim + model.rope_head_dim), model.kv_lora_rank
    if model.q_lora_rank:
        rank = model.q_lora_rank
        plan |= {"q_down": matrix(rank, hidden), "q_norm": Planned((1, rank), 0), "q_up": matrix(q, rank)}
    else:
        plan["q_up"] = matrix(q, hidden)
    return plan | {
        "kv_down": matrix(latent + model.rope_head_dim, hidden),
        "kv_norm": Planned((1, latent), 0),
        "k_up": Planned((heads, model.nope_head_dim, latent), latent),
        "v_up": Planned((heads, latent, model.v_head_dim), latent),
        "out": matrix(hidden, heads * model.v_head_dim),
    }


def cache_plan(model: ModelSpec, max_kv_tokens: int) -> Plan:
    """Plan a layer's KV cache: (2, heads, tokens, width), or (1, 1, tokens, latent + rotary)."""
    if model.kv_lora_rank:
        return {"kv": Planned((1, 1, max_kv_tokens, model.kv_lora_rank + model.rope_head_dim), 1)}
    return {"kv": Planned((2, model.n_kv_heads, max_kv_tokens, model.head_dim), 1)}


def rotary_width(model: ModelSpec) -> int:
    """Return how many numbers of a key are rotated by its position."""
    return model.rope_head_dim if model.kv_lora_rank else model.head_dim


def dense_plans(model: ModelSpec, distinct: int, max_kv_tokens: int, with_head: bool) -> tuple[list[Plan], ...]:
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
    return ([layer] * min(distinct, model.n_layers), [leading] * min(distinct, model.n_dense_layers), [ends] if with_head else [])


def number_bytes(model: ModelSpec) -> int:
    """Return the bytes of a weight, a KV number and a hidden state, which have one type."""
    if model.other_bits not in _BYTES:
        raise KernelError(f"model '{model.name}': expected other_bits of 16 or 32, got {model.other_bits:g}; choose one of them")
    if model.kv_bits != model.other_bits:
        raise KernelError(
            f"model '{model.name}': expected kv_bits equal to other_bits ({model.other_bits:g}) to measure or replay,"
            f" got {model.kv_bits:g}; set kv_bits to it"
        )
    if rotary_width(model) % 2:
        raise KernelError(f"model '{model.name}': expected an even width to rotate, got {rotary_width(model)}; change head_dim")
    return _BYTES[int(model.other_bits)]


def dense_bytes(model: ModelSpec, *, distinct_layers: int, max_rows: int, max_kv_tokens: int, with_head: bool) -> int:
    """Return what a dense kernel will allocate."""
    number = number_bytes(model)
    if min(distinct_layers, max_rows, max_kv_tokens) < 1:
        raise ValueError("expected at least one distinct layer, row, and token of KV")
    plans = dense_plans(model, distinct_layers, max_kv_tokens, with_head)
    weights = sum(math.prod(planned.shape) for group in plans for plan in group for planned in plan.values())
    positions = (max_rows + max_kv_tokens) * rotary_width(model)
    return (weights + positions) * number + max_rows * 8
