"""``moesim trace stats``: what the routing of a trace is like."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moesim.api.outputs import check_out_folder
from moesim.cli.outputs import write_beside
from moesim.core.limits import COUNT
from moesim.core.table import Format, render, render_records
from moesim.core.text import say
from moesim.trace import Trace, find_trace

if TYPE_CHECKING:
    from moesim.trace.stats.report import Row


def trace_stats(
    trace: Annotated[str, typer.Argument(help="Name or path of a trace.")],
    phase: Annotated[str | None, typer.Option(help="decode or prefill; default: decode, unless it has none.")] = None,
    max_rows: Annotated[int | None, typer.Option(min=1, max=COUNT.most, help="Stop after about so many tokens.")] = None,
    form: Annotated[Format, typer.Option("-o", "--output-format", help="How to print it; json has every layer.")] = Format.TABLE,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="DIR", help="Draw the figures into DIR, as PNG and PDF."),
    ] = None,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="No progress bar.")] = False,
) -> None:
    """Describe the routing of a trace: balance, locality, prediction, caches, batching.

    Example: moesim trace stats mini-mixtral --max-rows 200
    """
    from moesim.trace.stats.report import report

    if plot is not None:
        check_out_folder(plot, option="--plot")
    found = Trace.read(find_trace(trace))
    if "incomplete" in found.header:
        so_far = found.header["incomplete"]
        say(f"{trace}: partial, {so_far['recorded']} of {so_far['planned']} requests so far")
    result = {"trace": trace, **report(found, phase, max_rows=max_rows, show_progress=not quiet)}
    sys.stdout.write(_text(result, form))
    if plot is not None:
        from moesim.plots.trace_report import draw, left_out  # Matplotlib takes most of a second to import

        write_beside(plot, draw(result), "trace stats")
        for name, why in left_out(result).items():
            say(f"{name}: left out, {why}")


def _text(result: dict[str, Any], form: Format) -> str:
    from moesim.trace.stats.report import summary

    if form is Format.JSON:
        return json.dumps(result, indent=2) + "\n"
    if form.for_programs:
        return render_records([row._asdict() for row in summary(result, full=True)], form)
    rows = [["trace", figure, value, "", ""] for figure, value in _facts(result)]
    rows += [_cells(row) for row in summary(result)]
    for i in range(len(rows) - 1, 0, -1):  # the name of a group stands in its first row
        if rows[i][0] == rows[i - 1][0]:
            rows[i][0] = ""
    return render(["", "figure", "value", "beside", "note"], rows, form, ["value", "beside"])


def _facts(result: dict[str, Any]) -> list[tuple[str, str]]:
    shape = result["shape"]
    return [
        ("name", result["trace"]),
        ("routing of", f"{result['model']} ({result['label']})"),
        *(("next to what was recorded", remark) for remark in result["remarks"]),
        ("layers x experts, top_k", f"{shape['n_layers']} x {shape['n_experts']}, {shape['top_k']}"),
        (f"{result['phase']} tokens", str(result["n_rows"]) + (" (a sample)" if result["sampled"] else "")),
        ("requests", str(result["n_requests"])),
    ]


def _cells(row: Row) -> list[str]:
    note = "; ".join(part for part in (row.which_is and f"beside: {row.which_is}", row.note) if part)
    return [row.question, row.figure, _number(row.value), _number(row.beside) if row.which_is else "", note]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:z.4f}"
