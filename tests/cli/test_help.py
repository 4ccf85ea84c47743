"""``--help`` of every command shows an example, and the example works."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer

from moesim.cli.main import _app, main
from tests.docs.readme_kit import HAS_TRACE, ROOT, commands, make_recordings, make_routes, shortened, told_apart, usable_cores
from tests.experiment.experiment_kit import write_yaml

EXAMPLE = re.compile(r"^ *Example: (moesim .+?)\s*$", re.MULTILINE)
MEASURES = ("replay", "profile measure")  # need PyTorch, and two cores for two devices


def _walk(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    for name, inside in getattr(command, "commands", {}).items():
        yield " ".join((*path, name)), inside
        yield from _walk(inside, (*path, name))


ALL = dict(_walk(typer.main.get_command(_app)))
OF_THE_README = [told_apart(command) for command in commands()]
COMMANDS = {name: command for name, command in ALL.items() if not hasattr(command, "commands")}


def example(name: str) -> str:
    found = EXAMPLE.findall(COMMANDS[name].help.split("\f")[0] if COMMANDS[name].help else "")
    assert len(found) == 1, f"moesim {name}: expected one line 'Example: moesim {name} ...' in its help"
    return str(found[0])


def words_of(name: str) -> list[str]:
    return shlex.split(example(name))[1:]


@pytest.mark.parametrize("name", ["", *ALL])
def test_help_fits_a_screen(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*name.split(), "--help"]) == 0
    captured = capsys.readouterr()
    assert captured.err == "" and "Usage: " in captured.out
    if name in COMMANDS:
        assert example(name) in captured.out, "the line must not be broken or cut"
    lines = captured.out.splitlines()
    assert sum(-(-len(line) // 80) or 1 for line in lines) <= 50, "lines of a screen"
    assert not [line for line in lines if len(line) > 80 and not EXAMPLE.fullmatch(line)]
    assert not [line for line in lines[1:] if line.endswith("...")], "a summary is cut: shorten its first sentence"


@pytest.mark.parametrize("name", COMMANDS)
def test_the_example_is_of_its_command(name: str):
    assert words_of(name)[: len(name.split())] == name.split()


LONG = ("papers", "validate", "explore")  # another test runs them, with --out, or with a browser
SLOW = ("capacity", "league", "plot", "recommend", "trace fit", "trace stats")  # their commands have tests of their own


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] if name in SLOW else [])
        for name in COMMANDS
        if told_apart(words_of(name)) not in OF_THE_README and name not in LONG
    ],
)
def test_the_example_works(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Those of the README run in its own test."""
    words = words_of(name)
    if not HAS_TRACE:
        pytest.skip("the shipped traces are not here")
    if name in MEASURES:
        pytest.importorskip("torch", reason="measuring and replaying need torch: the extra profile")
        if len(usable_cores()) < 2:
            pytest.skip("two devices need two cores")
    monkeypatch.chdir(tmp_path)
    prepare(name, words, tmp_path)
    code = main(shortened(words))
    captured = capsys.readouterr()
    assert code == 0, captured.err
    assert captured.out or captured.err or any(tmp_path.iterdir()), "it did something"


def prepare(name: str, words: list[str], folder: Path) -> None:
    """Make what an example takes for granted: files of the checkout, a recording, a model, a result."""
    if name in ("trace record", "trace learn"):
        make_recordings(folder, record=name == "trace learn")
    if name in ("trace import", "trace calibrate"):
        make_routes(folder, imported=name == "trace calibrate")
    for before, word in pairwise(["", *words]):
        if word.startswith(("experiments/", "hardware_profiles/")):
            (folder / word).parent.mkdir(parents=True, exist_ok=True)
            (folder / word).symlink_to(ROOT / word)
        elif word.startswith("results/") and before != "--out":
            make_result(folder, folder / word.partition(":")[0])


def make_result(folder: Path, out: Path) -> None:
    """Make a small result with all that can be shown of one."""
    if not out.exists():
        write_yaml(folder, frames=True, policies=["on-demand", "lru", "fiddler"], cache={"ratio": [0.25, 0.5]})
        assert main(["run", str(folder / "small.yaml"), "--out", str(out)]) == 0


def test_the_command_line_starts_without_what_is_optional():
    """PyTorch and the like come with extras; here an import of them fails as if they were not installed."""
    optional = ("torch", "transformers", "accelerate", "tokenizers", "distributed", "dask", "gguf")
    hidden = "".join(f"sys.modules[{name!r}] = None; " for name in optional)
    for argv in (["profile", "show", "zen4-2core"], ["list", "models"]):
        code = f"import sys; {hidden}from moesim.cli.main import main; sys.exit(main({argv}))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
