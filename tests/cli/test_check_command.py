"""``moesim check``: what it prints, and its exit codes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from moesim.cli.main import main

AUTHORS = """
from moesim.policies.systems.on_demand import OnDemand


class Mine(OnDemand):
    def __init__(self, staging_slots=None, hold: bool = True):
        self.staging_slots, self.hold = staging_slots, hold


class Broken(OnDemand):
    def decide(self, event, view):
        return 1 / 0


class Colourful(OnDemand):
    def decide(self, event, view):
        raise ValueError("x\\x1b[31mred")


class Half:
    listens = needs = frozenset()
"""


@pytest.fixture(autouse=True)
def author(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "an_authors_module.py").write_text(AUTHORS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "an_authors_module", raising=False)


def test_what_is_checked_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "an_authors_module:Mine"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].startswith("Mine() on tiny: 4 layers of 8 experts")
    assert sum(line.startswith("passed ") for line in lines) == 6
    assert "passed   its constructor stores its options unchanged: staging_slots, hold" in lines
    assert err == ""


def test_what_a_policy_says_holds_nothing_that_a_terminal_obeys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "an_authors_module:Colourful"]) == 1
    out, err = capsys.readouterr()
    assert all(line.isprintable() for line in (out + err).splitlines())
    assert r"x\x1b[31mred" in out


def test_a_terminal_shows_what_is_being_checked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    told: list[str] = []

    @contextmanager
    def telling() -> Iterator[Callable[[str], None]]:
        yield told.append

    monkeypatch.setattr("moesim.cli.check.telling", telling)
    assert main(["check", "an_authors_module:Mine"]) == 0
    assert told[:2] == ["checking Mine()", "checking 1 cache slot, 0 a layer: batch 1"]
    assert told[-2:] == ["checking 32 cache slots, 8 a layer: batch 4, top-1", "comparing Mine() with its rule"]
    assert len(told) == 1 + 4 * 5 + 1


def test_a_policy_that_fails_is_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "an_authors_module:Broken,all-cpu"]) == 1
    out, err = capsys.readouterr()
    assert "failed   1, 4, 12 and 32 cache slots: batch 1: ZeroDivisionError: division by zero (an_authors_module.py:12)" in out
    assert "AllCpu() on tiny" in out, "the others are checked"
    assert err == "moesim: Broken() fails 1 of 3 checks; the first: 1, 4, 12 and 32 cache slots\n"


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        ("", "check: POLICIES: expected at least one policy, got none; moesim list policies has the names"),
        ("lro", "check: POLICIES[0]: unknown policy 'lro'; did you mean 'lru'?"),
        ("lru,5", "check: POLICIES[1]: expected the name of a policy, or a mapping with the key name, got 5"),
        ("{name: lru, scope: 3}", "check: POLICIES[0]: policy lru: option scope: expected 'per-layer' or 'global', got 3"),
        ("an_authors_module:Nobody", "expected a class 'Nobody' in module 'an_authors_module', got none"),
        ("an_authors_module:Half", "expected a class with place, decide and evict (see moesim.policy.Policy)"),
        ("{name: lru", "check: POLICIES: "),
    ],
)
def test_bad_input_is_exit_code_2(policies: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", policies]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert len(err.splitlines()) == 1
