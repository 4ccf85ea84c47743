"""``moesim league``: the fastest engine in each setting, the best rule if built, by how much, and how sure that is."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moesim.cli.options import Jobs, Printed, Quick, Set
from moesim.cli.outputs import write_own
from moesim.core.files import OutputFolder, check_own_folder
from moesim.core.table import Format, render, render_records
from moesim.experiment.config import load_config
from moesim.experiment.sweep import quick

if TYPE_CHECKING:
    from moesim.studies.league import League, Rank

WHOLE = Path("league")
"""Experiment that is shipped."""
_OWNER = "league"


def league(
    file: Annotated[
        Path | None, typer.Argument(metavar="EXPERIMENT.yaml", help="Systems and settings.", show_default="league")
    ] = None,
    hardware: Annotated[str | None, typer.Option(help="Another machine: parts, a name, or the file of a profile.")] = None,
    model: Annotated[str | None, typer.Option(help="Another model, with the bits that people use.")] = None,
    overrides: Set = [],  # noqa: B006  (typer copies it)
    small: Quick = False,
    jobs: Jobs = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder for table, map and runs, which are not repeated.")
    ] = None,
    form: Printed = Format.TABLE,
) -> int:
    """Find the fastest engine of every setting, and the rule that would be: by how much, and whether that is certain.

    All systems meet once for 64 tokens. Those near the fastest meet in full on all draws of requests, those that stay near at
    other costs and on more and less local routing.

    Example: moesim league --hardware "RTX 5070 + Ryzen 9 7900X + 96GB DDR5-6000" --model gpt-oss-20b --out results/league
    """
    from moesim.model import load_model
    from moesim.studies.advice.question import usual_bits
    from moesim.studies.identify.observations import read_bits
    from moesim.studies.league import league as meet

    if out is not None:
        check_own_folder(out, _OWNER)
    chosen = [f"hardware={json.dumps(hardware)}"] if hardware is not None else []
    if model is not None:
        bits = read_bits(usual_bits(load_model(model, "league: --model")), "league: --model")[0]
        chosen.append(f"model={json.dumps({'base': model, **bits})}")
    chosen += ["exclude=[]"] if chosen and file is None else []
    name = file or WHOLE
    config = load_config(name, [*overrides, *chosen])
    begin = None if out is None else OutputFolder(out, _OWNER).mark  # so that a league that is stopped is known as one
    found = meet(
        quick(config, str(name)) if small else config, str(name), folder=None if out is None else out / "runs",
        jobs=jobs, progress=True, begin=begin,
    )  # fmt: skip
    sys.stdout.write(table(found, form))
    if out is not None:
        write_own(out, files_of(found), _OWNER)
    return 0


def files_of(found: League) -> dict[str, bytes]:
    """Return ``league.csv`` and the figure of the map."""
    import pandas as pd

    from moesim.plots.studies import crossover  # Matplotlib takes most of a second to import
    from moesim.plots.style import pictures
    from moesim.studies.league import record

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
    from moesim.studies.league import record

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
