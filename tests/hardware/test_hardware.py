"""Hardware profiles: the format, every class of message, overrides, paths, labels, and the shipped files."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from moesim.errors import HardwareError
from moesim.hardware import LABELS, build_profile, hardware_names, load_hardware, weakest
from moesim.hardware.read import read_yaml

PAPERS = [
    "a100-xeon6230r", "a100-xeon6326", "a6000-i9-10980xe", "a6000-xeon5220r", "odmoe-10x3090",
    "rtx3090-epyc7532", "rtx3090x2-epyc7532", "server-8x3090", "v100-xeon6230r",
]  # fmt: skip
PUBLIC = [
    "a10-xeon8358", "a100-40gb-llama-cpp", "a100-80gb-llama-cpp", "epyc9175f", "epyc9355-rtx3090",
    "epyc9355-rtx5090", "epyc9374f-half", "epyc9654-48threads", "gtx1060-i5-7600k", "h100-llama-cpp",
    "h200-llama-cpp", "i9-10900x-rtx2080", "i9-14900k-8gb", "l4-cascadelake", "quadro-rtx6000-skylake",
    "rtx2070s-i5-12400f", "rtx3090-i9-11900kf", "rtx3090ti-ryzen9950x", "rtx4070-i5-12600k",
    "rtx4090-llama-cpp", "rtx5070-ryzen9600x", "rx6700xt-ryzen5800x", "ryzen5900x", "ryzen7950x-rtx4080",
    "srv1-6gb", "v100-llama-cpp", "xeon-e5-2683v4", "xeon6454s-rtx4090d",
]  # fmt: skip
"""Machines of public measurements, on which only what those need is known."""
SHIPPED = PAPERS + PUBLIC

TINY = """
name: tiny
description: a machine for tests
compute: gpu0
backing: [cpu0]
devices:
  gpu0:
    kind: gpu
    memory_bytes: {value: "4 GiB", source: spec-sheet, ref: sheet}
    memory_bytes_per_s: {value: 500e9, source: published, ref: someone}
    flops: {value: 1e12, source: spec-sheet, ref: sheet}
    launch_us: {value: 5, source: derived, how: counted}
    experts:
      - shape: {hidden: 64, intermediate: 128, bits: 16}
        form: linear
        range: [1, 64]
        base_us: {value: 10, source: published, ref: someone}
        per_token_us: {value: 0.5, source: published, ref: someone}
  cpu0:
    kind: cpu
    memory_bytes: {value: 64_000_000_000, source: spec-sheet, ref: sheet}
    memory_bytes_per_s: {value: 50e9, source: published, ref: someone}
    flops: {value: 1e11, source: spec-sheet, ref: sheet}
links:
  "cpu0->gpu0": &pcie
    pinned:
      latency_us: {value: 10, source: published, ref: someone}
      bytes_per_s: {value: 10e9, source: published, ref: someone}
  "gpu0->cpu0": *pcie
contention:
  - a: cpu0.experts
    b: cpu0->gpu0
    a_rate: {value: 0.75, source: published, ref: someone}
    b_rate: {value: 0.5, source: derived, how: guessed from someone}
"""


def tiny() -> dict[str, Any]:
    """Fresh contents of a small profile, without shared parts."""
    return json.loads(json.dumps(read_yaml(TINY, "tiny.yaml")))  # type: ignore[no-any-return]


def put(raw: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Set a dotted key; ``...`` removes it."""
    steps: list[Any] = [int(step) if step.isdecimal() else step for step in key.split(".")]
    here: Any = raw
    for step in steps[:-1]:
        here = here[step]
    if value is ...:
        del here[steps[-1]]
    else:
        here[steps[-1]] = value
    return raw


def message(raw: dict[str, Any]) -> str:
    """Get the message that a broken profile gives; it must be one line."""
    with pytest.raises(HardwareError) as caught:
        build_profile(raw, "hardware_profiles/x.yaml")
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_tiny_profile_reads_as_written() -> None:
    profile = build_profile(tiny(), "tiny.yaml")
    gpu = profile.devices["gpu0"]
    assert gpu.memory_bytes == 4 * 2**30
    assert gpu.workspace_bytes == 0
    assert gpu.memory_bytes_per_s == 500_000_000_000
    assert list(profile.devices) == ["gpu0", "cpu0"]
    link = profile.link("cpu0->gpu0")
    assert (link.src, link.dst, link.medium) == ("cpu0", "gpu0", None)
    assert link.curves["pinned"].bytes_per_s == 10_000_000_000
    (pair,) = profile.contention
    assert (pair.a_rate_ppm, pair.b_rate_ppm, pair.source) == (750_000, 500_000, "derived")
    assert profile.numbers["devices.gpu0.launch_us"].ref == "counted"
    assert profile.labels == ("published", "derived", "spec-sheet")


