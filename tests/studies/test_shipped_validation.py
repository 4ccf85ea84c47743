"""The validations that are shipped can be made again from what was measured, with today's simulator."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection
from pathlib import Path

import pandas as pd
import pytest

from moesim.cli.main import main
from moesim.core.data import data_dirs
from moesim.hardware import load_hardware

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = sorted((ROOT / "hardware_profiles").glob("*/validation"))
MEASURED = ["zen4-2core", "zen4-2core-disk"]


def test_there_is_one_for_each_measured_machine() -> None:
    assert [folder.parent.name for folder in FOLDERS] == MEASURED


def check_predictions(folder: Path, copy: Path, runs: Collection[int]) -> None:
    """Compare the shipped predictions of some runs with today's, to the last digit."""
    if not any((data / "mini-deepseek-v2-lite.safetensors").exists() for data in data_dirs("traces")):
        pytest.skip("the shipped trace mini-deepseek-v2-lite is not here")
    shutil.copytree(folder, copy)
    lines = (folder / "measurements.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (copy / "measurements.jsonl").write_text("".join(line for line in lines if json.loads(line).get("run", min(runs)) in runs))
    status = main(["validate", str(copy / "experiment.yaml"), "--out", str(copy), "--only-compare"])
    for name in ("results.csv", "residuals.csv"):
        shipped, today = (pd.read_csv(place / name, index_col="run") for place in (folder, copy))
        held = shipped.index.isin(runs)
        pd.testing.assert_frame_equal(today[today.index.isin(runs)], shipped[held], check_exact=True, check_dtype=False)
        assert held.sum() == len(runs)
    assert status == (0 if held.all() else 1), "what was not measured is told"


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
