"""The runs finished in a result folder: one Parquet dataset, keyed by what each run depends on.

``dataset/`` grows by one file a run, each put in place by a rename, so that a kill loses at most the runs in flight and the
dataset can be read at any moment. Now and then, and at the end, the small files are merged into one, by one process at a time.
Several processes may add runs to one folder; a run that two of them did is there twice until the next merge.

A file counts as far as the folder's list of files names it and its content is what was written. Others are left alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from moesim.core.gate import RESULT, read_bytes
from moesim.core.output_folder import OutputFolder
from moesim.core.text import say
from moesim.errors import InputError
from moesim.experiment.records_file import read_records, records_bytes
from moesim.experiment.result import DATASET, OWNER, RECORDS
from moesim.metrics.columns import columns_of
from moesim.metrics.naming import COLUMNS
from moesim.records import Records

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
        name = _records_file(key)
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
        self._out.put({_records_file(key): records_bytes(records)}, tidy=False)

    def keep_records(self, keys: Collection[str]) -> None:
        """Remove the records of all other runs."""
        wanted = {_records_file(key) for key in keys}
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


def _records_file(key: str) -> str:
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
