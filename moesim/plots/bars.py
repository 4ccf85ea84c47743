"""Bars by policy: speed, energy, ablations and speed-ups, in groups and panels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke

from moesim.core.colours import BLACK, GREY, WHITE
from moesim.core.units import NS_PER_MS, NS_PER_S
from moesim.errors import ConfigError, unknown_name
from moesim.hardware import weakest
from moesim.plots.captions import (
    caption,
    codes_of,
    corner_label,
    label_below,
    mark,
    meaning,
    n_repeats,
    not_drawn,
    not_shown,
    not_shown_sentences,
    reasons,
    repeats_sentence,
    seeds_words,
    varied_numbers,
)
from moesim.plots.layout import extent
from moesim.plots.result_rows import (
    REPEATS,
    WORDS,
    cache_column,
    column_of,
    failing,
    group_name,
    inexact,
    interval,
    levels,
    named,
    over_draws,
    policies_of,
    prepared,
    qualified,
    settings_in,
    star,
    summarised,
    varying,
    with_ends,
    with_failed,
)
from moesim.plots.style import (
    COLUMN,
    SMALL,
    TEXT,
    Drawing,
    Look,
    add_corner,
    alike,
    columns_of,
    kind,
    legend_above,
    looks_of,
    need,
    panel_title,
    panels_of,
    swatch,
    text_width,
    width_for,
)

_GAP: Final = 1.0  # between groups, in bars
_FRAME: Final = 0.62  # inches next to the axes, for their ticks and label
_NARROW: Final = 0.165  # inches that a bar needs, so that its number can stand above it
_HEIGHT: Final = {1: 1.75, 2: 1.55}  # of axes, in inches, by number of rows
_LOW: Final = 1.3  # the same with more rows
_ALIKE: Final = 2.5  # panels whose axes reach this much further than others have axes of their own
_LINE: Final = 0.115  # inches that a line of small text is high
_SPACE: Final = 0.03  # inches between the numbers of neighbouring bars
_BOX: Final = 0.12  # of the axis, what stands for a run that failed
ENDS: Final = "over the profile's intervals"
"""Words in the legend for what reaches from the least to the most at the ends of intervals."""
_ENDS: Final[Any] = {  # to be seen on every fill, and below a thin error bar
    "color": GREY, "linewidth": 2.4, "solid_capstyle": "butt", "path_effects": [withStroke(linewidth=3.8, foreground=BLACK)]
}  # fmt: skip


class Bar(NamedTuple):
    """One bar; without a value (nan) it stands for runs that failed."""

    panel: str
    group: str
    policy: str
    value: float
    low: float  # with `high`: 95 % interval; nan if it has none
    high: float
    text: tuple[str, ...]  # lines above it
    least: float = math.nan  # with `most`: over the intervals of the profile's numbers
    most: float = math.nan


class Words(NamedTuple):
    """Words at the axes and above the figure."""

    title: str
    x: str
    y: str


def grouped_bars(bars: Sequence[Bar], words: Words, legend: Mapping[str, str], level: float | None = None) -> Figure:
    """Draw bars."""
    looks = looks_of(list(legend))
    panels = _by_panel(bars)
    places = {name: _places(found, list(legend)) for name, found in panels.items()}
    longest = max(place.width for place in places.values())
    width, n_columns = _layout(longest, len(panels))
    n_rows = -(-len(panels) // n_columns)
    height = _HEIGHT.get(n_rows, _LOW)
    inch = (width / n_columns - _FRAME) / longest  # of a bar
    numbers = [line for bar in bars if not math.isnan(bar.value) for line in bar.text]
    rotated = any(extent(line, SMALL)[0] + _SPACE > inch for line in numbers)
    if inch < max((extent(line, SMALL)[1] for line in numbers), default=0.0):  # they would cover each other; the data have them
        panels = _by_panel([bar if math.isnan(bar.value) else bar._replace(text=()) for bar in bars])
    lines = max(bar.group.count("\n") + 1 for bar in bars)
    heads = 0.2 if len(panels) > 1 else 0.05
    figure, grid = panels_of(len(panels), n_columns, width, 0.25 + n_rows * (height + heads + _LINE * (lines + 0.5)))
    tops: list[float] = []
    for i, (axes, name) in enumerate(zip(grid, panels, strict=True)):
        tops.append(max(_draw(axes, panels[name], places[name], looks, height, rotated), 1.05 * (level or 0.0)))
        if level is not None:
            axes.axhline(level, color=BLACK, linewidth=0.8, linestyle="--", zorder=0.9)
        axes.set_xlim(-0.5 - _GAP / 2, longest - _GAP - 0.5 + _GAP / 2)
        if len(panels) > 1:
            panel_title(axes, name)
        if i >= len(panels) - n_columns:
            axes.set_xlabel(words.x)
        if i % n_columns == 0:
            axes.set_ylabel(words.y)
    limit_panels(figure.axes, tops)
    handles: list[Artist] = [swatch(look.colour, legend[policy], look.hatch) for policy, look in looks.items()]
    handles += [Line2D([], [], **_ENDS, label=ENDS)] if any(bar.least < bar.most for bar in bars) else []
    legend_above(figure, handles, words.title)
    return figure


def _by_panel(bars: Sequence[Bar]) -> dict[str, list[Bar]]:
    panels: dict[str, list[Bar]] = {}
    for bar in bars:
        panels.setdefault(bar.panel, []).append(bar)
    return panels


def limit_panels(panels: Sequence[Axes], tops: Sequence[float]) -> None:
    """Set one axis for all panels, or its own for each where tops differ much."""
    tops = [top or max(tops) or 1.0 for top in tops]  # of a panel in which all failed
    alike = max(tops) <= _ALIKE * min(tops)
    for axes, top in zip(panels, tops, strict=True):
        axes.set_ylim(0, max(tops) if alike else top)


class _Places(NamedTuple):
    x: dict[tuple[str, str], float]
    middles: dict[str, float]
    width: float


def _places(bars: Sequence[Bar], policies: Sequence[str]) -> _Places:
    groups: dict[str, set[str]] = {}
    for bar in bars:
        groups.setdefault(bar.group, set()).add(bar.policy)
    x: dict[tuple[str, str], float] = {}
    middles: dict[str, float] = {}
    at = 0.0
    for group, present in groups.items():
        ordered = [policy for policy in policies if policy in present]
        named = text_width(group, 7.0) / _NARROW - _GAP / 2  # what its name needs
        spare = max(0.0, named - len(ordered)) / 2
        middles[group] = at + spare + (len(ordered) - 1) / 2
        for i, policy in enumerate(ordered):
            x[group, policy] = at + spare + i
        at += len(ordered) + 2 * spare + _GAP
    return _Places(x, middles, at)


def _layout(longest: float, n_panels: int) -> tuple[float, int]:
    if n_panels == 1:
        return width_for(COLUMN if longest * _NARROW + _FRAME <= COLUMN else TEXT), 1
    width = width_for(TEXT)
    fit = int(width / (longest * _NARROW + _FRAME))
    return width, columns_of(n_panels, min(fit, 4), width, _LOW + 0.35)


def _draw(axes: Axes, bars: Sequence[Bar], places: _Places, looks: Mapping[str, Look], height: float, rotated: bool) -> float:
    """Draw the bars of one panel; return how high its axis must reach."""
    top = 0.0
    for bar in bars:
        x, look = places.x[bar.group, bar.policy], looks[bar.policy]
        if math.isnan(bar.value):
            _failed(axes, x, look, " ".join(bar.text))
            continue
        axes.bar(x, bar.value, 0.9, color=look.colour, hatch=look.hatch, edgecolor=BLACK, linewidth=0.5)
        end = bar.value
        if bar.least < bar.most:  # false of nan
            axes.plot([x, x], [bar.least, bar.most], **_ENDS)
            end = max(end, bar.most)
        if not math.isnan(bar.low):
            error: Any = [[bar.value - bar.low], [bar.high - bar.value]]
            axes.errorbar(x, bar.value, yerr=error, fmt="none", ecolor=GREY if look.colour == BLACK else BLACK, elinewidth=0.8,
                          capsize=1.5)  # fmt: skip
            end = max(end, bar.high)
        text = (" · " if rotated else "\n").join(bar.text)
        long = text_width(text) + 0.03 if rotated else _LINE * len(bar.text) + 0.03
        top = max(top, end / (1 - min(long / height, 0.8)))
        axes.annotate(text, (x, end), (0, 2), textcoords="offset points", ha="center", va="bottom", fontsize=SMALL,
                      rotation=90 if rotated else 0, linespacing=0.95,
                      bbox={"facecolor": WHITE, "edgecolor": "none", "pad": 0.2})  # fmt: skip
    axes.set_xticks(list(places.middles.values()), list(places.middles))
    axes.tick_params(axis="x", length=0)
    return top


def _failed(axes: Axes, x: float, look: Look, text: str) -> None:
    at = axes.get_xaxis_transform()
    outline: Any = {"fill": False, "edgecolor": look.colour, "linestyle": (0, (2, 1.5)), "linewidth": 0.8, "hatch": "xxxx"}
    axes.add_patch(Rectangle((x - 0.45, 0), 0.9, _BOX, transform=at, **outline))
    axes.annotate(text, (x, _BOX), (0, 2), xycoords=at, textcoords="offset points", ha="center", va="bottom", fontsize=SMALL,
                  rotation=90)  # fmt: skip


AXES: Final = {
    "decode_tokens_per_s": "decode speed\n(tokens/s, whole batch)",
    "prefill_tokens_per_s": "prefill speed\n(tokens/s, whole batch)",
    "decode_tokens_per_s_request": "decode speed\n(tokens/s, one request)",
    "tokens_per_kj": "tokens per kJ",
    "speedup": "speed-up",
    "goodput_per_s": "requests within\nlimits (1/s)",
    "answer_tokens_per_s": "answers\n(tokens/s, all users)",
}
"""Words at the axis of a metric; times have theirs in `_TIMES`, and other metrics go by their names."""
_TIMES: Final = {
    "makespan_ns": "time of the run",
    "ttft_mean_ns": "time to the first token",
    "tpot_mean_ns": "time per output token",
    "e2e_mean_ns": "time of a request",
    **{
        f"{name}_p{percent}_ns": f"{words}, p{percent}"
        for percent in (50, 90, 99)
        for name, words in (
            ("ttft", "time to the first token"),
            ("tpot", "time per output token"),
            ("itl", "time between tokens"),
            ("e2e", "time of a request"),
        )
    },
}
_PANELS: Final = ("model", "hardware")  # these rather divide a figure than its axis


class Means(NamedTuple):
    """Means of rows, and what arranges their bars."""

    rows: pd.DataFrame  # prepared, of runs that succeeded
    data: pd.DataFrame  # one row a bar, in the order of panels, groups and policies
    metric: str
    x: str  # column of groups; "policy" if nothing groups
    panel: str | None  # column of panels
    policies: list[str]  # in their order, also those of which all runs failed

    @property
    def shown(self) -> list[str]:
        """Columns shown on the axes, so not repeated in the caption."""
        return [name for name in (self.x, self.panel) if name is not None]


def axis_of(metric: str, most: float) -> tuple[str, float]:
    """Return a metric's words at its axis, and its divisor there."""
    if not metric.endswith("_ns"):
        return AXES.get(metric, metric), 1.0
    unit, scale = ("s", NS_PER_S) if most >= NS_PER_S else ("ms", NS_PER_MS)
    return f"{metric_name(metric)} ({unit})", float(scale)


