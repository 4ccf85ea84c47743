"""Knobs of what-if: each changes the costs that it names, by a stated rule, and no others."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesim.errors import InputError
from moesim.experiment.config import parse_config
from moesim.hardware import HardwareProfile, load_hardware
from moesim.hardware.costs import CostModel
from moesim.hardware.types import CostCurve, Transfer
from moesim.model import load_model
from moesim.studies.whatif.knobs import KNOBS, PCIE, change, knob_of, memory_of, pcie_of
from moesim.studies.whatif.machines import (
    ONE,
    constant_us,
    faster_curve,
    faster_device,
    faster_transfer,
    rate_of,
    shared_rates,
    wire_factors,
)
from moesim.studies.whatif.settings import Base, Changed, parse_vary, single
from tests.experiment.experiment_kit import small

TWO = Fraction(2)


def base(folder: Path, **changes: Any) -> Base:
    return single(parse_config(small(folder, **changes), "small.yaml"), "small.yaml")


def vary(one: Base, text: str) -> Changed:
    (together,) = parse_vary(text)
    return change(one, together)


def machine(changed: Changed) -> HardwareProfile:
    return load_hardware(changed.raw["hardware"])


def values(profile: HardwareProfile) -> dict[str, Any]:
    return {key: number.value for key, number in profile.numbers.items()}


def differing(one: HardwareProfile, two: HardwareProfile) -> set[str]:
    a, b = values(one), values(two)
    return {key for key in a.keys() | b.keys() if a.get(key) != b.get(key)}


# ------------------------------------------------------------------------------------------------------------------ curves

FLAT = CostCurve("k", "flat_linear", 1, 64, Fraction(100), Fraction(10), knee=8)
LINE = CostCurve("k", "linear", 1, 64, Fraction(0), Fraction(50))
MEASURED = CostCurve("k", "points", 1, 8, points=((1, Fraction(100)), (2, Fraction(90)), (4, Fraction(130)), (8, Fraction(200))))


@pytest.mark.parametrize("curve", [FLAT, LINE, MEASURED])
def test_reading_and_computing_are_the_whole_of_a_curve(curve: CostCurve):
    reading = curve.us(1)
    both = faster_curve(curve, reading, TWO, TWO)
    memory, compute = faster_curve(curve, reading, TWO, ONE), faster_curve(curve, reading, ONE, TWO)
    for n in range(curve.first, curve.last + 1):
        whole = curve.us(n)
        assert both.us(n) == whole / 2, n
        assert memory.us(n) + compute.us(n) == whole * 3 / 2, n
    assert memory.us(1) == reading / 2
    assert compute.us(1) == reading


def test_what_further_rows_add_is_computing():
    memory = faster_curve(FLAT, Fraction(100), TWO, ONE)
    assert [memory.us(n) for n in (1, 8, 9, 64)] == [50, 50, 60, 610]
    slower = faster_curve(FLAT, Fraction(100), 1 / TWO, ONE)
    assert [slower.us(n) for n in (1, 8, 9)] == [200, 200, 210]
    compute = faster_curve(LINE, Fraction(50), ONE, Fraction(5))
    assert [compute.us(n) for n in (1, 2, 11)] == [50, 60, 150]


def test_no_faster_than_its_launches_unless_it_was_before():
    assert faster_curve(FLAT, Fraction(100), Fraction(10), ONE, Fraction(30)).us(1) == 30
    assert faster_curve(FLAT, Fraction(100), Fraction(10), ONE, Fraction(500)).us(1) == 100
    assert faster_curve(FLAT, Fraction(100), Fraction(1, 2), ONE, Fraction(150)).us(1) == 200


def test_copies():
    stated = Transfer("k", Fraction(28), 10**9)
    assert faster_transfer(stated, TWO, Fraction(3)) == Transfer("k", Fraction(84), 2 * 10**9)
    measured = Transfer("k", Fraction(0), 0, ((1000, Fraction(30)), (2000, Fraction(40)), (4000, Fraction(60))))
    assert (constant_us(measured), rate_of(measured)) == (20, 100_000_000)
    assert faster_transfer(measured, TWO).points == ((1000, 25), (2000, 30), (4000, 40))
    assert faster_transfer(measured, ONE, TWO).points == ((1000, 50), (2000, 60), (4000, 80))


def test_only_the_wire_of_a_pageable_copy_is_faster():
    link = load_hardware("rtx3090-epyc7532").link("cpu0->gpu0")
    factors = wire_factors(link, TWO)
    assert factors["links.cpu0->gpu0.pinned"] == factors["links.cpu0->gpu0.activation"] == 2
    assert float(factors["links.cpu0->gpu0.pageable"]) == pytest.approx(1 / (1 - 8.84 / 23.8 / 2))
    slower = wire_factors(link, Fraction(1, 16))
    pageable = slower["links.cpu0->gpu0.pageable"] * rate_of(link.curves["pageable"])
    assert pageable < slower["links.cpu0->gpu0.pinned"] * rate_of(link.curves["pinned"])


# -------------------------------------------------------------------------------------------------------------- contention

SHARE = st.fractions(Fraction(1, 20), 1, max_denominator=100)
RATE = st.fractions(1, 500, max_denominator=10)
FACTOR = st.fractions(Fraction(1, 8), 8, max_denominator=16)


@given(kept=st.tuples(SHARE, SHARE), drawn=st.tuples(RATE, RATE), memory=FACTOR, link=FACTOR)
def test_two_share_the_capacity_they_had_and_no_more(
    kept: tuple[Fraction, Fraction], drawn: tuple[Fraction, Fraction], memory: Fraction, link: Fraction
):
    shares = shared_rates(kept, drawn, memory, link)
    assert all(0 < share <= 1 for share in shares)
    capacity = memory * (kept[0] * drawn[0] + kept[1] * drawn[1])
    alone = drawn[0] * memory, drawn[1] * link
    together = shares[0] * alone[0] + shares[1] * alone[1]
    assert together == min(capacity, sum(alone)) or capacity >= sum(alone)
    assert shared_rates(kept, drawn, ONE, ONE) == kept


# ------------------------------------------------------------------------------------------- each knob, and nothing next to it

CURVES = {
    f"links.{link}.{curve}" for link in ("cpu0->gpu0", "gpu0->cpu0") for curve in ("pinned", "pageable", "chunked", "activation")
}
SHARED = {"contention.0.a_rate", "contention.0.b_rate"}
NAMED = {
    "link.bytes_per_s x2": {f"{curve}.bytes_per_s" for curve in CURVES} | SHARED,
    "link.latency x2": {f"{curve}.latency_us" for curve in CURVES if "pageable" not in curve},  # theirs is 0
    "pcie gen5": {f"{curve}.bytes_per_s" for curve in CURVES} | SHARED,
    "pcie x8": {f"{curve}.bytes_per_s" for curve in CURVES} | SHARED,
    "cpu.memory_bandwidth +50%": {"devices.cpu0.memory_bytes_per_s"} | SHARED,
    "cpu.memory 8->12": {"devices.cpu0.memory_bytes_per_s"} | SHARED,
    "cpu.compute x2": {"devices.cpu0.flops", *(f"devices.cpu0.expert_cost.{rows}_row_flops" for rows in ("few", "many"))},
    "devices.gpu0.launch_us x0.5": {"devices.gpu0.launch_us"},
    "hardware.devices.cpu0.memory_bytes 512 GB": {"devices.cpu0.memory_bytes"},
}  # fmt: skip


@pytest.mark.parametrize("text", list(NAMED))
def test_a_knob_changes_the_numbers_it_names(tmp_path: Path, text: str):
    one = base(tmp_path)
    changed = vary(one, text)
    assert differing(one.profile, machine(changed)) == NAMED[text]
    assert set(changed.keys) == NAMED[text]
    assert {key: value for key, value in changed.raw.items() if key != "hardware"} == {
        key: value for key, value in one.raw.items() if key != "hardware"
    }


def test_a_faster_gpu_has_faster_curves_and_the_same_launches(tmp_path: Path):
    one = base(tmp_path)
    changed = machine(vary(one, "gpu.memory_bandwidth x1.5"))
    rest = {k for k in differing(one.profile, changed) if not k.startswith("devices.gpu0.experts.")}
    assert rest == {"devices.gpu0.memory_bytes_per_s"}
    model = load_model({"base": "mixtral-8x7b", "expert_bits": 4})
    before, after = CostModel(model, one.profile), CostModel(model, changed)
    assert after.expert_ns("gpu0", 1) == pytest.approx(before.expert_ns("gpu0", 1) / 1.5, abs=1)
    more = [costs.expert_ns("gpu0", 40) - costs.expert_ns("gpu0", 1) for costs in (before, after)]
    assert more[0] == pytest.approx(more[1], abs=2)
    assert after.expert_ns("cpu0", 3) == before.expert_ns("cpu0", 3)
    floor = CostModel(model, machine(vary(one, "gpu.memory_bandwidth x8")))
    assert floor.expert_ns("gpu0", 1) == 90_000  # 10 launches of 9 us


@pytest.mark.parametrize(("text", "ratios"), [("cpu.memory_bandwidth x2", (0.5, 11 / 12)), ("cpu.compute x2", (1.0, 7 / 12))])
def test_a_published_curve_of_a_cpu(tmp_path: Path, text: str, ratios: tuple[float, float]):
    """8.5 ms a row: the first is reading, the others computing."""
    one = base(tmp_path, hardware="a6000-i9-10980xe", model="mixtral-8x7b")
    before, after = (CostModel(load_model("mixtral-8x7b"), p) for p in (one.profile, machine(vary(one, text))))
    for n, ratio in zip((1, 6), ratios, strict=True):
        assert after.expert_ns("cpu0", n) / before.expert_ns("cpu0", n) == pytest.approx(ratio)


def test_measured_points_of_a_whole_machine(tmp_path: Path):
    """Accelerator and host of a profile that is all points; copies that a core makes share no memory's capacity by our rule."""
    profile = load_hardware("zen4-2core")
    model = load_model("deepseek-v2-lite")
    costs = CostModel(model, profile, extrapolate=True)
    one = Base({**base(tmp_path).raw, "hardware": "zen4-2core", "model": "deepseek-v2-lite"}, "small.yaml")
    for text, device, part in (("cpu.memory_bandwidth x4", "core1", "core1"), ("gpu.memory_bandwidth x4", "core0", "core0")):
        changed = machine(vary(one, text))
        moved = {key for key in differing(profile, changed) if not key.startswith(f"devices.{part}.")}
        assert not moved
        faster = CostModel(model, changed, extrapolate=True)
        assert faster.expert_ns(device, 1) == pytest.approx(costs.expert_ns(device, 1) / 4, abs=1)
    linked = machine(vary(one, "link.bytes_per_s x2"))
    link = profile.link("core1->core0")
    n_bytes = model.expert_bytes(0)
    constant = float(constant_us(link.curves["pinned"])) * 1000
    slow, fast = (CostModel(model, p).transfer_ns(p.link("core1->core0"), n_bytes) for p in (profile, linked))
    assert fast - constant == pytest.approx((slow - constant) / 2, abs=2)
    assert not {key for key in differing(profile, linked) if key.startswith("contention")}


