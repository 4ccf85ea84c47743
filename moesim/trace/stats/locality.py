"""How alike the routing of neighbouring tokens, of segments, and of prompt and answer is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.trace.stats.balance import FAR, PHASES, activation_frequency, compose, loads, phase_rows, spans, workload_correlation
from moesim.trace.stats.caches import uniform_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from moesim.trace import Trace
    from moesim.trace.stats.balance import Context, Sample


def membership(experts: NDArray[Any], n_experts: int) -> NDArray[np.bool_]:
    """Mark the experts of each row and layer."""
    chosen = np.zeros((*experts.shape[:2], n_experts), bool)
    np.put_along_axis(chosen, experts.astype(np.int64), True, axis=2)
    return chosen


def _later(request: NDArray[Any], distance: int) -> NDArray[np.int64]:
    return (np.flatnonzero(request[distance:] == request[:-distance]) + distance).astype(np.int64)


def reuse_by_lag(experts: NDArray[Any], request: NDArray[Any], lags: Sequence[int], n_experts: int) -> NDArray[np.float64]:
    """Compute the share of a token's experts used n positions earlier."""
    n_layers = experts.shape[1]
    result = np.full((len(lags), n_layers), np.nan)
    for layer in range(n_layers):
        ids = np.ascontiguousarray(experts[:, layer]).astype(np.int64)
        chosen = np.zeros((len(ids), n_experts), bool)
        np.put_along_axis(chosen, ids, True, axis=1)
        flat = chosen.ravel()
        for i, lag in enumerate(lags):
            later = _later(request, lag)
            if len(later):
                result[i, layer] = flat[(later - lag)[:, None] * n_experts + ids[later]].mean()
    return result


def reuse(experts: NDArray[Any], request: NDArray[Any], distance: int, n_experts: int) -> float:
    """Average `reuse_by_lag` at one distance over layers."""
    return float(reuse_by_lag(experts, request, [distance], n_experts).mean())


def reuse_baseline(experts: NDArray[Any], n_experts: int) -> float:
    """Compute the share that a random other token would have used."""
    n_rows, _, top_k = experts.shape
    if n_rows < 2:
        return float("nan")
    count = activation_frequency(experts, n_experts) * n_rows * top_k
    pairs = (count * (count - 1)).sum(axis=1)
    return float(pairs.mean() / (n_rows * (n_rows - 1) * top_k))


def by_score(scores: NDArray[Any]) -> NDArray[np.int64]:
    """Order the experts of each row by their score."""
    # Half floats that are not negative sort as their bits do, and sorting 16-bit integers is several times faster.
    bits = np.asarray(scores, np.float16).view(np.uint16)
    return np.argsort(np.uint16(0xFFFF) - bits, axis=-1, kind="stable")


def ranked(sample: Sample) -> NDArray[Any]:
    """Order the experts of each row by score, or only the chosen ones."""
    trace = sample.trace
    if trace.recorded_scores is None:
        return sample.experts
    scores = np.asarray(trace.recorded_scores)
    found = np.empty((len(sample.rows), trace.n_layers, trace.n_experts), np.uint16)
    for layer in range(trace.n_layers):
        found[:, layer] = by_score(scores[sample.rows, layer])
    return found


def reuse_by_rank(ranked: NDArray[Any], experts: NDArray[Any], request: NDArray[Any], n_experts: int) -> NDArray[np.float64]:
    """Compute P(the next token uses an expert) by rank (HybriMoE, figure 3b)."""
    later = _later(request, 1)
    n_layers, m = ranked.shape[1:]
    if not len(later):
        return np.full((m, n_layers), np.nan)
    result = np.empty((m, n_layers))
    for layer in range(n_layers):
        chosen = membership(experts[later][:, layer : layer + 1], n_experts)[:, 0]
        result[:, layer] = np.take_along_axis(chosen, ranked[later - 1, layer].astype(np.int64), axis=-1).mean(axis=0)
    return result


