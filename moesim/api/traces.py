"""Traces from Python."""

from __future__ import annotations

from pathlib import Path
from weakref import WeakKeyDictionary

from moesim.trace import Trace, find_trace

NAMES: WeakKeyDictionary[Trace, str] = WeakKeyDictionary()
"""What traces that were loaded here were asked for by; one that was made of another is not among them."""


def load_trace(name_or_path: str | Path) -> Trace:
    """Read a trace.

    Parameters
    ----------
    name_or_path : str or Path
        A name of ``moesim list traces``, or a path.

    Returns
    -------
    Trace

    Raises
    ------
    TraceError
        If there is none, or it is damaged.
    """
    trace = Trace.read(find_trace(name_or_path))
    NAMES[trace] = str(name_or_path)
    return trace
