"""Operations of llama.cpp counted from a model, and a profile that rests on another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moesim.errors import HardwareError
from moesim.hardware import load_hardware
from moesim.hardware.costs import CostModel
from moesim.hardware.costs.operations import operations
from moesim.model import load_model

QWEN = load_model("qwen3-30b-a3b")
OSS = load_model("gpt-oss-20b")
LITE = load_model("deepseek-v2-lite")


def test_what_is_one_kernel_is_counted_once() -> None:
    """A layer of Qwen3 on a GPU, named kernel by kernel."""
    attention = ["norm", *("quantise", "product") * 3, "norm + rotation", "norm + rotation + write", "write", "attention", "join"]
    attention += ["quantise", "product + residual"]
    experts = ["quantise", "gate + up + activation", "quantise", "down", "weights", "sums + residual"]
    counted = operations("llama.cpp", "gpu", QWEN)
    assert (counted["attention"], counted["dense"], counted["experts"]) == (len(attention), 3, len(experts))


def test_each_wait_of_a_processor_is_counted_once() -> None:
    """A layer of Qwen3 on a CPU, named wait by wait; of a latent attention, that of the model with a narrow query as well."""
    product = ["input", "rows"]
    attention = ["norm", *3 * product, "norm of queries", "norm of keys", *2 * ["rotation"], *2 * ["write"], *2 * ["attention"]]
    attention += [*product, "residual"]
    dense = ["norm", *product, "softmax", "sort", "look-up", "sum", "limit", "division", "weights"]
    feed = [*product, *product, "activation", *product]
    counted = operations("llama.cpp", "cpu", QWEN)
    assert counted == {
        "attention": len(attention), "dense": len(dense), "experts": len(feed) + len(["weights", *7 * ["sum"]]), "shared": 0,
        "leading": len(["norm", *feed, "residual"]), "embedding": 1, "head": len(["norm", *product]),
    }  # fmt: skip
    latent = ["norm", *product, "norm of the latent", *2 * ["rotation"], *product, *2 * ["putting together"], "write"]
    latent += [*2 * ["attention"], *product, "copy", *product, "residual"]
    queries = [*product, "norm", *product]
    wide, narrow = (load_model({"base": "deepseek-v2-lite", "q_lora_rank": rank}) for rank in (0, 1536))
    assert operations("llama.cpp", "cpu", wide)["attention"] == len([*latent, *product])
    assert operations("llama.cpp", "cpu", narrow)["attention"] == len([*latent, *queries])


# attention, dense, experts, shared, leading, embedding, head; by engine
COUNTS = {
    "qwen3-30b-a3b": {"gpu": (14, 3, 6, 0, 5, 1, 5), "unfused": (15, 3, 9, 0, 9, 1, 5), "cpu": (18, 10, 15, 0, 9, 1, 3)},
    "gpt-oss-20b": {"gpu": (15, 3, 6, 0, 5, 1, 5), "unfused": (19, 4, 12, 0, 9, 1, 5), "cpu": (20, 11, 14, 0, 9, 1, 3)},
    "deepseek-v2-lite": {"gpu": (20, 3, 6, 5, 5, 1, 5), "unfused": (21, 3, 9, 9, 9, 1, 5), "cpu": (21, 10, 13, 8, 9, 1, 3)},
    "qwen1.5-moe": {"gpu": (14, 8, 6, 8, 5, 1, 5), "unfused": (18, 8, 9, 12, 9, 1, 5), "cpu": (19, 10, 11, 12, 9, 1, 3)},
    "mixtral-8x7b": {"gpu": (14, 3, 6, 0, 5, 1, 5), "unfused": (15, 3, 9, 0, 9, 1, 5), "cpu": (16, 10, 9, 0, 9, 1, 3)},
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTS)
def test_operations_of_all_parts(name: str) -> None:
    """Against one kernel for what a GPU fuses, an older one has one more for a bias and a residual, and three more of a gate."""
    engines = {"gpu": ("llama.cpp", "gpu"), "unfused": ("llama.cpp-unfused", "gpu"), "cpu": ("llama.cpp", "cpu")}
    parts = ("attention", "dense", "experts", "shared", "leading", "embedding", "head")
    found = {engine: operations(*of, load_model(name)) for engine, of in engines.items()}
    assert {engine: tuple(counted[part] for part in parts) for engine, counted in found.items()} == COUNTS[name]


def test_operations_of_experts_that_are_units_of_larger_ones() -> None:
    """Each of 128 experts in its three matrices, of which a token takes 24: gate and up are products of their own."""
    thirds = load_model({"base": "qwen3-30b-a3b", "units_per_expert": 3})
    for engine, kind, more in (("llama.cpp", "gpu", 3), ("llama.cpp-unfused", "gpu", 0), ("llama.cpp", "cpu", 0)):
        whole, parted = (operations(engine, kind, model) for model in (QWEN, thirds))
        assert {part: parted[part] - whole[part] for part in whole if parted[part] != whole[part]} == (
            {"experts": more} if more else {}
        )


def test_a_model_without_gates_has_a_product_less_and_an_activation_of_its_own() -> None:
    plain = load_model({"base": "qwen3-30b-a3b", "n_mats": 2})
    for engine, kind, more in (("llama.cpp", "gpu", 1), ("llama.cpp-unfused", "gpu", -2), ("llama.cpp", "cpu", -2)):
        gated, without = (operations(engine, kind, model) for model in (QWEN, plain))
        found = {part: without[part] - gated[part] for part in gated if without[part] != gated[part]}
        assert found == {"experts": more, "leading": more}


@pytest.mark.parametrize(
    ("changes", "part", "more"),
    [
        ({"out_bias": True}, "attention", 1),  # the residual is then a kernel of its own
        ({"qkv_bias": True}, "attention", 0),  # added in the products' kernels
        ({"qk_norm": "full"}, "attention", 2),
        ({"n_experts": 60, "top_k": 8}, "dense", 5),
        ({"n_experts": 512}, "dense", 0),
        ({"n_experts": 288}, "dense", 0),
        ({"top_k": 9}, "experts", 1),
        ({"n_shared": 1, "shared_intermediate": 768}, "shared", 5),
        ({"n_shared": 1, "shared_intermediate": 768, "shared_gate": True}, "shared", 8),
    ],
)
def test_a_field_of_the_model_adds_its_operations(changes: dict[str, Any], part: str, more: int) -> None:
    changed = load_model({"base": "qwen3-30b-a3b", **changes})
    assert operations("llama.cpp", "gpu", changed)[part] - operations("llama.cpp", "gpu", QWEN)[part] == more


def test_on_a_processor_every_sum_is_a_wait() -> None:
    eight, two = (operations("llama.cpp", "cpu", load_model({"base": "qwen3-30b-a3b", "top_k": k}))["experts"] for k in (8, 2))
    assert eight - two == 6


def test_operations_add_to_reading_and_hide_behind_nothing() -> None:
    slow, fast = (CostModel(QWEN, load_hardware({"base": "a10-xeon8358", "devices.gpu0.operation_us": us})) for us in (3.0, 1.0))
    counted = operations("llama.cpp", "gpu", QWEN)
    assert slow.attention_ns("gpu0", 1, 40) - fast.attention_ns("gpu0", 1, 40) == 2000 * counted["attention"]
    assert slow.dense_ns("gpu0", 1) - fast.dense_ns("gpu0", 1) == 2000 * counted["dense"]
    assert slow.head_ns("gpu0", 1) - fast.head_ns("gpu0", 1) == 2000 * counted["head"]
    assert slow.first_extra_ns("gpu0") == 3000 * counted["experts"]
    assert slow.expert_ns("gpu0", 1) == fast.expert_ns("gpu0", 1)  # those of a layer's experts are of all of them together
    assert slow.provenance()["attention @gpu0"]["numbers"]["devices.gpu0.operation_us"]["value"] == 3.0


def test_the_hosts_fixed_work_is_paid_once_a_step() -> None:
    with_it, without = (
        CostModel(QWEN, load_hardware({"base": "a10-xeon8358", "devices.gpu0.token_us": us})) for us in (50.0, 0.0)
    )
    assert with_it.head_ns("gpu0", 1) - without.head_ns("gpu0", 1) == 50_000


def test_latent_attention_that_is_left_to_the_host_costs_more_and_other_attention_does_not() -> None:
    profile = load_hardware({"base": "a100-80gb-llama-cpp", "devices.gpu0.latent_attention_us": 238.0007})
    plain = load_hardware({"base": "a100-80gb-llama-cpp", "devices.gpu0.latent_attention_us": 0})
    for model, more in ((LITE, 238_001), (QWEN, 0)):
        assert CostModel(model, profile).attention_ns("gpu0", 1, 40) - CostModel(model, plain).attention_ns("gpu0", 1, 40) == more


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("devices.gpu0.launch_us", 5, "launch_us: expected a number that llama.cpp has"),
        (
            "devices.gpu0.launches",
            {"dense": {"value": 2, "source": "assumed", "why": "a test"}},
            "launches.dense: expected a number that llama.cpp has",
        ),
        ("devices.gpu0.operations", "vllm", "operations"),
    ],
)
def test_launches_beside_operations_are_refused(key: str, value: Any, expected: str) -> None:
    with pytest.raises(HardwareError) as caught:
        load_hardware({"base": "a10-xeon8358", key: value})
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_a_profile_with_a_base_takes_over_numbers_with_their_labels() -> None:
    base, own = load_hardware("ryzen7950x-rtx4080"), load_hardware("a10-xeon8358")
    assert own.name == "a10-xeon8358" and own.description != base.description
    for key in ("links.cpu0->gpu0.pinned.latency_us", "devices.gpu0.workspace_bytes"):
        assert own.numbers[key] == base.numbers[key]
    assert own.numbers["links.cpu0->gpu0.pinned.bytes_per_s"].source == "published"
    assert own.overrides == ()


@pytest.mark.parametrize(
    ("base", "more", "expected"),
    [
        ("no-such-machine", "", "unknown hardware profile 'no-such-machine'"),
        ("a10-xeon8358", "devices: {gpu7: {memory_bytes: 8}}", "unknown device 'gpu7'"),
        ("a10-xeon8358", "speed: 8", "speed"),
        ("[a]", "", "base: expected the name of a profile"),
    ],
)
def test_a_wrong_base_is_one_line(base: str, more: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"base: {base}\ndescription: mine\n{more}\n")
    with pytest.raises(HardwareError) as caught:
        load_hardware(path)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_profiles_that_rest_on_each_other_are_refused(tmp_path: Path) -> None:
    for name, base in (("a", "b"), ("b", "a")):
        (tmp_path / f"{name}.yaml").write_text(json.dumps({"base": str(tmp_path / f"{base}.yaml"), "description": "x"}))
    with pytest.raises(HardwareError, match="which rests on this one"):
        load_hardware(tmp_path / "a.yaml")


def test_layers_count_by_their_own_attention() -> None:
    """Kimi Linear has latent attention in every fourth layer; operations of the others are not known, and the result says so."""
    kimi = load_model("kimi-linear-48b-a3b")
    counted = [operations("llama.cpp", "gpu", kimi, block.mixer)["attention"] for block in kimi.blocks[:4]]
    assert counted == [14, 14, 14, operations("llama.cpp", "gpu", LITE)["attention"]]
    machine = load_hardware("rtx4090-llama-cpp")
    costs, plain = (CostModel(model, machine) for model in (kimi, LITE))
    for one in (costs, plain):
        one.attention_ns("gpu0", 1, 8)
    assert costs.notes() == ["operations of linear Kimi delta counted as of grouped or latent attention"]
    assert plain.notes() == []