def segments(request: NDArray[Any], length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Cut requests into consecutive segments of equal length."""
    first, size = spans(request)
    place = np.arange(len(request)) - np.repeat(first, size)
    whole = np.repeat(size // length, size)
    rows = np.flatnonzero(place // length < whole)
    before = np.cumsum(size // length) - size // length
    return rows.astype(np.int64), (np.repeat(before, size) + place // length)[rows].astype(np.int64)


def segment_best(counts: NDArray[Any], length: int, top_k: int, sizes: Sequence[int]) -> tuple[Any, NDArray[np.float64]]:
    """Compute SRP and SCH, measures of local routing consistency, of segments."""
    ascending = np.sort(counts.astype(np.uint16 if length < 2**16 else np.uint32), axis=-1)  # small types sort much faster
    within = np.cumsum(ascending[:, :, ::-1], axis=2, dtype=np.int32)
    group = np.arange(1, counts.shape[2] + 1)
    srp = (2 * within / (length * (group + top_k))).max(axis=2).mean(axis=0)
    held = within[:, :, np.minimum(np.asarray(sizes), counts.shape[2]) - 1]
    return srp, np.asarray(held.mean(axis=0).T / (length * top_k))


WINDOW = 15
"""Tokens of a window of decode, as in DAOP's analysis."""


def phase_similarity(trace: Trace) -> dict[str, Any] | None:
    """Compare prefill and decode request by request."""
    both = _requests_of_both(trace)
    if not len(both):
        return None
    prefill, decode = (_unit(_request_loads(trace, both, phase)) for phase in ("prefill", "decode"))
    own, other, by_layer = _paired(prefill, decode)
    return {"value": own.mean(), "other_requests": other, "request": both, "by_request": own, "by_layer": by_layer}


def window_similarity(trace: Trace, size: int = WINDOW) -> dict[str, Any] | None:
    """Compare each prefill with consecutive windows of its decode."""
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
    found: dict[str, Any] = {"window": size, "value": [], "other_requests": [], "n_requests": []}
    for w in range(int(whole.max(initial=0))):
        here = (window == w) & (w < whole[number])
        owner, group = np.unique(number[here], return_inverse=True)
        decode = _unit(loads(np.asarray(trace.experts)[rows[here]], group, trace.n_experts))
        own, other, _ = _paired(prefill[owner], decode)
        for name, one in (("value", own.mean()), ("other_requests", other), ("n_requests", len(owner))):
            found[name].append(one)
    return found if found["value"] else None


def prefill_decode_cosine(trace: Trace) -> float | None:
    """Compare prefill and decode of all requests together."""
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
    """Compare unit vectors of one request, of different ones, and by layer."""
    n, n_layers = prefill.shape[:2]
    products = prefill * decode
    own = products.sum(axis=(1, 2)) / n_layers
    together = float((prefill.sum(axis=0) * decode.sum(axis=0)).sum() / n_layers)  # all pairs, those of one request included
    other = (together - float(own.sum())) / (n * (n - 1)) if n > 1 else float("nan")
    return own, other, products.sum(axis=2).mean(axis=0)


def _unit(vectors: NDArray[Any]) -> NDArray[np.float64]:
    return np.asarray(vectors / np.linalg.norm(vectors, axis=-1, keepdims=True))


LAGS = tuple(range(1, 17))
SEGMENT_LENGTHS = (4, 8, 16, 32, 64, 128)
SEGMENT_CACHES = (1, 2, 4)
"""Sizes of the cache of SCH, in multiples of top_k."""
CORRELATION_BATCHES = (16, 8, 4, 2, 1)
"""Batch sizes of the correlation of workloads: the first for which there are requests."""

NULL_ROWS, NULL_LAYERS = 4096, 4
_NO_BOTH = "no request has both prefill and decode rows"


def locality(context: Context) -> dict[str, Any]:
    """Compute the figures of locality."""
    context.begin("reuse", 1)
    sample = context.sample
    trace = sample.trace
    by_lag = reuse_by_lag(sample.experts, sample.request, LAGS, trace.n_experts)
    if np.isnan(by_lag[0]).all():
        context.absent["reuse"] = f"no request has two {sample.phase} rows"
    makers: dict[str, tuple[Callable[[], dict[str, Any] | None], str]] = {
        "reuse_by_rank": (lambda: _by_rank(sample), f"no request has two {sample.phase} rows"),
        "workload_correlation": (lambda: _of_workloads(sample), f"no request has two {sample.phase} rows"),
        "prefill_decode_similarity": (lambda: phase_similarity(trace), _NO_BOTH),
        "window_similarity": (lambda: window_similarity(trace), f"no request has prefill rows and {WINDOW} decode rows"),
        "segments": (lambda: _of_segments(sample), f"no request has {SEGMENT_LENGTHS[0]} {sample.phase} rows"),
    }
    result: dict[str, Any] = {
        "reuse": {
            "lags": LAGS,
            "value": by_lag.mean(axis=1),
            "baseline": reuse_baseline(sample.experts, trace.n_experts),
            "uniform": trace.top_k / trace.n_experts,
            "by_layer": by_lag[0],
        }
    }
    if "reuse" in context.absent:
        result["reuse"] = None
    for name, (make, reason) in makers.items():
        context.begin(name.replace("_", " "), 1)
        result[name] = make()
        if result[name] is None:
            context.absent[name] = reason
    return result


def _by_rank(sample: Sample) -> dict[str, Any] | None:
    trace = sample.trace
    basis = "rank among the chosen" if trace.recorded_scores is None else "rank by full score"
    value = reuse_by_rank(ranked(sample), sample.experts, sample.request, trace.n_experts)
    if np.isnan(value).all():
        return None
    return {"basis": basis, "value": value.mean(axis=1), "uniform": trace.top_k / trace.n_experts}


def _of_workloads(sample: Sample) -> dict[str, Any] | None:
    size = next(b for b in CORRELATION_BATCHES if b <= sample.n_requests)
    n_experts, top_k = sample.trace.n_experts, sample.trace.top_k
    found = workload_correlation(sample.experts, compose(sample.request, size), n_experts)
    if found is None:
        return None
    found |= {"batch_size": size, "distant_from": FAR, "kept_by_chance": top_k / n_experts}
    order = ("batch_size", "adjacent", "distant", "distant_from", "kept", "kept_by_chance", "matrix")
    return {name: found[name] for name in order}


def _of_segments(sample: Sample) -> dict[str, Any] | None:
    trace = sample.trace
    sizes = [c * trace.top_k for c in SEGMENT_CACHES if c * trace.top_k < trace.n_experts]
    one_request = np.zeros(NULL_ROWS, np.int64)
    random = uniform_rows(NULL_ROWS, NULL_LAYERS, trace.n_experts, trace.top_k)
    rows = []
    for length in SEGMENT_LENGTHS:
        ours = _segment_figures(sample.experts, sample.request, length, trace.n_experts, sizes)
        if ours is None:
            break
        null = _segment_figures(random, one_request, length, trace.n_experts, sizes)
        assert null is not None
        rows.append((length, *ours, *null))
    if not rows:
        return None
    lengths, srp, sch, null_srp, null_sch = zip(*rows, strict=True)
    return {
        "lengths": lengths, "srp": srp, "srp_uniform": null_srp, "cache_sizes": sizes, "sch": np.array(sch).T,
        "sch_uniform": np.array(null_sch).T,
    }  # fmt: skip


def _segment_figures(
    experts: NDArray[Any], request: NDArray[Any], length: int, n_experts: int, sizes: list[int]
) -> tuple[float, NDArray[np.float64]] | None:
    rows, segment = segments(request, length)
    if not len(rows):
        return None
    srp, sch = segment_best(loads(experts[rows], segment, n_experts), length, experts.shape[2], sizes)
    return float(srp.mean()), sch.mean(axis=1)
