"""The short form of a profile: what is typed, what follows from it, what is a default, and every message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import moesim
from moesim.errors import HardwareError, InputError
from moesim.hardware import HardwareProfile, load_hardware
from moesim.hardware.costs import CostModel
from moesim.hardware.load import short_form, short_text
from moesim.hardware.problems import find_problems
from moesim.hardware.short import RATIO
from moesim.metrics.naming import hardware_label
from moesim.model import load_model

MIXTRAL = {"base": "mixtral-8x7b", "expert_bits": 4}
N_BYTES = 3 * 4096 * 14336 // 2  # three matrices of half a byte a weight
OPERATIONS = 2 * 3 * 4096 * 14336
NUMBERS = {"pcie": "25GB/s", "cpu": "150us + 40us/token", "gpu": "60us", "vram": "12GiB", "ram": "64GiB"}
PAPER = {"source": "published", "ref": "Paper, Table 3"}


def short(**changed: Any) -> dict[str, Any]:
    numbers = {key: value for key, value in (NUMBERS | changed).items() if value is not None}
    return {"name": "mybox", "source": PAPER, "numbers": numbers}


def costs(profile: HardwareProfile, **model: Any) -> CostModel:
    return CostModel(load_model(MIXTRAL | model), profile)


def test_points_of_a_copy_replace_what_follows_from_numbers():
    points = {"value": [[65536, 18], [9437184, 420], [104857600, 4420]], **PAPER}
    found = load_hardware(short() | {"links": {"cpu0->gpu0": {"any": {"points": points}}}})
    links = {(link.src, link.dst): link for link in found.links}
    plain = {(link.src, link.dst): link for link in load_hardware(short()).links}
    assert links["cpu0", "gpu0"].curves != plain["cpu0", "gpu0"].curves
    assert links["gpu0", "cpu0"].curves == plain["gpu0", "cpu0"].curves
    assert "links.cpu0->gpu0.any.points" in found.numbers and "links.cpu0->gpu0.any.latency_us" not in found.numbers


def test_what_is_wrong_with_a_source_of_all_numbers_is_said_once():
    assert find_problems(short() | {"source": {**PAPER, "spread": 0.03}}, "x") == [
        "numbers.pcie.spread: expected a text, got 0.03; put it in quotes"
    ]


def test_every_number_and_its_label_by_hand():
    found = load_hardware(short())
    gpu, cpu, down, up = "devices.gpu0", "devices.cpu0", "links.cpu0->gpu0", "links.gpu0->cpu0"
    rate = N_BYTES / 60e-6  # 1.468 TB/s
    assert RATIO == 80
    expected = {
        f"{gpu}.memory_bytes": (12 * 2**30, "published"),
        f"{gpu}.workspace_bytes": (2**30, "assumed"),
        f"{gpu}.memory_bytes_per_s": (rate, "derived"),
        f"{gpu}.flops": (80 * rate, "assumed"),
        f"{gpu}.experts.0.flat_us": (60, "published"),
        f"{gpu}.experts.0.knee_tokens": (20, "assumed"),  # 60 us x 80 N_BYTES / 60 us / OPERATIONS, 4 operations a byte
        f"{gpu}.experts.0.per_token_us": (3, "assumed"),  # 60 us / 20
        f"{cpu}.memory_bytes": (64 * 2**30, "published"),
        f"{cpu}.memory_bytes_per_s": (N_BYTES / 190e-6, "derived"),
        f"{cpu}.flops": (OPERATIONS / 40e-6, "derived"),
        f"{cpu}.expert_cost.few_row_flops": (OPERATIONS / 40e-6, "derived"),
        f"{cpu}.experts.0.base_us": (150, "published"),
        f"{cpu}.experts.0.per_token_us": (40, "published"),
        f"{down}.any.latency_us": (28, "assumed"),
        f"{down}.any.bytes_per_s": (25e9, "published"),
        f"{down}.activation.latency_us": (28, "assumed"),
        f"{down}.activation.bytes_per_s": (25e9, "published"),
        f"{up}.any.latency_us": (28, "assumed"),
        f"{up}.any.bytes_per_s": (25e9, "assumed"),
        f"{up}.activation.latency_us": (28, "assumed"),
        f"{up}.activation.bytes_per_s": (25e9, "assumed"),
    }
    assert {key: number.source for key, number in found.numbers.items()} == {key: one[1] for key, one in expected.items()}
    for key, (value, _) in expected.items():
        assert found.numbers[key].value == pytest.approx(value, rel=1e-11), key
    for number in found.numbers.values():
        if number.source == "assumed":
            assert number.ref.startswith("default: ")
        elif number.source == "published":
            assert number.ref == "Paper, Table 3"
        else:
            assert "numbers." in number.ref, "it says which typed number it follows from"
    assert (found.compute, found.backing, found.contention) == ("gpu0", ("cpu0",), ())
    assert "launch nothing" in found.description


def test_costs_of_an_expert_are_the_typed_ones_to_the_nanosecond():
    found = costs(load_hardware(short()))
    assert [found.expert_ns("cpu0", n) for n in (1, 2, 10, 500)] == [190_000, 230_000, 550_000, 20_150_000]
    assert [found.expert_ns("gpu0", n) for n in (1, 2, 20, 21, 120)] == [60_000, 60_000, 60_000, 63_000, 360_000]
    assert found.fetch_ns("cpu0", "gpu0") == 28_000 + -(-N_BYTES // 25)
    assert found.fetch_ns("gpu0", "cpu0") == found.fetch_ns("cpu0", "gpu0")


@pytest.mark.parametrize("kind", ["pinned", "pageable", "chunked"])
@pytest.mark.parametrize("printed", ["14.2ms", "3.333ms", "523.7 us", "1s"])
def test_the_time_of_a_copy_is_the_typed_one(printed: str, kind: str):
    profile = load_hardware(short(pcie=None, transfer=printed))
    us = {"14.2ms": 14_200_000, "3.333ms": 3_333_000, "523.7 us": 523_700, "1s": 10**9}[printed]
    assert CostModel(load_model(MIXTRAL), profile, transfer=kind).fetch_ns("cpu0", "gpu0") == us
    link = "links.cpu0->gpu0"
    labels = {key: profile.numbers[f"{link}.{key}"].source for key in ("any.latency_us", "any.bytes_per_s")}
    assert labels == {"any.latency_us": "derived", "any.bytes_per_s": "derived"}
    assert f"numbers.transfer: {printed}" in profile.numbers[f"{link}.any.bytes_per_s"].ref
    assert profile.numbers[f"{link}.activation.latency_us"].value == 28, "an activation starts as other copies do"


def test_other_forms_of_times():
    alone = costs(load_hardware(short(cpu="0.04 ms/token")))
    assert [alone.expert_ns("cpu0", n) for n in (1, 3)] == [40_000, 120_000]
    sloped = load_hardware(short(gpu="60us + 1us/token"))
    assert [costs(sloped).expert_ns("gpu0", n) for n in (1, 9)] == [61_000, 69_000]
    assert sloped.numbers["devices.gpu0.flops"].source == "derived"
    assert sloped.devices["gpu0"].flops == OPERATIONS * 10**6
    swapped = load_hardware(short(cpu="40us/token + 150us"))
    assert costs(swapped).expert_ns("cpu0", 2) == 230_000


def test_the_rate_of_the_gpus_memory_may_be_given():
    found = load_hardware(short(gpu_memory="2TB/s"))
    assert found.devices["gpu0"].memory_bytes_per_s == 2 * 10**12
    assert found.numbers["devices.gpu0.memory_bytes_per_s"].source == "published"
    assert found.devices["gpu0"].flops == RATIO * 2 * 10**12
    assert costs(found).expert_ns("gpu0", 1) == 60_000, "the time of an expert is the typed one all the same"
    # 60 us x 160e12 / OPERATIONS = 27.2 rows
    assert [costs(found).expert_ns("gpu0", n) > 60_000 for n in (27, 28)] == [False, True]


def test_other_shapes_are_costed_from_the_same_rates():
    """At 8 bits reading takes twice as long; a further row's operations are the same."""
    profile = load_hardware(short())
    other = costs(profile, expert_bits=8)
    assert [other.expert_ns("cpu0", n) for n in (1, 2)] == [380_000, 420_000]
    assert other.expert_ns("gpu0", 1) == 120_000
    same = CostModel(load_model(MIXTRAL), load_hardware(short() | {"devices.cpu0.experts": []}))
    assert [same.expert_ns("cpu0", n) for n in (1, 2, 10)] == [190_000, 230_000, 550_000], "the typed times without their curve"


