"""The container of a trace: safetensors with one JSON header, and what must hold of its arrays.

A safetensors file is eight bytes of length, a JSON table of names, types, shapes and offsets, and then the
arrays. It is read here without a copy: the arrays are views of the memory-mapped file.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from moesim.core import atomic
from moesim.core.gate import HEADER, check_made
from moesim.core.threads import in_threads
from moesim.errors import TraceError

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Key of the header: name of an array to its type and shape. It describes the file, not the trace.
PACKED_KEY = "packed"
#: A header that says more bytes than this factor times the packed ones is wrong: it would only fill the memory.
_MOST = 10_000
#: Literal context, literal position and position bits of the filters that are tried: for bytes, and for two-byte items.
_FILTERS = ((3, 0, 0), (4, 0, 0), (2, 0, 1), (2, 2, 2))
_DICTIONARY_BYTES = 8 << 20
_MOST_MEMORY = 64 << 20
_REMEDY = "fetch or record it again"


def pack(
    arrays: Mapping[str, NDArray[Any]], codes: Mapping[str, str]
) -> tuple[dict[str, NDArray[Any]], dict[str, dict[str, Any]]]:
    """Compress the arrays that get smaller by it; with ``dtype`` and ``shape`` of each that does."""
    found, facts = dict(arrays), {}
    for name, array in arrays.items():
        plain = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        data = min((_compress(plain.tobytes(), *bits) for bits in _FILTERS), key=len)
        if len(data) < plain.nbytes:
            found[name] = np.frombuffer(data, np.uint8)
            facts[name] = {"dtype": codes[plain.dtype.str], "shape": list(array.shape)}
    return found, facts


def _compress(data: bytes, lc: int, lp: int, pb: int) -> bytes:
    lzma2 = {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": _DICTIONARY_BYTES}
    return lzma.compress(data, lzma.FORMAT_XZ, lzma.CHECK_NONE, filters=[{**lzma2, "lc": lc, "lp": lp, "pb": pb}])


def unpack(place: str, arrays: Mapping[str, NDArray[Any]], facts: object, types: Mapping[str, str]) -> dict[str, NDArray[Any]]:
    """Restore what `pack` compressed."""
    if not isinstance(facts, dict) or not set(facts) <= set(arrays):
        raise TraceError(f"{place}: header.{PACKED_KEY}: expected facts of arrays of the file, got {str(facts)[:200]}; {_REMEDY}")
    largest_first = sorted(facts, key=lambda name: -arrays[name].nbytes)
    restored = in_threads(lambda name: _restore(f"{place}: {name}", arrays[name], facts[name], types), largest_first)
    return {**arrays, **dict(zip(largest_first, restored, strict=True))}


def _restore(place: str, array: NDArray[Any], fact: object, types: Mapping[str, str]) -> NDArray[Any]:
    dtype, shape = _read_fact(place, fact, types)
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


def _read_fact(place: str, fact: object, types: Mapping[str, str]) -> tuple[np.dtype[Any], tuple[int, ...]]:
    dtype, shape = (fact.get("dtype"), fact.get("shape")) if isinstance(fact, dict) else (None, None)
    lengths = isinstance(shape, list) and all(type(n) is int and 0 < n < 2**62 for n in shape) and 0 < len(shape) <= 8
    if not isinstance(dtype, str) or dtype not in types or not isinstance(shape, list) or not lengths:
        raise TraceError(f"{place}: header.{PACKED_KEY}: expected dtype and shape, got {str(fact)[:200]}; {_REMEDY}")
    return np.dtype(types[dtype]), tuple(shape)


#: Version of the layout below. A reader refuses any other.
SCHEMA_VERSION = 1
#: Key of the JSON header in the metadata of the file.
METADATA_KEY = "moesim"
#: Key of the header's own sha256 beside it, as text. Files of earlier versions have none.
HEADER_SUM_KEY = "moesim_sha256"
#: Keys that every header has.
REQUIRED = ("schema_version", "model", "n_layers", "n_experts", "top_k", "label", "sha256")

_TYPES = {
    "U8": "<u1", "U16": "<u2", "U32": "<u4", "U64": "<u8",
    "I8": "<i1", "I16": "<i2", "I32": "<i4", "I64": "<i8",
    "F16": "<f2", "F32": "<f4", "F64": "<f8", "BOOL": "|b1",
}  # fmt: skip
_CODES = {np.dtype(text).str: code for code, text in _TYPES.items()}
_MAX_AXES = 8
_PIECE_BYTES = 2**24
_ALIGNMENT = 8


def read_container(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Map a file into memory."""
    data, table, header = _open(path)
    entries = {name: _read_entry(path, name, entry) for name, entry in table.items()}
    _check_spans(path, entries, len(data))
    arrays = {name: _map_array(path, data, name, entry) for name, entry in entries.items()}
    packed = header.pop(PACKED_KEY, {})
    return unpack(str(path), arrays, packed, _TYPES), header


