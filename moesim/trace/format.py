"""The container of a trace: safetensors with one JSON header, and what must hold of its arrays.

A safetensors file is eight bytes of length, a JSON table of names, types, shapes and offsets, and then the
arrays. It is read here without a copy: the arrays are views of the memory-mapped file.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim import atomic
from moesim.errors import TraceError

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Version of the layout below. A reader refuses any other.
SCHEMA_VERSION = 1
#: Key of the JSON header in the metadata of the file. One key only: the library does not keep the order of
#: several.
METADATA_KEY = "moesim"
#: Keys that every header has.
REQUIRED = ("schema_version", "model", "n_layers", "n_experts", "top_k", "label", "sha256")

_TYPES = {
    "U8": "<u1", "U16": "<u2", "U32": "<u4", "U64": "<u8",
    "I8": "<i1", "I16": "<i2", "I32": "<i4", "I64": "<i8",
    "F16": "<f2", "F32": "<f4", "F64": "<f8", "BOOL": "|b1",
}  # fmt: skip
_CODES = {np.dtype(text).str: code for code, text in _TYPES.items()}
_MAX_TABLE_BYTES = 2**27
_PIECE_BYTES = 2**24
_ALIGNMENT = 8


def read_container(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Map a file into memory.

    Parameters
    ----------
    path : Path
        A trace.

    Returns
    -------
    arrays : dict of str to ndarray
        Read-only views of the file.
    header : dict
        The JSON header.

    Raises
    ------
    TraceError
        If there is no such file, or it is not a complete trace of this version.
    """
    try:
        raw = np.memmap(path, dtype=np.uint8, mode="r")
    except FileNotFoundError:
        raise TraceError(f"{path}: expected a trace file, got nothing there; check the path") from None
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise TraceError(f"{path}: expected a readable, non-empty trace file, got: {error}") from None
    table, begin = _read_table(path, raw)
    metadata = table.pop("__metadata__", None) or {}
    if METADATA_KEY not in metadata:
        raise TraceError(
            f"{path}: metadata: expected the key '{METADATA_KEY}' of a moesim trace, got {sorted(metadata)}; "
            "record it again, or write it with moesim.trace.Trace.write"
        )
    header = _read_header(path, metadata[METADATA_KEY])
    arrays = {name: _map_array(path, raw, name, entry, begin) for name, entry in table.items()}
    return arrays, header


def _read_table(path: Path, raw: NDArray[np.uint8]) -> tuple[dict[str, Any], int]:
    length = int.from_bytes(raw[:8].tobytes(), "little") if len(raw) >= 8 else 0
    if not 2 <= length <= min(_MAX_TABLE_BYTES, len(raw) - 8):
        raise TraceError(
            f"{path}: expected a safetensors table of arrays after 8 bytes, got {len(raw)} bytes that "
            f"announce one of {length}; the file is truncated or of another format, fetch or record it again"
        )
    try:
        table = json.loads(raw[8 : 8 + length].tobytes())
    except ValueError as error:
        raise TraceError(f"{path}: table of arrays: expected JSON, got: {error}; fetch or record it again") from None
    if not isinstance(table, dict):
        raise TraceError(f"{path}: table of arrays: expected a JSON object, got {type(table).__name__}")
    return table, 8 + length


def _read_header(path: Path, text: str) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except ValueError as error:
        raise TraceError(f"{path}: header: expected JSON, got: {error}; fetch or record it again") from None
    if not isinstance(header, dict):
        raise TraceError(f"{path}: header: expected a JSON object, got {type(header).__name__}")
    version = header.get("schema_version")
    if version != SCHEMA_VERSION:
        raise TraceError(
            f"{path}: header.schema_version: expected {SCHEMA_VERSION}, got {version!r}; "
            "record the trace again, or use the version of moesim that wrote it"
        )
    return header


