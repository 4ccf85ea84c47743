"""Runs that failed, told in few words: one line for all runs of a policy whose errors differ in numbers alone."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from moesim.metrics.naming import cache_asked

_NUMBER: Final = re.compile(r"\d[\d.,]*")


def describe_run(row: Mapping[str, Any]) -> str:
    """Say in a few words which run a row is of.

    >>> describe_run({"run": 3, "policy": "lru", "cache_ratio": 0.5, "cache_budget_bytes": None, "batch_size": 4})
    'run 3 (lru, cache 0.5, batch 4)'
    """
    return f"run {row['run']} ({row['policy']}, {_setting(row)})"


def failure_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Write a line for each run that failed, or for the runs of a policy that failed alike: the first, with its error.

    >>> cases = [{"run": run, "policy": "lru", "cache_ratio": 0.5, "batch_size": run + 1} for run in range(3)]
    >>> failure_lines([case | {"error": f"needs {case['run']} GB"} for case in cases])
    ['3 runs of lru, the first run 0 (cache 0.5, batch 1): needs 0 GB']
    """
    lines = []
    for alike in _alike(rows):
        first = alike[0]
        many = f"{len(alike)} runs of {first['policy']}, the first run {first['run']} ({_setting(first)})"
        lines.append(f"{many if len(alike) > 1 else describe_run(first)}: {first['error']}")
    return lines


def failure_notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Write the same for the foot of a table, without remedies: those stand in the lines on standard error."""
    notes = []
    for alike in _alike(rows):
        first = alike[0]
        many = f", {len(alike)} runs, the first {_setting(first)}" if len(alike) > 1 else ""
        notes.append(f"failed: {first['policy']}{many}: {str(first['error']).split('; ')[0]}")
    return notes


def _alike(rows: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row.get("error"):
            found.setdefault((str(row["policy"]), _NUMBER.sub("#", str(row["error"]))), []).append(row)
    return list(found.values())


def _setting(row: Mapping[str, Any]) -> str:
    return f"cache {cache_asked(row)}, batch {row.get('batch_size')}"
