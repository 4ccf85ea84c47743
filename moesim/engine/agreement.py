"""Playing a share of the runs on both engines, and stopping at the first record that differs."""

from __future__ import annotations

import hashlib
import os
from dataclasses import fields
from itertools import zip_longest

from moesim.core.record_table import RecordTable
from moesim.errors import ConfigError, SimulationError
from moesim.records import Records

VARIABLE = "MOESIM_VERIFY"
"""Environment variable with the share of runs, from 0 to 1, that a process and those that it starts play on both engines."""


def among_verified(run: object) -> bool:
    """Whether a run is among the share to verify; which runs are depends on what they are, not on the order of a sweep."""
    share = float(os.environ.get(VARIABLE) or 0)
    drawn = int.from_bytes(hashlib.sha256(repr(run).encode()).digest()[:8]) / 2**64
    return drawn < share


def verify_share(share: float | None) -> float | None:
    """Set the share of runs to verify; None changes nothing. Raises `ConfigError` where there is one engine only."""
    from moesim.engine import native

    if share:
        if not native.AVAILABLE:
            raise ConfigError(
                "verify: expected two engines, got simpy alone; install moesim with a C++ compiler, or leave it out"
            )
        os.environ[VARIABLE] = str(share)
    return share


def check_equal(python: Records, compiled: Records) -> None:
    """Compare the records of one run on both engines. Raises `SimulationError` with the first that differs."""
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