def read_facts(path: Path) -> dict[str, Any]:
    """Read the header of a file without its arrays."""
    return _open(path)[2]


def _open(path: Path) -> tuple[NDArray[np.uint8], dict[str, Any], dict[str, Any]]:
    """Map a file into memory: what comes after the table, the table and the header."""
    try:
        raw = np.memmap(path, dtype=np.uint8, mode="r")
    except FileNotFoundError:
        raise TraceError(f"{path}: expected a trace file, got nothing there; check the path") from None
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise TraceError(f"{path}: expected a readable, non-empty trace file, got: {error}") from None
    table, begin = _read_table(path, raw)
    metadata = table.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not isinstance(metadata.get(METADATA_KEY), str):
        got = sorted(metadata) if isinstance(metadata, dict) else _brief(metadata)
        raise TraceError(
            f"{path}: metadata: expected the key '{METADATA_KEY}' of a moesim trace, got {got}; "
            "record it again, or write it with moesim.trace.Trace.write"
        )
    _check_metadata(path, metadata)
    return raw[begin:], table, _read_header(path, metadata[METADATA_KEY])


def _check_metadata(path: Path, metadata: Mapping[str, Any]) -> None:
    """The header is what was written; another key could be that of its sum, altered."""
    if len(metadata) == 1:
        return
    if set(metadata) != {METADATA_KEY, HEADER_SUM_KEY}:
        raise TraceError(
            f"{path}: metadata: expected the keys {METADATA_KEY} and {HEADER_SUM_KEY}, got {_brief(sorted(metadata))}; "
            "fetch or record it again, or write it with moesim.trace.Trace.write"
        )
    got = _header_sum(metadata[METADATA_KEY])
    if got != metadata[HEADER_SUM_KEY]:
        raise TraceError(
            f"{path}: header: expected sha256 {str(metadata[HEADER_SUM_KEY])[:12]!a}..., got {got[:12]}...; the bytes were "
            "altered, fetch or record it again"
        )


