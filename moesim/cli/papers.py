"""``moesim papers``: published results next to simulated ones."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from moesim.api.studies import papers as run_papers
from moesim.cli.options import Jobs, Printed, Quick
from moesim.cli.outputs import print_answer
from moesim.core.table import Format
from moesim.studies.papers.run import Chosen


def papers(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[PAPER[/FIGURE]]...", help="Which papers or figures; default: all.")
    ] = None,
    shown: Annotated[bool, typer.Option("--list", help="List the figures and what is run for them; run nothing.")] = False,
    small: Quick = False,
    jobs: Jobs = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for a result folder of each experiment; resumes.")] = None,
    form: Printed = Format.TABLE,
) -> int:
    """Compare published figures of papers with simulated ones.

    A report, not a test: nothing is tuned to a published figure. Each row carries the labels of its inputs, and a remark where
    the figures differ; below, whether systems are in the printed order. What has no counterpart is listed with the reason.

    With --out every experiment leaves a result folder, OUT/PAPER/EXPERIMENT, and what has been run there is not run again
    (but for decisions, which are timed anew); papers.csv has all numbers, papers.png and .pdf their picture.

    Example: moesim papers hybrimoe/fig9 --quick
    """
    if shown:
        sys.stdout.write(Chosen(names or (), small).listing(form))
        return 0
    return print_answer(run_papers(names or (), quick=small, jobs=jobs, out=out), form, None, "papers")
