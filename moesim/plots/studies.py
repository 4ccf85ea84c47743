"""Figures of studies: what-if, regret, league and lookahead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from moesim.core.colours import BLACK, BLUE, GREEN, GREY, ORANGE, SERIES, VERMILION, WHITE, text_on
from moesim.core.student import line as fitted_line
from moesim.core.units import NS_PER_S
from moesim.hardware import weakest
from moesim.plots.captions import caption, corner_label, meaning, weakest_source
from moesim.plots.layout import wrapped
from moesim.plots.result_rows import is_exact, policies_of, qualified
from moesim.plots.style import (
    COLUMN,
    SMALL,
    TEXT,
    Drawing,
    add_corner,
    alike,
    grid_of,
    is_narrow,
    kind,
    legend_above,
    legend_beside,
    looks_of,
    need,
    new_figure,
    panel_title,
    sentence,
    series_look,
    swatch,
    text_width,
    title,
    width_for,
)
from moesim.trace.stats.lookahead import HALF_GAP

_WHATIF_COLUMNS: Final = ("policy", "knob", "setting", "factor", "decode_tokens_per_s", "base_decode_tokens_per_s")
_SIDES: Final = {"less": (ORANGE, "////"), "more": (BLUE, ""), "other": (GREY, "....")}
_WORDS: Final = {"less": "less of it", "more": "more of it", "other": "something else"}
_BESIDE: Final = 0.35  # inches next to the axis and the names of knobs
_TEXT: Final = 0.3  # of the axes, that a line about a setting may take
_ENOUGH: Final = 0.5  # of the axis for bars, else the figure takes both columns
_ABOUT: Final = ("model", "hardware", "trace")


def _changes(frame: pd.DataFrame) -> pd.DataFrame:
    """Compare the speed at each varied setting with that as it is."""
    need(frame, _WHATIF_COLUMNS, "tornado")
    rows = frame[frame["decode_tokens_per_s"].notna() & (frame["base_decode_tokens_per_s"] > 0)]
    need(rows, ("policy",), "tornado")
    change = rows["decode_tokens_per_s"] / rows["base_decode_tokens_per_s"] - 1
    factor = pd.to_numeric(rows["factor"], errors="coerce")
    side = ["other" if pd.isna(f) or f == 1 else "more" if f > 1 else "less" for f in factor]
    kept = [name for name in (*_WHATIF_COLUMNS[:4], "limit", "base_limit", "source_label") if name in rows]
    data = rows[kept].assign(change=change, side=side)
    by = [data["policy"], data["knob"]]
    grouped = data["change"].groupby(by)
    data["swing"] = grouped.transform("max").clip(lower=0) - grouped.transform("min").clip(upper=0)
    order = {name: i for i, name in enumerate(policies_of(data))}
    ranks = data.assign(_rank=data["policy"].map(order), _swing=-data["swing"])
    return data.loc[ranks.sort_values(["_rank", "_swing", "knob", "change"], kind="stable").index].reset_index(drop=True)


@kind("whatif", "sensitivity to link, memory, CPU and GPU, largest first")
def tornado(frame: pd.DataFrame) -> Drawing:
    """Horizontal bars from the speed as it is, a panel for each policy."""
    data = _changes(frame)
    policies = policies_of(data)
    knobs = {policy: list(dict.fromkeys(data.loc[data["policy"] == policy, "knob"])) for policy in policies}
    names = max(text_width(str(knob), 7.0) for found in knobs.values() for knob in found)
    found = [end for _, rows in data.groupby(["policy", "knob"]) for end in _ends(rows)]
    width = width_for(next((w for w in (COLUMN, TEXT) if _bars_share(found, w - names - _BESIDE) >= _ENOUGH), TEXT))
    room = _TEXT * (width - names - _BESIDE)
    found = [end._replace(text=wrapped(end.text, room, SMALL)) for end in found]
    line = 0.13 + 0.11 * max(1 + end.text.count("\n") for end in found)
    heights = [0.25 + line * len(knobs[policy]) for policy in policies]
    figure = Figure(figsize=(width, 0.35 + sum(heights)), layout="constrained")
    grid = figure.subplots(len(policies), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})
    starred = _not_exact(frame)
    bases = frame.groupby("policy")["base_decode_tokens_per_s"].first()
    for axes, policy, base in zip(grid[:, 0], policies, alike(bases[policy] for policy in policies), strict=True):
        grid_of(axes, "x")
        axes.axvline(0, color=BLACK, linewidth=0.8)
        for place, knob in enumerate(knobs[policy]):
            rows = data[(data["policy"] == policy) & (data["knob"] == knob)]
            for _, row in rows.sort_values("change", key=lambda c: -c.abs(), kind="stable").iterrows():  # the shorter on top
                colour, hatch = _SIDES[row["side"]]
                axes.barh(place, 100 * row["change"], 0.66, color=colour, hatch=hatch, edgecolor=BLACK, linewidth=0.5)
            for end in _ends(rows):
                text = wrapped(end.text, room, SMALL)
                axes.annotate(text, (end.x, place), (3 * end.ahead, 0), textcoords="offset points", va="center",
                              ha="left" if end.ahead > 0 else "right", fontsize=SMALL)  # fmt: skip
        axes.set_yticks(range(len(knobs[policy])), knobs[policy])
        axes.set_ylim(len(knobs[policy]) - 0.4, -0.6)
        axes.tick_params(axis="y", length=0)
        panel_title(axes, f"{policy}{'*' if policy in starred else ''}: {base} tokens/s as it is")
    grid[-1, 0].set_xlim(*_limits(found, width - names - _BESIDE))
    low, high = _reach(found)
    ticks = MaxNLocator(5, steps=[1, 2, 5, 10]).tick_values(low, high)
    grid[-1, 0].set_xticks([tick for tick in ticks if low <= tick <= high])  # none beyond the bars
    grid[-1, 0].set_xlabel("change of decode speed (%)")
    seen = [side for side in _SIDES if (data["side"] == side).any()]
    legend_above(
        figure, [swatch(_SIDES[side][0], _WORDS[side], _SIDES[side][1]) for side in seen], "What a change of the machine would do"
    )
    add_corner(figure, _about_whatif(frame), [meaning(starred)])
    n_failed = int(frame["decode_tokens_per_s"].isna().sum())
    largest = [f"{policy}: {rows['knob'].iloc[0]}" for policy, rows in data.groupby("policy", sort=False)]
    sentences = [
        "Change of decode speed when one thing changes and all else stays, sorted by swing (largest change less smallest); the "
        f"largest is that of {'; '.join(largest)}.",
        f"Not shown: {n_failed} setting{'s' if n_failed > 1 else ''} that failed." if n_failed else "",
        f"{_about_whatif(frame)}.",
        sentence(meaning(starred)),
    ]
    return Drawing(data, figure, " ".join(text for text in sentences if text))


class _End(NamedTuple):
    x: float  # %
    ahead: int
    text: str


def _ends(rows: pd.DataFrame) -> list[_End]:
    found = []
    changes = rows["change"].to_numpy(float)
    for ahead, place in ((-1, int(changes.argmin())), (1, int(changes.argmax()))):
        change = 100 * float(changes[place])
        if change * ahead > 0 or (change == 0 and ahead > 0 and (changes <= 0).all()):
            found.append(_End(change, ahead, f"{rows['setting'].iloc[place]} ({_percent(change)})"))
    return found


def _limits(ends: Sequence[_End], inches: float) -> tuple[float, float]:
    low, high = _reach(ends)
    widths = [text_width(end.text) + 0.08 for end in ends]
    for _ in range(50):  # more room for text leaves less for bars, and so on
        per_inch = (high - low) / inches
        reach = [end.x + end.ahead * per_inch * wide for end, wide in zip(ends, widths, strict=True)]
        low, high = min([low, *reach]), max([high, *reach])
    return low, high


def _reach(ends: Sequence[_End]) -> tuple[float, float]:
    low, high = min([0.0, *(end.x for end in ends)]), max([0.0, *(end.x for end in ends)])
    return (low, high) if high > low else (0.0, 1.0)


def _bars_share(ends: Sequence[_End], inches: float) -> float:
    (low, high), (first, last) = _limits(ends, inches), _reach(ends)
    return (last - first) / (high - low)


def _percent(change: float) -> str:
    """Write a change; small ones with a decimal.

    >>> _percent(-46.8), _percent(0.62), _percent(5.0), _percent(-0.01)
    ('-47%', '+0.6%', '+5%', '±0%')
    """
    text = f"{change:+z.0f}" if abs(change) >= 10 else f"{change:+z.1f}".removesuffix(".0")
    return "±0%" if text == "+0" else f"{text}%"


def _not_exact(frame: pd.DataFrame) -> dict[str, tuple[float, float]]:
    means = {str(name): float(qualified(rows)["fresh"]) for name, rows in frame.groupby("policy", sort=False)}
    return {name: (share, share) for name, share in means.items() if not is_exact(share)}


def _about_whatif(frame: pd.DataFrame) -> str:
    parts = [", ".join(dict.fromkeys(str(v) for v in frame[name].dropna())) for name in _ABOUT if name in frame]
    parts.append(weakest_source(frame, "simulated"))
    return " · ".join(part for part in parts if part)


_DECISION_COLOUR: Final = {"prediction": ORANGE, "replacement": GREEN, "assignment": BLUE, "bandwidth": VERMILION}
_DECISION_HATCH: Final = {"prediction": "", "replacement": "....", "assignment": "\\\\\\\\", "bandwidth": "----"}
_ORDERS: Final = {"forward": "predictions first", "reversed": "links first"}
_BOUNDS: Final = {
    "lower_bound_ns": ("lower bound, links as they are", ":"),
    "lower_bound_instant_links_ns": ("lower bound, links without time", "-."),
}
"""Column -> what its line is of, and how it is drawn."""
_HEIGHT: Final = 0.2  # of a bar, in rows


_REGRET_COLUMNS: Final = ("policy", "order", "decision", "replaced", "base_ns", "before_ns", "after_ns")


def _seconds(rows: pd.DataFrame) -> pd.DataFrame:
    data = rows[["policy", "order", "decision", "replaced"]].copy()
    for name in ("base", "before", "after"):
        data[f"{name}_s"] = rows[f"{name}_ns"].astype(float) / NS_PER_S
    data["saved_s"] = data["before_s"] - data["after_s"]
    for name in _BOUNDS:
        bounds = rows[name].astype(float) if name in rows else float("nan")
        data[f"{name.removesuffix('_ns')}_s"] = bounds / NS_PER_S
    data["links"] = rows.get("links")
    return data.reset_index(drop=True)


def _of_orders(frame: pd.DataFrame) -> pd.DataFrame:
    need(frame, _REGRET_COLUMNS, "regret")
    frame = frame[frame["order"].isin(_ORDERS) & frame["base_ns"].notna()]
    need(frame, ("policy",), "regret")
    return frame


@kind("regret", "what each decision would save if an oracle made it")
def regret(frame: pd.DataFrame) -> Drawing:
    """Makespan while one decision after the other is given to its oracle, in both orders."""
    frame = _of_orders(frame)
    rows = [(policy, order) for policy in policies_of(frame) for order in _ORDERS]
    figure, axes = new_figure(TEXT, 0.5 + 0.42 * len(rows), "x")
    seen: set[str] = set()
    bases = frame.groupby(["policy", "order"])["base_ns"].first().astype(float) / NS_PER_S
    texts = alike(bases[row] for row in rows)
    for place, (policy, order) in enumerate(rows):
        steps, base = frame[(frame["policy"] == policy) & (frame["order"] == order)], bases[policy, order]
        top = place - 0.42
        axes.plot([base, base], [top, top + 4.2 * _HEIGHT], color=BLACK, linewidth=1.2)
        far = max(base, float(steps["after_ns"].max()) / NS_PER_S) if steps["after_ns"].notna().any() else base
        axes.annotate(texts[place], (far, place), (4, 0), textcoords="offset points", va="center", fontsize=SMALL)
        last = base
        done = steps["replaced"] & steps["after_ns"].notna() & steps["before_ns"].notna()
        for i, name in enumerate(steps["decision"]):
            if not done.iloc[i]:
                continue
            before, last = (float(steps[column].iloc[i]) / NS_PER_S for column in ("before_ns", "after_ns"))
            if before != last:
                axes.barh(
                    top + (i + 0.55) * _HEIGHT, abs(before - last), _HEIGHT, min(before, last), color=_DECISION_COLOUR[name],
                    hatch=_DECISION_HATCH[name],
                    edgecolor=BLACK, linewidth=1.8 if last > before else 0.5,
                )  # fmt: skip
                seen.add(name)
        axes.plot(last, place, "o", color=BLACK, markersize=3.5, label=None if place else "all oracles, links without time")
        for column, (words, style) in _BOUNDS.items():
            bound = steps[column].iloc[0] if column in steps else None
            if bound is not None and not pd.isna(bound):
                label = None if column in seen else words
                seen.add(column)
                ends = [bound / NS_PER_S] * 2, [top, top + 4.2 * _HEIGHT]
                axes.plot(*ends, color=BLACK, linestyle=style, linewidth=1.4, label=label)
    for name in [name for name in _DECISION_COLOUR if name in seen]:
        axes.barh(
            0, 0, color=_DECISION_COLOUR[name], hatch=_DECISION_HATCH[name], edgecolor=BLACK, linewidth=0.5, label=name
        )  # for the legend
    axes.set_yticks(range(len(rows)), [f"{policy}\n{_ORDERS[order]}" for policy, order in rows])
    most = frame[["base_ns", "after_ns"]].astype(float).max().max() / NS_PER_S
    axes.set(ylim=(len(rows) - 0.4, -0.6), xlim=(0, 1.12 * most), xlabel="makespan (s)")
    title(axes, "What each decision would save if an oracle made it")
    legend_beside(axes, list(_DECISION_COLOUR))
    note = "thick edge: slower with the oracle · a decision without a bar has no oracle, or saves 0"
    add_corner(figure, corner_label(frame), [note])
    labels = sorted({str(v) for v in frame["base_label"].dropna()}) if "base_label" in frame else []
    rest = f" The runs as they are rest on: {', '.join(labels)}." if labels else ""
    text = caption(
        "Makespan while one decision after the other is given to its oracle, predictions first and links first; a bar spans what "
        "an oracle saves, a thick edge: the run is slower with it. Dot: all oracles. With bandwidth replaced links take no "
        "time, which is another machine: dash-dotted line, its lower bound; dotted line, that of the machine as it is; no bar: "
        f"no oracle, or it saves nothing.{rest}", frame,
    )  # fmt: skip
    return Drawing(_seconds(frame), figure, text)


_LEAGUE_COLUMNS: Final = ("model", "hardware", "batch_size", "phase", "best", "margin", "certain", "source_label")
_DOUBT: Final = "////"
_CELL: Final = 0.2  # inches that a cell is high


@kind("league", "the fastest engine by machine and model, hatched where that is not certain")
def crossover(frame: pd.DataFrame) -> Drawing:
    """Maps of the fastest engine by machine and model: phases one below another, batches side by side."""
    need(frame, _LEAGUE_COLUMNS, "crossover")
    models, machines, batches, phases = (
        list(dict.fromkeys(frame[name])) for name in ("model", "hardware", "batch_size", "phase")
    )
    met = frame[frame["best"].fillna("") != ""]
    counts = met["best"].value_counts(sort=False)
    winners = sorted(counts.index, key=lambda name: -counts[name])  # of equals in order of appearance
    looks = looks_of(winners[: len(SERIES)])
    colours = {name: looks[name].colour if name in looks else _REST for name in winners}
    size = width_for(TEXT), 1.1 + len(phases) * (_CELL * len(machines) + 0.32)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(phases), len(batches), sharex=True, sharey=True, squeeze=False)
    room = (size[0] - 1.4) / len(batches) / (len(models) + 0.6)
    for line, phase in enumerate(phases):
        for column, batch in enumerate(batches):
            axes = grid[line, column]
            cells = met[(met["phase"] == phase) & (met["batch_size"] == batch)]
            _map(axes, cells, machines, models, colours, with_margins=room > text_width("1.00") + 0.04)
            panel_title(axes, f"{phase}, batch {batch}", fontsize=7)
    for axes in grid[-1]:
        axes.set_xticks(range(len(models)), [model.partition(" (")[0] for model in models], rotation=90, fontsize=SMALL)
    for axes in grid[:, 0]:
        axes.set_yticks(range(len(machines)), [_parts(machine) for machine in machines], fontsize=SMALL)
    handles = [swatch(colours[name], f"{name} ({counts[name]})") for name in winners]
    legend_above(figure, [*handles, swatch(WHITE, "not certain", _DOUBT)], "The fastest engine")
    about = _about_league(met)
    add_corner(figure, about, ["number: speed of the best over that of the second", "white: nothing to offload, or no room"])
    what = (
        "The fastest engine that can be downloaded, by machine and model, with all of the GPU's memory for experts next to 4,096 "
        "tokens of context. The number is its speed over that of the second; in the legend, in how many cells it is the fastest. "
        "Hatched: draws of requests, costs within their intervals, or more or less local routing undo the order. White: the "
        "model fits in the GPU's memory, or not in the machine's, or was not asked for."
    )
    return Drawing(frame.reset_index(drop=True), figure, f"{what} {about}.")


_REST: Final = "#9a9a9a"  # of winners beyond the colours


def _parts(machine: str) -> str:
    """Name a machine by GPU and processor.

    >>> _parts("rtx-3060+ryzen-7-5700x+64gb-ddr4-3200")
    'rtx-3060, ryzen-7-5700x'
    """
    return ", ".join(machine.split("+")[:2])


def _about_league(frame: pd.DataFrame) -> str:
    labels = sorted({str(v) for v in frame["source_label"].dropna()})
    return f"simulated, weakest source: {weakest(labels)}"


def _map(
    axes: Axes, cells: pd.DataFrame, machines: Sequence[str], models: Sequence[str], colours: dict[str, str], *,
    with_margins: bool,
) -> None:  # fmt: skip
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.set(xlim=(-0.5, len(models) - 0.5), ylim=(len(machines) - 0.5, -0.5))
    for best, machine, model, margin, certain in cells[["best", "hardware", "model", "margin", "certain"]].itertuples(
        index=False
    ):
        x, y, colour = models.index(model), machines.index(machine), colours[best]
        corner, on = (x - 0.5, y - 0.5), text_on(colour)
        axes.add_patch(Rectangle(corner, 1, 1, facecolor=colour, edgecolor=WHITE, linewidth=0.8))
        if not certain:
            axes.add_patch(
                Rectangle(corner, 1, 1, facecolor="none", edgecolor=on, hatch=_DOUBT, linewidth=0, alpha=0.55)
            )  # fmt: skip
        if with_margins and pd.notna(margin):
            axes.text(
                x, y, f"{margin:.2f}", ha="center", va="center", fontsize=SMALL, color=on,
                bbox=None if certain else {"facecolor": colour, "edgecolor": "none", "pad": 0.6},
            )  # fmt: skip


_LOOKAHEAD_COLUMNS: Final = (
    "model", "trace", "slots", "cached_share", "top_k", "tokens", "window_tokens", "closed", "half_window_tokens",
)  # fmt: skip
_SHARE: Final = 0.25  # of the curves on the left: the size nearest to it


@kind("lookahead", "what knowing some tokens ahead is worth to a cache")
def lookahead(frame: pd.DataFrame) -> Drawing:
    """Share of the gap that a window closes, and the window of half the gap over slots / top-k."""
    need(frame, _LOOKAHEAD_COLUMNS, "lookahead")
    models = list(dict.fromkeys(frame["model"]))
    width = width_for(TEXT)
    figure = Figure(figsize=(width, 4.6 if is_narrow(width) else 2.4), layout="constrained")
    left, right = figure.subplots(2, 1) if is_narrow(width) else figure.subplots(1, 2)
    handles = []
    for place, model in enumerate(models):
        rows, style = frame[frame["model"] == model], series_look(place)
        nearest = (rows["cached_share"] - _SHARE).abs()
        curve = rows[nearest == nearest.min()].groupby("window_tokens")["closed"].mean()
        plain = {"color": style.colour, "linestyle": style.dash, "marker": style.marker, "markersize": 3.5, "linewidth": 1.2}
        handles += left.plot(curve.index, 100 * curve.to_numpy(), label=model, **plain)
        halves = rows.drop_duplicates(["trace", "slots"]).dropna(subset=["half_window_tokens"])
        right.plot(halves["slots"] / halves["top_k"], halves["half_window_tokens"], **{**plain, "linestyle": ""})
    left.set_xscale("symlog", base=2, linthresh=1)
    left.set_xticks([0, 1, 2, 4, 8, 16, 32, 64], ["0", "1", "2", "4", "8", "16", "32", "64"])
    left.set(ylim=(-3, 103), xlabel="tokens ahead that are known", ylabel="gap closed (%)")
    ratios = frame["slots"] / frame["top_k"]
    across = np.array([ratios.min(), ratios.max()])
    halves = frame.drop_duplicates(["trace", "slots"]).dropna(subset=["half_window_tokens"]).query("half_window_tokens > 0")
    if len(halves) > 2 and (halves["slots"] / halves["top_k"]).nunique() > 1:
        offset, slope = fitted_line(
            list(zip(np.log(halves["slots"] / halves["top_k"]), np.log(halves["half_window_tokens"]), strict=True))
        )
        handles += right.plot(
            across, np.exp(offset) * across**slope, color=BLACK, linewidth=1.2,
            label=f"fitted: {np.exp(offset):.2f} (slots / k)^{slope:.2f}",
        )  # fmt: skip
    handles += right.plot(
        across, HALF_GAP[0] * across ** HALF_GAP[1], color=BLACK, linewidth=1.2, linestyle="--",
        label=f"published: {HALF_GAP[0]} (slots / k)^{HALF_GAP[1]}",
    )  # fmt: skip
    right.set_xscale("log", base=2)
    right.set_yscale("log", base=2)
    for axis in (right.xaxis, right.yaxis):
        axis.set_major_formatter(lambda value, place: f"{value:g}")
    right.set(xlabel="slots of a layer / experts a token", ylabel="tokens ahead for half the gap")
    legend_above(figure, handles, "What looking ahead is worth to a cache")
    add_corner(figure, "", [f"left: caches of the size nearest to {_SHARE:.0%} of a layer's experts; counted from traces"])
    text = (
        "Left: share of the misses between a cache that goes by decayed frequency and the fewest that can be which knowing some "
        f"tokens ahead avoids, for the size nearest to {_SHARE:.0%} of a layer's experts; mean over a model's traces. Right: "
        "tokens ahead that avoid half of them, for every trace and size; line: fitted to them; dashed: the relation that "
        "moe-speed-of-light publishes. "
        f"One cache a layer, batch 1, {int(frame['tokens'].max())} decoded tokens at most; traces: "
        f"{', '.join(dict.fromkeys(frame['trace']))}."
    )
    return Drawing(frame.reset_index(drop=True), figure, text)
