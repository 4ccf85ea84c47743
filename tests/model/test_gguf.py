"""Small GGUF files of several architectures, written with the library and read back as model specifications."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moesim.api.arguments import written
from moesim.errors import ModelError
from moesim.model import load_model
from moesim.model.gguf import read_gguf
from moesim.model.gguf_header import read_header
from moesim.studies.advice.question import model_yaml
from tests.model.gguf_kit import F32, HEAD, HEADS, HIDDEN, KV, Q4_K, Q8_0, VOCAB, Writer, attention, basic, ends, experts, whole


def check_bytes(w: Writer, path: Path, n_experts: int) -> Any:
    """What the specification weighs is what was written."""
    spec = read_gguf(path)
    of_experts = {name: n for name, n in w.bytes.items() if "_exps" in name}
    assert spec.expert_bytes_by_layer is not None
    assert sum(spec.expert_bytes_by_layer) * n_experts == sum(of_experts.values())
    rest = sum(w.bytes.values()) - sum(of_experts.values())
    assert spec.non_expert_bytes == pytest.approx(rest, rel=1e-3)
    return spec


def test_mixtral_with_layers_of_different_bits(tmp_path: Path):
    path = tmp_path / "mixtral.gguf"
    w = basic(path, "llama", 3)
    for layer in range(3):
        attention(w, layer)
        experts(w, layer, 8, 512, Q4_K, Q8_0 if layer == 0 else Q4_K)
    ends(w)
    w.close()
    spec = check_bytes(w, path, 8)
    matrix = HIDDEN * 512
    q4, q8 = matrix // 256 * 144, matrix // 32 * 34
    assert spec.expert_bytes_by_layer == (2 * q4 + q8, 3 * q4, 3 * q4)
    assert (spec.n_layers, spec.n_experts, spec.top_k, spec.hidden, spec.expert_intermediate) == (3, 8, 2, HIDDEN, 512)
    assert (spec.n_heads, spec.n_kv_heads, spec.head_dim, spec.vocab, spec.qk_norm) == (HEADS, KV, HEAD, VOCAB, "none")
    assert (spec.n_dense_layers, spec.n_shared, spec.tie_embeddings, spec.name) == (0, 0, False, "mixtral")
    assert load_model(written(spec, "model")) == spec  # as a function of Python passes it on


def test_qwen3moe_with_head_norms_and_a_tied_head(tmp_path: Path):
    path = tmp_path / "q.gguf"
    w = basic(path, "qwen3moe", 2, expert_feed_forward_length=128, attention__key_length=32, attention__value_length=32)
    w.writer.add_name("Qwen3 Small\tA1B")
    for layer in range(2):
        w.add(f"blk.{layer}.attn_q.weight", HEADS * 32, HIDDEN).add(f"blk.{layer}.attn_k.weight", KV * 32, HIDDEN)
        w.add(f"blk.{layer}.attn_v.weight", KV * 32, HIDDEN).add(f"blk.{layer}.attn_output.weight", HIDDEN, HEADS * 32)
        w.add(f"blk.{layer}.attn_norm.weight", HIDDEN, kind=F32).add(f"blk.{layer}.ffn_norm.weight", HIDDEN, kind=F32)
        w.add(f"blk.{layer}.attn_q_norm.weight", 32, kind=F32).add(f"blk.{layer}.attn_k_norm.weight", 32, kind=F32)
        experts(w, layer, 16, 128)
    ends(w, output=False)
    w.close()
    spec = check_bytes(w, path, 16)
    assert (spec.name, spec.qk_norm, spec.head_dim, spec.tie_embeddings) == ("qwen3-small-a1b", "head", 32, True)
    assert (spec.n_experts, spec.expert_intermediate) == (16, 128)  # of the tensors, whatever the metadata says


def test_deepseek2_with_latent_attention_a_dense_layer_and_shared_experts(tmp_path: Path):
    path = tmp_path / "d.gguf"
    latent = {
        "attention__kv_lora_rank": 64, "rope__dimension_count": 16, "attention__key_length": 80, "attention__value_length": 64,
        "attention__key_length_mla": 48, "attention__value_length_mla": 32,
        "leading_dense_block_count": 1, "expert_shared_count": 2,
    }  # fmt: skip
    w = basic(path, "deepseek2", 3, **latent)
    for layer in range(3):
        w.add(f"blk.{layer}.attn_q.weight", HEADS * 48, HIDDEN).add(f"blk.{layer}.attn_kv_a_mqa.weight", 80, HIDDEN)
        w.add(f"blk.{layer}.attn_kv_a_norm.weight", 64, kind=F32).add(f"blk.{layer}.attn_k_b.weight", HEADS, 64, 32)
        w.add(f"blk.{layer}.attn_v_b.weight", HEADS, 32, 64).add(f"blk.{layer}.attn_output.weight", HIDDEN, HEADS * 32)
        w.add(f"blk.{layer}.attn_norm.weight", HIDDEN, kind=F32).add(f"blk.{layer}.ffn_norm.weight", HIDDEN, kind=F32)
        if layer == 0:
            for name, shape in (("gate", (512, HIDDEN)), ("up", (512, HIDDEN)), ("down", (HIDDEN, 512))):
                w.add(f"blk.0.ffn_{name}.weight", *shape)
            continue
        experts(w, layer, 8, 64)
        for name, shape in (("gate", (128, HIDDEN)), ("up", (128, HIDDEN)), ("down", (HIDDEN, 128))):
            w.add(f"blk.{layer}.ffn_{name}_shexp.weight", *shape)
    ends(w)
    w.close()
    spec = check_bytes(w, path, 8)
    assert (spec.n_layers, spec.n_dense_layers, spec.dense_intermediate) == (2, 1, 512)
    assert (spec.n_shared, spec.shared_intermediate, spec.shared_gate) == (2, 128, False)
    assert (spec.kv_lora_rank, spec.rope_head_dim, spec.nope_head_dim, spec.v_head_dim) == (64, 16, 32, 32)


def test_gpt_oss_with_biases_and_sinks(tmp_path: Path):
    path = tmp_path / "g.gguf"
    w = basic(path, "gpt-oss", 2)
    for layer in range(2):
        attention(w, layer)
        for name, n in (("attn_q", HEADS * HEAD), ("attn_k", KV * HEAD), ("attn_v", KV * HEAD), ("attn_output", HIDDEN)):
            w.add(f"blk.{layer}.{name}.bias", n, kind=F32)
        w.add(f"blk.{layer}.attn_sinks.weight", HEADS, kind=F32).add(f"blk.{layer}.ffn_gate_inp.bias", 8, kind=F32)
        experts(w, layer, 8, 128)
        for name, n in (("gate", 128), ("up", 128), ("down", HIDDEN)):
            w.add(f"blk.{layer}.ffn_{name}_exps.bias", 8, n, kind=F32)
    ends(w)
    w.close()
    spec = check_bytes(w, path, 8)
    assert spec.expert_bias and spec.qkv_bias and spec.out_bias and spec.router_bias and spec.attention_sinks
    # A whole model, which an experiment can name.
    written = tmp_path / "model.yaml"
    written.write_text(model_yaml(spec))
    again = load_model(written)
    assert again.expert_bytes_by_layer == spec.expert_bytes_by_layer
    assert again.non_expert_bytes == spec.non_expert_bytes and again.active_params == spec.active_params


def test_a_split_model_is_read_from_any_of_its_parts(tmp_path: Path):
    first, second = (tmp_path / f"m-0000{n}-of-00002.gguf" for n in (1, 2))
    w = basic(first, "llama", 2)
    attention(w, 0)
    experts(w, 0, 8, 64)
    ends(w)
    w.close()
    more = Writer(second, "llama")
    attention(more, 1)
    experts(more, 1, 8, 64)
    more.close()
    for part in (first, second):
        spec = read_gguf(part)
        assert (spec.name, spec.n_layers) == ("m", 2)
    second.unlink()
    with pytest.raises(ModelError, match=r"m-00002-of-00002\.gguf: expected 2 parts of a split GGUF file, got nothing there"):
        read_gguf(first)


@pytest.mark.parametrize("share", [0.0, 0.0005, 0.2, 0.9])
def test_a_header_that_is_cut_is_one_line(tmp_path: Path, share: float):
    path = tmp_path / "m.gguf"
    content = whole(path)
    header = content.rindex(b"output.weight")  # the last tensor that is described
    path.write_bytes(content[: int(share * header)])
    with pytest.raises(ModelError) as caught:
        read_gguf(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value) and "fetch it anew" in str(caught.value)


def test_the_header_alone_gives_the_same_model(tmp_path: Path):
    path = tmp_path / "m.gguf"
    content = whole(path)
    spec = read_gguf(path)
    path.write_bytes(content[: content.rindex(b"output.weight") + 100])
    alone = read_gguf(path)
    assert (spec.source, alone.source) == ("m.gguf (GGUF, llama)", "m.gguf (GGUF, llama, header only)")
    assert (alone.n_bytes, alone.total_params, alone.blocks) == (spec.n_bytes, spec.total_params, spec.blocks)


def test_other_files_are_one_line(tmp_path: Path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(4096))
    with pytest.raises(ModelError, match="expected a GGUF file, got one that begins with"):
        read_gguf(path)
    with pytest.raises(ModelError, match="expected a GGUF file, got: Is a directory"):
        read_gguf(tmp_path)


def test_an_unknown_architecture_is_read_by_its_tensors(tmp_path: Path):
    path = tmp_path / "m.gguf"
    whole(path)
    known = read_gguf(path)
    whole(path, "brand-new")
    found = read_gguf(path)
    assert (found.total_params, found.n_bytes, found.all_kv_bytes(4096)) == (
        known.total_params, known.n_bytes, known.all_kv_bytes(4096)
    )  # fmt: skip


def test_tensors_of_an_unknown_type_reach_to_the_next(tmp_path: Path):
    path = tmp_path / "m.gguf"
    content = whole(path)
    known = read_header(path)
    name = b"blk.0.ffn_down_exps.weight"
    at = content.index(name) + len(name) + 4 + 3 * 8
    path.write_bytes(content[:at] + (9999).to_bytes(4, "little") + content[at + 4 :])
    found = read_header(path)
    assert found.unknown == ("type 9999",)
    assert found.tensors[name.decode()].n_bytes == pytest.approx(known.tensors[name.decode()].n_bytes, abs=31)


def test_a_dense_model_is_refused(tmp_path: Path):
    path = tmp_path / "m.gguf"
    w = basic(path, "llama", 1)
    attention(w, 0)
    w.add("blk.0.ffn_up.weight", 64, HIDDEN)
    ends(w)
    w.close()
    with pytest.raises(ModelError, match="got none; choose another model"):
        read_gguf(path)


def test_one_tensor_an_expert_as_files_of_before_2024_have(tmp_path: Path):
    path = tmp_path / "m.gguf"
    w = basic(path, "llama", 2)
    for layer in range(2):
        attention(w, layer)
        for expert in range(8):
            for name, shape in (("gate", (64, HIDDEN)), ("up", (64, HIDDEN)), ("down", (HIDDEN, 64))):
                w.add(f"blk.{layer}.ffn_{name}.{expert}.weight", *shape)
    ends(w)
    w.close()
    spec = read_gguf(path)
    assert (spec.n_experts, spec.expert_intermediate, spec.expert_params) == (8, 64, 3 * 64 * HIDDEN)
    assert spec.experts_bytes_total == sum(n for name, n in w.bytes.items() if "ffn_" in name and name.count(".") == 4)


def test_a_folder_with_two_models_asks_which(tmp_path: Path):
    whole(tmp_path / "a.gguf")
    (tmp_path / "mmproj-a.gguf").write_bytes(b"of pictures")
    assert load_model(tmp_path).name == "a"
    whole(tmp_path / "b.gguf")
    with pytest.raises(ModelError, match="expected one model, got 2 GGUF files; name the one that is meant"):
        load_model(tmp_path)


def _windowed(path: Path, architecture: str, pattern: Any = None, **more: int) -> Any:
    w = basic(path, architecture, 4, **more)
    if isinstance(pattern, list):
        w.writer.add_array(f"{architecture}.attention.{'compress_ratios' if 'deepseek' in architecture else SWA}", pattern)
    elif pattern is not None:
        w.writer.add_uint32(f"{architecture}.attention.{SWA}", pattern)
    for layer in range(4):
        attention(w, layer)
        experts(w, layer, 8, 64)
    ends(w)
    w.close()
    return read_gguf(path)


SWA = "sliding_window_pattern"


@pytest.mark.parametrize(
    ("architecture", "pattern", "windows"),
    [
        ("gpt-oss", None, 2), ("mimo2", [1, 1, 0, 1], 3), ("mimo2", [True, False], 2), ("afmoe", 2, 2), ("step35", 0, 4),
        ("mimo2", 1, 0), ("llama", None, 0), ("afmoe", None, 3),
    ],
)  # fmt: skip
def test_layers_with_a_window(tmp_path: Path, architecture: str, pattern: Any, windows: int):
    """A pattern of layers begins anew where it ends; a number is how often a layer sees all, 0 never."""
    spec = _windowed(tmp_path / "m.gguf", architecture, pattern, attention__sliding_window=16)
    row = 2 * 2 * KV * HEAD
    assert spec.all_kv_bytes(1000) == row * (16 * windows + 1000 * (4 - windows))


def test_what_an_engine_knows_of_an_architecture(tmp_path: Path):
    row = 2 * 2 * KV * HEAD
    chunked = _windowed(tmp_path / "m.gguf", "llama4")
    assert chunked.all_kv_bytes(100_000) == row * (3 * 8192 + 100_000)
    shared = _windowed(tmp_path / "m.gguf", "gemma4", attention__shared_kv_layers=3)
    assert shared.all_kv_bytes(1000) == row * 1000
    index = {"attention__indexer__head_count": 2, "attention__indexer__key_length": 32, "attention__indexer__top_k": 8}
    keys = {"attention__key_length": 64, "attention__sliding_window": 16}
    v4 = _windowed(tmp_path / "m.gguf", "deepseek4", [0, 4, 128, 4, 0], **index, **keys)
    assert v4.all_kv_bytes(1280) == 2 * (4 * 16 * 64 + 2 * 320 * (64 + 32) + 10 * 64)
