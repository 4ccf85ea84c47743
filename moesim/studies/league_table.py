"""Results of a league as a table, CSV and the figure of the map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moesim.core.table import Format, render, render_records
from moesim.studies.league import League, Rank, record


def files_of(found: League) -> dict[str, bytes]:
    """Return ``league.csv`` and the figure of the map."""
    import pandas as pd

    from moesim.plots.studies import crossover  # Matplotlib takes most of a second to import
    from moesim.plots.style import pictures

    rows = [record(one) for one in found.cells]
    if not any(row["best"] for row in rows):
        return {"league.csv": render_records(rows, Format.CSV).encode()}
    drawing = crossover.drawing(pd.DataFrame(rows))
    files = {"league.csv": render_records(rows, Format.CSV).encode(), "crossover.txt": f"{drawing.caption}\n".encode()}
    return files | pictures(drawing.figure, "crossover")


_HEAD = (
    "batch",
    "phase",
    "best engine",
    "speed",
    "over the second",
    "certain",
    "best rule, if built",
    "over the engine",
    "among rules",
)


def table(found: League, form: Format) -> str:
    """Write the table of a league, and the ranks of engines and of rules."""
    rows = [record(one) for one in found.cells]
    if form.for_programs:
        return render_records(rows, form)
    met = [row for row in rows if row["best"] or row["rule_best"]]
    varying = [key for key in _WORDS if len({row[key] for row in met}) > 1]
    head = [*(_WORDS[key] for key in varying), *_HEAD]
    cells = [[*(_short(row[key]) for key in varying), *_cells(row)] for row in met]
    between = "\n\n" if form is Format.MD else "\n"
    return render(head, cells, form, ["batch"]) + "\n" + between.join(_notes(found, rows, met, varying)) + "\n"


_LEAST = 6  # systems of a rank that are printed
_WORDS = {"model": "model", "hardware": "machine"}


def _short(value: Any) -> str:
    return str(value).partition(" (")[0]


def _cells(row: dict[str, Any]) -> list[str]:
    def speed(value: float | None) -> str:
        return "-" if value is None else f"{value:.3g} tok/s" if row["phase"] == "decode" else f"TTFT {1 / value:.3g} s"

    def sure(kind: str) -> str:
        return "-" if not row[f"{kind}best"] else "yes" if row[f"{kind}certain"] else f"no: {row[f'{kind}undone_by']}"

    margin = "-" if row["margin"] is None else f"x{row['margin']:.2f} {row['second']}"
    over = "-" if row["rule_over_best"] is None else f"x{row['rule_over_best']:.2f}"
    return [
        str(row["batch_size"]), row["phase"], row["best"] or "-", speed(row["speed"]), margin, sure(""),
        row["rule_best"] or "-", over, sure("rule_"),
    ]  # fmt: skip


def _notes(found: League, rows: Sequence[dict[str, Any]], met: Sequence[dict[str, Any]], varying: Sequence[str]) -> list[str]:
    every = dict.fromkeys(label for row in met for label in str(row["labels"]).split(", ") if label)
    labels = [label for label in every if " of " not in label or label.startswith("synthetic")]  # not what is in the table
    sources = ", ".join(sorted({str(row["source_label"]) for row in met if row["source_label"]}))
    first = met[0]
    notes = [
        *(f"{_WORDS[key]}: {_short(first[key])}" for key in _WORDS if key not in varying),
        f"simulated; weakest source: {sources}; {', '.join(labels)}",
        f"speed: geometric mean over {first['draws']} draws of requests; a rule is ranked as if built in llama.cpp, at the costs "
        "of its caches on the host",
        f"certain: the order is the same over draws of requests (95 % interval), at {first['cost_draws']} joint draws of all "
        f"costs with intervals, and on {first['routings']} routings; else what undoes it",
    ]
    for words, ranks in (("engines", found.released), ("rules, if built", found.rules)):
        sizes = dict.fromkeys(one.batch_size for one in ranks)
        notes += [_rank(words, [one for one in ranks if one.batch_size == size]) for size in sizes]
    closed = {
        f"{_short(row['model'])} on {row['hardware']}, batch {row['batch_size']}": row["left_out"]
        for row in rows
        if row["left_out"]
    }
    notes += [f"left out: {name}: {why}" for name, why in (closed | found.never).items()]
    return [*notes, f"{found.n_runs} runs, of which {found.n_found} had been done before"]


def _rank(words: str, ranks: Sequence[Rank]) -> str:
    least = ", ".join(f"{one.system} x{one.median:.2f} (worst x{one.worst:.2f})" for one in ranks[:_LEAST])
    of = f"batch {ranks[0].batch_size}, how many times slower than the fastest"
    return f"{words}, {of} at 64 tokens, median of {ranks[0].settings} settings: {least}"
