"""The shortened runs by which a paper's platform is identified, on several machines at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moesim.errors import ConfigError
from moesim.experiment import run_experiment
from moesim.experiment.config import Config
from moesim.experiment.naming import policy_label
from moesim.experiment.resolve import Experiment
from moesim.experiment.sweep import expand
from moesim.studies.paper_identify import Plan, Point
from moesim.studies.papers import Compared, compare
from moesim.studies.published import Published

Row = Mapping[str, Any]


@dataclass
class Evaluator:
    """Runs what the rows of a paper need, shortened, on machines with other constants.

    Parameters
    ----------
    plan : Plan
        What is identified.
    rows : list of Published
        Rows that take part.
    configs : mapping of str to Config
        Their experiments, whole.
    jobs : int or None
        Processes.
    folder : Path, optional
        Where runs are kept: what has been run there is not run again.
    """

    plan: Plan
    rows: Sequence[Published]
    configs: Mapping[str, Config]
    jobs: int | None = None
    folder: Path | None = None
    n_runs: int = field(default=0, init=False)

    def __call__(self, points: Sequence[Point]) -> list[list[Compared]]:
        """Compare all rows on each machine; see `moesim.studies.paper_identify.Evaluate`."""
        machines = [_machine(self.plan.hardware, point) for point in points]
        results: list[dict[str, list[Row]]] = [{} for _ in points]
        for name, policies in self._needed().items():
            for found, rows in zip(results, self._run(name, policies, machines), strict=True):
                found[name] = rows
        return [[compare(row, found) for row in self.rows] for found in results]

    def _needed(self) -> dict[str, set[str]]:
        needed: dict[str, set[str]] = {}
        for row in self.rows:
            for name, policy in ((row.experiment, row.policy), (row.baseline_experiment, row.baseline)):
                if name:
                    needed.setdefault(name, set()).add(policy)
        return needed

    def _run(self, name: str, policies: set[str], machines: Sequence[Any]) -> list[list[Row]]:
        config = self.configs[name]
        chosen = {policy_label(point.policy): dict(point.policy) for point in expand(config, name)}
        kept = [spec for label, spec in chosen.items() if label in policies]
        if config.hardware != self.plan.hardware:
            raise ConfigError(
                f"{name}.yaml: hardware: expected {self.plan.hardware}, whose constants are free, got {config.hardware}"
            )
        changes = {"hardware": list(machines), "policies": kept, "plots": [], "timeline": None, "exclude": []}
        shorter = {} if name.rpartition("/")[2] in self.plan.whole else self._shorter(config)
        experiment = Experiment(config.model_copy(update=changes | shorter), f"{name}.yaml")
        found = run_experiment(experiment, jobs=self.jobs, progress=True, folder=self.folder)
        self.n_runs += len(found.outcomes)
        rows: list[list[Row]] = [[] for _ in machines]
        for spec, outcome in zip(experiment.specs, found.outcomes, strict=True):
            rows[machines.index(spec.point.hardware)].append(outcome.row)
        return rows

    def _shorter(self, config: Config) -> dict[str, Any]:
        workload = config.workload
        asked = workload.decode_tokens
        if not isinstance(asked, int) or asked <= self.plan.decode_tokens:
            return {}
        return {"workload": workload.model_copy(update={"decode_tokens": self.plan.decode_tokens})}


def _machine(name: str, point: Point) -> Any:
    if point is None:
        return name
    how = "identified from printed speeds of the same paper"
    numbers = {
        key: {"value": value, "source": "identified", "how": how, "interval": [value, value]} for key, value in point.items()
    }
    return {"base": name, **numbers}
