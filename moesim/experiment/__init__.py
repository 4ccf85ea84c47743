"""From YAML to a grid of runs to results."""

from moesim.experiment.run import (
    Results,
    describe_run,
    run_experiment,
)

__all__ = [
    "Results",
    "describe_run",
    "run_experiment",
]
