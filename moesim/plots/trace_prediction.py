"""Figures of prediction: recall by layer and by batch size, cosine of states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moesim.plots.style import legend_above, legend_beside, new_figure
from moesim.plots.trace_kit import doubling_axis, drawn, level, line, signal_numbers, source, whole_numbers
from moesim.plots.widths import TEXT


@drawn("prediction", "activated")
def signal_recall(report: Mapping[str, Any], found: Mapping[str, Any]) -> Figure:
    """Share of the routed experts that each signal named, by layer."""
    recalls = {name: recall for name, recall in found.items() if recall is not None}
    figure, axes = new_figure(6.6, 3.8)
    for name, number in signal_numbers(recalls).items():
        by_layer = recalls[name]["by_layer"]
        line(axes, range(len(by_layer)), by_layer, number, name)
    level(axes, report["prediction"]["uniform"], "chance")
    axes.set_ylim(0, 1.03)
    _layers_axis(axes, report)
    axes.set_ylabel("recall of the experts of a token")
    axes.set_title("How well signals tell a layer's experts")
    legend_beside(axes, [])
    rows = sorted({recall["n_rows"] for name, recall in recalls.items() if name != "coactivation"})
    covered = f"signals cover {' or '.join(f'{n:,}' for n in rows)} of these tokens" if rows else ""
    table = "coactivation: counted on a random half of the requests, tried on the rest" if "coactivation" in recalls else ""
    source(figure, report, covered, table)
    return figure


@drawn("prediction", "workload")
def workload_recall(report: Mapping[str, Any], found: Mapping[str, Any]) -> Figure:
    """Share of the busiest experts of a batch that each signal named, by batch size."""
    counts = sorted({entry["n"] for entries in found.values() for entry in entries})
    figure = Figure(figsize=(TEXT, 2.0), layout="constrained")
    panels = figure.subplots(1, len(counts), sharey=True, squeeze=False)[0]
    for axes, n in zip(panels, counts, strict=True):
        for name, number in signal_numbers(found).items():
            shown = [entry for entry in found[name] if entry["n"] == n]
            line(axes, [e["batch_size"] for e in shown], [e["value"] for e in shown], number, name)
        longest = max(([e for e in entries if e["n"] == n] for entries in found.values()), key=len)
        sizes = [e["batch_size"] for e in longest]
        axes.plot(sizes, [e["chance"] for e in longest], color="#555555", linestyle=":", linewidth=1.4, label="chance")
        doubling_axis(axes, sizes, "batch size (requests)")
        axes.set_ylim(0, 1.03)
        axes.set_title(f"top {n} by workload", fontsize=7.5, fontweight="normal")
    panels[0].set_ylabel("recall of the busiest experts")
    legend_above(figure, panels[0].get_legend_handles_labels()[0], "How well signals tell the busiest experts")
    source(figure, report, "mean over layers; ties for the last place of the true ones count as right")
    return figure


@drawn("prediction", "states")
def state_cosine(report: Mapping[str, Any], found: Mapping[str, Any]) -> Figure:
    """Cosine of what a router reads with what the one before read."""
    figure, axes = new_figure(6.2, 3.6)
    words = {"gate_reuse": "state of the layer before", "residual": "the same + mean residual"}
    for i, (name, text) in enumerate(words.items()):
        if found[name] is not None:
            values = found[name]["by_layer"]
            line(axes, range(1, len(values) + 1), values, i, text)
            axes.set_ylim(bottom=min(0.0, *values, *axes.get_ylim()), top=1.03)
    _layers_axis(axes, report)
    axes.set_ylabel("cosine with the router's input")
    axes.set_title("How much a state moves from layer to layer")
    legend_beside(axes, [])
    source(figure, report, f"{found['n_rows']:,} tokens with recorded gate inputs")
    return figure


def _layers_axis(axes: Axes, report: Mapping[str, Any]) -> None:
    whole_numbers(axes.xaxis)
    axes.set_xlim(-0.5, report["shape"]["n_layers"] - 0.5)
    axes.set_xlabel("layer")