def test_context_is_all_reading():
    device = load_hardware("zen4-2core").devices["core0"]
    faster = faster_device(device, memory=TWO)
    for before, after in zip(device.parts, faster.parts, strict=True):
        if before.part == "context":
            assert all(after.us(n) == before.us(n) / 2 for n in (1, 100, 2048))
            break
    else:
        pytest.fail("no curve 'context'")


def test_another_gpu(tmp_path: Path):
    one, other = base(tmp_path), load_hardware("a100-xeon6326")
    changed = vary(one, "gpu a100-xeon6326")
    gpu, new = machine(changed).devices["gpu0"], other.devices["gpu0"]
    assert (gpu.memory_bytes, gpu.memory_bytes_per_s, gpu.flops) == (new.memory_bytes, new.memory_bytes_per_s, new.flops)
    assert [c.us(5) for c in gpu.experts] == [c.us(5) for c in new.experts]
    kept = one.profile.devices["gpu0"]
    assert (gpu.launch_us, gpu.launches, gpu.router_us) == (kept.launch_us, kept.launches, kept.router_us)
    assert machine(changed).links == one.profile.links
    assert changed.factor is None
    assert "80 GiB instead of 24" in changed.note


EXPERIMENT = {
    "model.expert_bits 8": ("model", {"base": "mixtral-8x7b", "expert_bits": 8.0}, 2),
    "batch x4": ("workload.batch_size", 4, 4),
    "batch +60%": ("workload.batch_size", 2, 2),
    "cache 0.5": ("cache", {"ratio": 0.5}, 2),
    "cache x1.5": ("cache", {"ratio": 0.375}, 1.5),
    "cache 12 GiB": ("cache", {"budget": 12 * 2**30}, None),
    "decision_us 50": ("decision_us", 50.0, None),
    "prompt 3": ("workload.prompt_tokens", 3, 0.5),
    "decode x2": ("workload.decode_tokens", 6, 2),
    "workload.n_batches 2": ("workload.n_batches", 2, 2),
    "transfer.curve pageable": ("transfer.curve", "pageable", None),
}


