"""``moesim trace split``: make a trace of experts' matrices, cached one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moesim.api.outputs import check_out
from moesim.cli.options import Overwrite
from moesim.core.text import say
from moesim.errors import InputError
from moesim.trace import SUFFIX, Trace, find_trace
from moesim.trace.derived import split_experts


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
    check_out(out, suffix=SUFFIX, overwrite=overwrite)
    path = find_trace(trace)
    if path.resolve() == out.resolve():
        raise InputError(f"--out {out}: expected another file than the trace that is read, got the same; choose another name")
    made = split_experts(Trace.read(path), units, trace)
    made.write(out)
    say(f"wrote {out}: {made.n_experts} units in each of {made.n_layers} layers, {made.top_k} of them for a token")
