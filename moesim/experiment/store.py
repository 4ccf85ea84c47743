"""Finished runs of a result folder: rows, records, and what the folder has of their inputs.

``dataset/`` grows by one small Parquet file a run, renamed into place and merged now and then: a kill loses at most the runs
in flight. Several processes may add to one folder; a run that two did is there twice until the next merge. File names carry
the digest of the content: a file that does not fit its own is damaged, and its runs are done again.
"""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, get_type_hints

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from moesim.core.files import OutputFolder, named_so, read_verified, self_named
from moesim.core.gate import RESULT, read_bytes
from moesim.core.record_table import Coded, Lists, RecordTable
from moesim.core.text import note
from moesim.errors import ConfigError, InputError
from moesim.metrics.columns import columns_of
from moesim.metrics.naming import COLUMNS
from moesim.model import ModelSpec
from moesim.records import KINDS, Records
from moesim.serving.requests import RequestRecord
from moesim.serving.steps import Served

OWNER: Final = "run"
"""The command whose result it is; `compare` and `replay` write the same."""
SUMMARY: Final = "summary.json"
DATASET: Final = "dataset"
RECORDS: Final = "records"
GROWING: Final = (f"{DATASET}/", f"{RECORDS}/")
"""Folders that grow while runs are done, and stay when the rest is replaced."""


def read_summary(folder: Path) -> dict[str, Any]:
    """Read ``summary.json`` of a folder: ``moesim`` (version), ``key``, ``runs`` (a dict each)."""
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
        models = {key: asdict(model) for key, model in self.models.items()}
        return (json.dumps({"models": models, "files": self.texts}, indent=1, sort_keys=True) + "\n").encode()

    @classmethod
    def read(cls, folder: Path) -> SmallInputs:
        """Read them from a folder; none from a version that did not keep them."""
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
_REQUESTS, _GAPS = "requests", "gaps"
_REST = b"moesim"  # key of the schema's metadata that holds what is no list