@pytest.mark.parametrize(
    ("number", "missing"),
    [
        ({"value": 1, "source": "published"}, "ref"),
        ({"value": 1, "source": "spec-sheet"}, "ref"),
        ({"value": 1, "source": "derived", "ref": "not enough"}, "how"),
        ({"value": 1, "source": "assumed"}, "why"),
        ({"value": 1, "source": "measured", "method": "m", "repeats": 9}, "date and spread"),
    ],
)
def test_each_source_needs_its_proof(number: dict[str, Any], missing: str) -> None:
    raw = put(tiny(), "devices.gpu0.launch_us", number)
    assert f"expected {missing} next to source: {number['source']}, got nothing; add it" in message(raw)


def test_measured_number_keeps_its_words() -> None:
    number = {"value": 1, "source": "measured", "date": "2025-11-20", "method": "timer", "repeats": 9, "spread": "2 %"}
    profile = build_profile(put(tiny(), "devices.gpu0.launch_us", number), "x")
    assert profile.numbers["devices.gpu0.launch_us"].ref == "2025-11-20; timer; 2 %; 9 repeats"


def test_first_error_is_the_misspelt_key_and_the_rest_is_counted() -> None:
    raw = tiny()
    raw["descripton"] = raw.pop("description")
    assert message(raw).startswith(
        "hardware_profiles/x.yaml: descripton: unknown key 'descripton'; did you mean 'description'? known: "
    )
    assert message(raw).endswith("(and 1 more)")


def test_yaml_traps(tmp_path: Path) -> None:
    assert read_yaml("a: 936e9\nb: 1.5e-3\nc: 12\nd: 2025-11-20", "x") == {"a": 936e9, "b": 0.0015, "c": 12, "d": "2025-11-20"}
    with pytest.raises(HardwareError, match=r"^x: line 2: expected each key once, got 'a' again; remove one$"):
        read_yaml("a: 1\na: 2", "x")
    with pytest.raises(HardwareError, match=r"^x: expected valid YAML, got "):
        read_yaml("a: [1", "x")
    with pytest.raises(HardwareError, match="expected a mapping with name, devices and links, got list"):
        read_yaml("- 1", "x")
    with pytest.raises(HardwareError, match="expected valid YAML"):
        read_yaml("a: !!python/object/apply:os.getcwd []", "x")
    path = tmp_path / "binary.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(HardwareError, match="got: not UTF-8 text; check the path"):
        load_hardware(path)


def test_unknown_names(tmp_path: Path) -> None:
    with pytest.raises(HardwareError, match="unknown hardware profile 'rtx3090-epyc753'; did you mean 'rtx3090-epyc7532'"):
        load_hardware("rtx3090-epyc753", "a.yaml: hardware")
    with pytest.raises(HardwareError, match="expected a hardware profile, got no file at"):
        load_hardware(tmp_path / "none.yaml")
    with pytest.raises(HardwareError, match=r"base: expected the name or path of a profile, got 3"):
        load_hardware({"base": 3})
    profile = build_profile(tiny(), "tiny.yaml")
    with pytest.raises(HardwareError, match="unknown link 'cpu0->gpu1'; did you mean 'cpu0->gpu0'"):
        profile.link("cpu0->gpu1")


@pytest.fixture
def tiny_path(tmp_path: Path) -> str:
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return str(path)


def test_overrides_are_labelled_assumed(tiny_path: str) -> None:
    changes = {
        "devices.gpu0.memory_bytes": "48 GiB", "links": {"cpu0->gpu0": {"pinned": {"bytes_per_s": 20e9}}},
        "devices.gpu0.experts.0.base_us": 7, "devices.cpu0.launch_us": 3, "name": "other",
    }  # fmt: skip
    profile = load_hardware({"base": tiny_path, **changes}, "e.yaml: hardware")
    assert profile.devices["gpu0"].memory_bytes == 48 * 2**30
    assert profile.link("cpu0->gpu0").curves["pinned"].bytes_per_s == 20_000_000_000
    assert profile.link("gpu0->cpu0").curves["pinned"].bytes_per_s == 10_000_000_000  # shared in the file, not here
    assert profile.devices["gpu0"].experts[0].base_us == 7
    assert profile.devices["cpu0"].launch_us == 3
    assert profile.name == "other"
    assert profile.path == tiny_path
    number = profile.numbers["devices.gpu0.memory_bytes"]
    assert (number.source, number.ref) == ("assumed", "set by the experiment")
    assert profile.numbers["devices.cpu0.launch_us"].source == "assumed"
    assert profile.numbers["devices.gpu0.flops"].source == "spec-sheet"
    assert profile.overrides[:2] == ("devices.gpu0.memory_bytes", "links.cpu0->gpu0.pinned.bytes_per_s")


