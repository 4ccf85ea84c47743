"""A trace whose units are the matrices of experts (gate, up, down) instead of whole experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.errors import TraceError
from moesim.trace.additions import UNITS
from moesim.trace.parts import Signal
from moesim.trace.stats.embedding import EMBEDDING
from moesim.trace.trace import Trace

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]


def split_experts(trace: Trace, units: int, place: str) -> Trace:
    """Name the matrices of each chosen expert, ``units * expert + matrix``, next to each other in rank.

    Weights, scores, activation frequencies, expert maps and the signal made of these are divided among the matrices, so that sums
    stay; other signals and counts are repeated. Raises `TraceError` if the trace is split already, or has too many experts.
    """
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
        experts=named(trace.experts),
        weights=None if trace.weights is None else shared(trace.weights),
        scores=None if trace.scores is None else shared(trace.scores),
        n_prompt=table.n_prompt,
        n_decode=table.n_decode,
        prompt_offset=table.prompt_offset,
        n_experts=trace.n_experts * units,
        model=trace.model,
        label=trace.label,
        embeddings=trace.embeddings,
        inputs=trace.inputs,
        signals={name: split(signal) for name, signal in trace.signals.items()},
        tables={name: of_table[name](values) for name, values in trace.tables.items()},
        header=kept | {UNITS: units},
    )


def _fitted(ids: Array, n_experts: int) -> Array:
    return ids.astype(np.uint8 if n_experts <= 256 else np.uint16)
