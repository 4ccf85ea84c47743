"""Print the table of the page of the league from its CSV."""

from __future__ import annotations

import csv
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from experiments.research.tables.command import parser, run
from moesim.core.table import Format, render

ROOT: Final = Path(__file__).resolve().parents[3]
CSV: Final = ROOT / "docs" / "background" / "league.csv"
Row = Mapping[str, str]
_LETTERS: Final = {"requests": "r", "costs": "c", "routing": "l", "no second system": "-"}
"""What undoes an order, in a cell."""


def rows_of(path: Path = CSV) -> list[Row]:
    """Read the cells."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def decoding(rows: Sequence[Row]) -> str:
    """Write the fastest engine at decoding by machine and model."""
    mine = [row for row in rows if row["phase"] == "decode" and row["best"]]
    batches = sorted({int(row["batch_size"]) for row in mine})
    at = {(row["hardware"], row["model"], int(row["batch_size"])): row for row in mine}
    lines = [
        [_machine(machine), _model(model), *(_cell(at.get((machine, model, one))) for one in batches)]
        for machine, model in dict.fromkeys((row["hardware"], row["model"]) for row in mine)
    ]
    head = ["machine", "model", *(f"{one} request{'s' * (one > 1)}" for one in batches)]
    return render(head, lines, Format.MD)


def _machine(label: str) -> str:
    return label.partition("+")[0]


def _model(label: str) -> str:
    return label.partition(" (")[0]


def _cell(row: Row | None) -> str:
    """Write the best engine with its tokens/s, its margin and what undoes the order."""
    if row is None:
        return ""
    undone = "".join(_LETTERS[one] for one in row["undone_by"].split("; ") if one)
    margin = f"x{float(row['margin']):.2f}" if row["margin"] else ""
    best = f"**{row['best']}**" if not undone else row["best"]
    return f"{best} {float(row['speed']):.3g}, {margin}{f' {undone}' if undone else ''}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    options = parser("experiments.research.tables.league_tables", __doc__)
    return run(_printed, options, arguments)


def _printed(given: Namespace) -> None:
    sys.stdout.write(decoding(rows_of()))


if __name__ == "__main__":
    sys.exit(main())
