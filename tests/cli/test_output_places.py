"""Places that cannot take an output - links, links to nothing, files in the way - are told of before any work is done."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import yaml

from moesim.cli.main import main
from moesim.core.files import FILE
from tests.cli.output_kit import everything
from tests.experiment.experiment_kit import small

COMMANDS = {
    "run": ["run", "small.yaml"],
    "compare": ["compare", "--policies", "lru", "--trace", "small.safetensors", "--prompt", "4", "--decode", "2"],
    "whatif": ["whatif", "small.yaml", "--quick"],
    "regret": ["regret", "small.yaml", "--quick"],
    "recommend": ["recommend", "--model", "mixtral-8x7b", "--hardware", "rtx3090-epyc7532"],
    "identify": ["calibrate", "observed.csv", "--hardware", "rtx3090-epyc7532"],
    "papers": ["papers", "hybrimoe/fig9", "--quick"],
    "validate": ["validate", "small.yaml", "--only-compare"],
    "public": ["validate", "--public"],
    "plot": ["plot", "decode_speed", "result"],
}
FILES = {
    "report": ["report", "result", "--out", "{}.html"],
    "export": ["trace", "export", "./small.safetensors", "--format", "csv", "--out", "{}.csv"],
    "oracle": ["trace", "export", "./small.safetensors", "--format", "oracleGeneral", "--object-size", "1", "--out", "{}"],
    "synthesize": ["trace", "synthesize", "--parameters", "mixtral-8x7b", "--requests", "1", "--out", "{}.safetensors"],
    "calibrate": ["trace", "calibrate", "small.safetensors", "--share", "0.5", "--out", "{}.safetensors"],
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("places")
    (folder / "small.yaml").write_text(yaml.safe_dump(small(folder, plots=["decode_speed"])))
    assert main(["run", str(folder / "small.yaml"), "--out", str(folder / "result"), "--jobs", "1"]) == 0
    return folder


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(made, tmp_path / "here", symlinks=True)
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str], *words: str) -> None:
    """Make sure that a command ends with exit code 2 and one line, and has touched nothing."""
    before = everything(Path())
    capsys.readouterr()
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and all(word in err for word in words), err
    assert everything(Path()) == before


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("place", ["gone", "gone/deep/er"])
def test_a_link_to_nothing_on_the_way(command: str, place: str, here: Path, capsys: pytest.CaptureFixture[str]):
    Path("gone").symlink_to("nowhere")
    refused([*COMMANDS[command], "--out", place], capsys, place, "gone is a link to nowhere, where nothing is")


@pytest.mark.parametrize("command", FILES)
def test_a_file_below_a_link_to_nothing(command: str, here: Path, capsys: pytest.CaptureFixture[str]):
    Path("gone").symlink_to("nowhere")
    arguments = [word.format("gone/x") for word in FILES[command]]
    refused(arguments, capsys, "gone/x", "gone is a link to nowhere, where nothing is")


@pytest.mark.parametrize("command", FILES)
@pytest.mark.parametrize("target", ["nowhere", "small.safetensors"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_link_is_not_replaced(command: str, target: str, overwrite: bool, here: Path, capsys: pytest.CaptureFixture[str]):
    """A trace on another disk is often named by a link."""
    arguments = [word.format("x") for word in FILES[command]]
    Path(arguments[-1]).symlink_to(target)
    if overwrite and command != "report":
        arguments.append("--overwrite")
    refused(arguments, capsys, f"expected nothing there, got a link to {target}; choose another name")


@pytest.mark.parametrize("name", ["dataset", "records", "plots"])
@pytest.mark.parametrize("link", [False, True])
def test_a_folder_of_a_result_that_is_none(name: str, link: bool, here: Path, capsys: pytest.CaptureFixture[str]):
    shutil.rmtree(f"result/{name}", ignore_errors=True)
    if link:
        (here / "elsewhere").mkdir()
        Path(f"result/{name}").symlink_to("../elsewhere")
    else:
        Path(f"result/{name}").write_text("mine")
    got = "a link to ../elsewhere" if link else "a file"
    again = ["run", "small.yaml", "--out", "result", "--set", "workload.seed=5"]
    refused(again, capsys, f"result/{name}: expected a folder or nothing there, got {got}; move it away")


def test_a_picture_of_somebody_else_in_the_way_of_a_figure(here: Path, capsys: pytest.CaptureFixture[str]):
    Path("result/plots/decode_speed.png").unlink()
    Path("result/.moesim-manifest.jsonl").write_text(
        "".join(line + "\n" for line in Path(f"result/{FILE}").read_text().splitlines() if "decode_speed.png" not in line)
    )
    Path("result/plots/decode_speed.png").write_text("mine")
    again = ["run", "small.yaml", "--out", "result", "--set", "workload.seed=5"]
    refused(again, capsys, "result/plots/decode_speed.png: expected nothing there, or what moesim wrote")


@pytest.mark.parametrize("kind", ["text", "link", "pipe"])
@pytest.mark.parametrize("command", ["run", "plot", "export"])
def test_a_list_of_files_that_is_none(kind: str, command: str, here: Path, capsys: pytest.CaptureFixture[str]):
    Path("c").mkdir()
    if kind == "text":
        Path("c", FILE).write_text("thesis\n")
    elif kind == "link":
        Path("c", FILE).symlink_to("nowhere")
    else:
        os.mkfifo(Path("c", FILE))
    arguments = {**COMMANDS, "export": FILES["export"][:-2]}[command]
    place = "c/x.csv" if command == "export" else "c"
    refused([*arguments, "--out", place], capsys, f"c/{FILE}: expected a list of files, got")


def test_what_a_kill_left_of_a_list_is_none_of_somebody_else(here: Path):
    Path("c").mkdir()
    Path("c", FILE).write_text('{"manif')
    assert main([*COMMANDS["run"], "--out", "c"]) == 0


def test_a_part_of_a_result_is_not_overwritten_by_another_command(here: Path, capsys: pytest.CaptureFixture[str]):
    arguments = [*FILES["export"][:-1], "result/summary.json", "--overwrite"]
    refused(arguments, capsys, "expected nothing there, got a file of the result of `moesim run`; choose another name")
    assert main(["report", "result"]) == main(["report", "result"]) == 0
