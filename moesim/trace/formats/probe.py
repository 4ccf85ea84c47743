"""The beginning of a file, which formats look at."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path

from moesim.errors import TraceError
from moesim.trace.formats.arrays import StoredArray, open_archive, open_array
from moesim.trace.formats.contract import wrong

_HEAD_BYTES = 65_536
ROUTED = "that is (tokens, layers, top_k)"
"""Axes of an array of expert ids."""
TEXT_REMEDY = (
    "the log of an engine holds no routing: vLLM and SGLang return it with an answer, llama.cpp writes it as CSV; or write lines "
    "of layer,position,expert (docs/guide/importing.md)"
)
"""What to do with text that is no table."""


class Probe:
    """The beginning of a file, in the forms in which formats ask for it. Nothing here raises for content."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def head(self) -> bytes:
        """The first 64 KiB."""
        with self.path.open("rb") as file:
            return file.read(_HEAD_BYTES)

    @cached_property
    def array(self) -> StoredArray | None:
        """The array of a ``.npy`` file."""
        try:
            return open_array(self.path) if self.head.startswith(b"\x93NUMPY") else None
        except TraceError:
            return None

    @cached_property
    def arrays(self) -> dict[str, StoredArray]:
        """The arrays of a ``.npz`` file, by name."""
        try:
            return open_archive(self.path) if self.head.startswith(b"PK") else {}
        except TraceError:
            return {}

    @cached_property
    def is_json(self) -> bool:
        """Whether it begins as a JSON object or list does."""
        return self.head.lstrip()[:1] in (b"{", b"[")

    @cached_property
    def json_names(self) -> list[str]:
        """Fields of the object on the first line."""
        try:
            value = json.loads(self.head.split(b"\n", 1)[0])
        except (ValueError, RecursionError):
            return []
        return list(value) if isinstance(value, dict) else []

    @cached_property
    def first_line(self) -> str | None:
        """The first line, if it is text."""
        line = self.head.split(b"\n", 1)[0]
        try:
            text = line.decode("utf-8-sig").rstrip("\r")
        except UnicodeDecodeError:
            return None
        return text if text.replace("\t", " ").isprintable() else None

    @cached_property
    def _columns(self) -> list[str]:
        line = self.first_line
        if line is None or self.is_json or line.startswith(("#", "PAR1")) or not line.isprintable():
            return []
        return [name.strip().strip('"') for name in line.split(",")]

    @property
    def csv_names(self) -> list[str]:
        """The values of the first line of a text with commas: names of columns, or numbers if `headless`."""
        return self._columns

    @property
    def headless(self) -> bool:
        """Whether that line holds whole numbers only."""
        return bool(self._columns) and all(name.lstrip("-").isdecimal() for name in self._columns)

    @cached_property
    def parquet(self) -> tuple[list[str], dict[bytes, bytes]]:
        """Columns and metadata of a Parquet file; unlike the others this raises `TraceError`."""
        import pyarrow as pa
        from pyarrow import parquet

        try:
            schema = parquet.read_schema(self.path)
        except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
            raise wrong(self.path, "a Parquet file", error, "it is truncated, altered or of another format") from None
        return schema.names, dict(schema.metadata or {})
