"""``moesim report``: a result folder as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moesim.cli.options import Trust, reading_results
from moesim.cli.outputs import check_out, write_beside


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A result folder, as of moesim run --out.")],
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE.html", help="Default: report.html in DIR.")] = None,
    trust: Trust = False,
) -> None:
    """Write one self-contained HTML page: what was run, results, figures, notes and a timeline to zoom into.

    It loads nothing from anywhere, and the same folder gives the same bytes. An earlier page is replaced.

    Example: moesim report results/quickstart --out quickstart.html
    """
    from moesim.report import read_folder, report_page

    result = read_folder(folder)
    page = out or folder / "report.html"
    check_out(page, suffix=".html", overwrite=True)
    with reading_results(trust):
        text = report_page(result, progress=True)
    write_beside(page.parent, {page.name: text.encode()}, "report")
