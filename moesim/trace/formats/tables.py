"""Tables of routing: CSV, Parquet and JSON Lines, a line for each expert.

Columns, which the user may name, are `REQUIRED`, `OPTIONAL`, and instead of the phase ``step``, the forward
pass. In Parquet and JSON, ``expert`` and ``weight`` may be lists: a line for each token and layer.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.core.gate import JSON, check_expansion, read_text
from moesim.errors import TraceError
from moesim.trace.formats.contract import TEXT_REMEDY, Format, Options, Part, Probe, Store, reading, wrong
from moesim.trace.formats.visits import REMEDY, complete_tokens

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

    Table = dict[str, NDArray[Any]]

REQUIRED = ("layer", "position", "expert")
OPTIONAL = ("request", "phase", "rank", "weight")
MAPPED = ("step",)
"""Read if the user maps it only: many things are called so."""
_MAP = "map them with --column OURS=NAME"
#: Key of what a table cannot hold, in the metadata of a Parquet file and in the file next to a CSV.
FACTS_KEY = "moesim"
#: Facts that stay in the header itself, with their kinds: a table must not turn a miniature or made-up routing into a recording.
KEPT = {"miniature": bool, "miniature_of": str, "synthesis": dict}
_FIELDS = {"layer": "layer_idx", "position": "token_idx", "expert": "selected_ids"}
_LINE_BYTES = 2**24
#: Columns of numbers that are not whole; all others are.
_FRACTIONS = ("weight",)
_PHASES = {"prefill": 0, "decode": 1, "0": 0, "1": 1}
_ROWS = "rows of a table"


def read_csv(path: Path, columns: Mapping[str, str], *, names: Sequence[str] | None = None, skip: int = 0) -> Table:
    """Read columns of a CSV file, by our names."""
    import pyarrow as pa
    from pyarrow import csv

    whole = {"request": pa.string(), "phase": pa.string()}
    types = {there: whole.get(ours, pa.float64() if ours in _FRACTIONS else pa.int64()) for ours, there in columns.items()}
    read = csv.ReadOptions(column_names=None if names is None else list(names), skip_rows=skip)
    convert = csv.ConvertOptions(column_types=types, null_values=[""], strings_can_be_null=True)
    with path.open("rb") as file:
        if file.seek(0, io.SEEK_END) and file.seek(-1, io.SEEK_END) >= 0 and file.read(1) != b"\n":
            remedy = "a number cut short looks like another: it is truncated, or add a line end"
            raise wrong(f"{path}: last line", "an end of line", "none", remedy)
    with reading(path, _ROWS):
        table = csv.read_csv(path, read_options=read, convert_options=convert)
    return _numbers(path, table, columns)


def read_parquet(path: Path, columns: Mapping[str, str]) -> Table:
    """Read columns of a Parquet file, by our names."""
    from pyarrow import parquet

    with reading(path, _ROWS), parquet.ParquetFile(path) as file:
        facts = file.metadata
        expanded = sum(facts.row_group(i).total_byte_size for i in range(facts.num_row_groups))
        check_expansion(path, max(expanded, 8 * facts.num_rows * facts.num_columns), path.stat().st_size)
        _check_columns(path, columns, file.schema_arrow.names)
        table = file.read(columns=list(columns.values()), use_threads=False)
    return _numbers(path, table, columns)


def read_json_lines(path: Path, columns: Mapping[str, str]) -> Table:
    """Read fields of JSON objects, one a line, by our names."""
    from pyarrow import json as json_lines

    options = json_lines.ReadOptions(use_threads=False, block_size=_LINE_BYTES)
    with reading(path, _ROWS):
        table = json_lines.read_json(path, read_options=options)
    return _numbers(path, table, columns)


def _numbers(path: Path, table: pa.Table, columns: Mapping[str, str]) -> Table:
    with reading(path, _ROWS):
        _check_columns(path, columns, table.column_names)
        return {ours: _values(path, ours, table.column(there).combine_chunks()) for ours, there in columns.items()}


def _check_columns(path: Path, columns: Mapping[str, str], present: Sequence[str]) -> None:
    for ours, there in columns.items():
        if present.count(there) != 1:
            got = ", ".join(str(name) for name in present[:40])
            raise wrong(path, f"one column '{there}' for {ours}", got, f"map it with --column {ours}=NAME")


def _values(path: Path, ours: str, column: pa.Array) -> NDArray[Any]:
    import pyarrow as pa

    place = f"{path}: {ours}"
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if column.null_count:
        row = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
        raise wrong(f"{place} of row {row}", "a value", "none", "give all rows of a table the same columns")
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        return _texts(place, ours, column)
    kind, width = pa.float64() if ours in _FRACTIONS else pa.int64(), 0
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type) or pa.types.is_fixed_size_list(column.type):
        column, width = column.flatten(), _width(place, column)
        if column.null_count:
            raise wrong(place, "a value in all lists", "none", "write all values")
    values: NDArray[Any] = np.asarray(column.cast(kind).to_numpy(zero_copy_only=False))
    return values.reshape(-1, width) if width else values


def _width(place: str, column: pa.Array) -> int:
    import pyarrow.compute as pc

    lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False)
    bad = np.flatnonzero((lengths != lengths[0]) | (lengths == 0))
    if len(bad):
        row = int(bad[0])
        expected = f"{lengths[0]} values as in the row before" if lengths[0] else "at least one value"
        remedy = "every token uses the same number of experts"
        raise wrong(f"{place} of row {row}", expected, f"{lengths[row]}", remedy)
    return int(lengths[0])


def _texts(place: str, ours: str, column: pa.Array) -> NDArray[Any]:
    encoded = column.dictionary_encode()
    numbers: NDArray[Any] = encoded.indices.to_numpy(zero_copy_only=False)
    if ours == "request":
        return numbers
    if ours == "phase":
        known = [_PHASES.get(name) for name in encoded.dictionary.to_pylist()]
        if None in known:
            got = encoded.dictionary[known.index(None)]
            raise wrong(place, "prefill or decode, or 0 or 1", repr(str(got)), REMEDY)
        phases: NDArray[np.uint8] = np.asarray(known, np.uint8)[numbers]
        return phases
    raise wrong(f"{place} of row 0", "a number", repr(str(column[0])), f"map another column with --column {ours}=NAME")


def facts_path(path: Path) -> Path:
    """Return the file next to a CSV with what the CSV cannot hold."""
    return path.with_name(f"{path.name}.json")


def read_csv_file(path: Path, options: Options, store: Store) -> Part:
    """Read a CSV, and the facts next to it."""
    beside = facts_path(path)
    facts = _parse(beside, read_text(beside, JSON, "facts of the table", error=TraceError)) if beside.is_file() else {}
    return _read(path, read_csv(path, _columns(path, Probe(path).csv_names, options)), facts, options, store)


def read_parquet_file(path: Path, options: Options, store: Store) -> Part:
    """Read a Parquet file."""
    names, metadata = Probe(path).parquet
    facts = _parse(path, metadata[FACTS_KEY.encode()]) if FACTS_KEY.encode() in metadata else {}
    return _read(path, read_parquet(path, _columns(path, names, options)), facts, options, store)


def read_json_lines_file(path: Path, options: Options, store: Store) -> Part:
    """Read JSON Lines."""
    present = Probe(path).json_names
    optional = {"weight": "gate_weights", "request": "request", "phase": "phase"}
    found = {ours: there for ours, there in optional.items() if there in present}
    found |= _step(found, options.columns)
    return _entries(path, read_json_lines(path, _FIELDS | found | dict(options.columns)), options, store)


def _columns(path: Path, present: Sequence[str], options: Options) -> dict[str, str]:
    columns = {ours: options.columns.get(ours, ours) for ours in REQUIRED}
    for ours in OPTIONAL:
        if ours in options.columns or ours in present:
            columns[ours] = options.columns.get(ours, ours)
    columns |= _step(columns, options.columns)
    if not set(REQUIRED) & set(options.columns) and not {columns[ours] for ours in REQUIRED} & set(present):
        raise wrong(path, f"the columns {', '.join(REQUIRED)}", repr(", ".join(present)[:120]), f"{_MAP}; {TEXT_REMEDY}")
    for ours, there in columns.items():
        if there not in present:
            got = ", ".join(present)[:300]
            raise wrong(path, f"a column '{there}' for {ours}", got or "none", f"map it with --column {ours}=NAME")
    return columns


def _step(columns: dict[str, str], mapped: Mapping[str, str]) -> dict[str, str]:
    if "step" not in mapped:
        return {}
    columns.pop("phase", None)
    return {"step": mapped["step"]}


def _entries(path: Path, table: Table, options: Options, store: Store) -> Part:
    names = {"position": "token", "weight": "weights"}
    columns = {names.get(ours, ours): values for ours, values in table.items() if ours != "expert"}
    return complete_tokens(str(path), store, options.incomplete, table["expert"], **columns)


def _read(path: Path, table: Table, facts: dict[str, Any], options: Options, store: Store) -> Part:
    part = _entries(path, table, options, store)
    if not facts:
        return part
    n_rows = int(part.lengths.sum())
    if facts["n_rows"] != n_rows:
        remedy = "it is truncated or was changed; without those facts it is a table like any other"
        raise wrong(path, f"{facts['n_rows']} tokens as the facts with it say", n_rows, remedy)
    header = {"exported_from": facts, **{key: facts[key] for key in KEPT if key in facts}}
    said = {key: facts[key] for key in ("n_experts", "model", "label")}
    return replace(part, **said, facts=part.facts | header)


def _parse(place: Path, text: str | bytes) -> dict[str, Any]:
    try:
        facts = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise wrong(f"{place}: {FACTS_KEY}", "JSON", error, "export the trace again") from None
    if isinstance(facts, dict) and FACTS_KEY in facts:
        facts = facts[FACTS_KEY]
    kinds = {"n_experts": int, "n_rows": int, "model": str, "label": str}
    if not isinstance(facts, dict) or any(type(facts.get(key)) is not kind for key, kind in kinds.items()):
        raise wrong(f"{place}: {FACTS_KEY}", "n_experts, n_rows, model and label", repr(facts)[:200], "export the trace again")
    for key, kind in KEPT.items():
        if key in facts and type(facts[key]) is not kind:
            expected = f"{kind.__name__} as the trace had"
            raise wrong(f"{place}: {FACTS_KEY}.{key}", expected, repr(facts[key])[:200], "export the trace again")
    return facts


_ABOUT = "with layer, position, expert, or columns named with --column"
_NAMES = REQUIRED + OPTIONAL + MAPPED
CSV = Format("csv", f"CSV {_ABOUT}", lambda probe: len(probe.csv_names) >= 2, read_csv_file, None, _NAMES)
PARQUET = Format("parquet", f"Parquet {_ABOUT}", lambda probe: probe.head.startswith(b"PAR1"), read_parquet_file, None, _NAMES)
JSON_LINES = Format(
    "jsonl",
    "JSON Lines {layer_idx, token_idx, selected_ids, gate_weights}, or fields named with --column",
    lambda probe: probe.is_json and set(_FIELDS.values()) <= set(probe.json_names),
    read_json_lines_file,
    None,
    _NAMES,
)
