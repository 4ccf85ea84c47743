"""``moesim league``: the fastest system on each machine, by how much, and how sure that is."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moesim.cli.options import Jobs, Printed, Quick, Set
from moesim.cli.outputs import write_own
from moesim.core.files import OutputFolder, check_own_folder
from moesim.core.table import Format, render, render_records
from moesim.core.units import format_size
from moesim.errors import ConfigError
from moesim.experiment.config import load_config
from moesim.experiment.sweep import quick

if TYPE_CHECKING:
    from moesim.studies.league import League

WHOLE, ONE_MACHINE = Path("league"), Path("league-one-machine")
"""Experiments that are shipped."""
RATIOS, SHARES = "1/8,1/4,1/2,1", "0.1,0.25,0.5,0.75"
_OWNER = "league"


def league(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="EXPERIMENT.yaml", help="Systems and settings.", show_default="league; with --hardware a smaller one"
        ),
    ] = None,
    hardware: Annotated[str | None, typer.Option(help="Another machine: a name, or the file of a profile.")] = None,
    ratios: Annotated[str, typer.Option(help="Of the map: rate of the link over that of the CPU.")] = RATIOS,
    shares: Annotated[str, typer.Option(help="Of the map: shares of the experts for which there is room.")] = SHARES,
    mapped: Annotated[bool, typer.Option("--map/--no-map", help="Draw the map.")] = True,
    overrides: Set = [],  # noqa: B006  (typer copies it)
    small: Quick = False,
    jobs: Jobs = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder for tables, map and runs, which are not repeated.")
    ] = None,
    form: Printed = Format.TABLE,
) -> int:
    """Find the fastest system of every setting: by how much, what it waits for, and whether that is certain.

    Every system meets on the first draw of routing; those near the best on all others, and at both ends of the interval of the
    CPU's cost a row. The map asks the same of machines whose link is faster or slower and whose GPU has room for more or less.

    Example: moesim league --hardware rtx3090-epyc7532 --out results/league
    """
    from moesim.studies.league import league as meet

    if out is not None:
        check_own_folder(out, _OWNER)
    chosen = [f"hardware={hardware}"] if hardware is not None else []
    name = file or (WHOLE if hardware is None else ONE_MACHINE)
    config = load_config(name, [*overrides, *chosen])
    axes = (_numbers(ratios, "--ratios", 1e3), _numbers(shares, "--shares", 1.0)) if mapped else ((), ())
    begin = None if out is None else OutputFolder(out, _OWNER).mark  # so that a league that is stopped is known as one
    found = meet(
        quick(config, str(name)) if small else config, str(name), ratios=axes[0], shares=axes[1],
        folder=None if out is None else out / "runs", jobs=jobs, progress=True, begin=begin,
    )  # fmt: skip
    sys.stdout.write(table(found, form))
    if out is not None:
        write_own(out, files_of(found), _OWNER)
    return 0


def _numbers(text: str, option: str, most: float) -> tuple[float, ...]:
    from fractions import Fraction

    try:
        found = sorted({float(Fraction(part.strip())) for part in text.split(",")})
    except (ValueError, ZeroDivisionError):
        found = []
    if not found or found[0] <= 0 or found[-1] > most:
        raise ConfigError(f"league: {option}: expected numbers above 0 and up to {most:g}, such as 1/4,1/2, got '{text}'")
    return tuple(found)


def files_of(found: League) -> dict[str, bytes]:
    """Return ``league.csv``, and of a map ``map.csv`` and its figure."""
    from moesim.studies.league import record

    summed = [asdict(one) for one in found.everywhere]
    files = {
        "league.csv": render_records([record(one) for one in found.table], Format.CSV).encode(),
        "everywhere.csv": render_records(summed, Format.CSV).encode(),
    }
    if found.cells:
        import pandas as pd

        from moesim.plots.studies import crossover  # Matplotlib takes most of a second to import
        from moesim.plots.style import pictures

        rows = [record(one) for one in found.cells]
        drawing = crossover.drawing(pd.DataFrame(rows))
        files |= {"map.csv": render_records(rows, Format.CSV).encode(), "crossover.txt": f"{drawing.caption}\n".encode()}
        files |= pictures(drawing.figure, "crossover")
    return files


def table(found: League, form: Format) -> str:
    """Write the table of a league."""
    from moesim.studies.league import record

    rows = [record(one) for one in found.table]
    if form.for_programs:
        return render_records(rows, form)
    varying = [key for key in ("model", "hardware", "memory_bytes") if len({str(row[key]) for row in rows}) > 1]
    head = [
        *(_WORDS[key] for key in varying), "batch", "phase", "best", "speed", "over the second", "sure",
        "waited for", "of bound",
    ]  # fmt: skip
    cells = [[*(_cell(row, key) for key in varying), *_cells(row)] for row in rows]
    between = "\n\n" if form is Format.MD else "\n"
    return render(head, cells, form, ["batch", "speed", "of bound"]) + "\n" + between.join(_notes(found, rows, varying)) + "\n"


_LEAST = 4  # systems that are least behind everywhere
_SPREAD = 1.1  # between draws, from which on it is shown

_WORDS = {"model": "model", "hardware": "machine", "memory_bytes": "GPU memory"}


def _cell(row: dict[str, Any], key: str) -> str:
    value = row[key]
    if key == "memory_bytes":
        return "-" if value is None else format_size(value)
    return str(value).partition(" (")[0]


def _cells(row: dict[str, Any]) -> list[str]:
    speed = f"TTFT {1 / row['speed']:.3g} s"
    if row["phase"] == "decode":
        over = (
            f", {row['speed_least']:.3g} to {row['speed_most']:.3g}" if row["speed_most"] > _SPREAD * row["speed_least"] else ""
        )
        speed = f"{row['speed']:.3g} tok/s{over}; TTFT {row['ttft_s']:.3g} s"
    margin = "-" if row["margin"] is None else f"x{row['margin']:.2f} {row['second']}"
    sure = "yes" if row["certain"] else f"no: {row['doubts']}"
    bound = "-" if row["bound_share"] is None else f"{100 * row['bound_share']:.0f} %"
    return [str(row["batch_size"]), row["phase"], row["best"], speed, margin, sure, row["waited_for"], bound]


def _notes(found: League, rows: Sequence[dict[str, Any]], varying: Sequence[str]) -> list[str]:
    first = rows[0]
    about = [f"{_WORDS[key]}: {_cell(first, key)}" for key in ("model", "hardware", "memory_bytes") if key not in varying]
    labels = dict.fromkeys(label for row in rows for label in str(row["labels"]).split(", ") if label)
    notes = [
        *about,
        f"simulated; weakest source: {', '.join(sorted({str(row['source_label']) for row in rows}))}; {', '.join(labels)}",
        f"speed: geometric mean over {first['draws']} draws of routing, and least to most where these differ by more than 10 %; "
        "TTFT, waits and bound: of the first draw",
        "sure: the 95 % interval of the ratio over the draws excludes 1, and no system is as fast at an end of the interval of "
        "the CPU's cost a further row",
        "of bound: a time that no exact system can beat, over that of the whole run",
    ]
    inexact = [
        f"{row['model'].partition(' (')[0]}, batch {row['batch_size']}: {row['inexact']} {row['inexact_speed']:.3g} tok/s, "
        f"{100 * row['inexact_fresh']:.1f} % fresh"
        for row in rows
        if row["inexact"] and row["phase"] == "decode" and row["inexact_speed"] > row["speed"]
    ]
    notes += [f"faster, but not exact: {line}" for line in inexact]
    for batch in dict.fromkeys(one.batch_size for one in found.everywhere):
        mine = [one for one in found.everywhere if one.batch_size == batch]
        least = ", ".join(f"{one.system} x{one.median:.2f} (worst x{one.worst:.2f})" for one in mine[:_LEAST])
        n = mine[0].settings
        notes.append(f"batch {batch}, median of the fastest's speed over its own in the {n} settings where all met: {least}")
    notes += [f"{name}: {why}" for name, why in found.never.items()]
    return [*notes, f"{found.n_runs} runs, of which {found.n_found} had been done before"]
