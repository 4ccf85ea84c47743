"""What stands below a table of results: what all rows have in common, notes, and what failed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moesim.experiment.failed_runs import failure_notes
from moesim.experiment.report_columns import batch, fresh
from moesim.experiment.row_values import Row, is_lossy
from moesim.hardware.costs import NO_CURVE
from moesim.metrics.naming import COLUMNS, LIVE, NOT_VARIED, cache_asked, notes_of

_OF_COSTS = (NO_CURVE, NOT_VARIED)
"""How notes begin that are long, and stand once below a table."""


def split_notes(row: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Divide the notes of a result."""
    notes = [note for note in str(row.get("notes") or "").split(", ") if note]
    return [n for n in notes if not n.startswith(_OF_COSTS)], [n for n in notes if n.startswith(_OF_COSTS)]


def cost_notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """List the notes about costs of all rows, each once."""
    return notes_of(note for row in rows for note in split_notes(row)[1])


def _common_notes(done: Sequence[Row]) -> list[str]:
    """List the notes of all runs, which stand once below the table."""
    notes = [split_notes(row)[0] for row in done]
    return [note for note in notes[0] if all(note in one for one in notes)] if notes else []


def _other_notes(done: Sequence[Row], common: Sequence[str]) -> list[str]:
    """Write the notes of some runs, each once, with the policies or the settings whose runs have it."""
    notes = [split_notes(row)[0] for row in done]
    found = dict.fromkeys(note for one in notes for note in one if note not in common)
    return [f"{note}: {_whose([row for row, one in zip(done, notes, strict=True) if note in one], done)}" for note in found]


_TOLD_BY: Mapping[str, Callable[[Row], Any]] = {"": lambda row: row["policy"], "batch ": batch, "cache ": cache_asked}


def _whose(rows: Sequence[Row], done: Sequence[Row]) -> str:
    """Name the policies or the setting that tells some runs from all others, if one does."""
    ours = {id(row) for row in rows}
    others = [row for row in done if id(row) not in ours]
    for word, value in _TOLD_BY.items():
        values = dict.fromkeys(str(value(row)) for row in rows)
        if not any(str(value(row)) in values for row in others):
            return word + ", ".join(values)
    policies = {str(row["policy"]): None for row in rows}
    return "some runs" + (f" of {', '.join(policies)}" if any(row["policy"] not in policies for row in done) else "")


def _freshness(rows: Sequence[Row]) -> str:
    """Say how much of the gate weight was served by the routed expert on fresh inputs, for each policy."""
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(str(row["policy"]), []).append(fresh(row).rstrip("*"))
    ends = {policy: dict.fromkeys((min(shares, key=float), max(shares, key=float))) for policy, shares in found.items()}
    told = ", ".join(f"{' to '.join(shares)} % ({policy})" for policy, shares in ends.items())
    return f"of the gate weight, computed as routed: {told}"


_NO_RESULTS = {
    *COLUMNS, "run", "repeat", "policy", "policy_name", "policy_options", "key", "group", "notes", "engine", "source_label",
    "cost_label", "energy_label", "own_transfer", "prefetches",
}  # fmt: skip
"""Columns of a row that do not come of its records."""
_MOST_SAME = 5  # lines


def _settings_of(row: Row) -> dict[str, str]:
    """Return what a run was asked for, by name: settings, the policy and its options."""
    options = json.loads(str(row.get("policy_options") or "{}"))
    asked = {column: row.get(column) for column in COLUMNS} | {f"option {name}": value for name, value in options.items()}
    written = {name: json.dumps(value, default=str) for name, value in asked.items()}
    return {"policy": str(row.get("policy_name", row["policy"])), **written}


def same_results(done: Sequence[Row]) -> list[str]:
    """Name runs that differ in one setting, one option or the policy only, and have the same results to the last digit."""
    asked = [_settings_of(row) for row in done]
    results = [frozenset((name, str(value)) for name, value in row.items() if value and name not in _NO_RESULTS) for row in done]
    lines = []
    for name in dict.fromkeys(name for one in asked for name in one):
        groups: dict[Any, dict[Any, dict[str, str | None]]] = {}  # all else -> results -> runs, with the value
        word = COLUMNS[name].word if name in COLUMNS else name.removeprefix("option ")
        for row, one, result in zip(done, asked, results, strict=True):
            own = ("policy", "option ") if name == "policy" else name  # a policy's options are its own
            rest = frozenset(pair for pair in one.items() if not pair[0].startswith(own))
            run = f"{row['policy']} with {word} {one[name]}" if name in COLUMNS else str(row["policy"])
            groups.setdefault(rest, {}).setdefault(result, {})[run] = one.get(name)
        alike = [tuple(runs) for group in groups.values() for runs in group.values() if len(set(runs.values())) > 1]
        for runs, n in Counter(alike).items():
            of = sum(set(runs) <= {run for some in group.values() for run in some} for group in groups.values())
            where = f" in {n} of {of} settings" if n < of else ""
            lines.append(f"{word} changed nothing here: {', '.join(runs)} have the same results{where}")
    more = len(lines) - _MOST_SAME
    return [*lines[:_MOST_SAME], *([f"{more} more settings changed nothing"] if more > 0 else [])]


def footer(rows: Sequence[Row], done: Sequence[Row], seeds: str) -> list[str]:
    """Write the lines below a table."""
    said = {"model": "model", "hardware": "on", "trace": "routing", "prompt_tokens": "prompt", "decode_tokens": "decode"}
    values: dict[str, list[Any]] = {word: [row.get(key) for row in rows] for key, word in said.items()}
    values |= {"cache": [cache_asked(row) for row in rows], "batch": [batch(row) for row in rows]}
    shared = [f"{word} {found[0]}" for word, found in values.items() if len(set(found)) == 1]
    sources = {row.get("source_label") for row in done}
    labels = [f"weakest source of its numbers: {next(iter(sources))}"] if len(sources) == 1 and any(sources) else []
    if common := _common_notes(done):
        labels.append(f"notes: {', '.join(common)}")
    live = bool(done) and all(LIVE in str(row["notes"]) for row in done)
    lines = [", ".join(shared), "; ".join(["replayed on this machine" if live else "simulated", *labels])]
    lines += [seeds] if seeds else []
    lines += _other_notes(done, common)
    if idle := [row for row in done if row.get("prefetches") and row.get("n_prefetches") == 0]:
        lines.append(f"prefetching is on, but nothing was prefetched: {_whose(idle, done)}")
    lines += same_results(done)
    lines += cost_notes(done)
    if inexact := [row for row in done if is_lossy(row)]:
        lines.append(f"* not exact: {_freshness(inexact)}; routing is replayed as recorded, whatever the policy computed")
    return lines + failure_notes(rows)
