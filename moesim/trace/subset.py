"""A trace of some of the requests of another, whole or cut off at their end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.trace.files import OPTIONAL, joined
from moesim.trace.parts import GateInputs
from moesim.trace.trace import Trace

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: What a header lists request by request.
_LISTED = ("requests", "trace_requests")


def subset(trace: Trace, requests: Sequence[int], n_rows: Sequence[int] | None = None, folder: Path | None = None) -> Trace:
    """Take some requests out of a trace, with all that was recorded of them."""
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
        n_prompt=prompt,
        n_decode=lengths - prompt,
        prompt_offset=table.prompt_offset[chosen],
        n_experts=trace.n_experts,
        model=trace.model,
        label=trace.label,
        inputs=_inputs(trace.inputs, spans, folder),
        signals=_signals(trace, spans, folder),
        tables=trace.tables,
        header=_header(trace.header, chosen, len(table)),
    )


def _places(rows: NDArray[Any], spans: Sequence[slice]) -> tuple[list[slice], NDArray[np.int32]]:
    """Which entries of ascending `rows` lie in the spans, and the numbers that these rows have once only the spans are left."""
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
