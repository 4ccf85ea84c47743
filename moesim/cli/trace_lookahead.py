"""``moesim trace lookahead``: the worth to a cache of routing known some tokens ahead."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moesim.cli.options import Jobs, Printed, name_or_mapping
from moesim.cli.outputs import show, write_own
from moesim.core.files import check_own_folder
from moesim.core.limits import COUNT
from moesim.core.progress import Progress
from moesim.core.table import Format, render, render_records
from moesim.core.text import complain
from moesim.trace.made import trace_label

if TYPE_CHECKING:
    from moesim.studies.lookahead import Line, Relation, Sight

_OWNER = "trace lookahead"
_SHOWN = (1, 4, 16, 64)  # windows in the table


def trace_lookahead(
    traces: Annotated[
        list[str],
        typer.Argument(metavar="TRACE...", help="Names or paths, or '{synthesize: mixtral-8x7b}' and so on."),
    ],
    max_tokens: Annotated[int, typer.Option(min=2, max=COUNT.most, help="Decoded tokens of each that are counted.")] = 1024,
    hardware: Annotated[
        str | None,
        typer.Option("--hardware", metavar="NAME", help="Simulate what knowing some layers ahead is worth there, too."),
    ] = None,
    jobs: Jobs = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Folder for lookahead.csv and the figure.")] = None,
    form: Printed = Format.TABLE,
) -> None:
    """Count the misses of caches that know tokens ahead.

    From caches that know nothing to the fewest misses that there can be.

    One cache a layer, batch 1; the CPU may compute a miss, so that it need not enter the cache. Beyond the window the cache goes
    by decayed frequency. The windows that close half of the gap are compared with a published power law.

    With --hardware an oracle prefetches what the next layers of a token lack, on that machine, with experts of 4 bits: the gap
    lies between loading on demand and a link or GPU that never waits. With --out that is layers.csv; csv and json print it alone.

    Example: moesim trace lookahead mini-mixtral mini-deepseek-v2-lite --max-tokens 256
    """
    from moesim.experiment.routing import read_trace
    from moesim.experiment.workers import Workers
    from moesim.studies.lookahead import look_ahead, records, relation, see_layers

    if out is not None:
        check_own_folder(out, _OWNER)
    lines: list[Line] = []
    sights: list[Sight] = []
    missing: list[str] = []
    with Progress(len(traces), lines=True) as bar, Workers(jobs) as workers:
        for text in traces:
            written = name_or_mapping(text, "trace lookahead")
            bar.describe(trace_label(written))
            trace = read_trace(written, "trace lookahead")
            lines += look_ahead(trace, trace_label(written), max_tokens=max_tokens)
            if hardware is not None:
                more, lacking = see_layers(written, trace, hardware, workers)
                sights, missing = [*sights, *more], [*missing, *lacking]
            bar.advance(1)
    found = relation(lines)
    if form.for_programs:
        sys.stdout.write(render_records(records(lines) if hardware is None else [one.record() for one in sights], form))
        for line in missing:
            complain(f"moesim: {line}")
    else:
        show(table(lines, found, form) + (layers_table(sights, missing, form) if hardware is not None else ""), form)
    if out is not None:
        import pandas as pd

        from moesim.plots.studies import lookahead  # Matplotlib takes most of a second to import
        from moesim.plots.style import pictures

        drawing = lookahead.drawing(pd.DataFrame(records(lines)))
        files = {"lookahead.csv": render_records(records(lines), Format.CSV).encode()}
        if sights:
            files["layers.csv"] = render_records([one.record() for one in sights], Format.CSV).encode()
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
            f"{found.high:.2f} ({found.n} sizes; models drawn with replacement)",
        )
        notes.append(f"published: {HALF_GAP[0]} (slots / k)^{HALF_GAP[1]}, whose exponent is {verdict} that interval")
    between = "\n\n" if form is Format.MD else "\n"
    return render(head, rows, form, head[1:]) + "\n" + between.join(notes) + "\n"


def layers_table(sights: Sequence[Sight], missing: Sequence[str], form: Format) -> str:
    """Write the share of the gap that each number of layers ahead closes."""
    by_line: dict[tuple[str, float], list[Sight]] = {}
    for one in sights:
        by_line.setdefault((one.trace, one.share), []).append(one)
    head = [
        "trace",
        "cached",
        "on demand",
        *(f"closed by {n} layer{'s' if n > 1 else ''}" for n in dict.fromkeys(one.layers for one in sights)),
    ]
    rows = [
        [trace, _percent(share), f"{mine[0].on_demand:.3g} tok/s", *(_percent(one.closed) for one in mine)]
        for (trace, share), mine in by_line.items()
    ]
    notes = [
        *(
            [f"on {sights[0].hardware}, experts of 4 bits, batch 1, an oracle; weakest source: {sights[0].label}"]
            if sights
            else []
        ),
        "closed: share of the gap between the time on demand and the time in which the busier of link and GPU works",
        *missing,
    ]
    return "\n" + render(head, rows, form, head[1:]) + "\n" + ("\n\n" if form is Format.MD else "\n").join(notes) + "\n"


def _half(one: Line) -> str:
    return "-" if one.half is None else f"{one.half:.2g}"


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{100 * share:.0f} %"
