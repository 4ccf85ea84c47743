"""Arrays of a trace file as deflated bytes: for small files, at the price of memory when they are read.

A packed array lies in the file as a row of bytes under its own name; the header says what it is. The first bytes of
all items come first, then the second ones: the halves of floating-point numbers are alike among themselves.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.errors import TraceError

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Key of the header: name of an array to its type and shape. It describes the file, not the trace.
PACKED_KEY = "packed"
#: Deflate makes nothing smaller than by this factor; a header that says so is wrong.
_MOST = 1040
_LEVEL = 9
_REMEDY = "fetch or record it again"


def pack(
    arrays: Mapping[str, NDArray[Any]], codes: Mapping[str, str]
) -> tuple[dict[str, NDArray[Any]], dict[str, dict[str, Any]]]:
    """Deflate the arrays that get smaller by it.

    Parameters
    ----------
    arrays : mapping of str to ndarray
    codes : mapping of str to str
        NumPy's name of each type to that in the file.

    Returns
    -------
    arrays : dict of str to ndarray
        Rows of bytes, or the array where nothing is gained.
    facts : dict of str to dict
        ``dtype`` and ``shape`` of what is packed.
    """
    found, facts = dict(arrays), {}
    for name, array in arrays.items():
        plain = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        data = zlib.compress(plain.reshape(-1).view(np.uint8).reshape(-1, plain.itemsize).T.tobytes(), _LEVEL)
        if len(data) < plain.nbytes:
            found[name] = np.frombuffer(data, np.uint8)
            facts[name] = {"dtype": codes[plain.dtype.str], "shape": list(array.shape)}
    return found, facts


def unpack(place: str, arrays: Mapping[str, NDArray[Any]], facts: object, types: Mapping[str, str]) -> dict[str, NDArray[Any]]:
    """Inflate what `pack` deflated.

    Parameters
    ----------
    place : str
        File, for messages.
    arrays : mapping of str to ndarray
    facts : object
        What the header says.
    types : mapping of str to str
        The file's name of each type to NumPy's.

    Returns
    -------
    dict of str to ndarray

    Raises
    ------
    TraceError
        If header and bytes do not agree.
    """
    if not isinstance(facts, dict) or not set(facts) <= set(arrays):
        raise TraceError(f"{place}: header.{PACKED_KEY}: expected facts of arrays of the file, got {str(facts)[:200]}; {_REMEDY}")
    return {name: _inflate(f"{place}: {name}", a, facts[name], types) if name in facts else a for name, a in arrays.items()}


def _inflate(place: str, array: NDArray[Any], fact: object, types: Mapping[str, str]) -> NDArray[Any]:
    dtype, shape = _read_fact(place, fact, types)
    n_bytes = math.prod(shape) * dtype.itemsize
    if array.dtype != np.uint8 or array.ndim != 1 or n_bytes > _MOST * array.nbytes:
        got = f"{array.dtype.name} {array.shape} for {dtype.name} {shape}"
        raise TraceError(f"{place}: expected a row of packed bytes, got {got[:200]}; {_REMEDY}")
    inflater = zlib.decompressobj()
    try:
        data = inflater.decompress(array.tobytes(), n_bytes + 1)
    except zlib.error as error:
        raise TraceError(f"{place}: expected packed bytes, got: {error}; the bytes were altered, {_REMEDY}") from None
    if len(data) != n_bytes or not inflater.eof or inflater.unused_data:
        raise TraceError(f"{place}: expected {n_bytes} bytes packed, got {len(data)} or more; the bytes were altered, {_REMEDY}")
    halves = np.frombuffer(data, np.uint8).reshape(dtype.itemsize, -1)
    plain = np.ascontiguousarray(halves.T).view(dtype).reshape(shape)
    plain.flags.writeable = False
    return plain


def _read_fact(place: str, fact: object, types: Mapping[str, str]) -> tuple[np.dtype[Any], tuple[int, ...]]:
    dtype, shape = (fact.get("dtype"), fact.get("shape")) if isinstance(fact, dict) else (None, None)
    lengths = isinstance(shape, list) and all(type(n) is int and 0 < n < 2**62 for n in shape) and 0 < len(shape) <= 8
    if not isinstance(dtype, str) or dtype not in types or not isinstance(shape, list) or not lengths:
        raise TraceError(f"{place}: header.{PACKED_KEY}: expected dtype and shape, got {str(fact)[:200]}; {_REMEDY}")
    return np.dtype(types[dtype]), tuple(shape)
