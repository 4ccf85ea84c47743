"""The container of a trace: safetensors with one JSON header, mapped into memory.

The library copies what it reads and orders metadata freely, so here arrays are views of the mapped file, written a piece at
a time. Small files may hold arrays as xz streams: a row of bytes under the array's name, of which the header has type and shape.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError, safe_open

from moesim.core import files
from moesim.core.gate import HEADER, check_made
from moesim.core.processes import in_threads
from moesim.errors import TraceError

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Version of the layout below. A reader refuses any other.
SCHEMA_VERSION = 1
#: Key of the JSON header in the metadata of the file.
METADATA_KEY = "moesim"
#: Key of the header's own sha256 next to it, as text. Files of earlier versions have none.
HEADER_SUM_KEY = "moesim_sha256"
#: Keys that every header has.
REQUIRED = ("schema_version", "model", "n_layers", "n_experts", "top_k", "label", "sha256")
#: Key of the header: name of a packed array to its type and shape. It describes the file, not the trace.
PACKED_KEY = "packed"

_TYPES = {
    "U8": "<u1", "U16": "<u2", "U32": "<u4", "U64": "<u8",
    "I8": "<i1", "I16": "<i2", "I32": "<i4", "I64": "<i8",
    "F16": "<f2", "F32": "<f4", "F64": "<f8", "BOOL": "|b1",
}  # fmt: skip
_CODES = {np.dtype(text).str: code for code, text in _TYPES.items()}
_PIECE_BYTES = 2**24
_ALIGNMENT = 8
#: A header that says more bytes than this factor times the packed ones is wrong: it would only fill the memory.
_MOST = 10_000
#: Literal context, literal position and position bits of the filters that are tried: for bytes, and for two-byte items.
_FILTERS = ((3, 0, 0), (4, 0, 0), (2, 0, 1), (2, 2, 2))
_DICTIONARY_BYTES = 8 << 20
_MOST_MEMORY = 64 << 20
_REMEDY = "fetch or record it again"


def read_container(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Map a file into memory: its arrays and its header."""
    data, table, header = _open(path)
    arrays = {}
    for name, entry in table.items():
        try:
            first, last = entry["data_offsets"]
            view = data[first:last].view(np.ndarray).view(_TYPES[entry["dtype"]])
            arrays[name] = view.reshape(entry["shape"])
        except (KeyError, ValueError):  # a type or a shape that NumPy has not
            raise TraceError(f"{path}: {name}: expected a known type and shape, got {_brief(entry)}; {_REMEDY}") from None
    return _unpack(str(path), arrays, header.pop(PACKED_KEY, {})), header


def read_facts(path: Path) -> dict[str, Any]:
    """Read the header of a file without its arrays."""
    return _open(path)[2]


def is_trace(path: Path) -> bool:
    """Return whether a file is a whole container of moesim."""
    try:
        read_container(path)
    except TraceError:
        return False
    return True


def _open(path: Path) -> tuple[NDArray[np.uint8], dict[str, Any], dict[str, Any]]:
    try:
        with safe_open(path, "np"):  # checks the table
            raw = np.memmap(path, np.uint8, "r")
        length = int.from_bytes(raw[:8].tobytes(), "little")
        table = json.loads(raw[8 : 8 + min(length, HEADER.most)].tobytes())
    except FileNotFoundError:
        raise TraceError(f"{path}: expected a trace file, got nothing there; check the path") from None
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        expected = "a readable, non-empty trace file in safetensors"
        raise TraceError(f"{path}: expected {expected}, got: {_brief(error)}; it is truncated or altered, {_REMEDY}") from None
    metadata = table.pop("__metadata__", {})
    if METADATA_KEY not in metadata:
        raise TraceError(
            f"{path}: metadata: expected the key '{METADATA_KEY}' of a moesim trace, got {_brief(sorted(metadata))}; "
            "record it again, or write it with moesim.trace.Trace.write"
        )
    return raw[8 + length :], table, _read_header(path, metadata)


def _read_header(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    if len(metadata) > 1 and metadata.get(HEADER_SUM_KEY) != (got := _header_sum(metadata[METADATA_KEY])):
        expected = f"{METADATA_KEY} and {HEADER_SUM_KEY}, sha256 {got[:12]}..."
        raise TraceError(f"{path}: header: expected {expected}, got {_brief(sorted(metadata.items())[1:])}; {_REMEDY}")
    try:
        header = json.loads(metadata[METADATA_KEY])
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}: header: expected JSON, got: {_brief(error)}; {_REMEDY}") from None
    version = header.get("schema_version") if isinstance(header, dict) else _brief(header)
    if version != SCHEMA_VERSION:
        raise TraceError(
            f"{path}: header.schema_version: expected {SCHEMA_VERSION}, got {_brief(version)}; "
            "record the trace again, or use the version of moesim that wrote it"
        )
    return dict(header)


