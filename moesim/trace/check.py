"""Checks of the arrays of a trace before anything reads them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.core.limits import EXPERTS
from moesim.core.text import steering
from moesim.errors import TraceError
from moesim.trace.format import REQUIRED, SCHEMA_VERSION
from moesim.trace.parts import GateInputs, Recorded, Signal, check_additions

if TYPE_CHECKING:
    from numpy.typing import NDArray


LABELS = ("measured", "synthetic")
"""Kinds of routing: recorded from a model, or made up."""
STORED = ("activation_matrices", "expert_maps")
"""Tables with a matrix for each of some requests or iterations, however many: (n_layers, n, n_experts)."""
_REMEDY = "record or import the trace again"
_CHUNK_CELLS = 2**23


def check_trace(trace: Recorded, place: str) -> None:
    """Check types, shapes and meaning of a trace."""
    _check_header(trace.header, place)
    _check_texts(trace, place)
    _check_types(trace, place)
    _check_order(trace, place)
    check_ids(trace.experts, trace.n_experts, f"{place}: experts")
    for name in ("weights", "scores"):
        values = getattr(trace, name)
        if values is not None:
            check_finite(values, f"{place}: {name}", lowest=0)
    if trace.embeddings is not None:
        check_finite(trace.embeddings, f"{place}: embeddings")
    if trace.inputs is not None:
        _check_inputs(trace, trace.inputs, f"{place}: inputs")
    for name, signal in sorted(trace.signals.items()):
        _check_signal(trace, signal, f"{place}: signals/{name}")
    for name, table in sorted(trace.tables.items()):
        _check_table(trace, name, table, f"{place}: calibration/{name}")


def _wrong(place: str, expected: object, got: object) -> TraceError:
    text = str(got)
    return TraceError(f"{place}: expected {expected}, got {text if len(text) <= 200 else text[:200] + '...'}; {_REMEDY}")


def _is_count(value: object, lowest: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= lowest


def _check_header(header: dict[str, Any], place: str) -> None:
    for key in REQUIRED:
        if key not in header and key != "sha256":  # the sums are added when the trace is written
            raise _wrong(f"{place}: header", f"the key '{key}'", f"only {sorted(header)}")
    if header["schema_version"] != SCHEMA_VERSION:
        raise _wrong(f"{place}: header.schema_version", SCHEMA_VERSION, repr(header["schema_version"]))
    for key in ("n_layers", "n_experts", "top_k"):
        if not _is_count(header[key], 1):
            raise _wrong(f"{place}: header.{key}", "a positive integer", repr(header[key]))
    if not isinstance(header["model"], str) or not header["model"].isprintable() or not header["model"]:
        raise _wrong(f"{place}: header.model", "a name", repr(header["model"]))
    if header["label"] not in LABELS:
        raise _wrong(f"{place}: header.label", " or ".join(LABELS), repr(header["label"]))
    if header["n_experts"] > EXPERTS.most:
        raise _wrong(f"{place}: header.n_experts", f"at most {EXPERTS.most}", header["n_experts"])
    if header["top_k"] > header["n_experts"]:
        raise _wrong(f"{place}: header.top_k", f"at most n_experts = {header['n_experts']}", header["top_k"])
    check_additions(header, place)


def _check_texts(trace: Recorded, place: str) -> None:
    names = {"header": trace.header, "signals": list(trace.signals), "calibration": list(trace.tables)}
    for where, value in names.items():
        for path, text in _texts(value, where):
            if (found := steering(text)) is not None:
                raise _wrong(f"{place}: {path}", "text that can be shown", f"the control character {found!a} in {text[:50]!a}")


def _texts(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield path, str(key)
            yield from _texts(inner, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _texts(inner, f"{path}.{number}")


def _check_types(trace: Recorded, place: str) -> None:
    n_rows = _length(trace.request, f"{place}: request")
    n_layers, n_experts, top_k = trace.n_layers, trace.n_experts, trace.top_k
    routed = (n_rows, n_layers, top_k)
    wanted: list[tuple[str, NDArray[Any] | None, tuple[str, ...], tuple[int, ...]]] = [
        ("request", trace.request, ("int32",), (n_rows,)),
        ("position", trace.position, ("int32",), (n_rows,)),
        ("phase", trace.phase, ("uint8",), (n_rows,)),
        ("experts", trace.experts, ("uint8", "uint16"), routed),
        ("weights", trace.weights, ("float16",), routed),
        ("scores", trace.scores, ("float16",), (n_rows, n_layers, n_experts)),
    ]
    if trace.embeddings is not None:
        hidden = trace.embeddings.shape[-1] if trace.embeddings.ndim == 2 else 0
        if not hidden:
            raise _wrong(f"{place}: embeddings", f"({n_rows}, hidden) values", f"shape {trace.embeddings.shape}")
        wanted.append(("embeddings", trace.embeddings, ("float16",), (n_rows, hidden)))
    for name, array, dtypes, shape in wanted:
        if array is None:
            continue
        check_array(array, dtypes, shape, f"{place}: {name}")
    if not n_rows:
        raise _wrong(f"{place}: request", "at least one row", "none")


def check_array(array: NDArray[Any], dtypes: tuple[str, ...], shape: tuple[int, ...], place: str) -> None:
    """Check type and shape of one array."""
    if array.dtype.name not in dtypes:
        raise _wrong(place, " or ".join(dtypes), array.dtype.name)
    if array.shape != shape:
        raise _wrong(place, f"shape {shape}", array.shape)


def _length(array: NDArray[Any], place: str) -> int:
    if array.ndim != 1:
        raise _wrong(place, "one axis", f"shape {array.shape}")
    return len(array)


def _chunk_rows(values: NDArray[Any]) -> int:
    return max(1, _CHUNK_CELLS // max(1, math.prod(values.shape[1:])))


def _check_order(trace: Recorded, place: str) -> None:
    request, position, phase = trace.request, trace.position, trace.phase
    if request[0] != 0:
        raise _wrong(f"{place}: request[0]", 0, request[0])
    step = np.diff(request)
    bad = np.flatnonzero((step != 0) & (step != 1))
    if len(bad):
        row = int(bad[0]) + 1
        raise _wrong(
            f"{place}: request[{row}]",
            f"{request[row - 1]} or the next number (rows of a request lie together)",
            request[row],
        )
    if position.min() < 0:
        row = int(position.argmin())
        raise _wrong(f"{place}: position[{row}]", "at least 0", position[row])
    same = step == 0
    bad = np.flatnonzero(same & (np.diff(position) != 1))
    if len(bad):
        row = int(bad[0]) + 1
        expected = f"{position[row - 1] + 1}, one after the row before"
        raise _wrong(f"{place}: position[{row}] of request {request[row]}", expected, position[row])
    if phase.max() > 1:
        row = int(phase.argmax())
        raise _wrong(f"{place}: phase[{row}]", "0 (prefill) or 1 (decode)", phase[row])
    bad = np.flatnonzero(same & (phase[1:] < phase[:-1]))
    if len(bad):
        row = int(bad[0]) + 1
        raise _wrong(f"{place}: phase[{row}] of request {request[row]}", "1 (decode) after decode", phase[row])


def check_ids(ids: NDArray[Any], n_experts: int, place: str) -> None:
    """Check that expert ids are in range and distinct in each row and layer."""
    step = _chunk_rows(ids)
    for start in range(0, len(ids), step):
        part = ids[start : start + step]
        bad = part >= n_experts
        if bad.any():
            row, layer, rank = np.argwhere(bad)[0].tolist()
            raise _wrong(f"{place}[{start + row}, {layer}, {rank}]", f"0..{n_experts - 1}", part[row, layer, rank])
        bad = _with_equals(part)
        if bad.any():
            row, layer = np.argwhere(bad)[0].tolist()
            raise _wrong(f"{place}[{start + row}, {layer}]", "distinct experts", part[row, layer].tolist())


def _with_equals(ids: NDArray[Any]) -> NDArray[np.bool_]:
    """Find rows with equal ids, in a tenth of the time of sorting."""
    ranks = np.ascontiguousarray(ids.reshape(-1, ids.shape[-1]).T)
    found = np.zeros(ranks.shape[1], bool)
    for rank in range(1, len(ranks)):
        found |= (ranks[:rank] == ranks[rank]).any(axis=0)
    return found.reshape(ids.shape[:-1])


def check_finite(values: NDArray[Any], place: str, lowest: float | None = None) -> None:
    """Check that there is no NaN, no infinity, and nothing below `lowest`."""
    step = _chunk_rows(values)
    for start in range(0, len(values), step):
        part = values[start : start + step]
        if _surely_finite(part, lowest):
            continue
        good = np.isfinite(part)
        if lowest is not None:
            good &= part >= lowest
        if not good.all():
            where = np.argwhere(~good)[0]
            got = part[tuple(where)]
            where[0] += start
            wanted = "a finite number" if lowest is None else f"a finite number of at least {lowest}"
            raise _wrong(f"{place}{where.tolist()}", wanted, got)


_INFINITY_BITS = 0x7C00
"""Of float16; those of NaN are above it, and those of negative numbers above all others."""


def _surely_finite(values: NDArray[Any], lowest: float | None) -> bool:
    """Check float16 values by their bits, in a tenth of the time; False says nothing."""
    if values.dtype != np.float16 or lowest not in (None, 0):
        return False
    bits = values.view(np.uint16)
    return bool((bits if lowest == 0 else bits & 0x7FFF).max(initial=0) < _INFINITY_BITS)


def _check_rows(trace: Recorded, rows: NDArray[Any], place: str) -> None:
    check_array(rows, ("int32",), (_length(rows, place),), place)
    if len(rows) and (rows[0] < 0 or rows[-1] >= len(trace.request) or (np.diff(rows) <= 0).any()):
        raise _wrong(place, f"ascending rows in 0..{len(trace.request) - 1}", "others")


def _check_inputs(trace: Recorded, inputs: GateInputs, place: str) -> None:
    _check_rows(trace, inputs.rows, f"{place}: rows")
    hidden = inputs.values.shape[-1] if inputs.values.ndim == 3 else 0
    if not hidden:
        raise _wrong(place, f"({len(inputs.rows)}, {trace.n_layers}, hidden) values", f"shape {inputs.values.shape}")
    check_array(inputs.values, ("float16",), (len(inputs.rows), trace.n_layers, hidden), place)
    check_finite(inputs.values, place)


def _check_table(trace: Recorded, name: str, table: NDArray[Any], place: str) -> None:
    per_layer = (trace.n_layers, trace.n_experts)
    known = {
        "activation_frequency": per_layer,
        "activation_frequency_decode": per_layer,
        "coactivation": (*per_layer, trace.n_experts),
    }
    if table.ndim < 1 or table.shape[0] != trace.n_layers:
        raise _wrong(place, f"{trace.n_layers} layers first", f"shape {table.shape}")
    if name in known and table.shape != known[name]:
        raise _wrong(place, f"shape {known[name]}", table.shape)
    if name in STORED and (table.ndim != 3 or not table.shape[1] or table.shape[2] != trace.n_experts):
        raise _wrong(place, f"shape ({trace.n_layers}, at least 1, {trace.n_experts})", table.shape)
    check_finite(table, place, lowest=0 if name in known or name in STORED else None)


def _check_signal(trace: Recorded, signal: Signal, place: str) -> None:
    n_layers, n_experts = trace.n_layers, trace.n_experts
    _check_rows(trace, signal.rows, f"{place}: rows")
    n = len(signal.rows)
    if signal.ids is None:
        shape: tuple[int, ...] = (n, n_layers, n_experts)
    else:
        width = signal.ids.shape[-1] if signal.ids.ndim == 3 else 0
        if not 1 <= width <= n_experts:
            raise _wrong(f"{place}: ids", f"({n}, {n_layers}, 1..{n_experts}) ids", f"shape {signal.ids.shape}")
        shape = (n, n_layers, width)
        check_array(signal.ids, ("uint8", "uint16"), shape, f"{place}: ids")
    check_array(signal.scores, ("float16",), shape, f"{place}: scores")
    if not _is_count(signal.first_layer) or signal.first_layer >= n_layers:
        raise _wrong(f"{place}: first_layer", f"0..{n_layers - 1}", repr(signal.first_layer))
    offset = signal.needs_layer_offset
    if not _is_count(signal.lookahead) or not (offset is None or _is_count(offset)):
        raise _wrong(f"{place}: lookahead and needs_layer_offset", "at least 0, whole numbers", (signal.lookahead, offset))
    if not isinstance(signal.about, str):
        raise _wrong(f"{place}: about", "a line of text", repr(signal.about))
    if signal.ids is not None:  # layers before first_layer hold zeros
        check_ids(signal.ids[:, signal.first_layer :], n_experts, f"{place}: ids")
    check_finite(signal.scores, f"{place}: scores")
