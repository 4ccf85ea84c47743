"""The page of measured engines has the sums of its table."""

from __future__ import annotations

import pandas as pd

from experiments.research.tables.engines_measured import CSV, PAGE, by_engine
from moesim.studies.validation.engines import engines_file

FRAME = pd.read_csv(CSV)
DONE = FRAME[FRAME["predicted"].notna()]


def test_the_page_has_the_sums_of_the_table() -> None:
    assert by_engine(DONE) in PAGE.read_text(encoding="utf-8")


def test_every_measured_row_is_predicted_or_skipped_with_a_reason() -> None:
    n_rows = len(pd.read_csv(engines_file()))
    assert len(FRAME) == n_rows == len(DONE) + FRAME["skipped"].notna().sum()


def test_sums_move_with_a_prediction() -> None:
    assert by_engine(DONE.assign(error=2 * DONE["error"])) != by_engine(DONE)
