"""What a trace's routing is like: reuse, balance, what caches could hold, how well it can be predicted.

Every figure is of single requests (batch 1), averaged over layers. The figures of a real model are what a
synthetic trace for it must match.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.errors import TraceError
from moesim.stats.layer_caches import layer_hit_rates
from moesim.stats.prediction import coactivation_recall, signal_recall

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moesim.trace import Trace

CACHE_SHARES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)
REUSE_DISTANCES = (1, 8)
_PHASES = {"prefill": 0, "decode": 1}


def stats(trace: Trace, phase: str = "decode", *, max_rows: int | None = None) -> dict[str, Any]:
    """Describe the routing of a trace.

    Parameters
    ----------
    trace : Trace
        What was recorded.
    phase : str
        ``"decode"`` or ``"prefill"``.
    max_rows : int or None
        Stop after the request in which this many rows are reached; None: all rows.

    Returns
    -------
    dict
        ``shape``, ``n_rows``, ``n_requests``, ``sampled``; ``reuse@n``, ``reuse_baseline``; ``entropy``,
        ``top_over_uniform``; ``cache_shares`` and ``hit_rate`` (policy -> one rate for each share);
        ``next_layer_recall`` (source -> recall); ``prefill_decode_cosine`` (None without both phases).

    Raises
    ------
    TraceError
        If the trace has no rows of that phase.
    """
    if phase not in _PHASES:
        raise TraceError(f"trace statistics: expected phase 'prefill' or 'decode', got {phase!r}")
    rows = np.flatnonzero(np.asarray(trace.phase) == _PHASES[phase])
    if not len(rows):
        raise TraceError(f"trace statistics: the trace holds no {phase} rows; choose the other phase")
    request = np.asarray(trace.request)[rows]
    if max_rows is not None and max_rows < len(rows):
        rows = rows[request <= request[max_rows - 1]]
        request = request[: len(rows)]
    experts = np.asarray(trace.experts)[rows]
    n_layers, n_experts = trace.n_layers, trace.n_experts
    frequency = activation_frequency(experts, n_experts)
    capacities = [round(share * n_experts) for share in CACHE_SHARES]
    rates = layer_hit_rates(experts, n_experts, capacities)
    recalls = {name: signal_recall(trace, signal, rows) for name, signal in sorted(trace.signals.items())}
    recalls["coactivation"] = coactivation_recall(experts, request, n_experts)
    return {
        "shape": {"n_layers": n_layers, "n_experts": n_experts, "top_k": trace.top_k},
        "phase": phase,
        "n_rows": len(rows),
        "n_requests": len(np.unique(request)),
        "sampled": len(rows) < int((np.asarray(trace.phase) == _PHASES[phase]).sum()),
        **{f"reuse@{n}": reuse(experts, request, n, n_experts) for n in REUSE_DISTANCES},
        "reuse_baseline": reuse_baseline(experts, n_experts),
        "entropy": normalised_entropy(frequency),
        "top_over_uniform": top_over_uniform(frequency),
        "cache_shares": list(CACHE_SHARES),
        "cache_capacities": capacities,
        "hit_rate": {name: rate.mean(axis=1).tolist() for name, rate in rates.items()},
        "next_layer_recall": recalls,
        "prefill_decode_cosine": prefill_decode_cosine(trace),
    }


def membership(experts: NDArray[Any], n_experts: int) -> NDArray[np.bool_]:
    """Mark the experts of each row and layer.

    Parameters
    ----------
    experts : (n_rows, n_layers, top_k) integer
        Expert ids.
    n_experts : int
        Experts of a layer.

    Returns
    -------
    (n_rows, n_layers, n_experts) bool
        True where the router chose the expert.
    """
    chosen = np.zeros((*experts.shape[:2], n_experts), bool)
    np.put_along_axis(chosen, experts.astype(np.int64), True, axis=2)
    return chosen


def reuse(experts: NDArray[Any], request: NDArray[Any], distance: int, n_experts: int) -> float:
    """Compute the share of a token's experts that the token ``distance`` positions earlier also used.

    Parameters
    ----------
    experts : (n_rows, n_layers, top_k) integer
        Expert ids, rows in token order.
    request : (n_rows,) integer
        Request of each row; only rows of the same request are compared.
    distance : int
        Tokens between the two.
    n_experts : int
        Experts of a layer.

    Returns
    -------
    float
        Mean over rows, layers and experts; nan if no request is long enough.

    Examples
    --------
    >>> reuse(np.array([[[0, 1]], [[1, 2]]]), np.array([5, 5]), 1, 4)
    0.5
    """
    later = np.flatnonzero(request[distance:] == request[:-distance]) + distance
    if not len(later):
        return float("nan")
    chosen = membership(experts, n_experts)
    return float(np.take_along_axis(chosen[later - distance], experts[later].astype(np.int64), axis=2).mean())


def reuse_baseline(experts: NDArray[Any], n_experts: int) -> float:
    """Compute the share that a random other token of the trace would have used.

    Parameters
    ----------
    experts : (n_rows, n_layers, top_k) integer
        Expert ids.
    n_experts : int
        Experts of a layer.

    Returns
    -------
    float
        Mean over rows, layers and experts; nan for fewer than two rows.

    Notes
    -----
    The expectation over all pairs of different rows, so nothing is drawn: with c rows that use an expert,
    c (c - 1) of the n (n - 1) pairs share it.
    """
    n_rows, _, top_k = experts.shape
    if n_rows < 2:
        return float("nan")
    count = activation_frequency(experts, n_experts) * n_rows * top_k
    pairs = (count * (count - 1)).sum(axis=1)
    return float(pairs.mean() / (n_rows * (n_rows - 1) * top_k))


def activation_frequency(experts: NDArray[Any], n_experts: int) -> NDArray[np.float64]:
    """Compute each expert's share of the activations of its layer.

    Parameters
    ----------
    experts : (n_rows, n_layers, top_k) integer
        Expert ids.
    n_experts : int
        Experts of a layer.

    Returns
    -------
    (n_layers, n_experts) float64
        Every layer adds up to 1.
    """
    n_rows, n_layers, top_k = experts.shape
    offsets = np.arange(n_layers, dtype=np.int64)[:, None] * n_experts
    counts = np.bincount((experts + offsets).ravel(), minlength=n_layers * n_experts)
    return np.asarray(counts.reshape(n_layers, n_experts) / max(1, n_rows * top_k), np.float64)


def normalised_entropy(frequency: NDArray[np.float64]) -> float:
    """Compute the entropy of the activations over its largest value, log(n_experts); mean over layers.

    Parameters
    ----------
    frequency : (n_layers, n_experts) float64
        Shares that add up to 1 in each layer.

    Returns
    -------
    float
        1 if all experts are used alike, 0 if only one is used.

    Examples
    --------
    >>> round(normalised_entropy(np.full((2, 8), 1 / 8)), 9)
    1.0
    """
    logs = np.log(np.where(frequency > 0, frequency, 1.0))
    return float((-(frequency * logs).sum(axis=1) / np.log(frequency.shape[1])).mean())


def top_over_uniform(frequency: NDArray[np.float64]) -> float:
    """Compute how many times as often as the average expert the most used one is used; mean over layers.

    Parameters
    ----------
    frequency : (n_layers, n_experts) float64
        Shares that add up to 1 in each layer.

    Returns
    -------
    float
        1 if all experts are used alike.
    """
    return float((frequency.max(axis=1) * frequency.shape[1]).mean())


def prefill_decode_cosine(trace: Trace) -> float | None:
    """Compute how alike prefill and decode activate experts.

    Parameters
    ----------
    trace : Trace
        What was recorded.

    Returns
    -------
    float or None
        Cosine of the activation frequencies of the two phases, mean over layers; None if a phase is missing.
    """
    phase = np.asarray(trace.phase)
    vectors = []
    for code in _PHASES.values():
        rows = np.flatnonzero(phase == code)
        if not len(rows):
            return None
        vectors.append(activation_frequency(np.asarray(trace.experts)[rows], trace.n_experts))
    a, b = vectors
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return float(((a * b).sum(axis=1) / lengths).mean())