@pytest.mark.parametrize("text", list(EXPERIMENT))
def test_numbers_of_the_experiment(tmp_path: Path, text: str):
    key, value, factor = EXPERIMENT[text]
    one = base(tmp_path)
    changed = vary(one, text)
    here: Any = changed.raw
    for step in key.split("."):
        here = here[step]
    assert here == value
    assert changed.factor == (None if factor is None else Fraction(factor))
    parse_config(dict(changed.raw), "x")


def test_knobs_together_change_one_after_the_other(tmp_path: Path):
    one = base(tmp_path)
    changed = vary(one, "link.bytes_per_s x2 & link.bytes_per_s x2 & cache 0.5")
    before = one.profile.link("cpu0->gpu0").curves["pinned"].bytes_per_s
    assert machine(changed).link("cpu0->gpu0").curves["pinned"].bytes_per_s == 4 * before
    assert changed.raw["cache"] == {"ratio": 0.5}
    assert changed.factor is None


def test_labels_are_never_stronger_than_what_they_come_from(tmp_path: Path):
    one = base(tmp_path)
    link, flops = "links.cpu0->gpu0.pinned.bytes_per_s", "devices.cpu0.flops"
    assert one.profile.numbers[link].source == "published"
    assert machine(vary(one, "link.bytes_per_s x2")).numbers[link].source == "derived"
    assert machine(vary(one, "cpu.compute x2")).numbers[flops].source == one.profile.numbers[flops].source == "spec-sheet"
    given = machine(vary(one, "link.bytes_per_s 47.6e9")).numbers[link]
    assert (given.source, given.value) == ("assumed", 47.6e9)
    assert "what-if: link.bytes_per_s 47.6e9" in given.ref


