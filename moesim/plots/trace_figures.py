"""All figures of a trace's statistics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from moesim.plots.style import pictures
from moesim.plots.trace_balance import popularity, prefill_load
from moesim.plots.trace_caches import cache_hit_rate, distinct_experts
from moesim.plots.trace_kit import TraceFigure
from moesim.plots.trace_locality import prefill_decode_similarity, reuse_by_lag, reuse_by_rank, segments, workload_correlation
from moesim.plots.trace_prediction import signal_recall, state_cosine, workload_recall

FIGURES: Final[Mapping[str, TraceFigure]] = {
    "popularity": popularity,
    "prefill_load": prefill_load,
    "reuse_by_lag": reuse_by_lag,
    "reuse_by_rank": reuse_by_rank,
    "workload_correlation": workload_correlation,
    "prefill_decode_similarity": prefill_decode_similarity,
    "segments": segments,
    "signal_recall": signal_recall,
    "workload_recall": workload_recall,
    "state_cosine": state_cosine,
    "cache_hit_rate": cache_hit_rate,
    "distinct_experts": distinct_experts,
}
"""Name of the file -> figure of a report, or None where the report lacks what it shows."""


def draw(report: Mapping[str, Any]) -> dict[str, bytes]:
    """Draw every figure for which a report has the numbers."""
    made = {name: make(report) for name, make in FIGURES.items()}
    return {file: data for name, figure in made.items() if figure is not None for file, data in pictures(figure, name).items()}


def left_out(report: Mapping[str, Any]) -> dict[str, str]:
    """Say which figures `draw` leaves out, and why."""
    reasons = {name: figure.why_left_out(report) for name, figure in FIGURES.items()}
    return {name: reason for name, reason in reasons.items() if reason is not None}
