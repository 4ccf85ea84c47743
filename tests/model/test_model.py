"""Models: bytes and parameters against published figures, config.json files, and every message."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import FrozenInstanceError, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from moesim.errors import ModelError
from moesim.model import MXFP4_BITS, ModelSpec, bits_to_bytes, builtin_models, load_model

CONFIGS = Path(__file__).parent / "configs"
MIB = 2**20
MODELS = builtin_models()
NAMES = tuple(MODELS)

# Hand-computed, tiny, and with every part different, so that a swapped factor shows.
TINY = ModelSpec(
    name="tiny", n_layers=3, n_experts=4, top_k=2, hidden=8, expert_intermediate=5, n_heads=4, n_kv_heads=2,
    head_dim=3, vocab=10, n_dense_layers=2, dense_intermediate=7, n_shared=1, shared_intermediate=6,
)  # fmt: skip


def config(name: str, **changes: Any) -> dict[str, Any]:
    """Read a fixture and change keys; None removes one."""
    data = json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8")) | changes
    return {key: value for key, value in data.items() if value is not None or key not in changes}


@pytest.fixture
def write(tmp_path: Path) -> Callable[[Any], Path]:
    def write_config(data: Any) -> Path:
        path = tmp_path / "config.json"
        path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
        return path

    return write_config


@pytest.mark.parametrize(
    ("name", "mib"),
    # PreScope, Table 2 (BF16), which prints MB and means powers of 1024
    [("mixtral-8x7b", 336), ("qwen3-30b-a3b", 9), ("deepseek-v2-lite", 16.5), ("moonlight-16b-a3b", 16.5)],
)
def test_expert_bytes_are_the_published_ones(name: str, mib: float) -> None:
    assert MODELS[name].expert_bytes(0) == mib * MIB


def test_expert_bytes_of_mixtral_in_fp32_are_those_of_od_moe() -> None:
    spec = load_model({"base": "mixtral-8x7b", "expert_bits": 32})
    assert spec.expert_bytes(31) == 704_643_072  # OD-MoE prints 704.6 MB
    assert MODELS["mixtral-8x7b"].expert_bytes(31) == 352_321_536


# Parameters in billions as published, and where.
PUBLISHED = {
    "mixtral-8x7b": (46.7, "Mistral AI, 'Mixtral of experts' announcement"),
    "phi-3.5-moe": (41.9, "model card of microsoft/Phi-3.5-MoE-instruct"),
    "deepseek-v2-lite": (15.7, "DeepSeek-V2 paper, appendix on DeepSeek-V2-Lite"),
    "moonlight-16b-a3b": (16.0, "model card of moonshotai/Moonlight-16B-A3B"),
    "qwen1.5-moe": (14.3, "model card of Qwen/Qwen1.5-MoE-A2.7B"),
    "qwen2-57b-a14b": (57.4, "Hugging Face page of Qwen/Qwen2-57B-A14B"),
    "qwen3-30b-a3b": (30.5, "model card of Qwen/Qwen3-30B-A3B"),
    "olmoe": (6.9, "OLMoE paper"),
    "gpt-oss-20b": (20.9, "gpt-oss model card, table 1"),
    "gpt-oss-120b": (116.8, "gpt-oss model card, table 1"),
}

# Counts of all tensors of transformers 5.23's class of each architecture, instantiated with these figures on
# torch's 'meta' device (Moonlight: with the 64 correction biases of each layer, which are a buffer there).
EXACT = {
    "mixtral-8x7b": 46_702_792_704, "phi-3.5-moe": 41_873_153_344, "deepseek-v2-lite": 15_706_484_224,
    "moonlight-16b-a3b": 15_960_110_208, "qwen1.5-moe": 14_315_784_192, "qwen2-57b-a14b": 57_408_658_944,
    "qwen3-30b-a3b": 30_532_122_624, "olmoe": 6_919_161_856, "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}  # fmt: skip


def test_the_builtin_models_are_the_ten_named() -> None:
    assert set(NAMES) == set(PUBLISHED) == set(EXACT)
    assert all(spec.name == name and spec.source and not spec.labels for name, spec in MODELS.items())


@pytest.mark.parametrize("name", NAMES)
def test_total_parameters_are_the_published_ones(name: str) -> None:
    billions, source = PUBLISHED[name]
    assert MODELS[name].total_params == pytest.approx(billions * 1e9, rel=0.01), source
    assert MODELS[name].total_params == EXACT[name]


@pytest.mark.parametrize(
    ("name", "billions", "with_embedding"),
    [
        ("mixtral-8x7b", 12.9, True),  # Mistral AI's announcement
        ("phi-3.5-moe", 6.6, True),  # model card
        ("qwen1.5-moe", 2.7, True),  # model card
        ("qwen3-30b-a3b", 3.3, True),  # model card
        ("olmoe", 1.3, True),  # paper
        ("gpt-oss-20b", 3.61, False),  # model card, which leaves the embedding out of the active ones
        ("gpt-oss-120b", 5.13, False),
    ],
)
def test_active_parameters_are_the_published_ones(name: str, billions: float, with_embedding: bool) -> None:
    spec = MODELS[name]
    active = spec.active_params - (0 if with_embedding else spec.embedding_params)
    assert active == pytest.approx(billions * 1e9, rel=0.02)


def test_moonlight_without_its_embeddings_is_the_published_one() -> None:
    # Its model card counts neither embedding nor LM head: 15.29 billion, 2.24 billion of them active.
    spec = MODELS["moonlight-16b-a3b"]
    both = 2 * spec.embedding_params
    assert spec.total_params - both == pytest.approx(15.29e9, rel=0.01)
    assert spec.active_params - both == pytest.approx(2.24e9, rel=0.01)


def test_parts_of_a_tiny_model_by_hand() -> None:
    assert TINY.expert_params == 3 * 8 * 5
    assert TINY.attention_params == 8 * 12 + 2 * 8 * 6 + 12 * 8  # q; k, v; o
    assert TINY.dense_params == 8 * 4 + 2 * 8  # router, two norms
    assert TINY.shared_params == 3 * 8 * 6
    assert TINY.leading_params == 2 * (288 + 3 * 8 * 7 + 2 * 8)
    assert TINY.head_params == 10 * 8 + 8
    assert TINY.total_params == 3 * (4 * 120 + 288 + 48 + 144) + 944 + 80 + 88
    assert TINY.active_params == TINY.total_params - 3 * 2 * 120
    assert TINY.non_expert_bytes == 2 * (TINY.total_params - TINY.experts_params_total)
    assert TINY.experts_bytes_total == 2 * TINY.experts_params_total
    assert (TINY.attention_bytes, TINY.dense_bytes(2), TINY.shared_bytes) == (576, 96, 288)
    assert (TINY.leading_bytes, TINY.embedding_bytes, TINY.head_bytes) == (1888, 160, 176)


@pytest.mark.parametrize(
    ("changes", "extra"),
    [
        ({"expert_bias": True}, 3 * 4 * (2 * 5 + 8)),
        ({"expert_bias": True, "n_mats": 2}, 12 * (5 + 8 - 40) - 3 * 8 * 6 - 2 * 8 * 7),
        ({"qkv_bias": True}, 5 * (12 + 2 * 6)),  # five layers have attention, three of them experts
        ({"out_bias": True}, 5 * 8),
        ({"qk_norm": "head"}, 5 * 2 * 3),
        ({"qk_norm": "full"}, 5 * (12 + 6)),
        ({"attention_sinks": True}, 5 * 4),
        ({"router_bias": True}, 3 * 4),
        ({"shared_gate": True}, 3 * 8),
        ({"head_bias": True}, 10),
        ({"norm_bias": True}, (2 * 5 + 1) * 8),
        ({"tie_embeddings": True}, -80),
    ],
)
def test_each_option_changes_the_parameters_by_hand_count(changes: dict[str, Any], extra: int) -> None:
    spec = replace(TINY, **changes)
    assert spec.total_params - TINY.total_params == extra
    assert spec.non_expert_bytes == 2 * (spec.total_params - spec.experts_params_total)


def test_latent_attention_by_hand() -> None:
    latent: dict[str, Any] = {"kv_lora_rank": 6, "rope_head_dim": 1, "nope_head_dim": 2, "v_head_dim": 4}
    spec = replace(TINY, **latent)
    common = 8 * (6 + 1) + 6 + 6 * 4 * (2 + 4) + 4 * 4 * 8  # down and norm, up, out
    assert spec.attention_params == common + 8 * 4 * 3
    compressed = replace(spec, q_lora_rank=5)
    assert compressed.attention_params == common + 8 * 5 + 5 + 5 * 4 * 3
    assert replace(compressed, qkv_bias=True).attention_params == compressed.attention_params + 5 + 6 + 1
    assert spec.kv_bytes(0, 1) == 2 * (6 + 1)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mixtral-8x7b", 2 * 8 * 128 * 2),
        ("qwen3-30b-a3b", 2 * 4 * 128 * 2),
        ("olmoe", 2 * 16 * 128 * 2),
        ("gpt-oss-20b", 2 * 8 * 64 * 2),
        ("deepseek-v2-lite", (512 + 64) * 2),  # the latent, not 16 heads
        ("moonlight-16b-a3b", (512 + 64) * 2),
    ],
)
def test_kv_bytes(name: str, expected: int) -> None:
    assert MODELS[name].kv_bytes(0, 1) == expected


def test_kv_bytes_of_a_token_count_the_leading_layer_too() -> None:
    assert MODELS["deepseek-v2-lite"].kv_bytes_per_token == 27 * 1152
    assert replace(MODELS["mixtral-8x7b"], kv_bits=8).kv_bytes_per_token == 32 * 2048


def test_activation_bytes() -> None:
    assert MODELS["mixtral-8x7b"].activation_bytes(3) == 3 * 4096 * 2
    assert replace(MODELS["mixtral-8x7b"], act_bits=8).activation_bytes(1) == 4096
    assert MODELS["mixtral-8x7b"].activation_bytes(0) == 0


def test_mxfp4_experts_hold_blocks_with_scales_and_biases_in_16_bits() -> None:
    weights = 3 * 2880 * 2880
    spec = MODELS["gpt-oss-120b"]
    assert spec.expert_bits == MXFP4_BITS == 4.25
    assert spec.expert_bytes(35) == weights // 2 + weights // 32 + 2 * (2 * 2880 + 2880) == 13_236_480


def test_bits_are_decimal_and_bytes_round_up() -> None:
    assert bits_to_bytes(1000, 4.8) == 600  # the nearest binary fraction to 4.8 would give 600 or 601
    assert bits_to_bytes(3, 4) == 2
    assert bits_to_bytes(0, 16) == 0


def test_bytes_may_differ_by_layer() -> None:
    spec = replace(TINY, expert_bytes_by_layer=(100, 60, 80))
    assert [spec.expert_bytes(layer) for layer in range(3)] == [100, 60, 80]
    assert spec.experts_bytes_total == 4 * 240
    assert spec.total_params == TINY.total_params


@pytest.mark.parametrize("layer", [-1, 3])
def test_a_layer_that_does_not_exist_is_refused(layer: int) -> None:
    with pytest.raises(IndexError, match=f"layer {layer} of model 'tiny': it has layers 0 to 2"):
        TINY.expert_bytes(layer)
    with pytest.raises(IndexError):
        TINY.dense_bytes(layer)


def test_a_spec_is_immutable_and_hashable() -> None:
    with pytest.raises(FrozenInstanceError):
        TINY.top_k = 1  # type: ignore[misc]
    assert hash(replace(TINY)) == hash(TINY)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 5}, "top_k: expected an integer from 1 to 4 (n_experts), got 5"),
        ({"top_k": 0}, "top_k: expected an integer from 1 to 4 (n_experts), got 0"),
        ({"top_k": 2.0}, "top_k: expected an integer from 1 to 4 (n_experts), got 2.0"),
        ({"n_layers": 0}, "n_layers: expected a positive integer, got 0"),
        ({"hidden": "8"}, "hidden: expected a positive integer, got '8'"),
        ({"vocab": True}, "vocab: expected a positive integer, got True"),
        ({"n_experts": 65_537}, "n_experts: expected at most 65536, got 65537"),
        ({"n_dense_layers": -1}, "n_dense_layers: expected an integer of at least 0, got -1"),
        ({"expert_bits": 0}, "expert_bits: expected a number of bits from 0.1 to 64, got 0"),
        ({"kv_bits": float("nan")}, "kv_bits: expected a number of bits from 0.1 to 64, got nan"),
        ({"act_bits": "16"}, "act_bits: expected a number of bits from 0.1 to 64, got '16'"),
        ({"other_bits": True}, "other_bits: expected a number of bits from 0.1 to 64, got True"),
        ({"n_mats": 4}, "n_mats: expected 2 (up, down) or 3 (gate, up, down), got 4"),
        ({"expert_bias": 1}, "expert_bias: expected true or false, got 1"),
        ({"qk_norm": "rms"}, "qk_norm: expected one of none, head, full, got 'rms'"),
        ({"qk_norm": ["head"]}, "qk_norm: expected one of none, head, full, got ['head']"),
        ({"labels": "a"}, "labels: expected a tuple of texts, got 'a'"),
        ({"source": 3}, "source: expected one line of text, got 3"),
        ({"n_dense_layers": 0}, "dense_intermediate: expected 0, because n_dense_layers is 0, got 7"),
        ({"shared_intermediate": 0}, "shared_intermediate: expected a positive integer, because n_shared is 1, got 0"),
        (
            {"n_shared": 0, "shared_intermediate": 0, "shared_gate": True},
            "shared_gate: expected false, because n_shared is 0, got true",
        ),
        ({"n_kv_heads": 3}, "n_kv_heads: expected a divisor of 4 (n_heads), got 3"),
        ({"v_head_dim": 3}, "v_head_dim: expected 0, because kv_lora_rank is 0 (grouped-query attention), got 3"),
        (
            {"kv_lora_rank": 6, "rope_head_dim": 1, "nope_head_dim": 2},
            "v_head_dim: expected a positive integer, because kv_lora_rank is 6, got 0",
        ),
        (
            {"kv_lora_rank": 6, "rope_head_dim": 2, "nope_head_dim": 2, "v_head_dim": 1},
            "head_dim: expected 4 (nope_head_dim + rope_head_dim), got 3",
        ),
        (
            {"kv_lora_rank": 6, "rope_head_dim": 1, "nope_head_dim": 2, "v_head_dim": 1, "qk_norm": "full"},
            "qk_norm: expected none, because latent attention has its own norms, got 'full'",
        ),
        ({"expert_bytes_by_layer": (1, 2)}, "expert_bytes_by_layer: expected 3 values (n_layers), got 2 values"),
        ({"expert_bytes_by_layer": 7}, "expert_bytes_by_layer: expected 3 values (n_layers), got 7"),
        ({"expert_bytes_by_layer": (1, 0, 2)}, "expert_bytes_by_layer[1]: expected a positive integer of bytes, got 0"),
    ],
)
def test_an_impossible_field_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as caught:
        replace(TINY, **changes)
    assert str(caught.value) == f"model 'tiny': {message}"


@pytest.mark.parametrize("name", ["", " ", "a\nb"])
def test_a_name_is_one_line(name: str) -> None:
    with pytest.raises(ModelError, match="name: expected one line of text"):
        replace(TINY, name=name)


@pytest.mark.parametrize("name", NAMES)
def test_a_builtin_model_loads_by_name(name: str) -> None:
    assert load_model(name) is MODELS[name]


def test_builtin_models_returns_a_fresh_dict() -> None:
    builtin_models().clear()
    assert builtin_models()


def test_changed_fields_are_labelled_in_field_order() -> None:
    changes = {"base": "qwen3-30b-a3b", "expert_bits": 4.5, "top_k": 6, "n_layers": 48, "name": "mine"}
    spec = load_model(changes)
    assert (spec.name, spec.top_k, spec.expert_bits) == ("mine", 6, 4.5)
    assert spec.labels == ("top_k=6", "expert_bits=4.5")  # what equals the base is no change
    assert load_model({"base": "olmoe", "tie_embeddings": True}).labels == ("tie_embeddings=true",)


def test_bytes_by_layer_from_an_experiment_may_be_sizes_with_units() -> None:
    spec = load_model({"base": "olmoe", "expert_bytes_by_layer": ["12 MiB"] * 15 + [3_500_000]})
    assert (spec.expert_bytes(0), spec.expert_bytes(15)) == (12 * MIB, 3_500_000)
    assert spec.labels == ("expert_bytes_by_layer=3500000..12582912",)


def test_a_whole_model_needs_no_base() -> None:
    spec = load_model(
        {"name": "own", "n_layers": 2, "n_experts": 4, "top_k": 1, "hidden": 8, "expert_intermediate": 4}
        | {"n_heads": 2, "n_kv_heads": 1, "head_dim": 4, "vocab": 10},
        "a.yaml: model",
    )
    assert (spec.name, spec.source, spec.labels) == ("own", "a.yaml: model", ())


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("mixtral-8x7", "a.yaml: model: unknown model 'mixtral-8x7'; did you mean 'mixtral-8x7b'? `moesim list models`"),
        ({"base": "olmo"}, "a.yaml: model.base: unknown model 'olmo'; did you mean 'olmoe'? `moesim list models`"),
        ({"base": "olmoe", "topk": 3}, "a.yaml: model: unknown model field 'topk'; did you mean 'top_k'? known: act_bits"),
        ({"base": "olmoe", "labels": ()}, "a.yaml: model: unknown model field 'labels'; known: act_bits"),
        ({"base": "olmoe", 3: 1}, "a.yaml: model: unknown model field '3'; known: act_bits"),
        ({"base": "olmoe", "top_k": 65}, "a.yaml: model.top_k: expected an integer from 1 to 64 (n_experts), got 65"),
        (
            {"base": {"base": "olmoe"}},
            "a.yaml: model.base: expected a model's name or the path of a config.json, got {'base': 'olmoe'}",
        ),
        (7, "a.yaml: model: expected a model's name, the path of a config.json, or a mapping with 'base'"),
        (
            {"name": "own", "top_k": 2},
            "a.yaml: model: expected 'base' or a whole model, got neither; add base, or n_layers, n_experts",
        ),
        (
            {"base": "olmoe", "expert_bits": 4, "expert_bytes_by_layer": [1]},
            "a.yaml: model: expected expert_bits or expert_bytes_by_layer, got both; leave one out",
        ),
        (
            {"base": "olmoe", "expert_bytes_by_layer": "9 MiB"},
            "a.yaml: model.expert_bytes_by_layer: expected a list of sizes, one for each layer, got '9 MiB'",
        ),
        (
            {"base": "olmoe", "expert_bytes_by_layer": ["9 MiB", "9 parsecs"]},
            "a.yaml: model.expert_bytes_by_layer[1]: expected a size with a unit",
        ),
    ],
)
def test_a_wrong_model_is_one_line_with_its_place(source: Any, message: str) -> None:
    with pytest.raises(ModelError) as caught:
        load_model(source, "a.yaml: model")
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_a_config_gives_the_builtin_spec(name: str) -> None:
    spec = load_model(str(CONFIGS / f"{name}.json"))
    assert spec.name == name
    assert replace(spec, source=MODELS[name].source) == MODELS[name]


def test_the_fixtures_cover_every_architecture() -> None:
    found = {config(name)["architectures"][0] for name in NAMES}
    assert found == {
        "MixtralForCausalLM", "PhiMoEForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM",
        "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "OlmoeForCausalLM", "GptOssForCausalLM",
    }  # fmt: skip


def test_phi_by_either_spelling(write: Callable[[Any], Path]) -> None:
    spec = load_model(write(config("phi-3.5-moe", architectures=["PhimoeForCausalLM"])))
    assert spec.total_params == MODELS["phi-3.5-moe"].total_params


def test_a_folder_a_path_and_a_base_all_read_the_config(write: Callable[[Any], Path]) -> None:
    path = write(config("olmoe"))
    folder = path.parent
    assert load_model(path) == load_model(folder) == load_model(str(folder)) == load_model(str(path))
    assert load_model(path).name == folder.name
    changed = load_model({"base": str(path), "top_k": 4})
    assert (changed.top_k, changed.labels) == (4, ("top_k=4",))


def test_the_name_in_the_file_wins(write: Callable[[Any], Path]) -> None:
    assert load_model(write(config("olmoe", _name_or_path="allenai/OLMoE-1B-7B"))).name == "OLMoE-1B-7B"
    assert load_model(write(config("olmoe", _name_or_path=""))).name != ""


def test_newer_key_names_are_read_too(write: Callable[[Any], Path]) -> None:
    newer = config("qwen3-30b-a3b", num_experts=None, num_local_experts=128, torch_dtype=None, dtype="bfloat16")
    assert load_model(write(newer)).total_params == MODELS["qwen3-30b-a3b"].total_params


@pytest.mark.parametrize(
    ("dtype", "weights", "others"), [("bfloat16", 16, 16), ("float16", 16, 16), ("float32", 32, 32), ("float8_e4m3fn", 8, 16)]
)
def test_bits_follow_the_dtype(write: Callable[[Any], Path], dtype: str, weights: int, others: int) -> None:
    spec = load_model(write(config("mixtral-8x7b", torch_dtype=dtype)))
    assert (spec.expert_bits, spec.other_bits, spec.kv_bits, spec.act_bits) == (weights, weights, others, others)


def test_leading_dense_layers(write: Callable[[Any], Path]) -> None:
    three = load_model(write(config("deepseek-v2-lite", first_k_dense_replace=3)))
    assert (three.n_layers, three.n_dense_layers, three.labels) == (24, 3, ())
    none = load_model(write(config("deepseek-v2-lite", first_k_dense_replace=0)))
    assert (none.n_layers, none.n_dense_layers, none.dense_intermediate) == (27, 0, 0)
    qwen = load_model(write(config("qwen3-30b-a3b", mlp_only_layers=[0, 1])))
    assert (qwen.n_layers, qwen.n_dense_layers, qwen.dense_intermediate, qwen.labels) == (46, 2, 6144, ())


@pytest.mark.parametrize(
    ("name", "changes", "routed"),
    [
        ("qwen1.5-moe", {"decoder_sparse_step": 2}, range(1, 24, 2)),
        ("qwen1.5-moe", {"mlp_only_layers": [5]}, [*range(5), *range(6, 24)]),
        ("qwen1.5-moe", {"decoder_sparse_step": 2, "mlp_only_layers": [0, 1]}, range(3, 24, 2)),
        ("deepseek-v2-lite", {"moe_layer_freq": 2}, range(2, 27, 2)),
    ],
)
def test_dense_layers_between_others_stand_where_they_are(
    write: Callable[[Any], Path], name: str, changes: dict[str, Any], routed: Sequence[int]
) -> None:
    spec = load_model(write(config(name, **changes)))
    assert [number for number, block in enumerate(spec.blocks) if block.routed] == list(routed)
    assert (spec.n_layers, spec.labels, len(spec.leading)) == (len(routed), (), routed[0])
    between = [spec.blocks[first + 1 : second + 1] for first, second in pairwise(routed)]
    assert list(spec.groups[1:-1]) == between[:-1]
    assert sum(map(len, spec.groups)) + len(spec.leading) == len(spec.blocks)


def test_deepseek_without_shared_experts_and_with_compressed_queries(write: Callable[[Any], Path]) -> None:
    spec = load_model(write(config("deepseek-v2-lite", n_shared_experts=None, q_lora_rank=1536)))
    assert (spec.n_shared, spec.shared_intermediate, spec.q_lora_rank) == (0, 0, 1536)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"is_encoder_decoder": True},
            "is_encoder_decoder: expected a decoder alone, got an encoder and a decoder; choose another model",
        ),
        ({"hidden_size": None}, "expected hidden_size or d_model or n_embd, got none of these keys; add one"),
        ({"num_local_experts": None}, "expected n_routed_experts or num_experts or num_local_experts"),
        ({"num_local_experts": "8"}, "num_local_experts: expected an integer from 1 to 65536, got '8'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: expected an integer from 1 to 10000, got 0"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok: expected an integer from 1 to 8, got 9"),
        ({"tie_word_embeddings": 0}, "tie_word_embeddings: expected true or false, got 0"),
        ({"dtype": "int3"}, "dtype: expected one of bfloat16, float16, half, float32, float, float8_e4m3fn"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config: bits: expected a positive number, got None"),
        ({"quantization_config": "fp8"}, "quantization_config: expected a mapping, got 'fp8'"),
    ],
)
def test_a_wrong_config_is_one_line_with_its_file(write: Callable[[Any], Path], changes: dict[str, Any], message: str) -> None:
    path = write(config("mixtral-8x7b", **changes))
    with pytest.raises(ModelError) as caught:
        load_model(path)
    assert str(caught.value).startswith(f"{path}: {message}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decoder_sparse_step": 99}, "expected at least one layer with routed experts, got 24 dense ones; choose another model"),
        ({"mlp_only_layers": 3}, "mlp_only_layers: expected a list of layers, got 3"),
        ({"mlp_only_layers": ["3"]}, "mlp_only_layers: expected a list of layers, got ['3']"),
    ],
)
def test_wrong_layer_kinds(write: Callable[[Any], Path], changes: dict[str, Any], message: str) -> None:
    path = write(config("qwen1.5-moe", **changes))
    with pytest.raises(ModelError) as caught:
        load_model(path)
    assert str(caught.value) == f"{path}: {message}"


@pytest.mark.parametrize(
    ("text", "message"), [("{", "expected JSON, got something else"), ("[1]", "expected a JSON object, got list")]
)
def test_a_file_that_is_no_config(write: Callable[[Any], Path], text: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_model(write(text))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"none\.json: expected the model's config\.json, got: No such file"):
        load_model(str(tmp_path / "none.json"))
    with pytest.raises(ModelError, match=r"expected a folder with config\.json or a GGUF file, got one without; check the path"):
        load_model(tmp_path)  # a folder without one


def test_a_file_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ModelError, match="got: not UTF-8 text; check the path"):
        load_model(path)


def test_sizes_that_were_asked_for_are_not_among_the_figures():
    """Results are kept under them: a model must have the same before and after its first run."""
    model = load_model("gpt-oss-20b")
    before = model.figures()
    assert model.expert_bytes(1) == model.expert_bytes(0, model.expert_bits)
    assert model.non_expert_bytes + model.experts_bytes_total > 0
    assert model.figures() == before


@pytest.mark.parametrize(("typed", "name"), [("glm 4.5 air", "glm-4.5-air"), ("Qwen3 30B", "qwen3-30b-a3b")])
def test_a_spelling_of_one_name_is_taken_with_a_note(typed: str, name: str, caplog: pytest.LogCaptureFixture):
    with caplog.at_level("WARNING"):
        assert load_model(typed).name == name
    assert f"taken as {name}" in caplog.text


def test_a_spelling_of_several_names_lists_them():
    with pytest.raises(ModelError, match=r"it could be .*gpt-oss-120b, gpt-oss-20b|it could be .*gpt-oss-20b, gpt-oss-120b"):
        load_model("gpt oss")
