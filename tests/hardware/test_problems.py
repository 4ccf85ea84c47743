"""All that is wrong with a profile, told at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import moesim
from moesim.cli.main import main
from moesim.errors import HardwareError
from moesim.hardware import hardware_names
from moesim.hardware.problems import find_problems
from tests.hardware.nonsense_kit import good, number


def places(raw: dict[str, Any]) -> list[str]:
    return [problem.partition(": ")[0] for problem in find_problems(raw, "x")]


def test_shipped_profiles_and_a_good_one_have_none():
    assert find_problems(good(), "x") == []
    assert {name: find_problems(name, "x") for name in hardware_names()} == {name: [] for name in hardware_names()}


def test_what_hides_behind_something_else_is_found_as_well():
    """The format, then devices as a whole, then the machine: each looks at nothing while the one before finds something."""
    raw = good()
    gpu = raw["devices"]["gpu0"]
    del gpu["memory_bytes"], gpu["flops"], gpu["memory_bytes_per_s"], raw["description"]
    gpu["lanch_us"] = number(3)
    gpu["experts"][0]["base_us"] = {"value": -1, "source": "published"}
    raw["devices"]["core0"]["cores"] = [1]
    raw["links"]["gpu0->core1"]["pinned"].pop("bytes_per_s")
    raw["links"]["core9->gpu0"] = raw["links"].pop("core1->gpu0")
    raw["backing"].append("tape0")
    raw["contention"][0]["a"] = "nothing"
    assert places(raw) == [
        "devices.gpu0.lanch_us",  # the format
        "description",
        "devices.gpu0.memory_bytes",
        "devices.gpu0.experts.0.base_us.value",
        "links.gpu0->core1.pinned",
        "devices.gpu0.experts.0.base_us",  # its source lacks a ref
        "devices.gpu0.memory_bytes_per_s",  # the device
        "devices.gpu0.flops",
        "links.core9->gpu0",  # the machine
        "links",
        "links",
        "backing",
        "devices.core1.cores",
        "contention.0",
        "contention.0",
    ]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"devices": {"gpu0": {"kind": "gpu"}, "cpu0": {"kind": "cpu"}}, "backing": ["cpu1"], "compute": "gpu0", "links": {}},
         ["devices.gpu0.memory_bytes", "devices.cpu0.memory_bytes", "devices.gpu0.memory_bytes_per_s",
          "devices.cpu0.memory_bytes_per_s", "devices.gpu0.flops", "devices.cpu0.flops", "backing", "contention.0",
          "contention.0"]),
        ({"platform_w": number(-1), "compute": "gpu9"}, ["platform_w.value", "compute"]),
        ({"machine": ["a list"], "compute": "gpu9"}, ["machine", "compute"]),
        ({"platform_w": number(-1), "compute": None}, ["compute", "platform_w.value", "profile"]),
        ({"backing": ["core1", "core1"], "platform_w": 5}, ["backing", "platform_w", "profile"]),
    ],
)  # fmt: skip
def test_each_problem_is_told_once(change: dict[str, Any], expected: list[str]):
    assert places(good() | change) == expected


def test_a_stand_in_is_not_complained_of():
    """Curves that overlap are compared; one whose number is wrong is not, once it has been told."""
    raw = good()
    curve = raw["devices"]["gpu0"]["experts"][0]
    raw["devices"]["gpu0"]["experts"].append(curve | {"per_token_us": number(-1)})
    raw["devices"]["gpu0"]["idle_w"] = number("a")
    raw["devices"]["gpu0"]["workspace_bytes"] = number("a")
    assert places(raw) == [
        "devices.gpu0.workspace_bytes.value", "devices.gpu0.experts.2.per_token_us.value", "devices.gpu0.idle_w.value",
    ]  # fmt: skip


def test_the_short_form_is_checked_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({"numbers": {"gpu": "60", "pcie": "25"}, "vran": "12GiB", "for": "mixtral"}))
    assert main(["profile", "check", str(path)]) == 2
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == f"{path}: 7 problems"
    starts = ["unknown key 'vran'; did you mean numbers.vram?", "for: ", "numbers.cpu: ", "numbers.vram: ", "numbers.ram: "]
    for line, start in zip(lines, [*starts, "numbers.pcie: ", "numbers.gpu: "], strict=True):
        assert line.startswith(f"  {start}")


def test_keys_beside_the_numbers_are_told_together():
    raw = {"name": "x", "numbers": {"pcie": "25GB/s", "cpu": "1us/token", "gpu": "60us", "vram": "12GiB", "ram": "64GiB"}}
    raw |= {"devices.gpu0.flop": 1e12, "devices": {"cpu0": {"launch": 3}, "gpu1": {"flops": 1e12}}}
    found = find_problems(raw, "x")
    assert [one.partition(":")[0] for one in found] == ["devices.cpu0.launch", "devices.gpu1.flops"]
    assert places(raw | {"devices": {}}) == ["devices.gpu0.flop"], "of an experiment"


def test_what_is_no_profile_is_an_error_of_its_own(tmp_path: Path):
    with pytest.raises(HardwareError, match="expected a hardware profile, got no file"):
        find_problems(tmp_path / "none.yaml", "x")


def test_a_complete_profile_says_what_is_assumed_and_who_cannot_copy(capsys: pytest.CaptureFixture[str]):
    assert main(["profile", "check", "i9-14900k-8gb"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("i9-14900k-8gb is complete: 35 numbers, 13 of them assumed\n")
    assert out.count("the GPU is not named; an RTX 4080's rate") == 0, "a semicolon separates what is said of a number"
    assert "devices.gpu0.memory_bytes_per_s " in out and " an RTX 4080's rate)\n" in out
    assert "links.cpu0->gpu0: no curve 'chunked': --transfer chunked is refused, and so are the policies prescope\n" in out
    assert main(["profile", "check", "rtx3090-epyc7532"]) == 0
    assert "no curve" not in capsys.readouterr().out


@pytest.mark.parametrize("more", [{"policies": ["daop-code"]}, {"policies": ["lru"], "transfer": "pageable"}])
def test_what_is_said_to_be_refused_is_refused(more: dict[str, Any]):
    setting: dict[str, Any] = {"model": {"base": "qwen3-30b-a3b", "expert_bits": 4}, "trace": "mini-qwen3", "cache": 0.05}
    with pytest.raises(HardwareError, match="expected a curve 'pageable'"):
        moesim.compare(hardware="epyc9355-rtx5090", prompt=4, decode=2, jobs=1, progress=False, **setting, **more)
