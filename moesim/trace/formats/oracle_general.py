"""A trace as libCacheSim's ``oracleGeneral``: experts that a cache is asked for.

A request has 24 bytes, little-endian and packed: u32 time (row of the trace), u64 object (``layer * n_experts + expert``),
u32 bytes, i64 number of the next request for the object, or -1. Prompts go layer by layer, then each decoded token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.core import files
from moesim.errors import InputError
from moesim.trace import Trace

if TYPE_CHECKING:
    from numpy.typing import NDArray

RECORD = np.dtype([("time", "<u4"), ("object", "<u8"), ("size", "<u4"), ("next", "<i8")])
PHASES = ("all", "prefill", "decode")
_CELLS = 2**20


def export_oracle_general(
    trace: Trace, out: Path, expert_bytes: Sequence[int], *, layer: int | None = None, phase: str = "all"
) -> list[Path]:
    """Write a trace for libCacheSim.

    Parameters
    ----------
    trace : Trace
    out : Path
        Where to; complete or not there at all.
    expert_bytes : sequence of int, bytes, (n_layers,)
        Of one expert of each layer.
    layer : int, optional
        Only this one; objects keep their numbers.
    phase : {"all", "prefill", "decode"}
        Only this one.

    Returns
    -------
    list of Path
        The file.

    Raises
    ------
    InputError
        If the trace has no such layer or phase, or a size does not fit.

    Examples
    --------
    >>> RECORD.itemsize
    24
    """
    if layer is not None and not 0 <= layer < trace.n_layers:
        raise InputError(f"--layer {layer}: expected 0..{trace.n_layers - 1} of the trace, got {layer}; choose another")
    if len(expert_bytes) != trace.n_layers or not all(0 < size < 2**32 for size in expert_bytes):
        raise InputError(
            f"{out}: expected 1..{2**32 - 1} bytes for an expert of each of {trace.n_layers} layers, got "
            f"{list(expert_bytes)[:4]}...; oracleGeneral holds sizes in 32 bits"
        )
    layers = np.arange(trace.n_layers) if layer is None else np.array([layer])
    blocks = _blocks(trace, phase, len(layers))
    total = sum(end - begin for _, begin, end in blocks) * len(layers) * trace.top_k
    if not total:
        raise InputError(f"--phase {phase}: expected rows of that phase in the trace, got none; choose another")
    if trace.n_rows > 2**32:
        raise InputError(f"{out}: expected at most 2^32 tokens, got {trace.n_rows}; oracleGeneral holds times in 32 bits")
    sizes = np.asarray(expert_bytes, np.uint32)
    upcoming = np.full(trace.n_layers * trace.n_experts, -1, np.int64)
    with files.writing(out) as file:
        file.truncate(total * RECORD.itemsize)
        end = total
        for records in _backwards(trace, blocks, layers, sizes):
            begin = end - len(records)
            _fill_next(records, begin, upcoming)
            file.seek(begin * RECORD.itemsize)
            file.write(records.tobytes())
            end = begin
    return [out]


def _blocks(trace: Trace, phase: str, n_layers: int) -> list[tuple[bool, int, int]]:
    """Cut the trace into (whether prefill, first row, end)."""
    table, found = trace.requests, []
    step = max(1, _CELLS // (n_layers * trace.top_k))
    for first, n_prompt, n_decode in zip(table.first_row, table.n_prompt, table.n_decode, strict=True):
        middle, end = int(first + n_prompt), int(first + n_prompt + n_decode)
        if phase != "decode" and n_prompt:
            found.append((True, int(first), middle))
        if phase != "prefill":
            found += [(False, row, min(row + step, end)) for row in range(middle, end, step)]
    return found


def _backwards(
    trace: Trace, blocks: Sequence[tuple[bool, int, int]], layers: NDArray[np.int64], sizes: NDArray[np.uint32]
) -> Iterator[NDArray[Any]]:
    """Yield the requests of each block, the last first."""
    for prefill, begin, end in reversed(blocks):
        ids = np.asarray(trace.experts[begin:end][:, layers], np.uint64) + (layers * trace.n_experts).astype(np.uint64)[:, None]
        records = np.empty(ids.shape, RECORD)
        records["time"] = np.arange(begin, end, dtype=np.uint32)[:, None, None]
        records["object"] = ids
        records["size"] = sizes[layers][:, None]
        yield (records.swapaxes(0, 1) if prefill else records).reshape(-1)


def _fill_next(records: NDArray[Any], begin: int, upcoming: NDArray[np.int64]) -> None:
    """Set where each object comes next."""
    objects = records["object"].astype(np.int64)
    order = np.argsort(objects, kind="stable")
    ordered = objects[order]
    last = np.append(ordered[1:] != ordered[:-1], True)
    following = np.empty(len(order), np.int64)
    following[:-1] = begin + order[1:]
    following[last] = upcoming[ordered[last]]
    records["next"][order] = following
    first = np.insert(last[:-1], 0, True)
    upcoming[ordered[first]] = begin + order[first]
