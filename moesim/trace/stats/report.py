"""All statistics of a trace, by the question that they answer. What the trace cannot tell is None, with the reason.

The keys are defined in ``docs/reference/statistics.md``.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.core.progress import Progress
from moesim.trace.stats.balance import activation_frequency
from moesim.trace.stats.context import Context
from moesim.trace.stats.report_balance import balance
from moesim.trace.stats.report_batching import batching
from moesim.trace.stats.report_caches import caches
from moesim.trace.stats.report_locality import locality
from moesim.trace.stats.report_prediction import prediction
from moesim.trace.stats.sample import main_phase, select

if TYPE_CHECKING:
    from collections.abc import Callable

    from moesim.trace import Trace
    from moesim.trace.stats.sample import Sample

QUESTIONS = ("balance", "locality", "prediction", "caches", "batching")
"""The groups of figures, in order."""

_MAKERS: dict[str, Callable[[Context], dict[str, Any]]] = {
    "balance": balance,
    "locality": locality,
    "prediction": prediction,
    "caches": caches,
    "batching": batching,
}
_STEPS = 23  # the makers count them


def report(trace: Trace, phase: str | None = None, *, max_rows: int | None = None, show_progress: bool = False) -> dict[str, Any]:
    """Compute all statistics of a trace.

    Facts of the trace (``model``, ``label``, ``remarks``, ``shape``, ``phase``, ``n_rows``, ``n_requests``, ``sampled``), one
    dict for each of `QUESTIONS`, and ``absent``: ``"question.figure"`` -> why it is None. Numbers, strings, lists and None
    only; never nan.
    """
    sample = select(trace, phase or main_phase(trace), max_rows)
    result: dict[str, Any] = {**facts(sample), **dict.fromkeys(QUESTIONS), "absent": {}}
    frequency = activation_frequency(sample.experts, trace.n_experts)
    with Progress(_STEPS, enabled=show_progress) as progress:
        for question, make in _MAKERS.items():
            context = Context(sample, frequency, progress)
            result[question] = plain(make(context))
            result["absent"] |= {f"{question}.{figure}": reason for figure, reason in context.absent.items()}
    return result


def facts(sample: Sample) -> dict[str, Any]:
    """Say what was looked at."""
    trace = sample.trace
    return {
        "model": trace.model,
        "label": trace.label,
        "remarks": list(trace.remarks),
        "shape": {"n_layers": trace.n_layers, "n_experts": trace.n_experts, "top_k": trace.top_k},
        "phase": sample.phase,
        "n_rows": len(sample.rows),
        "n_requests": sample.n_requests,
        "sampled": sample.sampled,
    }


def plain(value: Any) -> Any:
    """Turn arrays into lists and nan into None, throughout.

    >>> plain({"a": np.array([1.0, np.nan]), "b": (np.int64(2), "x")})
    {'a': [1.0, None], 'b': [2, 'x']}
    """
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return plain(value.tolist())
    return None if isinstance(value, float) and math.isnan(value) else value