def _header_sum(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _brief(value: object) -> str:
    text = " ".join(str(value).split()) if isinstance(value, Exception) else repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def write_container(
    path: str | Path, arrays: Mapping[str, NDArray[Any]], header: Mapping[str, Any], *, packed: bool = False
) -> Path:
    """Write arrays and header as one safetensors file; the same content gives the same bytes."""
    if packed:
        arrays, facts = _pack(arrays)
        header = {**header, PACKED_KEY: facts}
    said = json.dumps(header, sort_keys=True, allow_nan=False)
    table: dict[str, Any] = {"__metadata__": {METADATA_KEY: said, HEADER_SUM_KEY: _header_sum(said)}}
    end = 0
    # Wide types first, so that every array lies at a multiple of its item size.
    names = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))
    for name in names:
        begin, end = end, end + arrays[name].nbytes
        table[name] = _facts(arrays[name]) | {"data_offsets": [begin, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > HEADER.most:
        raise TraceError(f"{path}: expected a header of at most {HEADER.most} bytes, got {len(text)}; split the trace")
    with files.writing(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            for piece in _pieces(arrays[name]):
                file.write(piece)
    return Path(path)


def _facts(array: NDArray[Any]) -> dict[str, Any]:
    return {"dtype": _CODES[array.dtype.newbyteorder("<").str], "shape": list(array.shape)}


def _pieces(array: NDArray[Any]) -> Iterator[memoryview]:
    if not array.size:
        return
    rows = array.reshape(1) if array.ndim == 0 else array
    step = max(1, _PIECE_BYTES // max(1, rows[0].nbytes))
    for start in range(0, len(rows), step):
        part = np.ascontiguousarray(rows[start : start + step], rows.dtype.newbyteorder("<"))
        yield part.reshape(-1).view(np.uint8).data


def checksums(arrays: Mapping[str, NDArray[Any]]) -> dict[str, str]:
    """Compute the sha256 of each array: its type, its shape and its bytes."""
    sums = {}
    for name, array in arrays.items():
        digest = hashlib.sha256(f"{array.dtype.str}{array.shape}".encode())
        for piece in _pieces(array):
            digest.update(piece)
        sums[name] = digest.hexdigest()
    return sums


def verify_checksums(place: str, arrays: Mapping[str, NDArray[Any]], expected: Mapping[str, str]) -> None:
    """Compare the arrays with the header's checksums."""
    if set(arrays) != set(expected):
        raise TraceError(f"{place}: expected the arrays {sorted(expected)} of the header, got {sorted(arrays)}; {_REMEDY}")
    for name, got in checksums(arrays).items():
        if got != expected[name]:
            raise TraceError(
                f"{place}: {name}: expected sha256 {str(expected[name])[:12]}..., got {got[:12]}...; the bytes "
                f"were altered, {_REMEDY}"
            )


def _pack(arrays: Mapping[str, NDArray[Any]]) -> tuple[dict[str, NDArray[Any]], dict[str, dict[str, Any]]]:
    found, facts = dict(arrays), {}
    for name, array in arrays.items():
        plain = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        data = min((_compress(plain.tobytes(), *bits) for bits in _FILTERS), key=len)
        if len(data) < plain.nbytes:
            found[name], facts[name] = np.frombuffer(data, np.uint8), _facts(array)
    return found, facts


def _compress(data: bytes, lc: int, lp: int, pb: int) -> bytes:
    lzma2 = {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": _DICTIONARY_BYTES}
    return lzma.compress(data, lzma.FORMAT_XZ, lzma.CHECK_NONE, filters=[{**lzma2, "lc": lc, "lp": lp, "pb": pb}])


def _unpack(place: str, arrays: Mapping[str, NDArray[Any]], facts: object) -> dict[str, NDArray[Any]]:
    if not isinstance(facts, dict) or not set(facts) <= set(arrays):
        raise TraceError(f"{place}: header.{PACKED_KEY}: expected facts of arrays of the file, got {_brief(facts)}; {_REMEDY}")
    largest_first = sorted(facts, key=lambda name: -arrays[name].nbytes)
    restored = in_threads(lambda name: _restore(f"{place}: {name}", arrays[name], facts[name]), largest_first)
    return {**arrays, **dict(zip(largest_first, restored, strict=True))}


def _restore(place: str, array: NDArray[Any], fact: object) -> NDArray[Any]:
    dtype, shape = _read_fact(place, fact)
    n_bytes = math.prod(shape) * dtype.itemsize
    if array.dtype != np.uint8 or array.ndim != 1 or n_bytes > _MOST * array.nbytes:
        got = f"{array.dtype.name} {array.shape} for {dtype.name} {shape}"
        raise TraceError(f"{place}: expected a row of packed bytes, got {got[:200]}; {_REMEDY}")
    check_made(place, "an array that is packed", shape, dtype.itemsize, _REMEDY)
    stream = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MOST_MEMORY)
    try:
        data = stream.decompress(array.tobytes(), n_bytes + 1)
    except lzma.LZMAError as error:
        raise TraceError(f"{place}: expected packed bytes, got: {error}; the bytes were altered, {_REMEDY}") from None
    if len(data) != n_bytes or not stream.eof or stream.unused_data:
        raise TraceError(f"{place}: expected {n_bytes} bytes packed, got {len(data)} or more; the bytes were altered, {_REMEDY}")
    return np.frombuffer(data, dtype).reshape(shape)


def _read_fact(place: str, fact: object) -> tuple[np.dtype[Any], tuple[int, ...]]:
    dtype, shape = (fact.get("dtype"), fact.get("shape")) if isinstance(fact, dict) else (None, None)
    lengths = isinstance(shape, list) and all(type(n) is int and 0 < n < 2**62 for n in shape) and 0 < len(shape) <= 8
    if not isinstance(dtype, str) or dtype not in _TYPES or not isinstance(shape, list) or not lengths:
        raise TraceError(f"{place}: header.{PACKED_KEY}: expected dtype and shape, got {_brief(fact)}; {_REMEDY}")
    return np.dtype(_TYPES[dtype]), tuple(shape)
