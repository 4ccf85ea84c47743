"""Traces: which experts a model chose, recorded token by token."""

from moesim.trace.parts import GateInputs, Signal
from moesim.trace.trace import SUFFIX, Trace, find_trace, trace_names

__all__ = [
    "SUFFIX",
    "GateInputs",
    "Signal",
    "Trace",
    "find_trace",
    "trace_names",
]
