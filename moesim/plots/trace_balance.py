"""Figures of balance: popularity, and how the tokens of a prompt spread."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from matplotlib.figure import Figure

from moesim.core.colours import BLACK, BLUE, GREY
from moesim.plots.style import new_figure
from moesim.plots.trace_kit import drawn, line, source, whole_numbers


@drawn("balance", "popularity")
def popularity(report: Mapping[str, Any], found: Mapping[str, Any]) -> Figure:
    """Share of the activations by rank of popularity, with the band that a uniform router gives."""
    n_experts = report["shape"]["n_experts"]
    ranks = range(1, n_experts + 1)
    figure, axes = new_figure(5.6, 3.6)
    null = found["null_by_rank"]
    low, high, mean = ([n_experts * v for v in null[name]] for name in ("low", "high", "mean"))
    width = max(h - lo for h, lo in zip(high, low, strict=True)) / 2
    band = f"uniform router, 95 % of draws (± {width:.2g})"
    axes.fill_between(ranks, low, high, color=GREY, alpha=0.6, linewidth=0, label=band)
    axes.plot(ranks, mean, color=BLACK, linestyle=":", linewidth=1, label="uniform router, mean")
    line(axes, ranks, [n_experts * v for v in found["by_rank"]], 0, "this trace")
    axes.set_ylim(bottom=0)
    axes.set_xlim(0.5, n_experts + 0.5)
    whole_numbers(axes.xaxis)
    axes.set_xlabel("expert, by popularity in its layer (1: most used)")
    axes.set_ylabel("share of activations / uniform share")
    axes.set_title("Popularity of experts")
    axes.legend()
    source(figure, report, "mean over layers; the uniform router has as many tokens, each layer's experts sorted likewise")
    return figure


@drawn("balance", "prefill_load")
def prefill_load(report: Mapping[str, Any], found: Mapping[str, Any]) -> Figure:
    """Cumulative share of the tokens of a prompt that go to the busiest experts of a layer."""
    n_experts = report["shape"]["n_experts"]
    x = [100 * i / n_experts for i in range(n_experts + 1)]
    figure, axes = new_figure(5.2, 3.8)
    null = [0.0, *accumulate(100 * v for v in found["null_by_rank"])]
    ours = [0.0, *accumulate(100 * v for v in found["by_rank"])]
    axes.plot([0, 100], [0, 100], color=GREY, linestyle=":", linewidth=1.2, label="all alike")
    axes.plot(x, null, color=BLACK, linestyle="--", linewidth=1.2, label="uniform router")
    line(axes, x, ours, 0, "this trace", color=BLUE, linestyle="-")
    axes.set_xlim(0, 100)
    axes.set_ylim(0, 103)
    axes.set_xlabel("busiest experts of a layer (% of them)")
    axes.set_ylabel("tokens x experts that they serve (%)")
    axes.set_title("Load of experts in prefill")
    axes.legend(loc="lower right")
    note = f"mean over layers and {found['n_prompts']} prompts of {round(found['mean_tokens'])} tokens on average"
    largest = f"largest / mean load {found['max_over_mean']:.2f} (uniform router {found['null_max_over_mean']:.2f})"
    source(
        figure,
        {
            **report,
            "phase": "prefill",
            "n_rows": round(found["n_prompts"] * found["mean_tokens"]),
            "n_requests": found["n_prompts"],
        },
        note,
        largest,
    )
    return figure
