"""The validations that are shipped can be made again from what was measured, with today's simulator."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest

from moesim.cli import main
from moesim.data import data_dirs
from moesim.hardware import load_hardware

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = sorted((ROOT / "hardware_profiles").glob("*/validation"))
MEASURED = ["zen4-2core", "zen4-2core-disk"]


def test_there_is_one_for_each_measured_machine() -> None:
    assert [folder.parent.name for folder in FOLDERS] == MEASURED


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.parent.name)
def test_predictions_are_those_of_today(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Equal to the last digit: else the simulator, the profile or the trace has changed, and the folder must be made anew."""
    if not any((data / "mini-deepseek-v2-lite.safetensors").exists() for data in data_dirs("traces")):
        pytest.skip("the shipped trace mini-deepseek-v2-lite is not here")
    copy = tmp_path / "validation"
    shutil.copytree(folder, copy)
    assert main(["validate", str(copy / "experiment.yaml"), "--out", str(copy), "--only-compare"]) == 0
    for name in ("results.csv", "residuals.csv"):
        pd.testing.assert_frame_equal(pd.read_csv(copy / name), pd.read_csv(folder / name), check_exact=True)
    assert "hits and bytes are equal in" in capsys.readouterr().out


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
