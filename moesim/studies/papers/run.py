"""Run the experiments of papers, and compare what they print with what is simulated."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from moesim.core.files import OutputFolder, check_own_folder
from moesim.core.table import Format
from moesim.core.text import note
from moesim.experiment import run_experiment
from moesim.experiment.config import Config, load_config
from moesim.experiment.folder import Output
from moesim.experiment.resolve import Experiment
from moesim.experiment.sweep import expand, quick
from moesim.experiment.workers import Workers
from moesim.studies.papers.answers import run_clocked
from moesim.studies.papers.compare import (
    Agreement,
    Compared,
    Figure,
    Variant,
    agreements,
    check_answers,
    choose,
    compare,
    variants,
)
from moesim.studies.papers.compare import figures as figures_of
from moesim.studies.papers.published import PUBLISHED, paper_folder, read_published
from moesim.studies.papers.report import listing, records, report
from moesim.trace import Trace


class Chosen:
    """Published figures, and the experiments that are run for them."""

    def __init__(self, names: Sequence[str], small: bool) -> None:
        folder = paper_folder()
        self.small, self.place = small, str(folder / PUBLISHED)
        self.figures: list[Figure] = choose(figures_of(read_published(folder / PUBLISHED), folder), names)
        configs = {name: load_config(folder / f"{name}.yaml") for one in self.figures for name in one.experiments}
        check_answers((row for one in self.figures for row in one.rows), configs, self.place)
        self.configs = {name: quick(config) if small else config for name, config in configs.items()}

    def listing(self, form: Format) -> str:
        return listing(self.figures, {name: len(expand(config, name)) for name, config in self.configs.items()}, form)


@dataclass(frozen=True)
class Found:
    """Published figures next to simulated ones."""

    compared: list[Compared]
    beside: list[Variant]
    failures: list[str]
    small: bool

    @cached_property
    def ranks(self) -> list[Agreement]:
        return agreements(self.compared)

    def records(self) -> list[dict[str, Any]]:
        return records(self.compared, self.ranks, self.small)

    def text(self, form: Format) -> str:
        return report(self.compared, self.ranks, self.beside, form, small=self.small)

    def files(self) -> dict[str, bytes]:
        """Return the table as CSV, and its picture where numbers can be compared."""
        from moesim.plots.style import pictures
        from moesim.plots.validation import printed, printed_data  # Matplotlib takes a second to import

        text = self.text(Format.CSV)
        files = {"papers.csv": text.encode()}
        frame = pd.read_csv(io.StringIO(text), keep_default_na=False, na_values={"simulated": [""]})
        if len(printed_data(frame)):
            files |= pictures(printed(frame, "profiles to which nothing was fitted"), "papers")
        return files


def run_papers(chosen: Chosen, *, out: Path | None, jobs: int | None, progress: bool) -> Found:
    """Run the experiments, each into a folder of its own below `out`."""
    if out is not None:
        check_own_folder(out, "papers")
        OutputFolder(out, "papers").mark()
    clocked = {row.experiment for one in chosen.figures for row in one.rows if row.source == "decisions"}
    results: dict[str, list[dict[str, Any]]] = {}
    traces: dict[str, Trace] = {}
    failures: list[str] = []
    with Workers(jobs) as workers:
        for name, config in chosen.configs.items():
            if name in clocked:
                results[name] = run_clocked(Experiment(config, f"{name}.yaml", known=traces))
                failed = [f"{row['policy']}: {row['error']}" for row in results[name] if row["error"] is not None]
            else:
                results[name], failed = _run(config, name, workers, out, traces, progress)
            failures += [f"{name}: {line}" for line in failed]
    found = Found(
        [compare(row, results, chosen.place) for one in chosen.figures for row in one.rows],
        [one for name, rows in results.items() for one in variants(name, rows)], failures, chosen.small,
    )  # fmt: skip
    if out is not None:
        OutputFolder(out, "papers").put(found.files())
    return found


def _run(
    config: Config, name: str, workers: Workers, out: Path | None, traces: dict[str, Trace], progress: bool
) -> tuple[list[dict[str, Any]], list[str]]:
    experiment = Experiment(config, f"{name}.yaml", known=traces)
    if out is None:
        found = run_experiment(experiment, workers=workers, progress=progress)
        return found.rows, found.failures
    output = Output(experiment, out / name)
    found = run_experiment(experiment, keep=output.kept.get, progress=progress, folder=output.folder, workers=workers)
    output.write(found, workers)
    if found.n_found:
        note(f"{found.n_found} of {len(found.outcomes)} runs were in {out / name} already")
    return found.rows, found.failures
