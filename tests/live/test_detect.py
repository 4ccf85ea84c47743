"""``moesim profile detect``: what a machine says of itself, with and without an answer of the GPU's driver."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from moesim.cli.main import main
from moesim.hardware import load_hardware
from moesim.hardware.problems import find_problems
from moesim.live.profiler import detect as module
from moesim.live.profiler.detect import detect, detected_text
from moesim.studies.whatif.knobs import pcie_of

CPUINFO = "".join(
    f"processor\t: {i}\nmodel name\t: Some CPU @ 3 GHz\nphysical id\t: {i % 2}\ncpu cores\t: 2\n\n" for i in range(8)
)  # two sockets of two cores of two threads


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand for /proc of a machine without a GPU."""
    folder = tmp_path / "proc"
    folder.mkdir()
    (folder / "cpuinfo").write_text(CPUINFO)
    (folder / "meminfo").write_text("MemTotal:       65536000 kB\nMemFree:        1 kB\n")
    monkeypatch.setattr(module, "detect", lambda: detect(folder))
    monkeypatch.setattr("moesim.cli.profile.ask", lambda: detect(folder))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "bin").mkdir()
    monkeypatch.chdir(tmp_path)
    return folder


def answer(tmp_path: Path, text: str, code: int = 0) -> None:
    """Put an nvidia-smi on the path that refuses any question but ours."""
    program = tmp_path / "bin" / "nvidia-smi"
    wanted = "--query-gpu=name,memory.total,pcie.link.gen.max,pcie.link.width.max --format=csv,noheader"
    program.write_text(f"#!/bin/sh\n[ \"$*\" = '{wanted}' ] || exit 3\nprintf '{text}'\nexit {code}\n")
    program.chmod(0o755)


def test_a_machine_with_a_gpu(proc: Path, tmp_path: Path):
    answer(tmp_path, r"NVIDIA GeForce RTX 3090, 24576 MiB, 4, 16\n")
    found = detect(proc)
    assert found.machine == {
        "processor": "Some CPU @ 3 GHz", "cores": "4 cores, 8 threads", "gpu": "NVIDIA GeForce RTX 3090", "link": "PCIe 4.0 x16",
    }  # fmt: skip
    labels = {key: (number["value"], number["source"]) for key, number in found.numbers.items()}
    assert labels == {
        "ram": ("65536000 KiB", "measured"),
        "vram": ("24576 MiB", "measured"),
        "pcie": ("31.508 GB/s", "spec-sheet"),  # 16 lanes of 16 GT/s x 128 / 130 bits / 8
    }
    assert list(found.missing) == ["cpu", "gpu"] and found.remarks == []


@pytest.mark.parametrize(
    ("gen", "width", "rate"), [(1, 16, "4 GB/s"), (2, 8, "4 GB/s"), (3, 16, "15.754 GB/s"), (5, 8, "31.508 GB/s")]
)
def test_rates_of_links(gen: int, width: int, rate: str, proc: Path, tmp_path: Path):
    answer(tmp_path, rf"A GPU, 8192 MiB, {gen}, {width}\n")
    assert detect(proc).numbers["pcie"]["value"] == rate


@pytest.mark.parametrize(
    ("text", "code", "missing", "remark"),
    [
        (None, 0, ["pcie", "cpu", "gpu", "vram"], "there is no nvidia-smi, so that no GPU was asked"),
        ("NVIDIA-SMI has failed", 9, ["pcie", "cpu", "gpu", "vram"], "nvidia-smi did not answer: "),
        ("", 0, ["pcie", "cpu", "gpu", "vram"], "nvidia-smi named no GPU"),
        (r"A GPU, [N/A], [N/A], [N/A]\n", 0, ["pcie", "cpu", "gpu", "vram"], "nvidia-smi does not tell a known link"),
        (
            r"A GPU, 8192 MiB, 9, 16\n",
            0,
            ["pcie", "cpu", "gpu"],
            "nvidia-smi does not tell a known link (generation 9, width 16)",
        ),
        (r"A GPU, 8192 MiB, 4, 8\nB GPU, 8192 MiB, 4, 8\n", 0, ["cpu", "gpu"], "of 2 GPUs the first was taken"),
    ],
)
def test_what_does_not_answer_is_missing_and_said(
    text: str | None, code: int, missing: list[str], remark: str, proc: Path, tmp_path: Path
):
    if text is not None:
        answer(tmp_path, text, code)
    found = detect(proc)
    assert list(found.missing) == missing
    assert found.remarks[0].startswith(remark)
    (tmp_path / "mine.yaml").write_text(detected_text(found, "mine"))
    assert [one.partition(":")[0] for one in find_problems(tmp_path / "mine.yaml", "x")] == [f"numbers.{key}" for key in missing]


def test_a_system_without_proc(proc: Path, tmp_path: Path):
    found = detect(tmp_path / "none")
    assert "ram" in found.missing and "cores" not in found.machine
    assert found.remarks[0].endswith("meminfo does not say how much memory there is")


def fill_in(path: Path, **numbers: Any) -> None:
    lines = path.read_text().splitlines()
    path.write_text(
        "".join(
            f"  {key}: {numbers[key]}\n" if (key := line.strip().partition(":")[0]) in numbers else f"{line}\n" for line in lines
        )
    )


def test_the_file_filled_in_is_a_profile(proc: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    answer(tmp_path, r"NVIDIA GeForce RTX 3090, 24576 MiB, 4, 16\n")
    assert main(["profile", "detect", "--out", "mybox.yaml"]) == 0
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("wrote mybox.yaml\n")
    assert "missing: cpu, the time of an expert on the CPU, such as 1.5ms + 400us/token\n" in said.err
    fill_in(tmp_path / "mybox.yaml", cpu="150us + 40us/token", gpu="90us")
    assert main(["profile", "check", "mybox.yaml"]) == 0
    machine = load_hardware("mybox.yaml")
    assert machine.name == "mybox" and machine.machine["gpu"] == "NVIDIA GeForce RTX 3090"
    assert machine.numbers["links.cpu0->gpu0.any.bytes_per_s"].source == "spec-sheet"
    memory = yaml.safe_load(Path("mybox.yaml").read_text())["numbers"]["vram"]
    assert (memory["source"], memory["method"]) == ("measured", "memory.total of nvidia-smi, as the system told")
    assert machine.numbers["devices.gpu0.experts.0.flat_us"].ref == "typed in"
    assert pcie_of(machine) == (4, 16), "what-if questions about the link can be asked"
    assert main(["profile", "detect", "--out", "mybox.yaml", "--overwrite"]) == 2, "what was filled in stays"
    assert "or that was changed since" in capsys.readouterr().err


def test_without_a_file_it_is_printed(proc: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["profile", "detect"]) == 0
    said = capsys.readouterr()
    raw = yaml.safe_load(said.out)
    assert raw["name"] == "this-machine" and raw["numbers"]["ram"]["value"] == "65536000 KiB"
    assert raw["numbers"]["gpu"] is None
    assert "there is no nvidia-smi, so that no GPU was asked\n" in said.err
    assert not any(tmp_path.glob("*.yaml"))
