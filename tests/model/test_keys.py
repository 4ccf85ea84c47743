"""Configs of many architectures: layers, parameters and bytes, held against what publishers state and against sums by hand."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

import pytest

from moesim.errors import ModelError
from moesim.model import ModelSpec, load_model
from moesim.model.card import Card
from moesim.model.keys import read_model
from moesim.model.load import model_names
from moesim.model.parts import Store

TINY = {
    "model_type": "brand_new", "vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "dtype": "bfloat16",
}  # fmt: skip
EXPERT = 3 * 64 * 16
SPARSE = {"sparse_topk_blocks": 4, "sparse_num_index_heads": 2, "sparse_index_dim": 8, "sparse_block_size": 4}


def tiny(**changes: Any) -> ModelSpec:
    return read_model({**TINY, **changes}, None, "tiny", "config.json")


@pytest.mark.parametrize("name", model_names())
def test_a_listed_model_has_its_published_parameters(name: str) -> None:
    spec = load_model(name)
    published = _published()[name]
    assert spec.total_params == pytest.approx(published["total"] * 1e9, rel=ROUNDED.get(name, 0.021))
    # Some publishers count the embedding as active, some do not; names are rounded.
    counts = [spec.active_params, spec.active_params - spec.embedding_params]
    assert any(n == pytest.approx(published["active"] * 1e9, rel=0.25, abs=0.5e9) for n in counts)


ROUNDED = {"ernie-4.5-21b-a3b": 0.04, "kimi-linear-48b-a3b": 0.025}


def _published() -> dict[str, dict[str, float]]:
    from moesim.model.load import _listed

    return {name: entry["published"] for name, entry in _listed().items()}


def test_names_and_aliases() -> None:
    assert load_model("Qwen/Qwen3-30B-A3B") == load_model("qwen3-30b-a3b")
    assert load_model("deepseek-r1").name == "deepseek-v3"
    assert load_model("GPT-OSS-120B").total_params == load_model("gpt-oss-120b").total_params
    with pytest.raises(ModelError, match=r"unknown model 'glm-4.5-ear'; did you mean 'glm-4.5-air'"):
        load_model("glm-4.5-ear")


def test_an_unknown_architecture_is_read_by_its_keys_and_says_so() -> None:
    spec = tiny(moe_latent_width=32)
    attention = 64 * 64 * 2 + 2 * 64 * 32
    assert spec.total_params == 4 * (8 * EXPERT + attention + 8 * 64 + 2 * 64) + 2 * 100 * 64 + 64
    shape = tiny(moe_latent_width=32, sliding_window_pattern=2, sliding_window=8).shape
    assert shape is not None
    assert shape.notes == ("architecture brand_new: read by its keys", "keys not understood: moe_latent_width")


def test_what_is_guessed_or_left_out_is_noted() -> None:
    assert tiny(layer_types=["banana"] * 4).notes[0] == "layer_types: banana not known: taken for attention over all tokens"
    assert tiny(vision_config={"a": 1}, audio_config=None).notes[0] == "left out: vision"
    assert tiny(num_attention_heads=6).notes[-1] == "head_dim is absent: 10, hidden_size over heads, rounded down"
    assert tiny(router_hidden_size=8, rope_theta=10).notes[-1] == "keys not understood: router_hidden_size"
    assert tiny(num_attention_heads=[4] * 4).total_params == tiny().total_params
    assert tiny(block_configs=[{}] * 4).notes[-1] == "keys not understood: block_configs"
    named = read_model(TINY, None, "tiny-NVFP4", "config.json")
    assert named.notes[0] == "the name says NVFP4, but nothing describes it: 16 bits; is hf_quant_config.json missing?"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["linear_attention"] * 4}, "expected keys of the linear layers that layer_types names"),
        ({"moe_intermediate_size": [16, 16, 16, 32]}, "moe_intermediate_size: expected one value for all layers"),
        ({"num_experts": None}, "expected n_routed_experts or num_experts or num_local_experts"),
        ({"num_experts_per_tok": None}, "expected num_experts_per_tok or num_experts_per_token"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder: expected a decoder alone"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: expected an integer from 1 to 10000, got 1000000000"),
        ({"hidden_size": 10**12}, "hidden_size: expected an integer from 1 to 10000000"),
        ({"layer_types": ["full_attention"]}, "layer_types: expected a list of 4 values, one a layer"),
        ({"hybrid_override_pattern": "MXE"}, "hybrid_override_pattern: expected letters M, *, E and -, got 'MXE'"),
        ({"mlp_only_layers": [0, 1, 2, 3]}, "expected at least one layer with routed experts, got 4 dense ones"),
    ],
)
def test_what_cannot_be_read_says_which_key_it_lacks(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as caught:
        tiny(**changes)
    assert str(caught.value).startswith(f"config.json: {message}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "spelled",
    [
        {
            "dim": 64, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2,
            "moe": {"num_experts": 8, "num_experts_per_tok": 2, "expert_hidden_dim": 16},
        },
        {
            "dim": 64, "n_layers": 4, "n_heads": 4, "num_query_groups": 2, "n_routed_experts": 8, "n_activated_experts": 2,
            "moe_inter_dim": 16,
        },
        {
            "n_embd": 64, "n_layer": 4, "n_head": 4, "n_head_kv": 2, "num_moe_experts": 8, "moe_router_topk": 2,
            "moe_ffn_hidden_size": 16,
        },
    ],
)  # fmt: skip
def test_keys_of_other_software(spelled: dict[str, Any]) -> None:
    found = read_model({"vocab_size": 100, "dtype": "bfloat16", **spelled}, None, "tiny", "params.json")
    assert found.total_params == tiny().total_params and found.all_kv_bytes(9) == tiny().all_kv_bytes(9)


@pytest.mark.parametrize(
    ("changes", "more"),
    [
        ({"residual_moe": True, "intermediate_size": 32}, 4 * 3 * 64 * 32),  # a dense part next to the experts of each layer
        ({"parallel_expert_intermediate_size": 4}, 4 * 4 * 3 * 64 * 4),  # an expert more for each pair
        ({"share_q_dim": 8}, 4 * (8 * (64 + 64) - 64 * 64)),  # queries in two steps
        ({"ngram_vocab_size_ratio": 3}, 3 * 100 * 64),  # a table, of which a token reads rows
        ({"engram_num_embeddings": [300, 400], "engram_head_dim": 8}, 700 * 8),
        ({"ngram_vocab_size_base": 50, "ple_embed_dim": 64, "ple_layer_ids": [2]}, 50 * 64),
        ({"hc_count": 2, "hc_lowrank": 8}, (4 * 2 + 1) * 2 * 64 * (2 * 8 + 1) + 4 * 2 * 2 * 2 * 64),  # of layers, of the head
        ({"model_type": "arctic"}, 4 * 3 * 64 * 64),
        (
            {"model_type": "jetmoe"},
            4 * (2 * 7 * 64 * 32 - 2 * 64 * 32 + 8 * 64 + 64) - 100 * 64,
        ),  # 8 for queries and output; tied
        ({"num_experts_per_tok": None, "num_selects": 2, "moe_intermediate_size": None, "intermediate_size": 128}, 0),
    ],
)
def test_parts_that_a_key_or_a_name_adds(changes: dict[str, Any], more: int) -> None:
    assert tiny(**changes).total_params == tiny().total_params + more


@pytest.mark.parametrize(
    ("changes", "chosen"),
    [
        ({"layer_types": ["full_attention", "my_sparse", "my_sparse", "full_attention"], "index_block_size": 4}, [1, 2]),
        ({"index_block_size": 4}, [0, 1, 2, 3]),
        ({"layer_types": ["full_attention"] * 4}, [0, 1, 2, 3]),  # an indexer in every layer with attention
        ({"index_topk_blocks": None, "sparse_attention_config": SPARSE | {"sparse_attention_freq": [0, 1, 1, 1]}}, [1, 2, 3]),
    ],
)
def test_layers_with_an_indexer(changes: dict[str, Any], chosen: list[int]) -> None:
    spec = tiny(**{"index_topk_blocks": 4, "index_n_heads": 2, "index_head_dim": 8} | changes)
    assert [layer for layer, block in enumerate(spec.blocks) if block.mixer and "chosen" in block.mixer.kind] == chosen


def test_layers_that_read_what_an_earlier_one_keeps() -> None:
    """Every other layer has no keys and values of its own, and costs as much to read."""
    own, half = tiny(), tiny(use_cla=True, cla_share_factor=2)
    assert own.total_params - half.total_params == 2 * 2 * 64 * 32
    assert half.all_kv_bytes(100) == own.all_kv_bytes(100) / 2 == tiny(num_kv_shared_layers=2).all_kv_bytes(100)
    assert half.all_kv_bytes(100) == tiny(kv_source_layers=[0, 0, 2, 2]).all_kv_bytes(100)
    assert half.all_kv_bytes(100) == tiny(kv_source_layer_ids=[1]).all_kv_bytes(100)
    assert half.token_bytes(1, 100) == own.token_bytes(1, 100) - 2 * 2 * 2 * 64 * 32


@pytest.mark.parametrize("key", ["text_config", "thinker_config", "lm", "decoder"])
def test_the_part_for_language_is_found(key: str) -> None:
    found = read_model({"model_type": "wrapped", "vision": {"num_layers": 3}, key: TINY}, None, "tiny", "config.json")
    assert found.total_params == tiny().total_params
    outer = read_model({"tie_word_embeddings": True, key: TINY | {"tie_word_embeddings": False}}, None, "tiny", "config.json")
    assert outer.tie_embeddings


def test_experts_of_pictures_are_left_out() -> None:
    found = tiny(moe_num_experts=[8, 8], num_experts=None, moe_intermediate_size=[16, 4], moe_layer_end_index=[3, 2])
    assert found.total_params == tiny().total_params and found.notes[0] == "left out: experts of pictures"


@pytest.mark.parametrize(("name", "what"), [("megrez_moe", "experts that several layers share"), ("nomic_bert", "an encoder")])
def test_what_an_architecture_lacks_is_refused(name: str, what: str) -> None:
    with pytest.raises(
        ModelError, match=f"config.json: {name}: expected a decoder whose layers have experts of their own, got {what}"
    ):
        tiny(model_type=name)


@pytest.mark.parametrize(
    ("word", "kind"),
    [
        ("hybrid_sliding", "grouped, window 8"),
        ("local_attention", "grouped, window 8"),
        ("hybrid", "grouped"),
        ("global", "grouped"),
    ],
)  # fmt: skip
def test_words_of_layers(word: str, kind: str) -> None:
    assert {block.mixer.kind for block in tiny(layer_types=[word] * 4, sliding_window=8).blocks if block.mixer} <= {kind}


# ---------------------------------------------------------------------------------- which layers, and what is kept of a token
@pytest.mark.parametrize(
    ("changes", "routed"),
    [
        ({"mlp_layer_types": ["dense", "sparse", "dense", "sparse"]}, [1, 3]),
        ({"moe_layer_freq": [0, 1, 1, 0]}, [1, 2]),
        ({"interleave_moe_layer_step": 2}, [1, 3]),
        ({"interleave_moe_layer_step": 2, "moe_layers": [0, 1, 3]}, [0, 1, 3]),
        ({"interleave_moe_layer_step": 2, "moe_layers": None}, [1, 3]),
        ({"expert_layer_period": 2, "expert_layer_offset": 0}, [0, 2]),
        ({"moe_layer_start_index": 1, "moe_layer_end_index": 2}, [1, 2]),
        ({"moe_layers_enum": "0,3"}, [0, 3]),
        ({"first_k_dense_replace": 2}, [2, 3]),
        ({"mlp_only_layers": [3], "decoder_sparse_step": 2}, [1]),
        ({}, [0, 1, 2, 3]),
    ],
)
def test_which_layers_have_experts(changes: dict[str, Any], routed: list[int]) -> None:
    spec = tiny(intermediate_size=32, **changes)
    assert [number for number, block in enumerate(spec.blocks) if block.routed] == routed
    dense = [number for number, block in enumerate(spec.blocks) if block.dense]
    assert dense == [number for number in range(4) if number not in routed]
    assert spec.experts_bytes_total == len(routed) * 8 * EXPERT * 2


def test_a_window_is_bounded_and_others_are_not() -> None:
    spec = tiny(sliding_window=8, layer_types=["sliding_attention", "full_attention"] * 2)
    row = 2 * 2 * 2 * 16  # keys and values of two heads of 16, two bytes each
    assert spec.kv_bytes(0, 100) == 8 * row and spec.kv_bytes(1, 100) == 100 * row
    assert spec.all_kv_bytes(5) == 4 * 5 * row
    assert spec.kv_bytes(0, 300, 3) == 3 * 8 * row and spec.kv_bytes(0, 15, 3) == 15 * row


def test_gpt_oss_keeps_three_gigabytes_of_131072_tokens() -> None:
    listed = read_model(_keys("gpt-oss-20b"), None, "gpt-oss-20b", "list")
    assert listed.all_kv_bytes(131_072) / 2**30 == pytest.approx(3, rel=2e-3)


def _keys(name: str) -> dict[str, Any]:
    from moesim.model.load import _listed

    keys: dict[str, Any] = _listed()[name]["keys"]
    return keys


def test_a_state_does_not_grow() -> None:
    linear = {
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
    }  # fmt: skip
    spec = tiny(**linear)
    state = 4 * (4 * 8 * 8) + 2 * 3 * (2 * 2 * 8 + 4 * 8)  # a matrix a head in 32 bits, three tokens of the convolution in 16
    assert [spec.kv_bytes(layer, 1000) - spec.kv_bytes(layer, 10) for layer in range(4)] == [0, 0, 0, 990 * 128]
    assert spec.kv_bytes(0, 1000) == state and spec.kv_bytes(0, 1000, 5) == 5 * state


@pytest.mark.parametrize("store", [Store(1), Store(1, per=4), Store(1, kept=7), Store(1, per=3, read=5), Store(1, per=4, kept=9)])
@pytest.mark.parametrize(("before", "new", "n"), [(0, 1, 1), (3, 5, 2), (100, 1, 8), (0, 200, 3), (90, 100, 1)])
def test_rows_that_are_read_by_hand(store: Store, before: int, new: int, n: int) -> None:
    """Of requests of one length, the sum over their tokens is that of the tokens one by one."""
    work2 = n * new * (2 * before + new)
    rows2, pairs2 = store.pairs2(n * new, work2, n)
    plain = store == Store(1)
    one_by_one = sum(store.rows_read(before + i) for i in range(1, new + 1))
    assert pairs2 == (work2 if plain else 2 * n * one_by_one)
    most = store.rows_kept(before + new)
    assert 0 < rows2 <= 2 * n * most


# -------------------------------------------------------------------------------------------------------------- precision
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head", "model.layers.1.self_attn*"]}


def test_modules_that_are_left_out_keep_their_bits() -> None:
    spec = tiny(quantization_config=FP8)
    bits = [block.mixer_bytes * 8 / block.mixer.params for block in spec.blocks if block.mixer]
    assert bits == pytest.approx([8.002, 16, 8.002, 8.002], abs=0.01)
    assert spec.expert_bytes(0) == pytest.approx(EXPERT * 8.002 / 8, abs=1)
    assert spec.embedding_bytes == 100 * 64 * 2


@pytest.mark.parametrize(
    ("given", "bits"),
    [
        ({"quant_method": "mxfp4"}, 4.25),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4 + 20 / 128),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 128}, 4 + 20 / 128),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.5),
        ({"quant_method": "exl3", "bits": 3.5}, 3.5),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}, 4.5),
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "mxfp4", "group_size": 32}}}, 4.25),
        ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}}}, 4),
        ({"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 3, "group_size": 64}}}, 3),
        ({"quant_method": "quanto", "weights": "int8"}, 8),
        ({"quant_method": "another", "bits": 5}, 5),
        (
            {
                "quant_method": "compressed-tensors", "format": "pack-quantized",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32, "symmetric": True, "type": "int"}}},
            },
            4.5,
        ),
    ],
)  # fmt: skip
def test_bits_of_each_method(given: dict[str, Any], bits: float) -> None:
    spec = tiny(quantization_config=given)
    assert spec.expert_bytes(0) * 8 / EXPERT == pytest.approx(bits, abs=0.01)


def test_groups_of_compressed_tensors_name_their_modules() -> None:
    def group(target: str, bits: int, form: str) -> dict[str, Any]:
        return {"targets": [target], "format": form, "weights": {"num_bits": bits, "group_size": 16 if bits == 4 else None}}

    groups = {
        "a": group("re:.*attn.*_proj$", 8, "float-quantized"),
        "b": group("re:.*experts.*(gate|up|down)_proj$", 4, "nvfp4-pack-quantized"),
    }
    given = {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["re:.*layers.1.self_attn"]}
    spec = tiny(quantization_config=given)
    assert spec.expert_bytes(0) * 8 == EXPERT * 4.5
    assert [block.mixer_bytes * 8 / block.mixer.params for block in spec.blocks if block.mixer] == [8, 16, 8, 8]
    linear = tiny(quantization_config=given | {"config_groups": groups | {"c": group("Linear", 8, "float-quantized")}})
    assert linear.expert_bytes(0) == spec.expert_bytes(0) and linear.embedding_bytes == spec.embedding_bytes


def test_a_quantisation_next_to_the_config_counts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    plain = load_model(tmp_path).n_bytes
    beside = {
        "quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head", "model.layers.*.self_attn"]}
    }
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    spec = load_model(tmp_path)
    assert spec.expert_bytes(0) == EXPERT * 4.5 / 8
    assert spec.attention_bytes == load_model(tmp_path).attention_params * 2
    assert spec.n_bytes < plain


def test_changes_of_a_model_that_is_read_layer_by_layer() -> None:
    changed = load_model({"base": "gemma-4-26b-a4b", "top_k": 4, "expert_bits": 4, "other_bits": 8})
    whole = load_model("gemma-4-26b-a4b")
    assert changed.experts_bytes_total == pytest.approx(whole.experts_bytes_total / 4)
    assert changed.attention_bytes == pytest.approx(whole.attention_bytes / 2)
    assert changed.labels == ("top_k=4", "expert_bits=4", "other_bits=8")
    with pytest.raises(ModelError, match=r"a\.yaml: model\.hidden: expected one of name, source, top_k"):
        load_model({"base": "gemma-4-26b-a4b", "hidden": 8}, "a.yaml: model")


# ------------------------------------------------------------------------------------------------------------------- card
def test_a_card_adds_up() -> None:
    card = Card(load_model("deepseek-v4-flash"))
    found = card.to_dict()
    assert sum(one["bytes"] for one in found["classes"].values()) == found["total_bytes"]
    assert sum(one["params"] for one in found["classes"].values()) == pytest.approx(found["total_params"])
    assert max(map(len, card.text().splitlines())) <= 80
    assert "<table" in card._repr_html_()


@pytest.mark.parametrize("name", model_names())
def test_every_card_fits(name: str) -> None:
    text = Card(load_model(name)).text()
    assert max(map(len, text.splitlines())) <= 80


# --------------------------------------------------------------------------------------------------------- wrong configs
ODD = [
    None,
    0,
    -1,
    3,
    10**12,
    2**64,
    1.5,
    True,
    "x",
    "",
    [],
    [1],
    [0] * 5,
    {"a": 1},
    ["re:["],
    {"quant_method": "gptq", "bits": 4},
]
MORE = (
    "quantization_config",
    "layer_types",
    "per_layer_config",
    "compress_ratios",
    "mlp_only_layers",
    "moe_layer_freq",
    "kv_lora_rank",
)


def test_changed_configs_are_read_or_refused_in_one_line() -> None:
    rng, accepted, n, refused = Random(7), 0, 600, []
    sources = [_keys(name) for name in model_names()]
    for _ in range(n):
        keys = deepcopy(rng.choice(sources))
        for _ in range(rng.randint(1, 3)):
            key = rng.choice([*keys, *MORE])
            value = keys.get(key)
            if rng.random() < 0.5 and isinstance(value, int):
                keys[key] = value * 2 if rng.random() < 0.5 else value // 2
            elif rng.random() < 0.3:
                keys.pop(key, None)
            else:
                keys[key] = rng.choice(ODD)
        try:
            spec = read_model(keys, None, "changed", "config.json")
        except ModelError as error:
            refused.append(str(error))
            continue
        accepted += 1
        assert spec.total_params > 0 and Card(spec).text() and len(spec.groups) == spec.n_layers
    assert refused and not any("\n" in message for message in refused)
    assert accepted > n / 3  # what lies behind the reader is reached
