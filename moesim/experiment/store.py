"""The runs finished in a result folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, get_type_hints

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from moesim.core.gate import RESULT, read_bytes
from moesim.core.manifest import read_verified
from moesim.core.output_folder import OutputFolder
from moesim.core.record_table import Coded, Lists, RecordTable
from moesim.core.text import say
from moesim.errors import ConfigError, InputError
from moesim.metrics.columns import columns_of
from moesim.metrics.naming import COLUMNS
from moesim.model import ModelSpec
from moesim.records import KINDS, Records

OWNER: Final = "run"
"""The command whose result it is; `compare` and `replay` write the same."""
SUMMARY: Final = "summary.json"
DATASET: Final = "dataset"
RECORDS: Final = "records"
GROWING: Final = (f"{DATASET}/", f"{RECORDS}/")
"""What grows while runs are done, and stays when the rest is replaced."""


def read_summary(folder: Path) -> dict[str, Any]:
    """Read ``summary.json`` of a result folder.

    Gives ``moesim`` (version), ``key`` and ``runs``: one dict of settings, labels and metrics a run.
    """
    path = folder / SUMMARY
    if not path.is_file() and (folder / DATASET).is_dir():
        raise ConfigError(f"{path}: expected a summary, got an unfinished sweep; run the same command again to go on")
    try:
        summary: dict[str, Any] = json.loads(read_verified(path))
        if not isinstance(summary, dict) or not isinstance(summary.get("runs"), list):
            raise ValueError("no runs in it")
        for number, row in enumerate(summary["runs"]):
            _check_row(row, number)
    except InputError as error:
        raise ConfigError(str(error)) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path}: expected the summary of a result, got: {' '.join(str(error).split())}; run it again"
        ) from None
    return summary


def _check_row(row: object, number: int) -> None:
    """Raise `ValueError` unless a row maps names to plain values, and says which run it is."""
    if not isinstance(row, dict):
        raise ValueError(f"runs[{number}] is no mapping")
    if not (isinstance(row.get("policy"), str) and type(row.get("run")) is int):
        raise ValueError(f"runs[{number}] has no number of its run or no policy")
    for name, value in row.items():
        if not isinstance(value, str | int | float | bool | None):
            raise ValueError(f"runs[{number}].{name} is no plain value")


INPUTS: Final = "inputs.json"


@dataclass(frozen=True)
class SmallInputs:
    """Models, and the content of files, by what the experiment knows them by."""

    models: Mapping[str, ModelSpec] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)  # of machines and of parameters of synthetic routing, as they stand

    def to_bytes(self) -> bytes:
        """Write them; the same inputs give the same bytes."""
        models = {key: asdict(model) for key, model in self.models.items()}
        return (json.dumps({"models": models, "files": self.texts}, indent=1, sort_keys=True) + "\n").encode()

    @classmethod
    def read(cls, folder: Path) -> SmallInputs:
        """Read them from a result folder; none from one of a version that did not keep them."""
        path = folder / INPUTS
        try:
            found: Any = json.loads(read_verified(path))
            texts = {str(key): _text(value) for key, value in found["files"].items()}
            return cls({str(key): _model(fields) for key, fields in found["models"].items()}, texts)
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError, InputError) as error:
            said = " ".join(str(error).split())
            raise ConfigError(f"{path}: expected the inputs of a result, got: {said}; run the experiment again") from None


def _model(fields: Mapping[str, Any]) -> ModelSpec:
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    return ModelSpec(**values)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"no text of a file, but {value!r}"[:80])
    return value


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


_KEY, _JSON = "key", "row_json"  # the row once more, exactly: a table's columns have one type each
_ONE, _MANY = "run-", "part-"  # beginnings of file names
_AGAIN = "so that its runs are done again"
_MERGE_AT = 500  # small files; each takes about a millisecond to read

_ARROW: dict[type, Any] = {int: pa.int64(), float: pa.float64(), str: pa.string()}
# Columns that some runs have and others lack. Without a type of their own, a file of rows that lack them would give them the
# type null, and a dataset whose first file does so cannot be read as a whole.
_TYPES: dict[str, Any] = {
    **{name: _ARROW[column.missing] for name, column in COLUMNS.items() if column.missing is not None},
    **dict.fromkeys(("own_transfer", "error"), pa.string()),
}

Row = Mapping[str, Any]


class Store:
    """What has been run, in a result folder."""

    def __init__(self, folder: Path, *, read_only: bool = False) -> None:
        self.folder = folder
        self._out = OutputFolder(folder, OWNER)
        self._read_only = read_only
        self._n_small = 0

    def read(self) -> dict[str, dict[str, Any]]:
        """Read all rows."""
        files = self._files()
        self._n_small = sum(Path(name).name.startswith(_ONE) for name in files)
        return self._read_all(files)

    def find(self, key: str) -> dict[str, Any] | None:
        """Give a run that has been finished since `read`, by another process."""
        self._out.manifest.refresh()
        return self._read(_run_file(key)).get(key)

    def add(self, key: str, row: Row) -> None:
        """Keep the row of a finished run, at once and for good; it has its ``key``. A `WriteError` says that it was not kept."""
        self._out.put({_run_file(key): _parquet([dict(row)], merged=False)}, tidy=False)
        self._n_small += 1
        if self._n_small >= _MERGE_AT:
            self.merge()

    def merge(self) -> None:
        """Put all files together into one, whose name and bytes depend on the rows alone."""
        if not self._out.folder.is_dir():
            return
        with self._out.alone():
            files = self._files()
            rows = self._read_all(files)
            if rows:
                data = _parquet([rows[key] for key in sorted(rows)], merged=True)
                merged = f"{DATASET}/{_MANY}{hashlib.sha256(data).hexdigest()[:16]}.parquet"
                self._out.put({merged: data}, tidy=False)
                self._out.remove([name for name in files if name != merged], tidy=False)
            self._out.tidy()
        self._n_small = 0

    def records(self, key: str, wanted: bool | int = True) -> Records | None:
        """Read a run's records, all or those of so many first steps; None if they were not kept.

        Damaged ones are set aside with a line on stderr.
        """
        self._out.manifest.refresh()
        name = _records_name(key)
        data = self._content(name)
        if data is None:
            return None
        try:
            found = read_records(data, str(self._out.folder / name))
        except InputError as error:  # what was written can be read; this says that it cannot be, with all reasons
            self._tell(name, f": {error}")
            return None
        there = found.first_steps
        return found if there is None or (wanted is not True and wanted <= there) else None

    def add_records(self, key: str, records: Records) -> None:
        """Keep a run's records."""
        self._out.put({_records_name(key): records_bytes(records)}, tidy=False)

    def keep_records(self, keys: Collection[str]) -> None:
        """Remove the records of all other runs."""
        wanted = {_records_name(key) for key in keys}
        self._out.remove([name for name in self._out.manifest.paths(under=f"{RECORDS}/") if name not in wanted])

    def _files(self) -> list[str]:
        self._out.manifest.refresh()
        return [name for name in self._out.manifest.paths(under=f"{DATASET}/") if name.endswith(".parquet") and self._there(name)]

    def _there(self, name: str) -> bool:
        return (self._out.folder / name).is_file()

    def _read_all(self, files: Collection[str]) -> dict[str, dict[str, Any]]:
        rows: dict[str, dict[str, Any]] = {}
        for name in files:
            if self._there(name):
                rows |= self._read(name)
            else:  # merged by another process since the files were listed
                for merged in self._files():
                    rows |= self._read(merged)
        return rows

    def _read(self, name: str) -> dict[str, dict[str, Any]]:
        data = self._content(name)
        if data is None:
            return {}
        try:
            return dict(_rows(data))
        except (OSError, pa.ArrowException, KeyError, TypeError, ValueError, RecursionError) as error:
            self._tell(name, f": {' '.join(str(error).split())}")
            return {}

    def _content(self, name: str) -> bytes | None:
        """Read a listed file; None if it is not there, or does not hold what was written."""
        if not self._out.manifest.has(name):
            return None
        place = self._out.folder / name
        try:
            data = read_bytes(place, RESULT)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise InputError(f"{place}: expected to read it, got: {error.strerror}; mend that or choose another --out") from None
        if self._out.manifest.fits(name, hashlib.sha256(data).hexdigest()):
            return data
        if self._read_only:
            self._tell(name)
        else:
            self._out.set_aside(name, _AGAIN)
        return None

    def _tell(self, name: str, why: str = "") -> None:
        then = "so that it counts as not there; the folder stays as it is" if self._read_only else _AGAIN
        say(f"moesim: {self._out.folder / name}: changed since moesim wrote it, {then}{why}")


