"""The cost model: every curve form and roofline by hand, links, labels, and what shipped profiles claim."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import ceil
from typing import Any

import pytest

from moesim.errors import HardwareError
from moesim.hardware import load_hardware
from moesim.hardware.costs import CostModel
from moesim.model import ModelSpec, load_model
from tests.hardware.costs_kit import costs, curve, link, machine, number, tiny_model

US = 1000
BF16 = 2


def test_linear() -> None:
    found = costs(machine(cpu=curve("linear", base_us=2.5, per_token_us=0.3)))
    assert [found.expert_ns("cpu0", n) for n in (0, 1, 2, 10)] == [0, 2800, 3100, 5500]


def test_linear_rounds_the_sum_not_the_slope() -> None:
    found = costs(machine(cpu=curve("linear", base_us=0, per_token_us=0.0004)))
    assert [found.expert_ns("cpu0", n) for n in (1, 2, 5, 64)] == [0, 1, 2, 26]


def test_flat_linear() -> None:
    found = costs(machine(gpu=curve("flat_linear", flat_us=7, knee_tokens=4, per_token_us=1.5)))
    assert [found.expert_ns("gpu0", n) for n in (1, 4, 5, 8)] == [7000, 7000, 8500, 13000]


def test_points_are_interpolated_on_linear_axes() -> None:
    found = costs(machine(gpu=curve("points", 1, 16, points=[[1, 10], [4, 16], [16, 22]])))
    assert [found.expert_ns("gpu0", n) for n in (1, 2, 4, 10, 16)] == [10_000, 12_000, 16_000, 19_000, 22_000]
    uneven = costs(machine(gpu=curve("points", 1, 4, points=[[1, 0], [4, 1]])))
    assert [uneven.expert_ns("gpu0", n) for n in (2, 3)] == [333, 667]


def test_outside_the_range_is_an_error() -> None:
    found = costs(machine(cpu=curve("linear", 2, 64, base_us=1, per_token_us=1)))
    with pytest.raises(HardwareError) as caught:
        found.expert_ns("cpu0", 96)
    assert str(caught.value) == (
        "hardware_profiles/x.yaml has no expert curve for 64x128 16-bit on cpu0 at 96 tokens "
        "(measured 2..64); measure it, split prompts with workload.prefill_chunk, or set extrapolate: true"
    )
    with pytest.raises(HardwareError, match=r"at 1 tokens \(measured 2\.\.64\); measure it or set extrapolate: true"):
        found.expert_ns("cpu0", 1)
    with pytest.raises(HardwareError, match="at 65 tokens"):
        costs(machine(cpu=curve("linear", base_us=1, per_token_us=1))).expert_table("cpu0", 65)
    assert found.expert_ns("cpu0", 0) == 0


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ({"form": "linear", "base_us": 1, "per_token_us": 2}, {1: 3, 32: 65}),
        ({"form": "flat_linear", "flat_us": 9, "knee_tokens": 8, "per_token_us": 2}, {1: 9, 32: 57}),
        ({"form": "points", "points": [[2, 10], [8, 16], [16, 32]]}, {1: 9, 32: 64}),
        ({"form": "points", "points": [[2, 3], [16, 45]]}, {1: 0, 32: 93}),
    ],
)
def test_extrapolation_continues_and_is_labelled(numbers: dict[str, Any], expected: dict[int, int]) -> None:
    form = numbers.pop("form")
    found = costs(machine(cpu=curve(form, 2, 16, **numbers)), extrapolate=True)
    assert found.expert_ns("cpu0", 8) > 0
    assert found.label() == "published"
    for n_rows, us in expected.items():
        assert found.expert_ns("cpu0", n_rows) == us * US
    assert found.labels() == ("published", "extrapolated")
    numbers_used = found.provenance()["expert @cpu0 outside its range"]
    assert numbers_used["source"] == "extrapolated"


def test_several_curves_of_one_shape() -> None:
    low = curve("linear", 1, 8, base_us=1, per_token_us=0)["experts"]
    high = curve("linear", 9, 64, base_us=5, per_token_us=0)["experts"]
    found = costs(machine(cpu={"experts": low + high}))
    assert [found.expert_ns("cpu0", n) for n in (8, 9)] == [1000, 5000]
    with pytest.raises(HardwareError, match=r"measured 1\.\.8, 9\.\.64"):
        found.expert_ns("cpu0", 65)
    assert costs(machine(cpu={"experts": low + high}), extrapolate=True).expert_ns("cpu0", 99) == 5000


def test_a_table_agrees_with_single_answers() -> None:
    found = costs(machine(cpu=curve("linear", base_us=2, per_token_us=1)))
    table = found.expert_table("cpu0", 4)
    assert table[:5] == [0, 3000, 4000, 5000, 6000]
    assert all(type(ns) is int for ns in table)
    assert found.expert_table("cpu0", 20)[20] == 22_000


def test_first_extra() -> None:
    assert costs(machine()).first_extra_ns("cpu0") == 0
    assert costs(machine(cpu={"first_extra_us": number(3)})).first_extra_ns("cpu0") == 3000
    own = curve("linear", base_us=0, per_token_us=1)
    own["experts"][0]["first_extra_us"] = number(1.5, "derived")
    found = costs(machine(cpu={"first_extra_us": number(3)} | own))
    assert found.first_extra_ns("cpu0") == 1500
    assert found.label() == "derived"


def test_submission_of_an_expert() -> None:
    assert costs(machine()).host_expert_ns() == 0
    assert costs(machine(host_expert_us=number(8.5))).host_expert_ns() == 8500


def test_expert_roofline_by_hand() -> None:
    found = costs(machine())
    # 3 * 64 * 128 = 24 576 parameters, 49 152 bytes: 4915.2 ns at 10 GB/s; 49 152 operations a row
    assert found.expert_ns("gpu0", 1) == 5 * US + ceil(49_152 / 10)
    assert found.expert_ns("gpu0", 1000) == 5 * US + 49_152
    assert found.expert_ns("cpu0", 1) == 49_152  # no launch on the CPU
    assert found.expert_ns("cpu0", 1000) == 491_520
    assert found.labels() == ("published", "derived", "spec-sheet")


def test_other_shape_or_precision_uses_the_roofline() -> None:
    gpu = curve("linear", base_us=1, per_token_us=0)
    assert costs(machine(gpu=gpu)).expert_ns("gpu0", 1) == 1000
    four_bit = costs(machine(gpu=gpu), tiny_model(expert_bits=4))
    assert four_bit.expert_ns("gpu0", 1) == 5 * US + ceil(49_152 / 4 / 10)
    mixed = costs(machine(gpu=gpu), tiny_model(expert_bytes_by_layer=(10_000, 30_001)))
    assert mixed.expert_ns("gpu0", 1) == 5 * US + ceil(20_001 / 10)


def test_curves_of_another_shape_or_precision_are_named() -> None:
    gpu = curve("linear", base_us=1, per_token_us=0)
    gpu["experts"] += [gpu["experts"][0] | {"range": [65, 99]}, *curve("linear", base_us=1, per_token_us=0)["experts"]]
    gpu["experts"][2] |= {"shape": {"hidden": 32, "intermediate": 128, "bits": 8}, "range": [1, 9]}
    there = "gpu0 of machine (there: 64x128 at 16 bits; 32x128 at 8 bits): roofline instead"
    fits = costs(machine(gpu=gpu))
    other = costs(machine(gpu=gpu), tiny_model(expert_bits=4.5))
    mixed = costs(machine(gpu=gpu), tiny_model(expert_bytes_by_layer=(10_000, 30_001)))
    for found in (fits, other, mixed):
        assert found.notes() == []  # nothing has been asked for
        for rows in (1, 2, 3):
            found.expert_ns("gpu0", rows)
            found.expert_ns("cpu0", rows)  # which has no curve at all
    assert fits.notes() == []
    assert other.notes() == [f"no curve for experts of 64x128 at 4.5 bits on {there}"]
    assert mixed.notes() == [f"no curve for experts of 64x128 at mixed bits on {there}"]


PART = {"model": "tiny", "form": "linear", "range": [1, 8], "base_us": number(40), "per_token_us": number(1)}


def test_curves_of_parts_of_another_model_are_named() -> None:
    parts = [PART | {"part": part, "model": model} for part in ("attention", "dense") for model in ("tiny", "small")]
    hardware = machine(gpu={"parts": parts}, cpu={"parts": parts})
    fits, other = costs(hardware), costs(hardware, tiny_model(name="b"))
    for found in (fits, other):
        found.attention_ns("gpu0", 1, 2)
        found.dense_ns("gpu0", 1)
        found.head_ns("gpu0", 1)  # of which no model has a curve
        found.dense_ns("cpu0", 1)
    assert fits.notes() == []
    assert other.notes() == [
        "no curve for dense of b on cpu0 of machine (there: tiny; small): roofline instead",
        "no curve for attention + dense of b on gpu0 of machine (there: tiny; small): roofline instead",
    ]


def test_a_curve_of_a_part_holds_for_the_model_as_it_was_measured() -> None:
    hardware = machine(gpu={"parts": [PART | {"part": "dense"}]})
    whole = {name: value for name, value in vars(tiny_model()).items() if name not in ("labels", "source", "notes")}
    config = {key: value for key, value in whole.items() if value is not None}
    fewer = costs(hardware, load_model(config | {"top_k": 1, "expert_bits": 4}))
    assert fewer.dense_ns("gpu0", 1) == 41 * US
    changed = ModelSpec(**whole | {"other_bits": 8, "labels": ("other_bits=8", "top_k=1")})
    narrow = costs(hardware, changed)
    assert narrow.dense_ns("gpu0", 1) < 40 * US
    assert narrow.notes() == ["no curve for dense of tiny with other_bits=8 on gpu0 of machine (there: tiny): roofline instead"]
    assert costs(hardware, ModelSpec(**whole | {"labels": ("top_k=1", "expert_bits=4")})).dense_ns("gpu0", 1) == 41 * US
    parts = {"parts": [PART | {"part": "dense"}, PART | {"part": "shared"}]}
    wide = costs(machine(gpu=parts), ModelSpec(**whole | {"labels": ("n_experts=4",)}))
    assert wide.shared_ns("gpu0", 1) == 41 * US != wide.dense_ns("gpu0", 1)  # the router has a row for each expert


def test_launches_hide_behind_long_kernels_and_dominate_short_ones() -> None:
    launches = {"launches": {"expert": number(3)}}
    found = costs(machine(gpu=launches))
    assert found.expert_ns("gpu0", 1) == 3 * 5 * US  # 10 us of further launches against 4.9 us of reading
    assert found.expert_ns("gpu0", 1000) == 5 * US + 49_152
    none = costs(machine(gpu={"launches": {"expert": number(0)}}))
    assert none.expert_ns("gpu0", 1) == ceil(49_152 / 10)


def test_attention_by_hand() -> None:
    found = costs(machine(gpu={"launch_us": number(0)}))
    params = 64 * (4 + 2 + 2 + 4) * 16
    context, kv_bytes = 100_000, 2 * 2 * 16 * BF16  # keys and values of 2 heads
    work2 = 2 * context + 1
    reading = params * BF16 + ceil(kv_bytes * work2 / 2)
    assert found.attention_ns("gpu0", 1, work2) == ceil(reading / 10)
    # 64 rows of one request: its keys are read once (work2 / 64 / 2 tokens)
    work2 = 64 * (2 * 1000 + 64)
    operations = 2 * params * 64 + 2 * 4 * 16 * work2
    reading = params * BF16 + ceil(kv_bytes * (work2 // 64) / 2)
    assert found.attention_ns("gpu0", 64, work2, 1) == ceil(max(reading / 10, operations / 1000))
    assert found.attention_ns("gpu0", 64, work2) == ceil((params * BF16 + kv_bytes * work2 / 2) / 10)
    assert found.attention_ns("gpu0", 0, 0) == 0


def test_latent_attention_reads_the_latent() -> None:
    model = tiny_model(head_dim=24, n_kv_heads=4, kv_lora_rank=32, rope_head_dim=8, nope_head_dim=16, v_head_dim=16)
    found = costs(machine(gpu={"launch_us": number(0)}), model)
    alone = found.attention_ns("gpu0", 1, 1)
    context = found.attention_ns("gpu0", 1, 2_000_001)
    assert context - alone == pytest.approx((32 + 8) * BF16 * 1_000_000 / 10, abs=2)


def test_a_state_is_read_and_written_once_for_each_request() -> None:
    found = costs(machine(gpu={"launch_us": number(0)}), load_model("qwen3-next-80b-a3b"))
    (state,) = {block.mixer.state_bytes for block in found.model.groups[0] if block.mixer} - {0}
    more = found.attention_ns("gpu0", 4, 4, 4) - found.attention_ns("gpu0", 4, 4, 1)
    assert more == pytest.approx(3 * 2 * state / 10, abs=1)


def test_dense_shared_embedding_head_leading_by_hand() -> None:
    found = costs(machine(gpu={"router_us": number(2), "launches": {"dense": number(4), "head": number(2)}}))
    model = found.model
    assert found.dense_ns("gpu0", 1) == 4 * 5 * US + 2 * US
    assert found.dense_ns("gpu0", 0) == 0
    assert found.shared_ns("gpu0", 1) == 5 * US + ceil(3 * 64 * 128 * BF16 / 10)
    assert found.embedding_ns("gpu0", 10) == 5 * US + ceil(2 * 10 * 64 * BF16 / 10)
    assert found.head_ns("gpu0", 3) == 5 * US + ceil((1000 * 64 + 64) * BF16 / 10)
    assert found.head_ns("gpu0", 0) == 0
    mlp = 5 * US + ceil(3 * 64 * 256 * BF16 / 10)
    assert found.leading_ns("gpu0", 1, 7) == model.n_dense_layers * (mlp + found.attention_ns("gpu0", 1, 7))
    bare = costs(machine(), tiny_model(n_dense_layers=0, dense_intermediate=0, n_shared=0, shared_intermediate=0))
    assert bare.leading_ns("gpu0", 1, 7) == 0
    assert bare.shared_ns("gpu0", 1) == 0


def test_curve_of_a_part_replaces_its_roofline() -> None:
    part = {"model": "tiny", "form": "linear", "range": [1, 8], "base_us": number(40), "per_token_us": number(1)}
    found = costs(machine(gpu={"parts": [part | {"part": "attention"}, part | {"part": "dense"}]}))
    assert found.dense_ns("gpu0", 2) == 42 * US
    assert found.attention_ns("gpu0", 2, 0) == 42 * US
    kv_bytes = 2 * 2 * 16 * BF16
    assert found.attention_ns("gpu0", 2, 2_000_000) == 42 * US + ceil(kv_bytes * 1_000_000 / 10)
    with pytest.raises(HardwareError, match=r"has no dense curve for tiny on gpu0 at 9 tokens \(measured 1\.\.8\)"):
        found.dense_ns("gpu0", 9)
    assert costs(machine(gpu={"parts": [part | {"part": "dense"}]}), tiny_model(name="b")).dense_ns("gpu0", 1) < 40 * US


def test_predictions() -> None:
    predict = {"form": "linear", "range": [1, 8], "base_us": number(30), "per_token_us": number(1)}
    found = costs(machine(gpu={"predict": {"learned": predict}, "launches": {"predict": number(3)}}))
    assert found.predict_ns("gpu0", 4, "oracle") == 0
    assert found.predict_ns("gpu0", 4, "coactivation") == 0
    assert found.predict_ns("gpu0", 4, "gate_next1") == 3 * 5 * US
    assert found.predict_ns("gpu0", 4, "learned") == 34 * US
    assert found.predict_ns("gpu0", 0, "learned") == 0
    fixed = found.model.attention_params + found.model.dense_params + found.model.shared_params
    whole = costs(machine(gpu={"launch_us": number(0)}))
    assert whole.predict_ns("gpu0", 1, "shadow-int8:T1:KV1") == ceil((fixed + 2 * 24_576) / 10)
    assert whole.predict_ns("gpu0", 1, "shadow-nf4") == ceil((fixed + 2 * 24_576) / 2 / 10)


def test_transfer_is_latency_and_bytes_rounded_up() -> None:
    found = costs(machine())
    down = found.hardware.link("cpu0->gpu0")
    assert found.transfer_ns(down, 49_152) == 10 * US + 49_152
    assert found.transfer_ns(down, 0) == 10 * US
    third = machine(links={"cpu0->gpu0": link(0, 3e9), "gpu0->cpu0": link()})
    assert costs(third).transfer_ns(third.link("cpu0->gpu0"), 10) == 4


def test_fetch_of_an_expert() -> None:
    assert costs(machine()).fetch_ns("cpu0", "gpu0") == 10 * US + 49_152
    assert costs(machine()).fetch_ns("gpu0", "cpu0", 100) == 20 * US + 100
    assert costs(machine()).fetch_ns("gpu0", "gpu0") == 0
    mixed = costs(machine(), tiny_model(expert_bytes_by_layer=(100, 200)))
    assert [mixed.fetch_ns("cpu0", "gpu0", layer=layer) for layer in (0, 1)] == [10_100, 10_200]


def test_every_chunk_pays_the_latency() -> None:
    found = costs(machine(), chunk_bytes=20_000)
    assert found.fetch_ns("cpu0", "gpu0") == 3 * 10 * US + 49_152
    assert found.fetch_ns("cpu0", "gpu0", 40_000) == 2 * 10 * US + 40_000
    assert found.fetch_ns("cpu0", "gpu0", 19_999) == 10 * US + 19_999
    assert found.fetch_ns("cpu0", "gpu0", 0) == 10 * US


def test_hops_add_up() -> None:
    gpu1 = {"gpu1": {"kind": "gpu", "memory_bytes": number(1), "memory_bytes_per_s": number(1000), "flops": number(1000)}}
    base = machine()
    raw: dict[str, Any] = {
        "links": {
            "cpu0->gpu0": link(10),
            "gpu0->cpu0": link(20),
            "gpu0->gpu1": {"any": {"latency_us": number(1), "bytes_per_s": number(1e8, "assumed")}},
        }
    }
    devices = {
        name: {
            "kind": device.kind,
            "memory_bytes": number(device.memory_bytes),
            "memory_bytes_per_s": number(device.memory_bytes_per_s),
            "flops": number(device.flops),
        }
        for name, device in base.devices.items()
    }
    found = costs(machine(devices=devices | gpu1, **raw))
    assert [hop.name for hop in found.path("cpu0", "gpu1")] == ["cpu0->gpu0", "gpu0->gpu1"]
    assert found.fetch_ns("cpu0", "gpu1", 1000) == (10_000 + 1000) + (1000 + 10_000)
    assert found.label() == "assumed"


def test_curve_of_the_chosen_kind() -> None:
    slow = {"latency_us": number(0), "bytes_per_s": number(5e8)}
    profile = machine(links={"cpu0->gpu0": link(pageable=slow), "gpu0->cpu0": link()})
    assert costs(profile, transfer="pageable").fetch_ns("cpu0", "gpu0", 1000) == 2000
    with pytest.raises(HardwareError) as caught:
        costs(profile, transfer="pageable").fetch_ns("gpu0", "cpu0", 1000)
    assert str(caught.value) == (
        "hardware_profiles/x.yaml: links.gpu0->cpu0: expected a curve 'pageable', got only pinned; "
        "add it or choose transfer: pinned"
    )
    with pytest.raises(HardwareError, match="unknown kind of transfer 'pined'; did you mean 'pinned'"):
        costs(profile, transfer="pined")
    with pytest.raises(
        HardwareError,
        match=r"chunk_bytes: expected at least 48 bytes, as an expert of tiny \(49.2 kB\) goes in at most 1024 chunks",
    ):
        costs(profile, chunk_bytes=0)


def test_activations() -> None:
    own = {"latency_us": number(2), "bytes_per_s": number(1e9), "share_link": True}
    profile = machine(links={"cpu0->gpu0": link(activation=own), "gpu0->cpu0": link(20)})
    found = costs(profile)
    assert found.activation_ns(profile.link("cpu0->gpu0"), 3) == 2 * US + 3 * 64 * BF16
    assert found.activation_ns(profile.link("gpu0->cpu0"), 3) == 20 * US + 3 * 64 * BF16  # falls back on the copy's
    assert profile.link("cpu0->gpu0").share_link
    assert not profile.link("gpu0->cpu0").share_link
    into, back = profile.link("cpu0->gpu0"), profile.link("gpu0->cpu0")
    assert [found.latency_ns(into), found.latency_ns(into, True), found.latency_ns(back, True)] == [10 * US, 2 * US, 20 * US]


def test_labels_grow_with_use() -> None:
    found = costs(machine(cpu=curve("linear", base_us=1, per_token_us=1)))
    assert found.labels() == ()
    assert found.label() == "measured"
    found.expert_ns("cpu0", 1)
    assert found.labels() == ("published",)
    found.expert_ns("gpu0", 1)
    assert (found.label(), found.labels()) == ("spec-sheet", ("published", "derived", "spec-sheet"))
    found.attention_ns("gpu0", 1, 1)
    told = found.provenance()
    assert list(told) == ["attention @gpu0", "expert @cpu0", "expert @gpu0"], "by name"
    assert told["expert @cpu0"]["form"] == "linear"
    assert told["expert @cpu0"]["ref"] == "a published number"
    assert told["expert @gpu0"]["numbers"]["devices.gpu0.flops"] == {
        "value": 1e12,
        "source": "spec-sheet",
        "ref": "a spec-sheet number",
    }


def test_contention_of_a_side_lane_counts_once_it_is_used() -> None:
    pair = {"a": "gpu0.side", "b": "gpu0.experts", "a_rate": number(1, "assumed"), "b_rate": number(1, "assumed")}
    found = costs(machine(contention=[pair]))
    found.expert_ns("cpu0", 1)
    assert found.label() == "derived"
    found.expert_ns("gpu0", 1)
    assert found.label() != "assumed"
    found.predict_ns("gpu0", 1, "gate_next1")
    assert found.label() == "assumed"
    both = {"a": "cpu0.experts", "b": "cpu0->gpu0", "a_rate": number(1, "assumed"), "b_rate": number(1)}
    assert costs(machine(contention=[both])).label() == "assumed"


def test_contention_counts_only_where_both_went_on() -> None:
    """With the records of the run at hand: a prediction on the main lane does not use the pair of the side lane."""
    side = {"a": "gpu0.side", "b": "gpu0.experts", "a_rate": number(1, "assumed"), "b_rate": number(1, "assumed")}
    found = costs(machine(contention=[side]))
    found.predict_ns("gpu0", 1, "gate_next1")
    assert found.label() == "assumed"
    assert found.label({"gpu0.experts", "gpu0.dense", "cpu0->gpu0"}) == "spec-sheet"
    assert found.label({"gpu0.experts", "gpu0.side"}) == "assumed"
    assert found.label({"gpu0.side"}) == "spec-sheet"


def test_the_same_questions_give_the_same_integers() -> None:
    model, profile = load_model("qwen3-30b-a3b"), load_hardware("rtx3090-epyc7532")
    first, second = CostModel(model, profile), CostModel(model, profile)
    second.expert_ns("gpu0", 9)
    assert first.expert_table("cpu0", 32) == second.expert_table("cpu0", 32)
    assert first.attention_ns("gpu0", 4, 4004) == second.attention_ns("gpu0", 4, 4004)


def shipped(name: str, model: str | dict[str, Any] = "mixtral-8x7b", **options: Any) -> CostModel:
    return CostModel(load_model(model), load_hardware(name), **options)


def test_a100_gives_the_printed_costs() -> None:
    found = shipped("a100-xeon6326", transfer="pageable")
    assert found.fetch_ns("cpu0", "gpu0") == 39_870_000
    profile = found.hardware
    assert found.activation_ns(profile.link("cpu0->gpu0"), 1) == pytest.approx(20_000, rel=0.02)
    block = found.model.attention_bytes + found.model.dense_bytes(0) + 2 * found.model.expert_bytes(0)
    cpu = found.expert_ns("cpu0", 1)
    assert cpu == pytest.approx(8.02e6 * found.model.expert_bytes(0) / block, rel=1e-3)
    assert found.expert_ns("cpu0", 2) - cpu == 5_000_000
    assert found.expert_ns("cpu0", 1024) - found.expert_ns("cpu0", 1023) == 5_000_000


def test_a100_block_on_the_gpu_is_near_the_printed_one() -> None:
    found = shipped("a100-xeon6326")
    block = found.attention_ns("gpu0", 1, 513) + found.dense_ns("gpu0", 1) + 2 * found.expert_ns("gpu0", 1)
    assert block == pytest.approx(1_240_000, rel=0.1)


def test_pinned_copy_over_pcie4_is_about_14_ms() -> None:
    for name in ("a100-xeon6326", "a100-xeon6230r"):
        assert shipped(name).fetch_ns("cpu0", "gpu0") == pytest.approx(14e6, rel=0.02)


def test_a6000_gives_the_released_constants() -> None:
    found = shipped("a6000-i9-10980xe", transfer="pageable")
    assert found.fetch_ns("cpu0", "gpu0") == 210_000_000
    assert [found.expert_ns("cpu0", n) for n in (1, 10)] == [8_500_000, 85_000_000]
    assert shipped("a6000-i9-10980xe").fetch_ns("cpu0", "gpu0") == pytest.approx(28.7e6, rel=0.002)


@pytest.mark.parametrize(
    ("name", "gpu", "model", "bytes_per_s"),
    [
        ("a100-xeon6326", "gpu0", "mixtral-8x7b", 1935e9),
        ("a6000-i9-10980xe", "gpu0", "mixtral-8x7b", 768e9),
        ("rtx3090-epyc7532", "gpu0", "mixtral-8x7b", 936e9),
        ("rtx3090-epyc7532", "gpu0", {"base": "mixtral-8x7b", "expert_bits": 4}, 936e9),
        ("odmoe-10x3090", "worker0-gpu", {"base": "mixtral-8x7b", "expert_bits": 32}, 936e9),
        ("v100-xeon6230r", "gpu0", "mixtral-8x7b", 900e9),
    ],
)
def test_gpu_experts_stay_below_the_memory_rate(name: str, gpu: str, model: Any, bytes_per_s: float) -> None:
    found = shipped(name, model)
    reached = found.model.expert_bytes(0) / (found.expert_ns(gpu, 1) / 1e9)
    assert 0.5 * bytes_per_s < reached < bytes_per_s
    table = found.expert_table(gpu, 1024)
    assert all(a <= b for a, b in pairwise(table[1:1025]))


def test_start_up_dominates_small_experts() -> None:
    found = shipped("rtx3090-epyc7532", "qwen3-30b-a3b")
    assert found.expert_ns("gpu0", 1) == 90_000
    assert found.model.expert_bytes(0) / 936e9 * 1e9 < 12_000


def test_eager_deepseek_is_within_a_factor_of_the_public_figure() -> None:
    """DeepSeek-V2-Lite, BF16, eager Transformers on an A100: 19-20 tokens/s (optimum-habana#1475)."""
    found = shipped("a100-xeon6326", {"base": "deepseek-v2-lite"})
    layer = found.attention_ns("gpu0", 1, 513) + found.dense_ns("gpu0", 1) + found.shared_ns("gpu0", 1)
    layer += found.model.top_k * found.expert_ns("gpu0", 1)
    token = found.model.n_layers * layer + found.leading_ns("gpu0", 1, 513) + found.head_ns("gpu0", 1)
    assert 19.5 / 1.6 < 1e9 / token < 19.5 * 1.6


FRACTIONS: dict[str, tuple[dict[str, Any], Callable[[CostModel], int]]] = {
    "launch_us": ({}, lambda costs: costs.head_ns("gpu0", 1)),
    "launch_us of others": ({"launches": {"head": number(2)}}, lambda costs: costs.predict_ns("gpu0", 1, "shadow-int8:T1:KV1")),
    "router_us": ({}, lambda costs: costs.dense_ns("gpu0", 1)),
    "token_us": ({}, lambda costs: costs.head_ns("gpu0", 1)),
    "first_extra_us": ({}, lambda costs: costs.first_extra_ns("gpu0")),
    "host_expert_us": ({}, lambda costs: costs.host_expert_ns()),
    "latency_us": ({}, lambda costs: costs.latency_ns(costs.hardware.links[0])),
    "latency_us and bytes": ({}, lambda costs: costs.fetch_ns("cpu0", "gpu0", 1)),
}


@pytest.mark.parametrize("what", FRACTIONS)
def test_times_of_constants_are_rounded_to_the_nearest_nanosecond(what: str) -> None:
    more, cost = FRACTIONS[what]
    name, found = what.partition(" ")[0], []
    for us in (2, 2.0004, 2.0006):
        if name == "latency_us":
            found.append(cost(costs(machine(links={"cpu0->gpu0": link(us), "gpu0->cpu0": link(us)}))))
        elif name == "host_expert_us":
            found.append(cost(costs(machine(host_expert_us=number(us)))))
        else:
            found.append(cost(costs(machine(gpu={**more, name: number(us)}))))
    assert [ns - found[0] for ns in found] == [0, 0, 1]
