"""From YAML to a grid of runs to results."""

from moesim.experiment.report import describe_run
from moesim.experiment.run import (
    Results,
    run_experiment,
)

__all__ = [
    "Results",
    "describe_run",
    "run_experiment",
]
