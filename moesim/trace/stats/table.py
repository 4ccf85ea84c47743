"""Statistics of a trace as ``moesim trace stats`` prints them."""

from __future__ import annotations

import json
from typing import Any

from moesim.core.table import Format, render, render_records
from moesim.trace.stats.report import Row, summary


def table(result: dict[str, Any], form: Format) -> str:
    """Write all statistics of a trace for people, or for programs; JSON has every layer."""
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
