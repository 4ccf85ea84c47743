"""The tables of the league's page are those of its CSV."""

from __future__ import annotations

from experiments.research.tables.league_tables import ROOT, rows_of, tables

PAGE = ROOT / "docs" / "background" / "league.md"


def test_the_page_has_the_tables_of_the_csv():
    text = PAGE.read_text(encoding="utf-8")
    for table in tables(rows_of()).split("\n\n"):
        assert table.strip() in text


def test_a_cell_says_what_undoes_its_order_and_how_fast_the_best_rule_is():
    cell = {
        "hardware": "a+b", "model": "m (bits)", "batch_size": "1", "phase": "decode", "best": "x", "speed": "12.34",
        "margin": "1.2", "certain": "False", "undone_by": "requests; costs", "rule_best": "r", "rule_over_best": "0.9",
        "rule_certain": "True",
    }  # fmt: skip
    found = tables([cell, cell | {"phase": "prompt", "speed": "4", "certain": "True", "undone_by": ""}])
    assert "| a | m | x 12.3, x1.20 rc; r x0.90 |" in found
    assert "| a | m | **x** 0.25 s, x1.20; r x0.90 |" in found
    assert "| `x` | 1 (0) | 1 (1) |" in found