def test_every_knob_with_a_scale_takes_factors_and_is_where_it_was_at_one(tmp_path: Path):
    one = base(tmp_path, decision_us=10.0)
    for knob in KNOBS.values():
        if knob.scale is not None:
            assert knob.scale(one, Fraction(2)).factor == 2, knob.name
            assert knob.scale(one, Fraction(2)).raw != one.raw, knob.name
    assert vary(one, "link.bytes_per_s x1").raw == one.raw


def test_raw_keys_that_can_be_scaled(tmp_path: Path):
    one = base(tmp_path)
    scale = knob_of("devices.gpu0.router_us").scale
    assert scale is not None
    assert machine(scale(one, TWO)).devices["gpu0"].router_us == 2 * one.profile.devices["gpu0"].router_us
    assert vary(one, "workload.batch_size x3").raw["workload"]["batch_size"] == 3


# ------------------------------------------------------------------------------------------------------ PCIe and memory


def test_what_profiles_say_of_themselves():
    said = {name: pcie_of(load_hardware(name)) for name in ("rtx3090-epyc7532", "a6000-i9-10980xe", "h100-llama-cpp")}
    assert said == {"rtx3090-epyc7532": (4, 16), "a6000-i9-10980xe": (3, 16), "h100-llama-cpp": (5, 16)}
    assert str(memory_of(load_hardware("rtx3090-epyc7532"))) == "8 x DDR4-3200"
    assert float(PCIE[4]) == pytest.approx(1.969e9, rel=1e-3)


@pytest.mark.parametrize(
    ("text", "factor"),
    [
        ("pcie gen5", 2), ("pcie gen3", 0.5), ("pcie x8", 0.5), ("pcie gen5x8", 1), ("pcie 5.0 x16", 2),
        ("cpu.memory 12", 1.5), ("cpu.memory 8->4", 0.5), ("cpu.memory 8xDDR5-4800", 1.5), ("cpu.memory 12 x ddr5-6400", 3),
    ],
)  # fmt: skip
def test_nominal_ratios(tmp_path: Path, text: str, factor: float):
    changed = vary(base(tmp_path), text)
    assert changed.factor == Fraction(factor)
    assert changed.note


# --------------------------------------------------------------------------------------------------------------- refusals

