"""How much of the time an inference would take for its decisions, if they took as long as they take here, in Python."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from moesim.core.progress import Progress
from moesim.engine import simulate
from moesim.experiment.resolve import Experiment
from moesim.experiment.runner import Execution, run_one
from moesim.policy import Policy
from moesim.records import Records
from moesim.studies.bench import Clocked

COLUMN = "decision_cpu_ns"
NOTE = "decisions measured on this machine, in Python"


def run_clocked(experiment: Experiment) -> list[dict[str, Any]]:
    """Run an experiment with a clock around each policy's decisions, one run after another, in this process."""
    rows = []
    with Progress(len(experiment.specs), enabled=True) as bar:
        for spec in experiment.specs:
            bar.describe(spec.policy_name)
            clocks: list[Clocked] = []

            def clocked(*, policy: Policy, clocks: list[Clocked] = clocks, **rest: Any) -> Records:
                clocks.append(Clocked(policy, time.process_time_ns))
                return simulate(policy=clocks[-1], **rest)

            row = dict(run_one(experiment, spec, execution=Execution(clocked, notes=lambda: [NOTE])).row)
            rows.append(row | {COLUMN: sum(clock.decide_ns + clock.evict_ns for clock in clocks)})
            bar.advance(1)
    return rows


def decision_share(row: Mapping[str, Any]) -> float:
    """Compute the share of decisions in the sum of their time here and the simulated time, of a row of `run_clocked`.

    >>> decision_share({"makespan_ns": 3_000, "decision_cpu_ns": 1_000})
    0.25
    """
    spent = float(row[COLUMN])
    return spent / (spent + float(row["makespan_ns"]))
