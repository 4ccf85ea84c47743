"""The shortened runs by which a paper's platform is identified, on several machines at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moesim.errors import ConfigError
from moesim.experiment import run_experiment
from moesim.experiment.config import Config
from moesim.experiment.resolve import Experiment
from moesim.experiment.spec import RunSpec
from moesim.experiment.workers import Workers
from moesim.hardware import HardwareProfile
from moesim.studies.identify.constants import Machine
from moesim.studies.papers.compare import Compared, compare, select, sides
from moesim.studies.papers.plan import Plan
from moesim.studies.papers.published import Published
from moesim.studies.papers.response import Point
from moesim.trace import Trace

Row = Mapping[str, Any]


@dataclass
class Evaluator:
    """Runs what the rows of a paper need, shortened, on machines with other constants."""

    plan: Plan  # what is identified
    machine: Machine  # with its free constants
    rows: Sequence[Published]  # that take part
    configs: Mapping[str, Config]  # their experiments, whole
    workers: Workers
    folder: Path  # what has been run there is not run again
    traces: dict[str, Trace] = field(default_factory=dict)
    _experiments: dict[str, Experiment] = field(default_factory=dict, init=False)

    def __call__(self, points: Sequence[Point | None], which: Sequence[int]) -> list[list[Compared]]:
        """Compare rows on each machine; see `moesim.studies.papers.identify.Evaluate`."""
        rows = [self.rows[index] for index in which]
        results: list[dict[str, list[Row]]] = [{} for _ in points]
        for name in dict.fromkeys(one for row in rows for one in (row.experiment, row.baseline_experiment) if one):
            for found, mine in zip(results, self._run(name, rows, points), strict=True):
                found[name] = mine
        return [[compare(row, found) for row in rows] for found in results]

    def whole(self, kept: Path | None) -> list[Compared]:
        """Compare all rows by whole runs on the profile as it is, those in a folder of `moesim papers` not run again."""
        results = {}
        for name, config in self.configs.items():
            if any(name in (row.experiment, row.baseline_experiment) for row in self.rows if row.source == "runs"):
                experiment = Experiment(config, f"{name}.yaml", known=self.traces)
                folder = None if kept is None else kept / name
                results[name] = run_experiment(experiment, workers=self.workers, progress=True, folder=folder).rows
        return [compare(row, results) if row.source == "runs" else Compared(row) for row in self.rows]

    def _run(self, name: str, rows: Sequence[Published], points: Sequence[Point | None]) -> list[list[Row]]:
        """Carry out all runs of an experiment that rows ask for, on all machines together."""
        experiment = self._experiment(name)
        wanted = self._wanted(name, rows)
        specs = [self._at(spec, point) for point in points for spec in wanted]
        found = run_experiment(experiment.of(specs), workers=self.workers, progress=True, folder=self.folder)
        if found.failures:
            raise ConfigError(f"{name}.yaml: {found.failures[0]}")
        whole = self.configs[name].workload
        done: list[Row] = [stretched(o.row, whole.decode_tokens) for o in found.outcomes]
        return [done[i : i + len(wanted)] for i in range(0, len(done), len(wanted))]

    def _experiment(self, name: str) -> Experiment:
        if name not in self._experiments:
            config = self.configs[name]
            changes: dict[str, Any] = {
                "plots": [],
                "timeline": None,
                "workload": config.workload.model_copy(update=self._shorter(name, config)),
            }
            self._experiments[name] = Experiment(config.model_copy(update=changes), f"{name}.yaml", known=self.traces)
        return self._experiments[name]

    def _shorter(self, name: str, config: Config) -> dict[str, int]:
        short, asked = self.plan.lengths.get(name.rpartition("/")[2], self.plan.decode_tokens), config.workload.decode_tokens
        return {"decode_tokens": short} if short and isinstance(asked, int) and short < asked else {}

    def _wanted(self, name: str, rows: Sequence[Published]) -> list[RunSpec]:
        experiment = self._experiment(name)
        known = [
            {
                "policy": spec.policy_name, "model": spec.model.name, **spec.point.row(), "spec": spec}
            for spec in experiment.specs
        ]  # fmt: skip
        whole = {key: getattr(self.configs[name].workload, key) for key in self._shorter(name, self.configs[name])}
        chosen: dict[int, RunSpec] = {}
        for row in rows:
            mine, theirs, _ = sides(row.where)
            for one, policy, where in ((row.experiment, row.policy, mine), (row.baseline_experiment, row.baseline, theirs)):
                if one == name:
                    for run in select([{**entry, **whole} for entry in known], policy, where):
                        chosen[run["spec"].index] = run["spec"]
        return [chosen[index] for index in sorted(chosen)]

    def _at(self, spec: RunSpec, point: Point | None) -> RunSpec:
        if point is None:
            return spec
        bits = dict(point.bits).get(spec.model.name)
        model = spec.model if bits is None else replace(spec.model, expert_bits=bits)
        return replace(spec, hardware=self._machine(point, spec), model=model)

    def _machine(self, point: Point, spec: RunSpec) -> HardwareProfile:
        """Give the machine; rows of another one than the plan's stay on theirs."""
        if spec.hardware.name != self.machine.base.name:
            return spec.hardware
        return self.machine.with_factors(point.logs)


def stretched(row: Row, decode_tokens: Any) -> dict[str, Any]:
    """Give what a run of the whole length would say: totals grow with decoded tokens; prefill, shares and steps stay."""
    found = dict(row)
    decode = decode_tokens / row["decode_tokens"] if isinstance(decode_tokens, int) else 1.0
    if decode == 1:
        return found
    prefill = row["ttft_mean_ns"] * row["n_batches"]
    found["makespan_ns"] = prefill + (row["makespan_ns"] - prefill) * decode
    later = row["decode_time_dense_ns"]
    found["time_dense_ns"] = row["time_dense_ns"] - later + later * decode
    found["n_generated_tokens"] = row["n_generated_tokens"] * (decode_tokens + 1) / (row["decode_tokens"] + 1)
    joules = row["energy_j"] * found["makespan_ns"] / row["makespan_ns"] if row.get("energy_j") is not None else None
    found["energy_j_per_token"] = None if joules is None else joules / found["n_generated_tokens"]
    return found
