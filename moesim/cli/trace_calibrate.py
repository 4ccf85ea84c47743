"""``moesim trace calibrate``: an existing trace gets what policies need and its source does not record."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moesim.cli.additions import HeldBack, Scores, Seed, Weights, additions, describe
from moesim.cli.options import Overwrite
from moesim.cli.outputs import check_out
from moesim.core.files import scratch_beside
from moesim.core.text import say
from moesim.errors import InputError
from moesim.trace import SUFFIX, Trace, find_trace
from moesim.trace.calibrating import extend


def trace_calibrate(
    trace: Annotated[str, typer.Argument(metavar="IN", help="Name or path of a trace.")],
    out: Annotated[Path, typer.Option("--out", help="The trace to write, NAME.safetensors.")],
    share: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Part of the requests to count tables from, such as 0.25; they are left out."),
    ] = None,
    hold_back: HeldBack = None,
    seed: Seed = None,
    weights: Weights = None,
    scores: Scores = None,
    overwrite: Overwrite = False,
) -> None:
    """Count calibration tables from requests of a trace, which are then not simulated; or make uniform weights.

    The tables are activation_frequency, activation_frequency_decode, coactivation and activation_matrices; residual, where gate
    inputs were kept; expert_maps, where there are scores or weights. A trace that has tables gets the matrices and maps it lacks.
    With maps, a trace with embeddings gets the signal embedding: the map of the closest iteration that is left out.

    Example: moesim trace calibrate theirs.safetensors --share 0.25 --out calibrated.safetensors
    """
    wanted = additions(share, "--share", seed, hold_back, weights, scores)
    check_out(out, suffix=SUFFIX, overwrite=overwrite)
    path = find_trace(trace)
    if path.resolve() == out.resolve():
        raise InputError(f"--out {out}: expected another file than the trace that is read, got the same; choose another name")
    with scratch_beside(out) as folder:
        found = Trace.read(path)
        made = extend(found, wanted, trace, folder)
        made.write(out)
    say(f"wrote {out}: {describe(made)}")
