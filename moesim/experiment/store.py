"""The runs finished in a result folder: one Parquet dataset, keyed by what each run depends on.

``dataset/`` grows by one file a run, each put in place by a rename, so that a kill loses at most the runs in flight and the
dataset can be read at any moment. Now and then, and at the end, the small files are merged into one, by one process at a time.
Several processes may add runs to one folder; a run that two of them did is there twice until the next merge.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from moesim.atomic import locked, write_bytes, write_error
from moesim.errors import InputError
from moesim.experiment.records_file import read_records, write_records
from moesim.experiment.result import DATASET, RECORDS
from moesim.metrics.columns import columns_of
from moesim.records import Records

_KEY, _JSON = "key", "row_json"  # the row once more, exactly: a table's columns have one type each
_ONE, _MANY = "run-", "part-"  # beginnings of file names
_ASIDE = "_unreadable."  # another: readers of datasets pass over names that begin with an underscore or a dot
_MERGE_AT = 500  # small files; each takes about a millisecond to read

# Columns that some runs have and others lack. Without a type of their own, a file of rows that lack them would give them the
# type null, and a dataset whose first file does so cannot be read as a whole.
_TYPES: dict[str, Any] = {
    **dict.fromkeys(("cache_ratio",), pa.float64()),
    **dict.fromkeys(
        ("cache_budget_bytes", "chunk_bytes", "prompt_tokens", "decode_tokens", "prefill_chunk", "warm_up"), pa.int64()
    ),
    **dict.fromkeys(("reuse", "requests", "predictors", "own_transfer", "error"), pa.string()),
}

Row = Mapping[str, Any]


class Store:
    """What has been run, in a result folder.

    Parameters
    ----------
    folder : Path
        The result folder; it need not be there yet.
    """

    def __init__(self, folder: Path) -> None:
        self.dataset = folder / DATASET
        self._records = folder / RECORDS
        self._n_small = 0

    def read(self) -> dict[str, dict[str, Any]]:
        """Read all rows.

        Returns
        -------
        dict of str to dict
            Key -> row. A file that is damaged is set aside with a line on stderr; its runs count as not done.

        Raises
        ------
        InputError
            If a file may not be read.
        """
        rows: dict[str, dict[str, Any]] = {}
        for path in self._files():
            rows |= self._read(path)
        self._n_small = len(list(self.dataset.glob(f"{_ONE}*.parquet")))
        return rows

    def find(self, key: str) -> dict[str, Any] | None:
        """Give a run that has been finished since `read`, by another process."""
        path = self._path(key)
        return self._read(path).get(key) if path.is_file() else None

    def add(self, key: str, row: Row) -> None:
        """Keep a finished run, at once and for good; its row has its ``key``. A `WriteError` says that it could not be kept."""
        data = _parquet([dict(row)], merged=False)
        with _working_in(self.dataset, shared=True):
            write_bytes(self._path(key), data)
        self._n_small += 1
        if self._n_small >= _MERGE_AT:
            self.merge()

    def merge(self) -> None:
        """Put all files together into one, whose name and bytes depend on the rows alone."""
        if not self.dataset.is_dir():
            return
        with _working_in(self.dataset, shared=False) as alone:
            if alone:
                _clear(self.dataset)
            self._merge()
        self._n_small = 0

    def _merge(self) -> None:
        files = self._files()
        rows: dict[str, dict[str, Any]] = {}
        for path in files:
            rows |= self._read(path)
        if not rows:
            return
        data = _parquet([rows[key] for key in sorted(rows)], merged=True)
        merged = self.dataset / f"{_MANY}{hashlib.sha256(data).hexdigest()[:16]}.parquet"
        if files == [merged]:
            return
        write_bytes(merged, data)
        for path in files:  # only what is in the new file: another process may have added some
            if path != merged:
                path.unlink(missing_ok=True)

    def records(self, key: str) -> Records | None:
        """Read a run's records; None if they were not kept. Damaged ones are set aside with a line on stderr."""
        path = self._records_path(key)
        if not path.is_file():
            return None
        try:
            return read_records(path)
        except InputError as error:
            _set_aside(path, str(error).removeprefix(f"{path}: "))
            return None

    def add_records(self, key: str, records: Records) -> None:
        """Keep a run's records."""
        with _working_in(self._records, shared=True):
            write_records(self._records_path(key), records)

    def keep_records(self, keys: Collection[str]) -> None:
        """Remove the records of all other runs."""
        if not self._records.is_dir():
            return
        wanted = {self._records_path(key) for key in keys}
        with _working_in(self._records, shared=False) as alone:
            if alone:
                _clear(self._records)
            for path in self._records.glob("*.arrow"):
                if path not in wanted and not path.name.startswith(_ASIDE):
                    path.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self.dataset / f"{_ONE}{key[:32]}.parquet"

    def _records_path(self, key: str) -> Path:
        return self._records / f"{key[:32]}.arrow"

    def _files(self) -> list[Path]:
        # The small ones are listed first: what is merged in between is then found in one list or the other.
        small = sorted(self.dataset.glob(f"{_ONE}*.parquet"))
        return sorted(self.dataset.glob(f"{_MANY}*.parquet")) + small

    def _read(self, path: Path) -> dict[str, dict[str, Any]]:
        try:
            data = path.read_bytes()
        except FileNotFoundError:  # merged by another process: the new file is read by whoever lists the folder again
            return self._read_merged_since(path)
        except OSError as error:
            raise InputError(f"{path}: expected to read it, got: {error.strerror}; mend that or choose another --out") from None
        try:
            return dict(_rows(data, whole=path.name.startswith(_MANY)))
        except (OSError, pa.ArrowException, KeyError, TypeError, ValueError, RecursionError) as error:
            _set_aside(path, str(error))
            return {}

    def _read_merged_since(self, gone: Path) -> dict[str, dict[str, Any]]:
        rows: dict[str, dict[str, Any]] = {}
        for path in sorted(self.dataset.glob(f"{_MANY}*.parquet")):
            if path != gone:
                rows |= self._read(path)
        return rows


