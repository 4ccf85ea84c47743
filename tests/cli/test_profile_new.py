"""``moesim profile new``: from a few numbers to runs of policies."""

from __future__ import annotations

import io
import json
import shlex
from pathlib import Path

import pytest

import moesim
from moesim.cli.main import main
from moesim.hardware import load_hardware

NUMBERS = {"--pcie": "25GB/s", "--cpu": "150us + 40us/token", "--gpu": "60us", "--vram": "12GiB", "--ram": "64GiB"}


def words(**changed: str | None) -> list[str]:
    options = NUMBERS | {f"--{key.replace('_', '-')}": value for key, value in changed.items()}
    return [
        "profile", "new", "mybox", *(word for name, value in options.items() if value is not None for word in (name, value))
    ]  # fmt: skip


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_profile_of_a_dozen_lines_is_found_by_its_name(capsys: pytest.CaptureFixture[str]):
    assert main(words()) == 0
    said = capsys.readouterr().err
    assert "times are of an expert of mixtral-8x7b at 4 bits (88080384 bytes); --for names another\n" in said
    assert "attention reads at 1468 GB/s, as an expert in 60us; --gpu-memory" in said
    assert said.endswith("wrote hardware_profiles/mybox.yaml\n")
    text = Path("hardware_profiles/mybox.yaml").read_text()
    assert len(text.splitlines()) <= 12 and text.count("source:") == 2, "one source for the whole file"
    assert "for: {base: mixtral-8x7b, expert_bits: 4}\n" in text, "a default that decides is written out"
    keys = {"pcie": "25GB/s", "cpu": "150us + 40us/token", "gpu": "60us", "vram": "12GiB", "ram": "64GiB"}
    assert load_hardware("mybox").figures() == moesim.Hardware.from_numbers(**keys, name="mybox").figures()


def test_the_policies_run_on_it(capsys: pytest.CaptureFixture[str]):
    assert main(words(vram="24GiB")) == 0
    capsys.readouterr()
    policies = ["lru", "dali", "fiddler", "hybrimoe-paper"]
    arguments = ["--hardware", "hardware_profiles/mybox.yaml", "--trace", "mini-mixtral", "--cache", "0.25"]
    arguments += ["--prompt", "8", "--decode", "4", "-o", "json", "--jobs", "1"]
    assert main(["compare", "--policies", ",".join(policies), *arguments]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["policy"] for row in rows] == policies
    assert {row["error"] for row in rows} == {None} and {row["source_label"] for row in rows} == {"assumed"}
    assert len({row["decode_tokens_per_s"] for row in rows}) == len(policies)


