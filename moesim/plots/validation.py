"""Simulated against measured, printed and published numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from moesim.core.colours import BLACK, BLUE, FILL, GREEN, GREY, HATCH, LABEL, ORANGE, VERMILION, WHITE
from moesim.core.units import NS_PER_MS
from moesim.errors import ConfigError
from moesim.hardware import LABELS, weakest
from moesim.plots.result_rows import mean, policies_of
from moesim.plots.style import (
    COLUMN,
    TEXT,
    Drawing,
    add_corner,
    grid_of,
    is_narrow,
    kind,
    legend_above,
    legend_beside,
    looks_of,
    need,
    new_figure,
    panel_title,
    panels_of,
    sentence,
    series_look,
    short,
    styled,
    title,
    width_for,
)

_SIDES: Final = {"predicted": "simulated_ms", "measured": "measured_ms", "low": "low_ms", "high": "high_ms"}
_BAND: Final = 0.1
_MARGIN: Final = 1.25  # of a logarithmic axis
_LABEL: Final = LABEL | {
    "gpu_experts": "experts on the accelerator",
    "cpu_experts": "experts on the host",
    "waiting": "waiting, other things busy",
    "gap": "nothing busy",
}
_FILL: Final = FILL | {"waiting": WHITE, "gap": WHITE}
_HATCH: Final = HATCH | {"waiting": "oo", "gap": ""}
_VISIBLE: Final = 0.0005  # of a step


def _times(frame: pd.DataFrame) -> pd.DataFrame:
    need(frame, ("policy", "decode_step_ns_predicted", "decode_step_ns_measured"), "validation")
    what = "decode_step_ns" if frame["decode_step_ns_measured"].notna().any() else "makespan_ns"
    columns = {f"{what}_{side}": name for side, name in _SIDES.items()}
    need(frame, list(columns), "validation")
    rows = frame[frame[f"{what}_measured"].notna()]
    kept = [name for name in ("policy", "batch_size", "cache_ratio", "cache_budget_bytes") if name in rows]
    times = {name: rows[column].astype(float) / NS_PER_MS for column, name in columns.items()}
    return rows[kept].assign(figure=what, **times).reset_index(drop=True)


def _what(data: pd.DataFrame) -> str:
    return "decode step" if data["figure"].iloc[0] == "decode_step_ns" else "makespan"


@kind("validation", "simulated against measured times")
def validation(frame: pd.DataFrame) -> Drawing:
    """Measured against simulated times of the runs of a validation."""
    data = _times(frame)
    error = (data["simulated_ms"] / data["measured_ms"] - 1).abs()
    text = (
        f"Simulated against measured {_what(data)} of {len(data)} runs: marker, median of the replays; bar, shortest to longest; "
        f"grey, 10 % to either side. Median absolute error {100 * error.median():.1f} %, largest {100 * error.max():.1f} %. "
        f"{_about(frame)}."
    )
    return Drawing(data, scatter(frame, _about(frame)), text)


def _about(frame: pd.DataFrame) -> str:
    about = [name for name in ("model", "hardware", "trace") if name in frame]
    parts = [", ".join(sorted({str(v) for v in frame[name].dropna()})) for name in about]
    if "repeats" in frame:
        parts.append(f"{' or '.join(str(n) for n in sorted(set(frame['repeats'])))} replays a run")
    if "source_label" in frame and frame["source_label"].notna().any():
        parts.append(f"measured; simulated, weakest source: {weakest(str(v) for v in frame['source_label'].dropna())}")
    return " · ".join(parts)


@styled
def scatter(frame: pd.DataFrame, corner: str = "") -> Figure:
    """Measured against predicted decode step, both logarithmic."""
    data = _times(frame)
    ms = data[list(_SIDES.values())]
    least, most = float(ms.min().min()) / _MARGIN, float(ms.max().max()) * _MARGIN
    ends = [least, most]
    below, above = ([(1 + sign * _BAND) * end for end in ends] for sign in (-1, 1))
    names = policies_of(data)
    figure, axes = new_figure(COLUMN, 3.45, "both", square=True)
    handles: list[Artist] = []
    for name, look in looks_of(names).items():
        x, y, low, high = (data.loc[data["policy"] == name, column] for column in _SIDES.values())
        style: dict[str, Any] = {
            "marker": look.marker, "color": look.colour, "markersize": 4.2, "markeredgecolor": BLACK, "markeredgewidth": 0.4
        }  # fmt: skip
        axes.errorbar(x, y, yerr=[y - low, high - y], linestyle="none", elinewidth=0.7, capsize=1.5, **style)
        handles.append(Line2D([], [], linestyle="none", label=name, **style))
    handles.append(axes.fill_between(ends, below, above, color=GREY, alpha=0.25, linewidth=0, label="± 10 %"))
    axes.plot(ends, ends, color=BLACK, linewidth=0.8)
    what = _what(data)
    axes.set(
        xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel=f"simulated {what} (ms)", ylabel=f"measured {what} (ms)",
        aspect="equal",
    )  # fmt: skip
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(FixedLocator(_ticks(least, most)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    legend_above(figure, handles, f"Measured against simulated {what}")
    add_corner(figure, corner, ["marker: median of the replays · bar: smallest to largest"])
    return figure


def _ticks(least: float, most: float) -> list[float]:
    powers = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
    found = [digit * 10.0**power for power in powers for digit in (1, 2, 5) if least <= digit * 10.0**power <= most]
    return found if len(found) <= 8 else [tick for tick in found if math.log10(tick) % 1 == 0]


@styled
def residual_bars(frame: pd.DataFrame, corner: str = "") -> Figure:
    """Difference of measured and predicted mean decode step by cause, over the measured one."""
    causes = [column.removesuffix("_share") for column in map(str, frame) if column.endswith("_share")]
    need(frame, ("policy", "difference_ns", "measured_ns", *(f"{cause}_share" for cause in causes)), "residual_bars")
    names = policies_of(frame)
    figure, axes = new_figure(TEXT, 0.5 + 0.26 * max(3, len(names)), "x")
    axes.axvline(0, color=BLACK, linewidth=0.8)
    means = {name: {cause: mean(frame[frame["policy"] == name], f"{cause}_share") or 0.0 for cause in causes} for name in names}
    seen = [cause for cause in causes if max(abs(parts[cause]) for parts in means.values()) > _VISIBLE]
    for place, name in enumerate(names):
        reach = {True: 0.0, False: 0.0}
        for cause in seen:
            share = 100 * means[name][cause]
            side = share > 0
            axes.barh(
                place, share, 0.7, reach[side], color=_FILL[cause], hatch=_HATCH[cause], edgecolor=BLACK, linewidth=0.5,
                label=None if place else _LABEL[cause],
            )  # fmt: skip
            reach[side] += share
        runs = frame[frame["policy"] == name]
        whole = 100 * runs["difference_ns"].astype(float) / runs["measured_ns"].astype(float)
        axes.plot(whole, [place] * len(whole), "o", color=BLACK, markersize=3, markeredgecolor=WHITE, markeredgewidth=0.4,
                  label=None if place else "whole difference of a run")  # fmt: skip
    axes.set_yticks(range(len(names)), names)
    axes.set(ylim=(len(names) - 0.4, -0.6), xlabel="measured less simulated, % of the measured decode step")
    title(axes, "What the simulation misses")
    legend_beside(axes, [_LABEL[cause] for cause in causes])
    add_corner(figure, corner, ["bar: mean over the policy's runs · right of 0: longer than simulated"])
    return figure


NAMES: Final = {"dali": "DALI", "hybrimoe": "HybriMoE", "prescope": "PreScope", "daop": "DAOP", "odmoe": "OD-MoE"}
_PRINTED_BAND: Final = 1.35
_PRINTED_MARGIN: Final = 1.6


def printed_data(frame: pd.DataFrame) -> pd.DataFrame:
    """Return printed and simulated numbers that runs answer."""
    rows = _answered(frame)
    gain = rows["kind"] == "gain"
    derived = rows["identified"] if "identified" in rows else pd.Series(float("nan"), rows.index)
    printed, simulated, identified = (one.astype(float) for one in (rows["published"], rows["simulated"], derived))
    over = rows["over"].fillna("")
    return pd.DataFrame(
        {
            "paper": rows["paper"],
            "figure": rows["figure"],
            "what": rows["system"] + over.where(over == "", " over " + over),
            "printed": printed.where(~gain, 1 + printed / 100),
            "simulated": simulated.where(~gain, 1 + simulated / 100),
            "identified": identified.where(~gain, 1 + identified / 100),
            "met": rows["consistent"] != "no" if "consistent" in rows else True,
        }
    ).reset_index(drop=True)


def _answered(frame: pd.DataFrame) -> pd.DataFrame:
    need(frame, ("paper", "figure", "kind", "published", "simulated", "source"), "printed")
    return frame[frame["kind"].isin(("value", "speedup", "gain")) & (frame["source"] == "runs") & frame["simulated"].notna()]


@kind("papers", "printed against simulated numbers of papers")
def printed(frame: pd.DataFrame, label: str = "") -> Drawing:
    """Simulated over printed numbers of all papers."""
    data = printed_data(frame)
    if data.empty:
        raise ConfigError(
            "plot printed: expected a printed number that runs answer, got none; name a whole paper to `moesim papers`"
        )
    known = data[data["identified"].notna()]
    panels = [("by the derived profile, nothing fitted", data["simulated"], data.assign(met=True))]
    panels += [("identified, the row's table left out", known["identified"], known)] if len(known) else []
    shown = data[["printed", "simulated", "identified"]]
    ends = [float(shown.min().min()) / _PRINTED_MARGIN, float(shown.max().max()) * _PRINTED_MARGIN]
    natural = COLUMN if len(panels) == 1 else TEXT
    width = width_for(natural)
    n_columns = 1 if is_narrow(width) else len(panels)
    n_rows = len(panels) // n_columns
    figure = Figure(figsize=(width, 3.2 * n_rows**2 * min(1.0, width / natural)), layout="constrained")
    names = [str(name) for name in dict.fromkeys(data["paper"])]
    handles: list[Artist] = [
        Line2D([], [], linestyle="none", markeredgecolor=BLACK, label=NAMES.get(name, name), **_printed_style(i))
        for i, name in enumerate(names)
    ]
    grid = figure.subplots(n_rows, n_columns, sharey=True, squeeze=False).ravel()
    for axes, (words, values, rows) in zip(grid, panels, strict=True):
        band = _printed_panel(axes, ends)
        for i, name in enumerate(names):
            for met, edge, face in ((True, BLACK, series_look(i).colour), (False, series_look(i).colour, WHITE)):
                mine = (rows["paper"] == name) & (rows["met"] == met)
                if mine.any():
                    style = {"markeredgecolor": edge, "markerfacecolor": face, "markeredgewidth": 0.4 if met else 0.9}
                    axes.plot(rows["printed"][mine], values[mine], linestyle="none", **_printed_style(i) | style)
        if len(panels) > 1:
            panel_title(axes, words)
    for axes in grid[::n_columns]:
        axes.set_ylabel("simulated")
    if not known["met"].all():
        style = {"marker": "o", "markerfacecolor": WHITE, "markeredgecolor": BLACK, "markeredgewidth": 0.9}
        handles.append(Line2D([], [], linestyle="none", label="inconsistent with its paper", **_printed_style(0) | style))
    legend_above(figure, [*handles, band], "Simulated against printed numbers")
    source = _printed_source(_answered(frame))
    add_corner(figure, label or source, ["speeds, ratios, times and shares, each in its unit"])
    return Drawing(data, figure, _printed_caption(_answered(frame), data, label, source))


def _printed_source(frame: pd.DataFrame) -> str:
    """Name the weakest label of the numbers that were used."""
    found = {one for text in frame.get("label", pd.Series(dtype=str)).dropna() for one in str(text).split(", ")}
    known = [one for one in found if one in LABELS]
    return f"simulated, weakest source: {weakest(known)}" if known else "simulated"


def _printed_caption(rows: pd.DataFrame, data: pd.DataFrame, label: str, source: str) -> str:
    refs = (rows["ref"] if "ref" in rows else rows["figure"]).fillna(rows["figure"]).astype(str)
    places = {str(name): ", ".join(dict.fromkeys(refs[part.index])) for name, part in rows.groupby("paper", sort=False)}
    papers = "; ".join(f"{NAMES.get(name, name)}: {where}" for name, where in places.items())
    sentences = [f"Simulated against printed numbers of papers: {len(data)} rows that runs answer, gains as factors."]
    for name, text in (("simulated", "Derived"), ("identified", "Identified, the row's table left out")):
        off = (data[name] / data["printed"]).dropna()
        if len(off):
            factor = float(np.exp(np.median(np.abs(np.log(off)))))
            within = int(((off <= _PRINTED_BAND) & (off >= 1 / _PRINTED_BAND)).sum())
            sentences.append(
                f"{text}: half of {len(off)} are within a factor of {factor:.3g}, {within} within {_PRINTED_BAND:g} (grey)."
            )
    if not data["met"].all():
        sentences.append(f"Hollow: {int((~data['met']).sum())} rows that no constants reconcile with the rest of their paper.")
    sentences += [sentence(label), sentence(source), f"Printed in {papers}."]
    return " ".join(text for text in sentences if text)


def _printed_style(index: int) -> dict[str, Any]:
    one = series_look(index)
    return {"marker": one.marker, "color": one.colour, "markersize": 4.2, "markeredgewidth": 0.4, "clip_on": False}


def _printed_panel(axes: Axes, ends: list[float]) -> Artist:
    grid_of(axes, "both")
    below, above = [end / _PRINTED_BAND for end in ends], [end * _PRINTED_BAND for end in ends]
    band = axes.fill_between(ends, below, above, color=GREY, alpha=0.25, linewidth=0, label=f"within {_PRINTED_BAND:g}")
    axes.plot(ends, ends, color=BLACK, linewidth=0.6)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="printed", facecolor=WHITE, aspect="equal")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator())
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    return band


_PUBLIC_BAND: Final = 1.1
_WIDE: Final = 1.3
_DARK: Final = "#CCCCCC"
_LIGHT: Final = "#EEEEEE"
_TICKS: Final = (0.5, 0.7, 1.0, 1.5, 2.0, 3.0)
_LOOK: Final = (
    ("predicted", False, "o", BLUE, "well described"),
    ("predicted", True, "D", VERMILION, "thinly described"),
    ("calibration", None, "s", GREY, "calibration (not a prediction)"),
)


@styled
def public(frame: pd.DataFrame) -> Figure:
    """Draw predicted against measured tokens per second, a point a check; ratios by name."""
    columns = ("check", "measured", "measured_low", "measured_high", "predicted", "status", "loose", "label")
    need(frame, columns, "public")
    frame = frame[frame["predicted"].notna()]
    need(frame, ("check",), "public")
    figure = Figure(figsize=(9.6, 1.6 + 0.16 * len(frame)), layout="constrained")
    speeds, ratios = figure.subplots(1, 2, width_ratios=(1.25, 1))
    _speeds(speeds, frame)
    _ratios(ratios, frame)
    legend_beside(ratios, [words for *_, words in _LOOK])
    _source(figure, frame, "names are checks of docs/background/validation-public.md")
    return figure


def _source(figure: Figure, frame: pd.DataFrame, note: str) -> None:
    add_corner(figure, f"simulated, weakest source: {weakest(str(label) for label in frame['label'] if label)}", [note])


def _groups(frame: pd.DataFrame) -> Iterator[tuple[pd.DataFrame, dict[str, Any]]]:
    for status, loose, marker, colour, words in _LOOK:
        rows = frame[(frame["status"] == status) & (True if loose is None else frame["loose"] == loose)]
        if not rows.empty:
            yield rows, {
                "fmt": marker, "color": colour, "markersize": 4.5, "markeredgecolor": BLACK, "markeredgewidth": 0.4,
                "elinewidth": 0.8, "capsize": 2, "label": words,
            }  # fmt: skip


def _speeds(axes: Axes, frame: pd.DataFrame) -> None:
    both = pd.concat([frame["measured_low"], frame["measured_high"], frame["predicted"]]).astype(float)
    ends = np.array([both.min() / 1.5, both.max() * 1.5])
    axes.fill_between(ends, ends / _WIDE, ends * _WIDE, color=_LIGHT, linewidth=0)
    axes.fill_between(ends, ends / _PUBLIC_BAND, ends * _PUBLIC_BAND, color=_DARK, linewidth=0)
    axes.plot(ends, ends, color=BLACK, linewidth=0.8)
    for rows, look in _groups(frame):
        measured, predicted = rows["measured"].astype(float), rows["predicted"].astype(float)
        bars = [measured - rows["measured_low"].astype(float), rows["measured_high"].astype(float) - measured]
        axes.errorbar(measured, predicted, xerr=bars, **look)
    axes.set(
        xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal", xlabel="measured (tokens/s)",
        ylabel="predicted (tokens/s)", title="Public measurements, derived profiles",
    )  # fmt: skip
    for axis in (axes.xaxis, axes.yaxis):
        _plain_numbers(axis)
    grid_of(axes, "both")


def _plain_numbers(axis: Axis) -> None:
    axis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    axis.set_minor_formatter(NullFormatter())


def _ratios(axes: Axes, frame: pd.DataFrame) -> None:
    places = {str(name): i for i, name in enumerate(frame["check"])}
    axes.axvspan(1 / _WIDE, _WIDE, color=_LIGHT, linewidth=0, label=f"within a factor of {_WIDE:g}")
    axes.axvspan(1 / _PUBLIC_BAND, _PUBLIC_BAND, color=_DARK, linewidth=0, label="within 10 %")
    axes.axvline(1, color=BLACK, linewidth=0.8)
    for rows, look in _groups(frame):
        middle, predicted = rows["measured"].astype(float), rows["predicted"].astype(float)
        ratio = predicted / middle
        bars = [ratio - predicted / rows["measured_high"].astype(float), predicted / rows["measured_low"].astype(float) - ratio]
        axes.errorbar(ratio, [places[str(name)] for name in rows["check"]], xerr=bars, **look)
    axes.set(xscale="log", xlabel="predicted / measured")
    axes.xaxis.set_major_locator(FixedLocator(_TICKS))
    _plain_numbers(axes.xaxis)
    axes.set_yticks(list(places.values()), list(places), fontsize=7)
    axes.set_ylim(len(places) - 0.4, -0.6)
    grid_of(axes, "both")


_COLOURS: Final = (BLUE, VERMILION, GREEN, ORANGE, BLACK)
_SIDE_BY_SIDE: Final = 3
_FEWEST: Final = 3  # rows of a machine that make a panel

_SYMBOLS: Final = (
    Line2D([], [], color=BLACK, marker="o", linestyle="", markersize=3, label="measured, experts of layers on the CPU"),
    Line2D([], [], color=BLACK, marker="s", linestyle="", markersize=3, label="measured, whole layers on the CPU"),
    Line2D([], [], color=BLACK, linewidth=1.0, label="predicted"),
    Line2D([], [], color=BLACK, linewidth=1.0, linestyle=":", label="predicted, whole layers"),
)


@styled
def sweeps(frame: pd.DataFrame) -> Figure:
    """Measured and predicted speed over the share of layers whose experts are on the CPU."""
    done = frame[frame["status"] == "predicted"]
    machines = [name for name, rows in done.groupby("machine", sort=False) if len(rows) >= _FEWEST]
    done = done[done["machine"].isin(machines)]
    need(done, ("machine", "measured", "predicted", "layers_on_cpu", "layers"), "sweeps")
    figure, panels = panels_of(len(machines), _SIDE_BY_SIDE, 9.6, 0.6 - 2.3 * (-len(machines) // _SIDE_BY_SIDE))
    for axes, machine in zip(panels, machines, strict=True):
        _sweep_panel(axes, done[done["machine"] == machine], str(machine))
    figure.legend(handles=_SYMBOLS, loc="outside upper right", ncols=len(_SYMBOLS), fontsize=6.5)
    _source(figure, done, "no speed of a machine is in its profile; machines with fewer than three settings are not drawn")
    return figure


def _sweep_panel(axes: Axes, rows: pd.DataFrame, machine: str) -> None:
    handles = []
    for colour, (curve, line) in zip(_COLOURS, rows.groupby("curve", sort=False), strict=False):
        whole_layers = line["setting"].str.contains("-ngl (?!99)") | (line["place"] == "cpu")
        for whole, some in line.groupby(whole_layers):
            some = some.assign(share=some["layers_on_cpu"].astype(float) / some["layers"].astype(float))
            again = some["share"].duplicated()  # the same layers with other threads or another context: not on the line
            first = some[~again].sort_values("share")
            style: dict[str, Any] = {"color": colour, "linewidth": 1.0, "markersize": 9}
            single = "_" if len(first) == 1 else ""
            axes.plot(first["share"], first["predicted"].astype(float), ls=":" if whole else "-", marker=single, **style)
            axes.plot(some["share"][again], some["predicted"][again].astype(float), ls="", marker="_", **style)
            axes.plot(some["share"], some["measured"].astype(float), "s" if whole else "o", color=colour, markersize=3)
        handles.append(Line2D([], [], color=colour, label=str(curve).partition(" (")[0]))
    axes.margins(y=0.12)
    axes.set(title=machine, ylim=(0, None), xlabel="share of layers with experts on the CPU", ylabel="tokens/s")
    grid_of(axes, "both")
    axes.legend(handles=handles, fontsize=5.5)