@contextmanager
def _working_in(folder: Path, *, shared: bool) -> Iterator[bool]:
    """Write files in a folder, beside others that add some, or alone; what goes wrong then is no slip in the input."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder, shared=shared) as works:
            yield works
    except (OSError, InputError) as error:
        raise write_error(folder, error) from None


def _clear(folder: Path) -> None:
    """Remove the half-written files that killed processes left behind: nobody else writes here now."""
    for path in folder.glob(".*"):
        if path.is_file():  # made-up routing for other processes is a folder, and not ours
            path.unlink(missing_ok=True)


def _set_aside(path: Path, why: str) -> None:
    aside = path.with_name(_ASIDE + path.name)
    with suppress(OSError):  # another process has done it, or nothing may be written: then this is said once more next time
        path.replace(aside)
    kept = f"; kept as {aside.name}" if aside.exists() else ""
    print(f"moesim: {path}: damaged, so that its runs are done again: {' '.join(why.split())}{kept}", file=sys.stderr)


def _rows(data: bytes, *, whole: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    # The other columns are checked where they stay; those of small files are made anew when they are merged.
    columns = None if whole else [_KEY, _JSON]
    table = pq.read_table(pa.BufferReader(data), columns=columns, page_checksum_verification=True)
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
            columns[name] = columns[name].cast(_TYPES[name])
        else:
            del columns[name]
    sink = pa.BufferOutputStream()
    small: dict[str, Any] = {"compression": "none", "use_dictionary": False, "write_statistics": False}  # a third of the time
    options = {"compression": "zstd"} if merged else small
    pq.write_table(pa.table({**columns, _JSON: texts}), sink, write_page_checksum=True, **options)
    data: bytes = sink.getvalue().to_pybytes()
    return data
