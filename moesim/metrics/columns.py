"""Columns of rows: one type each, in the order in which their names first occur."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa


def columns_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Turn rows into columns."""
    names = dict.fromkeys(key for row in rows for key in row)
    return {name: _column([row.get(name) for row in rows]) for name in names}


def _column(values: list[Any]) -> Any:
    if any(isinstance(value, float) for value in values):
        return pa.array([None if value is None else float(value) for value in values], pa.float64())
    return pa.array(values)
