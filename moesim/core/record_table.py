"""Records of one kind: named tuples one by one, or columns all at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence
from contextlib import suppress
from functools import cache
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, get_args, get_type_hints, overload

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

R = TypeVar("R", bound=tuple[Any, ...])

_REMEMBERED = 2**18  # records whose columns are remembered in the form in which they are asked for; of more, each is made anew


class Coded(NamedTuple):
    """A column of few values."""

    codes: NDArray[Any]  # indices into the values, shape (n,)
    values: tuple[Any, ...]


class Lists(NamedTuple):
    """A column whose entries are tuples of numbers."""

    offsets: NDArray[np.int64]  # shape (n + 1,): where each entry begins, and the end
    values: NDArray[Any]


Column = Any  # an array of shape (n,), `Coded` or `Lists`


class RecordTable(MutableSequence[R], Generic[R]):
    """A sequence of named tuples with columns; stored as either, the other made on demand."""

    __slots__ = ("_columns", "_made", "_rows", "append", "kind")

    def __init__(self, kind: type[R], records: Iterable[R] = ()) -> None:
        self.kind = kind
        self._columns: Mapping[str, Column] | None = None
        self._made: dict[str, tuple[int, Any]] = {}  # what was made of the tuples, and of how many
        self._rows: list[R] | None = list(records)
        self.append: Callable[[R], None] = self._rows.append

    def fill(self, columns: Mapping[str, Column]) -> None:
        self._columns, self._rows = dict(columns), None
        self._made = {}
        with suppress(AttributeError):
            del self.append

    def __getattr__(self, name: str) -> Any:
        """Append to columns; a stored bound method would be a cycle that nothing frees."""
        if name == "append":
            return self._append
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def taken(self) -> RecordTable[R]:
        """Return the same records as a table that stays when this one is filled anew."""
        return _restored(self.kind, self._rows if self._columns is None else None, self._columns)

    def _append(self, record: R) -> None:
        self._own().append(record)

    def _own(self) -> list[R]:
        """Return the list of tuples to be changed; columns are stale from here on."""
        rows = self._tuples()
        self._columns, self._made, self.append = None, {}, rows.append
        return rows

    def extend(self, values: Iterable[R]) -> None:
        self._own().extend(values)

    def insert(self, index: int, value: R) -> None:
        self._own().insert(index, value)

    def __setitem__(self, index: Any, value: Any) -> None:
        self._own()[index] = value

    def __delitem__(self, index: int | slice) -> None:
        del self._own()[index]

    def sort(self, key: Callable[[R], Any]) -> None:
        self._own().sort(key=key)

    def clear(self) -> None:
        self._columns, self._made, self._rows = None, {}, []
        self.append = self._rows.append

    # ---- one by one

    def _tuples(self) -> list[R]:
        if self._rows is None:
            columns = [_values(self._columns[name]) for name in _fields(self.kind)]  # type: ignore[index]  # one of both is there
            new: Any = tuple.__new__
            self._rows = [new(self.kind, values) for values in zip(*columns, strict=True)]
        return self._rows

    def __len__(self) -> int:
        if self._rows is not None:
            return len(self._rows)
        first = self._columns[self.kind._fields[0]]  # type: ignore[index, attr-defined]
        return len(first.codes) if isinstance(first, Coded) else len(first)

    @overload
    def __getitem__(self, index: int) -> R: ...
    @overload
    def __getitem__(self, index: slice) -> list[R]: ...
    def __getitem__(self, index: int | slice) -> R | list[R]:
        return self._tuples()[index]

    def __iter__(self) -> Iterator[R]:
        return iter(self._tuples())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, RecordTable):
            return self._tuples() == other._tuples()
        return self._tuples() == other if isinstance(other, list) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._tuples())

    def __reduce__(self) -> Any:
        return _restored, (self.kind, self._rows if self._columns is None else None, self._columns)

    def some(self, places: NDArray[np.int64]) -> list[R]:
        """Return the records at some places, without making the others."""
        if self._rows is not None:
            return [self._rows[place] for place in places.tolist()]
        columns = [_values(_taken(self._columns[name], places)) for name in _fields(self.kind)]  # type: ignore[index]
        return [self.kind(*values) for values in zip(*columns, strict=True)]

    # ---- all at once

    def column(self, name: str) -> NDArray[Any]:
        """Return a field, (n,): int64, bool, or float64 with NaN for None. Do not change it."""
        hint = _fields(self.kind)[name]
        kind = np.bool_ if hint is bool else np.int64 if hint is int else np.float64
        found: NDArray[Any]
        if self._columns is None:
            found = self._once(name, lambda values: np.array(values, kind))
            return found
        if name in self._made:
            found = self._made[name][1]
            return found
        kept = self._columns[name]
        found = np.array(kept.values, kind)[kept.codes] if isinstance(kept, Coded) else np.ascontiguousarray(kept, kind)
        if len(found) <= _REMEMBERED:
            self._made[name] = len(found), found
        return found

    def texts(self, name: str) -> tuple[NDArray[Any], tuple[str, ...]]:
        """Return a field of texts as codes, (n,), and the texts that they index, used or not."""
        found: Coded = self._columns[name] if self._columns is not None else self._once(name, _coded)
        return found.codes, found.values

    def lists(self, name: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return a field of tuples as offsets, (n + 1,), and all values in a row, both int64."""
        found: Lists = self._columns[name] if self._columns is not None else self._once(name, _flattened)
        return found.offsets, np.asarray(found.values, np.int64)

    def _once(self, name: str, make: Callable[[list[Any]], Any]) -> Any:
        """Make a column of the tuples, unless no record came since the last time."""
        rows = self._tuples()
        n_rows, found = self._made.get(name, (-1, None))
        if n_rows != len(rows):
            at = self.kind._fields.index(name)  # type: ignore[attr-defined]  # a named tuple
            found = make([record[at] for record in rows])
            self._made[name] = len(rows), found
        return found