def metric_name(metric: str) -> str:
    """Name a metric without its unit."""
    plain = metric.removesuffix("_ns").replace("_", " ") if metric.endswith("_ns") else AXES.get(metric, metric)
    return _TIMES.get(metric, plain).partition("\n")[0]


def axes_of(frame: pd.DataFrame, what: str, x: str | None = None, panel: str | None = None) -> tuple[str, str | None]:
    """Choose the column of groups and that of panels."""
    known = settings_in(frame)
    x, panel = (None if name is None else column_of(frame, name) for name in (x, panel))
    for place, name in (("x", x), ("panel", panel)):
        if name is not None and name not in known:
            raise ConfigError(f"plot {what}: {place}: {unknown_name('setting', name, known)}")
    if x is not None and x == panel:
        raise ConfigError(f"plot {what}: panel: expected another setting than that of x, got '{panel}' twice")
    if x is None:
        found = [name for name in varying(frame) if name != panel]
        order = ["batch_size", cache_column(frame), *(name for name in found if name not in _PANELS), *found]
        fallback = next((name for name in (cache_column(frame), *known) if name in known), "policy")
        x = next((name for name in order if name in found), fallback)
    rest = varying(frame, [x])
    if panel is not None:
        return x, panel
    panels = [name for name in (*_PANELS, cache_column(frame), "batch_size", *rest) if name in rest]
    return x, panels[0] if panels else None


