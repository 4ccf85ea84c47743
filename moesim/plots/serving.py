"""Figures of served workloads: latency and goodput by load, requests and slots over time, capacity."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from moesim.core.colours import BLACK, GREY, ORANGE, SKY, VERMILION
from moesim.core.units import NS_PER_S
from moesim.errors import ConfigError
from moesim.hardware import weakest
from moesim.metrics.serving import GREW
from moesim.plots.bars import Words, axis_of, caption_of, draw_means, means_of, metric_name, value_texts
from moesim.plots.captions import caption, label_below, not_drawn, not_shown, not_shown_sentences, repeats_sentence
from moesim.plots.lines import setting_figure, shown_in, with_values
from moesim.plots.result_rows import WORDS, policies_of, prepared, summarised, varying
from moesim.plots.style import (
    COLUMN,
    SMALL,
    Drawing,
    add_corner,
    alike,
    capital,
    kind,
    legend_above,
    looks_of,
    need,
    panel_title,
    sentence,
    swatch,
    text_width,
    whole_numbers,
    width_for,
)
from moesim.serving.requests import RequestRecord
from moesim.serving.steps import Served

LOADS: Final = ("rate", "closed")
"""Settings that say how much is asked of a server, in the order in which one is taken for the axis."""
_POWER: Final = "power"
_KNEE: Final[Any] = {
    "linestyle": "none", "marker": "o", "markersize": 10, "markerfacecolor": "none", "markeredgecolor": BLACK
}  # fmt: skip
_KNEE_WORDS: Final = "ring: knee, where throughput over latency is largest"
_KNEES: Final = (
    "Ring, the knee: among the loads shown, requests served per second over the mean time of a request, Kleinrock's power, is "
    "largest there. At the first or last load shown there is none: the knee may lie beyond."
)


def load_of(frame: pd.DataFrame, x: str | None = None) -> str:
    """Choose the setting on the axis of load: the one that varies, else the one that is there."""
    if x is not None:
        return x
    there = [name for name in LOADS if name in frame and frame[name].notna().any()]
    swept = [name for name in there if name in varying(frame)]
    found = next(iter([*swept, *there]), None)
    if found is None:
        raise ConfigError("plot: expected runs of a served workload, got none; give it arrivals with a rate, or closed")
    return found


@kind("rows", "latency against load, with the knee")
def latency_by_load(
    frame: pd.DataFrame, metric: str = "ttft_p50_ns", x: str | None = None, panel: str | None = None
) -> Drawing:  # fmt: skip
    """Lines of a latency by policy against requests a second, or users."""
    rows = with_values(frame, "latency_by_load", [metric, "requests_per_s", "e2e_mean_ns"])
    rows = rows.assign(**{_POWER: rows["requests_per_s"].astype(float) / rows["e2e_mean_ns"].astype(float)})
    x, *panels = shown_in(rows, "latency_by_load", load_of(rows, x), panel)
    by = [*panels, "policy", x]
    data = summarised(rows, by, metric)
    words = Words(f"{capital(metric_name(metric))} by load", WORDS.get(x, x), axis_of(metric, float(data[metric].max()))[0])
    data, figure = setting_figure(data, rows, policies_of(rows), words, (x, *panels), metric)
    power = summarised(rows, by, _POWER)[[*by, _POWER]]
    data = data.merge(power, "left", by).assign(knee=False)
    for _, part in data.groupby([*panels, "policy"], sort=False, dropna=False):
        place = int(part.sort_values(x)[_POWER].to_numpy().argmax())
        if 0 < place < len(part) - 1:
            data.loc[part.sort_values(x).index[place], "knee"] = True
    scale = axis_of(metric, float(data[metric].max()))[1]
    parts = [part for _, part in data.groupby(panels, sort=False, dropna=False)] if panels else [data]
    for axes, part in zip(figure.axes, parts, strict=True):
        _logarithmic(axes, part[metric] / scale)
        knees = part[part["knee"]]
        axes.plot(knees[x], knees[metric] / scale, zorder=4, **_KNEE)
    grew = rows["notes"].astype(str).str.contains(GREW, regex=False) if "notes" in rows else pd.Series(False, rows.index)
    note = _KNEE_WORDS if data["knee"].any() else ""
    label_below(figure, rows, [x, *panels], note, *not_shown(frame), axis=x)
    endless = "Where the queue grew, requests came faster than they were served, and times depend on the run's length."
    sentences = _KNEES, endless if grew.any() else "", repeats_sentence(rows), not_drawn(rows), not_shown_sentences(frame)
    return Drawing(data, figure, caption(f"{words.title}: {words.y}.", rows, [x, *panels], *sentences))


def _logarithmic(axes: Axes, values: pd.Series) -> None:
    low, high = float(values[values > 0].min()), float(values.max())
    axes.set_yscale("log")
    axes.set_ylim(low / 1.5, high * 1.5)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


@kind("rows", "requests within the limits per second, by policy")
def goodput(frame: pd.DataFrame, x: str | None = None, panel: str | None = None) -> Drawing:
    """Bars of goodput by policy and load."""
    frame = prepared(frame, "goodput", ["goodput_per_s"], failed=True)
    if frame["goodput_per_s"].isna().all():
        raise ConfigError("plot goodput: expected runs of a served workload with limits, got none; give workload.limits")
    means = means_of(frame, "goodput", "goodput_per_s", load_of(frame, x), panel)
    figure = draw_means(means, value_texts(means.data, means.metric), "Goodput by policy")
    limits = sorted({str(one) for one in means.rows.get("limits", pd.Series(dtype=str)).dropna()})
    what = f"Requests per second that keep within all limits ({'; '.join(limits)}), by policy and load."
    return Drawing(means.data, figure, caption_of(means, what))


Runs = Mapping[str, Served]
_PARTS: Final = {"queue": ("arrival", "start", GREY, "waits"), "prompt": ("start", "first", ORANGE, "prompt"),
                 "answer": ("first", "end", SKY, "answer")}  # fmt: skip
_ROW: Final = 0.05  # inches
_FEWEST: Final = 14  # rows of a panel, for its title and ticks


@kind("requests", "what each request waited for: queue, prompt, answer")
def request_gantt(runs: Runs, first: int = 40, label: str = "") -> Drawing:
    """Gantt charts of the first requests by policy, one line a request."""
    if first < 1:
        raise ConfigError(f"plot request_gantt: first: expected at least 1 request, got {first}")
    shown = {policy: served.requests[:first] for policy, served in runs.items()}
    rows = [bar for policy, requests in shown.items() for one in requests for bar in _bars(policy, one, runs[policy].end_ns)]
    data = pd.DataFrame(rows, columns=["policy", "request", "part", "begin_s", "end_s"])
    heights = [_ROW * max(_FEWEST, len(requests)) for requests in shown.values()]
    figure = Figure(figsize=(width_for(COLUMN), 0.45 + sum(heights) + 0.2 * len(heights)), layout="constrained")
    grid = figure.subplots(len(runs), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for axes, (policy, requests) in zip(grid, shown.items(), strict=True):
        mine = data[data["policy"] == policy]
        for part, (_, _, colour, _) in _PARTS.items():
            bars = mine[mine["part"] == part]
            axes.barh(
                bars["request"], bars["end_s"] - bars["begin_s"], left=bars["begin_s"], height=0.8, color=colour, linewidth=0
            )
        again = mine[mine["part"] == "preempted"]
        axes.plot(again["begin_s"], again["request"], "x", color=VERMILION, markersize=3)
        numbers = [one.request for one in requests]
        axes.set_ylim(max(numbers, default=0) + 0.6, min(numbers, default=0) - 0.6)
        whole_numbers(axes.yaxis)
        axes.set_ylabel("request")
        panel_title(axes, policy, pad=2.5)
    grid[-1].set(xlabel="time (s)", xlim=(0, None))
    handles: list[Artist] = [swatch(colour, words, linewidth=0) for _, _, colour, words in _PARTS.values()]
    if (data["part"] == "preempted").any():
        handles.append(Line2D([], [], color=VERMILION, marker="x", linestyle="none", markersize=4, label="preempted"))
    legend_above(figure, handles, "Requests over time")
    more = max(len(served.requests) for served in runs.values()) > first
    cut = f"the first {first} requests" if more else ""
    add_corner(figure, label, [cut])
    what = "From arrival to the first step with a row of it a request waits; then its prompt is read until its first token."
    return Drawing(data, figure, " ".join([what, "One line a request.", sentence(cut), sentence(label)]))


def _bars(policy: str, one: RequestRecord, end_ns: int) -> list[tuple[str, int, str, float, float]]:
    found = []
    for part, (begins, ends, _, _) in _PARTS.items():
        begin, end = getattr(one, begins), getattr(one, ends)
        if begin >= 0 and not one.refused:
            found.append((policy, one.request, part, begin / NS_PER_S, (end if end >= 0 else end_ns) / NS_PER_S))
    if one.preempted and one.end >= 0:
        found.append((policy, one.request, "preempted", one.end / NS_PER_S, one.end / NS_PER_S))
    return found


@kind("requests", "requests that run and requests that wait, over time")
def slots_over_time(runs: Runs, label: str = "") -> Drawing:
    """Lines of the requests that have begun, and of those that wait, by policy."""
    panels: dict[str, tuple[str, str]] = {"running": ("start", "end"), "waiting": ("arrival", "start")}
    figure = Figure(figsize=(width_for(COLUMN), 2.6), layout="constrained")
    grid = figure.subplots(2, 1, sharex=True)
    rows = []
    for axes, (name, (begins, ends)) in zip(grid, panels.items(), strict=True):
        for policy, look in looks_of(list(runs)).items():
            times, counts = _level(runs[policy], begins, ends)
            axes.plot(times, counts, color=look.colour, linestyle=look.dash, linewidth=1.0, label=policy, drawstyle="steps-post")
            rows += [(policy, name, time, count) for time, count in zip(times, counts, strict=True)]
        axes.set_ylim(0, None)
        axes.set_ylabel(f"{name}\n(requests)")
        whole_numbers(axes.yaxis)
    grid[-1].set(xlabel="time (s)", xlim=(0, None))
    legend_above(figure, grid[0].get_legend_handles_labels()[0], "Requests in slots and in the queue")
    add_corner(figure, label)
    data = pd.DataFrame(rows, columns=["policy", "state", "time_s", "requests"])
    what = "Requests that have begun and have not ended (above), and that have arrived and have not begun (below), over time."
    return Drawing(data, figure, " ".join([what, sentence(label)]))


def _level(served: Served, begins: str, ends: str) -> tuple[list[float], list[int]]:
    """Count the requests between two of their times, at each time at which the count changes; shape (n,) each."""
    there = [one for one in served.requests if getattr(one, begins) >= 0 and not one.refused]
    up = [getattr(one, begins) for one in there]
    down = [found for one in there if (found := getattr(one, ends)) >= 0]
    change = pd.Series([1] * len(up) + [-1] * len(down), [*up, *down], dtype=np.int64).groupby(level=0).sum().cumsum()
    times = [0.0, *(change.index.to_numpy() / NS_PER_S).tolist(), served.end_ns / NS_PER_S]
    return times, [0, *change.tolist(), int(change.iloc[-1]) if len(change) else 0]


_COLUMNS: Final = ("policy", "unit", "capacity", "low", "high", "bound", "ttft_p50_s", "share", "asked", "label")


@kind("capacity", "the largest load within limits, and the wait there, by policy")
def capacity(frame: pd.DataFrame) -> Drawing:
    """Bars of the largest load within limits and of the time to the first token at that load."""
    need(frame, _COLUMNS, "capacity")
    policies, unit = list(dict.fromkeys(frame["policy"].astype(str))), str(frame["unit"].iloc[0])
    names = max(text_width(policy, 7.0) for policy in policies)
    figure = Figure(figsize=(width_for(max(COLUMN, names + 2.6)), 0.5 + 0.24 * len(policies)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    looks = looks_of(policies)
    loads, waits = (alike(frame[name].astype(float)) for name in ("capacity", "ttft_p50_s"))
    for place, row in enumerate(frame.to_dict("records")):
        look, value = looks[str(row["policy"])], float(row["capacity"])
        end = value if math.isnan(row["high"]) else max(value, row["high"])
        _bar(left, place, value, end, look, _capacity_text(row, loads[place]))
        if not math.isnan(row["low"]) and row["low"] < row["high"]:
            error: Any = [[value - row["low"]], [row["high"] - value]]
            left.errorbar(value, place, xerr=error, fmt="none", ecolor=GREY if look.colour == BLACK else BLACK, elinewidth=0.8,
                          capsize=1.5)  # fmt: skip
        if not math.isnan(row["ttft_p50_s"]):
            _bar(right, place, row["ttft_p50_s"], row["ttft_p50_s"], look, waits[place])
    left.set_yticks(range(len(policies)), policies)
    left.set_ylim(len(policies) - 0.5, -0.5)
    ends = frame[["capacity", "high"]].max(axis=1)
    for axes, most, words in ((left, ends.max(), unit), (right, frame["ttft_p50_s"].max(), "TTFT p50 there (s)")):
        axes.set_xlim(0, 1.45 * (most if most > 0 else 1.0))
        axes.set_xlabel(words)
        axes.grid(visible=True, axis="x")
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
    share = f"{100 * float(frame['share'].iloc[0]):g} %"
    legend_above(figure, [], f"Load with {share} of requests within limits")
    labels = [str(one) for one in frame["label"].dropna()]
    told = [
        *map(str, dict.fromkeys(frame["asked"].dropna())),
        *([f"simulated, weakest source: {weakest(labels)}"] if labels else []),
    ]
    add_corner(figure, " · ".join(told))
    what = (
        f"The largest load ({unit}) at which at least {share} of requests keep within all limits, with 90 % intervals over seeds"
    )
    return Drawing(
        frame, figure, f"{what}; right: the median time to the first token at that load. {' '.join(map(sentence, told))}"
    )


def _bar(axes: Axes, place: int, value: float, end: float, look: Any, text: str) -> None:
    axes.barh(place, value, 0.8, color=look.colour, hatch=look.hatch, edgecolor=BLACK, linewidth=0.5)
    axes.annotate(text, (end, place), (3, 0), textcoords="offset points", ha="left", va="center", fontsize=SMALL)


def _capacity_text(row: Mapping[Any, Any], load: str) -> str:
    bound = row["bound"] if isinstance(row["bound"], str) else ""
    return "none" if bound == "none" else f"{bound} {load}".strip()
