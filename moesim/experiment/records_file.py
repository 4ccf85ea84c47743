"""Records of a run in one Arrow file: what a timeline, a Gantt chart or a table by layer is made of."""

from __future__ import annotations

import json
from typing import Any, get_type_hints

import pyarrow as pa

from moesim.core.record_table import RecordTable
from moesim.errors import InputError
from moesim.records import KINDS, Records

_REST = b"moesim"  # key of the schema's metadata that holds what is no list


def records_bytes(records: Records) -> bytes:
    """Give the records of a run as a file; the same records give the same bytes."""
    rest = {
        "used_fetches": sorted(records.used_fetches),
        "peak_bytes": records.peak_bytes,
        "pool_peak_bytes": [[*key, n] for key, n in records.pool_peak_bytes.items()],
        "makespan_ns": records.makespan_ns,
    }
    columns = {name: _column(kind, getattr(records, name)) for name, kind in KINDS.items()}
    table = pa.table(columns).replace_schema_metadata({_REST: json.dumps(rest)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def _column(kind: Any, records: list[Any]) -> Any:
    values = list(zip(*records, strict=True)) if records else [()] * len(kind._fields)
    hints = get_type_hints(kind)
    arrays = [pa.array(column, _type(hints[name])) for name, column in zip(kind._fields, values, strict=True)]
    structs = pa.StructArray.from_arrays(arrays, names=list(kind._fields))
    return pa.ListArray.from_arrays(pa.array([0, len(records)], pa.int32()), structs)


def _type(hint: Any) -> Any:
    simple = {int: pa.int64(), float: pa.float64(), float | None: pa.float64(), str: pa.string(), bool: pa.bool_()}
    return simple[hint] if hint in simple else pa.list_(pa.int64())


def read_records(data: bytes, place: str) -> Records:
    """Read the records of a run."""
    try:
        table = pa.ipc.open_file(pa.BufferReader(data)).read_all()
        rest = json.loads(table.schema.metadata[_REST])
        tables: dict[str, Any] = {
            name: RecordTable(kind, _records(kind, table[name].chunk(0).flatten())) for name, kind in KINDS.items()
        }
        return Records(
            **tables,
            used_fetches=set(rest["used_fetches"]),
            peak_bytes=rest["peak_bytes"],
            pool_peak_bytes={(device, pool): n for device, pool, n in rest["pool_peak_bytes"]},
            makespan_ns=rest["makespan_ns"],
        )
    except (pa.ArrowException, LookupError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{place}: expected the records of a run, got: {reason}; run the experiment again") from None


def _records(kind: Any, structs: Any) -> list[Any]:
    hints = get_type_hints(kind)
    columns = []
    stored = {field.name for field in structs.type}
    for name in kind._fields:
        if name not in stored and name in kind._field_defaults:  # a file from before records had this field
            columns.append([kind._field_defaults[name]] * len(structs))
            continue
        values = structs.field(name).to_pylist()
        columns.append([tuple(v) for v in values] if _type(hints[name]) == pa.list_(pa.int64()) else values)
    return [kind(*values) for values in zip(*columns, strict=True)]