def means_of(frame: pd.DataFrame, what: str, metric: str, x: str | None, panel: str | None = None) -> Means:
    """Average a metric of prepared rows by policy, group and panel."""
    need(frame, [metric], what)
    x, panel = axes_of(frame, what, x, panel)
    by = [name for name in (panel, x) if name is not None and name != "policy"]
    done, lost, each = frame[~failing(frame)], frame[failing(frame)], [*by, "policy"]
    data = with_failed(with_ends(summarised(done, each, metric), done, each, metric), lost, each)
    if data.empty:
        raise ConfigError(
            f"plot {what}: expected a run with a value of {metric}, got none; docs/reference/metrics.md says which runs have one"
        )
    orders = [{group_name(value): i for i, value in enumerate(levels(frame, name))} for name in by]
    places = [[order.get(group_name(value), -1) for value in data[name]] for name, order in zip(by, orders, strict=True)]
    policies = policies_of(frame)
    ranks = list(zip(*places, [policies.index(name) for name in data["policy"]], strict=True))
    data = data.iloc[sorted(range(len(data)), key=ranks.__getitem__)].reset_index(drop=True)
    return Means(done, data, metric, x, panel, policies)


def legend_names(data: pd.DataFrame, policies: Sequence[str]) -> dict[str, str]:
    """Name policies for a legend; inexact ones with a star."""
    names = {}
    for policy in policies:
        rows = data[data["policy"] == policy]
        oracle = " (oracle)" if (rows["source_label"] == "oracle").any() else ""
        names[policy] = f"{policy}{oracle}" + ("*" if any(star(fresh) for fresh in rows["fresh"]) else "")
    return {policy: name for policy, name in names.items() if (data["policy"] == policy).any()}


