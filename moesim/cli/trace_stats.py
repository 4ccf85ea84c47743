"""``moesim trace stats``: what the routing of a trace is like."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moesim.api.outputs import check_out_folder
from moesim.cli.outputs import show, write_beside
from moesim.core.limits import COUNT
from moesim.core.table import Format
from moesim.core.text import say


def trace_stats(
    trace: Annotated[str, typer.Argument(help="Name or path of a trace.")],
    phase: Annotated[str | None, typer.Option(help="decode or prefill; default: decode, unless it has none.")] = None,
    max_rows: Annotated[int | None, typer.Option(min=1, max=COUNT.most, help="Stop after about so many tokens.")] = None,
    form: Annotated[Format, typer.Option("-o", "--output-format", help="How to print it; json has every layer.")] = Format.TABLE,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="DIR", help="Draw the figures into DIR, as PNG and PDF."),
    ] = None,
) -> None:
    """Describe a trace: balance, locality, prediction, caches.

    Example: moesim trace stats mini-mixtral --max-rows 200
    """
    from moesim.api.traces import stats

    if plot is not None:
        check_out_folder(plot, option="--plot")
    found = stats(trace, phase=phase, max_rows=max_rows)
    for note in found.notes:
        say(note)
    show(found.text(form), form)
    if plot is not None:
        write_beside(plot, found.figures(), "trace stats")
        for name, why in found.left_out().items():
            say(f"{name}: left out, {why}")