def _map_array(path: Path, raw: NDArray[np.uint8], name: str, entry: Any, begin: int) -> NDArray[Any]:
    try:
        dtype = np.dtype(_TYPES[entry["dtype"]])
        shape = tuple(int(n) for n in entry["shape"])
        first, last = (begin + int(n) for n in entry["data_offsets"])
    except (KeyError, TypeError, ValueError):
        raise TraceError(f"{path}: {name}: expected dtype, shape and data_offsets, got {entry!r}") from None
    if last > len(raw):
        raise TraceError(
            f"{path}: {name}: expected bytes up to {last}, got a file of {len(raw)} bytes; it is truncated, "
            "fetch or record it again"
        )
    if first < begin or last - first != math.prod(shape) * dtype.itemsize:
        raise TraceError(
            f"{path}: {name}: expected {math.prod(shape) * dtype.itemsize} bytes for {dtype.name} {shape}, "
            f"got {last - first}; fetch or record it again"
        )
    return raw[first:last].view(np.ndarray).view(dtype).reshape(shape)


def write_container(path: str | Path, arrays: Mapping[str, NDArray[Any]], header: Mapping[str, Any]) -> Path:
    """Write arrays and header as one safetensors file; the same content gives the same bytes.

    The library serialises in memory only; here the arrays go to the file a piece at a time, so that they may
    be larger than memory.

    Parameters
    ----------
    path : str or Path
        Where to; complete or not there at all.
    arrays : mapping of str to ndarray
        May be memory-mapped.
    header : mapping
        Must be JSON without NaN.

    Returns
    -------
    Path
        The file.
    """
    table: dict[str, Any] = {"__metadata__": {METADATA_KEY: json.dumps(header, sort_keys=True, allow_nan=False)}}
    end = 0
    # Wide types first, so that every array lies at a multiple of its item size.
    names = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))
    for name in names:
        array = arrays[name]
        begin, end = end, end + array.nbytes
        code = _CODES[array.dtype.newbyteorder("<").str]
        table[name] = {"dtype": code, "shape": list(array.shape), "data_offsets": [begin, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with atomic.writing(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            for piece in _pieces(arrays[name]):
                file.write(piece)
    return Path(path)


def _pieces(array: NDArray[Any]) -> Iterator[memoryview]:
    """Bytes of an array in C order, little-endian, some rows at a time."""
    if not array.size:
        return
    rows = array.reshape(1) if array.ndim == 0 else array
    step = max(1, _PIECE_BYTES // max(1, rows[0].nbytes))
    for start in range(0, len(rows), step):
        part = np.ascontiguousarray(rows[start : start + step], rows.dtype.newbyteorder("<"))
        yield part.reshape(-1).view(np.uint8).data


def checksums(arrays: Mapping[str, NDArray[Any]]) -> dict[str, str]:
    """sha256 of each array: its type, its shape and its bytes.

    Parameters
    ----------
    arrays : mapping of str to ndarray

    Returns
    -------
    dict of str to str
    """
    sums = {}
    for name in sorted(arrays):
        array = arrays[name]
        digest = hashlib.sha256(f"{array.dtype.str}{array.shape}".encode())
        for piece in _pieces(array):
            digest.update(piece)
        sums[name] = digest.hexdigest()
    return sums


def verify_checksums(place: str, arrays: Mapping[str, NDArray[Any]], expected: Mapping[str, str]) -> None:
    """Compare the arrays with the header's checksums.

    Raises
    ------
    TraceError
        If an array is missing, additional or altered.
    """
    if set(arrays) != set(expected):
        raise TraceError(
            f"{place}: expected the arrays {sorted(expected)} of the header, got {sorted(arrays)}; fetch or record it again"
        )
    for name, got in checksums(arrays).items():
        if got != expected[name]:
            raise TraceError(
                f"{place}: {name}: expected sha256 {expected[name][:12]}..., got {got[:12]}...; the bytes "
                "were altered, fetch or record it again"
            )
