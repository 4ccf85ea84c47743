"""The table and the counts of the league's page are those of its CSV."""

from __future__ import annotations

import pytest

from experiments.research.tables.league_tables import ROOT, decoding, rows_of

PAGE = (ROOT / "docs" / "background" / "league.md").read_text(encoding="utf-8")
CELL = {
    "hardware": "a+b", "model": "m (bits)", "batch_size": "1", "phase": "decode", "best": "x", "speed": "12.34",
    "margin": "1.2", "certain": "False", "undone_by": "requests; costs",
}  # fmt: skip
WORDS = ["none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def test_the_page_has_the_table_of_the_csv():
    assert decoding(rows_of()) in PAGE


def test_a_cell_says_what_undoes_its_order():
    assert "| a | m | x 12.3, x1.20 rc |" in decoding([CELL, CELL | {"phase": "prompt"}])
    assert "| a | m | **x** 12.3, x1.20 |" in decoding([CELL | {"undone_by": ""}])


@pytest.mark.parametrize(
    ("engine", "phase", "batch", "said"),
    [
        ("freetoken", "decode", "4", "FreeToken leads in {} cells and is certain in {}"),
        ("strata", "decode", "4", "Strata in {} and certain in {}"),
        ("dfa-cache", "decode", "16", "`dfa-cache` leads in {} of ten cells and is certain in {}"),
        ("exllamav3", "prompt", "", "exllamav3 leads in {} of 32 cells and is certain in {}"),
    ],
)
def test_counts_of_the_page_are_those_of_the_csv(engine: str, phase: str, batch: str, said: str):
    won = [one for one in rows_of() if one["best"] == engine and one["phase"] == phase and batch in ("", one["batch_size"])]
    counts = len(won), sum(one["certain"] == "True" for one in won)
    assert said.format(*(WORDS[n] if n < len(WORDS) else n for n in counts)) in " ".join(PAGE.split())
