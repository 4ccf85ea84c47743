"""``moesim calibrate``: a machine's constants from a few observed speeds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moesim.cli.options import Engine, name_or_mapping, with_engine
from moesim.cli.outputs import show
from moesim.core.table import Format
from moesim.core.text import say
from moesim.errors import ConfigError


def calibrate(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="OBSERVATIONS", help="CSV table, or what llama-bench, llama-server, Ollama or another benchmark printed."
        ),
    ],
    hardware: Annotated[
        str | None,
        typer.Option(
            help="Profile to begin with: a name, a path, or {base: NAME, key: value}.", show_default="parts the file names"
        ),
    ] = None,
    model: Annotated[list[str], typer.Option("--model", help="Model of printed rows: a name, or PART OF ITS TYPE=NAME.")] = [],  # noqa: B006  (typer copies it)
    free: Annotated[list[str], typer.Option("--free", help="Constant to free; again for more.", show_default="all")] = [],  # noqa: B006
    engine: Engine = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for profile, page and figure; its name is the machine's.")
    ] = None,
    any_machine: Annotated[
        bool, typer.Option("--any-machine", help="Rows of GPUs and CPUs that the profile does not name.")
    ] = False,
    contribute: Annotated[
        Path | None, typer.Option(help="File to write for the public rows: speeds, parts and version, nothing else.")
    ] = None,
    form: Annotated[Format, typer.Option("-o", "--output-format", help="How to print the constants.")] = Format.TABLE,
) -> int:
    """Identify a machine from observed speeds.

    Prints its rates and fixed costs with intervals, and what to measure next.

    Example: moesim calibrate experiments/calibrate/rtx2070super.csv --hardware rtx2070s-i5-12400f
    """
    from moesim.api.answers import calibrate as identify

    base = None if hardware is None else with_engine(name_or_mapping(hardware, "calibrate: --hardware"), engine)
    if base is None and engine is not None:
        raise ConfigError("calibrate: --engine: expected a machine next to it, got none; name one with --hardware")
    found = identify(file, base, models=model, free=free, out=out, any_machine=any_machine, contribute=contribute)
    show(found.text(form), form)
    for written in (out, contribute):
        if written is not None:
            say(f"wrote {written}")
    if out is not None:
        say(f"such as: moesim recommend --hardware {out} --model MODEL")
    return 0
