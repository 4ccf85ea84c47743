"""The shipped validations, predicted again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection
from pathlib import Path

import pandas as pd
import pytest

from moesim.cli.main import main
from moesim.core.data import data_dirs

ROOT = Path(__file__).resolve().parents[2]


FOLDERS = sorted((ROOT / "hardware_profiles").glob("*/validation"))


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
        newer = [one for one in today if one not in shipped and (one == "engine_profile" or today[one].isna().all())]
        today = today.drop(columns=newer)  # settings newer than some
        held = shipped.index.isin(runs)
        pd.testing.assert_frame_equal(today[today.index.isin(runs)], shipped[held], check_exact=True, check_dtype=False)
        assert held.sum() == len(runs)
    assert status == (0 if held.all() else 1), "what was not measured is told"
