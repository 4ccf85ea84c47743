"""Policies in a module of the current folder that tell of their runs and can be held, and processes that carry out runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import moesim

ROOT = Path(moesim.__file__).resolve().parents[1]
BEGUN = "begun.log"
HELD = "held.txt"
_POLICIES = '''
import os
import time
from pathlib import Path

from moesim.policies.systems.caches import LRU

HANG_S = 900  # reached only by what would never end


def note():
    """Write down that a run has begun here, and say the how manieth it is."""
    file = os.open("begun.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(file, b"%d\\n" % os.getpid())
    end = os.lseek(file, 0, os.SEEK_CUR)
    os.close(file)
    return Path("begun.log").read_bytes()[:end].count(b"\\n")


def held(number):
    """Whether the test lets fewer runs go on."""
    try:
        return number > int(Path("held.txt").read_text())
    except FileNotFoundError:
        return False


class Noted(LRU):
    """An LRU cache whose runs are noted when they begin, and wait while the test holds them."""

    version = 1
    noted = False

    def decide(self, event, view):
        if not self.noted:
            self.noted = True
            number, end = note(), time.monotonic() + HANG_S
            while held(number) and time.monotonic() < end:
                time.sleep(0.01)
            self.middle()
        return super().decide(event, view)

    def middle(self):
        pass


class Endless(Noted):
    """Its runs never end."""

    def middle(self):
        while True:
            time.sleep(1)


class Deadly(Noted):
    """Its runs kill their process."""

    def middle(self):
        os.kill(os.getpid(), 9)
'''


def write_policies(folder: Path, module: str) -> None:
    """Write the module; Python imports each name once a process, so each test has its own."""
    (folder / f"{module}.py").write_text(_POLICIES)


def begun(folder: Path) -> list[int]:
    """Processes of the runs that have begun, one a run."""
    log = folder / BEGUN
    return [int(line) for line in log.read_text().split()] if log.exists() else []


def fragments(folder: Path) -> int:
    """Count the runs that a result folder holds."""
    return len(list((folder / "dataset").glob("run-*.parquet")))


def hold(folder: Path, n: int) -> None:
    """Let the first n runs that begin in a folder go on, and the others wait until they are let go; before any has begun."""
    (folder / HELD).write_text(str(n))


def let_go(folder: Path) -> None:
    """Let all runs go on."""
    (folder / HELD).unlink(missing_ok=True)


def start(folder: Path, *arguments: str, path: Path = ROOT, log: Path | None = None) -> subprocess.Popen[str]:
    """Start ``python ARGUMENTS`` in a folder, as the leader of a group; into a log, or with its stderr read by the caller."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("DASK_")}
    before = [env["PYTHONPATH"]] if "PYTHONPATH" in env else []
    env |= {"PYTHONPATH": os.pathsep.join([str(path), *before]), "OMP_NUM_THREADS": "1", "DASK_CONFIG": str(folder)}
    env["DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES"] = "0"
    command = [sys.executable, *arguments]
    if path != ROOT:  # an editable installation would put its own moesim first
        command.insert(1, "-S")
        env["PYTHONPATH"] = os.pathsep.join([str(path), *before, *(one for one in sys.path if "site-packages" in one)])
    if log is not None:
        with log.open("w") as out:
            return subprocess.Popen(command, cwd=folder, env=env, stdout=out, stderr=out, text=True, start_new_session=True)
    return subprocess.Popen(
        command, cwd=folder, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def without_progress(err: str) -> list[str]:
    """Return the lines but those of progress, which a busy machine has time to print."""
    return [line for line in err.splitlines() if not re.match(r"\d+/\d+ runs: ", line)]


def alive(pid: int) -> bool:
    """Whether a process goes on; one that has ended and has not been asked for does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    try:
        return not stat.parent.parent.joinpath("self").exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def same_folders(a: Path, b: Path) -> bool:
    """Whether two folders hold the same files with the same bytes."""

    def content(folder: Path) -> dict[str, bytes]:
        return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}

    return content(a) == content(b)
