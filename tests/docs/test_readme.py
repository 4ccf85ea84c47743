"""What the README and the first pages show works: the policy, YAML, commands, pictures and links."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from moesim.cli.main import main
from moesim.core.data import data_dirs
from moesim.experiment.config import parse_config
from moesim.experiment.sweep import expand
from moesim.policies.registry import make_policy
from moesim.testing import check_policy

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
START = (ROOT / "docs" / "guide" / "start.md").read_text()
OWN = (ROOT / "docs" / "guide" / "own-policy.md").read_text()
SPEED = (ROOT / "docs" / "background" / "speed.md").read_text()


def usable_cores() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


HAS_TRACE = any((folder / "mini-mixtral.safetensors").exists() for folder in data_dirs("traces"))


def blocks(language: str, page: str = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, flags=re.DOTALL)


def commands() -> list[list[str]]:
    lines = re.findall(r"^\|.*\| `(moesim .*?)` \|", README, flags=re.MULTILINE)
    lines += [
        line.split("#")[0].strip()
        for page in (README, START, OWN, SPEED)
        for block in blocks("sh", page)
        for line in block.splitlines()
    ]
    lines = list(dict.fromkeys(line.replace(".venv/bin/", "") for line in lines))
    words = [shlex.split(line.split(">")[0]) for line in lines if line]
    return [w[1:] for w in words if w[0].endswith("moesim")]


def test_the_policy_of_the_readme_passes_the_common_checks():
    (block,) = blocks("python")
    space: dict[str, Any] = {}
    exec(block, space)
    report = check_policy(space["FirstExperts"])
    assert [check.verdict for check in report.checks[2:]] == ["passed"] * 4, "no size of the cache is refused"


def test_the_experiment_of_the_readme_is_valid():
    (whole,), (part,) = ([yaml.safe_load(block) for block in blocks("yaml", page)] for page in (README, START))
    for raw in (whole, whole | part):
        expand(parse_config(raw, "README.md"), "README.md")
        for policy in raw["policies"]:
            plain = isinstance(policy, str) or not any(isinstance(value, list) for value in policy.values())
            assert not plain or make_policy(policy)


def test_the_readme_shows_the_main_commands():
    assert {c[0] for c in commands()} == {
        "run", "compare", "check", "list", "trace", "schema", "bench", "regret", "assignments", "papers", "profile", "replay",
        "validate", "recommend", "calibrate", "whatif", "diff", "plot", "report",
    }  # fmt: skip


def make_recordings(folder: Path, *, record: bool) -> None:
    """What the commands of the recorder start from: a tiny model, prompts, and if asked for two traces with gate inputs."""
    pytest.importorskip("torch", reason="recorder commands need torch: install moesim[record]")
    pytest.importorskip("transformers", reason="recorder commands need transformers: install moesim[record]")
    from tests.recorder import record_kit

    record_kit.save_tiny(folder / "MODEL", "mixtral")
    (folder / "prompts.txt").write_text("\n".join(record_kit.PROMPTS))
    (folder / "others.txt").write_text("\n".join(record_kit.OTHERS[:2]))
    for prompts, trace in (("prompts.txt", "mine"), ("others.txt", "calibration")) if record else ():
        out = ["--out", f"{trace}.safetensors", "--max-new-tokens", "4", "--keep-inputs", "all"]
        assert main(["trace", "record", "MODEL", "--prompts", prompts, *out]) == 0


def make_routes(folder: Path, *, imported: bool) -> None:
    """Routing as vLLM gives it, in Qwen3's shape, a file a request; and if asked for the trace of it."""
    rng = np.random.default_rng(0)
    (folder / "routes").mkdir()
    for name in "abcd":
        ids = rng.permuted(np.tile(np.arange(128, dtype=np.int16), (5, 48, 1)), axis=2)[..., :8]
        np.savez(folder / "routes" / f"{name}.npz", routed_experts=ids, n_prompt=3)
    if imported:
        out = str(folder / "theirs.safetensors")
        assert main(["trace", "import", str(folder / "routes"), "--model", "qwen3-30b-a3b", "--out", out]) == 0


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the quickstart, shortened; it is copied, not changed."""
    out = tmp_path_factory.mktemp("quickstart") / "out"
    assert main(["run", str(ROOT / "experiments" / "quickstart.yaml"), "--quick", "--set", "plots=[]", "--out", str(out)]) == 0
    return out


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_a_command_of_the_readme_runs(
    command: list[str],
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    if not HAS_TRACE and command[0] in ("run", "compare", "trace"):
        pytest.skip("the shipped trace mini-mixtral is not here")
    monkeypatch.chdir(tmp_path)
    if command[:2] in (["trace", "record"], ["trace", "learn"]):
        make_recordings(tmp_path, record=command[1] == "learn")
    if command[:2] in (["trace", "import"], ["trace", "calibrate"]):
        make_routes(tmp_path, imported=command[1] == "calibrate")
    if command[0] == "check":
        (tmp_path / "my_module.py").write_text(blocks("python")[0])
        monkeypatch.delitem(sys.modules, "my_module", raising=False)
        monkeypatch.setattr(sys, "path", [*sys.path])
    if command[0] in ("replay", "validate") or command[:2] == ["profile", "measure"]:
        pytest.importorskip("torch", reason="measuring and replaying need torch: install moesim[profile]")
        if len(usable_cores()) < 2:
            pytest.skip("two devices need two cores")
    if any(word.startswith("results/quickstart") for word in command):
        shutil.copytree(request.getfixturevalue("quickstart"), tmp_path / "results" / "quickstart")
    command = [str(ROOT / word) if word.startswith("experiments/") else word for word in command]
    shorter = {
        "run": ["--quick"],
        "compare": ["--prompt", "64", "--decode", "2"],
        "bench": ["--repeats", "1", "--tokens", "2"],
        "assignments": ["--instances", "2"],
        "papers": ["--quick"],
        "recommend": ["--prompt", "8", "--decode", "2"],
        "whatif": ["--quick", "--no-next"],
        "profile": {"measure": ["--dry-run", "--no-gpu"]}.get("".join(command[1:2]), []),
        "replay": ["--quick"],
        "validate": [] if "--public" in command else ["--quick", "--repeats", "1"],
        "trace": {"record": ["--max-new-tokens", "4"], "learn": ["--epochs", "1"]}.get("".join(command[1:2]), []),
    }
    assert main([*command, *shorter.get(command[0], [])]) == 0
    if command[0] in ("run", "replay"):
        assert ("replayed on this machine" in capsys.readouterr().out) == (command[0] == "replay")


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda page: page.name)
def test_links_exist(page: Path):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_the_readme_is_short():
    assert len(README.splitlines()) < 130
    assert len(README.split()) < 1300
