"""Prediction: how well routing is known before the router has spoken."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.trace.stats.batches import BATCH_SIZES
from moesim.trace.stats.prediction import coactivation_recall_by_layer, signal_recall_by_layer
from moesim.trace.stats.states import state_cosine
from moesim.trace.stats.workload_recall import workload_recall

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moesim.trace.stats.context import Context
    from moesim.trace.stats.sample import Sample

TOP_COUNTS = (1, 2, 4)


def prediction(context: Context) -> dict[str, Any]:
    """Compute the figures of prediction; ``docs/reference/statistics.md`` defines them."""
    context.begin("signals", 2)
    sample = context.sample
    trace = sample.trace
    result: dict[str, Any] = {"uniform": trace.top_k / trace.n_experts, "activated": {}, "workload": {}}
    for name, signal in sorted(trace.signals.items()):
        by_layer = signal_recall_by_layer(trace, signal, sample.rows)
        if np.isnan(by_layer).all():
            context.absent[f"activated.{name}"] = f"the signal covers none of these {sample.phase} rows"
        n_rows = int(np.isin(signal.rows, sample.rows).sum())
        result["activated"][name] = _recall(by_layer, signal.lookahead, n_rows)
        found = workload_recall(trace, signal, sample.rows, BATCH_SIZES, TOP_COUNTS)
        result["workload"][name] = [
            {
                "batch_size": at.batch_size,
                "n_steps": at.n_steps,
                "n": n,
                "value": np.nanmean(at.by_layer[i]),
                "chance": at.chance[i],
                "by_layer": at.by_layer[i],
            }
            for at in found
            for i, n in enumerate(at.n)
        ]
    if not trace.signals:
        context.absent["workload"] = "the trace has no signals"
    context.begin("co-activation", 1)
    by_layer = coactivation_recall_by_layer(sample.experts, sample.request, trace.n_experts)
    if np.isnan(by_layer).all():
        context.absent["activated.coactivation"] = "counting on one half of the requests needs two requests, and two layers"
    result["activated"]["coactivation"] = _recall(by_layer, 1, len(sample.rows))
    result["states"] = _states(sample, context.absent)
    return result


def _recall(by_layer: NDArray[np.float64], lookahead: int, n_rows: int) -> dict[str, Any] | None:
    if np.isnan(by_layer).all():
        return None
    return {"value": np.nanmean(by_layer), "lookahead": lookahead, "n_rows": n_rows, "by_layer": by_layer}


def _states(sample: Sample, absent: dict[str, str]) -> dict[str, Any] | None:
    """Compare gate inputs of neighbouring layers, where they were recorded."""
    trace = sample.trace
    if trace.inputs is None:
        absent["states"] = "the trace has no gate inputs"
        return None
    wanted = np.isin(trace.inputs.rows, sample.rows)
    if not wanted.any() or trace.n_layers < 2:
        absent["states"] = f"gate inputs cover none of these {sample.phase} rows, or there is one layer only"
        return None
    values = np.asarray(trace.inputs.values)[wanted]
    plain = state_cosine(values)
    result: dict[str, Any] = {"n_rows": len(values), "gate_reuse": {"value": plain.mean(), "by_layer": plain}, "residual": None}
    if "residual" in trace.tables:
        corrected = state_cosine(values, np.asarray(trace.tables["residual"]))
        result["residual"] = {"value": corrected.mean(), "by_layer": corrected}
    else:
        absent["states.residual"] = "the trace has no residual vectors"
    return result
