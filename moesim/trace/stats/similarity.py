"""How alike the prompt and the answer of a request activate experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from moesim.trace.stats.balance import activation_frequency, loads
from moesim.trace.stats.sample import PHASES, phase_rows, spans

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moesim.trace import Trace

WINDOW = 15
"""Tokens of a window of decode, as in DAOP's analysis."""


class PhaseSimilarity(NamedTuple):
    """What `phase_similarity` finds."""

    request: NDArray[np.int64]
    """(n,): the requests that have both phases."""
    own: NDArray[np.float64]
    """(n,): similarity of each one's prefill with its own decode."""
    other: float
    """Mean over pairs: one request's prefill with the decode of another; nan with fewer than two."""
    by_layer: NDArray[np.float64]
    """(n_layers,): mean over requests of their own."""


class WindowSimilarity(NamedTuple):
    """What `window_similarity` finds, one entry a window."""

    own: NDArray[np.float64]
    """Similarity of a request's prefill with this window of its decode, mean over requests."""
    other: NDArray[np.float64]
    """The same with this window of another request's decode; nan if no two are long enough."""
    n_requests: NDArray[np.int64]
    """Requests that are long enough."""


def phase_similarity(trace: Trace) -> PhaseSimilarity | None:
    """Compare prefill and decode request by request.

    DAOP (DATE 2025), eq. 1, in our reading: the cosine of a layer's activation counts in prefill and in decode, mean over
    layers.
    """
    both = _requests_of_both(trace)
    if not len(both):
        return None
    prefill, decode = (_unit(_request_loads(trace, both, phase)) for phase in ("prefill", "decode"))
    return PhaseSimilarity(both, *_paired(prefill, decode))


def window_similarity(trace: Trace, size: int = WINDOW) -> WindowSimilarity | None:
    """Compare the prefill of each request with consecutive windows of its decode.

    A window has few tokens, which alone lowers its cosine: compare it with the same window of other requests.
    """
    both = _requests_of_both(trace)
    if not len(both):
        return None
    prefill = _unit(_request_loads(trace, both, "prefill"))
    rows = phase_rows(trace, "decode")
    rows = rows[np.isin(trace.request[rows], both)]
    number = np.searchsorted(both, trace.request[rows])
    first, length = spans(number)
    window = (np.arange(len(rows)) - np.repeat(first, length)) // size
    whole = length // size
    own, other, n_requests = [], [], []
    for w in range(int(whole.max(initial=0))):
        here = (window == w) & (w < whole[number])
        owner, group = np.unique(number[here], return_inverse=True)
        decode = _unit(loads(np.asarray(trace.experts)[rows[here]], group, trace.n_experts))
        own_mean, other_mean, _ = _paired(prefill[owner], decode)
        own.append(own_mean.mean())
        other.append(other_mean)
        n_requests.append(len(owner))
    return WindowSimilarity(np.array(own), np.array(other), np.array(n_requests, np.int64)) if own else None


def prefill_decode_cosine(trace: Trace) -> float | None:
    """Compute how alike prefill and decode activate experts, all requests together."""
    vectors = []
    for phase in PHASES:
        rows = phase_rows(trace, phase)
        if not len(rows):
            return None
        vectors.append(activation_frequency(np.asarray(trace.experts)[rows], trace.n_experts))
    return float((_unit(vectors[0]) * _unit(vectors[1])).sum(axis=1).mean())


def _requests_of_both(trace: Trace) -> NDArray[np.int64]:
    table = trace.requests
    return np.flatnonzero((table.n_prompt > 0) & (table.n_decode > 0)).astype(np.int64)


def _request_loads(trace: Trace, requests: NDArray[np.int64], phase: str) -> NDArray[np.float64]:
    rows = phase_rows(trace, phase)
    rows = rows[np.isin(trace.request[rows], requests)]
    number = np.searchsorted(requests, trace.request[rows])
    return loads(np.asarray(trace.experts)[rows], number, trace.n_experts).astype(np.float64)


def _paired(prefill: NDArray[np.float64], decode: NDArray[np.float64]) -> tuple[NDArray[np.float64], float, NDArray[np.float64]]:
    """Compare unit vectors (n, n_layers, n_experts): of the same request, of different ones on average, and by layer."""
    n, n_layers = prefill.shape[:2]
    products = prefill * decode
    own = products.sum(axis=(1, 2)) / n_layers
    together = float((prefill.sum(axis=0) * decode.sum(axis=0)).sum() / n_layers)  # all pairs, those of one request included
    other = (together - float(own.sum())) / (n * (n - 1)) if n > 1 else float("nan")
    return own, other, products.sum(axis=2).mean(axis=0)


def _unit(vectors: NDArray[Any]) -> NDArray[np.float64]:
    return np.asarray(vectors / np.linalg.norm(vectors, axis=-1, keepdims=True))
