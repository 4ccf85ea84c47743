"""Tiny random models of every architecture that the recorder knows, and their routing written out by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import typer
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from moesim.cli.trace_record import trace_record
from moesim.errors import MoesimError
from moesim.recorder.generation import Sampling
from moesim.recorder.recording import Plan, Recorder, calibrate_batch, counts_of
from moesim.trace import Trace

LAYERS, EXPERTS, HIDDEN, VOCABULARY = 3, 8, 32, 64

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "max_position_embeddings": 128, "initializer_range": 0.3, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": None,
}  # fmt: skip
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
_LATENT = {
    "intermediate_size": 24, "moe_intermediate_size": 16, "n_routed_experts": EXPERTS, "n_shared_experts": 1,
    "num_experts_per_tok": 3, "first_k_dense_replace": 1, "q_lora_rank": None, "kv_lora_rank": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "routed_scaling_factor": 2.5,
}  # fmt: skip


def _heads(**more: Any) -> dict[str, Any]:
    return {**COMMON, "num_key_value_heads": 2, "intermediate_size": 24, **more}


CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "mixtral": lambda: MixtralConfig(**_heads(num_local_experts=EXPERTS, num_experts_per_tok=2)),
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **_heads(num_experts=EXPERTS, num_experts_per_tok=3, moe_intermediate_size=16, shared_expert_intermediate_size=16)
    ),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **_heads(
            num_experts=EXPERTS,
            num_experts_per_tok=3,
            moe_intermediate_size=16,
            head_dim=8,
            norm_topk_prob=True,
            mlp_only_layers=[1],
        )
    ),
    "olmoe": lambda: OlmoeConfig(**_heads(num_experts=EXPERTS, num_experts_per_tok=3)),
    "deepseek_v2": lambda: DeepseekV2Config(**COMMON, **_LATENT, topk_method="greedy"),
    "deepseek_v2 groups": lambda: DeepseekV2Config(
        **COMMON, **_LATENT, topk_method="group_limited_greedy", n_group=4, topk_group=2
    ),
    "deepseek_v3": lambda: DeepseekV3Config(**COMMON, **_LATENT, n_group=4, topk_group=2, norm_topk_prob=True),
    "moonlight": lambda: DeepseekV3Config(**COMMON, **_LATENT, n_group=1, topk_group=1, norm_topk_prob=True),
    "gpt_oss": lambda: GptOssConfig(
        **_heads(num_local_experts=EXPERTS, num_experts_per_tok=2, head_dim=8, sliding_window=6, **_ROPE)
    ),
}


@cache
def tiny(name: str) -> Any:
    """Give a random model; also what is zero in a fresh one, but not in a trained one, is random."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if hasattr(module, "e_score_correction_bias"):
            module.e_score_correction_bias.copy_(0.3 * torch.randn(EXPERTS, generator=generator))
    for block in moe_blocks(model):
        if name == "gpt_oss":
            block.router.bias.data = 0.5 * torch.randn(EXPERTS, generator=generator)
    return model


def moe_blocks(model: Any) -> list[Any]:
    return [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "experts")]


def block_inputs(model: Any, tokens: Sequence[int]) -> Tensor:
    """What each MoE block reads, (n_tokens, n_blocks, hidden): one request, all tokens at once, no cache."""
    seen: list[Tensor] = []
    handles = [
        block.register_forward_pre_hook(lambda _m, args: seen.append(args[0].detach().reshape(-1, HIDDEN).clone()))
        for block in moe_blocks(model)
    ]
    with torch.no_grad():
        model(input_ids=torch.tensor([list(tokens)]), use_cache=False)
    for handle in handles:
        handle.remove()
    return torch.stack(seen, dim=1)


class ByHand(NamedTuple):
    """Routing of one token in one layer."""

    ids: list[int]  # in rank order
    weights: list[float]
    scores: Tensor  # of all experts
    ranked: Tensor  # what they are ranked by; -inf where they may not be chosen


