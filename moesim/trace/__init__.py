"""Traces: which experts a model chose, recorded token by token."""

from importlib import import_module
from typing import Any

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


def __getattr__(name: str) -> Any:
    """Load `import_`, which is a function for users and needs everything above traces, when it is first used."""
    if name != "import_":
        raise AttributeError(f"module 'moesim.trace' has no attribute {name!r}")
    return import_module("moesim.api.traces").import_