def test_the_model_may_be_another():
    raw = short() | {"for": {"base": "qwen3-30b-a3b", "expert_bits": 4}}
    profile = load_hardware(raw)
    assert profile.devices["cpu0"].experts[0].shape == (2048, 768, 4.0)
    assert CostModel(load_model(raw["for"]), profile).expert_ns("cpu0", 1) == 190_000
    assert profile.devices["gpu0"].memory_bytes_per_s == -(-(3 * 2048 * 768 // 2) * 10**6 // 60)


def test_a_number_may_have_a_source_of_its_own_and_the_nearest_counts():
    raw = short(gpu={"value": "60us", "source": "assumed", "why": "a guess"}, ram={"value": "64GiB"})
    raw["numbers"]["source"] = {"source": "spec-sheet", "ref": "data sheets"}
    found = load_hardware(raw).numbers
    assert found["devices.gpu0.experts.0.flat_us"].ref == "a guess"
    assert found["devices.gpu0.memory_bytes"].source == found["devices.cpu0.memory_bytes"].source == "spec-sheet"


def test_without_any_source_a_number_is_assumed():
    raw = short()
    del raw["source"]
    number = load_hardware(raw).numbers["links.cpu0->gpu0.any.bytes_per_s"]
    assert (number.source, number.ref) == ("assumed", "typed in")


def test_a_key_of_the_whole_form_replaces_what_would_stand_there():
    raw = short() | {"devices": {"gpu0": {"flops": 7e13}}, "links.gpu0->cpu0.any.bytes_per_s": 12e9, "description": "Mine."}
    found = load_hardware(raw)
    assert found.devices["gpu0"].flops == 7 * 10**13
    assert found.link("gpu0->cpu0").curves["pinned"].bytes_per_s == 12 * 10**9
    assert found.numbers["devices.gpu0.flops"].source == "published", "the source of the file"
    assert found.description == "Mine."


def test_file_mapping_and_python_give_the_same_machine(tmp_path: Path):
    form = short_form("mybox", NUMBERS, None, "published", "Paper, Table 3")
    assert form["for"] == MIXTRAL
    path = tmp_path / "mybox.yaml"
    path.write_text(short_text(form))
    assert yaml.safe_load(path.read_text()) == form
    assert len(path.read_text().splitlines()) <= 12
    by_file = load_hardware(path)
    mapping = load_hardware(form)
    python = moesim.Hardware.from_numbers(**NUMBERS, source="published", ref="Paper, Table 3", name="mybox")
    on_top = load_hardware({"base": str(path)})
    assert by_file.figures() == mapping.figures() == python.figures() == on_top.figures()
    assert python.figures() == load_hardware(python.written).figures()
    changed = load_hardware({"base": str(path), "devices.gpu0.flops": 5e13})
    assert changed.devices["gpu0"].flops == 5 * 10**13 and changed.overrides == ("devices.gpu0.flops",)


def test_a_typed_number_may_be_overridden_and_all_follows_anew(tmp_path: Path):
    path = tmp_path / "mybox.yaml"
    path.write_text(short_text(short_form("mybox", NUMBERS, None, "published", "Paper, Table 3")))
    found = load_hardware({"base": str(path), "numbers": {"gpu": "120us"}})
    assert found.devices["gpu0"].memory_bytes_per_s == N_BYTES * 10**6 // 120
    number = found.numbers["devices.gpu0.experts.0.flat_us"]
    assert (number.value, number.source, number.ref) == (120, "assumed", "set by the experiment")
    assert found.numbers["devices.cpu0.experts.0.base_us"].source == "published"
    assert hardware_label(found) == "mybox (numbers.gpu=120us)"
    copied = load_hardware({"base": str(path), "numbers.transfer": "14.2ms", "devices.gpu0.flops": 9e13})
    assert costs(copied).fetch_ns("cpu0", "gpu0") == 14_200_000, "a time of a copy replaces its rate"
    assert copied.devices["gpu0"].flops == 9 * 10**13
    dotted = load_hardware(short() | {"numbers.gpu": "120us"})
    assert dotted.devices == found.devices and hardware_label(dotted) == "mybox (numbers.gpu=120us)"
    own = tmp_path / "own.yaml"
    raw = {"base": str(path), "description": "Slower.", "source": PAPER | {"ref": "Table 4"}, "numbers": {"gpu": "120us"}}
    own.write_text(yaml.safe_dump(raw))
    assert load_hardware(own).numbers["devices.gpu0.experts.0.flat_us"].ref == "Table 4"
    assert load_hardware(own).devices == found.devices
    for source, said in (
        ({"base": str(path), "numbers.gpu": "120"}, "x: numbers.gpu: expected a time such as"),
        ({"base": "rtx3090-epyc7532", "numbers.gpu": "120us"}, "x: numbers: expected a profile that has numbers, got rtx3090"),
    ):
        with pytest.raises(HardwareError) as caught:
            load_hardware(source, "x")
        assert str(caught.value).startswith(said)
    own.write_text(yaml.safe_dump({"base": str(path), "numbers": 5}))
    with pytest.raises(HardwareError, match=r"own.yaml: numbers: expected a mapping with numbers to replace, got 5"):
        load_hardware(own)


def test_an_experiment_sweeps_a_typed_number(tmp_path: Path):
    path = tmp_path / "mybox.yaml"
    path.write_text(short_text(short_form("mybox", NUMBERS | {"vram": "24GiB"}, None, "assumed", None)))
    setting: dict[str, Any] = {"trace": "mini-mixtral", "cache": 0.25, "prompt": 4, "decode": 2, "jobs": 1, "progress": False}
    found = moesim.compare(["lru"], hardware={"base": str(path), "numbers": {"pcie": ["12GB/s", "24GB/s"]}}, **setting)
    assert [row["hardware"] for row in found.rows] == ["mybox (numbers.pcie=12GB/s)", "mybox (numbers.pcie=24GB/s)"]
    slow, fast = (row["decode_tokens_per_s"] for row in found.rows)
    assert 1.5 < fast / slow < 2


def test_a_model_as_an_object():
    model = moesim.load_model(MIXTRAL)
    assert moesim.Hardware.from_numbers(**NUMBERS, model=model).figures() == moesim.Hardware.from_numbers(**NUMBERS).figures()


BAD: list[tuple[str, Any, str]] = [
    ("pcie", "25", "numbers.pcie: expected a rate such as 25GB/s, got '25'; write a number and GB/s, GiB/s or MB/s"),
    ("pcie", 25e9, "numbers.pcie: expected a rate such as 25GB/s, got 25000000000.0; write"),
    ("pcie", "200Gb/s", "numbers.pcie: expected bytes a second, such as 25GB/s, got bits, '200Gb/s'; divide by 8, and write B"),
    ("pcie", "0GB/s", "numbers.pcie: expected a rate from 1000 to 1e+18 bytes a second, got '0GB/s'; correct it"),
    ("pcie", "1e999999999GB/s", "numbers.pcie: expected a rate from 1000 to 1e+18 bytes a second, got"),
    ("cpu", "150us", "numbers.cpu: expected a time that grows with tokens, such as 1.5ms + 400us/token, got '150us'; "
    "write 150us/token if that is the time of one token"),
    ("cpu", "150us + 40us", "numbers.cpu: expected a time such as 1.5ms + 400us/token, or one of"),
    ("cpu", "1us/token + 40us/token", "numbers.cpu: expected a time such as"),
    ("cpu", "150", "numbers.cpu: expected a time such as 1.5ms + 400us/token, or one of the two alone, got '150'; write"),
    ("cpu", 40, "numbers.cpu: expected a time such as 1.5ms + 400us/token, or one of the two alone, got 40; write numbers and"),
    ("cpu", "150us + 0us/token", "numbers.cpu: expected a time above 0 and of at most 1000 s, got '0us/token'; correct it"),
    ("gpu", "1e99999999999999999999s", "numbers.gpu: expected a time above 0 and of at most 1000 s, got"),
    ("gpu", "1e-999999999us", "numbers.gpu: expected a time above 0 and of at most 1000 s, got"),
    ("gpu", "-60us", "numbers.gpu: expected a time such as"),
    ("gpu", "60 usec", "numbers.gpu: expected a time such as"),
    ("gpu", ["60us"], "numbers.gpu: expected a time such as"),
    ("gpu_memory", "900GB/s", "numbers.gpu_memory: expected a rate at which an expert of mixtral-8x7b at 4 bits (88080384 bytes) "
    "can be read in numbers.gpu, 60us, got '900GB/s'; correct one of them"),
    ("vram", "12", "numbers.vram: expected a size with a unit ("),
    ("vram", "1GiB", "numbers.vram: expected more than the 1 GiB that the software of a GPU takes by default, got '1GiB'"),
    ("ram", "0GiB", "numbers.ram: expected a size above 0 bytes, got '0GiB'; write for example 64GiB"),
    ("ram", None, "numbers.ram: expected the memory of the host, such as 64GiB, got nothing; add it"),
    ("transfer", "1ms", "numbers: expected pcie or transfer, got both; leave one out"),
    ("gpus", "1ms", "numbers: unknown number 'gpus'; did you mean 'gpu'? known: cpu, gpu, gpu_memory, pcie, ram, transfer, vram"),
    ("gpu", {"value": "60us", "source": "published"}, "numbers.gpu: expected ref next to source: published, got nothing; add it"),
    ("gpu", {"value": "60us", "source": "known"}, "numbers.gpu.source: expected 'measured'"),
    ("gpu", {"value": "60us", "source": "assumed", "why": "x", "interval": [1, 2]}, "numbers.gpu: unknown key 'interval'"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value", "said"), BAD, ids=lambda one: str(one)[:30])
def test_a_bad_number_is_one_line_with_a_remedy(key: str, value: Any, said: str):
    with pytest.raises(HardwareError) as caught:
        load_hardware(short(**{key: value}), "x.yaml: hardware")
    assert str(caught.value).startswith(f"x.yaml: hardware: {said}")
    assert "\n" not in str(caught.value)
    assert caught.value.problems[0].startswith(said) and len(caught.value.problems) == 1


def test_all_that_is_wrong_is_told_at_once():
    raw = short(pcie="25", cpu=None, gpu="x", gpus="1us", ram="0GiB") | {"for": "mixtral"}
    with pytest.raises(HardwareError, match=r"\(and 5 more\)$") as caught:
        load_hardware(raw)
    starts = ["for: ", "numbers: ", "numbers.cpu: ", "numbers.pcie: ", "numbers.gpu: ", "numbers.ram: "]
    assert [next(s for s in starts if problem.startswith(s)) for problem in caught.value.problems] == starts


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"name": "x", "numbers": 5}, "numbers: expected a mapping with pcie, cpu, gpu, vram, ram, got 5"),
        (short() | {"for": {"base": "mixtral-8x7b", "expert_bits": [4, 2]}}, "for: expected experts of one size"),
        (short() | {"devices": {"gpu1": {"flops": 1e12}}}, "devices.gpu1.flops: unknown device 'gpu1'; did you mean 'gpu0'?"),
        (short() | {"devices.gpu0.flop": 1e12}, "devices.gpu0.flop: unknown key 'flop'; did you mean 'flops'?"),
    ],
)
def test_other_slips(raw: dict[str, Any], said: str):
    with pytest.raises(HardwareError) as caught:
        load_hardware(raw)
    assert str(caught.value).startswith(f"hardware: {said}")


