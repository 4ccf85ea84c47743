"""One trace file: from and to what it holds."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from moesim.errors import TraceError
from moesim.trace.check import check_trace
from moesim.trace.format import checksums, read_container, verify_checksums, write_container
from moesim.trace.parts import Recorded, header_object, read_inputs, read_signals

if TYPE_CHECKING:
    from numpy.typing import NDArray

_PIECE_BYTES = 2**23
"""About so much of a large array is computed with at once."""
#: Arrays larger than this are put together in a temporary file instead of in memory.
_IN_MEMORY_BYTES = 2**26
_ROUTING = ("experts", "request", "position", "phase")
OPTIONAL = ("weights", "scores", "embeddings")
"""Arrays with an entry for each row that a trace may lack."""


def read_file(path: str | Path, *, verify: bool = True) -> Recorded:
    """Map a file into memory; `verify` compares checksums and checks it."""
    place = str(path)
    arrays, header = read_container(Path(path))
    if verify:
        verify_checksums(place, arrays, header_object(header, "sha256", place))
    for name in _ROUTING:
        if name not in arrays:
            raise TraceError(f"{place}: expected an array '{name}', got {sorted(arrays)}; record the trace again")
    recorded = Recorded(
        **{name: arrays[name] for name in _ROUTING},
        weights=arrays.get("weights"),
        scores=arrays.get("scores"),
        embeddings=arrays.get("embeddings"),
        inputs=read_inputs(arrays, place),
        signals=read_signals(arrays, header_object(header, "signals", place), place),
        tables={n.split("/", 1)[1]: a for n, a in arrays.items() if n.startswith("calibration/")},
        header=header,
    )
    if verify:
        check_trace(recorded, place)
    return recorded


def write_file(recorded: Recorded, path: str | Path, *, packed: bool = False) -> Path:
    """Check a trace and write it, completely or not at all."""
    check_trace(recorded, str(path))
    arrays = arrays_of(recorded)
    return write_container(path, arrays, {**full_header(recorded), "sha256": checksums(arrays)}, packed=packed)


def arrays_of(recorded: Recorded) -> dict[str, NDArray[Any]]:
    """Return the arrays of a file by name."""
    arrays = {name: getattr(recorded, name) for name in _ROUTING}
    arrays |= {name: array for name in OPTIONAL if (array := getattr(recorded, name)) is not None}
    if recorded.inputs is not None:
        arrays |= {"inputs": recorded.inputs.values, "input_rows": recorded.inputs.rows}
    for name, signal in recorded.signals.items():
        arrays[f"signals/{name}"] = signal.scores
        arrays[f"signal_rows/{name}"] = signal.rows
        if signal.ids is not None:
            arrays[f"signal_ids/{name}"] = signal.ids
    arrays |= {f"calibration/{name}": table for name, table in recorded.tables.items()}
    return arrays


def full_header(recorded: Recorded) -> dict[str, Any]:
    """Return the header of a file, without checksums."""
    facts = ("lookahead", "needs_layer_offset", "first_layer", "about")
    signals = {name: {fact: getattr(s, fact) for fact in facts} for name, s in recorded.signals.items()}
    return {**recorded.header, "signals": signals}


def joined(parts: Sequence[NDArray[Any]], folder: Path | None) -> NDArray[Any]:
    """Put arrays together: in memory, or if large in a temporary file."""
    if sum(part.nbytes for part in parts) <= _IN_MEMORY_BYTES:
        return np.concatenate(parts)
    out = empty((sum(len(part) for part in parts), *parts[0].shape[1:]), parts[0].dtype, folder)
    start = 0
    for part in parts:
        out[start : start + len(part)] = part
        start += len(part)
    return out


def empty(shape: tuple[int, ...], dtype: np.dtype[Any], folder: Path | None) -> NDArray[Any]:
    """Make an array to be filled: in memory, or if large in a temporary file."""
    if math.prod(shape) * dtype.itemsize <= _IN_MEMORY_BYTES:
        return np.empty(shape, dtype)
    with tempfile.TemporaryFile(dir=folder) as file:
        return mapped(file, dtype, shape)


def pieces(rows: NDArray[Any]) -> list[NDArray[Any]]:
    """Cut an array into views of some rows."""
    step = max(1, _PIECE_BYTES // max(1, rows[:1].nbytes))
    return [rows[start : start + step] for start in range(0, len(rows), step)]


def mapped(file: IO[bytes], dtype: np.dtype[Any] | type, shape: tuple[int, ...]) -> NDArray[Any]:
    """Map a new file as zeros, with room on disk for all."""
    n_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, max(1, n_bytes))
    else:  # not on macOS
        file.truncate(max(1, n_bytes))
    return np.memmap(file, dtype, "r+", shape=shape)
