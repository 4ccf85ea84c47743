"""Records of the first steps: the timeline that they give is that of all records, and they stand for no more steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from moesim.experiment import runner
from moesim.experiment.runner import FirstSteps
from moesim.experiment.store import Store
from moesim.hardware import load_hardware
from moesim.metrics.timeline import timeline_events
from moesim.records import Records
from tests.policies.golden_kit import CASES, run_case

NAMES = [name for name in CASES if name.startswith(("lru", "dali,", "hybrimoe-paper", "pre-gated", "moe-infinity-code"))]


def beginning_of(name: str, n_steps: int, engine: str | None = None) -> Records:
    first = FirstSteps(n_steps)
    return first.of(run_case(CASES[name], engine, sink=first.add, piece=1))


@pytest.mark.parametrize("name", NAMES)
def test_the_first_steps_of_a_long_run(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runner, "LEAST_TASKS", 0)
    whole, hardware = run_case(CASES[name]), load_hardware(CASES[name].machine)
    cut = beginning_of(name, 2)
    assert cut.first_steps == 2 <= len(cut.steps) < len(whole.steps)
    assert (cut.makespan_ns, cut.peak_bytes) == (whole.makespan_ns, whole.peak_bytes)
    assert timeline_events(cut, hardware, (0, 1)) == timeline_events(whole, hardware, (0, 1))


@pytest.mark.parametrize("engine", ["simpy", "native"])
def test_a_short_run_is_kept_as_a_whole(engine: str):
    name = NAMES[0]
    assert beginning_of(name, 2, engine) == run_case(CASES[name])


def test_a_result_folder_gives_what_is_there(tmp_path: Path):
    store, records = Store(tmp_path / "out"), run_case(CASES[NAMES[0]])
    store.add_records("aa", records)
    store.add_records("bb", replace(records, first_steps=3))
    assert store.records("aa") == store.records("aa", 9) == records
    assert store.records("bb") is store.records("bb", 4) is None
    assert store.records("bb", 3) == replace(records, first_steps=3)
