"""The runs finished in a result folder: one Parquet dataset, keyed by what each run depends on.

``dataset/`` grows by one file a run, each put in place by a rename, so that a kill loses at most the runs in flight and the
dataset can be read at any moment. Now and then, and at the end, the small files are merged into one. Nothing is locked: several
processes may write to one folder; a run that two of them did is there twice for a while, equal but for the name of its file.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from moesim.atomic import write_bytes
from moesim.errors import InputError
from moesim.experiment.records_file import read_records, write_records
from moesim.experiment.result import DATASET, RECORDS
from moesim.metrics.columns import columns_of
from moesim.records import Records

_KEY, _JSON = "key", "row_json"  # the row once more, exactly: a table's columns have one type each
_ONE, _MANY = "run-", "part-"  # beginnings of file names
_MERGE_AT = 500  # small files; each takes about a millisecond to read

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
            Key -> row. A file that cannot be read is set aside with a line on stderr; its runs count as not done.
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
        """Keep a finished run, at once and for good; its row has its ``key``."""
        write_bytes(self._path(key), _parquet([dict(row)], merged=False))
        self._n_small += 1
        if self._n_small >= _MERGE_AT:
            self.merge()

    def merge(self) -> None:
        """Put all files together into one, whose name and bytes depend on the rows alone."""
        files = self._files()
        rows: dict[str, dict[str, Any]] = {}
        for path in files:
            rows |= self._read(path)
        if not rows:
            return
        data = _parquet([rows[key] for key in sorted(rows)], merged=True)
        merged = self.dataset / f"{_MANY}{hashlib.sha256(data).hexdigest()[:16]}.parquet"
        write_bytes(merged, data)
        for path in files:  # only what is in the new file: another process may have added some
            if path != merged:
                path.unlink(missing_ok=True)
        self._n_small = 0

    def records(self, key: str) -> Records | None:
        """Read a run's records; None if they were not kept, or cannot be read."""
        try:
            return read_records(self._records_path(key))
        except InputError:
            return None

    def add_records(self, key: str, records: Records) -> None:
        """Keep a run's records."""
        write_records(self._records_path(key), records)

    def keep_records(self, keys: Collection[str]) -> None:
        """Remove the records of all other runs."""
        wanted = {self._records_path(key) for key in keys}
        for path in self._records.glob("*.arrow"):
            if path not in wanted:
                path.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self.dataset / f"{_ONE}{key[:32]}.parquet"

    def _records_path(self, key: str) -> Path:
        return self._records / f"{key[:32]}.arrow"

    def _files(self) -> list[Path]:
        return sorted(self.dataset.glob(f"{_MANY}*.parquet")) + sorted(self.dataset.glob(f"{_ONE}*.parquet"))

    def _read(self, path: Path) -> dict[str, dict[str, Any]]:
        try:
            table = pq.read_table(path, columns=[_KEY, _JSON])
            return dict(_rows(table))
        except FileNotFoundError:  # merged by another process: the new file is read by whoever lists the folder again
            return self._read_merged_since(path)
        except (OSError, pa.ArrowException, ValueError) as error:
            aside = path.with_name(f"{path.name}.unreadable")
            with suppress(FileNotFoundError):  # another process has done it
                path.replace(aside)
            reason = " ".join(str(error).split())
            print(f"moesim: {path}: cannot be read, its runs are done again: {reason}; kept as {aside.name}", file=sys.stderr)
            return {}

    def _read_merged_since(self, gone: Path) -> dict[str, dict[str, Any]]:
        rows: dict[str, dict[str, Any]] = {}
        for path in sorted(self.dataset.glob(f"{_MANY}*.parquet")):
            if path != gone:
                rows |= self._read(path)
        return rows


def _rows(table: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    for key, text in zip(table[_KEY].to_pylist(), table[_JSON].to_pylist(), strict=True):
        yield key, json.loads(text)


def _parquet(rows: list[dict[str, Any]], *, merged: bool) -> bytes:
    texts = [json.dumps(row) for row in rows]
    table = pa.table({**columns_of(rows), _JSON: texts})
    sink = pa.BufferOutputStream()
    small: dict[str, Any] = {"compression": "none", "use_dictionary": False, "write_statistics": False}  # a third of the time
    pq.write_table(table, sink, **({"compression": "zstd"} if merged else small))
    data: bytes = sink.getvalue().to_pybytes()
    return data
