"""The page on bounds shows numbers of its file of assignment rules."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "background"
PAGE = (FOLDER / "bounds.md").read_text(encoding="utf-8")
FRAME = pd.read_csv(FOLDER / "assignments.csv")
COLUMNS = [("mixed", "32-64")]
RULES = ["queues", "queues, free first", "two-ended", "exact", "beam", "greedy", "threshold", "all-gpu", "all-cpu"]


def cell(row: pd.Series) -> str:
    return f"{row['mean']:.3f}, {row['worst']:.2f}, {100 * row['optimal']:.0f} %"


def page_table() -> str:
    known = FRAME[FRAME["kind"].isin(["rule", "bound"])].set_index(["regime", "active", "name"])
    heads = ["rule", *(f"{regime}, {active} experts" for regime, active in COLUMNS)]
    lines = ["| " + " | ".join(heads).strip() + " |", "|---|" + "---:|" * len(COLUMNS)]
    for name in [*RULES, "work and pipeline"]:
        cells = [cell(known.loc[(*column, name)]) for column in COLUMNS]
        shown = "bound: work and pipeline" if name not in RULES else name
        lines.append("| " + " | ".join([shown, *cells]) + " |")
    return "\n".join(lines) + "\n"


def test_the_table_is_that_of_the_file():
    assert page_table() in PAGE


def test_what_is_said_of_queues_holds_everywhere():
    mine = FRAME[(FRAME["kind"] == "rule") & (FRAME["name"] == "queues")]
    assert len(mine) == 15
    assert 1.0105 < mine["mean"].max() < 1.0115 and "within 1.1 % of the best" in PAGE
    assert 1.33 < mine["worst"].max() < 1.34 and "within 33 % at worst" in " ".join(PAGE.split())


def test_every_rule_was_tried_on_as_many_layers_as_the_page_says():
    assert set(FRAME["instances"]) == {1500} and "--instances 1500" in PAGE
    assert set(FRAME.loc[FRAME["kind"] == "rule", "name"]) == {*RULES, "queues, free first, CPU on ties"}
