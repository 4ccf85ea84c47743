"""Traces made from others: some of their requests, or with the matrices of experts as units."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.errors import TraceError
from moesim.trace.files import OPTIONAL, joined
from moesim.trace.parts import UNITS, GateInputs, Signal
from moesim.trace.stats.calibration import EMBEDDING
from moesim.trace.trace import Trace

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

#: What a header lists request by request.
_LISTED = ("requests", "trace_requests")


def subset(trace: Trace, requests: Sequence[int], n_rows: Sequence[int] | None = None, folder: Path | None = None) -> Trace:
    """Take some requests out of a trace."""
    table, chosen = trace.requests, list(requests)
    lengths = np.asarray(table.n_prompt + table.n_decode)[chosen] if n_rows is None else np.asarray(n_rows, np.int64)
    starts = table.first_row[chosen]
    spans = [slice(int(start), int(start + n)) for start, n in zip(starts, lengths, strict=True)]
    prompt = np.minimum(table.n_prompt[chosen], lengths)

    def of_rows(array: NDArray[Any]) -> NDArray[Any]:
        return joined([array[span] for span in spans], folder)

    return Trace.build(
        experts=of_rows(trace.experts),
        **{name: of_rows(array) for name in OPTIONAL if (array := getattr(trace, name)) is not None},
        n_prompt=prompt, n_decode=lengths - prompt, prompt_offset=table.prompt_offset[chosen],
        n_experts=trace.n_experts, model=trace.model, label=trace.label,
        inputs=_inputs(trace.inputs, spans, folder), signals=_signals(trace, spans, folder),
        tables=trace.tables, header=_header(trace.header, chosen, len(table)),
    )  # fmt: skip


def _places(rows: NDArray[Any], spans: Sequence[slice]) -> tuple[list[slice], NDArray[np.int32]]:
    entries, numbers, done = [], [], 0
    for span in spans:
        first, last = np.searchsorted(rows, (span.start, span.stop)).tolist()
        entries.append(slice(first, last))
        numbers.append(np.asarray(rows[first:last], np.int64) - span.start + done)
        done += span.stop - span.start
    return entries, np.concatenate(numbers).astype(np.int32)


def _inputs(inputs: GateInputs | None, spans: Sequence[slice], folder: Path | None) -> GateInputs | None:
    if inputs is None:
        return None
    entries, rows = _places(inputs.rows, spans)
    return GateInputs(rows, joined([inputs.values[part] for part in entries], folder)) if len(rows) else None


def _signals(trace: Trace, spans: Sequence[slice], folder: Path | None) -> dict[str, Any]:
    found = {}
    for name, signal in trace.signals.items():
        entries, rows = _places(signal.rows, spans)
        if len(rows):
            ids = None if signal.ids is None else joined([signal.ids[part] for part in entries], folder)
            found[name] = replace(signal, rows=rows, scores=joined([signal.scores[part] for part in entries], folder), ids=ids)
    return found


def _header(header: Mapping[str, Any], chosen: Sequence[int], n_requests: int) -> dict[str, Any]:
    kept = {key: value for key, value in header.items() if key not in ("signals", "sha256", *_LISTED)}
    for key in _LISTED:
        if isinstance(listed := header.get(key), list) and len(listed) == n_requests:
            kept[key] = [listed[request] for request in chosen]
    return kept


def split_experts(trace: Trace, units: int, place: str) -> Trace:
    """Make a trace of the matrices of each chosen expert, ``units * expert + matrix``."""
    if trace.header.get(UNITS, 1) > 1:
        raise TraceError(
            f"{place}: expected a trace of whole experts, got one that is split already; take the trace it was made of"
        )
    if trace.n_experts * units > 2**16:
        raise TraceError(f"{place}: expected at most {2**16 // units} experts, got {trace.n_experts}; ids must fit 16 bits")

    def named(ids: Array) -> Array:
        wide = ids[..., None].astype(np.uint16) * np.uint16(units) + np.arange(units, dtype=np.uint16)
        return wide.reshape(*ids.shape[:-1], -1)

    def shared(values: Array) -> Array:
        return np.repeat(values / values.dtype.type(units), units, axis=-1)

    def repeated(values: Array) -> Array:
        return np.repeat(values, units, axis=-1)

    def split(signal: Signal) -> Signal:
        ids = None if signal.ids is None else _fitted(named(signal.ids), trace.n_experts * units)
        values = shared if signal.name == EMBEDDING else repeated
        return replace(signal, scores=values(signal.scores), ids=ids)

    of_table: dict[str, Callable[[Array], Array]] = {
        "activation_frequency": shared, "activation_frequency_decode": shared, "activation_matrices": repeated,
        "coactivation": lambda counts: np.repeat(repeated(counts), units, axis=1), "expert_maps": shared,
        "residual": lambda steps: steps,
    }  # fmt: skip
    unknown = sorted(trace.tables.keys() - of_table.keys())
    if unknown:
        raise TraceError(f"{place}: expected tables among {', '.join(sorted(of_table))}, got {unknown[0]}")
    table = trace.requests
    kept = {key: value for key, value in trace.header.items() if key not in ("signals", "sha256")}
    return Trace.build(
        experts=named(trace.experts), weights=None if trace.weights is None else shared(trace.weights),
        scores=None if trace.scores is None else shared(trace.scores), n_prompt=table.n_prompt,
        n_decode=table.n_decode, prompt_offset=table.prompt_offset, n_experts=trace.n_experts * units,
        model=trace.model, label=trace.label, embeddings=trace.embeddings, inputs=trace.inputs,
        signals={name: split(signal) for name, signal in trace.signals.items()},
        tables={name: of_table[name](values) for name, values in trace.tables.items()},
        header=kept | {UNITS: units},
    )  # fmt: skip


def _fitted(ids: Array, n_experts: int) -> Array:
    return ids.astype(np.uint8 if n_experts <= 256 else np.uint16)
