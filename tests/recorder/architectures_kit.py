"""Tiny random models of the architectures that can be recorded, and hooks on what their experts use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moesim.recorder.checkpoint import STREAMED
from tests.recorder.record_kit import COMMON, EXPERTS, HIDDEN

TOP_K = 3


@dataclass(frozen=True)
class Row:
    """An architecture: models that have it (for readers), what its configuration needs, and the formula of its router."""

    models: str
    config: dict[str, Any]
    router: str = "gate"  # name in its block
    linear: str = ""  # of the part of the router that has the weight
    score: str = "softmax"
    bias: str = ""  # path in the block of what is added to scores before they are ranked
    ranks_logits: bool = False  # whether the bias is added to the logits, not to the scores
    nested: bool = False  # whether it is the language part of a model that also sees
    groups: bool = False  # whether a choice is limited to the two best of four groups


def _sizes(**more: Any) -> dict[str, Any]:
    heads = {"num_key_value_heads": 2, "intermediate_size": 24, "moe_intermediate_size": 16}
    return {**COMMON, **heads, "head_dim": 8, **more}


_NAMED = {"num_experts": EXPERTS, "num_experts_per_tok": TOP_K}
_LOCAL = {"num_local_experts": EXPERTS, "num_experts_per_tok": TOP_K}
_FLAT = {
    "n_routed_experts": EXPERTS, "num_experts_per_tok": TOP_K, "first_k_dense_replace": 1, "n_shared_experts": 1,
    "routed_scaling_factor": 2.5, "norm_topk_prob": True, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_GROUPS = {**_FLAT, "n_group": 4, "topk_group": 2}
_LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "head_dim": 8}
_LATENT |= {"q_lora_rank": 16, "num_key_value_heads": 4}
_INDEXED = {**_LATENT, "index_topk": 64, "index_n_heads": 2, "index_head_dim": 16}
_SHARED = {"shared_expert_intermediate_size": 16}
_MIXED = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_DELTA = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 2, **_SHARED, **_MIXED,
}  # fmt: skip
_MAMBA = {"mamba_d_state": 4, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1}
_CORRECTED: dict[str, Any] = {"score": "sigmoid", "bias": "gate.e_score_correction_bias"}
_OF_BLOCK: dict[str, Any] = {"score": "sigmoid", "bias": "e_score_correction_bias"}

ROWS: dict[str, Row] = {
    "afmoe": Row("AFMoE (Trinity)", _NAMED, "router", "gate", "sigmoid", "expert_bias"),
    "aria": Row("Aria", {"moe_num_experts": EXPERTS, "moe_topk": TOP_K}, "router", nested=True),
    "axk1": Row("A.X K1", {**_GROUPS, **_LATENT}, groups=True, **_CORRECTED),
    "axk2": Row("A.X K2", {**_GROUPS, **_INDEXED}, groups=True, **_CORRECTED),
    "bailing_hybrid": Row(
        "Ling 2.5, Ring 2.5", {**_GROUPS, **_LATENT, **_MIXED, "num_experts": EXPERTS}, groups=True, **_CORRECTED
    ),
    "cohere2_moe": Row("Cohere 2 MoE", _NAMED),
    "dbrx": Row(
        "DBRX",
        {"d_model": HIDDEN, "n_heads": 4, "n_layers": 3, "max_seq_len": 128,
         "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
         "ffn_config": {"hidden_size": HIDDEN, "ffn_hidden_size": 16, "moe_num_experts": EXPERTS, "moe_top_k": TOP_K}},
        "router", "layer",
    ),
    "deepseek_v2": Row("DeepSeek-V2, V2-Lite", {**_FLAT, **_LATENT, "topk_method": "greedy"}),
    "deepseek_v3": Row("DeepSeek-V3, R1, Moonlight, Kimi-K2", {**_GROUPS, **_LATENT}, groups=True, **_CORRECTED),
    "deepseek_v32": Row("DeepSeek-V3.2", {**_GROUPS, **_INDEXED}, groups=True, **_CORRECTED),
    "dots1": Row("dots.llm1", _GROUPS, groups=True, **_CORRECTED),
    "dots3_note_text": Row("dots3-note (text)", {**_FLAT, **_INDEXED}, **_CORRECTED),
    "ernie4_5_moe": Row(
        "ERNIE 4.5 MoE", {"moe_num_experts": EXPERTS, "moe_k": TOP_K, "moe_layer_start_index": 1, "moe_num_shared_experts": 1},
        bias="gate.moe_statics.e_score_correction_bias",
    ),
    "exaone_moe": Row("K-EXAONE", {**_FLAT, **_NAMED, "mlp_layer_types": ["dense", "sparse", "sparse"]}, **_CORRECTED),
    "flex_olmo": Row("FlexOlmo", _NAMED),
    "flint": Row("Flint", {**_NAMED, "num_hidden_layers": 4}, score="sigmoid"),
    "gemma4": Row(
        "Gemma 4 26B-A4B",
        {"enable_moe_block": True, "num_experts": EXPERTS, "top_k_experts": TOP_K, "hidden_size_per_layer_input": 0,
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        "router", "proj", nested=True,
    ),
    "glm4_moe": Row("GLM-4.5, 4.6, 4.7", _GROUPS, groups=True, **_CORRECTED),
    "glm4_moe_lite": Row("GLM-4.7-Flash", {**_GROUPS, **_LATENT}, groups=True, **_CORRECTED),
    "glm4v_moe": Row(
        "GLM-4.5V, 4.6V", {**_GROUPS, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0]}},
        nested=True, groups=True, **_CORRECTED,
    ),
    "glm_moe_dsa": Row("GLM-5", {**_GROUPS, **_INDEXED}, groups=True, **_CORRECTED),
    "gpt_oss": Row("gpt-oss", _LOCAL, "router"),
    "granitemoe": Row("Granite 3 MoE", _LOCAL, "router"),
    "granitemoe_swa": Row("Granite MoE with a window", _LOCAL, "router"),
    "granitemoehybrid": Row(
        "Granite 4",
        {**_LOCAL, **_MAMBA, "shared_intermediate_size": 16, "layer_types": ["mamba", "attention", "mamba"]},
        "router",
    ),
    "granitemoeshared": Row("Granite MoE with a shared expert", {**_LOCAL, "shared_intermediate_size": 16}, "router"),
    "hunyuan_v1_moe": Row("Hunyuan-A13B", {"num_experts": EXPERTS, "moe_topk": TOP_K}, linear="wg"),
    "hy_v3": Row("Hunyuan 3", _NAMED, **_OF_BLOCK),
    "hy_v4": Row("Hunyuan 4", {**_GROUPS, **_INDEXED}, groups=True, **_CORRECTED),
    "jamba": Row(
        "Jamba",
        {**_NAMED, "expert_layer_period": 1, "expert_layer_offset": 0, "attn_layer_period": 2, "attn_layer_offset": 1,
         "mamba_d_state": 4, "use_mamba_kernels": False},
        "router",
    ),
    "kimi_linear": Row("Kimi Linear", {**_GROUPS, **_LATENT, **_MIXED, "num_experts": EXPERTS}, groups=True, **_CORRECTED),
    "kolibri1": Row(
        "Kolibri 1", {**_NAMED, **_SHARED}, score="sigmoid", bias="gate.e_score_correction_bias", ranks_logits=True
    ),
    "laguna": Row("Laguna", _NAMED, **_CORRECTED),
    "lara_mini": Row("Lara Mini", {**_NAMED, **_SHARED}),
    "lfm2_moe": Row(
        "LFM2-8B-A1B", {**_NAMED, "num_dense_layers": 1, "layer_types": ["conv", "full_attention", "conv"]},
        score="sigmoid", bias="expert_bias",
    ),
    "llama4": Row(
        "Llama 4 Scout, Maverick",
        {"num_local_experts": EXPERTS, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "num_hidden_layers": 4,
         "intermediate_size_mlp": 24,
         "attention_chunk_size": 16},
        "router", score="sigmoid", nested=True,
    ),
    "mellum": Row("Mellum", _NAMED),
    "mimo_v2_flash": Row("MiMo-V2-Flash", _GROUPS, groups=True, **_CORRECTED),
    "minimax": Row("MiniMax-Text-01, M1", {**_LOCAL, **_MIXED, "block_size": 8}),
    "minimax_m2": Row("MiniMax-M2, M2.1, M2.5", _LOCAL, **_OF_BLOCK),
    "minimax_m3_vl": Row("MiniMax-M3", _LOCAL, nested=True, **_CORRECTED),
    "mixtral": Row("Mixtral", _LOCAL),
    "nemotron_h": Row(
        "Nemotron-H, Nemotron 3",
        {**_FLAT, "layers_block_type": ["mamba", "moe", "attention", "moe"], "mamba_num_heads": 4, "mamba_head_dim": 8,
         "ssm_state_size": 8, "n_groups": 1, "moe_shared_expert_intermediate_size": 16, "chunk_size": 8,
         "use_mamba_kernels": False},
        **_CORRECTED,
    ),
    "olmoe": Row("OLMoE", _NAMED),
    "phimoe": Row(
        "Phi-3.5-MoE",
        {**_LOCAL, "num_experts_per_tok": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        "router",
    ),
    "qwen2_moe": Row("Qwen1.5-MoE, Qwen2-57B-A14B", {**_NAMED, **_SHARED}),
    "qwen3_5_moe": Row("Qwen3.5, 3.6 MoE", {**_NAMED, **_DELTA}, nested=True),
    "qwen3_moe": Row("Qwen3 MoE", {**_NAMED, "norm_topk_prob": True}),
    "qwen3_next": Row("Qwen3-Next, Qwen3-Coder-Next", {**_NAMED, **_DELTA}),
    "qwen3_vl_moe": Row("Qwen3-VL MoE", _NAMED, nested=True),
    "solar_open": Row("Solar Open", {**_GROUPS, "first_k_dense_replace": 0}, groups=True, **_CORRECTED),
}  # fmt: skip


_EYES = {
    "depth": 1, "num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "out_hidden_size": HIDDEN, "num_heads": 2,
    "num_attention_heads": 2, "patch_size": 4, "image_size": 16, "vision_output_dim": 16, "projector_input_dim": 16,
    "projector_output_dim": 16, "deepstack_visual_indexes": [0],
}  # fmt: skip


def build(name: str, **more: Any) -> Any:
    """Make a random model; what is zero in a fresh one, but not in a trained one, is random too."""
    torch.manual_seed(0)
    row = ROWS.get(name, Row("", {}))
    sizes = _sizes(**row.config, **more)
    if row.nested:
        config = CONFIG_MAPPING[name](text_config={**sizes, "pad_token_id": 2}, vision_config=_EYES)
        model = AutoModelForImageTextToText.from_config(config).eval()
    else:
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[name](**sizes)).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point() and tensor.numel() > 1 and not tensor.any():
                tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator))
    return model


@dataclass
class Used:
    """What one block read, and what its experts were called with, a row a token."""

    block: nn.Module
    states: list[Tensor] = field(default_factory=list)
    ids: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)

    def all(self) -> tuple[Tensor, Tensor, Tensor]:
        return torch.cat(self.states), torch.cat(self.ids), torch.cat(self.weights)


@contextmanager
def used_experts(row: Row) -> Iterator[list[Used]]:
    """See every call of experts in this process, in the order of the layers; the recorder's code has no part in it."""
    found: dict[int, Used] = {}
    owner: dict[int, Used] = {}  # of routers and experts

    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        experts = getattr(module, "experts", None)
        if isinstance(experts, nn.Module) and id(module) not in found:
            used = found[id(module)] = Used(module)
            owner[id(experts)] = owner[id(getattr(module, row.router))] = used
        if (seen := owner.get(id(module))) is None:
            return
        if module is not seen.block.experts:
            seen.states.append(args[0].detach().reshape(-1, HIDDEN).clone())
        elif len(args) == 1:  # Llama 4: all experts read all rows, times their weights
            state, rows = seen.states[-1], args[0].detach().reshape(EXPERTS, -1, HIDDEN)
            factors = (rows * state).sum(-1) / (state * state).sum(-1)
            seen.ids.append(factors.argmax(0)[:, None])
            seen.weights.append(factors.max(0).values[:, None])
            assert torch.equal((factors != 0).sum(0), torch.ones(len(state), dtype=torch.long)), "one expert a row"
        else:
            seen.ids.append(args[1].detach().clone())
            seen.weights.append(args[2].detach().clone())

    handle = nn.modules.module.register_module_forward_pre_hook(hook)
    try:
        yield (blocks := [])
    finally:
        handle.remove()
        blocks.extend(found.values())


