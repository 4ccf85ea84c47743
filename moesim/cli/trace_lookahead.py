"""``moesim trace lookahead``: what knowing the routing of some tokens ahead is worth to a cache."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moesim.cli.options import Printed, name_or_mapping
from moesim.cli.outputs import write_own
from moesim.core.limits import COUNT
from moesim.core.output_folder import check_own_folder
from moesim.core.progress import Progress
from moesim.core.table import Format, render, render_records
from moesim.trace.made import trace_label

if TYPE_CHECKING:
    from moesim.studies.lookahead import Line, Relation

_OWNER = "trace lookahead"
_SHOWN = (1, 4, 16, 64)  # windows in the table


def trace_lookahead(
    traces: Annotated[
        list[str],
        typer.Argument(metavar="TRACE...", help="Names or paths, or '{synthesize: mixtral-8x7b}' and so on."),
    ],
    max_tokens: Annotated[int, typer.Option(min=2, max=COUNT.most, help="Decoded tokens of each that are counted.")] = 1024,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Folder for lookahead.csv and the figure.")] = None,
    form: Printed = Format.TABLE,
) -> None:
    """Count the misses of caches that know some tokens ahead, from those that know nothing to the fewest that there can be.

    One cache a layer, batch 1; the CPU may compute a miss, so that it need not enter the cache. Beyond the window the cache goes
    by decayed frequency. The windows that close half of the gap are compared with a published power law.

    Example: moesim trace lookahead mini-mixtral mini-deepseek-v2-lite --max-tokens 256
    """
    from moesim.experiment.traces import read_trace
    from moesim.studies.lookahead import look_ahead, records, relation

    if out is not None:
        check_own_folder(out, _OWNER)
    lines: list[Line] = []
    with Progress(len(traces), lines=True) as bar:
        for text in traces:
            written = name_or_mapping(text, "trace lookahead")
            bar.describe(trace_label(written))
            lines += look_ahead(read_trace(written, "trace lookahead"), trace_label(written), max_tokens=max_tokens)
            bar.advance(1)
    found = relation(lines)
    sys.stdout.write(render_records(records(lines), form) if form.for_programs else table(lines, found, form))
    if out is not None:
        import pandas as pd

        from moesim.plots.lookahead import lookahead  # Matplotlib takes most of a second to import
        from moesim.plots.style import pictures

        drawing = lookahead.drawing(pd.DataFrame(records(lines)))
        files = {"lookahead.csv": render_records(records(lines), Format.CSV).encode()}
        files |= {"lookahead.txt": f"{drawing.caption}\n".encode(), **pictures(drawing.figure, "lookahead")}
        write_own(out, files, _OWNER)


def table(lines: Sequence[Line], found: Relation | None, form: Format) -> str:
    """Write misses by size of the cache, and the relation."""
    from moesim.trace.stats.lookahead import HALF_GAP  # NumPy takes a while to import

    head = ["trace", "slots", "slots / k", "misses a token", "fewest", *(f"closed by {n}" for n in _SHOWN), "half at"]
    rows = [
        [
            one.trace, str(one.slots), f"{one.slots / one.top_k:.2g}", f"{one.misses[0] / one.tokens:.3g}",
            f"{one.fewest / one.tokens:.3g}", *(_percent(one.closed(n)) for n in _SHOWN), _half(one),
        ]
        for one in lines
    ]  # fmt: skip
    notes = [
        "misses a token: over all layers, of a cache that goes by decayed frequency; fewest: of one that knows everything",
        "closed by N: share of the gap that knowing N tokens ahead closes; half at: tokens ahead that close half of it",
    ]
    if found is not None:
        verdict = "within" if found.confirms else "outside"
        notes.append(
            f"half at {found.factor:.2g} (slots / k)^{found.exponent:.2f}, 95 % interval of the exponent {found.low:.2f} to "
            f"{found.high:.2f} ({found.n} sizes; traces drawn with replacement)",
        )
        notes.append(f"published: {HALF_GAP[0]} (slots / k)^{HALF_GAP[1]}, whose exponent is {verdict} that interval")
    between = "\n\n" if form is Format.MD else "\n"
    return render(head, rows, form, head[1:]) + "\n" + between.join(notes) + "\n"


def _half(one: Line) -> str:
    return "-" if one.half is None else f"{one.half:.2g}"


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{100 * share:.0f} %"