def records_bytes(records: Records) -> bytes:
    """Return the records of a run as a file; the same records give the same bytes."""
    rest = {
        "used_fetches": sorted(records.used_fetches),
        "peak_bytes": records.peak_bytes,
        "pool_peak_bytes": [[*key, n] for key, n in records.pool_peak_bytes.items()],
        "makespan_ns": records.makespan_ns,
        "first_steps": records.first_steps,
    }
    columns = {name: _column(getattr(records, name)) for name in KINDS}
    if (served := records.served) is not None:
        columns |= {
            _REQUESTS: _column(RecordTable(RequestRecord, served.requests)),
            _GAPS: pa.array([np.array(served.gaps, np.int64)]),
        }
        rest[_REQUESTS] = served[2:]
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
            served=_served(table, rest[_REQUESTS]) if _REQUESTS in rest else None,
        )
    except (pa.ArrowException, LookupError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{place}: expected the records of a run, got: {reason}; run the experiment again") from None


def _served(table: Any, sums: list[int]) -> Served:
    requests = list(_records(RequestRecord, table[_REQUESTS].chunk(0).flatten()))
    return Served(requests, array("q", table[_GAPS].chunk(0).flatten().to_numpy().tobytes()), *sums)


def _records(kind: Any, structs: Any) -> RecordTable[Any]:
    table: RecordTable[Any] = RecordTable(kind)
    columns: dict[str, Any] = {}
    for name, hint in get_type_hints(kind).items():
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
_HEX: Final = "[0-9a-f]"
_FILES: Final = {  # patterns of names in the folders that grow; what is called otherwise is somebody else's
    DATASET: re.compile(rf"(run-(?P<key>{_HEX}{{1,32}})|part)-{_HEX}{{16}}\.parquet"),
    RECORDS: re.compile(rf"(?P<key>{_HEX}{{1,32}})-{_HEX}{{16}}\.arrow"),
}
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
    """The finished runs of a result folder."""

    def __init__(self, folder: Path, *, read_only: bool = False) -> None:
        self.folder = folder
        self._out = OutputFolder(folder, OWNER)
        self._read_only = read_only
        self._n_small = 0

    def read(self) -> dict[str, dict[str, Any]]:
        files = self._names(DATASET)
        self._n_small = sum(Path(name).name.startswith("run-") for name in files)
        return self._rows_of(files)

    def find(self, key: str) -> dict[str, Any] | None:
        """Return a run that has been finished since `read`, by another process."""
        return self._rows_of(self._names(DATASET, key)).get(key)

    def add(self, key: str, row: Row) -> None:
        """Keep the row of a finished run, which has its ``key``, at once and for good."""
        data = _parquet([dict(row)], merged=False)
        self._out.add(f"{DATASET}/{self_named(f'run-{key[:32]}', data, '.parquet')}", data)
        self._n_small += 1
        if self._n_small >= _MERGE_AT:
            self.merge()

    def merge(self) -> None:
        """Put all files together into one, whose name and bytes depend on the rows alone."""
        if not self.folder.is_dir():
            return
        with self._out.alone():
            files = self._names(DATASET)
            if rows := self._rows_of(files):
                data = _parquet([rows[key] for key in sorted(rows)], merged=True)
                merged = f"{DATASET}/{self_named('part', data, '.parquet')}"
                if merged not in files:
                    self._out.add(merged, data)
                self._out.discard(name for name in files if name != merged)
            self._out.tidy()
        self._n_small = 0

    def records(self, key: str, wanted: bool | int = True) -> Records | None:
        """Read a run's records, or those of its first steps; None if missing or damaged."""
        for name in self._names(RECORDS, key):
            if (data := self._content(name)) is not None:
                found = read_records(data, str(self.folder / name))
                if found.first_steps is None or (wanted is not True and wanted <= found.first_steps):
                    return found
        return None

    def add_records(self, key: str, records: Records) -> None:
        data = records_bytes(records)
        name = f"{RECORDS}/{self_named(key[:32], data, '.arrow')}"
        with self._out.alone():
            self._out.add(name, data)
            self._out.discard(one for one in self._names(RECORDS, key) if one != name)

    def keep_records(self, keys: Collection[str]) -> None:
        wanted = {key[:32] for key in keys}
        with self._out.alone():
            self._out.discard(name for name in self._names(RECORDS) if Path(name).name.partition("-")[0] not in wanted)

    def _names(self, under: str, key: str | None = None) -> list[str]:
        """List moesim's files in a folder, of one run or all; a merged file counts for each run."""
        if self._out.manifest.blocked(f"{under}/file") is not None or not (self.folder / under).is_dir():
            return []
        try:
            names = [one.name for one in (self.folder / under).iterdir()]
        except OSError as error:
            raise _unreadable(self.folder / under, error) from None
        found = [(name, match) for name in names if (match := _FILES[under].fullmatch(name))]
        return sorted(f"{under}/{name}" for name, match in found if key is None or match["key"] == key[:32])

    def _rows_of(self, files: Collection[str]) -> dict[str, dict[str, Any]]:
        rows: dict[str, dict[str, Any]] = {}
        for name in files:
            if (data := self._content(name)) is not None:
                rows |= _rows(data)
            elif name not in (now := self._names(DATASET)):  # merged by another process since the files were listed, or damaged
                for merged in (one for one in now if one not in files):
                    rows |= _rows(data) if (data := self._content(merged)) is not None else {}
        return rows

    def _content(self, name: str) -> bytes | None:
        """Read a file; None if it is missing or damaged, and then set aside."""
        place = self.folder / name
        try:
            data = read_bytes(place, RESULT)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise _unreadable(place, error) from None
        if named_so(place, data):
            return data
        if self._read_only:
            then = "so that it counts as not there; the folder stays as it is"
            note(f"moesim: {place}: changed since moesim wrote it, {then}")
        else:
            self._out.set_aside(name, _AGAIN)
        return None


def _unreadable(place: Path, error: OSError) -> InputError:
    return InputError(f"{place}: expected to read it, got: {error.strerror}; fix that or choose another --out")


def _rows(data: bytes) -> dict[str, dict[str, Any]]:
    found = [json.loads(text) for text in pq.read_table(pa.BufferReader(data), columns=[_JSON])[_JSON].to_pylist()]
    return {row[_KEY]: row for row in found}


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


_ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("core", "engine", "experiment", "hardware", "metrics", "model", "policies", "serving", "trace")
"""Packages of moesim that a run goes through; with them count the modules next to the packages, such as ``policy.py``."""
_SOURCES = (".py", ".cpp", ".hpp")
_COMPUTING = ("numpy", "scipy", "simpy")


@cache
def code_digest() -> str:
    """Hash the source of `PACKAGES`, and versions of the libraries that they compute with."""
    files = [*_ROOT.glob("*.py"), *(one for name in PACKAGES for one in _files(name))]
    return _digest(files, " ".join(f"{name} {version(name)}" for name in _COMPUTING))


@cache
def package_digest(name: str) -> str:
    """Hash the source of one package of moesim."""
    return _digest(_files(name))


def _files(package: str) -> list[Path]:
    return [one for one in (_ROOT / package).rglob("*") if one.suffix in _SOURCES]


def _digest(files: list[Path], more: str = "") -> str:
    digest = hashlib.sha256(more.encode())
    for path in sorted(files):
        digest.update(path.relative_to(_ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
