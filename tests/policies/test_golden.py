"""Golden results: the exact records of every policy and of every part. A change that moves one of them must say why.

``pytest tests/policies/test_golden.py --regenerate -m ''`` writes ``tests/policies/golden.json`` anew.
With ``-k lru`` it writes only the selected cases; read the difference in review. The cases are in ``golden_kit.py`` next to it.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from moesim.engine.native import AVAILABLE
from moesim.policies.registry import PARTS, POLICIES
from moesim.records import InexactRecord
from tests.policies.golden_kit import CASES, COMPOSITIONS, SETTINGS, digest, golden, run_case

SCIPY = "1.17."
GOLDEN = Path(__file__).parent / "golden.json"
REMEDY = "if the change is meant, run this test with --regenerate -m '' and say why"


@cache
def read() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    return found


def write(results: dict[str, Any]) -> None:
    GOLDEN.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")
    read.cache_clear()


# Played on the native engine each time, those of LONGER not, and on the reference by `make test-long`.
LONG = {"no contention", "chunks", "decision time", "two micro-batches", "fine-grained"}
LONGER = {"chunks", "decision time", "fine-grained"}
NATIVE = pytest.mark.skipif(not AVAILABLE, reason="not built")
RUNS = [
    pytest.param(key, engine, marks=marks, id=f"{key}-{engine}")
    for key, case in CASES.items()
    for engine, marks in (
        ("simpy", [pytest.mark.long] if AVAILABLE and case.setting in LONG else []),
        ("native", [NATIVE, *([pytest.mark.long] if case.setting in LONGER else [])]),
    )
]


@pytest.mark.parametrize(("key", "engine"), RUNS)
def test_golden(key: str, engine: str, regenerate: bool):
    if regenerate and engine != "simpy":
        pytest.skip("golden results are the reference's")
    if " + exact + " in key and not version("scipy").startswith(SCIPY):
        pytest.skip(f"which of several optima SciPy finds depends on its release; recorded with {SCIPY}")
    found, kept = golden(run_case(CASES[key], engine)), read()
    if regenerate:
        write(kept | {key: found})
        return
    assert key in kept, f"{key}: not in {GOLDEN.name}; run this test with --regenerate"
    moved = [name for name in kept[key] | found if kept[key].get(name) != found.get(name)]
    lines = [f"{name}: {kept[key].get(name)} -> {found.get(name)}" for name in moved]
    assert not moved, "\n  ".join([f"{key} moved; {REMEDY}:", *lines])


def test_every_policy_and_every_part_has_golden_results(regenerate: bool):
    kept = read()
    if regenerate:
        write({key: kept[key] for key in CASES if key in kept})  # without those of cases that are gone
    missing = [key for name in POLICIES for setting in SETTINGS if (key := f"{name}, {setting}") not in kept]
    assert not missing, f"not in {GOLDEN.name}: {missing}; run this test with --regenerate"
    assert set(read()) <= set(CASES), f"no longer cases: {set(read()) - set(CASES)}; run this test with --regenerate"
    used = {(kind, spec["name"] if isinstance(spec, dict) else spec)
            for composition in COMPOSITIONS.values() for kind, spec in composition.items() if kind in PARTS}  # fmt: skip
    lacking = {(kind, name) for kind, names in PARTS.items() for name in names} - used
    assert not lacking, f"in no composition of golden_kit.py: {sorted(lacking)}; add one"


@pytest.mark.parametrize("name", ["dali", "hybrimoe-paper", "fiddler", "prescope"])
def test_contention_changes_what_uses_the_cpu_and_the_link_at_once(name: str):
    kept = read()
    assert kept[f"{name}, contention"]["makespan_ns"] > kept[f"{name}, no contention"]["makespan_ns"]


def test_a_digest_sees_every_column_and_the_order():
    rows = [InexactRecord(0, 1, "stale", 2, 0.25), InexactRecord(0, 2, "skipped", 1, None)]
    assert digest(rows) == "659066045ef955bd"
    others: list[dict[str, Any]] = [{"step": 1}, {"layer": 3}, {"kind": "substituted"}, {"slots": 3}, {"mass": 0.5}]
    assert {next(iter(change)) for change in others} == set(InexactRecord._fields)
    changed = [[rows[0]._replace(**change), rows[1]] for change in others]
    assert len({digest(one) for one in [rows, rows[::-1], *changed]}) == 7
