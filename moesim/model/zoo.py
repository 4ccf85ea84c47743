"""The built-in models, with the figures of each publisher's ``config.json`` on Hugging Face."""

from __future__ import annotations

from moesim.model.spec import MXFP4_BITS, ModelSpec

_QWEN_VOCAB = 151_936


def _source(repository: str, note: str = "bfloat16") -> str:
    return f"config.json of {repository} on Hugging Face, {note}"


def _gpt_oss(name: str, n_layers: int, n_experts: int) -> ModelSpec:
    # Biases stay in bfloat16 in the released checkpoint; only the experts' matrices are MXFP4.
    return ModelSpec(
        name=name, n_layers=n_layers, n_experts=n_experts, top_k=4, hidden=2880, expert_intermediate=2880,
        n_heads=64, n_kv_heads=8, head_dim=64, vocab=201_088, expert_bits=MXFP4_BITS,
        expert_bias=True, qkv_bias=True, out_bias=True, router_bias=True, attention_sinks=True,
        source=_source(f"openai/{name}", "experts MXFP4, rest bfloat16"),
    )  # fmt: skip


MIXTRAL_8X7B = ModelSpec(
    name="mixtral-8x7b", n_layers=32, n_experts=8, top_k=2, hidden=4096, expert_intermediate=14_336,
    n_heads=32, n_kv_heads=8, head_dim=128, vocab=32_000, source=_source("mistralai/Mixtral-8x7B-v0.1"),
)  # fmt: skip

PHI_3_5_MOE = ModelSpec(
    name="phi-3.5-moe", n_layers=32, n_experts=16, top_k=2, hidden=4096, expert_intermediate=6400,
    n_heads=32, n_kv_heads=8, head_dim=128, vocab=32_064,
    qkv_bias=True, out_bias=True, head_bias=True, norm_bias=True,
    source=_source("microsoft/Phi-3.5-MoE-instruct"),
)  # fmt: skip

DEEPSEEK_V2_LITE = ModelSpec(
    name="deepseek-v2-lite", n_layers=26, n_experts=64, top_k=6, hidden=2048, expert_intermediate=1408,
    n_heads=16, n_kv_heads=16, head_dim=192, vocab=102_400, n_dense_layers=1, dense_intermediate=10_944,
    n_shared=2, shared_intermediate=2816,
    kv_lora_rank=512, rope_head_dim=64, nope_head_dim=128, v_head_dim=128,
    source=_source("deepseek-ai/DeepSeek-V2-Lite"),
)  # fmt: skip

MOONLIGHT_16B_A3B = ModelSpec(
    name="moonlight-16b-a3b", n_layers=26, n_experts=64, top_k=6, hidden=2048, expert_intermediate=1408,
    n_heads=16, n_kv_heads=16, head_dim=192, vocab=163_840, n_dense_layers=1, dense_intermediate=11_264,
    n_shared=2, shared_intermediate=2816,
    kv_lora_rank=512, rope_head_dim=64, nope_head_dim=128, v_head_dim=128, router_bias=True,
    source=_source("moonshotai/Moonlight-16B-A3B"),
)  # fmt: skip

# Qwen's files give the width of all shared experts together; their number is that over the width of a routed
# one, which is what the publisher states (4 and 8).
QWEN1_5_MOE = ModelSpec(
    name="qwen1.5-moe", n_layers=24, n_experts=60, top_k=4, hidden=2048, expert_intermediate=1408,
    n_heads=16, n_kv_heads=16, head_dim=128, vocab=_QWEN_VOCAB, n_shared=4, shared_intermediate=5632,
    qkv_bias=True, shared_gate=True, source=_source("Qwen/Qwen1.5-MoE-A2.7B"),
)  # fmt: skip

QWEN2_57B_A14B = ModelSpec(
    name="qwen2-57b-a14b", n_layers=28, n_experts=64, top_k=8, hidden=3584, expert_intermediate=2560,
    n_heads=28, n_kv_heads=4, head_dim=128, vocab=_QWEN_VOCAB, n_shared=8, shared_intermediate=20_480,
    qkv_bias=True, shared_gate=True, source=_source("Qwen/Qwen2-57B-A14B"),
)  # fmt: skip

QWEN3_30B_A3B = ModelSpec(
    name="qwen3-30b-a3b", n_layers=48, n_experts=128, top_k=8, hidden=2048, expert_intermediate=768,
    n_heads=32, n_kv_heads=4, head_dim=128, vocab=_QWEN_VOCAB, qk_norm="head",
    source=_source("Qwen/Qwen3-30B-A3B"),
)  # fmt: skip

OLMOE = ModelSpec(
    name="olmoe", n_layers=16, n_experts=64, top_k=8, hidden=2048, expert_intermediate=1024,
    n_heads=16, n_kv_heads=16, head_dim=128, vocab=50_304, qk_norm="full",
    source=_source("allenai/OLMoE-1B-7B-0924"),
)  # fmt: skip

BUILTIN: tuple[ModelSpec, ...] = (
    MIXTRAL_8X7B, PHI_3_5_MOE, DEEPSEEK_V2_LITE, MOONLIGHT_16B_A3B, QWEN1_5_MOE, QWEN2_57B_A14B,
    QWEN3_30B_A3B, OLMOE, _gpt_oss("gpt-oss-20b", 24, 32), _gpt_oss("gpt-oss-120b", 36, 128),
)  # fmt: skip
"""All built-in specs, in the order in which they are listed."""
