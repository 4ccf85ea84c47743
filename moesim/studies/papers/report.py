"""The output of `moesim papers`: figures, orders, policies against each first one, gaps."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from shutil import get_terminal_size
from textwrap import fill
from typing import Any

from moesim.core.table import Format, render, render_records
from moesim.metrics.fidelity import fresh_cell
from moesim.policies.registry import policy_info
from moesim.studies.papers.compare import Agreement, Compared, Figure, Variant
from moesim.studies.papers.published import BOUNDS

HEADINGS = ["figure", "what", "printed", "simulated", "range", "runs", "ratio", "costs", "routing", "remark"]
RIGHT = HEADINGS[2:7]


def report(
    compared: Sequence[Compared], ranks: Sequence[Agreement], beside: Sequence[Variant], form: Format, *, small: bool = False
) -> str:
    """Write all that was found."""
    if form not in (Format.TABLE, Format.MD):
        return render_records(records(compared, ranks, small), form)
    parts = [_figure_table([_cells(one) for one in compared], form)] if compared else []
    if ranks:
        columns = ["figure", "order of", "as printed", "simulated", "in the wrong order"]
        parts.append(render(columns, [_rank_cells(one) for one in ranks], form))
    if beside:
        parts.append(_variant_table(beside, form))
    parts.append(_notes(compared, small, "\n\n" if form is Format.MD else "\n"))
    return "\n".join(part for part in parts if part)


def records(compared: Sequence[Compared], ranks: Sequence[Agreement], small: bool) -> list[dict[str, Any]]:
    """Return a record a figure, then a record an order."""
    figures = [{"table": "figure", **one.record(), "quick": small} for one in compared]
    return [*figures, *({"table": "rank", **one.record(), "quick": small} for one in ranks)]


def _figure_table(rows: list[list[str]], form: Format) -> str:
    room = get_terminal_size().columns if form is Format.TABLE and sys.stdout.isatty() else None
    widths = [max(map(len, column)) + 2 for column in zip(HEADINGS, *rows, strict=True)]
    if room is None or sum(widths) - 2 <= room:
        return render(HEADINGS, rows, form, RIGHT)
    notes = {text: str(number) for number, text in enumerate(dict.fromkeys(row[-1] for row in rows if row[-1]), 1)}
    table = render([*HEADINGS[:-1], "note"], [[*row[:-1], notes.get(row[-1], "")] for row in rows], form, RIGHT)
    below = [fill(f"{n} {text}", room, subsequent_indent=" " * (len(n) + 1), break_long_words=False) for text, n in notes.items()]
    return "\n".join([table, *below]) + "\n"


def listing(known: Iterable[Figure], n_runs: Mapping[str, int], form: Format) -> str:
    """List figures with what is run for them."""
    records: list[dict[str, Any]] = [
        {
            "figure": f"{one.paper}/{one.name}",
            "ref": one.ref,
            "printed": len(one.rows),
            "comparable": sum(bool(row.source) for row in one.rows),
            "experiments": ", ".join(f"{name}.yaml" for name in one.experiments),
            "runs": sum(n_runs[name] for name in one.experiments),
        }
        for one in known
    ]
    if form not in (Format.TABLE, Format.MD):
        return render_records(records, form)
    columns = list(records[0])
    rows = [[str(value) if value != "" else "-" for value in record.values()] for record in records]
    note = "printed: numbers in the table; comparable: those that runs, a trace or a profile answers\n"
    return render(columns, rows, form, ["printed", "comparable", "runs"]) + "\n" + note


def _variant_table(found: Sequence[Variant], form: Format) -> str:
    columns = ["experiment", "policy", "settings", "decode speed", "range", "prefill speed", "fresh %"]
    rows = [
        [one.experiment, one.policy, str(one.n_settings), _share(one.decode),
         "" if one.low is None else f"{_share(one.low)} to {_share(one.high)}", _share(one.prefill),
         "" if one.fidelity is None else fresh_cell(one.fidelity)]
        for one in found
    ]  # fmt: skip
    note = "decode and prefill speed: as shares of the first policy of the experiment, geometric mean over its settings\n"
    return render(columns, rows, form, columns[2:]) + "\n" + note


def _number(value: float) -> str:
    return f"{value:z.3g}" if abs(value) < 1000 else f"{value:.0f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _cells(one: Compared) -> list[str]:
    row = one.published
    bound = f"{row.kind} " if row.kind in BOUNDS else ""
    printed = f"{bound}{row.published:g} {row.unit}"
    head = [row.name + (f" ({row.ref})" if row.ref else ""), row.what, printed]
    if one.simulated is None or one.low is None or one.high is None or one.ratio is None:
        return [*head, "no run of it" if row.source else "not yet comparable", "", "", "", "", "", row.remark]
    span = f"{_number(one.low)} to {_number(one.high)}" if one.n_runs > 1 else ""
    ratio = ("holds" if one.agrees else "does not hold") if row.kind in BOUNDS else f"{one.ratio:.2f}"
    why = f"differs: {row.why}" if row.why and not one.agrees else ""
    remark = "; ".join(part for part in (row.remark, why) if part)
    return [*head, _number(one.simulated), span, str(one.n_runs), ratio, one.costs, one.routing, remark]


def _rank_cells(one: Agreement) -> list[str]:
    what = one.quantity + (f", {one.setting}" if one.setting else "") + (f" [{one.reading}]" if one.reading else "")
    return [f"{one.paper}/{one.figure}", what, one.order, f"{one.verdict} (n = {len(one.systems)})", one.amiss]


def _notes(compared: Sequence[Compared], small: bool, separator: str) -> str:
    info = {one.name: one for one in policy_info()}
    used = dict.fromkeys(name for one in compared for name in one.policies)
    lines = [f"{name} lacks: {'; '.join(info[name].missing)}" for name in used if name in info and info[name].missing]
    answered = [one for one in compared if one.simulated is not None]
    if answered:
        lines.append(
            "costs: weakest source of the costs that were used; routing: where it comes from; ratio: simulated over printed "
            "(of gains in %, of the factors); no cost is fitted to a printed figure, and routing only where a remark says so"
        )
    if small:
        lines.append("made small by --quick: these numbers say nothing about the figures")
    return separator.join(lines) + "\n" if lines else ""
