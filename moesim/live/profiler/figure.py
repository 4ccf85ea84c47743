"""Measured times and fitted forms: a panel each for experts, copies, dense parts, pairs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from moesim.core.colours import BLACK, BLUE, GREY, ORANGE, VERMILION
from moesim.core.units import format_memory
from moesim.errors import InputError
from moesim.live.profiler.fits import NOT_CURVES, Fit, curves, describe, fitted_us, medians, pair_rates
from moesim.plots.style import add_corner, marked_line, short, styled

_WIDE: Final = 3  # panels in a row
_FORM: Final = {  # name, colour, dash, width: told apart in grey by dash and width
    "linear": ("linear", ORANGE, (0, (1, 1.2)), 2.2),
    "flat_linear": ("flat, then linear", BLUE, "-", 1.2),
    "roofline": ("roofline", VERMILION, (0, (5, 2)), 2.0),
}
_EXPERTS: Final = ("expert", "expert_first")
_COPIES: Final = {"copy": "Copies", "disk_read": "Disk", "disk_write": "Disk", "activation": "Hidden states"}
_SIZE: Final = {"rows": "rows", "bytes": "size (bytes)", "tokens": "tokens whose keys and values are read"}
_CHARACTERS: Final = 34  # of a title in the width of a panel
_CURVE: Final = ["kind", "device", "subject", "bits", "threads", "variant"]
_BARS: Final = 6  # in a panel
_GAPS: Final = {
    "resident": "a layer, experts resident",
    "host": "a layer, experts on the host",
    "between": "between two experts",
    "between host": "between two experts of the host",
    "fetched": "between two copies",
}

Panel = Callable[[Axes], None]


@styled
def draw(samples: pd.DataFrame, fits: pd.DataFrame) -> Figure:
    """Draw all curves of a measurement."""
    table = medians(samples)
    known = table[table["kind"] != "runtime"]
    sizes = known.groupby(_CURVE, dropna=False)["size"].transform("nunique")
    lines = known[sizes > 1]  # one point is no curve; the table of medians has it
    panels = [*_expert_panels(lines, fits), *_copy_panels(lines), *_part_panels(lines), *_pair_panels(samples)]
    panels += _runtime_panels(table[table["kind"] == "runtime"])
    if not panels:
        raise InputError("samples: expected experts, copies, parts of a layer or pairs to draw, got none; measure some")
    columns = min(_WIDE, len(panels))
    n_rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(3.6 * columns + 0.2, 3.15 * n_rows + 0.7), layout=ConstrainedLayoutEngine(h_pad=0.12, w_pad=0.08))
    for place, panel in enumerate(panels):
        panel(figure.add_subplot(n_rows, columns, place + 1))
    _legend_of_forms(figure, lines)
    add_corner(figure, f"{len(samples):,} samples; points are medians, bars reach from quartile to quartile")
    return figure


def _legend_of_forms(figure: Figure, table: pd.DataFrame) -> None:
    if table["kind"].isin(_EXPERTS).any():
        axes = figure.axes[0]
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=len(labels))


def _expert_panels(table: pd.DataFrame, fits: pd.DataFrame) -> Iterator[Panel]:
    for key, points in curves(table[table["kind"].isin(_EXPERTS)]):
        if key["kind"] == "expert" and len(points) == 1:
            continue  # one row of another size: its rate is in the profile
        chosen = fits["note"].isna() | (fits["note"] == "")  # an empty cell of a CSV file comes back as a missing number
        for name, value in key.items():
            chosen &= fits[name].isna() | (fits[name] == "") if pd.isna(value) or value == "" else fits[name] == value
        yield partial(_expert, key=key, points=points, forms=fits[chosen])


def _expert(axes: Axes, key: Mapping[str, Any], points: pd.DataFrame, forms: pd.DataFrame) -> None:
    sizes, times = points["size"].to_numpy(float), points["median_us"].to_numpy(float)
    fine = np.unique(np.concatenate([sizes, np.geomspace(sizes[0], sizes[-1], 200)]))
    best = ""
    for form, (name, colour, dash, width) in _FORM.items():
        for row in forms[forms["form"] == form].to_dict("records"):
            fit = Fit(row["base_us"], row["slope_us"], row["knee"])
            axes.plot(fine, fitted_us(form, fit, fine), color=colour, linestyle=dash, linewidth=width, label=name, zorder=2)
            if row["best"]:
                best = f"best: {name}, off by at most {100 * row['worst_relative']:.2g} % (at {row['worst_relative_at']:g})"
    look: dict[str, Any] = {"color": BLACK, "markersize": 3.5, "capsize": 2, "linewidth": 1}
    axes.errorbar(sizes, times, yerr=_quartiles(points), fmt="o", label="measured", zorder=3, **look)
    _title(axes, ("first of a group: " if key["kind"] == "expert_first" else "") + describe({**key, "kind": ""}))
    _log_axes(axes, sizes, str(points["unit"].iloc[0]))
    axes.set_ylabel("time of one expert (µs)")
    axes.text(0, -0.27, best, transform=axes.transAxes, fontsize=7, va="top", color="#555555")


def _quartiles(points: pd.DataFrame) -> Any:
    return np.stack([points["median_us"] - points["q25_us"], points["q75_us"] - points["median_us"]])


def _copy_panels(table: pd.DataFrame) -> Iterator[Panel]:
    copies = table[table["kind"].isin(_COPIES) & (table["unit"] == "bytes")]
    for words in dict.fromkeys(_COPIES.values()):
        some = copies[copies["kind"].map(_COPIES) == words]
        if len(some):
            yield partial(_lines, some=some, words=words, rate=False)
            yield partial(_lines, some=some, words=words, rate=True)


def _part_panels(table: pd.DataFrame) -> Iterator[Panel]:
    copies = table["kind"].isin(_COPIES) & (table["unit"] == "bytes")
    parts = table[~copies & ~table["kind"].isin([*_EXPERTS, *NOT_CURVES])]
    for (device, subject, unit), some in parts.groupby(["device", "subject", "unit"], sort=True):
        words = f"{device}, {subject}" if subject else str(device)
        yield partial(_lines, some=some, words=words, rate=False, of=str(unit))


def _lines(axes: Axes, some: pd.DataFrame, words: str, *, rate: bool, of: str = "bytes") -> None:
    named = list(curves(some))
    told: dict[str, Any] = {name: math.nan for name in ("bits", "threads") if len({str(key[name]) for key, _ in named}) == 1}
    if of != "bytes":
        told |= {"device": "", "subject": ""}  # they are in the title
    elif {key["kind"] for key, _ in named} == {"copy"}:
        told["kind"] = ""
    for number, (key, points) in enumerate(named):
        text = describe({**key, **told})
        sizes, times = points["size"].to_numpy(float), points["median_us"].to_numpy(float)
        marked_line(axes, sizes.tolist(), (sizes / times / 1e3 if rate else times).tolist(), number, text)
        if not rate:
            axes.errorbar(sizes, times, yerr=_quartiles(points), fmt="none", ecolor=GREY, capsize=2, linewidth=1, zorder=1)
    _title(axes, f"{words}: rate" if rate else words)
    _log_axes(axes, np.unique(some["size"].to_numpy(float)), of)
    axes.set_ylabel("rate (GB/s)" if rate else "time (µs)")
    axes.legend(loc="upper left", bbox_to_anchor=(-0.12, -0.22), fontsize=7, ncols=1 if len(named) < 4 or of == "bytes" else 2)


def _pair_panels(samples: pd.DataFrame) -> Iterator[Panel]:
    rates = pair_rates(samples)
    for first in range(0, len(rates), _BARS):
        some = rates.iloc[first : first + _BARS]
        names = [f"{a} with {b}" for a, b in zip(some["activity"], some["beside"], strict=True)]
        values = 100 * some["rate"].to_numpy(float)
        yield partial(_bars, values=values, names=names, title="Two at a time", label="speed kept (% of that alone)")


def _runtime_panels(gaps: pd.DataFrame) -> Iterator[Panel]:
    for device, some in gaps.groupby("device", sort=True):
        names = [_GAPS.get(variant, variant) for variant in some["variant"]]
        values = some["median_us"].to_numpy(float)
        yield partial(_bars, values=values, names=names, title=f"{device}: the runtime itself", label="nothing runs (µs)")


def _bars(axes: Axes, values: Any, names: list[str], title: str, label: str) -> None:
    places = np.arange(len(values))[::-1]
    axes.barh(places, values, height=0.35, color=BLUE, edgecolor=BLACK, linewidth=0.5)
    for place, value, name in zip(places, values, names, strict=True):
        axes.annotate(name, (0, place + 0.2), (2, 0), textcoords="offset points", fontsize=6.5, va="bottom")
        axes.annotate(f"{value:.0f}", (value, place), (2, 0), textcoords="offset points", va="center", fontsize=7)
    axes.set_yticks([])
    axes.set_ylim(-0.5, _BARS - 0.3)
    axes.set_xlim(0, 1.12 * max(values))
    axes.grid(axis="x")
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(label)
    _title(axes, title)


def _title(axes: Axes, text: str) -> None:
    first, *parts = text.split(", ")
    lines = [first]
    for part in parts:
        lines = [*lines[:-1], f"{lines[-1]}, {part}"] if len(lines[-1]) + len(part) < _CHARACTERS else [*lines, part]
    axes.set_title(",\n".join(lines), fontsize=8.5)


def _log_axes(axes: Axes, sizes: Any, unit: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    steps = _steps(float(sizes[0]), float(sizes[-1]), most=4 if unit == "bytes" else 6) if len(sizes) > 1 else [float(sizes[0])]
    axes.set_xticks(steps, [format_memory(step) if unit == "bytes" else f"{step:g}" for step in steps])
    axes.xaxis.set_minor_locator(NullLocator())
    low, high = axes.get_ylim()
    subs = (1,) if high / low > 100 else (1, 2, 5) if high / low > 5 else (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)
    axes.yaxis.set_major_locator(LogLocator(subs=subs))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    axes.set_xlabel(_SIZE.get(unit, unit))


def _steps(low: float, high: float, most: int) -> list[float]:
    """Return at most so many powers of two within a range, at equal distances."""
    first, last = math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9)
    every = max(1, math.ceil((last - first + 1) / most))
    return [2.0**power for power in range(first, last + 1, every)] or [low]
