"""Locality: how much of what a token needs the tokens before it needed too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.trace.stats.balance import loads
from moesim.trace.stats.batches import FAR, compose, workload_correlation
from moesim.trace.stats.locality import ranked, reuse_baseline, reuse_by_lag, reuse_by_rank, segment_best, segments
from moesim.trace.stats.score_caches import uniform_rows
from moesim.trace.stats.similarity import WINDOW, phase_similarity, window_similarity

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from moesim.trace import Trace
    from moesim.trace.stats.context import Context
    from moesim.trace.stats.sample import Sample

LAGS = tuple(range(1, 17))
SEGMENT_LENGTHS = (4, 8, 16, 32, 64, 128)
SEGMENT_CACHES = (1, 2, 4)
"""Sizes of the cache of SCH, in multiples of top_k."""
CORRELATION_BATCHES = (16, 8, 4, 2, 1)
"""Batch sizes of the correlation of workloads: the first for which there are requests."""

_NULL_ROWS, _NULL_LAYERS = 4096, 4
_NO_BOTH = "no request has both prefill and decode rows"


def locality(context: Context) -> dict[str, Any]:
    """Compute the figures of locality; ``docs/reference/statistics.md`` defines them."""
    context.begin("reuse", 1)
    sample = context.sample
    trace = sample.trace
    by_lag = reuse_by_lag(sample.experts, sample.request, LAGS, trace.n_experts)
    if np.isnan(by_lag[0]).all():
        context.absent["reuse"] = f"no request has two {sample.phase} rows"
    makers: dict[str, tuple[Callable[[], dict[str, Any] | None], str]] = {
        "reuse_by_rank": (lambda: _by_rank(sample), f"no request has two {sample.phase} rows"),
        "workload_correlation": (lambda: _correlation(sample), f"no request has two {sample.phase} rows"),
        "prefill_decode_similarity": (lambda: _similarity(trace), _NO_BOTH),
        "window_similarity": (lambda: _windows(trace), f"no request has prefill rows and {WINDOW} decode rows"),
        "segments": (lambda: _segments(sample), f"no request has {SEGMENT_LENGTHS[0]} {sample.phase} rows"),
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


def _correlation(sample: Sample) -> dict[str, Any] | None:
    size = next(b for b in CORRELATION_BATCHES if b <= sample.n_requests)
    n_experts, top_k = sample.trace.n_experts, sample.trace.top_k
    found = workload_correlation(sample.experts, compose(sample.request, size), n_experts)
    if found is None:
        return None
    return {
        "batch_size": size,
        "adjacent": found.adjacent,
        "distant": found.distant,
        "distant_from": FAR,
        "kept": found.kept,
        "kept_by_chance": top_k / n_experts,
        "matrix": found.matrix,
    }


def _similarity(trace: Trace) -> dict[str, Any] | None:
    found = phase_similarity(trace)
    if found is None:
        return None
    return {
        "value": found.own.mean(),
        "other_requests": found.other,
        "request": found.request,
        "by_request": found.own,
        "by_layer": found.by_layer,
    }


def _windows(trace: Trace) -> dict[str, Any] | None:
    found = window_similarity(trace)
    if found is None:
        return None
    return {"window": WINDOW, "value": found.own, "other_requests": found.other, "n_requests": found.n_requests}


def _segments(sample: Sample) -> dict[str, Any] | None:
    trace = sample.trace
    sizes = [c * trace.top_k for c in SEGMENT_CACHES if c * trace.top_k < trace.n_experts]
    one_request = np.zeros(_NULL_ROWS, np.int64)
    random = uniform_rows(_NULL_ROWS, _NULL_LAYERS, trace.n_experts, trace.top_k)
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
        "lengths": lengths,
        "srp": srp,
        "srp_uniform": null_srp,
        "cache_sizes": sizes,
        "sch": np.array(sch).T,
        "sch_uniform": np.array(null_sch).T,
    }


def _segment_figures(
    experts: NDArray[Any], request: NDArray[Any], length: int, n_experts: int, sizes: list[int]
) -> tuple[float, NDArray[np.float64]] | None:
    rows, segment = segments(request, length)
    if not len(rows):
        return None
    srp, sch = segment_best(loads(experts[rows], segment, n_experts), length, experts.shape[2], sizes)
    return float(srp.mean()), sch.mean(axis=1)
