"""Tables of routing (CSV, Parquet, JSON Lines): some rows at a time, as numbers, with one-line errors."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.core.gate import check_expansion
from moesim.errors import TraceError
from moesim.trace.formats.contract import wrong
from moesim.trace.formats.phases import REMEDY

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

BLOCK_BYTES = 2**24
_BATCH_ROWS = 2**18

#: Columns of numbers that are not whole; all others are.
_FRACTIONS = ("weight",)
_PHASES = {"prefill": 0, "decode": 1, "0": 0, "1": 1}

Batch = dict[str, "NDArray[Any]"]


class Names:
    """Numbers for what is named by text (requests), in the order in which the names come up."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def numbers(self, column: pa.Array) -> NDArray[np.int64]:
        """Give the number of each name."""
        encoded = column.dictionary_encode()
        known = [self._numbers.setdefault(name, len(self._numbers)) for name in encoded.dictionary.to_pylist()]
        found: NDArray[np.int64] = np.asarray(known, np.int64)[encoded.indices.to_numpy(zero_copy_only=False)]
        return found


def read_csv(
    path: Path,
    columns: Mapping[str, str],
    *,
    names: Sequence[str] | None = None,
    skip: int = 0,
) -> Iterator[tuple[int, Batch]]:
    """Read columns of a CSV file."""
    import pyarrow as pa
    from pyarrow import csv

    whole = {"request": pa.string(), "phase": pa.string()}
    types = {there: whole.get(ours, pa.float64() if ours in _FRACTIONS else pa.int64()) for ours, there in columns.items()}
    read = csv.ReadOptions(block_size=BLOCK_BYTES, column_names=None if names is None else list(names), skip_rows=skip)
    convert = csv.ConvertOptions(column_types=types, null_values=[""], strings_can_be_null=True)
    with path.open("rb") as file:
        if file.seek(0, io.SEEK_END) and file.seek(-1, io.SEEK_END) >= 0 and file.read(1) != b"\n":
            remedy = "a number cut short looks like another: it is truncated, or add a line end"
            raise wrong(f"{path}: last line", "an end of line", "none", remedy)
    with _reading(path):
        reader = csv.open_csv(path, read_options=read, convert_options=convert)
    yield from _numbered(path, reader, columns)


def read_parquet(path: Path, columns: Mapping[str, str]) -> Iterator[tuple[int, Batch]]:
    """Read columns of a Parquet file."""
    from pyarrow import parquet

    with _reading(path), parquet.ParquetFile(path) as file:
        facts = file.metadata
        expanded = sum(facts.row_group(i).total_byte_size for i in range(facts.num_row_groups))
        check_expansion(path, max(expanded, 8 * facts.num_rows * facts.num_columns), path.stat().st_size)
        present = set(file.schema_arrow.names)
        _check_columns(path, columns, sorted(present))
        batches = file.iter_batches(_BATCH_ROWS, columns=list(columns.values()), use_threads=False)
        yield from _numbered(path, batches, columns)


def read_json_lines(path: Path, columns: Mapping[str, str]) -> Iterator[tuple[int, Batch]]:
    """Read fields of JSON objects, one a line."""
    yield from _numbered(path, _json_batches(path), columns)


def _json_batches(path: Path) -> Iterator[pa.RecordBatch]:
    from pyarrow import json

    options = json.ReadOptions(use_threads=False, block_size=2 * BLOCK_BYTES)
    with path.open("rb") as file:
        rest = b""
        while block := file.read(BLOCK_BYTES):
            whole, newline, after = block.rpartition(b"\n")
            if not newline:
                rest += block
                if len(rest) > 2 * BLOCK_BYTES - 2:
                    raise wrong(path, f"lines of at most {BLOCK_BYTES} bytes", "a longer one", "write one object a line")
                continue
            yield from json.read_json(io.BytesIO(rest + whole + b"\n"), read_options=options).combine_chunks().to_batches()
            rest = after
        if rest.strip():
            yield from json.read_json(io.BytesIO(rest), read_options=options).combine_chunks().to_batches()


def _numbered(path: Path, batches: Any, columns: Mapping[str, str]) -> Iterator[tuple[int, Batch]]:
    first, names, source = 0, Names(), iter(batches)
    while True:
        with _reading(path, f"after row {first}"):
            batch = next(source, None)
        if batch is None:
            return
        _check_columns(path, columns, batch.schema.names)
        with _reading(path, f"after row {first}"):
            found = {ours: _values(path, ours, batch.column(there), first, names) for ours, there in columns.items()}
        if batch.num_rows:
            yield first, found
        first += batch.num_rows


def _check_columns(path: Path, columns: Mapping[str, str], present: Sequence[str]) -> None:
    for ours, there in columns.items():
        if present.count(there) != 1:
            got = ", ".join(str(name) for name in present[:40])
            raise wrong(path, f"one column '{there}' for {ours}", got, f"map it with --column {ours}=NAME")


def _values(path: Path, ours: str, column: pa.Array, first: int, names: Names) -> NDArray[Any]:
    import pyarrow as pa

    place = f"{path}: {ours}"
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if column.null_count:
        row = first + int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
        raise wrong(f"{place} of row {row}", "a value", "none", "give all rows of a table the same columns")
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type) or pa.types.is_fixed_size_list(column.type):
        return _lists(place, ours, column, first)
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        return _texts(place, ours, column, first, names)
    kind = pa.float64() if ours in _FRACTIONS else pa.int64()
    values: NDArray[Any] = column.cast(kind).to_numpy(zero_copy_only=False)
    return values


def _lists(place: str, ours: str, column: pa.Array, first: int) -> NDArray[Any]:
    import pyarrow as pa
    import pyarrow.compute as pc

    lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False)
    bad = np.flatnonzero(lengths != lengths[0])
    if len(bad) or not lengths[0]:
        row = int(bad[0]) if len(bad) else 0
        expected = f"{lengths[0]} values as in the row before" if len(bad) else "at least one value"
        remedy = "every token uses the same number of experts"
        raise wrong(f"{place} of row {first + row}", expected, f"{lengths[row]}", remedy)
    flat = column.flatten()
    if flat.null_count:
        raise wrong(f"{place} after row {first}", "a value", "none", "write all values")
    kind = pa.float64() if ours in _FRACTIONS else pa.int64()
    return np.asarray(flat.cast(kind).to_numpy(zero_copy_only=False)).reshape(len(column), int(lengths[0]))


def _texts(place: str, ours: str, column: pa.Array, first: int, names: Names) -> NDArray[Any]:
    if ours == "request":
        return names.numbers(column)
    if ours == "phase":
        encoded = column.dictionary_encode()
        known = [_PHASES.get(name) for name in encoded.dictionary.to_pylist()]
        if None in known:
            got = encoded.dictionary[known.index(None)]
            raise wrong(f"{place} after row {first}", "prefill or decode, or 0 or 1", repr(str(got)), REMEDY)
        phases: NDArray[np.uint8] = np.asarray(known, np.uint8)[encoded.indices.to_numpy(zero_copy_only=False)]
        return phases
    raise wrong(f"{place} of row {first}", "a number", repr(str(column[0])), f"map another column with --column {ours}=NAME")


@contextmanager
def _reading(path: Path, where: str = "") -> Iterator[None]:
    """Turn what the libraries raise on damaged files into one line."""
    import pyarrow as pa

    try:
        yield
    except TraceError:
        raise
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError, IndexError, MemoryError, OverflowError) as error:
        text = " ".join(str(error).split())[:300]
        place = f"{path}: {where}" if where else str(path)
        raise wrong(place, "rows of a table", text, "it is truncated, altered or of another format") from None