REFUSED = {
    "link.bytes_per_s": "expected a knob and values",
    "link.bytes_per_s x2,": "expected a knob and values",
    "64GB": "did you mean 'ram 64GB'?",
    "2x rtx 3060": "did you mean 'gpu 2x rtx 3060'?",
    "link.bytes_per_s fast": "expected xF, +P%, -P% or a number, got 'fast'",
    "link.bytes_per_s x0": "expected a factor above 0",
    "link.bytes_per_s x1e999": "expected xF, +P%, -P% or a number, got '1e999'",
    "link.bytes_per_s x1e-999": "expected a factor above 0, got x1e-999",
    "transfer.chunk 1e999": "expected one finite number or word, got 1e999",
    "link.bytes_per_s x2/0": "expected xF, +P%, -P% or a number, got '2/0'",
    "model.expert_bits 1e99999999": "expected xF, +P%, -P% or a number, got '1e99999999'",
    "link.bytes_per_s -100%": "expected a factor above 0",
    "link.bytes_per_s -5": "expected a number above 0",
    "link.bandwith x2": "unknown knob 'link.bandwith'",
    "pcie gen9": "expected gen3, gen4, gen5, x1 to x16",
    "pcie x3": "expected gen3, gen4, gen5, x1 to x16",
    "pcie x2": "expected 'pcie gen4x2' for 2 lanes or 'link.bytes_per_s x2' for a factor, got 'x2'",
    "cpu.memory 4->8": "expected 8 channels before the arrow",
    "cpu.memory fast": "expected modules such as 8xDDR5-4800",
    "cpu.memory 0": "expected at least one channel",
    "gpu a101": "did you mean 'A10'",
    "gpu ryzen5900x": "expected a device in the role of accelerator, got none",
    "ram 2x32 ddr9": "expected modules such as 8xDDR5-4800",
    "threads 2.5": "expected a whole number of at least 1",
    "bits 4|8": "expected one choice of bits",
    "cache 2": "expected a share in [0, 1]",
    "cache x8": "expected a share of at most 1",
    "cache 12 GeB": "expected a size",
    "decision_us x2": "expected a number above 0 in decision_us to multiply",
    "batch 1.5": "expected a whole number",
    "workload.bach 2": "",
    "workload.refill x2": "expected a number in workload.refill",
    "devices.gpu0.lunch_us x2": "expected a key of a number",
    "devices.gpu9.launch_us x2": "unknown number",
    "links.cpu0->gpu0.pinned x2": "expected a key of a number",
}


@pytest.mark.parametrize("text", [text for text in REFUSED if REFUSED[text]])
def test_what_cannot_be_varied_is_one_line(tmp_path: Path, text: str):
    one = base(tmp_path)
    with pytest.raises(InputError) as error:
        for together in parse_vary(text):
            change(one, together)
    assert REFUSED[text] in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("profile", "text", "words"),
    [
        ("zen4-2core", "pcie gen5", "vary link.bytes_per_s instead"),
        ("zen4-2core", "cpu.memory 4", "vary cpu.memory_bandwidth instead"),
        ("ryzen7950x-rtx4080", "cpu.memory 2xDDR5-6000", "the profile says no speed (2 x DDR5)"),
        ("zen4-2core-disk", "cpu.memory_bandwidth x2", "expected a device in the role of host, got none"),
        ("ryzen5900x", "gpu.compute x2", "expected a device in the role of accelerator, got none"),
        ("ryzen5900x", "link.bytes_per_s x2", "has no such number"),
    ],
)
def test_what_a_profile_cannot_express_is_refused(tmp_path: Path, profile: str, text: str, words: str):
    one = Base({**base(tmp_path).raw, "hardware": profile}, "small.yaml")
    with pytest.raises(InputError) as error:
        vary(one, text)
    assert words in str(error.value)


def test_a_sweep_is_refused_with_the_way_to_fix_it(tmp_path: Path):
    written = small(tmp_path, workload={"batch_size": [1, 4], "decode_tokens": 3}, cache={"ratio": [0.25, 0.5]})
    with pytest.raises(InputError) as error:
        single(parse_config(written, "small.yaml"), "small.yaml")
    text = str(error.value)
    assert "workload.batch_size (1, 4) and cache.ratio (0.25, 0.5)" in text
    assert "--set workload.batch_size=1 --set cache.ratio=0.25" in text


def test_policies_and_their_options_may_be_swept(tmp_path: Path):
    one = base(
        tmp_path,
        policies=["lru", {"name": "fiddler", "rule": ["profile", "code"]}],
        workload={"batch_size": [2], "decode_tokens": 3},
    )
    assert [policy.get("rule") for policy in one.raw["policies"]] == [None, "profile", "code"]
    assert one.raw["workload"]["batch_size"] == 2


