"""``moesim trace synthesize`` and ``fit``: synthetic traces, and their parameters."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from moesim.cli.options import Overwrite
from moesim.cli.outputs import said
from moesim.core.limits import COUNT, REPEATS, TOKENS
from moesim.core.table import Format
from moesim.core.text import say


def synthesize(
    parameters: Annotated[
        str, typer.Option("--parameters", help="Parameter file: a path, or a shipped name such as mixtral-8x7b.")
    ],
    out: Annotated[Path, typer.Option(metavar="PATH", help="Where to write the trace.")],
    requests: Annotated[int, typer.Option(min=1, max=TOKENS.most, help="Requests.")] = 64,
    prompt: Annotated[int, typer.Option(min=0, max=TOKENS.most, help="Prompt tokens of each.")] = 64,
    decode: Annotated[int, typer.Option(min=0, max=TOKENS.most, help="Decoded tokens of each.")] = 128,
    seed: Annotated[int, typer.Option(min=0, max=COUNT.most, help="Of routers, topics and requests.")] = 0,
    signals: Annotated[
        int | None, typer.Option(min=0, max=TOKENS.most, help="Requests that carry signals; default: all.")
    ] = None,
    inputs: Annotated[int, typer.Option(min=0, max=TOKENS.most, help="Requests that carry the gate inputs.")] = 0,
    scores: Annotated[bool, typer.Option("--scores", help="Keep the softmax over all experts.")] = False,
    overwrite: Overwrite = False,
) -> None:
    """Make a synthetic trace from fitted parameters. It is labelled synthetic, and so is every result on it.

    Example: moesim trace synthesize --parameters mixtral-8x7b --requests 2 --prompt 8 --decode 8 --out synthetic.safetensors
    """
    from moesim.api.synthetic import synthesize as make  # SciPy takes most of a second to import

    said(
        make(
            parameters, out, requests=requests, prompt=prompt, decode=decode, seed=seed, signals=signals, inputs=inputs,
            scores=scores, overwrite=overwrite,
        )
    )  # fmt: skip


def fit(
    targets: Annotated[str | None, typer.Option("--targets", help="File of target figures: a path, or a shipped name.")] = None,
    trace: Annotated[str | None, typer.Option("--trace", help="Trace to take the target figures from.")] = None,
    hold_out: Annotated[
        bool, typer.Option("--hold-out", help="With --trace: fit to every second request, and report on the others too.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Where to write the parameter file; default: printed, without a report.")
    ] = None,
    base: Annotated[str | None, typer.Option("--from", help="Parameter file to start from; what is not fitted stays.")] = None,
    seeds: Annotated[int, typer.Option(min=1, max=REPEATS.most, help="Seeds to fit on: 1, 2, ...")] = 2,
    fresh: Annotated[int, typer.Option(min=1, max=REPEATS.most, help="Other seeds, to report on.")] = 5,
    overwrite: Overwrite = False,
    only_report: Annotated[bool, typer.Option("--only-report", help="Only report on the parameters of --from.")] = False,
    form: Annotated[Format, typer.Option("-o", "--output-format", help="How to print the report.")] = Format.TABLE,
) -> None:
    """Fit parameters of synthetic traces to a model's figures. Report target, fit and error of each.

    Example: moesim trace fit --targets mixtral-8x7b --from mixtral-8x7b --only-report --fresh 1
    """
    from moesim.api.synthetic import fit as fit_parameters  # SciPy takes most of a second to import

    shown = out is not None or only_report
    found = fit_parameters(
        targets, trace=trace, hold_out=hold_out, out=out, from_=base, seeds=seeds, fresh=fresh if shown else 0,
        overwrite=overwrite, only_report=only_report,
    )  # fmt: skip
    if found.path is not None:
        say(f"wrote {found.path}")
    sys.stdout.write(found.text(form) if shown else found.parameters.to_yaml())
