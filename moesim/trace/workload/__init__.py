"""Requests of a trace, composed into batched steps."""

from moesim.trace.workload.compose import MicroBatch, Step, Workload, compose
from moesim.trace.workload.spec import WorkloadSpec

__all__ = [
    "MicroBatch",
    "Step",
    "Workload",
    "WorkloadSpec",
    "compose",
]
