"""The miniatures that can be trained: whose routing shape each has, and how small it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import AutoModelForCausalLM, DeepseekV2Config, MixtralConfig, PreTrainedConfig, PreTrainedModel, Qwen3MoeConfig

#: Entries of the byte-pair vocabulary.
VOCABULARY = 4096


@dataclass(frozen=True)
class Shape:
    """A miniature.

    Attributes
    ----------
    name : str
        Of the trace and of the checkpoint's folder.
    miniature_of : str
        Built-in model whose routing shape it has.
    config : callable
        ``config(hidden, expert_width)`` of the transformers model; the layers, experts, top-k and shared
        experts are the full model's.
    hidden, expert_width : int
        Of the miniature unless asked for otherwise.
    """

    name: str
    miniature_of: str
    config: Callable[[int, int], PreTrainedConfig]
    hidden: int
    expert_width: int


def _common(hidden: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "num_attention_heads": max(1, hidden // 32),
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,
        "initializer_range": 0.04,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": None,
    }


def _mixtral(hidden: int, expert_width: int) -> PreTrainedConfig:
    return MixtralConfig(
        **_common(hidden),
        intermediate_size=expert_width,
        num_hidden_layers=32,
        num_key_value_heads=max(1, hidden // 64),
        head_dim=32,
        num_local_experts=8,
        num_experts_per_tok=2,
    )


def _deepseek(hidden: int, expert_width: int) -> PreTrainedConfig:
    return DeepseekV2Config(
        **_common(hidden),
        intermediate_size=4 * hidden,
        moe_intermediate_size=expert_width,
        num_hidden_layers=27,
        first_k_dense_replace=1,
        n_routed_experts=64,
        n_shared_experts=2,
        num_experts_per_tok=6,
        q_lora_rank=None,
        kv_lora_rank=hidden // 2,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        topk_method="greedy",
        routed_scaling_factor=1.0,
    )


def _qwen3(hidden: int, expert_width: int) -> PreTrainedConfig:
    return Qwen3MoeConfig(
        **_common(hidden),
        intermediate_size=4 * hidden,
        moe_intermediate_size=expert_width,
        num_hidden_layers=48,
        num_key_value_heads=max(1, hidden // 64),
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
    )


SHAPES: dict[str, Shape] = {
    "mixtral": Shape("mini-mixtral", "mixtral-8x7b", _mixtral, 128, 256),
    "deepseek": Shape("mini-deepseek-v2-lite", "deepseek-v2-lite", _deepseek, 128, 48),
    "qwen3": Shape("mini-qwen3", "qwen3-30b-a3b", _qwen3, 128, 32),
}


def new_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Build the model of a configuration, on random weights."""
    automatic: Any = AutoModelForCausalLM  # has no annotations
    model: PreTrainedModel = automatic.from_config(config)
    return model
