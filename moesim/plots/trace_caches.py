"""Figures of memory: hit rates by cache size, distinct experts by batch size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from matplotlib.figure import Figure

from moesim.core.colours import BLACK, GREY
from moesim.plots.style import OPTIMUM, legend_beside, new_figure
from moesim.plots.trace_kit import doubling_axis, drawn, line, source

REACHABLE: Final = "belady-visit"


@drawn("caches")
def cache_hit_rate(report: Mapping[str, Any], found: Mapping[str, Any]) -> Figure:
    """Hit rate of a cache a layer, by its size, for every rule of replacement."""
    x = [100 * share for share in found["shares"]]
    figure, axes = new_figure(6.4, 4.0)
    rates = {name: [100 * v for v in values] for name, values in found["hit_rate"].items() if values is not None}
    best = rates.pop(OPTIMUM)
    axes.plot(x, best, color=BLACK, linewidth=2.4, marker="*", markersize=9, label=f"{OPTIMUM} (oracle)", zorder=4)
    held = rates.pop(REACHABLE)
    style: dict[str, Any] = {"linewidth": 1.4, "linestyle": "--", "marker": "*", "markersize": 7}
    axes.plot(x, held, color=BLACK, label=f"{REACHABLE} (oracle)", zorder=4, **style)
    for i, (name, values) in enumerate(rates.items()):
        line(axes, x, values, i, name)
    null = [100 * v for v in found["uniform_belady"]]
    axes.plot(x, null, color=BLACK, linewidth=0.9, linestyle="--", label=f"{OPTIMUM}, uniform router")
    axes.plot([0, 100], [0, 100], color=GREY, linestyle=":", linewidth=1.4, label="others, uniform router", zorder=1)
    axes.set_xlim(0, 100)
    axes.set_ylim(0, 103)
    axes.set_xlabel("cache size (% of the experts of a layer)")
    axes.set_ylabel("hit rate (%)")
    axes.set_title("Hit rate by cache size")
    legend_beside(axes, [])
    mrs = "" if found["hit_rate"]["mrs"] is None else f"mrs: {found['mrs_basis']}"
    source(figure, report, "one cache a layer, one token at a time, hits counted before the cache changes", mrs)
    return figure


@drawn("batching")
def distinct_experts(report: Mapping[str, Any], found: Mapping[str, Any]) -> Figure:
    """Experts of a layer that a step of a batch needs."""
    sizes = found["batch_sizes"]
    figure, axes = new_figure(6.8, 3.6)
    line(axes, sizes, found["distinct"], 0, "this trace")
    line(axes, sizes, found["independent"], 1, "its tokens, drawn independently", marker=None)
    axes.plot(sizes, found["uniform"], color=BLACK, linestyle=":", linewidth=1.4, label="uniform router")
    axes.axhline(report["shape"]["n_experts"], color=GREY, linewidth=0.8, label="all experts of a layer")
    doubling_axis(axes, sizes, "batch size (requests)")
    axes.set_ylim(0, report["shape"]["n_experts"] * 1.05)
    axes.set_ylabel("distinct experts of a layer in a step")
    axes.set_title("Experts that a batch needs")
    legend_beside(axes, [])
    source(figure, report, "mean over layers and steps; a batch takes the next token of different requests")
    return figure
