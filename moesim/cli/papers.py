"""``moesim papers``: published results next to simulated ones."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer

from moesim.cli.options import Jobs, Printed, Quick
from moesim.cli.outputs import show
from moesim.core.files import OutputFolder, check_own_folder
from moesim.core.table import Format
from moesim.core.text import say
from moesim.core.text import shown as one_line
from moesim.experiment import run_experiment
from moesim.experiment.config import Config, load_config
from moesim.experiment.folder import Output
from moesim.experiment.resolve import Experiment
from moesim.experiment.sweep import expand, quick
from moesim.experiment.workers import Workers
from moesim.studies.papers.answers import run_clocked
from moesim.studies.papers.compare import agreements, check_answers, choose, compare, figures, variants
from moesim.studies.papers.published import PUBLISHED, paper_folder, read_published
from moesim.studies.papers.report import listing, report
from moesim.trace import Trace


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
    folder = paper_folder()
    chosen = choose(figures(read_published(folder / PUBLISHED), folder), names or ())
    configs = {name: load_config(folder / f"{name}.yaml") for one in chosen for name in one.experiments}
    check_answers((row for one in chosen for row in one.rows), configs, str(folder / PUBLISHED))
    if small:
        configs = {name: quick(config) for name, config in configs.items()}
    if shown:
        sys.stdout.write(listing(chosen, {name: len(expand(config, name)) for name, config in configs.items()}, form))
        return 0
    if out is not None:
        check_own_folder(out, "papers")
        OutputFolder(out, "papers").mark()
    clocked = {row.experiment for one in chosen for row in one.rows if row.source == "decisions"}
    results: dict[str, list[dict[str, Any]]] = {}
    traces: dict[str, Trace] = {}
    failures: list[str] = []
    with Workers(jobs) as workers:
        for name, config in configs.items():
            if name in clocked:
                results[name] = run_clocked(Experiment(config, f"{name}.yaml", known=traces))
                failures += [f"{name}: {row['policy']}: {row['error']}" for row in results[name] if row["error"] is not None]
            else:
                results[name], failed = _run(config, name, workers, out, traces)
                failures += [f"{name}: {line}" for line in failed]
    compared = [compare(row, results, str(folder / PUBLISHED)) for one in chosen for row in one.rows]
    beside = [one for name, rows in results.items() for one in variants(name, rows)]
    ranks = agreements(compared)
    if out is not None:
        _write(out, report(compared, ranks, beside, Format.CSV, small=small))
    show(report(compared, ranks, beside, form, small=small), form)
    for line in failures:
        say(f"moesim: {one_line(line)}")
    return 1 if failures else 0


def _write(out: Path, text: str) -> None:
    from moesim.plots.style import pictures
    from moesim.plots.validation import printed, printed_data  # Matplotlib takes a second to import

    files = {"papers.csv": text.encode()}
    frame = pd.read_csv(io.StringIO(text), keep_default_na=False, na_values={"simulated": [""]})
    if len(printed_data(frame)):
        files |= pictures(printed(frame, "profiles to which nothing was fitted"), "papers")
    OutputFolder(out, "papers").put(files)


def _run(
    config: Config, name: str, workers: Workers, out: Path | None, traces: dict[str, Trace]
) -> tuple[list[dict[str, Any]], list[str]]:
    experiment = Experiment(config, f"{name}.yaml", known=traces)
    if out is None:
        found = run_experiment(experiment, workers=workers, progress=True)
        return found.rows, found.failures
    output = Output(experiment, out / name)
    found = run_experiment(experiment, keep=output.kept.get, progress=True, folder=output.folder, workers=workers)
    output.write(found, workers)
    if found.n_found:
        say(f"{found.n_found} of {len(found.outcomes)} runs were in {out / name} already")
    return found.rows, found.failures