def value_texts(data: pd.DataFrame, metric: str) -> list[tuple[str, ...]]:
    """Write above each bar its value, and what failed."""
    codes = codes_of(data)
    found = []
    for (_, row), value in zip(data.iterrows(), alike(data[metric].astype(float)), strict=True):
        found.append(tuple(text for text in (value, mark(row, codes)) if text))
    return found


def draw_means(means: Means, texts: Sequence[tuple[str, ...]], title: str, notes: Sequence[str] = ()) -> Figure:
    """Draw the bars of means."""
    bars = [
        Bar(
            named(row[means.panel], means.panel) if means.panel else "",
            group_name(row[means.x], means.x) if means.x != "policy" else "",
            str(row["policy"]), float(row[means.metric]), float(row["low"]), float(row["high"]), text,
            float(row.get("least", math.nan)), float(row.get("most", math.nan)),
        )
        for (_, row), text in zip(means.data.iterrows(), texts, strict=True)
    ]  # fmt: skip
    words = Words(title, WORDS.get(means.x, means.x) if means.x != "policy" else "", AXES.get(means.metric, means.metric))
    figure = grouped_bars(bars, words, legend_names(means.data, means.policies))
    label_below(figure, means.rows, means.shown, *notes, *reasons(means.data), axis=means.x)
    return figure


def caption_of(means: Means, what: str, *sentences: str) -> str:
    """Write the caption of bars of means."""
    listed = [repeats_sentence(means.rows)]
    if "least" in means.data:
        numbers = "; ".join(varied_numbers(means.rows, power=means.metric == "tokens_per_kj"))
        listed.append(
            "Thick lines without caps: the least and the most with the profile's numbers at the ends of their intervals, one at "
            f"a time{f' ({numbers})' if numbers else ''}."
        )
    else:
        listed.append(not_drawn(means.rows))
    if lines := reasons(means.data):
        listed.append(f"Hatched boxes are no values: {'. '.join(lines)}.")
    return caption(what, means.rows, means.shown, *listed, *sentences)


