"""The validations that are shipped can be made again from what was measured, with today's simulator."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from moesim.hardware import load_hardware
from tests.studies.shipped_kit import FOLDERS, ROOT, check_predictions

MEASURED = ["zen4-2core", "zen4-2core-disk"]


def test_there_is_one_for_each_measured_machine() -> None:
    assert [folder.parent.name for folder in FOLDERS] == MEASURED


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.parent.name)
def test_predictions_are_those_of_today(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Equal to the last digit: else the simulator, the profile or the trace has changed, and the folder must be made anew.

    Each policy in one setting; the long suite has them all.
    """
    policies = pd.read_csv(folder / "results.csv")["policy"].tolist()
    n = len(set(policies))
    runs = [run for run in range(len(policies)) if (run + run // n) % (len(policies) // n) == 0]
    assert {policies[run] for run in runs} == set(policies)
    check_predictions(folder, tmp_path / "validation", runs)
    out = capsys.readouterr().out
    assert "hits and bytes are equal in" in out
    assert "changed since it was measured" not in out, "inputs are told by what is in them, not by the name of a file"


@pytest.mark.parametrize("name", MEASURED)
def test_measured_profiles_have_their_samples(name: str) -> None:
    profile = load_hardware(name)
    folder = ROOT / "hardware_profiles" / name.removesuffix("-disk")  # one measurement gives both
    assert profile.machine["cores"]
    costs = [n for key, n in profile.numbers.items() if not key.endswith("memory_bytes") and not key.startswith("contention")]
    assert {number.source for number in costs} == {"measured"}
    samples = pd.read_csv(folder / "samples.csv")
    report = json.loads((folder / "measurement.json").read_text(encoding="utf-8"))
    repeats = samples[~samples["kind"].isin(["sentinel"])].groupby(
        ["kind", "device", "subject", "threads", "variant", "size"], dropna=False
    )
    assert repeats["repeat"].nunique().min() == report["repeats"] >= 5
    assert (folder / "curves.png").stat().st_size > 10_000
