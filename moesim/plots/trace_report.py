"""Figures of a report of `moesim trace stats`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import update_wrapper
from itertools import accumulate
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moesim.core.colours import BLACK, BLUE, GREY
from moesim.plots.style import (
    MAP,
    OPTIMUM,
    TEXT,
    add_corner,
    doubling_axis,
    legend_above,
    legend_beside,
    level,
    marked_line,
    new_figure,
    panel_title,
    pictures,
    styled,
    whole_numbers,
)
from moesim.plots.trace_maps import signal_numbers

Report = Mapping[str, Any]


class TraceFigure:
    """A figure of one part of a report."""

    def __init__(self, make: Callable[[Report, Any], Figure], path: tuple[str, ...]) -> None:
        self._make = styled(make)
        self._path = path
        update_wrapper(self, make)

    def __call__(self, report: Report) -> Figure | None:
        found = self._part(report)
        return None if found is None else self._make(report, found)

    def why_left_out(self, report: Report) -> str | None:
        if self._part(report) is not None:
            return None
        absent, name = report["absent"], ".".join(self._path)
        inner = [reason for key, reason in absent.items() if key.startswith(f"{name}.")]
        near = [reason for key, reason in absent.items() if key.startswith(f"{self._path[0]}.activated.")]
        reasons = [absent[name]] if name in absent else inner or near or ["the trace has no numbers for it"]
        return "; ".join(dict.fromkeys(reasons))

    def _part(self, report: Report) -> Any:
        found: Any = report
        for key in self._path:
            found = found[key]
        return found if found is not None and any(found.values()) else None


def drawn(*path: str) -> Callable[[Callable[[Report, Any], Figure]], TraceFigure]:
    """Make a `TraceFigure` of a function of the report and of a part."""
    return lambda make: TraceFigure(make, path)


def source(figure: Figure, report: Report, *notes: str) -> None:
    """Write under a figure which routing it shows."""
    n_requests = report["n_requests"]
    tokens = f"{report['n_rows']:,} {report['phase']} tokens of {n_requests} request{'' if n_requests == 1 else 's'}"
    parts = [str(report["trace"]), f"routing of {report['model']}", str(report["label"]), tokens]
    add_corner(figure, " · ".join(parts), [note for note in notes if note])


@drawn("balance", "popularity")
def popularity(report: Report, found: Report) -> Figure:
    """Share of the activations by rank of popularity, with the band of a uniform router."""
    n_experts = report["shape"]["n_experts"]
    ranks = range(1, n_experts + 1)
    figure, axes = new_figure(5.6, 3.6)
    low, high, mean = ([n_experts * v for v in found["null_by_rank"][name]] for name in ("low", "high", "mean"))
    width = max(h - lo for h, lo in zip(high, low, strict=True)) / 2
    band = f"uniform router, 95 % of draws (± {width:.2g})"
    axes.fill_between(ranks, low, high, color=GREY, alpha=0.6, linewidth=0, label=band)
    axes.plot(ranks, mean, color=BLACK, linestyle=":", linewidth=1, label="uniform router, mean")
    marked_line(axes, ranks, [n_experts * v for v in found["by_rank"]], 0, "this trace")
    whole_numbers(axes.xaxis)
    axes.set(
        title="Popularity of experts", xlim=(0.5, n_experts + 0.5), ylim=(0, None),
        xlabel="expert, by popularity in its layer (1: most used)", ylabel="share of activations / uniform share",
    )  # fmt: skip
    axes.legend()
    source(figure, report, "mean over layers; the uniform router has as many tokens, each layer's experts sorted likewise")
    return figure


@drawn("balance", "prefill_load")
def prefill_load(report: Report, found: Report) -> Figure:
    """Cumulative share of the tokens of a prompt that go to the busiest experts of a layer."""
    n_experts = report["shape"]["n_experts"]
    x = [100 * i / n_experts for i in range(n_experts + 1)]
    figure, axes = new_figure(5.2, 3.8)
    null, ours = ([0.0, *accumulate(100 * v for v in found[name])] for name in ("null_by_rank", "by_rank"))
    axes.plot([0, 100], [0, 100], color=GREY, linestyle=":", linewidth=1.2, label="all alike")
    axes.plot(x, null, color=BLACK, linestyle="--", linewidth=1.2, label="uniform router")
    marked_line(axes, x, ours, 0, "this trace", color=BLUE, linestyle="-")
    axes.set(
        title="Load of experts in prefill", xlim=(0, 100), ylim=(0, 103), xlabel="busiest experts of a layer (% of them)",
        ylabel="tokens x experts that they serve (%)",
    )  # fmt: skip
    axes.legend(loc="lower right")
    n, mean = found["n_prompts"], found["mean_tokens"]
    source(
        figure, {**report, "phase": "prefill", "n_rows": round(n * mean), "n_requests": n},
        f"mean over layers and {n} prompts of {round(mean)} tokens on average",
        f"largest / mean load {found['max_over_mean']:.2f} (uniform router {found['null_max_over_mean']:.2f})",
    )  # fmt: skip
    return figure


REACHABLE: Final = "belady-visit"


@drawn("caches")
def cache_hit_rate(report: Report, found: Report) -> Figure:
    """Hit rate of a cache a layer, by its size, for every rule of replacement."""
    x = [100 * share for share in found["shares"]]
    figure, axes = new_figure(6.4, 4.0)
    rates = {name: [100 * v for v in values] for name, values in found["hit_rate"].items() if values is not None}
    star: dict[str, Any] = {"color": BLACK, "marker": "*", "zorder": 4}
    axes.plot(x, rates.pop(OPTIMUM), linewidth=2.4, markersize=9, label=f"{OPTIMUM} (oracle)", **star)
    axes.plot(x, rates.pop(REACHABLE), linewidth=1.4, linestyle="--", markersize=7, label=f"{REACHABLE} (oracle)", **star)
    for i, (name, values) in enumerate(rates.items()):
        marked_line(axes, x, values, i, name)
    null = [100 * v for v in found["uniform_belady"]]
    axes.plot(x, null, color=BLACK, linewidth=0.9, linestyle="--", label=f"{OPTIMUM}, uniform router")
    axes.plot([0, 100], [0, 100], color=GREY, linestyle=":", linewidth=1.4, label="others, uniform router", zorder=1)
    axes.set(
        title="Hit rate by cache size", xlim=(0, 100), ylim=(0, 103), xlabel="cache size (% of the experts of a layer)",
        ylabel="hit rate (%)",
    )  # fmt: skip
    legend_beside(axes, [])
    mrs = "" if found["hit_rate"]["mrs"] is None else f"mrs: {found['mrs_basis']}"
    source(figure, report, "one cache a layer, one token at a time, hits counted before the cache changes", mrs)
    return figure


@drawn("batching")
def distinct_experts(report: Report, found: Report) -> Figure:
    """Experts of a layer that a step of a batch needs."""
    sizes, n_experts = found["batch_sizes"], report["shape"]["n_experts"]
    figure, axes = new_figure(6.8, 3.6)
    marked_line(axes, sizes, found["distinct"], 0, "this trace")
    marked_line(axes, sizes, found["independent"], 1, "its tokens, drawn independently", marker=None)
    axes.plot(sizes, found["uniform"], color=BLACK, linestyle=":", linewidth=1.4, label="uniform router")
    axes.axhline(n_experts, color=GREY, linewidth=0.8, label="all experts of a layer")
    doubling_axis(axes, sizes, "batch size (requests)")
    axes.set(title="Experts that a batch needs", ylim=(0, n_experts * 1.05), ylabel="distinct experts of a layer in a step")
    legend_beside(axes, [])
    source(figure, report, "mean over layers and steps; a batch takes the next token of different requests")
    return figure


@drawn("locality", "reuse")
def reuse_by_lag(report: Report, found: Report) -> Figure:
    """Share of a token's experts that the token d positions earlier also used."""
    figure, axes = new_figure(6.6, 3.6)
    marked_line(axes, found["lags"], found["value"], 0, "this trace")
    level(axes, found["baseline"], "independent tokens", color=BLACK, linestyle="--")
    level(axes, found["uniform"], "uniform router")
    top = max(v for v in (*found["value"], found["baseline"]) if v is not None) * 1.2
    axes.set(
        title="Reuse by distance", ylim=(0, top), xticks=found["lags"], xlabel="distance d (tokens)",
        ylabel="reuse@d (share of experts)",
    )  # fmt: skip
    legend_beside(axes, [])
    source(figure, report, "mean over layers; tokens of one request only")
    return figure


