"""No dead rows: every row of the table of published figures selects something, which shows before anything runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from moesim.errors import ConfigError, unknown_name
from moesim.experiment.config import Config
from moesim.experiment.sweep import expand
from moesim.metrics.naming import policy_label
from moesim.model import load_model
from moesim.studies.papers.compare import select, sides
from moesim.studies.papers.cost_figures import check_cost
from moesim.studies.papers.published import Published
from moesim.studies.papers.routing_figures import check_figure


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
