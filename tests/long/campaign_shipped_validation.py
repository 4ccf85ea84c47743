"""The shipped validations, whole: every policy in every setting, where the common suite takes each policy in one."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from tests.studies.shipped_kit import FOLDERS, check_predictions


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.parent.name)
def test_all_predictions_are_those_of_today(folder: Path, tmp_path: Path) -> None:
    check_predictions(folder, tmp_path / "validation", range(len(pd.read_csv(folder / "results.csv"))))
