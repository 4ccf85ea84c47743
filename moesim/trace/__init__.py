"""Traces: which experts a model chose, recorded token by token."""

from moesim.trace.trace import (
    SUFFIX,
    Signal,
    Trace,
    find_trace,
    trace_names,
)

__all__ = [
    "SUFFIX",
    "Signal",
    "Trace",
    "find_trace",
    "trace_names",
]
