"""Figures of the papers: the rows of the table that belong together, and the experiments that are run for them.

Every row of the table of published figures selects something, which shows before anything runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moesim.errors import ConfigError, unknown_name
from moesim.experiment.config import Config
from moesim.experiment.sweep import expand
from moesim.metrics.naming import policy_label
from moesim.model import load_model
from moesim.studies.papers.compare import select, sides
from moesim.studies.papers.cost_figures import check_cost
from moesim.studies.papers.published import PUBLISHED, SHARED, Published
from moesim.studies.papers.routing_figures import check_figure


@dataclass(frozen=True)
class Figure:
    """A figure or table of a paper, or an experiment beside it that no printed number belongs to."""

    paper: str
    name: str
    ref: str
    rows: tuple[Published, ...]  # its printed numbers
    experiments: tuple[str, ...]  # what is run for it, as paper and file name without suffix


def figures(rows: Sequence[Published], folder: Path) -> list[Figure]:
    """List the figures of all papers, with the experiments in their folders that no printed number belongs to."""
    found = []
    for paper in dict.fromkeys(row.paper for row in rows):
        mine = [row for row in rows if row.paper == paper]
        there = [f"{paper}/{path.stem}" for path in sorted((folder / paper).glob("*.yaml")) if path.stem[0] != SHARED]
        for name in dict.fromkeys(row.figure for row in mine):
            of = tuple(row for row in mine if row.figure == name)
            runs = tuple(dict.fromkeys(e for row in of for e in (row.experiment, row.baseline_experiment) if e))
            for experiment in runs:
                if experiment not in there:
                    known = unknown_name("experiment", experiment, there)
                    raise ConfigError(f"{folder / PUBLISHED}: {paper}/{name}: input: {known}")
            found.append(Figure(paper, name, next((row.ref for row in of if row.ref), ""), of, runs))
        named = {experiment for figure in found for experiment in figure.experiments}
        found += [Figure(paper, e.partition("/")[2], "", (), (e,)) for e in there if e not in named]
    return found


def choose(known: Sequence[Figure], names: Iterable[str]) -> list[Figure]:
    """Choose figures by the names of papers or as ``"paper/figure"``; no name chooses all."""
    wanted = list(names)
    possible = {figure.paper for figure in known} | {f"{figure.paper}/{figure.name}" for figure in known}
    for name in wanted:
        if name not in possible:
            paper = name.partition("/")[0]
            near = {one for one in possible if one.startswith(f"{paper}/")} or {one for one in possible if "/" not in one}
            raise ConfigError(f"papers: {unknown_name('figure' if '/' in name else 'paper', name, near)}")
    return [one for one in known if not wanted or one.paper in wanted or f"{one.paper}/{one.name}" in wanted]


def check_answers(rows: Iterable[Published], configs: Mapping[str, Config], place: str) -> None:
    """Check that rows name policies and settings that their experiments have, and statistics and costs that there are."""
    grids = {name: _grid(config, f"{name}.yaml") for name, config in configs.items()}
    for row in rows:
        where = f"{place}: {row.name}"
        if row.source == "trace":
            check_figure(row.metric, row.arguments(), where)
        elif row.source == "costs":
            check_cost(row.metric, row.arguments(), where)
        mine, theirs, _ = sides(row.where) if row.experiment else ("", "", None)
        for name, policy, side in ((row.experiment, row.policy, mine), (row.baseline_experiment, row.baseline, theirs)):
            if not name:
                continue
            known = {str(one["policy"]) for one in grids[name]}
            if policy not in known:
                raise ConfigError(f"{where}: {unknown_name(f'policy of {name}.yaml', policy, known)}")
            if not select(grids[name], policy, side, where):
                raise ConfigError(f"{where}: where: expected settings of some run of {name}.yaml, got '{side}'")


def _grid(config: Config, place: str) -> list[dict[str, Any]]:
    """Give what can be selected by, of every run."""
    return [
        {
            "policy": policy_label(point.policy),
            "model": load_model(point.model, f"{place}: model").name,
            **point.row(),
        }
        for point in expand(config, place)
    ]
