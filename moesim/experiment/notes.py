"""The notes of results: one text a row, divided by commas; those about costs are long and stand once below a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moesim.experiment.intervals import NOT_VARIED
from moesim.hardware.costs import NO_CURVE

_OF_COSTS = (NO_CURVE, NOT_VARIED)


def split_notes(row: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Divide the notes of a result."""
    notes = [note for note in str(row.get("notes") or "").split(", ") if note]
    return [n for n in notes if not n.startswith(_OF_COSTS)], [n for n in notes if n.startswith(_OF_COSTS)]


def cost_notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """List the notes about costs of all rows, each once."""
    return list(dict.fromkeys(note for row in rows for note in split_notes(row)[1]))
