"""Requests of a trace, composed into batched steps."""

from moesim.trace.workload.compose import Workload, compose
from moesim.trace.workload.routing import MicroBatch
from moesim.trace.workload.spec import WorkloadSpec
from moesim.trace.workload.steps import Step

__all__ = [
    "MicroBatch",
    "Step",
    "Workload",
    "WorkloadSpec",
    "compose",
]
