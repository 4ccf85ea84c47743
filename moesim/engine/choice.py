"""Which of the two engines carries a run out: SimPy's, the reference, or the native one, where it is built."""

from __future__ import annotations

import os

from moesim.engine import native
from moesim.errors import ConfigError

ENGINES = ("simpy", "native")
VARIABLE = "MOESIM_ENGINE"
"""Environment variable that forces an engine in a process and in those that it starts."""


def chosen(asked: str | None = None) -> str:
    """Name the engine: the one asked for or forced by `VARIABLE`, else the native one if it is built."""
    forced, place = (asked, "engine") if asked is not None else (os.environ.get(VARIABLE, ""), VARIABLE)
    if not forced:
        return "native" if native.AVAILABLE else "simpy"
    if forced not in ENGINES:
        raise ConfigError(f"{place}: expected simpy or native, got {forced!r}; leave it out for the fastest that is there")
    if forced == "native" and not native.AVAILABLE:
        raise ConfigError(f"{place}: the native engine is not built here; install moesim with a C++ compiler, or use simpy")
    return forced


def force(engine: str | None) -> str | None:
    """Make all runs of this process and of its workers use an engine; None changes nothing."""
    if engine is not None:
        os.environ[VARIABLE] = chosen(engine)
    return engine
