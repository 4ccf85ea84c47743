"""``moesim papers``: published results beside simulated ones."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from moesim.atomic import write_bytes
from moesim.commands.outputs import check_out_folder
from moesim.errors import ConfigError, unknown_name
from moesim.experiment import run_experiment
from moesim.experiment.config import load_config
from moesim.experiment.quick import quick
from moesim.experiment.report import result_table
from moesim.experiment.resolve import Experiment
from moesim.studies.papers import PUBLISHED, Compared, Variant, compare, paper_folder, read_published, variants
from moesim.table import Format, render, render_records

HEADINGS = ["paper", "what", "published", "simulated", "range", "runs", "ratio", "label", "remark"]


def papers(
    names: Annotated[list[str] | None, typer.Argument(metavar="[PAPER]...", help="Which papers; default: all.")] = None,
    small: Annotated[bool, typer.Option("--quick", help="First value of each sweep and at most 4 decode tokens.")] = False,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Processes.")] = 1,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the results of every run, as CSV.")] = None,
    form: Annotated[Format, typer.Option("-o", "--output-format", help="How to print it.")] = Format.TABLE,
) -> int:
    """Run the experiments of the papers and print each published figure beside the simulated one.

    A report, not a test: nothing is tuned to a published figure. What has no counterpart is listed with the reason.
    """
    folder = paper_folder()
    figures = read_published(folder / PUBLISHED)
    known = list(dict.fromkeys(figure.paper for figure in figures))
    for name in names or ():
        if name not in known:
            raise ConfigError(f"papers: {unknown_name('paper', name, known)}")
    figures = [figure for figure in figures if not names or figure.paper in names]
    files = dict.fromkeys(f for figure in figures for f in (figure.experiment, figure.baseline_experiment) if f)
    files |= dict.fromkeys(path.stem for name in names or known for path in sorted(folder.glob(f"{name}-*.yaml")))
    if out is not None:
        check_out_folder(out, option="--out")
    results: dict[str, list[Any]] = {}
    failures: list[str] = []
    for file in files:
        config = load_config(folder / f"{file}.yaml")
        found = run_experiment(Experiment(quick(config) if small else config, f"{file}.yaml"), jobs=jobs, progress=True)
        results[file] = found.rows
        failures += [f"{file}: {line}" for line in found.failures]
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            write_bytes(out / f"{file}.csv", result_table(found.rows, Format.CSV).encode())
    sys.stdout.write(table([compare(figure, results) for figure in figures], form))
    if form not in (Format.CSV, Format.JSON):
        sys.stdout.write("\n" + variant_table([one for file, rows in results.items() for one in variants(file, rows)], form))
    for line in failures:
        print(f"moesim: {line}", file=sys.stderr)
    return 1 if failures else 0


def table(compared: list[Compared], form: Format) -> str:
    """Write published beside simulated.

    Parameters
    ----------
    compared : list of Compared
        One a figure.
    form : Format
        How.

    Returns
    -------
    str
        Ends with a newline.
    """
    if form in (Format.CSV, Format.JSON):
        return render_records([one.record() for one in compared], form)
    return render(HEADINGS, [_cells(one) for one in compared], form, HEADINGS[2:7])


def variant_table(found: list[Variant], form: Format) -> str:
    """Write the policies of each experiment beside its first.

    Parameters
    ----------
    found : list of Variant
        Of all experiments.
    form : Format
        How.

    Returns
    -------
    str
        Ends with a newline.
    """
    columns = ["experiment", "policy", "settings", "decode speed", "range", "prefill speed", "fresh %"]
    rows = [
        [one.experiment, one.policy, str(one.n_settings), _share(one.decode),
         "" if one.low is None else f"{_share(one.low)} to {_share(one.high)}", _share(one.prefill),
         "" if one.fidelity is None else f"{100 * one.fidelity:.1f}"]
        for one in found
    ]  # fmt: skip
    note = "decode and prefill speed: as shares of the first policy of the experiment, geometric mean over its settings\n"
    return render(columns, rows, form, columns[2:]) + "\n" + note


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _cells(one: Compared) -> list[str]:
    figure = one.published
    printed = f"{figure.published:g} {figure.unit}"
    if one.simulated is None or one.low is None or one.high is None or one.ratio is None:
        return [figure.paper, figure.what, printed, "not yet comparable", "", "", "", "", figure.remark]
    span = f"{one.low:.3g} to {one.high:.3g}" if one.n_runs > 1 else ""
    return [
        figure.paper, figure.what, printed, f"{one.simulated:.3g}", span, str(one.n_runs), f"{one.ratio:.2f}", one.label,
        figure.remark,
    ]  # fmt: skip
