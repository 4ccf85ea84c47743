"""Columns of rows, values by the texts of a column, and tables put after each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, get_type_hints

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from moesim.core.record_table import Coded, Column, Lists, RecordTable
from moesim.records import StepRecord

R = TypeVar("R", bound=tuple[Any, ...])

_EXACT = 2**53


def columns_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Turn rows into columns of one type each, in the order in which their names first occur."""
    names = dict.fromkeys(key for row in rows for key in row)
    return {name: _column([row.get(name) for row in rows]) for name in names}


def _column(values: list[Any]) -> Any:
    if any(isinstance(value, float) for value in values):
        return pa.array([None if value is None else float(value) for value in values], pa.float64())
    return pa.array(values)


def by_text(column: tuple[NDArray[Any], tuple[str, ...]], value: Callable[[str], int]) -> NDArray[Any]:
    """Return a number, or a flag, for each text of a column of codes and texts."""
    codes, texts = column
    found: NDArray[Any] = np.array([value(text) for text in texts] or [0])[codes]
    return found


def sums(codes: NDArray[Any], values: NDArray[np.int64], n: int) -> NDArray[np.int64]:
    """Add up whole numbers by code, exactly: as floats, which is fast, if they hold the sum."""
    if values.sum() < _EXACT:
        return np.bincount(codes, values, n).astype(np.int64)
    found = np.zeros(n, np.int64)
    np.add.at(found, codes, values)
    return found


def in_decode(steps: RecordTable[StepRecord]) -> NDArray[np.bool_]:
    """Return which steps decode."""
    return by_text(steps.texts("phase"), lambda phase: phase == "decode").astype(bool)


def joined(kind: type[R], tables: Sequence[RecordTable[R]]) -> RecordTable[R]:
    """Put the columns of tables after each other."""
    found = RecordTable(kind)
    columns: dict[str, Column] = {}
    for name, hint in get_type_hints(kind).items():
        if hint is str:
            texts = tuple(dict.fromkeys(text for one in tables for text in one.texts(name)[1]))
            codes = [by_text(one.texts(name), texts.index) for one in tables]
            columns[name] = Coded(np.concatenate([np.zeros(0, np.int64), *codes]), texts)
        elif hint == tuple[int, ...]:
            lists = [one.lists(name) for one in tables]
            lengths = np.concatenate([np.zeros(1, np.int64), *(np.diff(offsets) for offsets, _ in lists)])
            columns[name] = Lists(np.cumsum(lengths), np.concatenate([found.lists(name)[1], *(values for _, values in lists)]))
        else:
            columns[name] = np.concatenate([found.column(name), *(one.column(name) for one in tables)])
    found.fill(columns)
    return found


def append(tables: list[RecordTable[R]], more: RecordTable[R]) -> None:
    """Add a table to a few after each other, and join those no longer than what follows."""
    found = [more]
    while tables and len(tables[-1]) <= sum(map(len, found)):
        found.insert(0, tables.pop())
    tables.append(joined(more.kind, found))
