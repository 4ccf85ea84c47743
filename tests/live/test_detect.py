"""``moesim profile detect``: what a machine says of itself, with and without answers of its tools."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from moesim.cli.main import main
from moesim.hardware import load_hardware
from moesim.live.profiler.detect import COMMANDS, detect
from moesim.studies.whatif.knobs import pcie_of

GPU = r"name, memory.total [MiB], pcie.link.gen.max, pcie.link.width.max, pcie.link.width.current\n"
GPU += r"NVIDIA GeForce RTX 3090, 24576 MiB, 4, 16, 16\n"
LSCPU = r"Model name:   AMD Ryzen 9 7950X 16-Core Processor\nSocket(s):  1\n"
DMI = "".join(
    r"Memory Device\n\tData Width: 64 bits\n\tSize: 32 GB\n\tType: DDR5\n\tConfigured Memory Speed: 5200 MT/s\n\n"
    for _ in range(2)
)


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand for /proc of a machine without tools."""
    folder = tmp_path / "proc"
    folder.mkdir()
    (folder / "meminfo").write_text("MemTotal:       65536000 kB\nMemFree:        1 kB\n")
    monkeypatch.setattr("moesim.profile.ask", lambda: detect(folder))
    monkeypatch.setattr("platform.platform", lambda: "Linux-6.1-x86_64")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "bin").mkdir()
    monkeypatch.chdir(tmp_path)
    return folder


def answer(tmp_path: Path, name: str, text: str, code: int = 0) -> None:
    """Put a tool on the path that refuses any question but ours."""
    program = tmp_path / "bin" / name
    wanted = " ".join(next(command for command in COMMANDS if command[0] == name)[1:])
    program.write_text(f"#!/bin/sh\n[ \"$*\" = '{wanted}' ] || exit 3\nprintf '{text}'\nexit {code}\n")
    program.chmod(0o755)


def test_a_machine_that_answers_is_a_profile(proc: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for name, text in (("nvidia-smi", GPU), ("lscpu", LSCPU), ("dmidecode", DMI)):
        answer(tmp_path, name, text)
    assert main(["profile", "detect", "--out", "mybox.yaml"]) == 0
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("wrote mybox.yaml\n")
    assert "read nvidia-smi --query-gpu: written after " in said.err
    raw = yaml.safe_load(Path("mybox.yaml").read_text())
    assert raw["parts"] == {
        "gpu": "GeForce RTX 3090", "cpu": "AMD Ryzen 9 7950X", "ram": "2x32 ddr5-5200", "pcie": "4x16", "os": "linux",
    }  # fmt: skip
    machine = load_hardware("mybox.yaml")
    assert machine.name == "mybox" and machine.machine["memory"] == "2 x DDR5-5200"
    assert pcie_of(machine) == (4, 16), "what-if questions about the link can be asked"
    assert main(["profile", "check", "mybox.yaml"]) == 0
    Path("mybox.yaml").write_text(Path("mybox.yaml").read_text() + "# filled in\n")
    assert main(["profile", "detect", "--out", "mybox.yaml", "--overwrite"]) == 2, "what was filled in stays"


@pytest.mark.parametrize(
    ("text", "code", "remark"),
    [
        (None, 0, "there is no nvidia-smi or rocm-smi, so that no GPU was asked"),
        ("NVIDIA-SMI has failed", 9, "nvidia-smi did not answer: "),
    ],
)
def test_what_does_not_answer_is_said(text: str | None, code: int, remark: str, proc: Path, tmp_path: Path):
    if text is not None:
        answer(tmp_path, "nvidia-smi", text, code)
    found = detect(proc)
    assert found.remarks[0].startswith(remark)
    assert found.pasted.form["parts"] == {"ram": "64GB", "os": "linux"}
    assert [said.partition(":")[0] for said in found.pasted.missing[:3]] == ["gpu", "cpu", "ram"]


def test_a_system_without_any_answer(proc: Path, tmp_path: Path):
    found = detect(tmp_path / "none")
    assert found.pasted.form["parts"] == {} and "nothing answered" in found.pasted.missing[0]


def test_without_a_file_it_is_printed_with_what_is_to_be_filled_in(
    proc: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    answer(tmp_path, "lscpu", LSCPU.replace("Ryzen 9 7950X", "Ryzen 9 1234"))
    assert main(["profile", "detect"]) == 0
    said = capsys.readouterr()
    assert yaml.safe_load(said.out) == {"name": "this-machine", "parts": {"ram": "64GB", "os": "linux"}}
    assert "  # cpu:  # AMD Ryzen 9 1234 16-Core Processor is not in the catalogue; --cpu names one" in said.out
    assert not any(tmp_path.glob("*.yaml"))
    Path("mine.yaml").write_text(said.out.replace("# cpu:", "cpu: 60GB/s"))
    assert load_hardware("mine.yaml").devices["cpu0"].memory_bytes_per_s == 60e9