def route(name: str, block: Any, state: Tensor) -> ByHand:
    """Route one state by the architecture's own formula."""
    config = CONFIGS[name]()
    top_k = config.num_experts_per_tok
    if name == "gpt_oss":
        return _gpt_oss(block, state, top_k)
    logits = block.gate.weight.detach() @ state
    if name in ("deepseek_v3", "moonlight"):
        scores = 1 / (1 + torch.exp(-logits))
        ranked = scores + block.gate.e_score_correction_bias
        if name == "deepseek_v3":
            ranked = _in_groups(ranked, lambda group: group.sort(descending=True).values[:2].sum())
        ids = _best(ranked, top_k)
        chosen = scores[ids]
        return ByHand(ids, (2.5 * chosen / chosen.sum()).tolist(), scores, ranked)
    scores = torch.exp(logits - logits.max()) / torch.exp(logits - logits.max()).sum()
    ranked = _in_groups(scores, lambda group: group.max()) if name == "deepseek_v2 groups" else scores
    ids = _best(ranked, top_k)
    weights = scores[ids]
    if name in ("mixtral", "qwen3_moe"):  # the config of the others does not normalise
        weights = weights / weights.sum()
    if name.startswith("deepseek_v2"):
        weights = 2.5 * weights
    return ByHand(ids, weights.tolist(), scores, ranked)


def _best(values: Tensor, n: int) -> list[int]:
    return sorted(range(len(values)), key=lambda e: (-float(values[e]), e))[:n]


def _in_groups(values: Tensor, of_group: Callable[[Tensor], Tensor]) -> Tensor:
    """Keep the two best of four groups of two experts."""
    groups = [values[2 * g : 2 * g + 2] for g in range(4)]
    kept = _best(torch.stack([of_group(group) for group in groups]), 2)
    ranked = torch.full_like(values, -torch.inf)
    for g in kept:
        ranked[2 * g : 2 * g + 2] = groups[g]
    return ranked


def _gpt_oss(block: Any, state: Tensor, top_k: int) -> ByHand:
    logits = block.router.weight.detach() @ state + block.router.bias.detach()
    ids = _best(logits, top_k)
    return ByHand(ids, logits[ids].softmax(dim=0).tolist(), logits.softmax(dim=0), logits)


def save_tiny(folder: Path, name: str, *, chat_template: bool = False) -> Path:
    return save_model(folder, tiny(name), chat_template=chat_template)


def save_model(folder: Path, model: Any, *, chat_template: bool = False) -> Path:
    """Save a model with a tokenizer of words w0, w1, ... as users have it."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    model.save_pretrained(folder)
    words = ["<s>", "</s>", "<unk>", *(f"w{n}" for n in range(VOCABULARY - 3))]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    saved = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    if chat_template:
        saved.chat_template = (
            "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}w9{% endif %}"
        )
    saved.save_pretrained(folder)
    return folder


#: Texts of the two prompt files that `make_home` writes.
PROMPTS = ["w1 w2 w3", "w7 w8 w9 w10 w11", "w4", "w5 w6 w20 w21", "w30 w31"]
OTHERS = ["w40 w41 w42", "w50 w51", "w3 w2 w1"]


def make_home(folder: Path) -> Path:
    """Make a folder with two models and two files of prompts."""
    save_tiny(folder / "mixtral", "mixtral", chat_template=True)
    save_tiny(folder / "qwen3", "qwen3_moe")
    (folder / "prompts.txt").write_text("\n".join([PROMPTS[0], "", *PROMPTS[1:]]) + "\n")
    (folder / "others.txt").write_text("\n".join(OTHERS))
    return folder


def run(home: Path, out: Path, *arguments: str, model: str = "mixtral", prompts: str = "prompts.txt") -> Trace:
    """Call the command as the shell would, with errors as they are."""
    app = typer.Typer()
    app.command()(trace_record)
    where = [str(home / model), "--prompts", str(home / prompts), "--out", str(out)]
    try:
        app(args=[*where, "--max-new-tokens", "6", *arguments], standalone_mode=False)
    except MoesimError as error:
        error.args = (error.of_command or str(error),)  # as the command prints it
        raise
    return Trace.read(out)


def calibrate(model: Any, prompts: Sequence[Sequence[int]], n_decode: Sequence[int]) -> dict[str, Any]:
    """Calibration tables of requests, counted two at a time."""
    recorder = Recorder(model)
    counts = counts_of(recorder)
    for batch in Plan(batch_size=2).batches([(len(prompt), n) for prompt, n in zip(prompts, n_decode, strict=True)]):
        asked = [prompts[r] for r in batch], [n_decode[r] for r in batch]
        calibrate_batch(recorder, counts, *asked, list(batch), Sampling())
    return counts.tables()
