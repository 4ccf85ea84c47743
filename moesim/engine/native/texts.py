"""Messages of the native engine, and numbers that it asks for once a step or more rarely."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from operator import index
from typing import TYPE_CHECKING, Any, NoReturn

from moesim.core.units import format_bytes, format_ns
from moesim.engine.actions import WRONG_TYPE, sources
from moesim.engine.state import fail_at as fail
from moesim.engine.state import short_repr
from moesim.engine.steps import check_length, kinds, n_requests
from moesim.engine.visit import gate_mass, inexact_records
from moesim.errors import DeadlockError, unknown_name, unknown_width

if TYPE_CHECKING:
    from moesim.engine.state import State

__all__ = [
    "WRONG_TYPE", "deadlock", "fail", "first_rows", "format_bytes", "format_ns", "gate_mass",
    "inexact_records", "is_iterable", "kinds", "n_requests", "short_repr", "sources",
    "too_long", "unknown_name", "unknown_width",
]  # fmt: skip


def deadlock(message: str) -> NoReturn:
    """Raise the error of a run in which nothing can happen."""
    raise DeadlockError(message)


def is_iterable(value: object) -> bool:
    """Whether a value can be iterated over."""
    return isinstance(value, Iterable)


def first_rows(rows: Iterable[Any]) -> str:
    """Write the first of some rows."""
    return repr([index(row) for row in islice(rows, 8)])


def too_long(state: State, now: int, step: int) -> None:
    """Refuse a run beyond the largest time."""
    check_length(state.costs.hardware.path, now, step)