def test_override_with_its_own_source(tiny_path: str) -> None:
    number = {"value": 2e12, "source": "published", "ref": "elsewhere"}
    profile = load_hardware({"base": tiny_path, "devices.gpu0.flops": number})
    assert profile.numbers["devices.gpu0.flops"].source == "published"


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("devices.gpu0.memory_byte", 1, "unknown key 'memory_byte'; did you mean 'memory_bytes'?"),
        ("devices.gpu1.flops", 1e12, "unknown device 'gpu1'; did you mean 'gpu0'? known: cpu0, gpu0"),
        ("links.cpu0->gpu1.pinned.bytes_per_s", 1e9, "unknown link 'cpu0->gpu1'; did you mean 'cpu0->gpu0'?"),
        ("devices.gpu0.experts.4.base_us", 1, "unknown expert '4'; known: 0"),
        ("devices.gpu0.memory_bytes", "48 XB", "expected a size with a unit"),
        ("devices.gpu0.flops", "71T", "expected a number of operations per second"),
        (
            "links.cpu0->gpu0.pageable.bytes_per_s",
            1e9,
            "links.cpu0->gpu0.pageable: expected latency_us and bytes_per_s, or points, got no latency_us; add it",
        ),
    ],
)
def test_wrong_overrides(tiny_path: str, key: str, value: Any, expected: str) -> None:
    with pytest.raises(HardwareError, match=re.escape(expected)) as caught:
        load_hardware({"base": tiny_path, key: value}, "e.yaml: hardware")
    assert str(caught.value).startswith("e.yaml: hardware: ")


def graph(*links: str) -> Any:
    raw = tiny()
    for name in ("a", "b", "c"):
        raw["devices"][name] = raw["devices"]["cpu0"]
    for link in links:
        raw["links"][link] = raw["links"]["cpu0->gpu0"]
    return build_profile(raw, "graph.yaml")


def test_path_has_fewest_hops() -> None:
    profile = graph("cpu0->a", "a->b", "b->c", "cpu0->b")
    assert [link.name for link in profile.path_between("cpu0", "c")] == ["cpu0->b", "b->c"]
    assert profile.path_between("a", "a") == ()


def test_path_ties_go_by_name() -> None:
    profile = graph("cpu0->b", "b->c", "cpu0->a", "a->c")
    assert [link.name for link in profile.path_between("cpu0", "c")] == ["cpu0->a", "a->c"]


def test_no_path_and_unknown_device() -> None:
    profile = graph("cpu0->a")
    with pytest.raises(HardwareError, match="expected a path a -> cpu0, got none; add a link"):
        profile.path_between("a", "cpu0")
    with pytest.raises(HardwareError, match="unknown device 'z'"):
        profile.path_between("a", "z")


def test_weakest_label() -> None:
    assert weakest([]) == "measured"
    assert weakest(["published", "derived", "measured"]) == "derived"
    assert [weakest([a, b]) for a, b in pairwise(LABELS)] == list(LABELS[1:])


def test_shipped_profiles_are_found() -> None:
    assert set(SHIPPED) <= set(hardware_names())


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_profile_is_whole(name: str) -> None:
    profile = load_hardware(name)
    assert profile.name == name == Path(profile.path).stem
    assert profile.description
    assert len(profile.numbers) > (30 if name in PAPERS else 3)
    for key, number in profile.numbers.items():
        assert number.source in ("measured", "published", "derived", "spec-sheet", "identified", "assumed"), key
        assert len(number.ref) >= 7, key
    for device in profile.devices.values():
        assert device.memory_bytes > 6 * 10**9
    for link in profile.links:
        assert link.curves
        if name in PAPERS:
            assert set(link.curves) == {"pinned", "pageable", "chunked"}, link.name
            assert link.activation is not None


@pytest.mark.parametrize("name", SHIPPED)
def test_what_another_gpu_measured_is_not_published_for_this_one(name: str) -> None:
    """A figure that names an RTX 3090 (minimind#837, FreeToken#281) is taken over where the GPU is another one."""
    if "3090" not in name:
        for key, number in load_hardware(name).numbers.items():
            assert number.source != "published" or not re.search("3090|minimind", number.ref), key


def test_cluster_has_one_network() -> None:
    """Hidden states and messages are serial in each direction of the main node's port."""
    profile = load_hardware("odmoe-10x3090")
    assert len(profile.devices) == 21
    assert {device.host for device in profile.devices.values()} == {"main", "shadow", *(f"worker{k}" for k in range(8))}
    assert profile.compute == "main-gpu"
    way = profile.path_between("main-gpu", "worker3-gpu")
    assert [link.name for link in way] == ["main-gpu->main-cpu", "main-cpu->worker3-cpu", "worker3-cpu->worker3-gpu"]
    assert [link.medium for link in way] == [None, "main-out", None]
    assert profile.path_between("worker3-gpu", "main-gpu")[1].medium == "main-in"
    assert profile.path_between("main-gpu", "shadow0-gpu")[1].medium == "main-out"
    assert len(profile.path_between("shadow1-gpu", "worker0-gpu")) == 3
    network = [link for link in profile.links if link.medium]
    assert len(network) == 26
    assert all(link.share_link for link in network)


def test_examples_in_the_guide_load() -> None:
    guide = Path(load_hardware("rtx3090-epyc7532").path).parent / "README.md"
    if not guide.is_file():
        pytest.skip("the guide is not next to the profiles (installed package)")
    short, parts, whole, *_ = guide.read_text(encoding="utf-8").split("```yaml\n")[1:]
    for example in (short, parts, whole):
        profile = build_profile(read_yaml(example.split("```")[0], "README.md"), "README.md")
        assert list(profile.devices)[:2] == ["gpu0", "cpu0"]
