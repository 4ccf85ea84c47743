"""Which of the two engines carries a run out: SimPy's, the reference, or the native one; and whether they agree."""

from __future__ import annotations

import hashlib
import os
from dataclasses import fields
from itertools import zip_longest

from moesim.core.record_table import RecordTable
from moesim.engine import native
from moesim.errors import ConfigError, SimulationError
from moesim.records import Records

ENGINES = ("simpy", "native")
VARIABLE = "MOESIM_ENGINE"
"""Environment variable that forces an engine in a process and in those that it starts."""
VERIFY = "MOESIM_VERIFY"
"""Environment variable with the share of runs, from 0 to 1, that a process and those that it starts play on both engines."""


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


def verify_share(share: float | None) -> float | None:
    """Set the share of runs to verify; None changes nothing."""
    if share:
        if not native.AVAILABLE:
            raise ConfigError(
                "verify: expected two engines, got simpy alone; install moesim with a C++ compiler, or leave it out"
            )
        os.environ[VERIFY] = str(share)
    return share


def among_verified(run: object) -> bool:
    """Whether a run is among the share to verify; which runs are depends on what they are, not on the order of a sweep."""
    share = float(os.environ.get(VERIFY) or 0)
    drawn = int.from_bytes(hashlib.sha256(repr(run).encode()).digest()[:8]) / 2**64
    return drawn < share


def check_equal(python: Records, compiled: Records) -> None:
    """Compare the records of one run on both engines; refuse the first that differs."""
    for name in (field.name for field in fields(Records)):
        left, right = getattr(python, name), getattr(compiled, name)
        if left == right:
            continue
        place = name
        if isinstance(left, RecordTable):
            pairs = enumerate(zip_longest(left, right))
            at, (left, right) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
            place = f"{name}[{at}]"
        raise SimulationError(f"engines differ: {place}: simpy {left!r}, native {right!r}; report it, and use --engine simpy")
