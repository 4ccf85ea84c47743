"""Rows of results: numbers of one, failures in few words, repeats as means with intervals."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from math import sqrt
from statistics import fmean, stdev
from typing import Any, Final

from moesim.core.student import student_t
from moesim.metrics.fidelity import is_exact
from moesim.metrics.naming import CACHE_SETTINGS, SETTINGS, cache_asked

Row = Mapping[str, Any]


def number(row: Row, key: str, scale: float = 1.0) -> float | None:
    """Return a value of a row times a scale; None if it is no finite number."""
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value * scale


def fresh_share(row: Row) -> float | None:
    """Return the share of gate weight served as routed while decoding, else in the whole run."""
    share = number(row, "fidelity_fresh_decode")
    return number(row, "fidelity_fresh") if share is None else share


def is_lossy(row: Row) -> bool:
    """Return whether a run computed anything else than the model asked for."""
    shares = (number(row, "fidelity_fresh"), number(row, "fidelity_fresh_decode"))
    return any(share is not None and not is_exact(share) for share in shares) or bool(number(row, "n_inexact_slots"))


def moved_mb(row: Row, *causes: str) -> float | None:
    """Return the MB over the links for each generated token, of some causes."""
    tokens = number(row, "n_generated_tokens")
    known = [part for cause in causes if (part := number(row, f"bytes_{cause}")) is not None]
    return sum(known) / tokens / 1e6 if tokens and known else None


def busy_percent(row: Row, kind: str) -> float | None:
    """Return the mean busy share of the devices of a kind, in percent."""
    names = [key for key in row if key.startswith(f"utilisation.{kind}") and "->" not in key]
    shares = [share for name in names if (share := number(row, name, 100)) is not None]
    return sum(shares) / len(shares) if shares else None


_NUMBER: Final = re.compile(r"\d[\d.,]*")


def describe_run(row: Mapping[str, Any]) -> str:
    """Describe in a few words which run a row is of.

    >>> describe_run({"run": 3, "policy": "lru", "cache_ratio": 0.5, "cache_budget_bytes": None, "batch_size": 4})
    'run 3 (lru, cache 0.5, batch 4)'
    """
    return f"run {row['run']} ({row['policy']}, {_setting(row)})"


def failure_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Write a line for each run that failed, or for a policy's runs that failed alike.

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
    """Write the same for the foot of a table, without remedies."""
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


CI: Final = "ci95."
"""Beginning of the name of a column that holds half the width of an interval."""
_SEEDED = ("seed", "trace")  # what differs between repeats; of a trace only if it is made up
_DRAWN = ("trace", "requests_drawn")  # two repeats with the same ones are no two draws
_APART = ("run", "repeat", "key", "group", "workload_digest", "requests_drawn", *_SEEDED)


def count_repeats(rows: Sequence[Row]) -> int:
    """Count the repeats of a run."""
    return 1 + max((int(row.get("repeat") or 0) for row in rows), default=0)


def repeated(rows: Sequence[Row]) -> bool:
    """Whether there are repeats among rows."""
    return any(row.get("repeat") for row in rows)


def aggregate(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Put the repeats of each run together.

    In the order of the first repeats: settings and labels as in the first one, ``repeats`` (how many succeeded), and for every
    metric its mean and, under its name with `CI` before it, half the width of the 95 % interval by Student's t. Repeats that
    drew the same requests from a trace count as one draw, with their mean; fewer than two draws have no interval (None). If any
    repeat failed, ``error`` says how many did.
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(_identity(row), []).append(row)
    return [_together(group) for group in groups.values()]


def _identity(row: Row) -> str:
    if row.get("group"):
        return str(row["group"])
    names = [name for name in (*SETTINGS, *CACHE_SETTINGS) if name not in _SEEDED]
    trace = str(row.get("trace"))
    made_up = trace.rpartition("-seed")[0] if trace.startswith("synthetic-") else trace
    return json.dumps([row["policy"], made_up, *(row.get(name) for name in names)], default=str)


def _together(group: Sequence[Row]) -> dict[str, Any]:
    done = [row for row in group if not row.get("error")]
    first = (done or group)[0]
    n_failed = len(group) - len(done)
    whole: dict[str, Any] = {"repeats": len(done)}
    draws: dict[tuple[Any, ...], list[int]] = {}
    for i, row in enumerate(done):
        draws.setdefault(tuple(row.get(name) for name in _DRAWN), []).append(i)
    n_draws = len(draws)
    settings = {*SETTINGS, *CACHE_SETTINGS, *_APART}
    for name in dict.fromkeys(name for row in done or group for name in row):
        told = {value for row in done if (value := row.get(name)) is not None}
        if name in settings or name.startswith("policy") or not told or not all(_is_number(value) for value in told):
            whole[name] = first.get(name)
        else:  # a metric may have no meaning in some of the repeats
            found = [[value for i in draw if (value := done[i].get(name)) is not None] for draw in draws.values()]
            means = [fmean(values) for values in found if values]
            whole[name], whole[CI + name] = fmean(means), half_width(means)
    if 0 < n_draws < len(done):
        sets = "the same requests" if n_draws == 1 else f"{n_draws} different sets of requests"
        whole["notes"] = ", ".join(part for part in (str(whole.get("notes") or ""), f"{len(done)} seeds drew {sets}") if part)
    whole["error"] = f"{n_failed} of {len(group)} repeats failed" if n_failed else None
    return whole


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def half_width(values: Sequence[float]) -> float | None:
    """Return half the width of the 95 % interval of a mean, by Student's t.

    >>> round(half_width([1.0, 2.0, 3.0]), 3)
    2.484
    """
    n = len(values)
    return None if n < 2 else student_t(0.95, n) * stdev(values) / sqrt(n)
