"""Arrays of a trace file as xz streams: for small files, at the price of memory and time when they are read.

A packed array lies in the file as a row of bytes under its own name; the header says what it is.
"""

from __future__ import annotations

import lzma
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.core.gate import check_made
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
