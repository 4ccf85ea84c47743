"""Where commands write to is checked before they work: one line, exit code 2, and nothing is made, replaced or left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from moesim.api.outputs import check_out, check_out_folder
from moesim.cli.main import main
from moesim.core import files
from moesim.errors import ConfigError, InputError
from moesim.testing.traces import synthetic_trace
from tests.trace.import_kit import SOURCES


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "there.safetensors").write_text("precious")
    (tmp_path / "there.yaml").write_text("precious")
    (tmp_path / "notes").write_text("precious")
    (tmp_path / "prompts.txt").write_text("w1 w2\n")
    (tmp_path / "folder.safetensors").mkdir()
    synthetic_trace(n_layers=2, n_requests=2, prompt=2, decode=4).write(tmp_path / "t.safetensors")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in sorted(folder.rglob("*"))}


def refused(arguments: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    before = content(folder)
    assert main(arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert content(folder) == before
    return lines[0]


LONG = "n" * 250 + ".safetensors"
COMMANDS = {
    "learn": ["learn", "nothing", "--for", "nothing"],
    "synthesize": ["synthesize", "--parameters", "nothing"],
    "import": ["import", "nothing.npz"],
    "record": ["record", "organisation/nothing", "--prompts", "nothing.txt"],
    "export": ["export", "nothing", "--format", "parquet"],
    "fit": ["fit", "--targets", "nothing"],
}  # their inputs are not there either: what is said about --out comes before those are looked at


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("out", "words"),
    [
        ("folder.safetensors", "expected a file to write, got a folder; add a name such as folder.safetensors/NAME"),
        ("there.safetensors", "expected nothing there, got a file; add --overwrite or choose another name"),
        ("notes/sub/x.safetensors", "expected a file that can be written, got: "),
        ("/proc/moesim/x.safetensors", "expected a file that can be written, got: "),
        (LONG, "expected a file that can be written, got: File name too long"),
        ("x.bin", "expected a name that ends in .safetensors, got 'x.bin'; rename it"),
    ],
)
def test_a_bad_out_is_refused_first(command: str, out: str, words: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if command == "fit":
        out = out if out.startswith("folder") else out.replace(".safetensors", ".yaml")
        words = words.replace(".safetensors, got", ".yaml, got")
    if command == "export" and out == "x.bin":
        words = "unknown trace 'nothing'"  # any name will do
    line = refused(["trace", *COMMANDS[command], "--out", out], folder, capsys)
    assert words in line
    if "unknown" not in words:
        assert line.startswith(f"moesim: --out {out}: ")


def test_what_is_there_is_replaced_when_asked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = str(SOURCES["csv"].make(folder))
    made = ["trace", "synthesize", "--parameters", "mixtral-8x7b", "--requests", "1", "--prompt", "1", "--decode", "1"]
    for command in ([*made], ["trace", "import", source], ["trace", "export", "./t.safetensors", "--format", "parquet"]):
        out = ["--out", "there.safetensors"]
        assert "add --overwrite" in refused([*command, *out], folder, capsys)
        assert "a file that it did not write" in refused([*command, *out, "--overwrite"], folder, capsys)
        new = ["--out", "new.safetensors"]
        assert main([*command, *new]) == 0
        capsys.readouterr()
        assert "add --overwrite" in refused([*command, *new], folder, capsys)
        assert main([*command, *new, "--overwrite"]) == 0
        with (folder / "new.safetensors").open("ab") as file:
            file.write(b"mine")
        capsys.readouterr()
        assert "or that was changed since" in refused([*command, *new, "--overwrite"], folder, capsys)
        (folder / "new.safetensors").unlink()


def test_files_beside_are_not_replaced_unasked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "a.csv.json").write_text("precious")
    line = refused(["trace", "export", "t.safetensors", "--format", "csv", "--out", "a.csv"], folder, capsys)
    assert "--out a.csv.json: expected nothing there" in line
    (folder / "a.model.yaml").write_text("precious")
    line = refused(["trace", "import", "x.npz", "--model", "qwen3-30b-a3b", "--out", "a.safetensors"], folder, capsys)
    assert "--out a.model.yaml: expected nothing there" in line


@pytest.mark.parametrize(
    ("plot", "words"),
    [
        ("notes", "--plot notes: expected a folder, got a file; choose another name"),
        ("notes/sub", "--plot notes/sub: expected a folder that can be written, got: "),
        ("/proc/moesim", "--plot /proc/moesim: expected a folder that can be written, got: "),
    ],
)
def test_a_bad_folder_for_figures_is_refused_first(
    plot: str, words: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refused(["trace", "stats", "nothing", "--plot", plot], folder, capsys)


def test_a_good_place_is_left_as_it_was(folder: Path) -> None:
    before = content(folder)
    check_out(Path("new/deep/x.yaml"), suffix=".yaml")
    check_out(Path("t.safetensors"), suffix=".safetensors", overwrite=True)
    check_out_folder(Path("new/figures"), option="--plot")
    check_out_folder(Path(), option="--plot")
    assert content(folder) == before
    with pytest.raises(ConfigError, match=r"--predictor there\.yaml: expected nothing there"):
        check_out(Path("there.yaml"), option="--predictor")


@pytest.mark.parametrize("path", ["folder.safetensors", "notes/x", "/proc/moesim/x", LONG, f"new/{LONG}"])
def test_no_path_gives_a_traceback(path: str, folder: Path) -> None:
    with pytest.raises(InputError, match="expected a file that can be written, got: ") as error:
        files.write_bytes(path, b"x")
    assert "\n" not in str(error.value)


def test_a_file_that_is_no_trace_is_called_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(["trace", "stats", "prompts.txt"], folder, capsys)
    assert "prompts.txt: expected a trace, whose name ends in .safetensors, got another file" in line
    assert "./folder.safetensors: expected a trace file, got a folder" in refused(
        ["trace", "stats", "./folder.safetensors"], folder, capsys
    )
