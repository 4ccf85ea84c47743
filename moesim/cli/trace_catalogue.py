"""``moesim trace catalogue``: public recordings of routing."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from moesim.cli.options import Printed
from moesim.core.table import Format
from moesim.core.text import shown_lines


def trace_catalogue(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="An entry to show in full.", show_default=False)] = None,
    form: Printed = Format.TABLE,
) -> None:
    """List public recordings of real models' routing.

    What each lacks, its licence, and the command that makes a trace of it.

    `routing` can be imported. Of `counts` and `figures` the command makes a synthetic trace instead. Nothing is fetched.

    Example: moesim trace catalogue gpt-oss-20b
    """
    from moesim.api.catalogue import catalogue

    text = catalogue(name).text(form)
    sys.stdout.write(text if name is None else shown_lines(text))