def _header_sum(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def is_trace(path: Path) -> bool:
    """Whether a file is a whole container of moesim; its content is not checked."""
    try:
        read_container(path)
    except TraceError:
        return False
    return True


def _brief(value: object) -> str:
    """What a file holds, short enough for a line."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _parse(path: Path, what: str, text: bytes | str) -> dict[str, Any]:
    """Read a JSON object that names nothing twice and holds nothing that JSON does not know (NaN)."""
    try:
        found = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}: {what}: expected JSON, got: {_brief(str(error))}; fetch or record it again") from None
    if not isinstance(found, dict):
        raise TraceError(f"{path}: {what}: expected a JSON object, got {type(found).__name__}; fetch or record it again")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {max(names, key=names.count)!r} twice")
    return found


def _refuse(text: str) -> None:
    raise ValueError(f"{text}, which is no JSON")


def _read_table(path: Path, raw: NDArray[np.uint8]) -> tuple[dict[str, Any], int]:
    length = int.from_bytes(raw[:8].tobytes(), "little") if len(raw) >= 8 else 0
    if not 2 <= length <= min(HEADER.most, len(raw) - 8):
        raise TraceError(
            f"{path}: expected a safetensors table of arrays after 8 bytes, got {len(raw)} bytes that "
            f"announce one of {length}; the file is truncated or of another format, fetch or record it again"
        )
    return _parse(path, "table of arrays", raw[8 : 8 + length].tobytes()), 8 + length


def _read_header(path: Path, text: str) -> dict[str, Any]:
    header = _parse(path, "header", text)
    version = header.get("schema_version")
    if version != SCHEMA_VERSION:
        raise TraceError(
            f"{path}: header.schema_version: expected {SCHEMA_VERSION}, got {_brief(version)}; "
            "record the trace again, or use the version of moesim that wrote it"
        )
    return header


class _Entry(NamedTuple):
    """One array of the table; offsets count from the end of the table."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    first: int
    last: int


def _read_entry(path: Path, name: str, entry: Any) -> _Entry:
    try:
        dtype = np.dtype(_TYPES[entry["dtype"]])
        shape, (first, last) = tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise TraceError(f"{path}: {name}: expected dtype, shape and data_offsets, got {_brief(entry)}") from None
    if not all(type(n) is int and 0 <= n < 2**62 for n in (*shape, first, last)) or len(shape) > _MAX_AXES:
        expected = f"up to {_MAX_AXES} lengths and two offsets, whole numbers of at least 0"
        raise TraceError(f"{path}: {name}: expected {expected}, got {_brief(entry)}; fetch or record it again")
    n_bytes = math.prod(shape) * dtype.itemsize
    # An empty array may not claim a length that no array can have.
    if last - first != n_bytes or math.prod(max(n, 1) for n in shape) >= 2**62:
        raise TraceError(
            f"{path}: {name}: expected {n_bytes} bytes for {dtype.name} {_brief(shape)}, "
            f"got {last - first}; fetch or record it again"
        )
    return _Entry(dtype, shape, first, last)


def _check_spans(path: Path, entries: Mapping[str, _Entry], n_bytes: int) -> None:
    """The arrays follow each other without a gap and end where the file ends."""
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].first, item[1].last)):
        if entry.last > n_bytes:
            raise TraceError(
                f"{path}: {name}: expected bytes up to {entry.last} after the table, got a file with {n_bytes}; it is "
                "truncated, fetch or record it again"
            )
        if entry.first != end:
            raise TraceError(
                f"{path}: {name}: expected it to begin at byte {end} after the table, where the array before ends, got "
                f"{entry.first}; arrays overlap or leave a gap, fetch or record it again"
            )
        end = entry.last
    if end != n_bytes:
        raise TraceError(f"{path}: expected {end} bytes after the table, got {n_bytes}; fetch or record it again")


def _map_array(path: Path, data: NDArray[np.uint8], name: str, entry: _Entry) -> NDArray[Any]:
    try:
        return data[entry.first : entry.last].view(np.ndarray).view(entry.dtype).reshape(entry.shape)
    except ValueError as error:  # more axes or longer ones than NumPy has
        raise TraceError(f"{path}: {name}: expected a possible shape, got {_brief(entry.shape)}: {error}") from None


def write_container(
    path: str | Path, arrays: Mapping[str, NDArray[Any]], header: Mapping[str, Any], *, packed: bool = False
) -> Path:
    """Write arrays and header as one safetensors file; the same content gives the same bytes.

    The library serialises in memory only; here the arrays go to the file a piece at a time, so that they may
    be larger than memory.
    """
    if packed:
        arrays, facts = pack(arrays, _CODES)
        header = {**header, PACKED_KEY: facts}
    said = json.dumps(header, sort_keys=True, allow_nan=False)
    table: dict[str, Any] = {"__metadata__": {METADATA_KEY: said, HEADER_SUM_KEY: _header_sum(said)}}
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
    if len(text) > HEADER.most:
        raise TraceError(f"{path}: expected a header of at most {HEADER.most} bytes, got {len(text)}; split the trace")
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
    """sha256 of each array: its type, its shape and its bytes."""
    sums = {}
    for name in sorted(arrays):
        array = arrays[name]
        digest = hashlib.sha256(f"{array.dtype.str}{array.shape}".encode())
        for piece in _pieces(array):
            digest.update(piece)
        sums[name] = digest.hexdigest()
    return sums


def verify_checksums(place: str, arrays: Mapping[str, NDArray[Any]], expected: Mapping[str, str]) -> None:
    """Compare the arrays with the header's checksums."""
    if set(arrays) != set(expected):
        raise TraceError(
            f"{place}: expected the arrays {sorted(expected)} of the header, got {sorted(arrays)}; fetch or record it again"
        )
    for name, got in checksums(arrays).items():
        if got != expected[name]:
            raise TraceError(
                f"{place}: {name}: expected sha256 {str(expected[name])[:12]}..., got {got[:12]}...; the bytes "
                "were altered, fetch or record it again"
            )