@drawn("locality", "reuse_by_rank")
def reuse_by_rank(report: Report, found: Report) -> Figure:
    """Probability that the next token uses an expert, by its rank in this token."""
    figure, axes = new_figure(5.6, 3.6)
    values, top_k = found["value"], report["shape"]["top_k"]
    ranks = range(1, len(values) + 1)
    marked_line(axes, ranks, values, 0, "this trace")
    level(axes, found["uniform"], "uniform router")
    whole_numbers(axes.xaxis)
    if len(values) > top_k:
        axes.axvline(top_k + 0.5, color=BLACK, linewidth=0.8, linestyle="--", label=f"chosen | not chosen (top {top_k})")
    elif len(values) <= 16:
        axes.set_xticks(ranks)
    axes.set(
        title="Reuse by rank", xlim=(0.5, len(values) + 0.5), ylim=(0, max(*values, found["uniform"]) * 1.15),
        xlabel=f"{found['basis']} in this token (1: best)", ylabel="P(used by the next token)",
    )  # fmt: skip
    axes.legend()
    source(figure, report, "mean over layers")
    return figure


_MANY: Final = 8  # requests; the mean of fewer jumps from window to window


@drawn("locality", "prefill_decode_similarity")
def prefill_decode_similarity(report: Report, found: Report) -> Figure:
    """Cosine of a prompt's activations with windows of its answer, and with the whole of it."""
    windows = report["locality"]["window_similarity"]
    figure, axes = new_figure(6.2, 3.6)
    notes = ["cosine of the activation counts of a layer, mean over layers and requests"]
    if windows is None:
        axes.set_xticks([])
    else:
        size, n = windows["window"], _well_covered(windows["n_requests"])
        x = [size * (i + 0.5) for i in range(n)]
        marked_line(axes, x, windows["value"][:n], 0, f"window of {size} tokens")
        marked_line(axes, x, windows["other_requests"][:n], 1, "window of another request's answer")
        notes += _who_is_drawn(windows["n_requests"], n)
    level(axes, found["value"], "whole answer", color=BLACK, linestyle="-")
    level(axes, found["other_requests"], "another request's whole answer", color=BLACK, linestyle="-.")
    axes.set(
        title="Similarity of prompt and answer", ylim=(0, 1.03), xlabel="decode tokens since the prompt",
        ylabel="cosine with the prompt's activations",
    )  # fmt: skip
    legend_beside(axes, [])
    source(figure, report, *notes)
    return figure


