"""Progress where no terminal is: lines, with what is done and how long the rest takes."""

from __future__ import annotations

import sys

import pytest

from moesim.core import progress
from moesim.core.progress import Progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_line_comes_every_ten_seconds(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(40) as bar:
        bar.describe("3/60 runs: lru")
        for _ in range(20):
            clock[0] += 1.5
            bar.advance(1)
    lines = capsys.readouterr().err.splitlines()
    # after 10.5 and 21 s: 7 and 14 of 40 steps
    assert lines == ["3/60 runs: lru: 17 % done, about 50 s left", "3/60 runs: lru: 35 % done, about 39 s left"]


def test_the_last_second(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(1000) as bar:
        clock[0] += 20
        bar.advance(999)
    assert capsys.readouterr().err == "99 % done, less than 1 s left\n"


def test_quick_things_say_nothing(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(40) as bar:
        bar.describe("drawing")
        clock[0] += 9
        bar.advance(40)
    with Progress(40, enabled=False, lines=True) as bar:
        bar.describe("drawing")
        clock[0] += 99
        bar.advance(1)
    assert capsys.readouterr().err == ""


def test_each_thing_is_told_where_that_is_asked_for(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(2, lines=True) as bar:
        bar.describe("placements")
    assert capsys.readouterr().err == "placements: 0 % done\n"


def test_a_notebook_gets_a_bar(monkeypatch: pytest.MonkeyPatch, clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr(progress, "find_spec", lambda name: name == "ipywidgets" or None)
    drawn: list[int] = []
    monkeypatch.setattr(Progress, "_draw", lambda self: drawn.append(self.done))
    with Progress(4) as bar:
        clock[0] += 3
        bar.advance(1)
    assert drawn == [1]
    assert capsys.readouterr().err == ""