def test_numbers_as_papers_print_them(capsys: pytest.CaptureFixture[str]):
    changed = words(pcie=None, transfer="14.2ms", cpu="40us/token", gpu_memory="4TB/s")
    assert main([*changed, "--for", "{base: mixtral-8x7b, expert_bits: 8}"]) == 0
    found = load_hardware("mybox")
    assert found.devices["gpu0"].memory_bytes_per_s == 4 * 10**12
    assert found.link("cpu0->gpu0").curves["pinned"].bytes_per_s == -(-176_160_768 * 10**6 // 14200)
    assert "attention reads" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"pcie": "25"}, "--pcie: expected a rate such as 25GB/s, got '25'; write a number and GB/s, GiB/s or MB/s"),
        ({"gpu_memory": "1GB/s"}, "--gpu-memory: expected a rate at which an expert of mixtral-8x7b"),
        ({"pcie": None}, "--pcie: expected the rate of a copy to the GPU, such as 25GB/s, or transfer, the time of an"),
        (
            {"cpu": None, "ram": None},
            "--cpu: expected the time of an expert on the CPU, such as 1.5ms + 400us/token, got nothing",
        ),
        ({"cpu": None, "ram": None}, " | --ram: expected the memory of the host, such as 64GiB, got nothing; add it\n"),
        ({"transfer": "1ms"}, "profile new: numbers: expected pcie or transfer, got both; leave one out"),
        ({"source": "published"}, "profile new: --source published: expected --ref with what the numbers are from, got nothing"),
        ({"for": "mixtral"}, "--for: unknown model 'mixtral'; it could be mixtral-8x7b, mixtral-8x22b"),
        ({"for": "{base: mixtral-8x7b"}, "--for: expected valid YAML, got an error in line 1"),
    ],
)
def test_what_is_wrong_is_named_by_its_option_and_nothing_is_written(
    changed: dict[str, str | None], said: str, here: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(words(**changed)) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert not any(here.iterdir())


def test_a_file_that_moesim_did_not_write_stays(capsys: pytest.CaptureFixture[str]):
    Path("mine.yaml").write_text("name: mine\n")
    for more in ([], ["--overwrite"]):
        assert main([*words(), "--out", "mine.yaml", *more]) == 2
        assert "--out mine.yaml: expected nothing there" in capsys.readouterr().err
    assert Path("mine.yaml").read_text() == "name: mine\n"
    assert main([*words(), "--out", "own.yaml"]) == 0
    assert main([*words(gpu="70us"), "--out", "own.yaml"]) == 2
    assert main([*words(gpu="70us"), "--out", "own.yaml", "--overwrite"]) == 0
    assert "gpu: 70us" in Path("own.yaml").read_text()


def test_the_commands_of_the_guide_run(capsys: pytest.CaptureFixture[str]):
    page = (Path(__file__).resolve().parents[2] / "docs" / "guide" / "profiling.md").read_text(encoding="utf-8")
    block = page.partition("## From a few numbers")[2].partition("```sh\n")[2].partition("```")[0].replace("\\\n", "")
    commands = [shlex.split(line, comments=True)[1:] for line in block.splitlines()]
    assert [command[:2] for command in commands] == [
        ["profile", "new"],
        ["profile", "check"],
        ["compare", "--hardware"],
    ]
    for command in commands:
        assert main([*command, "--decode", "2", "--jobs", "1"] if command[0] == "compare" else command) == 0
    assert "fiddler" in capsys.readouterr().out


PASTE = """\
$ nvidia-smi -L
GPU 0: NVIDIA GeForce RTX 3090 (UUID: GPU-1)
$ lscpu
Model name:   AMD Ryzen 9 7950X 16-Core Processor
Running host_to_device_memcpy_ce.
memcpy CE CPU(row) -> GPU(column) bandwidth (GB/s)
           0
 0     25.50
ALL Reads        :      58000.5
"""


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le"])
def test_from_what_is_pasted(encoding: str, capsys: pytest.CaptureFixture[str]):
    Path("pasted.txt").write_bytes(PASTE.replace("\n", "\r\n").encode(encoding))
    assert main(["profile", "new", "mybox", "--from", "pasted.txt", "--ram", "2x32 ddr5-5200"]) == 0
    said = capsys.readouterr().err
    for words in (
        "cpu: AMD Ryzen 9 7950X (line 4: Model name: AMD Ryzen 9 7950X 16-Core Processor)\n",
        "links.cpu0->gpu0.pinned.bytes_per_s: 25.5 GB/s, measured (line 8: 0 25.50)\n",
        "read Intel MLC: written after public outputs of versions 3.5 to 3.11\n",
        "missing: pcie: generation and lanes",
    ):
        assert words in said
    assert "missing: ram" not in said, "options win"
    found = load_hardware("mybox")
    read = found.numbers["devices.cpu0.memory_bytes_per_s"]
    assert (read.value, read.source) == (58000500000, "measured")
    assert found.numbers["links.cpu0->gpu0.pinned.bytes_per_s"].value == 25500000000
    assert found.machine["memory"] == "2 x DDR5-5200"
    assert "  gpu: GeForce RTX 3090  # line 2: GPU 0: NVIDIA GeForce RTX 3090" in Path("hardware_profiles/mybox.yaml").read_text()


def test_the_commands_of_the_guide_on_pasting_run():
    page = (Path(__file__).resolve().parents[2] / "docs" / "guide" / "profiling.md").read_text(encoding="utf-8")
    block = page.partition("## From what you can paste")[2].partition("```sh\n")[2].partition("```")[0]
    commands = [shlex.split(line, comments=True)[1:] for line in block.splitlines() if line.startswith("moesim ")]
    Path("pasted.txt").write_text(PASTE.replace("Ryzen 9 7950X", "Ryzen 9 5950X"))
    assert [command[1] for command in commands] == ["new", "new", "detect"]
    for command in commands:
        assert main([*command, "--overwrite"]) == 0


def test_from_standard_input(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(PASTE.encode())))
    assert main(["profile", "new", "mybox", "--from", "-", "--gpu", "rtx 4090"]) == 0
    assert load_hardware("mybox").machine["gpu"] == "GeForce RTX 4090"


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("hello", [], "p.txt: expected outputs of nvidia-smi, "),
        (None, [], "--from p.txt: expected outputs as text, got: No such file or directory; check the path"),
        (
            PASTE,
            ["--vram", "12GiB"],
            "expected parts or a paper's numbers, got --from p.txt and --vram 12GiB; leave one kind out",
        ),
        ("MemTotal: 65536000 kB\n", [], "parts: expected a gpu or a cpu, got "),
    ],
)
def test_a_paste_without_a_machine_writes_nothing(
    text: str | None, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    if text is not None:
        Path("p.txt").write_text(text)
    assert main(["profile", "new", "mybox", "--from", "p.txt", *options]) == 2
    assert message in capsys.readouterr().err
    assert not Path("hardware_profiles").exists()
