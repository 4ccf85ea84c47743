"""The page of results says what its table says."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import pytest

from moesim.studies.published import PUBLISHED, paper_folder, read_published
from moesim.studies.three_ways import published, read_results, summaries

DOCS = Path(__file__).resolve().parents[1] / "docs"
FRAME = read_results(DOCS / "results.csv")
PAGE = (DOCS / "results.md").read_text(encoding="utf-8")
NAMES = {"dali": "DALI", "hybrimoe": "HybriMoE", "prescope": "PreScope", "daop": "DAOP", "odmoe": "OD-MoE"}


def lines(text: str) -> list[list[str]]:
    """Give the cells of the tables in a text, without headings."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return [row for row, after in zip(rows, [*rows[1:], None], strict=True) if not _rule(row) and not _rule(after)]


def _rule(row: list[str] | None) -> bool:
    return row is not None and set("".join(row)) <= set("-:")


def number(value: float) -> str:
    return "-" if pd.isna(value) else f"{value:.3g}"


def test_the_table_has_every_printed_number_as_it_is_now():
    rows = read_published(paper_folder() / PUBLISHED)
    assert [published(row) for _, row in FRAME.iterrows()] == rows


def test_the_summary_is_that_of_the_table():
    found = {cells[0]: cells[1:] for cells in lines(PAGE.partition("\n## ")[0])}
    for one in summaries(FRAME):
        cells = found[NAMES[one.paper]]
        assert cells[:2] == [str(one.rows), "{:.2f}, {:.2f}".format(*one.derived)]
        if one.identified is not None and one.consistent is not None:
            assert cells[2] == f"{one.told}: {one.identified[0]:.2f}, {one.identified[1]:.2f}"
            assert cells[3] == f"{one.inconsistent}; {one.consistent[1]:.2f}"
        orders = (*one.orders, *one.orders_identified)
        assert cells[4] == "{} of {}; {} of {}".format(*orders)


@pytest.mark.parametrize("paper", NAMES)
def test_every_line_of_a_section_is_a_row_of_the_table(paper: str):
    section = re.split(rf"^## {NAMES[paper]}$", PAGE, flags=re.M)[1].partition("\n## ")[0]
    rows = FRAME[FRAME["paper"] == paper]
    known = {
        (f"{number(row['published'])} {row['unit'] if row['unit'] != 'share' else ''}".strip(), number(row["simulated"]),
         number(row["identified"]), "inconsistent" if row["consistent"] == "no" else "")
        for _, row in rows.iterrows()
    }  # fmt: skip
    told = lines(section)
    assert len(told) > 5
    for _, printed, derived, identified, _, word in told:
        assert (printed, derived, identified, word) in known
