"""Text from files: no escape sequence reaches a terminal, no formula a spreadsheet, no mathematics a figure."""

from __future__ import annotations

import csv
import io
import subprocess
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from moesim.cli.main import main
from moesim.core.table import Format, frame_csv, render, render_records
from moesim.core.text import cell, shown, steering, uncell
from moesim.plots.style import new_figure, save, styled, title
from moesim.studies.advice.engines import Command
from tests.experiment.experiment_kit import small
from tests.experiment.pool_kit import ROOT
from tests.hardware.nonsense_kit import good

RED = "\x1b[31mred"
EVIL = [RED, "a\x07b", "a\x9b31m", "a\x7f", "abc\u202edef", "a\u2066b"]
FORMULAS = ["=cmd|' /C calc'!A0", "+1+cmd|x", "-1+1", "@SUM(A1)", "\t=1", "  =1", "-cmd"]


@pytest.mark.parametrize("text", EVIL)
def test_what_steers_is_found_and_written_as_an_escape(text: str):
    assert steering(text) is not None
    assert shown(text).isprintable() and "\\" in shown(text)
    assert steering("Größe 模型 a\tb\nc") is None
    assert shown("Größe 模型") == "Größe 模型"


@pytest.mark.parametrize("text", EVIL)
@pytest.mark.parametrize("place", ["name", "description", "policies", "hardware"])
def test_no_yaml_brings_it_to_the_terminal(text: str, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    raw = small(tmp_path)
    if place == "hardware":
        (tmp_path / "mine.yaml").write_text(yaml.safe_dump(good() | {"name": text}))
        raw["hardware"] = str(tmp_path / "mine.yaml")
    else:
        raw[place] = [text] if place == "policies" else text
    (tmp_path / "evil.yaml").write_text(yaml.safe_dump(raw))
    assert main(["run", str(tmp_path / "evil.yaml"), "--out", str(tmp_path / "out")]) == 2
    found = capsys.readouterr()
    assert not found.out and found.err.count("\n") == 1
    assert "expected text that can be shown, got the control character" in found.err
    assert found.err.rstrip("\n").isprintable()


def test_tables_and_messages_show_it_as_an_escape(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for form in (Format.TABLE, Format.MD):
        told = render(["policy", RED], [[RED, "1\n2"]], form, right=[RED])
        assert "\x1b" not in told and told.count("\\x1b[31mred") == 2 and "1\\n2" in told
    assert main(["run", str(tmp_path / RED)]) == 2
    assert "\x1b" not in capsys.readouterr().err


@pytest.mark.parametrize("text", FORMULAS)
def test_no_table_holds_a_formula(text: str):
    assert cell(text) == f"'{text}" and uncell(cell(text)) == text
    frame = pd.DataFrame({text: [text, "lru"], "n": [-1.5, 2.0]})
    for written in (
        render([text], [[text]], Format.CSV), render_records([{text: text}], Format.CSV), frame_csv(frame).decode()
    ):  # fmt: skip
        rows = list(csv.reader(io.StringIO(written)))
        assert rows[0][0] == rows[1][0] == f"'{text}"
    assert pd.read_csv(io.BytesIO(frame_csv(frame)))["n"].tolist() == [-1.5, 2.0]


@pytest.mark.parametrize("name", ["a$b$c", "$\\frac{$", "$x"])
def test_a_name_with_dollar_signs_is_drawn_as_it_is(name: str, tmp_path: Path):
    @styled
    def draw() -> Any:
        figure, axes = new_figure(3, 2)
        title(axes, name)
        axes.set_xlabel(name)
        return figure

    assert all(path.stat().st_size for path in save(draw(), tmp_path / "figure"))


def test_a_command_to_type_is_quoted_for_a_shell():
    words = ("run", "-m", "it's; rm -rf $HOME `x`.gguf", "exps=CPU", "blk.(1|2)")
    line = f"printf '%s\\n' {Command('e', 'v', words)}"
    told = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True).stdout.splitlines()
    assert tuple(told) == words


def test_one_function_speaks_on_stderr():
    """So that no message holds what a terminal obeys. A counter that returns to the beginning of its line is made of numbers."""
    said = [
        f"{path.name}: {line.strip()}"
        for path in sorted((ROOT / "moesim").rglob("*.py"))
        for line in path.read_text().splitlines()
        if "file=sys.stderr" in line and 'f"\\r{tries}' not in line
    ]
    assert said == ["text.py: print(shown(line), file=sys.stderr)"]