# ------------------------------------------------------------------------------------------------------- parts of a machine

BOX = "RTX 3060 + Ryzen 5 5600 + 64GB DDR4-3200"


@pytest.mark.parametrize(
    ("text", "then"),
    [
        ("gpu rtx 4090", "rtx 4090 + Ryzen 5 5600 + 64GB DDR4-3200"),
        ("ram 2x32 ddr4-3600", "RTX 3060 + Ryzen 5 5600 + 2x32 ddr4-3600"),
        ("cpu ryzen 9 5950x", "RTX 3060 + ryzen 9 5950x + 64GB DDR4-3200"),
    ],
)
def test_a_part_that_is_exchanged_gives_the_machine_with_it(tmp_path: Path, text: str, then: str):
    changed = vary(Base({**base(tmp_path).raw, "hardware": BOX}, "small.yaml"), text)
    assert values(machine(changed)) == values(load_hardware(then))
    with pytest.raises(InputError, match="expected DDR4 with AMD Ryzen 5 5600, got DDR5"):
        vary(Base({**base(tmp_path).raw, "hardware": BOX}, "small.yaml"), "ram 2x32 ddr5-6000")


def test_a_profile_without_parts_takes_a_gpu_of_the_catalogue(tmp_path: Path):
    one = Base({**base(tmp_path).raw, "hardware": "rtx2070s-i5-12400f"}, "small.yaml")
    was, now, named = one.profile, machine(vary(one, "gpu rtx 4090")), load_hardware({"parts": {"gpu": "rtx 4090"}})
    assert now.devices["gpu0"].memory_bytes == named.devices["gpu0"].memory_bytes
    assert now.numbers["devices.gpu0.memory_bytes_per_s"].value == named.numbers["devices.gpu0.memory_bytes_per_s"].value
    assert now.devices["cpu0"] == was.devices["cpu0"] and now.links == was.links


def test_threads_compute_in_proportion_and_read_until_the_memory_is_full(tmp_path: Path):
    one = Base({**base(tmp_path).raw, "hardware": BOX}, "small.yaml")
    was, rate = values(one.profile), float(str(one.profile.numbers["devices.cpu0.memory_bytes_per_s"].value))
    for threads, reads in ((3, 27e9 / rate), (6, 1.0)):
        changed = vary(one, f"threads {threads}")
        now = values(machine(changed))
        assert now["devices.cpu0.flops"] == pytest.approx(was["devices.cpu0.flops"] * threads / 6)
        assert now["devices.cpu0.memory_bytes_per_s"] == pytest.approx(rate * reads)
        assert machine(changed).machine["threads"] == str(threads)


def test_shares_of_a_memory_stay_within_one(tmp_path: Path):
    server = base(tmp_path, hardware="2x RTX 4090 + EPYC 9354 + 12x32 DDR5-4800")
    assert server.profile.numbers["contention.0.a_rate"].interval[1] == 1
    found = machine(vary(server, "link.bytes_per_s x0.5")).numbers["contention.0.a_rate"]
    assert found.interval is not None and found.value < 1 == found.interval[1]


def test_bits_are_of_experts_and_of_the_rest(tmp_path: Path):
    changed = vary(base(tmp_path), "bits Q4_K_M")
    assert (changed.raw["model"]["expert_bits"], changed.raw["model"]["other_bits"]) == (4.85, 5.35)


@pytest.mark.parametrize("text", ["pcie gen3x8", "cpu.memory_bandwidth x2", "link.bytes_per_s x2", "gpu.compute x2"])
def test_machines_from_parts_have_the_other_knobs(tmp_path: Path, text: str):
    one = Base({**base(tmp_path).raw, "hardware": BOX, "engine": "llama.cpp"}, "small.yaml")
    changed = vary(one, text)
    profile = load_hardware(changed.raw["hardware"], engine="llama.cpp")
    moved = set(changed.keys) & differing(one.profile, profile)
    assert moved
    factor = {"pcie gen3x8": 15.754 * 0.8 / 2 / (31.508 * 0.82)}.get(text, 2)
    for key in (key for key in moved if not key.startswith(("contention", "machine"))):
        was, now = (machine.numbers[key] for machine in (one.profile, profile))
        assert float(str(now.value)) == pytest.approx(float(str(was.value)) * factor, rel=1e-3), key
        if was.interval and text != "pcie gen3x8":  # as sure as it was
            assert now.interval == pytest.approx([end * factor for end in was.interval]), key
