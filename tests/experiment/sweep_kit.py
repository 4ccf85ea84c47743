"""Sweeps in a temporary folder: counting what is run, comparing folders, processes that can be killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import yaml

import moesim.experiment.run
from moesim.cli.main import main
from moesim.experiment.runner import run_one
from moesim.metrics.outcome import Outcome
from tests.experiment.experiment_kit import small

BARE: dict[str, Any] = {"timeline": None}


class Counted:
    """Counts runs that are simulated, and can do something before one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.policies: list[str] = []
        self.before: dict[int, Any] = {}  # number of the run, from 0 -> what is done then
        monkeypatch.setattr(moesim.experiment.run, "run_one", self._run)

    def _run(self, inputs: Any, spec: Any, **options: Any) -> Outcome:
        if "keep" not in options:  # a short one that tells how long others take
            return run_one(inputs, spec)
        self.before.pop(len(self.policies), lambda: None)()
        self.policies.append(spec.policy_name)
        return run_one(inputs, spec, **options)

    def __call__(self) -> int:
        """Say how many runs there were since the last call."""
        n = len(self.policies)
        self.policies = []
        return n


def write(folder: Path, file: str = "sweep.yaml", **changes: Any) -> Path:
    """Write a small experiment that draws nothing."""
    path = folder / file
    path.write_text(yaml.safe_dump(small(folder, **changes)))
    return path


def content(folder: Path) -> dict[str, bytes]:
    """Read all files of a folder, hidden ones too."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def same(a: Path, b: Path) -> None:
    """Check that two folders hold the same bytes."""
    one, other = content(a), content(b)
    assert list(one) == list(other)
    assert [name for name in one if one[name] != other[name]] == []


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Give what was said on stderr."""
    return capsys.readouterr().err.splitlines()


Command = Callable[[list[str]], int]
_context = multiprocessing.get_context("forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn")
if hasattr(_context, "set_forkserver_preload"):
    _context.set_forkserver_preload(
        ["moesim.cli", "tests.experiment.sweep_kit"]
    )  # what takes a second to import is imported once


def start(folder: Path, *arguments: str) -> BaseProcess:
    """Start the command line in a process of its own, in a folder; its exit code is the process's, its stderr in err-PID.txt."""
    process = _context.Process(target=_command, args=(str(folder), list(arguments)))
    process.start()
    return process


def _command(folder: str, arguments: list[str], run: Command = main) -> None:
    os.chdir(folder)
    with Path(f"err-{os.getpid()}.txt").open("w") as err, Path(os.devnull).open("w") as out:
        sys.stderr, sys.stdout = err, out
        code = run(arguments)
    sys.exit(code)


def start_and_kill(folder: Path, moment: int, *arguments: str, run: Command = main) -> BaseProcess:
    """Start the command line, and kill it at a moment, counted from 0; if it ends before, moments.txt holds their number."""
    process = _context.Process(target=_killed_command, args=(str(folder), moment, list(arguments), run))
    process.start()
    return process


_TOUCHES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")  # audit events, told before they happen


def _killed_command(folder: str, moment: int, arguments: list[str], run: Command) -> None:
    out, seen = Path(arguments[arguments.index("--out") + 1]).parts[0], 0

    def count(event: str, touched: tuple[Any, ...]) -> None:
        nonlocal seen
        if event in _TOUCHES and any(isinstance(path, str | Path) and out in Path(path).parts for path in touched[:2]):
            if seen == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1

    os.chdir(folder)
    sys.addaudithook(count)
    try:
        _command(folder, arguments, run)
    finally:
        Path("moments.txt").write_text(str(seen))
