"""Commands that are not there, completion, and the demonstration."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moesim.api.run import comparison
from moesim.cli import demo, main, runs
from moesim.errors import ConfigError


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["foo"], "moesim: unknown command 'foo'; known: bench, calibrate, "),
        (["profil"], "moesim: unknown command 'profil'; did you mean 'profile'? known: bench"),
        (["profile", "foo"], "moesim: profile: unknown command 'foo'; known: check, compare, "),
        (["trace", "recrd"], "moesim: trace: unknown command 'recrd'; did you mean 'record'? known: "),
    ],
)
def test_an_unknown_command_lists_those_that_are_known(typed: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(typed) == 2
    assert capsys.readouterr().err.startswith(said)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        pytest.param("moesim re", {"recommend", "report", "replay", "regret"}, marks=pytest.mark.long),
        pytest.param("moesim compare --ba", {"--batch"}, marks=pytest.mark.long),
        ("moesim trace sp", {"split"}),
    ],
)
def test_a_shell_completes_commands_and_options(words: str, found: set[str]) -> None:
    asked = {"_MOESIM_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = subprocess.run([sys.executable, "-c", "from moesim.cli.main import app; app()"], env=os.environ | asked,
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert set(done.stdout.split()) == found


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_what_a_shell_needs_is_printed_and_nothing_is_written(
    shell: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main.main(["--completion", shell]) == 0
    assert "_MOESIM_COMPLETE" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_the_demonstration_shows_every_policy_and_writes_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main.main(["demo"]) == 0
    lines = capsys.readouterr().out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("policy"))
    rows = [line.split() for line in lines[start + 1 : start + 1 + len(demo.POLICIES)]]
    assert {row[0] for row in rows} == set(demo.POLICIES)
    speeds = [float(row[1]) for row in rows]
    assert speeds == sorted(speeds, reverse=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("text", "key"), [("tok/s", "SPEED"), ("speed", "SPEED"), ("ttft", "TTFT"), ("Hit", "HITS")])
def test_a_table_is_sorted_by_a_column_or_its_name(text: str, key: str) -> None:
    assert runs._sort_key(text).name == key


def test_a_cache_may_be_a_percentage() -> None:
    def cache(size: Any) -> Any:
        return comparison(["lru"], model="m", hardware="h", trace="t", cache=size, batch=1, prompt=4, decode=4, n_batches=1,
                              seed=0, transfer="pinned", repeat=1, overrides=[], imports=False)["cache"]  # fmt: skip

    assert cache(["25%", 0.5, "12.5 %", "1/3", "4GiB"]) == {"ratio": [0.25, 0.5, 0.125, 1 / 3], "budget": ["4GiB"]}
    with pytest.raises(ConfigError, match=r"expected shares such as 0.25, 1/4 or 25%, or sizes .*got 'a%'"):
        cache("a%")


@pytest.mark.parametrize("before", [True, False])
def test_quiet_and_verbose_stand_before_or_after_a_verb(before: bool, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", "--policies", "lru", "--cache", "0.25", "--prompt", "4", "--decode", "2", "--jobs", "1"]
    told = {}
    for option in ("--quiet", "", "--verbose"):
        asked = [option] if option else []
        assert main.main([*asked, *words] if before else [*words, *asked]) == 0
        told[option] = capsys.readouterr()
    assert told["--quiet"].err == "" and "with the statistics of" in told[""].err
    assert told["--quiet"].out == told[""].out == told["--verbose"].out
    more = set(told["--verbose"].err.splitlines()) - set(told[""].err.splitlines())
    assert any(line.startswith("hardware profile rtx3090-epyc7532: ") for line in more)
    assert any("1 runs in this process on the simulator" in line for line in more)


def test_errors_are_printed_quietly_and_both_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["list", "nothing", "--quiet"]) == 2 and capsys.readouterr().err.startswith("moesim: ")
    assert main.main(["list", "models", "--quiet", "--verbose"]) == 2  # sets nothing
    assert capsys.readouterr().err == "moesim: --quiet, --verbose: expected one of them, got both; leave one out\n"
    assert main.main(["--version"]) == 0  # as other tests expect it: the level is that of the last command
