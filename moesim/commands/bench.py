"""``moesim bench``: how fast the simulator itself is."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from moesim.bench import CASES, run_case
from moesim.table import Format, render, render_records


def bench(
    repeats: Annotated[int, typer.Option(min=1, help="Repeats; minimum and median are told.")] = 5,
    tokens: Annotated[int, typer.Option(min=1, help="Decode tokens of each run.")] = 64,
    form: Annotated[Format, typer.Option("-o", "--output-format", help="How to print it.")] = Format.TABLE,
) -> None:
    """Measure simulated expert runs per second beside bare SimPy timeouts per second, in turns in this process.

    A figure of one machine says nothing about another; the ratio does. The routing is made up.
    """
    rows = [run_case(case, repeats, tokens) for case in CASES]
    if form in (Format.CSV, Format.JSON):
        sys.stdout.write(render_records([row.record() for row in rows], form))
        return
    columns = [
        "case",
        "expert runs",
        "runs/s best",
        "median",
        "timeouts/s best",
        "timeouts a run best",
        "median",
        "simulated/wall",
    ]
    sys.stdout.write(render(columns, [row.cells() for row in rows], form, columns[1:]))
    sys.stdout.write("\nrouting: synthetic; batch 1, half of the experts cached\n")