# ------------------------------------------------------------------------------------------------------------------- speed
@kind("rows", "decode speed by policy, in groups and panels")
def decode_speed(frame: pd.DataFrame, x: str | None = None, panel: str | None = None) -> Drawing:
    """Bars of decode speed by policy, group and panel.

    Thin error bars are 95 % intervals over seeds, thick ones reach over the intervals of the profile's
    numbers (``intervals: true``).
    """
    return _speed(frame, "decode", x, panel)


@kind("rows", "prefill speed by policy, in groups and panels")
def prefill_speed(frame: pd.DataFrame, x: str | None = None, panel: str | None = None) -> Drawing:
    """Bars of prefill speed by policy, group and panel."""
    return _speed(frame, "prefill", x, panel)


def _speed(frame: pd.DataFrame, phase: str, x: str | None, panel: str | None) -> Drawing:
    means = means_of(prepared(frame, f"{phase}_speed", failed=True), f"{phase}_speed", f"{phase}_tokens_per_s", x, panel)
    figure = draw_means(means, value_texts(means.data, means.metric), f"{phase.capitalize()} speed by policy")
    return Drawing(means.data, figure, caption_of(means, f"{phase.capitalize()} speed of the whole batch by policy."))


# ------------------------------------------------------------------------------------------------------------------ energy
@kind("rows", "tokens per kilojoule by policy")
def energy(frame: pd.DataFrame, x: str | None = None, panel: str | None = None) -> Drawing:
    """Bars of tokens per kilojoule (1000 / ``energy_j_per_token``) by policy, group and panel."""
    means = _energy(frame, x, panel)
    labels = ", ".join(sorted({str(label) for label in means.rows["energy_label"].dropna()}))
    figure = draw_means(means, value_texts(means.data, means.metric), "Tokens per kilojoule by policy", [f"power: {labels}"])
    text = f"Power figures: {labels}; a device draws its busy power whenever it is busy, links none of their own."
    return Drawing(means.data, figure, caption_of(means, "Generated tokens per kilojoule, prefill included, by policy.", text))


def _energy(frame: pd.DataFrame, x: str | None, panel: str | None) -> Means:
    frame = prepared(frame, "energy", ["energy_j_per_token", "energy_label"], failed=True)
    joules = pd.to_numeric(frame["energy_j_per_token"], errors="coerce")
    if joules[~failing(frame)].isna().all() and not failing(frame).all():
        raise ConfigError(
            "plot energy: expected runs on hardware whose profile has idle and busy power of every device, got none; "
            "docs/reference/metrics.md says what a profile needs"
        )
    frame = frame.assign(tokens_per_kj=1000 / joules)
    ends = [f"energy_j_per_token_{end}" for end in ("most", "least")]  # the most energy gives the least tokens
    if all(name in frame for name in ends):
        least, most = (1000 / pd.to_numeric(frame[name], errors="coerce") for name in ends)
        frame = frame.assign(tokens_per_kj_least=least, tokens_per_kj_most=most)
    if "source_label" in frame:
        pairs = zip(frame["source_label"], frame["energy_label"], strict=True)
        frame = frame.assign(source_label=[weakest(str(one) for one in pair if isinstance(one, str)) for pair in pairs])
    return means_of(frame, "energy", "tokens_per_kj", x, panel)


@kind("rows", "ablation: what each variant gains over the one before")
def ladder(
    frame: pd.DataFrame, metric: str = "decode_tokens_per_s", x: str | None = None, panel: str | None = None
) -> Drawing:  # fmt: skip
    """Bars of variants, with what each gains over the one before written on it."""
    means = means_of(prepared(frame, "ladder", [metric], failed=True), "ladder", metric, x, panel)
    by = [name for name in means.shown if name != "policy"]
    before = means.data.groupby(by, sort=False)[metric].shift(1) if by else means.data[metric].shift(1)
    means = means._replace(data=means.data.assign(gain=means.data[metric] / before - 1))
    texts = [
        (value, *([] if math.isnan(gain) else [f"{round(100 * gain):+d}%".replace("+0%", "±0%")]), *rest)
        for (value, *rest), gain in zip(value_texts(means.data, metric), means.data["gain"], strict=True)
    ]
    words, order = AXES.get(metric, metric).replace("\n", " "), ", then ".join(means.policies)
    what = f"Ablation of {words}: {order}; percentages are gains over the variant before in the same group."
    return Drawing(means.data, draw_means(means, texts, "What each step gains over the one before"), caption_of(means, what))


