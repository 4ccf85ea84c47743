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
    "policies": 13_739,  # 11,500; a layer's copies before its products; layers over GPUs
    "studies": 10_824,  # 7,500; hit rates without costs; long contexts and prompts of public rows; bytes alone
    "trace": 9_856,  # 7,200; imports of any table or JSON and of counts; lifts; depth, workloads, prompts; rates no set has
    "live": 6_137,  # 5,400; windows of layers; experts of three sizes; measurements that end in time; pairs by size
    "plots": 5_397,  # 4,300
    "experiment": 4_840,  # 3,300; routing nobody recorded, with its range; names of its limits; whose software costs; idle GPUs
    "cli": 3_653,  # with api 4,000; --axes of trace import, --counts of trace calibrate; trace caches, --hit-rate; engines
    "api": 1_235,  # what real speeds to expect; engines
    "recorder": 3_433,
    "metrics": 3_058,  # 2,600
    "hardware": 3_484,  # with model 4,000; engine profiles; read rates by size; one memory; shares of rates, rows; copies
    "model": 2_925,  # any config.json and GGUF header, layer by layer; other spellings of keys, caches that layers share
    "engine": 2_719,  # 1,800; kernels of more rows
    "core": 2_045,  # 1,100
    "testing": 3_204,  # 2,300 of them: rules of papers and codes, written a second time for the check of what policies decide
    "report": 892,
    TOP: 1_064,  # nearest names
    CPP: 6_055,  # 5,600
    TESTS: 59_017,  # 42,000; an architecture with recorded routing a row; long contexts; a machine measured whole; faults
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
