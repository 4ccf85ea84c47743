"""Requests of a trace, composed into batched steps."""

from moesim.trace.workload.compose import MicroBatch, Step, Workload, compose
from moesim.trace.workload.spec import KvPlace, WorkloadSpec

__all__ = [
    "KvPlace",
    "MicroBatch",
    "Step",
    "Workload",
    "WorkloadSpec",
    "compose",
]
