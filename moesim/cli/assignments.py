"""``moesim assignments``: assignment rules on random layers, beside the best execution."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moesim.cli.options import Printed
from moesim.cli.outputs import check_out_folder, write_beside
from moesim.core.limits import COUNT, REPEATS
from moesim.core.progress import Progress
from moesim.core.table import Format, render, render_records

if TYPE_CHECKING:
    from moesim.studies.assignments import Result

_NAME = "assignments"


def assignments(
    instances: Annotated[
        int, typer.Option(min=2, max=REPEATS.most, help="Random layers of each regime and number of experts.")
    ] = 500,
    regimes: Annotated[str | None, typer.Option(help="Names, separated by commas; default: all.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=COUNT.most, help="Of the layers.")] = 0,
    in_order: Annotated[bool, typer.Option("--in-order", help="Tell of a GPU that waits for each expert in order.")] = False,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Folder for a CSV and the figure.")] = None,
    form: Printed = Format.TABLE,
) -> None:
    """Execute assignment rules on random layers of 3 to 64 active experts, and divide by the best execution.

    The costs are made up: three regimes, a mixture of them, and that mixture with a GPU that takes longer for more rows.
    The best is exact; with such a GPU and more than 12 experts it is a solver's.

    Example: moesim assignments --instances 2
    """
    from moesim.studies.assignments import REGIMES, SIZES, study

    if out is not None:
        check_out_folder(out, option="--out")
    names = [name.strip() for name in regimes.split(",")] if regimes else list(REGIMES)
    results: list[Result] = []
    with Progress(len(names) * len(SIZES) * instances) as bar:
        for regime in names:
            for sizes in SIZES:
                bar.describe(f"{regime}, {sizes[0]} to {sizes[1]} experts")
                results += study(regime, sizes, instances, seed=seed, progress=bar.advance)
    sys.stdout.write(table(results, form, in_order=in_order))
    if out is not None:
        _write(results, out, in_order)


def table(results: Sequence[Result], form: Format, *, in_order: bool = False) -> str:
    """Write the results of the study."""
    if form.for_programs:
        return render_records([asdict(one) for one in results], form)
    kind = "rule, in order" if in_order else "rule"
    sizes = list(dict.fromkeys(one.active for one in results))
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for one in results:
        if one.kind in (kind, "bound", "plan"):
            name = f"bound: {one.name}" if one.kind == "bound" else one.name
            half = (one.high - one.low) / 2
            cell = f"{one.mean:.3f} ±{half:.3f}, {one.worst:.2f}, {100 * one.optimal:.0f} %"
            lines.setdefault((one.regime, name), {})[one.active] = cell
    columns = ["regime", "rule", *(f"{active} experts" for active in sizes)]
    rows = [[*key, *(cells.get(active, "-") for active in sizes)] for key, cells in lines.items()]
    counts = sorted({one.instances for one in results})
    note = (
        f"\nmakespan / best: mean and its 95 % interval, worst, share at the best; {', '.join(map(str, counts))} random layers "
        "each; a bound's worst is its smallest\n"
    )
    return render(columns, rows, form, columns[2:]) + note


def _write(results: Sequence[Result], out: Path, in_order: bool) -> None:
    import pandas as pd

    from moesim.plots.assignments import assignment_ratios  # Matplotlib takes most of a second to import
    from moesim.plots.style import pictures

    records = [asdict(one) for one in results]
    figure = assignment_ratios(pd.DataFrame(records), "rule, in order" if in_order else "rule")
    files = {f"{_NAME}.csv": render_records(records, Format.CSV).encode(), **pictures(figure, _NAME)}
    write_beside(out, files, "assignments")
