"""Balance: how evenly experts are used, and whether that is more than chance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.trace.stats.balance import entropy_by_layer, gini, loads, top_by_layer, uniform_counts
from moesim.trace.stats.sample import phase_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from moesim.trace import Trace
    from moesim.trace.stats.context import Context

N_DRAWS = 100
SEED = 0
INTERVAL = (2.5, 97.5)
"""Percentiles of a null's draws that are printed with it."""

_MEASURES: dict[str, Callable[[NDArray[np.float64]], NDArray[np.float64]]] = {
    "entropy": entropy_by_layer,
    "top_over_uniform": top_by_layer,
    "gini": gini,
}


def balance(context: Context) -> dict[str, Any]:
    """Compute the figures of balance; ``docs/reference/statistics.md`` defines them."""
    context.begin("balance", 1)
    sample = context.sample
    trace = sample.trace
    rng = np.random.default_rng(SEED)
    drawn = uniform_counts(rng, len(sample.rows), trace.n_experts, trace.top_k, (N_DRAWS, trace.n_layers))
    null = drawn / (len(sample.rows) * trace.top_k)
    result: dict[str, Any] = {name: _measured(measure, context.frequency, null) for name, measure in _MEASURES.items()}
    result["popularity"] = {
        "by_rank": _sorted_share(context.frequency).mean(axis=0),
        "null_by_rank": _interval(_sorted_share(null).mean(axis=1)),
    }
    result["prefill_load"] = prefill_load(trace, rng)
    if result["prefill_load"] is None:
        context.absent["prefill_load"] = "the trace has no prefill rows"
    return result


def prefill_load(trace: Trace, rng: np.random.Generator) -> dict[str, Any] | None:
    """Describe how the tokens of a prompt spread over the experts of a layer, mean over prompts and layers."""
    rows = phase_rows(trace, "prefill")
    if not len(rows):
        return None
    _, number, length = np.unique(trace.request[rows], return_inverse=True, return_counts=True)
    shape = (len(length), trace.n_layers)
    counts = loads(np.asarray(trace.experts)[rows], number, trace.n_experts)
    null = uniform_counts(rng, length[:, None], trace.n_experts, trace.top_k, shape)
    total = (length * trace.top_k)[:, None, None]
    ours, uniform = (_load_figures(c / total) for c in (counts, null))
    return {
        "n_prompts": len(length),
        "mean_tokens": float(length.mean()),
        **ours,
        **{f"null_{name}": value for name, value in uniform.items()},
    }


def _load_figures(share: NDArray[np.float64]) -> dict[str, Any]:
    return {
        "max_over_mean": float(top_by_layer(share).mean()),
        "idle_share": float((share == 0).mean()),
        "by_rank": _sorted_share(share).mean(axis=(0, 1)),
    }


def _measured(
    measure: Callable[[NDArray[np.float64]], NDArray[np.float64]], frequency: NDArray[np.float64], null: NDArray[np.float64]
) -> dict[str, Any]:
    by_layer = measure(frequency)
    return {"value": by_layer.mean(), "null": _interval(measure(null).mean(axis=1)), "by_layer": by_layer}


def _interval(draws: NDArray[np.float64]) -> dict[str, Any]:
    low, high = np.percentile(draws, INTERVAL, axis=0)
    return {"mean": draws.mean(axis=0), "low": low, "high": high}


def _sorted_share(frequency: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(-np.sort(-frequency, axis=-1))
