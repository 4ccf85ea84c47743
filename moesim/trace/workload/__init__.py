"""Requests of a trace, composed into batched steps."""

from moesim.trace.workload.compose import (
    MicroBatch,
    Step,
    Workload,
    WorkloadSpec,
    compose,
)

__all__ = [
    "MicroBatch",
    "Step",
    "Workload",
    "WorkloadSpec",
    "compose",
]