GARBAGE: list[Any] = [
    None, 0, -1, 10**400, float("nan"), "", "x", "60us", "25GB/s", "1e400us", "1e-9GB/s", "9" * 5000 + "us", "1e300us",
    "1e-5us", "999s/token", [], {}, {"value": 1}, {"value": {"value": "60us"}}, {"value": "60us", "source": ["a"]},
    {"source": PAPER}, PAPER, True, [1, 2], {"base": "mixtral-8x7b"}, {"a": {"b": 1}},
]  # fmt: skip
PLACES = (
    "name", "source", "for", "numbers", "devices", "numbers/gpu", "numbers/transfer", "numbers/vram",
    "for/expert_bits", "x", 5,
)  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_garbage_is_read_or_refused_in_one_line(place: str | int):
    for value in GARBAGE:
        raw = short() | {"for": dict(MIXTRAL), "devices": {"gpu0": {"flops": 1e13}}}
        *path, last = place.split("/") if isinstance(place, str) else [place]
        here: Any = raw
        for step in path:
            here = here[step]
        here[last] = value
        said = refused(raw)
        assert said is None or (said.startswith("hardware") and "\n" not in said)
        assert said is not None or find_problems(raw, "x") == []


def refused(raw: dict[str, Any]) -> str | None:
    try:
        load_hardware(raw)
    except InputError as error:
        return str(error)
    return None
