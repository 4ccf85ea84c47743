"""Figures of locality: reuse by distance and by rank, prompt and answer, segments, correlation of workloads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from matplotlib.figure import Figure

from moesim.core.colours import BLACK
from moesim.plots.style import legend_beside, new_figure
from moesim.plots.trace_kit import doubling_axis, drawn, level, line, source, whole_numbers

_MANY: Final = 8  # requests; the mean of fewer jumps from window to window


@drawn("locality", "reuse")
def reuse_by_lag(report: Mapping[str, Any], found: Mapping[str, Any]) -> Figure:
    """Share of a token's experts that the token d positions earlier also used."""
    figure, axes = new_figure(6.6, 3.6)
    line(axes, found["lags"], found["value"], 0, "this trace")
    level(axes, found["baseline"], "independent tokens", color=BLACK, linestyle="--")
    level(axes, found["uniform"], "uniform router")
    axes.set_ylim(0, max(v for v in (*found["value"], found["baseline"]) if v is not None) * 1.2)
    axes.set_xticks(found["lags"])
    axes.set_xlabel("distance d (tokens)")
    axes.set_ylabel("reuse@d (share of experts)")
    axes.set_title("Reuse by distance")
    legend_beside(axes, [])
    source(figure, report, "mean over layers; tokens of one request only")
    return figure


@drawn("locality", "reuse_by_rank")
def reuse_by_rank(report: Mapping[str, Any], found: Mapping[str, Any]) -> Figure:
    """Probability that the next token uses an expert, by its rank in this token."""
    figure, axes = new_figure(5.6, 3.6)
    ranks = range(1, len(found["value"]) + 1)
    line(axes, ranks, found["value"], 0, "this trace")
    level(axes, found["uniform"], "uniform router")
    whole_numbers(axes.xaxis)
    top_k = report["shape"]["top_k"]
    if len(found["value"]) > top_k:
        axes.axvline(top_k + 0.5, color=BLACK, linewidth=0.8, linestyle="--", label=f"chosen | not chosen (top {top_k})")
    elif len(found["value"]) <= 16:
        axes.set_xticks(ranks)
    axes.set_xlim(0.5, len(found["value"]) + 0.5)
    axes.set_ylim(0, max(*found["value"], found["uniform"]) * 1.15)
    axes.set_xlabel(f"{found['basis']} in this token (1: best)")
    axes.set_ylabel("P(used by the next token)")
    axes.set_title("Reuse by rank")
    axes.legend()
    source(figure, report, "mean over layers")
    return figure


@drawn("locality", "prefill_decode_similarity")
def prefill_decode_similarity(report: Mapping[str, Any], found: Mapping[str, Any]) -> Figure:
    """Cosine of a prompt's activations with windows of its answer, and with the whole of it."""
    windows = report["locality"]["window_similarity"]
    figure, axes = new_figure(6.2, 3.6)
    notes = ["cosine of the activation counts of a layer, mean over layers and requests"]
    if windows is None:
        axes.set_xticks([])
    else:
        size, n = windows["window"], _well_covered(windows["n_requests"])
        x = [size * (i + 0.5) for i in range(n)]
        line(axes, x, windows["value"][:n], 0, f"window of {size} tokens")
        line(axes, x, windows["other_requests"][:n], 1, "window of another request's answer")
        notes += _who_is_drawn(windows["n_requests"], n)
    level(axes, found["value"], "whole answer", color=BLACK, linestyle="-")
    level(axes, found["other_requests"], "another request's whole answer", color=BLACK, linestyle="-.")
    axes.set_ylim(0, 1.03)
    axes.set_xlabel("decode tokens since the prompt")
    axes.set_ylabel("cosine with the prompt's activations")
    axes.set_title("Similarity of prompt and answer")
    legend_beside(axes, [])
    source(figure, report, *notes)
    return figure


def _well_covered(n_requests: Sequence[int]) -> int:
    """Count the windows to draw: those of enough requests for a mean, or all if the trace is too small for that."""
    if n_requests[0] < _MANY:
        return len(n_requests)
    return sum(n >= _MANY for n in n_requests)  # later windows have fewer


def _who_is_drawn(n_requests: Sequence[int], n: int) -> list[str]:
    notes = []
    if n_requests[n - 1] < n_requests[0]:
        notes.append(f"the first window is of {n_requests[0]} requests, the last of {n_requests[n - 1]}")
    if n < len(n_requests):
        notes.append(f"{len(n_requests) - n} later windows, of fewer than {_MANY} requests each, are not drawn")
    return notes


@drawn("locality", "workload_correlation")
def workload_correlation(report: Mapping[str, Any], found: Mapping[str, Any]) -> Figure:
    """Heat map of the correlation of the workloads of two decode steps of a batch."""
    matrix = np.array(found["matrix"], np.float64)
    n = len(matrix)
    off = matrix[~np.eye(n, dtype=bool)]
    figure, axes = new_figure(5.4, 4.4)
    axes.grid(visible=False)
    image = axes.imshow(
        np.where(np.eye(n, dtype=bool), np.nan, matrix),
        cmap="cividis",  # even in brightness: it reads the same in grey
        vmin=min(0.0, float(off.min())),
        vmax=float(off.max()),
        origin="lower",
        extent=(0.5, n + 0.5, 0.5, n + 0.5),
    )
    figure.colorbar(image, ax=axes, label="correlation of workloads", shrink=0.85)
    whole_numbers(axes.xaxis, axes.yaxis)
    axes.set_xlabel(f"{report['phase']} step")
    axes.set_ylabel(f"{report['phase']} step")
    axes.set_title("Are busy experts busy again?")
    distant = found["distant"]
    beside = "" if distant is None else f", {found['distant_from']} or more apart {distant:.2f}"
    source(
        figure,
        report,
        f"batch {found['batch_size']}; Pearson's correlation over the experts of a layer, mean over layers and batches",
        f"adjacent steps {found['adjacent']:.2f}{beside}; a step with itself (1) is left blank",
    )
    return figure


@drawn("locality", "segments")
def segments(report: Mapping[str, Any], found: Mapping[str, Any]) -> Figure:
    """SRP and SCH by length of the segment."""
    figure, axes = new_figure(6.4, 3.8)
    line(axes, found["lengths"], found["srp"], 0, "SRP")
    line(axes, found["lengths"], found["srp_uniform"], 0, "SRP, uniform router", marker=None, linewidth=0.9, alpha=0.7)
    for i, (size, ours, null) in enumerate(zip(found["cache_sizes"], found["sch"], found["sch_uniform"], strict=True), start=1):
        line(axes, found["lengths"], ours, i, f"SCH, cache of {size}")
        line(axes, found["lengths"], null, i, f"SCH, cache of {size}, uniform router", marker=None, linewidth=0.9, alpha=0.7)
    doubling_axis(axes, found["lengths"], "tokens of a segment")
    axes.set_ylim(0, 1.03)
    axes.set_ylabel("SRP (best F1), SCH (best hit rate)")
    axes.set_title("Local routing consistency")
    legend_beside(axes, [])
    source(figure, report, "mean over layers and segments; thin lines: uniform router; our reading of the definitions")
    return figure
