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


_FOR_USERS = {
    "calibrate": "traces", "caches": "caches", "catalogue": "catalogue", "export": "traces", "fit": "synthetic",
    "import_": "traces", "learn": "recording", "lookahead": "caches", "record": "recording", "split": "traces",
    "synthesize": "synthetic",
}  # fmt: skip
"""Functions for users, which need everything above traces, by the module of `moesim.api` that has them."""


def __getattr__(name: str) -> Any:
    """Load a function for users when it is first used."""
    if name not in _FOR_USERS:
        raise AttributeError(f"module 'moesim.trace' has no attribute {name!r}")
    return getattr(import_module(f"moesim.api.{_FOR_USERS[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_FOR_USERS})
