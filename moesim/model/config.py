"""Read a Hugging Face ``config.json``; nothing is downloaded, no model code is run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from moesim.core.gate import JSON, read_text
from moesim.core.limits import LAYERS, WIDTH
from moesim.errors import ModelError, unknown_name
from moesim.model.check import find_problem, is_int
from moesim.model.spec import DEFAULTS, MXFP4_BITS, ModelSpec

_DTYPE_BITS = {"bfloat16": 16, "float16": 16, "float32": 32, "float8_e4m3fn": 8}
_N_EXPERTS = ("num_local_experts", "num_experts")  # one figure; its name depends on who wrote the file


class _Config:
    """The file's keys, each checked when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        text = read_text(path, JSON, "the model's config.json", error=ModelError)
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ModelError(f"{path}: expected JSON, got something else: {error}") from None
        if not isinstance(data, dict):
            raise ModelError(f"{path}: expected a JSON object, got {type(data).__name__}")
        self.data: dict[str, Any] = data

    def error(self, key: str, expected: str, got: object) -> ModelError:
        return ModelError(f"{self.path}: {key}: expected {expected}, got {got!r}")

    def count(self, *keys: str, default: int | None = None, least: int = 1, most: float = WIDTH.most) -> int:
        """Read an integer under the first key that is there; null counts as absent."""
        for key in keys:
            value = self.data.get(key)
            if value is not None:
                if not is_int(value) or value < least:
                    raise self.error(key, f"an integer of at least {least}", value)
                if value > most:
                    raise self.error(key, f"at most {most}", value)
                return int(value)
        if default is None:
            names = " or ".join(keys)
            raise ModelError(f"{self.path}: {names}: expected an integer, got nothing; add the key")
        return default

    def layers(self) -> int:
        return self.count("num_hidden_layers", most=LAYERS.most)

    def flag(self, key: str, default: bool) -> bool:
        value = self.data.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, "true or false", value)
        return value

    def indices(self, key: str) -> frozenset[int]:
        value = self.data.get(key)
        if value is None:
            return frozenset()
        if not isinstance(value, list) or not all(is_int(i) for i in value):
            raise self.error(key, "a list of layer indices", value)
        return frozenset(value)


# ---- parts of a spec


