"""Hundreds of faults planted in the package, one at a time: some test fails for each, or there is a hole in the tests.

The faults are drawn by seed and planted in a copy of the tree. One run of the tests on a copy that notes who reaches the places
finds which tests could notice a fault, and how long they take; on these it is tried, nearest first, until one fails. First come
the tests of the packages that are changed, then, for faults that survive these, all others. A test that fails is run without the
fault, too, after the same others: some depend on these, or on the clock of a process under limits.

Tools that plant faults (mutmut, cosmic-ray, pytest-gremlins) plant all, tens of thousands, or take hours for each; they know no
dropped statements, lost minima or swapped arguments, and limit the clock, not the computing.

`equivalent_mutants.yaml` holds faults that change nothing anybody could see, by their code, each with the reason.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import yaml

from moesim.engine.native import AVAILABLE
from tests.long.kit import LIMIT_BYTES, ROOT, Tally
from tests.long.mutants import Mutant, drawn, probed, same_bytecode, sites

PACKAGES = ("engine", "policies", "hardware/costs", "metrics", "trace", "experiment")
NEAR = [f"{where}/{package.partition('/')[0]}" for package in PACKAGES for where in ("tests", "moesim")]
BATCHES_S = (15, 60, 300)  # of tests that could notice a fault: the quickest of each file first
KEY = ("in", "statement", "change")
FILE_S = 0.5  # to import another file with tests
JUDGED = Path(__file__).with_name("equivalent_mutants.yaml")
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "results", "site")


class Copy:
    """A copy of the tree, in which faults are planted and tests run."""

    def __init__(self, folder: Path) -> None:
        self.tree, self._notes = folder / "tree", folder
        shutil.copytree(ROOT, self.tree, ignore=LEFT_OUT)
        if AVAILABLE:
            from moesim.engine.native import _native

            shutil.copy(_native.__file__, self.tree / "moesim" / "engine" / "native")
        files = [file for package in PACKAGES for file in (self.tree / "moesim" / package).rglob("*.py")]
        self.files = {file.relative_to(self.tree): file.read_bytes() for file in files}  # without faults
        package = self.tree / "moesim" / "__init__.py"  # interpreters that a test starts with -S know of probes, too
        package.write_text(package.read_text().replace("\nfrom importlib", "\nimport sitecustomize\nfrom importlib", 1))
        self._times = count(int(time.time()))
        path = [str(self.tree / "tests" / "long" / "in_copy"), str(self.tree)]
        notes = {f"MUTANTS_{name.upper()}": str(folder / name) for name in ("reports", "reached")}
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path)} | notes
        environment.pop("PYTEST_CURRENT_TEST")  # of this campaign
        self._where: dict[str, Any] = {"cwd": self.tree, "env": environment}
        self._forks = subprocess.Popen(
            [sys.executable, path[0] + "/forks.py"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **self._where
        )
        self.took: dict[str, float] = {}  # seconds of each test that passes in the copy without faults
        self.unsteady: set[str] = set()  # tests that fail without a fault after the same others

    def close(self) -> None:
        """End the process whose forks run tests."""
        with self._forks:
            self._forks.kill()

    def write(self, file: Path, data: bytes) -> None:
        """Write a file, at a time of its own: Python knows by the second which bytecode is old."""
        (self.tree / file).write_bytes(data)
        at = next(self._times)
        os.utime(self.tree / file, (at, at))

    def run(self, what: Iterable[str], *options: str, cpu_s: int = 0) -> tuple[int, dict[str, list[str]]]:
        """Run tests, in one process under limits or in several; return the exit code, and how parts of each test ended."""
        reports, names = self._notes / "reports", self._notes / "tests"
        reports.unlink(missing_ok=True)
        names.write_text("\n".join(what))
        arguments = ["-q", "-p", "sitecustomize", "-p", "no:cacheprovider", "--tb=no", *options, f"@{names}"]
        if cpu_s:
            assert self._forks.stdin is not None and self._forks.stdout is not None
            job = {"arguments": [*arguments, "-n", "0"], "cpu_s": cpu_s, "n_bytes": 2 * LIMIT_BYTES}
            self._forks.stdin.write(json.dumps(job) + "\n")
            self._forks.stdin.flush()
            code = int(self._forks.stdout.readline())
        else:
            command = [sys.executable, "-m", "pytest", *arguments, "-n", "auto", "--dist", "worksteal"]
            code = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **self._where).returncode
        found: dict[str, list[str]] = defaultdict(list)
        for line in reports.read_text().splitlines() if reports.exists() else ():
            test, *rest = line.rsplit("\t", 2)
            found[test] += rest
        return code, found

    def reached(self, mutants: Sequence[Mutant], folders: Sequence[str]) -> dict[int, set[str]]:
        """Run the tests of some folders; return which of them reach each fault, and note how long they took."""
        by_file = defaultdict(dict)
        for mutant in mutants:
            by_file[mutant.file][mutant.number] = mutant.site
        for file, places in by_file.items():
            self.write(file, probed(self.files[file], places))
        notes = self._notes / "reached"
        notes.write_text("")
        code, reports = self.run(folders)
        assert code in (0, 1), f"expected tests of {folders} to run, got exit code {code} of pytest"
        for file in by_file:
            self.write(file, self.files[file])
        for test, parts in reports.items():
            if set(parts[::2]) == {"passed"}:
                self.took[test] = sum(map(float, parts[1::2]))
        found: dict[int, set[str]] = {mutant.number: set() for mutant in mutants}
        for line in notes.read_text().splitlines():
            number, _, test = line.partition("\t")
            if test in self.took:
                found[int(number)].add(test)
        return found

    def in_order(self, tests: Iterable[str], mutant: Mutant) -> Iterator[list[str]]:
        """Give batches of tests that reach a fault: the quickest of each file first, those of the same package before others."""
        package = f"/{mutant.file.parts[1]}/"
        ranked, seen = [], Counter[str]()
        for test in sorted(tests, key=lambda test: (self.took[test], test)):
            file = test.partition("::")[0]
            ranked.append((seen[file], package not in f"/{file}", self.took[test] + (not seen[file]) * FILE_S, test))
            seen[file] += 1
        batch, total, limits = [], 0.0, iter(BATCHES_S)
        limit = next(limits)
        for *_, seconds, test in sorted(ranked):
            if batch and total + seconds > limit:
                yield batch
                batch, total, limit = [], 0.0, next(limits, limit)
            batch.append(test)
            total += seconds
        if batch:
            yield batch

    def fate(self, mutant: Mutant, tests: Iterable[str]) -> tuple[str, str]:
        """Plant a fault and run tests until one fails; return the outcome, and the test that failed."""
        self.write(mutant.file, mutant.planted(self.files[mutant.file]))
        try:
            for batch in self.in_order(tests, mutant):
                limit = 20 + int(5 * sum(self.took[test] for test in batch))
                code, reports = self.run(batch, "-x", cpu_s=limit)
                if code in (4, 5):  # names of tests that depend on the code
                    files = dict.fromkeys(test.partition("::")[0] for test in batch)
                    code, reports = self.run(files, "-x", cpu_s=20 * limit)
                if code:
                    failed = [test for test, parts in reports.items() if "failed" in parts[::2]]
                    if code > 0 and failed and self._fails_without(mutant, reports, limit):
                        self.unsteady.update(failed)
                        return self.fate(mutant, set(tests) - self.unsteady)
                    return "killed" if code > 0 else "ended by a limit", failed[0] if failed else "at import"
        finally:
            self.write(mutant.file, self.files[mutant.file])
        return "survived", ""

    def _fails_without(self, mutant: Mutant, reports: Iterable[str], limit: int) -> bool:
        """Run the same tests without the fault, up to the one that failed; return whether one fails."""
        self.write(mutant.file, self.files[mutant.file])
        return self.run(reports, "-x", cpu_s=limit)[0] != 0


def stages() -> Iterator[list[str]]:
    """Give the folders and modules with tests: those of the packages that are changed, then all others."""
    yield NEAR
    inside = [path for top in ("tests", "moesim") for path in sorted((ROOT / top).iterdir())]
    tops = [path for path in inside if path.is_dir() or (path.parent.name == "moesim" and path.suffix == ".py")]
    named = {str(path.relative_to(ROOT)) for path in tops if path.name not in ("long", "__pycache__")}
    yield sorted(named - set(NEAR))


def shown(mutant: Mutant, before: bytes, seed: int) -> str:
    """Show a fault as a difference of its file, with the command that tries it again, and its entry if it changes nothing."""
    lines = (data.decode().splitlines() for data in (before, mutant.planted(before)))
    difference = "\n".join(difflib.unified_diff(*lines, str(mutant.file), str(mutant.file), lineterm="", n=2))
    again = f"pytest tests/long/campaign_mutants.py --campaign-seed {seed} --only-mutants {mutant.number}"
    entry = json.dumps(dict(zip(KEY, mutant.site.key, strict=True)), ensure_ascii=False)
    return f"{difference}\n{again}\nif it changes nothing that anybody could see, in {JUDGED.name}, with the reason: {entry}"


def test_mutants(request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    n, seed, only, log = (
        request.config.getoption(name) for name in ("--mutants", "--campaign-seed", "--only-mutants", "--campaign-log")
    )
    tally, left, copy = Tally("mutants", log), [], Copy(tmp_path)
    request.addfinalizer(copy.close)
    judged = {tuple(one[key] for key in KEY) for one in yaml.safe_load(JUDGED.read_text(encoding="utf-8"))}
    for mutant in drawn(copy.files, seed, n, only):
        before = copy.files[mutant.file]
        if same_bytecode(before, mutant.planted(before)):
            tally.add(mutant.site.kind, "the same bytecode")
        elif mutant.site.key in judged:
            tally.add(mutant.site.kind, "judged equivalent")
        else:
            left.append(mutant)
    for folders in stages():
        reached, survivors = copy.reached(left, folders), []
        for mutant in left:
            outcome, by = copy.fate(mutant, reached[mutant.number] - copy.unsteady)
            if outcome == "survived":
                survivors.append(mutant)
            else:
                tally.add(mutant.site.kind, outcome)
            if log:
                with log.open("a", encoding="utf-8") as file:
                    file.write(f"{mutant.number} {mutant.site.kind}: {outcome} {by}, of {len(reached[mutant.number])} tests\n")
        left = survivors
    for mutant in left:
        tally.add(mutant.site.kind, "survived", shown(mutant, copy.files[mutant.file], seed))
    tally.finish(capsys)


def test_faults_can_be_planted_and_noted_anywhere(request: pytest.FixtureRequest) -> None:
    """What stands in a file with a fault, or with notes of all its places, is Python, line for line."""
    files = {file.relative_to(ROOT): file.read_bytes() for name in PACKAGES for file in (ROOT / "moesim" / name).rglob("*.py")}
    for mutant in drawn(files, request.config.getoption("--campaign-seed"), 100):
        before, places = files[mutant.file], dict(enumerate(sites(files[mutant.file])))
        noted = probed(before, places)
        assert noted.count(b"\n") == before.count(b"\n")
        assert len(set(re.findall(rb"_reached\((\d+)\)", noted))) >= sum(bool(site.scope) for site in places.values())
        compile(noted, str(mutant.file), "exec")
        compile(mutant.planted(before), str(mutant.file), "exec")