MEAN: Final = "geo. mean"
"""Group at the end: the geometric mean over all settings."""
BOTH_MOVE: Final = "the speeds of both policies move with them"
"""Why speed-ups have no intervals of the profile."""
_ROW: Final = 34  # bars that stand side by side
_LESS_IS_BETTER: Final = ("_ns", "energy_j", "energy_j_per_token")


def paired(rows: pd.DataFrame, baseline: str, metric: str, what: str) -> pd.DataFrame:
    """Return rows next to the baseline's at the same setting and seed."""
    rows = rows[pd.to_numeric(rows[metric], errors="coerce") > 0].reset_index(drop=True)
    same = [name for name in (*settings_in(rows), *REPEATS) if name in rows]
    keys = [tuple(group_name(value) for value in values) for values in rows[same].itertuples(index=False)]
    names = rows["policy"].tolist()
    base = {key: i for i, (key, name) in enumerate(zip(keys, names, strict=True)) if name == baseline}
    both = [(i, base[key]) for i, (key, name) in enumerate(zip(keys, names, strict=True)) if name != baseline and key in base]
    if not both:
        raise ConfigError(f"plot {what}: expected another policy at a setting of {baseline}, got none; name another --baseline")
    values = rows[metric].astype(float).tolist()
    less = metric.endswith(_LESS_IS_BETTER)
    speedups = [values[j] / values[i] if less else values[i] / values[j] for i, j in both]
    ratios = rows.iloc[[i for i, _ in both]].assign(speedup=speedups)
    if "source_label" in ratios:
        labels = [label if isinstance(label, str) else None for label in rows["source_label"]]
        ratios["source_label"] = [_weaker(labels[i], labels[j]) for i, j in both]
    return ratios


def _compared(rows: pd.DataFrame, baseline: str, metric: str, panel: str | None) -> pd.DataFrame:
    ratios, found = paired(rows, baseline, metric, "speedup"), varying(rows)
    panels, groups = _arranged(found, ratios, panel)
    orders = [levels(ratios, name) for name in (*panels, *groups)]
    places = [[order.index(v) if v in order else -1 for v in ratios[name].tolist()]
              for name, order in zip((*panels, *groups), orders, strict=True)]  # fmt: skip
    if places:
        ratios = ratios.iloc[[i for _, i in sorted(zip(zip(*places, strict=True), range(len(ratios)), strict=True))]]
    ratios = ratios.assign(panel=_worded(ratios, panels), group=_worded(ratios, groups))
    settings = [geometric(part, {"panel": p, "group": g, "policy": name})
                for (p, g, name), part in ratios.groupby(["panel", "group", "policy"], sort=False)]  # fmt: skip
    table = pd.DataFrame(settings)
    last = str(table["panel"].iloc[-1])  # beside the last settings: a panel of its own would be mostly empty
    several = len(table[["panel", "group"]].drop_duplicates()) > 1  # the mean of one setting is that setting once more
    for name, part in table.groupby("policy", sort=False) if several else ():
        whole = geometric(part, {"panel": last, "group": MEAN, "policy": name})
        settings.append({**whole, "low": math.nan, "high": math.nan})
    data = pd.DataFrame(settings)
    order = {name: list(dict.fromkeys(data[name])) for name in ("panel", "group")} | {"policy": policies_of(rows)}
    return data.sort_values(list(order), key=lambda of: of.map(order[str(of.name)].index), kind="stable").reset_index(drop=True)


def baseline_of(rows: pd.DataFrame, baseline: str | None, what: str) -> str:
    """Choose the baseline: the one asked for, else the first policy."""
    known = policies_of(rows)
    if baseline is not None and baseline not in known:
        raise ConfigError(f"plot {what}: --baseline: {unknown_name('policy of these results', baseline, known)}")
    return known[0] if baseline is None else baseline


