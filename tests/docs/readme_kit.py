"""The commands of the README and what they start from."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from moesim.cli.main import main
from moesim.core.data import data_dirs

ROOT = Path(__file__).resolve().parents[2]


README = (ROOT / "README.md").read_text()


START = (ROOT / "docs" / "guide" / "start.md").read_text()


OWN = (ROOT / "docs" / "guide" / "own-policy.md").read_text()


SPEED = (ROOT / "docs" / "background" / "speed.md").read_text()


SHORTER = {  # what would take long; the command that is shown is the one that helps a reader
    "run": ["--quick", "--set", "plots=[]"],  # test_experiments_files.py draws the figures of every experiment
    "compare": ["--prompt", "64", "--decode", "2"],
    "bench": ["--repeats", "1", "--tokens", "2"],
    "capacity": ["--policies", "lru", "--requests", "3", "--seeds", "2", "--answer", "2"],
    "papers": ["--quick"],
    "league": ["--quick", "--set", "policies=[llama-cpp-fit, lru]"],
    "recommend": ["--prompt", "8", "--decode", "2"],
    "whatif": ["--quick", "--no-next"],
    "profile measure": ["--dry-run", "--no-gpu"],
    "replay": ["--quick", "--memory", "500MB", "--set", "plots=[]"],
    "validate": ["--quick", "--repeats", "1", "--memory", "500MB"],
    "trace stats": ["--max-rows", "200"],
    "trace record": ["--max-new-tokens", "4"],
    "trace learn": ["--epochs", "1"],
}


def shortened(command: list[str]) -> list[str]:
    """Add options that make a command quick, which replace those that it has."""
    name = command[0] if command[0] in SHORTER else " ".join(command[:2])
    return [*command, *(SHORTER.get(name, []) if "--public" not in command else [])]


def told_apart(command: list[str]) -> frozenset[tuple[str, ...]]:
    """Give the words of a command as it is run here, options in any order, without where it writes."""
    found: list[tuple[str, ...]] = [()]
    for word in shortened(command):
        found = [*found, (word,)] if word.startswith("--") else [*found[:-1], (*found[-1], word)]
    return frozenset(words for words in found if words[0] != "--out")


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


def different_commands() -> list[list[str]]:
    """Leave out commands that only write elsewhere than another, which writes."""
    found = {told_apart(command): command for command in sorted(commands(), key=lambda words: "--out" in words)}
    return list(found.values())


def make_recordings(folder: Path, *, record: bool) -> None:
    """What the commands of the recorder start from: a tiny model, prompts, and if asked for two traces with gate inputs."""
    pytest.importorskip("torch", reason="recorder commands need torch: the extra record")
    pytest.importorskip("transformers", reason="recorder commands need transformers: the extra record")
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