def _coded(values: list[str]) -> Coded:
    codes = {text: code for code, text in enumerate(dict.fromkeys(values))}
    return Coded(np.array([codes[text] for text in values], np.int32), tuple(codes))


def _flattened(values: list[tuple[int, ...]]) -> Lists:
    offsets = np.zeros(len(values) + 1, np.int64)
    np.cumsum([len(value) for value in values], out=offsets[1:])
    return Lists(offsets, np.fromiter(chain.from_iterable(values), np.int64, int(offsets[-1])))


@cache
def _fields(kind: type[Any]) -> dict[str, Any]:
    """Return the fields of a record with their types; of an optional number, the number's."""
    hints = get_type_hints(kind)
    return {name: next((one for one in get_args(hints[name]) if one is float), hints[name]) for name in kind._fields}


def _values(column: Column) -> Iterable[Any]:
    if isinstance(column, Coded):
        return map(column.values.__getitem__, column.codes.tolist())
    if isinstance(column, Lists):
        values, offsets = column.values.tolist(), column.offsets.tolist()
        return [tuple(values[a:b]) for a, b in pairwise(offsets)]
    listed: list[Any] = column.tolist()
    return [None if value != value else value for value in listed] if column.dtype.kind == "f" else listed


def _taken(column: Column, places: NDArray[np.int64]) -> Column:
    if isinstance(column, Coded):
        return Coded(column.codes[places], column.values)
    if isinstance(column, Lists):
        begins, ends = column.offsets[places], column.offsets[places + 1]
        kept = [column.values[a:b] for a, b in zip(begins, ends, strict=True)]
        return Lists(np.concatenate([[0], np.cumsum(ends - begins)]), np.concatenate([column.values[:0], *kept]))
    return column[places]


def _restored(kind: type[R], rows: list[R] | None, columns: Mapping[str, Column] | None) -> RecordTable[R]:
    table = RecordTable(kind, rows or ())
    if columns is not None:
        table.fill(columns)
    return table
