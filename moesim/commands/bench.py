"""``moesim bench``: how fast the simulator itself is, and what policies take to decide."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from moesim.bench import CASES, DECIDING_MODEL, YARDSTICK, run_case, run_deciding
from moesim.table import Format, render, render_records


def bench(
    repeats: Annotated[int, typer.Option(min=1, help="Repeats; minimum and median are told.")] = 5,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Decode tokens of each run.", show_default="64; 16 with --policies")
    ] = None,
    policies: Annotated[bool, typer.Option("--policies", help="The time in decisions, of every policy.")] = False,
    form: Annotated[Format, typer.Option("-o", "--output-format", help="How to print it.")] = Format.TABLE,
) -> None:
    """Measure simulated expert runs per second beside bare SimPy timeouts per second, in turns in this process.

    A figure of one machine says nothing about another; the ratio does. The routing is made up. With --policies instead: the
    time in `decide` and `evict` of each policy for an expert run, beside that of dali, whose split is greedy.
    """
    if policies:
        _deciding(repeats, tokens or 16, form)
        return
    rows = [run_case(case, repeats, tokens or 64) for case in CASES]
    if form.for_programs:
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


def _deciding(repeats: int, tokens: int, form: Format) -> None:
    rows = run_deciding(repeats, tokens)
    if form.for_programs:
        sys.stdout.write(render_records([row.record() for row in rows], form))
        return
    columns = ["policy", "batch", "expert runs", "decide, ns a run", "evict, ns a run", f"both / {YARDSTICK}'s"]
    sys.stdout.write(render(columns, [row.cells() for row in rows], form, columns[1:]))
    sys.stdout.write(f"\nrouting: synthetic, of the shape of {DECIDING_MODEL}; half of the experts cached\n")
