"""Which values of a model's fields are possible."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from moesim.core.limits import BITS, BYTES, EXPERTS, LAYERS, UNITS, WIDTH

_POSITIVE = (
    "n_layers", "n_experts", "hidden", "expert_intermediate", "n_heads", "n_kv_heads", "head_dim", "vocab",
    "n_mats", "units_per_expert",
)  # fmt: skip
_NOT_NEGATIVE = (
    "n_dense_layers", "n_shared", "shared_intermediate", "dense_intermediate", "q_lora_rank", "kv_lora_rank",
    "rope_head_dim", "nope_head_dim", "v_head_dim",
)  # fmt: skip
_BITS = ("expert_bits", "other_bits", "kv_bits", "act_bits")
_FLAGS = (
    "tie_embeddings", "expert_bias", "qkv_bias", "out_bias", "norm_bias", "router_bias", "head_bias",
    "shared_gate", "attention_sinks",
)  # fmt: skip
_QK_NORMS = ("none", "head", "full")


def is_int(value: object) -> TypeGuard[int]:
    """Whether a value is an integer and no boolean."""
    return isinstance(value, int) and not isinstance(value, bool)


def find_problem(values: Mapping[str, Any]) -> str | None:
    """Find the first impossible field."""
    return _find_wrong_type(values) or _find_contradiction(values)


def _find_wrong_type(v: Mapping[str, Any]) -> str | None:
    for key in ("name", "source"):
        if not isinstance(v[key], str) or not v[key].isprintable() or (key == "name" and not v[key].strip()):
            return f"{key}: expected one line of text, got {v[key]!r}"
    for key in _POSITIVE:
        if not is_int(v[key]) or v[key] < 1:
            return f"{key}: expected a positive integer, got {v[key]!r}"
        if v[key] > (most := _most(key)):
            return f"{key}: expected at most {most}, got {v[key]}"
    for key in _NOT_NEGATIVE:
        if not is_int(v[key]) or v[key] < 0:
            return f"{key}: expected an integer of at least 0, got {v[key]!r}"
        if v[key] > (most := _most(key)):
            return f"{key}: expected at most {most}, got {v[key]}"
    for key in _BITS:
        number = isinstance(v[key], (int, float)) and not isinstance(v[key], bool)
        if not number or not BITS.hold(v[key]):
            return f"{key}: expected a number of bits {BITS}, got {v[key]!r}"
    problem = _find_width_problem(v["low_bits"], v["expert_bits"])
    if problem is not None:
        return problem
    for key in _FLAGS:
        if not isinstance(v[key], bool):
            return f"{key}: expected true or false, got {v[key]!r}"
    if v["qk_norm"] not in _QK_NORMS:
        return f"qk_norm: expected one of {', '.join(_QK_NORMS)}, got {v['qk_norm']!r}"
    labels = v["labels"]
    if not isinstance(labels, tuple) or not all(isinstance(label, str) for label in labels):
        return f"labels: expected a tuple of texts, got {labels!r}"
    return None


def _find_width_problem(low_bits: object, expert_bits: float) -> str | None:
    if not isinstance(low_bits, tuple):
        return f"low_bits: expected a tuple of numbers of bits, got {low_bits!r}"
    above = expert_bits
    for bits in low_bits:
        if not isinstance(bits, (int, float)) or isinstance(bits, bool) or not BITS.hold(bits) or bits >= above:
            got = f"{expert_bits:g}, {', '.join(str(one) for one in low_bits)}"
            return f"expert_bits: expected numbers of bits {BITS}, each smaller than the one before, got {got}"
        above = bits
    return None


def _most(key: str) -> int:
    bounds = LAYERS if key in ("n_layers", "n_dense_layers") else EXPERTS if key in ("n_experts", "n_shared") else WIDTH
    return int(bounds.most)


def _find_contradiction(v: Mapping[str, Any]) -> str | None:
    if not is_int(v["top_k"]) or not 1 <= v["top_k"] <= v["n_experts"]:
        return f"top_k: expected an integer from 1 to {v['n_experts']} (n_experts), got {v['top_k']!r}"
    if v["n_layers"] * v["n_experts"] > UNITS.most:
        got = f"{v['n_layers'] * v['n_experts']}"
        return f"n_layers: expected at most {UNITS.most} experts over all layers (n_layers x n_experts), got {got}"
    if v["n_mats"] not in (2, 3):
        return f"n_mats: expected 2 (up, down) or 3 (gate, up, down), got {v['n_mats']}"
    problem = _find_unit_problem(v)
    if problem is not None:
        return problem
    for count, width in (("n_dense_layers", "dense_intermediate"), ("n_shared", "shared_intermediate")):
        if (v[count] == 0) != (v[width] == 0):
            expected = "a positive integer" if v[count] else "0"
            return f"{width}: expected {expected}, because {count} is {v[count]}, got {v[width]}"
    if v["shared_gate"] and not v["n_shared"]:
        return "shared_gate: expected false, because n_shared is 0, got true"
    return _find_attention_problem(v) or _find_layer_bytes_problem(v)


def _find_unit_problem(v: Mapping[str, Any]) -> str | None:
    units = v["units_per_expert"]
    if units == 1:
        return None
    if units != v["n_mats"]:
        return f"units_per_expert: expected 1 (whole experts) or {v['n_mats']} (n_mats, one for each matrix), got {units}"
    if v["expert_bias"] or v["expert_bytes_by_layer"] is not None:
        got = "expert_bias" if v["expert_bias"] else "expert_bytes_by_layer"
        return f"units_per_expert: expected 1, because units of one expert must have the same size, got {units} with {got}"
    for key in ("n_experts", "top_k"):
        if v[key] % units:
            return f"{key}: expected a multiple of {units} (units_per_expert), got {v[key]}"
    return None


def _find_attention_problem(v: Mapping[str, Any]) -> str | None:
    latent = ("rope_head_dim", "nope_head_dim", "v_head_dim")
    if v["kv_lora_rank"] == 0:
        for key in ("q_lora_rank", *latent):
            if v[key]:
                return f"{key}: expected 0, because kv_lora_rank is 0 (grouped-query attention), got {v[key]}"
        if v["n_heads"] % v["n_kv_heads"]:
            return f"n_kv_heads: expected a divisor of {v['n_heads']} (n_heads), got {v['n_kv_heads']}"
        return None
    for key in latent:
        if not v[key]:
            return f"{key}: expected a positive integer, because kv_lora_rank is {v['kv_lora_rank']}, got 0"
    width = v["nope_head_dim"] + v["rope_head_dim"]
    if v["head_dim"] != width:
        return f"head_dim: expected {width} (nope_head_dim + rope_head_dim), got {v['head_dim']}"
    if v["qk_norm"] != "none":
        return f"qk_norm: expected none, because latent attention has its own norms, got {v['qk_norm']!r}"
    return None


def _find_layer_bytes_problem(v: Mapping[str, Any]) -> str | None:
    by_layer = v["expert_bytes_by_layer"]
    if by_layer is None:
        return None
    if not isinstance(by_layer, tuple) or len(by_layer) != v["n_layers"]:
        got = f"{len(by_layer)} values" if isinstance(by_layer, tuple) else repr(by_layer)
        return f"expert_bytes_by_layer: expected {v['n_layers']} values (n_layers), got {got}"
    for layer, size in enumerate(by_layer):
        if not is_int(size) or size < 1:
            return f"expert_bytes_by_layer[{layer}]: expected a positive integer of bytes, got {size!r}"
        if size > BYTES.most:
            return f"expert_bytes_by_layer[{layer}]: expected at most {BYTES.most} bytes, got {size}"
    return None