def _well_covered(n_requests: Sequence[int]) -> int:
    """Count the windows of enough requests for a mean."""
    return len(n_requests) if n_requests[0] < _MANY else sum(n >= _MANY for n in n_requests)  # later windows have fewer


def _who_is_drawn(n_requests: Sequence[int], n: int) -> list[str]:
    notes = []
    if n_requests[n - 1] < n_requests[0]:
        notes.append(f"the first window is of {n_requests[0]} requests, the last of {n_requests[n - 1]}")
    if n < len(n_requests):
        notes.append(f"{len(n_requests) - n} later windows, of fewer than {_MANY} requests each, are not drawn")
    return notes


@drawn("locality", "workload_correlation")
def workload_correlation(report: Report, found: Report) -> Figure:
    """Heat map of the correlation of the rows of experts in two decode steps of a batch."""
    matrix = np.array(found["matrix"], np.float64)
    n = len(matrix)
    off = matrix[~np.eye(n, dtype=bool)]
    figure, axes = new_figure(5.4, 4.4)
    axes.grid(visible=False)
    image = axes.imshow(
        np.where(np.eye(n, dtype=bool), np.nan, matrix), cmap=MAP, vmin=min(0.0, float(off.min())), vmax=float(off.max()),
        origin="lower", extent=(0.5, n + 0.5, 0.5, n + 0.5),
    )  # fmt: skip
    figure.colorbar(image, ax=axes, label="correlation of workloads", shrink=0.85)
    whole_numbers(axes.xaxis, axes.yaxis)
    axes.set(xlabel=f"{report['phase']} step", ylabel=f"{report['phase']} step", title="Are busy experts busy again?")
    distant = found["distant"]
    beside = "" if distant is None else f", {found['distant_from']} or more apart {distant:.2f}"
    source(
        figure, report,
        f"batch {found['batch_size']}; Pearson's correlation over the experts of a layer, mean over layers and batches",
        f"adjacent steps {found['adjacent']:.2f}{beside}; a step with itself (1) is left blank",
    )  # fmt: skip
    return figure


@drawn("locality", "segments")
def segments(report: Report, found: Report) -> Figure:
    """SRP and SCH by length of the segment."""
    figure, axes = new_figure(6.4, 3.8)
    null: dict[str, Any] = {"marker": None, "linewidth": 0.9, "alpha": 0.7}
    lines = [("SRP", found["srp"], found["srp_uniform"])]
    caches = zip(found["cache_sizes"], found["sch"], found["sch_uniform"], strict=True)
    lines += [(f"SCH, cache of {size}", ours, uniform) for size, ours, uniform in caches]
    for i, (name, ours, uniform) in enumerate(lines):
        marked_line(axes, found["lengths"], ours, i, name)
        marked_line(axes, found["lengths"], uniform, i, f"{name}, uniform router", **null)
    doubling_axis(axes, found["lengths"], "tokens of a segment")
    axes.set(title="Local routing consistency", ylim=(0, 1.03), ylabel="SRP (best F1), SCH (best hit rate)")
    legend_beside(axes, [])
    source(figure, report, "mean over layers and segments; thin lines: uniform router; our reading of the definitions")
    return figure