def _run_file(key: str) -> str:
    return f"{DATASET}/{_ONE}{key[:32]}.parquet"


def _records_name(key: str) -> str:
    return f"{RECORDS}/{key[:32]}.arrow"


def _rows(data: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
    table = pq.read_table(pa.BufferReader(data), columns=[_KEY, _JSON])
    for key, text in zip(table[_KEY].to_pylist(), table[_JSON].to_pylist(), strict=True):
        row = json.loads(text)
        if row[_KEY] != key:
            raise ValueError(f"a row has the key {row[_KEY]!r} and stands under {key!r}")
        yield key, row


def _parquet(rows: list[dict[str, Any]], *, merged: bool) -> bytes:
    texts = [json.dumps(row) for row in rows]
    columns = columns_of(rows)
    for name in [name for name, column in columns.items() if pa.types.is_null(column.type)]:
        if name in _TYPES:
            columns[name] = pa.nulls(len(rows), _TYPES[name])
        else:
            del columns[name]
    sink = pa.BufferOutputStream()
    small: dict[str, Any] = {"compression": "none", "use_dictionary": False, "write_statistics": False}  # a third of the time
    options = {"compression": "zstd"} if merged else small
    pq.write_table(pa.table({**columns, _JSON: texts}), sink, **options)
    data: bytes = sink.getvalue().to_pybytes()
    return data
