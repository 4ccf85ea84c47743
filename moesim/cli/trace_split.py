"""``moesim trace split``: make a trace of experts' matrices, cached one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moesim.cli.options import Overwrite
from moesim.cli.outputs import said


def trace_split(
    trace: Annotated[str, typer.Argument(metavar="IN", help="Name or path of a trace.")],
    out: Annotated[Path, typer.Option("--out", help="The trace to write, NAME.safetensors.")],
    units: Annotated[int, typer.Option(min=2, max=3, help="Matrices of an expert: 3 (gate, up, down) or 2 (up, down).")] = 3,
    overwrite: Overwrite = False,
) -> None:
    """Split each expert into gate, up and down. Caches then copy them apart.

    An experiment that uses the trace has a model to match, such as {base: mixtral-8x7b, units_per_expert: 3}.

    Example: moesim trace split mini-mixtral --out split.safetensors
    """
    from moesim.api.traces import split  # what knows every policy takes a while to import

    said(split(trace, out, units=units, overwrite=overwrite))
