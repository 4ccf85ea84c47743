"""Two hundred broken experiment files: each runs, or is refused in one line, and with nothing written."""

from __future__ import annotations

import resource
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moesim.cli.main import main
from moesim.core.yaml_reader import StrictLoader
from moesim.errors import ConfigError
from moesim.experiment.run import Estimate
from tests.cli.mutation_kit import ROOT, mutant, remembered
from tests.waiting import HANG_S

N, PARTS = 200, 10
LIMIT_BYTES = 6 * 2**30  # of address space, beyond what the process has: an explosion is a MemoryError, not a dead machine


@pytest.fixture(scope="module")
def experiments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a copy of the experiments, where broken files can stand next to what they include."""
    folder = tmp_path_factory.mktemp("mutants") / "experiments"
    shutil.copytree(ROOT / "experiments", folder)
    return folder


@pytest.fixture(autouse=True)
def _cheap_and_bounded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave out what is the same for all: reading the good inputs again, and the trial runs of an estimate."""
    for name in ("read_trace", "load_hardware", "load_model"):
        monkeypatch.setattr(f"moesim.experiment.resolve.{name}", remembered(name))
    monkeypatch.setattr("moesim.experiment.run.seconds", lambda experiment, specs: Estimate(1.0, 1))
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() if sys.platform == "linux" else 0
    if used:
        resource.setrlimit(resource.RLIMIT_AS, (used + LIMIT_BYTES, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def too_long(*_: Any) -> None:
    raise AssertionError(f"took longer than {HANG_S:g} s")


def run(file: Path, out: Path, capsys: pytest.CaptureFixture[str], *options: str, quick: bool = True) -> tuple[int, str]:
    """Run the command; give exit code and stderr."""
    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(int(HANG_S))  # most take milliseconds
    try:
        code = main(["run", str(file), "--out", str(out), *options, *(["--quick"] if quick else [])])
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    lines = capsys.readouterr().err.splitlines(keepends=True)
    return code, "".join(line for line in lines if not line.startswith("assumed routing"))  # a notice, not the error


def check_refused(error: str, out: Path) -> None:
    assert error.startswith("moesim: ") and error.count("\n") == 1 and error.endswith("\n"), error
    assert len(error) < 2000, error
    assert not out.exists(), "nothing is written if the input is wrong"


@pytest.mark.parametrize("part", range(PARTS))
def test_a_mutated_file_runs_or_is_refused_in_one_line(
    part: int, experiments: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    wrong, codes = [], []
    for number in range(part, N, PARTS):
        seed, data = mutant(number)
        file, out = (experiments / seed.relative_to(ROOT / "experiments")).with_name("mutant.yaml"), tmp_path / "out"
        file.write_bytes(data)
        try:
            code, error = run(file, out, capsys, "--dry-run")
            codes.append(code)
            assert code in (0, 2)
            if code == 2:
                check_refused(error, out)
        except BaseException as problem:  # a traceback is what must not be: name all files that give one
            if isinstance(problem, KeyboardInterrupt):
                raise
            wrong.append(f"mutant {number} of {seed.name}: {type(problem).__name__}: {str(problem)[:300]}")
        finally:
            file.unlink(missing_ok=True)
    assert not wrong, "\n".join(wrong)
    assert codes.count(2) > len(codes) / 2, "most mutations break something"


# ---- what a few bytes can ask for

BASE = """
model: {base: mixtral-8x7b, expert_bits: 4}
hardware: rtx3090-epyc7532
trace: {synthesize: mixtral-8x7b, requests: 2, prompt: 4, decode: 4}
workload: {batch_size: 1, prompt_tokens: 4, decode_tokens: 4}
cache: {ratio: 0.25}
policies: [lru]
"""
PAIRS = list(zip("abcdefghij", "bcdefghijk", strict=True))
LAUGHS = "\n".join(["a: &a [x, x]", *(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]" for a, b in PAIRS)])
MERGES = "\n".join(["a: &a {x: 1}", *(f"{b}: &{b} {{<<: [{', '.join([f'*{a}'] * 9)}]}}" for a, b in PAIRS)])
TOO_MANY = "expected at most 100000 combinations, got more; sweep fewer values"
TOO_DEEP = "expected at most 50 lists and mappings inside each other, got more"


def swept(n: int, *names: str) -> str:
    """Give each of some keys a list of n numbers."""
    return ", ".join(f"{name}: [{', '.join(str(i) for i in range(1, n + 1))}]" for name in names)


def test_keys_that_only_merging_makes_count(monkeypatch: pytest.MonkeyPatch):
    """Newer PyYAML merges each key of a file once; older ones multiply them, and then this bound holds."""
    text = "a: &a {p: 1, q: 1, r: 1}\nb: {<<: *a, s: 1, t: 1}"
    assert set(StrictLoader(text).get_single_data()["b"]) == set("pqrst")
    monkeypatch.setattr("moesim.core.yaml_reader.MAX_VALUES", 4)
    with pytest.raises(ConfigError, match="line 2: expected at most 4 keys, got more by merging"):
        StrictLoader(text).get_single_data()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (f"{LAUGHS}\nname: *k", "expected at most 100000 values, aliases counted each time, got more"),
        (MERGES, "e.yaml: "),
        ("zip: &a [*a]", TOO_DEEP),
        ("zip: " + "[" * 100 + "]" * 100, TOO_DEEP),
        ("zip: " + "[" * 100_000, TOO_DEEP),
        ("name: " + "9" * 5000, "expected a number of at most 300 digits, got 99999"),
        ("name: !!float x", "expected valid YAML, got "),
        ("name: !!bool x", "expected valid YAML, got "),
        ("name: !!map x", "expected valid YAML, got "),
        ('name: "\\ud800"', "half a character"),
        ("workload: {batch_size: 1e9}", "workload.batch_size: expected an integer, got 1000000000.0"),
        ("workload: {batch_size: 1000000000, decode_tokens: 1}", "expected at most 100000 requests, got 1000000000"),
        ("workload: {batch_size: 1000000000, reuse: shifted}", "expected at most 100000 requests, got 1000000000"),
        ("workload: {n_batches: 1000000000000, reuse: shifted}", "expected at most 100000 requests, got 1000000000000"),
        ("workload: {seed: 10000000000000000000}", "workload.seed: expected an integer of at most 9007199254740992, got 1000"),
        ("warm_up_steps: 10000000000000000000", "warm_up_steps: expected an integer of at most 9007199254740992, got 1000"),
        ("decision_us: .inf", "decision_us: expected a finite number, got inf"),
        ("decision_us: .nan", "decision_us: expected a finite number, got nan"),
        ("decision_us: 1e300", "decision_us: expected a number of at most 1000000000.0, got 1e+300"),
        ("cache: {budget: 99999999 TiB}", "cache.budget: expected a size of at most 9007199254740992 bytes (8 PiB), got '99999"),
        ("repeat: 1000000000000", TOO_MANY),
        (
            "trace: {synthesize: mixtral-8x7b, requests: 1000000000, prompt: 4, decode: 4}",
            "trace: expected at most 100000 tokens",
        ),
        (
            "trace: {synthesize: mixtral-8x7b, requests: 2, prompt: 1000000000}",
            "trace: expected at most 100000 tokens, got 2000",
        ),
        (f"model: {{base: mixtral-8x7b, {swept(20, 'expert_bits', 'top_k', 'hidden', 'n_heads')}}}", TOO_MANY),
        (
            f"workload: {{{swept(20, 'batch_size', 'prompt_tokens', 'decode_tokens', 'n_batches')}}}",
            TOO_MANY,
        ),
        (f"{swept(1000, 'decision_us')}\n{swept(1000, 'warm_up_steps')}", TOO_MANY),
        (f"policies: [{{name: dali, {swept(100, 'w_size', 'u_size', 'prefetch_size')}}}]", TOO_MANY),
        (
            "zip: [[decision_us, warm_up_steps], [workload.n_batches, workload.seed]]\n"
            f"workload: {{{swept(2000, 'n_batches', 'seed')}}}\n{swept(2000, 'decision_us')}\n{swept(2000, 'warm_up_steps')}",
            TOO_MANY,
        ),
        ("description: " + "x" * 100_000 + "\nrepeat: " + "y" * 100_000, "repeat: expected an integer, got 'yyyy"),
    ],
    ids=lambda text: text[:40],
)
def test_what_would_take_all_memory_or_time_is_refused(
    change: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    keys = {line.partition(":")[0] for line in change.splitlines()}
    kept = [line for line in BASE.splitlines() if line.partition(":")[0] not in keys]
    file = tmp_path / "e.yaml"
    file.write_text("\n".join([*kept, change]))
    code, error = run(file, tmp_path / "out", capsys, "--dry-run", quick=False)
    assert code == 2
    check_refused(error, tmp_path / "out")
    assert words in error
