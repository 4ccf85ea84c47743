"""``moesim bench``: how fast the simulator itself is, and what policies take to decide."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from moesim.cli.options import Printed, Simulator
from moesim.cli.outputs import show
from moesim.core.limits import REPEATS, TOKENS
from moesim.core.processes import usable_cores
from moesim.core.table import Format, render, render_records
from moesim.engine import chosen
from moesim.errors import ConfigError
from moesim.studies.bench import AXES, CASES, DECIDING_MODEL, YARDSTICK, measure_growth, measure_sweep, run_case, run_deciding

SWEEP_RUNS = 64
PEER = (
    "documented by its authors, not measured here: libCacheSim (0.3.5, description) replays over 20,000,000 requests/s; a "
    "request is one look into a cache, without time, links or devices"
)


def bench(
    repeats: Annotated[int, typer.Option(min=1, max=REPEATS.most, help="Repeats; minimum and median are told.")] = 5,
    tokens: Annotated[
        int | None, typer.Option(min=1, max=TOKENS.most, help="Decode tokens of each run.", show_default="64; 16 with --policies")
    ] = None,
    policies: Annotated[bool, typer.Option("--policies", help="The time in decisions, of every policy.")] = False,
    simulator: Simulator = None,
    sweeps: Annotated[bool, typer.Option("--sweeps", help="What sweeps cost next to their runs; what cores gain.")] = False,
    growth: Annotated[bool, typer.Option("--growth", help="How the cost grows with tokens, batch, experts and layers.")] = False,
    form: Printed = Format.TABLE,
) -> None:
    """Measure how fast the simulator is on this machine.

    Simulated expert runs per second and bare SimPy timeouts per second are measured in turns in this process.

    A figure of one machine says nothing about another; the ratio does. The routing is made up. With --policies instead: the
    time in `decide` and `evict` of each policy for an expert run, next to that of dali, whose split is greedy. With --sweeps: the
    time that a sweep takes for each run next to simulating it, and how much faster all cores are than one. With --growth: CPU
    time for an expert run over sizes; where cost is linear, the ratio stays near 1.

    Example: moesim bench --repeats 1 --tokens 2
    """
    if policies + sweeps + growth > 1:
        raise ConfigError("bench: expected one of --policies, --sweeps and --growth, got several")
    if growth:
        columns = ["varied", "value", "expert runs", "chosen by rows", "CPU time", "ns a run", "ns a choice", "a run / the first"]
        rows = list(measure_growth(repeats, tokens or max(AXES["tokens"])))
        _print(
            rows, columns, columns[1:], "; lru, half of the experts cached, records dropped; preparing the routing included", form
        )
    elif sweeps:
        cost = measure_sweep(SWEEP_RUNS, usable_cores(), repeats, tokens or 64)
        columns = ["runs", "one run", "one process", f"{cost.processes} processes", "speed-up", "overhead a run"]
        _print([cost], columns, columns, "; starting the processes included", form)
    elif policies:
        columns = ["policy", "batch", "expert runs", "decide, ns a run", "evict, ns a run", f"both / {YARDSTICK}'s"]
        note = f", of the shape of {DECIDING_MODEL}; half of the experts cached"
        _print(run_deciding(repeats, tokens or 16), columns, columns[1:], note, form)
    else:
        measured = [run_case(case, repeats, tokens or 64) for case in CASES]
        columns = ["case", "expert runs", "runs/s best", "median", "timeouts/s best", "timeouts a run best", "median"]
        columns.append("simulated/wall")
        _print(measured, columns, columns[1:], f"; batch 1 unless named, half of the experts cached\n{PEER}", form)


def _print(rows: Sequence[Any], columns: Sequence[str], right: Sequence[str], note: str, form: Format) -> None:
    if form.for_programs:
        sys.stdout.write(render_records([row.record() if hasattr(row, "record") else asdict(row) for row in rows], form))
    else:
        table = render(columns, [row.cells() for row in rows], form, right)
        show(f"{table}\nengine: {chosen()}; routing: synthetic{note}\n", form)
