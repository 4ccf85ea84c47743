"""Print the tables of the page of the league from its CSV."""

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


def tables(rows: Sequence[Row]) -> str:
    """Write decoding and prompts by machine and model, then who is the best in how many cells."""
    found = []
    for phase in ("decode", "prompt"):
        mine = [row for row in rows if row["phase"] == phase and row["best"]]
        batches = sorted({int(row["batch_size"]) for row in mine})
        at = {(row["hardware"], row["model"], int(row["batch_size"])): row for row in mine}
        head = ["machine", "model", *(f"{phase}, batch {one}" for one in batches)]
        lines = [
            [_machine(machine), _model(model), *(_cell(at.get((machine, model, one))) for one in batches)]
            for machine, model in dict.fromkeys((row["hardware"], row["model"]) for row in mine)
        ]
        found.append(render(head, lines, Format.MD))
    counted = [_counts(rows, kind) for kind in ("", "rule_")]
    return "\n".join([*found, *counted])


def _counts(rows: Sequence[Row], kind: str) -> str:
    """Write who is the best of a kind in how many cells, and in how many of these that is certain."""
    batches = sorted({row["batch_size"] for row in rows}, key=int)
    columns = [(phase, batch) for phase in ("decode", "prompt") for batch in batches]
    won: dict[str, dict[tuple[str, str], list[bool]]] = {}
    for row in rows:
        if name := row[f"{kind}best"]:
            at = won.setdefault(name, {}).setdefault((row["phase"], row["batch_size"]), [])
            at.append(row[f"{kind}certain"] == "True")
    ordered = sorted(won, key=lambda name: -sum(map(len, won[name].values())))
    lines = [
        [f"`{name}`", *(f"{len(one)} ({sum(one)})" if (one := won[name].get(column)) else "" for column in columns)]
        for name in ordered
    ]
    head = ["rule, if built" if kind else "engine", *(f"{phase}, batch {batch}" for phase, batch in columns)]
    return render(head, lines, Format.MD, head[1:])


def _machine(label: str) -> str:
    return label.partition("+")[0]


def _model(label: str) -> str:
    return label.partition(" (")[0]


def _cell(row: Row | None) -> str:
    """Write the best engine with its speed, its margin and what undoes it, then the best rule over it."""
    if row is None:
        return ""
    speed = float(row["speed"])
    shown = f"{speed:.3g}" if row["phase"] == "decode" else f"{1 / speed:.3g} s"
    undone = "".join(_LETTERS[one] for one in row["undone_by"].split("; ") if one)
    margin = f"x{float(row['margin']):.2f}" if row["margin"] else ""
    best = f"**{row['best']}**" if not undone else row["best"]
    first = f"{best} {shown}, {margin}{f' {undone}' if undone else ''}"
    return first + (f"; {row['rule_best']} x{float(row['rule_over_best']):.2f}" if row["rule_over_best"] else "")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables."""
    options = parser("experiments.research.tables.league_tables", __doc__)
    return run(_printed, options, arguments)


def _printed(given: Namespace) -> None:
    sys.stdout.write(tables(rows_of()))


if __name__ == "__main__":
    sys.exit(main())
