"""For each interpreter in a copy of the tree: import the copy's package, and note which faults a test reaches and what fails.

Python imports this module by its name at its start, and pytest as a plugin, when it is too late to rewrite its assertions
(PYTEST_DONT_REWRITE).
"""

from __future__ import annotations

import builtins
import os
import sys
from typing import Any

# An editable installation would give the checkout's package instead.
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
_seen: set[tuple[int, str]] = set()


def _append(variable: str, *fields: object) -> None:
    """Write a line to the file that a variable names; processes may write to the same file."""
    if place := os.environ.get(variable):
        line = "\t".join(map(str, fields)) + "\n"
        descriptor = os.open(place, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)


def _reached(number: int) -> None:
    """Note that the present test reaches the place of a fault; processes that a test starts inherit its name."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "")
    if (number, test) not in _seen:
        _seen.add((number, test))
        _append("MUTANTS_REACHED", number, test.rpartition(" (")[0])


builtins._reached = _reached  # type: ignore[attr-defined]


def pytest_runtest_logreport(report: Any) -> None:
    """Note how a part of a test ended, and how long it took; of several processes one hears of all."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        _append("MUTANTS_REPORTS", report.nodeid, report.outcome, report.duration)
