"""What commands print fits the terminal, and is whole where it is none."""

from __future__ import annotations

import io
import re
import sys

import pytest

from moesim.cli.listing import Kind
from moesim.cli.main import main
from moesim.core.table import Format, render, wrapped

COMMANDS = [
    *(f"list {kind.value}" for kind in Kind if kind is not Kind.traces), "list policies --long", "list policies dali",
    "list policy-parts lru", "list schedulers vllm", "model qwen3-30b-a3b", "plot --list", "whatif --knobs",
    "profile show rtx3090-epyc7532", "profile check rtx3090-epyc7532", "profile compare rtx3090-epyc7532 zen4-2core",
    "compare --policies lru,dali --decode 2 --batch 1,8 --notes", "trace catalogue", "trace catalogue gpt-oss-20b",
]  # fmt: skip


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _plain(text: str) -> list[str]:
    return re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()


@pytest.mark.parametrize("columns", [80, pytest.param(100, marks=pytest.mark.long)])
@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_printed_fits_the_terminal(command: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "stdout", terminal := _Terminal())
    assert main(command.split()) == 0
    assert terminal.getvalue()
    assert [line for line in _plain(terminal.getvalue()) if len(line) > columns] == []


HEAD = ["name", "long-compound-name", "a number", "text", "more", "rest"]
ROWS = [["x" * 20, "one-two-three-four-five-six-seven", "12345678", "some words in a row " * 5, "y" * 18, "z" * 30]]


def test_a_table_that_cannot_fit_leaves_out_its_last_columns_and_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stdout", _Terminal())
    lines = _plain(render(HEAD, ROWS, Format.TABLE, ["a number"]))
    assert max(map(len, lines)) <= 80
    assert "not shown: rest; a wider terminal or a pipe shows them" in lines
    assert "three-" in " ".join(lines), "a compound name is broken behind a sign"
    assert "z" * 30 in render(HEAD, ROWS, Format.TABLE, whole=True)


def test_off_a_terminal_nothing_is_wrapped_or_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    (head, row) = render(HEAD, ROWS, Format.TABLE, ["a number"]).splitlines()
    assert head.endswith("rest") and row.endswith("z" * 30)
    assert wrapped("word " * 40) == "word " * 40
    monkeypatch.setattr(sys, "stdout", _Terminal())
    assert max(map(len, wrapped("word " * 40).splitlines())) <= 80
    assert wrapped(f"  moesim run {'x ' * 60}").count("\n") == 0, "a command that is copied stays a line"