@drawn("prediction", "activated")
def signal_recall(report: Report, found: Report) -> Figure:
    """Share of the routed experts that each signal named, by layer."""
    recalls = {name: recall for name, recall in found.items() if recall is not None}
    figure, axes = new_figure(6.6, 3.8)
    for name, number in signal_numbers(recalls).items():
        by_layer = recalls[name]["by_layer"]
        marked_line(axes, range(len(by_layer)), by_layer, number, name)
    level(axes, report["prediction"]["uniform"], "chance")
    _layers_axis(axes, report)
    axes.set(title="How well signals tell a layer's experts", ylim=(0, 1.03), ylabel="recall of the experts of a token")
    legend_beside(axes, [])
    rows = sorted({recall["n_rows"] for name, recall in recalls.items() if name != "coactivation"})
    covered = f"signals cover {' or '.join(f'{n:,}' for n in rows)} of these tokens" if rows else ""
    table = "coactivation: counted on a random half of the requests, tried on the rest" if "coactivation" in recalls else ""
    source(figure, report, covered, table)
    return figure


@drawn("prediction", "workload")
def workload_recall(report: Report, found: Report) -> Figure:
    """Share of the busiest experts of a batch that each signal named, by batch size."""
    counts = sorted({entry["n"] for entries in found.values() for entry in entries})
    figure = Figure(figsize=(TEXT, 2.0), layout="constrained")
    panels = figure.subplots(1, len(counts), sharey=True, squeeze=False)[0]
    for axes, n in zip(panels, counts, strict=True):
        for name, number in signal_numbers(found).items():
            shown = [entry for entry in found[name] if entry["n"] == n]
            marked_line(axes, [e["batch_size"] for e in shown], [e["value"] for e in shown], number, name)
        longest = max(([e for e in entries if e["n"] == n] for entries in found.values()), key=len)
        sizes = [e["batch_size"] for e in longest]
        axes.plot(sizes, [e["chance"] for e in longest], color="#555555", linestyle=":", linewidth=1.4, label="chance")
        doubling_axis(axes, sizes, "batch size (requests)")
        axes.set_ylim(0, 1.03)
        panel_title(axes, f"top {n} by workload")
    panels[0].set_ylabel("recall of the busiest experts")
    legend_above(figure, panels[0].get_legend_handles_labels()[0], "How well signals tell the busiest experts")
    source(figure, report, "mean over layers; ties for the last place of the true ones count as right")
    return figure


@drawn("prediction", "states")
def state_cosine(report: Report, found: Report) -> Figure:
    """Cosine of what a router reads with what the one before read."""
    figure, axes = new_figure(6.2, 3.6)
    words = {"gate_reuse": "state of the layer before", "residual": "the same + mean residual"}
    for i, (name, text) in enumerate(words.items()):
        if found[name] is not None:
            values = found[name]["by_layer"]
            marked_line(axes, range(1, len(values) + 1), values, i, text)
            axes.set_ylim(bottom=min(0.0, *values, *axes.get_ylim()), top=1.03)
    _layers_axis(axes, report)
    axes.set(ylabel="cosine with the router's input", title="How much a state moves from layer to layer")
    legend_beside(axes, [])
    source(figure, report, f"{found['n_rows']:,} tokens with recorded gate inputs")
    return figure


def _layers_axis(axes: Axes, report: Report) -> None:
    whole_numbers(axes.xaxis)
    axes.set(xlim=(-0.5, report["shape"]["n_layers"] - 0.5), xlabel="layer")


FIGURES: Final[Mapping[str, TraceFigure]] = {
    one.__name__: one  # type: ignore[attr-defined]  # of the function that it wraps
    for one in (
        popularity, prefill_load, reuse_by_lag, reuse_by_rank, workload_correlation, prefill_decode_similarity, segments,
        signal_recall, workload_recall, state_cosine, cache_hit_rate, distinct_experts,
    )
}  # fmt: skip
"""Name of the file -> figure of a report, or None where the report lacks what it shows."""


def draw(report: Report) -> dict[str, bytes]:
    """Draw every figure for which a report has the numbers."""
    made = {name: make(report) for name, make in FIGURES.items()}
    return {file: data for name, figure in made.items() if figure is not None for file, data in pictures(figure, name).items()}


def left_out(report: Report) -> dict[str, str]:
    """Return the figures that `draw` leaves out, and why."""
    reasons = {name: figure.why_left_out(report) for name, figure in FIGURES.items()}
    return {name: reason for name, reason in reasons.items() if reason is not None}
