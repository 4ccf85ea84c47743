"""Records of a run in one Arrow file: what a timeline, a Gantt chart or a table by layer is made of."""

from __future__ import annotations

import json
from typing import Any, get_type_hints

import numpy as np
import pyarrow as pa

from moesim.core.record_table import Coded, Lists, RecordTable
from moesim.errors import InputError
from moesim.records import KINDS, Records

_PLAIN = {int: np.int64, float: np.float64, float | None: np.float64, bool: np.bool_}
_REST = b"moesim"  # key of the schema's metadata that holds what is no list


def records_bytes(records: Records) -> bytes:
    """Give the records of a run as a file; the same records give the same bytes."""
    rest = {
        "used_fetches": sorted(records.used_fetches),
        "peak_bytes": records.peak_bytes,
        "pool_peak_bytes": [[*key, n] for key, n in records.pool_peak_bytes.items()],
        "makespan_ns": records.makespan_ns,
        "first_steps": records.first_steps,
    }
    columns = {name: _column(getattr(records, name)) for name in KINDS}
    table = pa.table(columns).replace_schema_metadata({_REST: json.dumps(rest)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def _column(table: RecordTable[Any]) -> Any:
    hints = get_type_hints(table.kind)
    arrays = [_array(table, name, hint) for name, hint in hints.items()]
    structs = pa.StructArray.from_arrays(arrays, names=list(hints))
    return pa.ListArray.from_arrays(pa.array([0, len(table)], pa.int32()), structs)


def _array(table: RecordTable[Any], name: str, hint: Any) -> Any:
    if hint is str:
        codes, texts = table.texts(name)
        return pa.DictionaryArray.from_arrays(pa.array(codes, pa.int32()), pa.array(texts, pa.string())).cast(pa.string())
    if hint in _PLAIN:
        values = table.column(name)
        return pa.array(values, mask=np.isnan(values) if values.dtype.kind == "f" else None)
    offsets, values = table.lists(name)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values))


def read_records(data: bytes, place: str) -> Records:
    """Read the records of a run."""
    try:
        table = pa.ipc.open_file(pa.BufferReader(data)).read_all()
        rest = json.loads(table.schema.metadata[_REST])
        tables: dict[str, Any] = {name: _records(kind, table[name].chunk(0).flatten()) for name, kind in KINDS.items()}
        return Records(
            **tables,
            used_fetches=set(rest["used_fetches"]),
            peak_bytes=rest["peak_bytes"],
            pool_peak_bytes={(device, pool): n for device, pool, n in rest["pool_peak_bytes"]},
            makespan_ns=rest["makespan_ns"],
            first_steps=rest["first_steps"],
        )
    except (pa.ArrowException, LookupError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{place}: expected the records of a run, got: {reason}; run the experiment again") from None


def _records(kind: Any, structs: Any) -> RecordTable[Any]:
    table: RecordTable[Any] = RecordTable(kind)
    columns: dict[str, Any] = {}
    stored = {field.name for field in structs.type}
    for name, hint in get_type_hints(kind).items():
        if name not in stored and name in kind._field_defaults:  # a file from before records had this field
            default = kind._field_defaults[name]
            columns[name] = np.full(len(structs), np.nan if default is None else default)
            continue
        field = structs.field(name)
        if hint is str:
            coded = field.dictionary_encode()
            columns[name] = Coded(coded.indices.to_numpy(), tuple(coded.dictionary.to_pylist()))
        elif hint in _PLAIN:
            columns[name] = field.to_numpy(zero_copy_only=False).astype(_PLAIN[hint])
        else:
            offsets = np.append(0, np.cumsum(field.value_lengths().to_numpy(zero_copy_only=False)))
            columns[name] = Lists(offsets.astype(np.int64), field.flatten().to_numpy(zero_copy_only=False))
    table.fill(columns)
    return table
