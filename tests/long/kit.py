"""What the campaigns share: commands in this process, folders that are watched, changed bits, findings that are counted."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import random
import re
import resource
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from stat import S_ISDIR
from typing import Any, NamedTuple

import pytest

from moesim.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 60  # of computing for one command; most take a tenth of a second
LIMIT_BYTES = 6 * 2**30  # of address space beyond what the process has
# The model, the machine and the routing of most inputs: small, so that thousands of commands take minutes.
TINY: dict[str, Any] = {
    "model": {"base": "mixtral-8x7b", "expert_bits": 4, "n_layers": 4},
    "hardware": "rtx3090-epyc7532",
    "trace": "small.safetensors",
    "workload": {"prompt_tokens": 4, "decode_tokens": 2},
    "cache": {"ratio": 0.25},
    "policies": ["on-demand"],
    "timeline": None,
}
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class TooLongError(Exception):
    """A command went over its time."""


class Called(NamedTuple):
    """What became of a command: its exit code, what it said, and the traceback of what it raised."""

    code: int
    out: str
    err: str
    raised: str


def call(*arguments: str) -> Called:
    """Run a command in this process."""
    out, err, raised, code = io.StringIO(), io.StringIO(), "", -1
    before = [(number, signal.signal(number, _too_long)) for number in (signal.SIGPROF, signal.SIGALRM)]
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)  # the machine may be busy
    signal.alarm(20 * LIMIT_S)  # for what waits
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(list(arguments))
    except (Exception, SystemExit):
        raised = "".join(traceback.format_exc()[-1500:])
    finally:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        for number, handler in before:
            signal.signal(number, handler)
    return Called(code, out.getvalue(), err.getvalue(), raised)


def _too_long(*_: Any) -> None:
    raise TooLongError(f"longer than {LIMIT_S} s")


def complaint(called: Called) -> str:
    """Say what is wrong with how a command ended; empty if nothing is."""
    if called.raised:
        return called.raised
    if called.code not in (0, 1, 2):
        return f"exit code {called.code}: {called.err}"
    if _CONTROL.search(called.out + called.err):
        return f"control characters on the terminal: {_CONTROL.findall(called.out + called.err)[:5]} in {called.err[:300]!r}"
    lines = called.err.splitlines()
    if called.code == 2 and not (len(lines) == 1 and lines[0].startswith("moesim: ")):
        return f"exit code 2 and not one line: {called.err!r}"
    if called.code == 1 and not any(line.startswith("moesim: ") for line in lines):
        return f"exit code 1 without a reason: {called.err!r}"
    return ""


def look(folder: Path, *, but: str = "") -> dict[str, tuple[Any, ...]]:
    """Note of every file, folder and link below a folder what changes when somebody writes to it."""
    found = {}
    for place, folders, files in os.walk(folder):
        if but and Path(place) == folder:
            folders[:] = [name for name in folders if name != but]
            files = [name for name in files if name != but]
        for name in [*folders, *files]:
            path = Path(place) / name
            is_, its = path.lstat(), str(path.relative_to(folder))  # of a link itself: what it names may come and go
            found[its] = (is_.st_mode,) if S_ISDIR(is_.st_mode) else (is_.st_mode, is_.st_size, is_.st_mtime_ns, is_.st_ino)
    return found


def flipped(data: bytes, rng: random.Random) -> tuple[bytes, int]:
    """Flip one bit; give where as well."""
    at = rng.randrange(8 * len(data))
    return data[: at // 8] + bytes([data[at // 8] ^ (1 << at % 8)]) + data[at // 8 + 1 :], at


def in_child(do: Callable[[], Any]) -> Any:
    """Do something in a process of its own, which may crash; its result, or a text that begins with CRASH."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reading)
            try:
                result = do()
            except Exception:
                result = "CRASH: " + traceback.format_exc()[-1500:]
            with os.fdopen(writing, "wb") as pipe:
                pickle.dump(result, pipe)
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    status = os.waitpid(child, 0)[1]
    return pickle.loads(data) if status == 0 else f"CRASH: the process ended with status {status}"


class Tally:
    """Counts the cases of a campaign by kind and outcome, and keeps its findings."""

    def __init__(self, name: str, log: Path | None = None) -> None:
        self.name, self._log = name, log
        self.cases: dict[str, Counter[str]] = {}
        self.findings: list[str] = []
        self._begin = time.monotonic()

    @property
    def n(self) -> int:
        """Cases so far."""
        return sum(outcomes.total() for outcomes in self.cases.values())

    def add(self, kind: str, outcome: str, finding: str = "") -> None:
        """Count a case; with a finding, keep it."""
        self.cases.setdefault(kind, Counter())[outcome] += 1
        if finding:
            self.findings.append(f"{kind}: {finding}")
        if self._log and (finding or self.n % 50 == 0):  # a campaign takes long: what it has found can be read before
            with self._log.open("a", encoding="utf-8") as log:
                log.write(self.findings[-1] + "\n\n" if finding else f"{self.n} cases, {len(self.findings)} findings\n")

    def finish(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Print a line of what was done, one for each kind, and fail if anything was found."""
        with capsys.disabled():
            took = time.monotonic() - self._begin
            print(f"\n{self.name}: {self.n} cases, {len(self.findings)} findings, {took:.0f} s")
            for kind, outcomes in self.cases.items():
                print(f"  {kind}: {', '.join(f'{count} {outcome}' for outcome, count in outcomes.most_common())}")
        assert not self.findings, f"{len(self.findings)} findings\n" + "\n\n".join(self.findings)


@contextlib.contextmanager
def bounded_memory() -> Iterator[None]:
    """Make an explosion a MemoryError instead of a dead machine."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if sys.platform == "linux":
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + LIMIT_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def shared_out(total: int, weights: Mapping[str, int]) -> dict[str, int]:
    """Share a number of cases out over kinds, rounded up."""
    whole = sum(weights.values())
    return {name: -(-total * weight // whole) for name, weight in weights.items()}