def labelled(rows: pd.DataFrame, data: pd.DataFrame) -> pd.DataFrame:
    """Label rows by the weakest source of their policy's speed-ups."""
    if "source_label" not in rows:
        return rows
    found = {name: _weaker(*part["source_label"]) for name, part in data.groupby("policy", sort=False)}
    return rows.assign(source_label=rows["policy"].map(found))


def _weaker(*labels: str | None) -> str | None:
    known = [label for label in labels if label is not None]
    return weakest(known) if known else None


def _worded(ratios: pd.DataFrame, columns: Sequence[str]) -> list[str]:
    if not columns:
        return [""] * len(ratios)
    words = [[named(value, name) for value in ratios[name].tolist()] for name in columns]
    return [", ".join(parts) for parts in zip(*words, strict=True)]


def _arranged(found: Sequence[str], ratios: pd.DataFrame, panel: str | None) -> tuple[list[str], list[str]]:
    panels = [name for name in found if name in _PANELS] if panel is None else [panel]
    groups = [name for name in found if name not in panels]
    while groups:
        texts = ratios[[*panels, *groups]].astype(str).drop_duplicates()
        most = texts.groupby(panels).size().max() if panels else len(texts)
        if most * ratios["policy"].nunique() <= _ROW:
            break
        panels.append(groups.pop(0))
    return panels, groups


def geometric(part: pd.DataFrame, names: dict[str, Any]) -> dict[str, Any]:
    """Geometric mean with the interval of the mean logarithm."""
    logs = over_draws(part, [math.log(value) for value in part["speedup"]])
    mean, low, high = (float(np.exp(value)) for value in interval(logs))
    qualities = qualified(part)
    if "fresh" in part:
        qualities["fresh"] = float(part["fresh"].mean())
    return {**names, "speedup": mean, "low": low, "high": high, "n": len(logs), **qualities}


@kind("rows", "speed-up over a baseline policy, with the geometric mean")
def speedup(
    frame: pd.DataFrame, baseline: str | None = None, metric: str = "decode_tokens_per_s", panel: str | None = None
) -> Drawing:  # fmt: skip
    """Bars of speed-ups over a baseline, the geometric mean at the end; a panel for each value of ``panel``."""
    rows = prepared(frame, "speedup", [metric])
    baseline = baseline_of(rows, baseline, "speedup")
    data = _compared(rows, baseline, metric, None if panel is None else axes_of(rows, "speedup", None, panel)[1])
    whole = data[data["group"] == MEAN]
    counts = sorted(set(whole["n"]))
    differ = len(counts) > 1  # then each bar says of how many
    texts = value_texts(data, "speedup")
    bars = []
    for (_, row), text in zip(data.iterrows(), texts, strict=True):
        group, of = str(row["group"]).replace(", ", "\n"), ""
        if group == MEAN:
            group, of = (MEAN, f"n={row['n']}") if differ else (f"{MEAN}\nof all {row['n']}", "")
        bars.append(Bar(row["panel"], group, row["policy"], row["speedup"], row["low"], row["high"], (*text, of) if of else text))
    words = Words(f"Speed-up over {baseline}", "", f"speed-up over {baseline}{'*' if baseline in inexact(rows) else ''}")
    figure = grouped_bars(bars, words, legend_names(data, policies_of(rows)), level=1.0)
    repeats = [f"geometric mean of {seeds_words(rows)}"] if n_repeats(rows) else []
    add_corner(figure, corner_label(labelled(rows, data)), [*repeats, *not_shown(frame), meaning(inexact(rows))])
    settings = f"{counts[0]} settings in which both ran" if counts else ""
    if differ:
        each = ", ".join(f"{row['policy']} {row['n']}" for _, row in whole.iterrows())
        settings = f"the settings in which both ran ({each}); means over different settings do not compare"
    sentences = [
        f"The last group is the geometric mean over {settings}." if settings else "",
        repeats_sentence(rows, "Geometric means", "Student's t, logarithms"),
        not_drawn(rows, BOTH_MOVE),
        not_shown_sentences(frame),
    ]
    what = f"Speed-up over {baseline} ({AXES.get(metric, metric)}), like with like.".replace("\n", " ")
    return Drawing(data, figure, caption(what, labelled(rows, data), varying(rows), *sentences))