def by_formula(row: Row, block: Any, states: Tensor) -> tuple[Tensor, Tensor]:
    """Compute scores, and what experts are ranked by but for groups, from a block's weights."""
    router = getattr(block, row.router)
    linear = getattr(router, row.linear) if row.linear else router
    if row.router == "router" and row.linear == "proj":  # Gemma 4 normalises the state in its router
        states = states / (states.pow(2).mean(-1, keepdim=True) + router.eps).sqrt() * router.scale.detach() * HIDDEN**-0.5
    logits = states.float() @ linear.weight.detach().float().T
    if (bias := getattr(linear, "bias", None)) is not None:
        logits = logits + bias.detach()
    scores = logits.sigmoid() if row.score == "sigmoid" else logits.exp() / logits.exp().sum(-1, keepdim=True)
    if not row.bias:
        return scores, scores
    bias = block
    for part in row.bias.split("."):
        bias = getattr(bias, part)
    return scores, (logits if row.ranks_logits else scores) + bias.detach().reshape(-1)


def ranked(row: Row) -> str:
    value = "biased logit" if row.ranks_logits else "biased score" if row.bias else "score"
    return f"{value}, in groups" if row.groups else value


def is_streamed(name: str) -> bool:
    return (f"{name}_text" if ROWS[name].nested else name) in STREAMED


def table() -> str:
    """Write the guide's table; a star marks what ``--stream-layers`` runs, too."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, row in sorted(ROWS.items()):
        found.setdefault((row.score, ranked(row)), []).append(f"`{name}`{'*' * is_streamed(name)}")
    lines = [f"| {score} | {rank} | {' '.join(names)} |" for (score, rank), names in sorted(found.items(), reverse=True)]
    return "\n".join(["| score | ranked by | `model_type` |", "|---|---|---|", *lines, ""])
