"""Commands killed at random moments: the same command then ends in the bytes of one that nobody disturbed."""

from __future__ import annotations

import random
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from moesim.core.files import Manifest
from tests.experiment.experiment_kit import write_trace
from tests.experiment.sweep_kit import Command, content, main, start_and_kill
from tests.long.kit import TINY, Tally, call, in_child, shared_out

MADE_UP = {"synthesize": "mixtral-8x7b", "requests": 2, "prompt": 4, "decode": 3}
SHORT = {"timeline": {"policies": ["lru"]}, "frames": True, "plots": ["decode_speed"]}
EXPERIMENTS: dict[str, dict[str, Any]] = {
    "full.yaml": {**TINY, **SHORT, "cache": {"ratio": [0.25, 0.5, 0.75]}, "policies": ["on-demand", "lru"]},
    "made-up.yaml": {**TINY, **SHORT, "model": {"base": "mixtral-8x7b", "expert_bits": 4}, "trace": MADE_UP, "policies": ["lru"],
                     "workload": {"prompt_tokens": 4, "decode_tokens": 3}},
    "tiny.yaml": {**TINY, "policies": ["lru"]},
}  # fmt: skip


@dataclass(frozen=True)
class Killed:
    """What is killed, and how much of the campaign it is."""

    arguments: tuple[str, ...]
    weight: int
    run: Command = main
    view: Callable[[Path], Any] = content  # what must be equal
    marked: bool = field(default=True)  # the folder is the command's own


def measured(arguments: list[str]) -> int:
    """Measure a machine whose times are known."""
    from moesim.live.profiler.measure import measure
    from tests.live import profiler_kit as kit

    kit.shrink(setattr, 4)
    measure(kit.prepared(Path(arguments[arguments.index("--out") + 1]), overwrite=True), bench=kit.FakeBench(), progress=False)
    return 0


def profile(folder: Path) -> Any:
    """Give the numbers of the profile; its date and sessions are another matter."""
    found = yaml.safe_load((folder / "mine.yaml").read_text())
    return found["devices"], found["links"], [p.name for p in sorted(folder.rglob("*")) if p.is_file() and p.suffix != ".png"]


def without_notes(view: Callable[[Path], Any], folder: Path, foreign: dict[str, bytes]) -> Any:
    """Take foreign files away, and look at the rest."""
    for name in foreign:
        (folder / name).unlink()
    return view(folder)


KINDS = {
    "run": Killed(("run", "full.yaml", "--out", "out", "--jobs", "1"), 14),
    "run made-up routing": Killed(("run", "made-up.yaml", "--out", "out", "--jobs", "1"), 6),
    "run in two processes": Killed(("run", "full.yaml", "--out", "out", "--jobs", "2"), 8),
    "what-if": Killed(("whatif", "tiny.yaml", "--quick", "--no-next", "--vary", "link.bytes_per_s x2", "--out", "out"), 8),
    "regret": Killed(("regret", "tiny.yaml", "--quick", "--jobs", "1", "--out", "out"), 4),
    "recommend": Killed(
        (
            "recommend", "--model", "mixtral-8x7b", "--hardware", "rtx3090-epyc7532", "--decode", "2", "--prompt", "4",
            "--jobs", "1", "--out", "out",
        ),
        3,
    ),
    "papers": Killed(("papers", "hybrimoe/fig9", "--quick", "--jobs", "1", "--out", "out"), 4),
    "trace record": Killed(
        (
            "trace", "record", "home/mixtral", "--prompts", "home/prompts.txt", "--calibrate", "home/others.txt",
            "--max-new-tokens", "6", "--out", "out/t.safetensors",
        ),
        6,
        marked=False,
    ),
    "profile measure": Killed(("--out", "out"), 8, run=measured, view=profile, marked=False),
}  # fmt: skip
NEED_TORCH = ("trace record", "profile measure")


def test_killed_commands(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seed, only = request.config.getoption("--campaign-seed"), request.config.getoption("--only-kinds")
    write_trace(tmp_path / "small.safetensors", n_layers=4)
    for name, experiment in EXPERIMENTS.items():
        (tmp_path / name).write_text(yaml.safe_dump(experiment))
    kinds = {name: kind for name, kind in KINDS.items() if name not in NEED_TORCH or find_spec("torch")}
    if find_spec("torch"):
        from tests.recorder.record_kit import make_home

        make_home(tmp_path / "home")
    monkeypatch.chdir(tmp_path)
    tally, out = Tally("kills", request.config.getoption("--campaign-log")), tmp_path / "out"
    for name, n in shared_out(request.config.getoption("--kills"), {name: kind.weight for name, kind in kinds.items()}).items():
        if only and name not in only:
            continue
        kind, rng = kinds[name], random.Random(f"{seed} {name}")
        whole = start_and_kill(tmp_path, 10**9, *kind.arguments, run=kind.run)
        whole.join()
        assert whole.exitcode == 0, [p.read_text() for p in tmp_path.glob("err-*")]
        expected, n_moments = kind.view(out), int((tmp_path / "moments.txt").read_text())
        for moment in sorted(rng.sample(range(n_moments), min(n, n_moments))):
            shutil.rmtree(out, ignore_errors=True)
            outcome, finding = case(kind, moment, tmp_path, out, expected)
            tally.add(name, outcome, finding and f"moment {moment} of {n_moments}: {finding}")
        shutil.rmtree(out, ignore_errors=True)
    tally.finish(capsys)


def case(kind: Killed, moment: int, folder: Path, out: Path, expected: Any) -> tuple[str, str]:
    """Kill a command, add files of somebody else's, run it again, and compare."""
    process = start_and_kill(folder, moment, *kind.arguments, run=kind.run)
    process.join()
    outcome = "killed" if process.exitcode == -signal.SIGKILL else f"exit {process.exitcode}"
    if process.exitcode not in (0, -signal.SIGKILL):
        return outcome, f"exit code {process.exitcode}"
    foreign = {}
    if not kind.marked or Manifest(out).marked:
        out.mkdir(exist_ok=True)
        foreign = {"NOTES.md": b"mine", ".hidden": b"mine too", "summary.json.bak": b"\0"}
        for name, data in foreign.items():
            (out / name).write_bytes(data)
    if kind.run is main:
        again = call(*kind.arguments)
        problem = again.raised or (f"again: exit code {again.code}: {again.err}" if again.code else "")
    else:
        found = in_child(lambda: kind.run(list(kind.arguments)))
        problem = "" if found == 0 else str(found)
    if problem:
        return outcome, problem
    there = content(out)
    if {name: there.get(name) for name in foreign} != foreign:
        return outcome, f"foreign files: {sorted(there)}"
    seen = without_notes(kind.view, out, foreign)
    if seen != expected:
        names = [n for n in {*seen, *expected} if seen.get(n) != expected.get(n)] if isinstance(seen, dict) else [seen, expected]
        return outcome, f"different: {names}"
    return outcome, ""
