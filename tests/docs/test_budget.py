"""Lines of Python and C++, by package: above its row a test fails.

Raising a row is a change of its own, with the reason next to the number.
"""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "moesim"
TOP, CPP, TESTS = "files at the top", "C++", "tests"

LINES = {  # what a package may have today; behind it what it is to come down to
    "policies": 15_311,  # 11,500; five systems of 2026: windows, tiers with disks, gated and early uploads; moves; misspelt names
    "studies": 13_583,  # 7,500; one screen, pasted speeds, support, parts to vary; measured engines; load; drafts; league tables
    "trace": 10_208,  # 7,200; imports of any table or JSON, counts; lifts; depth, prompts; rates; served keys; KV cache
    "live": 6_087,  # 5,400; windows of layers; experts of three sizes; measurements that end in time; pairs by size
    "plots": 6_108,  # 4,300; latency by load, goodput, requests over time; the best setting; texts never collide; panels
    "experiment": 5_164,  # 3,300; routing nobody recorded, with its range; limits; whose software costs; requests of each run
    "cli": 3_063,  # with api 4,000; explore; pastes, one screen, engines; capacity, schedulers; what a mistyped word meant
    "api": 3_330,  # engines; answers without a machine; capacity, requests of a result; all verbs, with their docstrings
    "recorder": 3_435,
    "metrics": 3_265,  # 2,600; of requests, as serving benchmarks define them
    "hardware": 5_132,  # with model 4,000; machines from parts and pastes; what engines do on the host; drafts
    "model": 3_009,  # any config.json and GGUF header, layer by layer; other spellings of keys, caches that layers share
    "engine": 2_798,  # 1,800; kernels of more rows; work of the host; steps made as it runs; KV cache in part elsewhere
    "core": 2_230,  # 1,100; bytes of a paste; how systems copy; classes of one's own, which were in policies
    "testing": 3_610,  # 2,300 of them: rules of papers and codes, written a second time for checks of decisions
    "reporting": 1_193,  # who wins where, in one sentence; what a filter is compared with
    "explore": 1_297,  # 900; what a person chooses, types, sees and copies; what would make a model fit, usual upgrades
    "serving": 3_070,  # arrivals, files of requests and of sessions, seven schedulers and one's own, KV cache in blocks, drafts
    TOP: 1_654,  # nearest names; KV cache of any policy; profile, which was in api
    CPP: 6_112,  # 5,600
    TESTS: 66_708,  # 42,000; parts, pastes, answers, requests, sessions; words of pages, commands that guides open with
}


def lines_of(folder: Path, *patterns: str) -> int:
    files = {path for pattern in patterns for path in folder.rglob(pattern)}
    return sum(path.read_bytes().count(b"\n") for path in files)


def lines_now() -> dict[str, int]:
    found = {path.name: lines_of(path, "*.py") for path in sorted(PACKAGE.iterdir()) if (path / "__init__.py").exists()}
    found[TOP] = sum(path.read_bytes().count(b"\n") for path in PACKAGE.glob("*.py"))
    found[CPP] = lines_of(PACKAGE, "*.cpp", "*.hpp")
    found[TESTS] = lines_of(ROOT / "tests", "*.py")
    return found


@pytest.mark.parametrize("package", lines_now())
def test_a_package_stays_within_its_budget(package: str):
    assert lines_now()[package] <= LINES[package]


def test_every_row_is_of_a_package():
    assert set(LINES) == set(lines_now())
