"""``moesim papers``: published results beside simulated ones."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import pandas as pd
import typer

from moesim.cli.options import Jobs, Printed, Quick
from moesim.core.files import OutputFolder, check_own_folder
from moesim.core.table import Format
from moesim.core.text import say
from moesim.core.text import shown as one_line
from moesim.errors import ConfigError
from moesim.experiment import run_experiment
from moesim.experiment.config import Config, load_config
from moesim.experiment.folder import Output
from moesim.experiment.resolve import Experiment
from moesim.experiment.sweep import expand, quick
from moesim.experiment.workers import Workers
from moesim.studies.papers.compare import compare, variants
from moesim.studies.papers.decision_time import run_clocked
from moesim.studies.papers.figures import Figure, check_answers, choose, figures
from moesim.studies.papers.published import PUBLISHED, paper_folder, read_published
from moesim.studies.papers.rank_agreement import agreements
from moesim.studies.papers.report import identified, listing, report
from moesim.trace import Trace

if TYPE_CHECKING:
    from moesim.studies.papers.identify import Identified


def papers(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[PAPER[/FIGURE]]...", help="Which papers or figures; default: all.")
    ] = None,
    shown: Annotated[bool, typer.Option("--list", help="List the figures and what is run for them; run nothing.")] = False,
    small: Quick = False,
    jobs: Jobs = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for a result folder of each experiment; resumes.")] = None,
    identify: Annotated[
        bool,
        typer.Option("--identify", help="Answer each block of rows by constants of a paper's other rows; takes half an hour."),
    ] = False,
    audit: Annotated[
        bool,
        typer.Option(
            "--audit", help="Put each printed speed-up beside the largest of 17 machines around its paper's; takes an hour."
        ),
    ] = False,
    form: Printed = Format.TABLE,
) -> int:
    """Run the experiments of the papers and print each published figure beside the simulated one.

    A report, not a test: nothing is tuned to a published figure. Each row carries the labels of its inputs, and a remark where
    the figures differ; below, whether systems are in the printed order. What has no counterpart is listed with the reason.

    With --out every experiment leaves a result folder, OUT/PAPER/EXPERIMENT, and what has been run there is not run again
    (but for decisions, which are timed anew); papers.csv has all numbers, papers.png and .pdf their picture.

    With --identify, the rows of papers in experiments/papers/_identify.yaml are answered three ways: by the profile to which
    nothing was fitted, by constants that all other tables of the paper give, and by those that all tables give. A row that even
    those miss is inconsistent with the rest of its paper. With --out it takes the whole runs of moesim papers from that folder,
    keeps its own there, and leaves identified.csv, constants.csv, results.csv (beside papers.csv) and their picture.

    With --audit the machines have rates of link, CPU memory, CPU operations and GPU memory at half or twice the profile's.

    Example: moesim papers hybrimoe/fig9 --quick
    """
    folder = paper_folder()
    chosen = choose(figures(read_published(folder / PUBLISHED), folder), names or ())
    configs = {name: load_config(folder / f"{name}.yaml") for one in chosen for name in one.experiments}
    check_answers((row for one in chosen for row in one.rows), configs, str(folder / PUBLISHED))
    if identify:
        return _identify(folder, chosen, configs, jobs, out, form)
    if small:
        configs = {name: quick(config) for name, config in configs.items()}
    if audit:
        from moesim.cli.papers_audit import audited

        return audited([row for one in chosen for row in one.rows], configs, jobs, out, form)
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
    sys.stdout.write(report(compared, ranks, beside, form, small=small))
    for line in failures:
        say(f"moesim: {one_line(line)}")
    return 1 if failures else 0


def _write(out: Path, text: str) -> None:
    """Write all printed numbers beside the simulated ones, and their picture, over those of an earlier call."""
    from moesim.plots.style import pictures
    from moesim.plots.validation import printed, printed_data  # Matplotlib takes a second to import

    files = {"papers.csv": text.encode()}
    frame = pd.read_csv(io.StringIO(text), keep_default_na=False, na_values={"simulated": [""]})
    if len(printed_data(frame)):
        files |= pictures(printed(frame, "profiles to which nothing was fitted"), "papers")
    OutputFolder(out, "papers").put(files)


def _identify(
    folder: Path, chosen: list[Figure], configs: dict[str, Config], jobs: int | None, out: Path | None, form: Format
) -> int:
    from moesim.hardware import override, read_profile
    from moesim.studies.identify.constants import Machine
    from moesim.studies.papers.evaluate import Evaluator  # SciPy takes most of a second to import
    from moesim.studies.papers.identify import identify_paper
    from moesim.studies.papers.plan import NAME, read_plans

    plans = read_plans(folder)
    papers_chosen = {one.paper for one in chosen}
    asked = {name: plan for name, plan in plans.items() if plan.paper in papers_chosen}
    if not asked:
        known = ", ".join(dict.fromkeys(plan.paper for plan in plans.values()))
        raise ConfigError(f"papers --identify: expected a paper of {known}, got none; name one")
    if out is not None:
        check_own_folder(out, "papers")
        OutputFolder(out, "papers").mark()
    found = {}
    traces: dict[str, Trace] = {}
    with TemporaryDirectory() as temporary, Workers(jobs) as workers:
        for name, plan in asked.items():
            rows = [row for one in chosen if one.paper == plan.paper for row in one.rows]
            if len({plan.block_of(row) for row in rows} - {None}) < len(plan.blocks):
                raise ConfigError(f"papers --identify: {name}: expected rows of all its blocks, got fewer; name the whole paper")
            raw, path, _ = read_profile(plan.hardware, f"{NAME}: {name}: hardware")
            place = path or plan.hardware
            machine = Machine(override(raw, plan.start, place), place, plan.free, plan.more)
            evaluate = Evaluator(plan, machine, rows, configs, workers, (out or Path(temporary)) / "identify" / name, traces)
            say(f"{name}: constants from {len(plan.blocks)} blocks of rows")
            found[name] = identify_paper(plan, machine.constants, rows, evaluate.whole(out), evaluate)
    if out is not None:
        OutputFolder(out, "papers").put(_answered(out, found))
    sys.stdout.write(identified(found, form))
    return 0


def _answered(out: Path, found: dict[str, Identified]) -> dict[str, bytes]:
    """Make files of the answers, beside the derived ones if `moesim papers` has left them in this folder."""
    from moesim.plots.style import pictures
    from moesim.plots.validation import printed  # Matplotlib takes a second to import
    from moesim.studies.papers.three_ways import read_results, three_ways, write_constants, write_results

    files = {"identified.csv": identified(found, Format.CSV).encode(), "constants.csv": write_constants(found).encode()}
    if (out / "papers.csv").is_file():
        frame = three_ways(read_results(out / "papers.csv"), found)
        files["results.csv"] = write_results(frame).encode()
        files |= pictures(printed(frame, "derived, and identified with the row's table left out"), "results")
    return files


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
