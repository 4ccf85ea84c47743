"""``moesim report``: a result folder as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moesim.cli.options import Trust
from moesim.cli.outputs import said


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A result folder, as of moesim run --out.")],
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE.html", help="Default: report.html in DIR.")] = None,
    trust: Trust = False,
) -> None:
    """Write one self-contained HTML page of a result.

    It has what was run, results, figures, notes and a timeline to zoom into.

    It loads nothing from anywhere, and the same folder gives the same bytes. An earlier page is replaced.

    Example: moesim report results/quickstart --out quickstart.html
    """
    from moesim.api.studies import report as write_page

    said(write_page(folder, out=out, trust=trust))
