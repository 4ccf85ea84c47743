"""GGUF files of every architecture with experts that the gguf library knows: types mixed, in two parts, header only."""

from __future__ import annotations

import re
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")

from moesim.model import ModelSpec  # noqa: E402
from moesim.model.card import Card  # noqa: E402
from moesim.model.gguf import read_gguf  # noqa: E402

TENSORS = {
    gguf.MODEL_ARCH_NAMES[arch]: [gguf.TENSOR_NAMES[one] for one in tensors]
    for arch, tensors in gguf.MODEL_TENSORS.items()
    if gguf.MODEL_TENSOR.FFN_DOWN_EXP in tensors
}
D, HEADS, KV, HEAD, EXPERTS, WIDTH, SHARED, DENSE, VOCAB = 256, 8, 2, 32, 8, 256, 512, 1024, 96
RANK, ROPE, INNER, STATE, KERNEL, GROUPS, TAKEN = 96, 32, 512, 16, 4, 1, 2
SHAPES = {  # of a tensor as NumPy has it: rows of inputs; what is not here is a vector
    "ffn_gate_inp": (EXPERTS, D), "ffn_gate_inp_shexp": (D,), "exp_probs_b": (EXPERTS,), "ffn_latent_down": (128, D),
    "ffn_latent_up": (D, 128), "attn_q": (HEADS * HEAD, D), "attn_k": (KV * HEAD, D), "attn_v": (KV * HEAD, D),
    "attn_output": (D, HEADS * HEAD), "attn_gate": (INNER, D), "attn_qkv": (INNER + 2 * STATE, D), "attn_q_a": (64, D),
    "attn_q_b": (HEADS * (HEAD + ROPE), 64), "attn_kv_a_mqa": (RANK + ROPE, D), "attn_k_b": (HEADS, RANK, HEAD),
    "attn_v_b": (HEADS, HEAD, RANK), "attn_q_norm": (HEAD,), "attn_k_norm": (HEAD,), "attn_sinks": (HEADS,),
    "ssm_in": (2 * INNER, D), "ssm_out": (D, INNER), "ssm_conv1d": (INNER, KERNEL), "ssm_x": (64, INNER),
    "ssm_ba": (2 * HEADS, D),
    "ssm_conv1d_q": (INNER, KERNEL), "ssm_conv1d_k": (INNER, KERNEL), "ssm_conv1d_v": (INNER, KERNEL),
    "shortconv.in_proj": (3 * D, D), "shortconv.out_proj": (D, D), "shortconv.conv": (D, 3), "indexer.attn_k": (32, D),
    "indexer.attn_q_b": (4 * 32, 64), "indexer.proj": (4, D), "inp_gate": (64, D), "proj": (D, 64), "nextn.eh_proj": (D, 2 * D),
} | {
    f"ffn_{part}_{end}": (*n, D, width) if part == "down" else (*n, width * (1 + (part == "gate_up")), D)
    for part in ("gate", "up", "down", "gate_up")
    for end, n, width in (("exps", (EXPERTS,), WIDTH), ("chexps", (EXPERTS // 2,), 64), ("shexp", (), SHARED))
} | {f"ffn_{part}": (D, DENSE) if part == "down" else (DENSE, D) for part in ("gate", "up", "down")}  # fmt: skip
LINEAR = re.compile("ssm_|shortconv|attn_qkv|attn_gate")
OF_ATTENTION = re.compile("attn_(?:q|k|v|output|q_a|q_b|kv_a_mqa|k_b|v_b|q_norm|k_norm|q_a_norm|kv_a_norm|sinks)$|indexer")
LATENT = re.compile("attn_(?:q_a|q_b|kv_a|k_b|v_b|kv_b|q_a_norm)|indexer")
LAYERS = 4


class Made:
    """A file: which tensors it has, by name, and what they weigh."""

    def __init__(self, architecture: str) -> None:
        names = TENSORS[architecture]
        parts = [one.partition("{bid}.")[2] for one in names if "{bid}" in one]
        self.architecture, self.latent = architecture, "attn_kv_a_mqa" in parts
        self.linear = any(LINEAR.match(one) and one.startswith(("ssm", "shortconv")) for one in parts)
        self.dense = "ffn_up" in parts and architecture not in ("grok", "arctic", "gemma4")
        self.predicts = "nextn.eh_proj" in parts
        fused = "ffn_gate_up_exps" in parts
        self.tensors: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, D)}
        unread = ("token_embd.", "rope", "position", "token_types")
        for name in (one for one in names if "{bid}" not in one and one != "token_embd" and not one.startswith(unread)):
            self.tensors[f"{name}.weight"] = (VOCAB, D) if name in ("output", "per_layer_token_embd") else (D,)
        for layer in range(LAYERS + self.predicts):
            for part in dict.fromkeys(parts):
                if self._has(part, layer, fused):
                    self.tensors[f"blk.{layer}.{part}.weight"] = SHAPES.get(part, (D,))

    def _has(self, part: str, layer: int, fused: bool) -> bool:
        linear = self.linear and layer % 2 == 1
        if part.startswith("nextn"):
            return layer == LAYERS
        if part.startswith(("ffn", "exp_probs")) and "norm" not in part and part not in ("ffn_gate", "ffn_up", "ffn_down"):
            only = ("ffn_gate_exps", "ffn_up_exps") if fused else ("ffn_gate_up_exps",)
            return part not in only and not (self.dense and layer == 0)
        if part in ("ffn_gate", "ffn_up", "ffn_down"):
            return not self.dense or layer == 0
        if OF_ATTENTION.match(part) and part not in ("attn_gate", "attn_qkv"):
            plain = not self.latent or LATENT.match(part) or part in ("attn_output", "attn_kv_a_norm")
            return not linear and bool(plain) and part != "attn_kv_b"
        return (
            linear if LINEAR.match(part) and self.linear else part not in ("attn_gate", "attn_qkv", "attn_rot_embd", "attn_kv_b")
        )

    def write(self, path: Path, split: int = 0) -> dict[str, int]:
        """Write headers alone, in parts of so many tensors; return the bytes of each tensor."""
        w = gguf.GGUFWriter(path, self.architecture, split_max_tensors=split)
        facts: dict[str, int] = {
            "block_count": LAYERS + self.predicts, "embedding_length": D, "feed_forward_length": DENSE, "expert_count": EXPERTS,
            "expert_used_count": TAKEN, "expert_feed_forward_length": WIDTH, "attention.head_count": HEADS,
            "attention.head_count_kv": KV, "attention.key_length": HEAD, "attention.value_length": HEAD,
        }  # fmt: skip
        facts |= {"nextn_predict_layers": 1} if self.predicts else {}
        facts |= {"attention.kv_lora_rank": RANK, "rope.dimension_count": ROPE} if self.latent else {}
        indexer = {"head_count": 4, "key_length": 32, "top_k": 64}
        facts |= {f"attention.indexer.{name}": n for name, n in indexer.items()} if self.architecture == "glm-dsa" else {}
        state = {"inner_size": INNER, "state_size": STATE, "conv_kernel": KERNEL, "group_count": GROUPS}
        facts |= {f"ssm.{name}": n for name, n in state.items()} if self.linear else {}
        facts |= {"shortconv.l_cache": 3} if self.architecture == "lfm2moe" else {}
        facts |= {"kda.head_dim": 64} if self.architecture == "kimi-linear" else {}
        for name, value in facts.items():
            w.add_uint32(f"{self.architecture}.{name}", value)
        kinds, weights = cycle(("Q4_K", "Q6_K", "Q8_0", "Q5_0", "BF16")), {}
        for name, shape in self.tensors.items():
            kind = getattr(gguf.GGMLQuantizationType, next(kinds) if len(shape) > 1 and shape[-1] % 256 == 0 else "F32")
            block, size = gguf.GGML_QUANT_SIZES[kind]
            weights[name] = int(np.prod(shape)) // block * size
            rows = (*shape[:-1], shape[-1] // block * size) if kind.name != "F32" else shape
            dtype = np.dtype(np.float32 if kind.name == "F32" else np.uint8)
            w.add_tensor_info(name, rows, dtype, weights[name], None if kind.name == "F32" else kind)
        w.write_header_to_file(path)
        w.write_kv_data_to_file()
        w.write_ti_data_to_file()
        w.close()
        return weights

    def counts(self, name: str) -> bool:
        """Whether a tensor is of the model and not of layers that predict ahead."""
        return f"blk.{LAYERS}." not in name


def check(spec: ModelSpec, made: Made, weights: dict[str, int]) -> None:
    of_model = [name for name in made.tensors if made.counts(name)]
    params = {name: int(np.prod(made.tensors[name])) for name in of_model}
    assert spec.total_params == sum(params.values())
    assert spec.n_bytes == sum(weights[name] for name in of_model)
    experts = [name for name in of_model if re.search("_(?:ch)?exps", name) and "norm" not in name]
    assert spec.experts_bytes_total == sum(weights[name] for name in experts)
    assert spec.n_layers == LAYERS - made.dense and (spec.n_experts, spec.top_k, spec.hidden) == (EXPERTS, TAKEN, D)
    assert "\n" not in spec.source and Card(spec).text()
    row = 2 * (RANK + ROPE) if made.latent else 2 * 2 * KV * HEAD
    row += 2 * 32 * (made.architecture == "glm-dsa")
    attending = LAYERS // 2 if made.linear else LAYERS
    assert spec.all_kv_bytes(1000) - spec.all_kv_bytes(500) == 500 * row * attending
    if made.linear:
        assert spec.kv_bytes(-1 if made.dense and spec.leading else 0, 0) >= 0 and spec.all_kv_bytes(0) > 0


@pytest.mark.parametrize("architecture", TENSORS)
def test_an_architecture_of_the_library(architecture: str, tmp_path: Path) -> None:
    made = Made(architecture)
    path = tmp_path / "model.gguf"
    weights = made.write(path)
    whole = read_gguf(path)
    check(whole, made, weights)
    made.write(tmp_path / "parts.gguf", split=len(made.tensors) // 2 + 1)
    parts = sorted(tmp_path.glob("parts-*.gguf"))
    assert len(parts) == 2
    check(read_gguf(parts[0]), made, weights)


def test_there_are_enough() -> None:
    assert len(TENSORS) >= 30