def _grouped(c: _Config) -> dict[str, Any]:
    n_heads, hidden = c.count("num_attention_heads"), c.count("hidden_size")
    if c.data.get("head_dim") is None and hidden % n_heads:
        expected = f"a divisor of {hidden} (hidden_size), as head_dim is absent"
        raise c.error("num_attention_heads", expected, n_heads)
    head_dim = c.count("head_dim", default=hidden // n_heads)
    return {"n_kv_heads": c.count("num_key_value_heads"), "head_dim": head_dim}


def _latent(c: _Config) -> dict[str, Any]:
    nope, rope = c.count("qk_nope_head_dim"), c.count("qk_rope_head_dim")
    bias = c.flag("attention_bias", default=False)
    return {
        "n_kv_heads": c.count("num_key_value_heads"), "head_dim": nope + rope, "nope_head_dim": nope,
        "rope_head_dim": rope, "v_head_dim": c.count("v_head_dim"), "kv_lora_rank": c.count("kv_lora_rank"),
        "q_lora_rank": c.count("q_lora_rank", default=0, least=0), "qkv_bias": bias, "out_bias": bias,
    }  # fmt: skip


def _layers(c: _Config, dense: Iterable[int]) -> dict[str, Any]:
    """Split the layers; dense ones that do not lead are labelled and costed as if they did."""
    n_all = c.layers()
    layers = sorted(dense)
    if len(layers) == n_all:
        expected = "at least one layer with experts"
        raise ModelError(f"{c.path}: num_hidden_layers: expected {expected}, got {n_all} dense ones")
    fields: dict[str, Any] = {"n_layers": n_all - len(layers), "n_dense_layers": len(layers)}
    if layers:
        fields["dense_intermediate"] = c.count("intermediate_size")
    if layers != list(range(len(layers))):
        fields["labels"] = ("dense-layers-moved-to-front",)
    return fields


def _biases(c: _Config, default: bool) -> dict[str, Any]:
    bias = c.flag("attention_bias", default)
    return {"qkv_bias": bias, "out_bias": bias}


# ---- families


def _mixtral(c: _Config) -> dict[str, Any]:
    return _grouped(c) | _layers(c, ()) | {"expert_intermediate": c.count("intermediate_size")}


def _phimoe(c: _Config) -> dict[str, Any]:
    head_bias = c.flag("lm_head_bias", default=False)
    return _mixtral(c) | _biases(c, default=False) | {"head_bias": head_bias, "norm_bias": True}


def _deepseek(c: _Config) -> dict[str, Any]:
    first, every = c.count("first_k_dense_replace", default=0, least=0), c.count("moe_layer_freq", default=1)
    dense = (i for i in range(c.layers()) if i < first or i % every)
    width, n_shared = c.count("moe_intermediate_size"), c.count("n_shared_experts", default=0, least=0)
    fields = {"expert_intermediate": width, "n_shared": n_shared, "shared_intermediate": n_shared * width}
    return _latent(c) | _layers(c, dense) | fields


def _deepseek_v3(c: _Config) -> dict[str, Any]:
    # The released weights hold a correction bias per expert, with which the router chooses.
    return _deepseek(c) | {"router_bias": True}


def _qwen_layers(c: _Config) -> dict[str, Any]:
    step, excluded = c.count("decoder_sparse_step", default=1), c.indices("mlp_only_layers")
    return _layers(c, (i for i in range(c.layers()) if i in excluded or (i + 1) % step))


def _qwen2_moe(c: _Config) -> dict[str, Any]:
    width, shared = c.count("moe_intermediate_size"), c.count("shared_expert_intermediate_size", least=0)
    # The file gives one width for all shared experts; their number is that in units of a routed one.
    n_shared = 0 if shared == 0 else max(shared // width, 1)
    fields = {"expert_intermediate": width, "n_shared": n_shared, "shared_intermediate": shared}
    flags = {"qkv_bias": c.flag("qkv_bias", default=True), "shared_gate": shared > 0}
    return _grouped(c) | _qwen_layers(c) | fields | flags


def _qwen3_moe(c: _Config) -> dict[str, Any]:
    fields = {"expert_intermediate": c.count("moe_intermediate_size"), "qk_norm": "head"}
    return _grouped(c) | _qwen_layers(c) | _biases(c, default=False) | fields


def _olmoe(c: _Config) -> dict[str, Any]:
    return _mixtral(c) | _biases(c, default=False) | {"qk_norm": "full"}


def _gpt_oss(c: _Config) -> dict[str, Any]:
    extras = {"expert_bias": True, "router_bias": True, "attention_sinks": True}
    return _mixtral(c) | _biases(c, default=True) | extras


ARCHITECTURES: dict[str, Callable[[_Config], dict[str, Any]]] = {
    "MixtralForCausalLM": _mixtral,
    "PhimoeForCausalLM": _phimoe,
    "PhiMoEForCausalLM": _phimoe,  # as the publisher's own file spells it
    "DeepseekV2ForCausalLM": _deepseek,
    "DeepseekV3ForCausalLM": _deepseek_v3,
    "Qwen2MoeForCausalLM": _qwen2_moe,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "OlmoeForCausalLM": _olmoe,
    "GptOssForCausalLM": _gpt_oss,
}
"""Architectures that can be read, by the name a config.json gives them."""


# ---- whole file


def _read_bits(c: _Config) -> dict[str, Any]:
    quantization = c.data.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    if method not in (None, "mxfp4"):
        known = "mxfp4, or no quantization_config and expert_bits given in the experiment"
        raise c.error("quantization_config.quant_method", known, method)
    key = "dtype" if c.data.get("dtype") is not None else "torch_dtype"
    dtype = c.data.get(key)
    if dtype is None and method == "mxfp4":
        dtype = "bfloat16"  # such checkpoints keep the rest in bfloat16, and need not say so
    if not isinstance(dtype, str) or dtype not in _DTYPE_BITS:
        raise c.error(key, f"one of {', '.join(_DTYPE_BITS)}", dtype)
    bits = _DTYPE_BITS[dtype]
    computed = max(bits, 16)  # 8-bit weights are computed with in 16 bits
    expert_bits = MXFP4_BITS if method == "mxfp4" else bits
    return {"expert_bits": expert_bits, "other_bits": bits, "kv_bits": computed, "act_bits": computed}


def _read_name(c: _Config) -> str:
    given = c.data.get("_name_or_path")
    if isinstance(given, str) and given.strip("/ \n"):
        return given.strip("/ \n").rsplit("/", 1)[-1]
    return c.path.resolve().parent.name if c.path.stem == "config" else c.path.stem


def read_config(path: Path) -> ModelSpec:
    """Read a Hugging Face ``config.json``."""
    c = _Config(path / "config.json" if path.is_dir() else path)
    names = c.data.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise c.error("architectures", 'a list with one name, such as ["MixtralForCausalLM"]', names)
    if names[0] not in ARCHITECTURES:
        raise ModelError(f"{c.path}: {unknown_name('architecture', names[0], ARCHITECTURES)}")
    values: dict[str, Any] = {
        "name": _read_name(c),
        "n_experts": c.count(*_N_EXPERTS, "n_routed_experts"),
        "top_k": c.count("num_experts_per_tok"),
        "hidden": c.count("hidden_size"),
        "n_heads": c.count("num_attention_heads"),
        "vocab": c.count("vocab_size"),
        "tie_embeddings": c.flag("tie_word_embeddings", default=False),  # default of all of these
        "source": f"{c.path.name} ({names[0]})",
    }
    values |= ARCHITECTURES[names[0]](c) | _read_bits(c)
    problem = find_problem(DEFAULTS | values)
    if problem is not None:
        raise ModelError(f"{c.path}: {problem}")
    return ModelSpec(**values)
