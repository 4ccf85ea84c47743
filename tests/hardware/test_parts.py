"""A machine from its parts: names, rules, what is assumed, asked back and refused."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import yaml

import moesim
from experiments.research.tables import parts_rates
from moesim.cli.main import main
from moesim.errors import HardwareError
from moesim.hardware import load_hardware
from moesim.hardware.parts import Cpu, Gpu, Part, find_cpu, find_gpu, parts_of, read_parts
from moesim.hardware.rates import assembled

BOX = {"gpu": "RTX 3060 12GB", "cpu": "Ryzen 5 5600", "ram": "2x16 DDR4-3200", "pcie": "4x16", "os": "windows"}
GIB = 2**30


def number(parts: dict[str, Any], key: str) -> dict[str, Any]:
    found: Any = assembled(parts, "test")
    for step in key.split("."):
        found = found[step]
    return found


def around(parts: dict[str, Any], key: str, scale: float = 1e9) -> tuple[float, float, float]:
    one = number(parts, key)
    value, low, high = (float(f"{x / scale:.3g}") for x in (one["value"], *one["interval"]))
    return value, low, high


def test_a_usual_machine_has_the_numbers_of_the_rules():
    assert around(BOX, "devices.gpu0.memory_bytes_per_s") == (317, 279, 342)  # 360 x 0.88
    assert around(BOX, "devices.gpu0.flops", 1e12) == (23.5, 15.0, 27.7)  # 25.5 x 0.92
    assert around(BOX, "devices.gpu0.memory_bytes", GIB) == (11, 10.8, 11.5)  # 12 less what Windows keeps
    assert around(BOX, "links.cpu0->gpu0.pinned.bytes_per_s") == (25.8, 23.2, 28.9)  # 16 lanes of PCIe 4 x 0.82
    assert around(BOX, "links.cpu0->gpu0.pinned.latency_us", 1) == (35, 19.9, 60.2)
    assert around(BOX, "devices.cpu0.memory_bytes_per_s") == (45.6, 33.3, 48.3)  # 51.2 x 0.89
    assert around(BOX, "devices.cpu0.expert_cost.few_row_flops") == (162, 97.2, 259)  # 6 x 4.0 GHz x 9 x 0.75
    assert around(BOX, "devices.cpu0.expert_cost.many_row_flops") == (432, 173, 691)
    assert around(BOX, "devices.cpu0.memory_bytes", GIB) == (27, 26, 28)
    machine = moesim.Hardware.from_parts(**BOX)
    assert machine.devices["cpu0"].expert_cost.read_bytes_per_s == round(45.57e9 * 0.88)
    assert machine.devices["gpu0"].memory_bytes_per_s < 0.9 * 316.8e9, "llama.cpp's kernels read at a share of a stream"
    assert "assumed" not in machine.machine, "nothing was left out"


def test_text_file_mapping_and_python_are_one_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "hardware_profiles" / "mybox.yaml"
    path.parent.mkdir()
    path.write_text(yaml.safe_dump({"name": "mybox", "parts": BOX}))
    text = "RTX 3060 12GB + Ryzen 5 5600 + 2x16 DDR4-3200 + PCIe 4x16 + windows"
    assert read_parts(text, "t") == BOX | {"pcie": "PCIe 4x16"}
    named: list[Any] = ["mybox", path, {"name": "mybox", "parts": BOX}, {"base": text, "name": "mybox"}]
    found = [load_hardware(one).figures() for one in named[:3]] + [moesim.Hardware.from_parts(**BOX, name="mybox").figures()]
    assert all(one == found[0] for one in found)
    plain = load_hardware(text)
    assert plain.name == "rtx-3060-12gb+ryzen-5-5600+2x16-ddr4-3200+pcie-4x16+windows"
    assert plain.devices == load_hardware("mybox").devices


def test_measured_numbers_replace_rules_and_what_follows_from_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    measured = {"value": 42e9, "source": "measured", "date": "2026-11-28", "method": "read", "repeats": 3, "spread": "2 %"}
    key = "devices.cpu0.memory_bytes_per_s"
    machine = load_hardware({"parts": BOX, key: measured})
    assert machine.numbers[key].source == "measured" and machine.devices["cpu0"].expert_cost.read_bytes_per_s == 36_960_000_000
    (pair,) = machine.contention
    assert pair.a_rate_ppm == pytest.approx(1e6 * 0.9 * 42 / (36.96 + 25.84), abs=100)
    nested = load_hardware({"parts": BOX, "devices": {"cpu0": {"memory_bytes_per_s": measured}}})
    assert nested.figures() == machine.figures() | {"overrides": ()}
    experts = load_hardware({"parts": BOX, "devices.cpu0.expert_cost.read_bytes_per_s": 30e9})
    assert experts.devices["cpu0"].expert_cost.read_bytes_per_s == 30_000_000_000
    monkeypatch.chdir(tmp_path)
    Path("box.yaml").write_text(yaml.safe_dump({"name": "box", "parts": BOX}))
    upgraded = load_hardware({"base": "box.yaml", "parts.gpu": "rtx 4090", key: 40e9})
    assert upgraded.machine["gpu"] == "GeForce RTX 4090" and upgraded.devices["cpu0"].memory_bytes_per_s == 40_000_000_000


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("rtx3090", "GeForce RTX 3090"), ("geforce 3060 12 gb", "GeForce RTX 3060 12GB"), ("7900xtx", "Radeon RX 7900 XTX"),
        ("NVIDIA GeForce RTX 4060 Laptop GPU", "GeForce RTX 4060 Laptop"),
        ("4090 mobile", "GeForce RTX 4090 Laptop"),
        ("NVIDIA A100-SXM4-80GB", "A100 SXM4 80GB"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80GB"),
        ("Tesla V100-PCIE-32GB", "Tesla V100 PCIe 32GB"),
        ("Radeon 8060S Graphics (RADV STRIX_HALO)", "Radeon 8060S (Strix Halo)"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"), ("Quadro RTX 6000", "Quadro RTX 6000"),
        ("Intel(R) Arc(TM) A770 Graphics", "Arc A770 16GB"), ("NVIDIA GB10", "GB10 (DGX Spark)"), ("rtx 9999", None),
    ],
)  # fmt: skip
def test_gpus_by_the_names_of_people_and_drivers(text: str, name: str | None):
    found = find_gpu(text)
    assert (found and found.name) == name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Ryzen 5600", "AMD Ryzen 5 5600"), ("r7 5800x3d", "AMD Ryzen 7 5800X3D"), ("13700k", "Intel Core i7-13700K"),
        ("AMD Ryzen 9 7950X 16-Core Processor", "AMD Ryzen 9 7950X"), ("AMD EPYC 9655 96-Core Processor", "AMD EPYC 9655"),
        ("13th Gen Intel(R) Core(TM) i7-13700K", "Intel Core i7-13700K"), ("Apple M4 Max", "Apple M4 Max"),
        ("Intel(R) Xeon(R) CPU E5-2683 v4 @ 2.10GHz", "Intel Xeon E5-2683 v4"), ("xeon 5600", None),
        ("AMD RYZEN AI MAX+ 395 w/ Radeon 8060S", "AMD Ryzen AI Max+ 395"), ("Xeon Platinum 8480+", "Intel Xeon Platinum 8480+"),
    ],
)  # fmt: skip
def test_cpus_by_the_names_of_people_and_drivers(text: str, name: str | None):
    found = find_cpu(text)
    assert (found and found.name) == name


def test_every_part_of_the_catalogue_makes_a_machine():
    for gpu in parts_of(Gpu):
        made = moesim.Hardware.from_parts(gpu=gpu.name, cpu=None if gpu.unified else "ryzen 7 7700x")
        assert made.machine["gpu"] == gpu.name
    for cpu in parts_of(Cpu):
        made = moesim.Hardware.from_parts(gpu=None if cpu.vendor == "Apple" else "rtx 3090", cpu=cpu.name)
        assert made.machine["cpu"] == cpu.name and made.devices["cpu0"].flops > 0


def test_every_name_is_found_or_asked_back():
    for kind, find in ((Gpu, find_gpu), (Cpu, find_cpu)):
        by_alias: dict[str, list[Part]] = {}
        for part in parts_of(kind):
            assert find(part.name) is part
            for alias in part.aliases:
                by_alias.setdefault(alias, []).append(part)
        for alias, parts in by_alias.items():
            if len(parts) == 1 or alias in {part.name for part in parts}:
                assert find(alias) in parts
            else:
                with pytest.raises(HardwareError, match="expected one part, got a name of several"):
                    find(alias)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("RTX 4060 Ti + Ryzen 5 7600", "write 'GeForce RTX 4060 Ti 8GB' or 'GeForce RTX 4060 Ti 16GB'"),
        ("RTX 6000 + Ryzen 5 7600", "'Quadro RTX 6000' or 'RTX 6000 Ada' or 'RTX PRO 6000"),
        ("RTX 3061 + Ryzen 5 5600", "got 'RTX 3061'; did you mean 'GeForce RTX 3060 12GB'"),
        ("RTX 3060 + Ryzen 5 5600 + 64GB DDR5-6000", "parts.ram: expected DDR4 with AMD Ryzen 5 5600, got DDR5; correct one"),
        ("RTX 3060 + Ryzen 5 5600 + 64GB DDR4-9000", "expected DDR4 of at most 5333 MT/s, got 9000; correct it"),
        ("RTX 3060 + Ryzen 5 5600 + 4x16", "expected memory or a link, got either; write '4x16GB' or 'PCIe 4x16'"),
        ("RTX 3060 + Ryzen 5 5600 + Ryzen 7 5700X", "cpu: expected it once, got 'Ryzen 5 5600' and 'Ryzen 7 5700X'"),
        ("RTX 3060 + 2x Ryzen 5 5600", "expected at most 1 of AMD Ryzen 5 5600 in a machine, got 2; correct it"),
        ("RTX 3060 12GB + Apple M1", "expected the GPU of the same chip as Apple's, got GeForce RTX 3060 12GB with Apple M1"),
        ("936GB/s + 64GB + 936GB/s 24GiB + 12GB/s", "cpu: expected it once"),
        ("RTX 3060 + Ryzen 5 5600 + pcie foo", "parts.pcie: expected a link such as 4x16"),
        ("RTX 3060 + Ryzen 5 5600 + nvme9", "parts.disk: unknown kind of disk 'nvme9'"),
        ("64GB DDR4-3200 + PCIe 4x16", "parts: expected a gpu or a cpu"),
    ],
)
def test_what_does_not_exist_or_is_not_clear_is_one_line(text: str, said: str):
    with pytest.raises(HardwareError) as caught:
        load_hardware(text, "here")
    assert str(caught.value).startswith("here: ") and said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"gpu": 3060}, "parts.gpu: expected a text such as 'rtx 3060', got 3060; put it in quotes"),
        ({"gpu": "rtx 3060", "memory": "64GB"}, "parts: unknown part 'memory'"),
        (
            {"gpu": "rtx 3060", "ram": "64"},
            "parts.ram: expected a size or a type such as 64GB or 2x32 ddr4-3200, got '64'; write 64GB",
        ),
        ({"gpu": "936GB/s"}, "parts.gpu: expected its memory next to the rate"),
        ("rtx 3060", "parts: expected a mapping with gpu, cpu"),
    ],
)
def test_a_wrong_mapping_is_one_line(parts: Any, said: str):
    with pytest.raises(HardwareError, match=said):
        load_hardware({"name": "x", "parts": parts})


def test_parts_and_a_papers_numbers_do_not_mix():
    with pytest.raises(HardwareError, match="expected parts or numbers, got both; leave one out"):
        load_hardware({"name": "x", "parts": BOX, "numbers": {"pcie": "25GB/s"}})


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("RTX 3060 + Ryzen 5 5600", "PCIe 4.0 x16"),
        ("RTX 4060 + Ryzen 5 5600", "PCIe 4.0 x8"),  # the card has eight lanes
        ("RTX 4090 + Ryzen 5 5600G", "PCIe 3.0 x16"),  # this processor has PCIe 3
        ("RTX 3060 + Ryzen 5 5600 + B450", "PCIe 3.0 x16"),  # and this board
        ("RTX 3060 + i9-14900K + PCIe 5 x16", "PCIe 4.0 x16"),
        ("RTX 5090 + i9-14900K + PCIe 5 x8", "PCIe 5.0 x8"),
        ("2x RTX 3090 + i9-14900K", "PCIe 4.0 x8"),  # sixteen lanes for two
        ("2x RTX 3090 + EPYC 7532", "PCIe 4.0 x16"),
        ("RTX 3090 + i9-14900K + OCuLink", "oculink"),
        ("GH200", "nvlink-c2c"),
    ],
)
def test_a_link_is_the_least_of_card_processor_and_slot(text: str, link: str):
    assert load_hardware(text + " + linux").machine["link"] == link


@pytest.mark.parametrize(
    ("text", "GBps"),
    [
        ("ryzen 5 7600 + 2x16 ddr5-6000", 61),  # the link of one die, whatever the memory
        ("ryzen 9 7950x + 2x16 ddr5-6000", 76.8),
        ("ryzen 9 7950x + 1x32 ddr5-6000", 38.4),
        ("ryzen 9 7950x + 4x16 ddr5-6000", 76.8),  # four modules on two channels
        ("epyc 7282 + 8x32 ddr4-3200", 89),  # two dies of 44.5
        ("epyc 7282 + 8x32 ddr4-2133", 59.32),
        ("epyc 7532 + 8x32 ddr4-3200", 133.1),
        ("epyc 9354 + 4x32 ddr5-4800", 121.3),  # four of twelve channels
        ("2x epyc 7532 + 16x32 ddr4-3200", 239.6),  # 1.8 times one
        ("60GB/s + 64GB", 60),
    ],
)
def test_processors_read_what_channels_dies_and_sockets_allow(text: str, GBps: float):
    machine = load_hardware(text)
    assert machine.numbers["devices.cpu0.memory_bytes_per_s"].value == pytest.approx(GBps * 1e9, rel=1e-3)
    assert machine.compute == "cpu0" and not machine.links


@pytest.mark.parametrize(("text", "gib"), [("M4 Max 128GB", 96), ("Strix Halo + 128GB", 119.04), ("DGX Spark", 119.04)])
def test_one_chip_has_one_memory(text: str, gib: float):
    machine = load_hardware(text)
    gpu, cpu = machine.devices["gpu0"], machine.devices["cpu0"]
    assert gpu.memory_of == "cpu0" and gpu.memory_bytes == pytest.approx(gib * GIB) and gpu.memory_bytes < cpu.memory_bytes
    assert {pair.b for pair in machine.contention} == {"gpu0.experts", "gpu0.dense"}


def test_what_is_not_given_is_assumed_said_and_less_sure():
    machine = load_hardware({"name": "x", "parts": {"gpu": "RTX 3060"}})
    said = machine.machine["assumed"]
    for words in (
        "RTX 3060 is the GeForce RTX 3060 12GB, the usual one; there is a GeForce RTX 3060 8GB",
        "cpu: cores as of AMD Ryzen 7 5700X",
        "os: linux", "memory: 32 GiB", "memory: DDR4-3200, 2 channels filled", "link: PCIe 4.0 x16",
    ):  # fmt: skip
        assert words in said
    assert machine.numbers["devices.cpu0.flops"].source == "assumed"
    sure = load_hardware("RTX 3060 12GB + i7-8700 + 2x16 DDR4-2666").numbers["devices.cpu0.memory_bytes_per_s"]
    loose = load_hardware("RTX 3060 12GB + i7-8700 + 32GB DDR4-2666").numbers["devices.cpu0.memory_bytes_per_s"]
    assert (sure.source, loose.source) == ("derived", "assumed") and sure.value == loose.value
    assert loose.interval[0] < sure.interval[0]


@pytest.mark.parametrize(
    ("text", "backend", "system"),
    [
        ("RX 7900 XTX + Ryzen 5 7600", "hip", "linux"), ("RX 7900 XTX + Ryzen 5 7600 + win11", "vulkan", "windows"),
        ("RX 7900 XTX + Ryzen 5 7600 + linux vulkan", "vulkan", "linux"), ("Arc B580 + Ryzen 5 7600", "vulkan", "linux"),
        ("M2 Ultra", "metal", "macos"), ("RTX 3060 12GB + Ryzen 5 7600 + wsl2", "cuda", "linux"),
    ],
)  # fmt: skip
def test_the_words_of_a_machine_choose_its_engine_costs(text: str, backend: str, system: str):
    words = load_hardware(text).machine
    assert (words["backend"], words["system"], words["engine"]) == (backend, system, f"llama.cpp ({backend}, {system})")


def test_rates_alone_are_enough():
    machine = load_hardware("936GB/s 24GiB + 60GB/s + 128GB")
    assert machine.numbers["devices.cpu0.memory_bytes_per_s"].value == 60e9
    assert {machine.numbers[f"devices.{name}.memory_bytes_per_s"].source for name in ("gpu0", "cpu0")} <= {"assumed", "derived"}
    assert machine.devices["gpu0"].memory_bytes == round(23.7 * GIB)


def test_a_catalogue_of_ones_own_adds_and_replaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    path = Path("hardware_profiles/parts.csv")
    path.parent.mkdir()
    columns = "name,aliases,platform,vram_GiB,memory_bandwidth_GBps,fp16_dense_TFLOPs,pcie_gen,pcie_lanes,vendor\n"
    path.write_text(
        f"{columns}RTX 9999,9999,NVIDIA,64,3000,400,5,16,NVIDIA\nGeForce RTX 3090,3090,NVIDIA,48,900,70,4,16,NVIDIA\n"
    )
    assert load_hardware("RTX 9999 + Ryzen 9 9950X").machine["gpu"] == "RTX 9999"
    assert number({"gpu": "RTX 9999"}, "devices.gpu0.memory_bytes_per_s")["value"] == 2640e9
    mine = find_gpu("NVIDIA GeForce RTX 3090")
    assert mine is not None and mine.vram_GiB == 48
    path.write_text(columns + "RTX 9999,,NVIDIA,much,3000,400,5,16,NVIDIA\n")
    with pytest.raises(HardwareError, match=r"parts.csv:2: vram_GiB: expected a number, got 'much'; correct it"):
        find_gpu("RTX 9999")


def test_a_profile_of_parts_is_written_shown_and_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    options = ["--gpu", "rtx 3060", "--cpu", "ryzen 5 5600", "--ram", "2x32 ddr4-3200", "--pcie", "4x16", "--disk", "nvme4"]
    assert main(["profile", "new", "mybox", *options, "--os", "windows"]) == 0
    said = capsys.readouterr().err
    assert "cpu0: memory 45.6 GB/s (33.3 to 48.3)" in said and "gpu0: memory 317 GB/s (279 to 342), derived" in said
    assert "assumed: rtx 3060 is the GeForce RTX 3060 12GB" in said and said.endswith("wrote hardware_profiles/mybox.yaml\n")
    assert main(["profile", "check", "mybox"]) == main(["profile", "show", "mybox"]) == 0
    assert "disk0->cpu0" in capsys.readouterr().out
    assert main(["profile", "new", "other", *options, "--vram", "12GiB"]) == 2
    assert (
        "expected parts or a paper's numbers, got --gpu rtx 3060 and --vram 12GiB; leave one kind out" in capsys.readouterr().err
    )
    assert main(["profile", "new", "other", "--gpu", "200us", "--cpu", "ryzen 5 5600"]) == 2
    assert not Path("hardware_profiles/other.yaml").exists()


def test_lists_of_parts_fit_the_screen(capsys: pytest.CaptureFixture[str]):
    assert main(["list", "parts", "rtx", "30"]) == 0
    out = capsys.readouterr().out
    assert "GeForce RTX 3060 12GB" in out and max(map(len, out.splitlines())) <= 79 and "Ryzen" not in out
    assert main(["list", "parts", "nothing", "such"]) == 2


def test_machines_of_parts_are_swept(capsys: pytest.CaptureFixture[str]):
    boxes = "RTX 3060 12GB + Ryzen 5 5600 + 64GB DDR4-3200, RTX 4090 + Ryzen 9 7950X + 64GB DDR5-6000"
    run = ["--policies", "llama-cpp", "--trace", "mini-mixtral", "--cache", "0.25", "--prompt", "8", "--decode", "4", "-o", "csv"]
    assert main(["compare", "--hardware", boxes, "--jobs", "1", *run]) == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert [row["hardware"] for row in rows] == [load_hardware(one.strip()).name for one in boxes.split(",")]
    assert float(rows[0]["decode_tokens_per_s"]) < float(rows[1]["decode_tokens_per_s"])


def test_nine_of_ten_measured_rates_lie_in_the_ranges_of_derived_ones():
    found = parts_rates.answers()
    for what in parts_rates.PLACES:
        of = [one for one in found if one.what == what]
        assert sum(one.inside for one in of) >= 0.9 * len(of), what
    assert len(found) > 150 and all(one.source for one in found)


@pytest.mark.parametrize("link", ["PCIe 3", "pcie3", "gen 3", "gen3"])
def test_a_generation_alone_has_all_lanes(link: str):
    box = "RTX 3060 + Ryzen 5 5600 + 64GB DDR4-3200"
    key = "links.cpu0->gpu0.pinned.bytes_per_s"
    alone, whole = (load_hardware(f"{box} + {one}").numbers[key].value for one in (link, "PCIe 3 x16"))
    assert alone == whole == pytest.approx(15.75e9 * 0.8, rel=0.01)


def test_numbers_that_replace_those_of_parts_are_the_last_word():
    """An engine reads a share of a rate: a rate that is given for the machine with its engine is not reduced again."""
    box = "RTX 3060 + Ryzen 5 5600 + 64GB DDR4-3200"
    key = "devices.gpu0.memory_bytes_per_s"
    assert load_hardware({"base": box, key: 2e11}).numbers[key].value == 2e11
    assert load_hardware(box).numbers[key].value == pytest.approx(316.8e9 * 0.78)


def test_copies_that_an_engine_adds_can_be_replaced():
    parts = {"parts": {"gpu": "rtx 3060", "cpu": "ryzen 5 5600", "ram": "2x32 ddr4-3200"}}
    key = "links.cpu0->gpu0.pageable.bytes_per_s"
    assert load_hardware({**parts, key: 1e9}).numbers[key].value == 1e9
