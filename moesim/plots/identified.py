"""Observed and predicted speeds of an identified machine."""

from __future__ import annotations

from typing import Any, Final

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from moesim.core.colours import BLACK, BLUE, GREY, ORANGE, SKY, VERMILION, WHITE
from moesim.plots.style import TEXT, add_corner, legend_above, need, panel_title, panels_of, short, styled, swatch

OBSERVED: Final = ("panel", "unit", "x", "setting", "observed", "predicted", "low", "high", "status")
_MOST: Final = 9
LOOK: Final = {
    "used": ("o", BLUE, "identified from"),
    "check": ("o", WHITE, "check, not used"),
    "set aside": ("X", VERMILION, "no constants explain it"),
    "beyond memory": ("v", WHITE, "beyond the GPU's memory"),
}


@styled
def identified(frame: pd.DataFrame, name: str) -> Figure:
    """Measured and predicted over the setting, a panel for each model, bits and kind of setting."""
    need(frame, OBSERVED, "identified")
    panels = list(dict.fromkeys(frame["panel"]))
    shown = panels[:_MOST]
    n_columns = min(3, len(shown))
    figure, grid = panels_of(len(shown), n_columns, 3.1 * n_columns, 0.4 - 2.3 * (-len(shown) // n_columns))
    labels: dict[str, Artist] = {}
    for axes, panel in zip(grid, shown, strict=True):
        _panel(axes, frame[frame["panel"] == panel].sort_values("x", kind="stable"), labels)
        axes.set_title(panel)
    figure.legend(list(labels.values()), list(labels), loc="outside upper left", ncols=3)
    left = [f"{len(panels) - len(shown)} more panels are not drawn"] if len(panels) > len(shown) else []
    add_corner(figure, f"{name}: identified from observed speeds, so no prediction where marks are filled", left)
    return figure


def _panel(axes: Axes, rows: pd.DataFrame, labels: dict[str, Artist]) -> None:
    x = rows["x"].astype(float)
    if len(rows) > 1:
        labels["90 % interval"] = axes.fill_between(x, rows["low"], rows["high"], color=SKY, alpha=0.35, linewidth=0)
    (labels["predicted"],) = axes.plot(x, rows["predicted"], color=BLACK, linewidth=0.9, marker="_", markersize=5)
    _marks(axes, rows, ("x", "observed"), labels)
    axes.set(ylim=(0, None), ylabel=str(rows["unit"].iloc[0]), xlabel=str(rows["setting"].iloc[0]))


def _marks(axes: Axes, rows: pd.DataFrame, names: tuple[str, str], labels: dict[str, Artist]) -> None:
    for status, (marker, colour, words) in LOOK.items():
        these = rows[rows["status"] == status]
        if len(these):
            x, y = (these[name].astype(float) for name in names)
            style: Any = {"marker": marker, "s": 18, "facecolor": colour, "edgecolor": BLACK, "linewidth": 0.6, "zorder": 3}
            labels[words] = axes.scatter(x, y, label=f"measured, {words}", **style)


CURVE: Final = ("n_cpu_moe", "context_tokens", "ubatch", "tokens_per_s", "low_tokens_per_s", "high_tokens_per_s", "fits")
MEASURED: Final = ("n_cpu_moe", "context_tokens", "tokens_per_s", "status")
_SHADES: Final = ("#CCCCCC", "#DDDDDD", "#EEEEEE")
"""Of what is beyond memory at the least ``-ub``, and at larger ones."""
_LARGER: Final = "if memory were larger"
_MARGIN: Final = 1.5  # of the axis, in layers, so that no marker is cut


@styled
def calibrated_curve(points: pd.DataFrame, measured: pd.DataFrame, corner: str) -> Figure:
    """Draw `points` (`CURVE`) with what was `measured` (`MEASURED`)."""
    need(points, CURVE, "curve")
    contexts, ubatches = (sorted(points[name].unique().tolist()) for name in ("context_tokens", "ubatch"))
    figure = Figure(figsize=(TEXT, 2.1), layout="constrained")
    panels = figure.subplots(1, len(contexts), sharey=True, squeeze=False)[0]
    handles: dict[str, Artist] = {}
    for axes, context in zip(panels, contexts, strict=True):
        rows = points[points["context_tokens"] == context].sort_values(["ubatch", "n_cpu_moe"])
        _cliffs(axes, rows, ubatches, handles)
        line = rows.drop_duplicates("n_cpu_moe").sort_values("n_cpu_moe")  # speeds do not depend on -ub
        handles["90 % interval"] = axes.fill_between(
            line["n_cpu_moe"], line["low_tokens_per_s"], line["high_tokens_per_s"], color=SKY, alpha=0.4, linewidth=0,
            label="90 % interval",
        )  # fmt: skip
        fitting = rows[(rows["ubatch"] == ubatches[0]) & rows["fits"]]
        _predicted(axes, line, fitting["n_cpu_moe"].min(), handles)
        _marks(axes, measured[measured["context_tokens"] == context], ("n_cpu_moe", "tokens_per_s"), handles)
        _best(axes, fitting, ubatches[0], handles)
        panel_title(axes, f"{context:,} tokens")
        axes.set_xlabel("--n-cpu-moe")
        axes.set_xlim(points["n_cpu_moe"].min() - _MARGIN, points["n_cpu_moe"].max() + _MARGIN)
    panels[0].set_yscale("log")  # what does not fit may be many times as fast as what does
    ends = pd.concat([points["low_tokens_per_s"], points["high_tokens_per_s"], measured["tokens_per_s"].astype(float)])
    panels[0].set_ylim(0.8 * ends.min(), 1.2 * ends.max())
    panels[0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panels[0].yaxis.set_minor_locator(NullLocator())
    panels[0].yaxis.set_major_formatter(lambda value, _: short(value))
    panels[0].set_ylabel("decode speed\n(tokens/s, whole batch)")
    legend_above(figure, list(handles.values()), "Speed over layers with experts on the CPU, by context")
    notes = ["speed when the context is full; beyond memory loading fails or speed falls 2 to 5 times"]
    add_corner(figure, corner, notes)
    return figure


def _predicted(axes: Axes, line: pd.DataFrame, first: float, handles: dict[str, Artist]) -> None:
    fits = line["n_cpu_moe"] >= first
    for rows, dash, words in ((line[fits], "-", "predicted"), (line[~fits | (line["n_cpu_moe"] == first)], ":", _LARGER)):
        if len(rows):
            (handles[words],) = axes.plot(
                rows["n_cpu_moe"], rows["tokens_per_s"], color=BLUE, linewidth=1.2, linestyle=dash, label=words
            )


def _cliffs(axes: Axes, rows: pd.DataFrame, ubatches: list[int], handles: dict[str, Artist]) -> None:
    edges = {}
    for ubatch in ubatches:
        here = rows[rows["ubatch"] == ubatch]
        fitting = here.loc[here["fits"], "n_cpu_moe"]
        edges[ubatch] = fitting.min() - 0.5 if len(fitting) else rows["n_cpu_moe"].max() + _MARGIN
    for ubatch, shade in reversed(list(zip(ubatches, _SHADES, strict=False))):
        axes.axvspan(rows["n_cpu_moe"].min() - _MARGIN, edges[ubatch], color=shade, linewidth=0, zorder=0.5)
    for ubatch, shade in zip(ubatches, _SHADES, strict=False):
        words = f"beyond memory at -ub {ubatch}"
        handles[words] = swatch(shade, words, linewidth=0.4, edge=GREY)


def _best(axes: Axes, fitting: pd.DataFrame, ubatch: int, handles: dict[str, Artist]) -> None:
    if fitting.empty:
        axes.text(0.97, 0.95, f"nothing fits at -ub {ubatch}", transform=axes.transAxes, ha="right", va="top")
        return
    one = fitting.sort_values("tokens_per_s", kind="stable").iloc[-1]
    n, speed = int(one["n_cpu_moe"]), float(one["tokens_per_s"])
    words = f"best at -ub {ubatch}"
    handles[words] = axes.scatter(
        [n], [speed], marker="*", s=70, facecolor=ORANGE, edgecolor=BLACK, linewidth=0.6, zorder=4, label=words
    )
    low, high = (short(float(one[f"{end}_tokens_per_s"])) for end in ("low", "high"))
    text = f"--n-cpu-moe {n}\n{short(speed)} tokens/s\n({low} to {high})"
    axes.text(0.97, 0.95, text, transform=axes.transAxes, ha="right", va="top")
