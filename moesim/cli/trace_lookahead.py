"""``moesim trace lookahead``: the worth to a cache of routing known some tokens ahead."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moesim.cli.options import Jobs, Printed, name_or_mapping
from moesim.cli.outputs import show, write_own
from moesim.core.files import check_own_folder
from moesim.core.limits import COUNT
from moesim.core.table import Format
from moesim.core.text import complain

_OWNER = "trace lookahead"


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
    if out is not None:
        check_own_folder(out, _OWNER)
    from moesim.api.caches import lookahead

    found = lookahead([name_or_mapping(text, _OWNER) for text in traces], max_tokens=max_tokens, hardware=hardware, jobs=jobs)
    show(found.text(form), form)
    for line in found.notes if form.for_programs else ():  # else below the table
        complain(f"moesim: {line}")
    if out is not None:
        write_own(out, found.files(), _OWNER)
