"""``moesim league``: the fastest engine in each setting, the best rule if built, by how much, and how sure that is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moesim.cli.options import Jobs, Printed, Quick, Set
from moesim.cli.outputs import print_answer
from moesim.core.table import Format
from moesim.core.text import say


def league(
    file: Annotated[
        Path | None, typer.Argument(metavar="EXPERIMENT.yaml", help="Systems and settings.", show_default="league")
    ] = None,
    hardware: Annotated[str | None, typer.Option(help="Another machine: parts, a name, or the file of a profile.")] = None,
    model: Annotated[str | None, typer.Option(help="Another model, with the bits that people use.")] = None,
    overrides: Set = [],  # noqa: B006  (typer copies it)
    small: Quick = False,
    jobs: Jobs = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder for table, map and runs, which are not repeated.")
    ] = None,
    form: Printed = Format.TABLE,
) -> int:
    """Find the fastest engine of every setting, and a simple rule. Print by how much each wins, and whether that is certain.

    All systems meet once for 64 tokens. Those near the fastest meet in full on all draws of requests, those that stay near at
    other costs and on more and less local routing.

    Example: moesim league --hardware "RTX 5070 + Ryzen 9 7900X + 96GB DDR5-6000" --model gpt-oss-20b --out results/league
    """
    from moesim.api.studies import league as meet

    found = meet(file, hardware=hardware, model=model, overrides=overrides, quick=small, out=out, jobs=jobs)
    code = print_answer(found, form, None, "league")
    if out is not None:
        say(f"wrote {out}")
    return code
