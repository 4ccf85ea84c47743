"""Bars of speed and energy by policy: means of rows, grouped by one setting and divided into panels by another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import pandas as pd
from matplotlib.figure import Figure

from moesim.core.units import NS_PER_MS, NS_PER_S
from moesim.errors import ConfigError, unknown_name
from moesim.hardware import weakest
from moesim.plots.captions import averaged, caption, corner_label, repeats_sentence
from moesim.plots.ends import not_drawn, varied_numbers, with_ends
from moesim.plots.exactness import inexact, meaning, star
from moesim.plots.failures import codes_of, failing, mark, reasons, with_failed
from moesim.plots.grouped import Bar, Words, grouped_bars
from moesim.plots.kinds import Drawing, kind
from moesim.plots.rows import (
    WORDS,
    cache_column,
    column_of,
    group_name,
    levels,
    named,
    policies_of,
    prepared,
    settings_in,
    summarised,
    varying,
)
from moesim.plots.style import add_corner, need, short

AXES: Final = {
    "decode_tokens_per_s": "decode speed\n(tokens/s, whole batch)",
    "prefill_tokens_per_s": "prefill speed\n(tokens/s, whole batch)",
    "decode_tokens_per_s_request": "decode speed\n(tokens/s, one request)",
    "tokens_per_kj": "tokens per kJ",
    "speedup": "speed-up",
}
"""Words at the axis of a metric; times have theirs in `_TIMES`, and other metrics go by their names."""
_TIMES: Final = {
    "makespan_ns": "time of the run",
    "ttft_mean_ns": "time to the first token",
    "tpot_mean_ns": "time per output token",
    **{f"tpot_p{percent}_ns": f"time per output token, p{percent}" for percent in (50, 90, 99)},
}
_PANELS: Final = ("model", "hardware")  # what rather divides a figure than its axis


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
        """Columns that the figure itself tells."""
        return [name for name in (self.x, self.panel) if name is not None]


def axis_of(metric: str, most: float) -> tuple[str, float]:
    """Word a metric at its axis, and say by what values up to `most` are divided there: times are in ms, or s from 1 s on."""
    if not metric.endswith("_ns"):
        return AXES.get(metric, metric), 1.0
    unit, scale = ("s", NS_PER_S) if most >= NS_PER_S else ("ms", NS_PER_MS)
    return f"{metric_name(metric)} ({unit})", float(scale)


def metric_name(metric: str) -> str:
    """Name a metric without its unit."""
    plain = metric.removesuffix("_ns").replace("_", " ") if metric.endswith("_ns") else AXES.get(metric, metric)
    return _TIMES.get(metric, plain).partition("\n")[0]


def axes_of(frame: pd.DataFrame, what: str, x: str | None = None) -> tuple[str, str | None]:
    """Choose what groups bars and what divides them into panels; one figure shows no more than these two."""
    known, x = settings_in(frame), None if x is None else column_of(frame, x)
    if x is not None and x not in known:
        raise ConfigError(f"plot {what}: x: {unknown_name('setting', x, known)}")
    if x is None:
        found = varying(frame)
        order = ["batch_size", cache_column(frame), *(name for name in found if name not in _PANELS), *found]
        fallback = next((name for name in (cache_column(frame), *known) if name in known), "policy")
        x = next((name for name in order if name in found), fallback)
    rest = varying(frame, [x])
    panels = [name for name in (*_PANELS, cache_column(frame), "batch_size", *rest) if name in rest]
    return x, panels[0] if panels else None


def means_of(frame: pd.DataFrame, what: str, metric: str, x: str | None) -> Means:
    """Average a metric of prepared rows by policy, group and panel."""
    need(frame, [metric], what)
    x, panel = axes_of(frame, what, x)
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
    """Name policies for a legend: a star marks those that are not exact somewhere, and oracles are said to be."""
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
    for _, row in data.iterrows():
        value = "" if math.isnan(row[metric]) else short(row[metric])
        found.append(tuple(text for text in (value, mark(row, codes)) if text))
    return found


def draw_means(means: Means, texts: Sequence[tuple[str, ...]], title: str, notes: Sequence[str] = ()) -> Figure:
    """Draw the bars of means, with texts above them."""
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
    notes = [*averaged(means.rows, means.shown), *notes, *reasons(means.data), meaning(inexact(means.rows))]
    add_corner(figure, corner_label(means.rows, means.x), notes)
    return figure


def caption_of(means: Means, what: str, *sentences: str) -> str:
    """Write the caption of bars of means."""
    told = [repeats_sentence(means.rows)]
    if "least" in means.data:
        numbers = "; ".join(varied_numbers(means.rows, power=means.metric == "tokens_per_kj"))
        told.append(
            "Thick lines without caps: the least and the most with the profile's numbers at the ends of their intervals, one at "
            f"a time{f' ({numbers})' if numbers else ''}."
        )
    else:
        told.append(not_drawn(means.rows))
    if lines := reasons(means.data):
        told.append(f"Hatched boxes are no values: {'. '.join(lines)}.")
    return caption(what, means.rows, means.shown, *told, *sentences)


# ------------------------------------------------------------------------------------------------------------------- speed
@kind("rows", "decode speed by policy, in groups and panels")
def decode_speed(frame: pd.DataFrame, x: str | None = None) -> Drawing:
    """Bars of decode speed by policy, group and panel.

    Thin error bars are 95 % intervals where rows differ only in their seed, thick ones reach over the intervals of the profile's
    numbers where the experiment had ``intervals: true``.
    """
    return _speed(frame, "decode", x)


@kind("rows", "prefill speed by policy, in groups and panels")
def prefill_speed(frame: pd.DataFrame, x: str | None = None) -> Drawing:
    """Bars of prefill speed by policy, group and panel."""
    return _speed(frame, "prefill", x)


def _speed(frame: pd.DataFrame, phase: str, x: str | None) -> Drawing:
    means = means_of(prepared(frame, f"{phase}_speed", failed=True), f"{phase}_speed", f"{phase}_tokens_per_s", x)
    figure = draw_means(means, value_texts(means.data, means.metric), f"{phase.capitalize()} speed by policy")
    return Drawing(means.data, figure, caption_of(means, f"{phase.capitalize()} speed of the whole batch by policy."))


# ------------------------------------------------------------------------------------------------------------------ energy
@kind("rows", "tokens per kilojoule by policy")
def energy(frame: pd.DataFrame, x: str | None = None) -> Drawing:
    """Bars of tokens per kilojoule (1000 / ``energy_j_per_token``) by policy, group and panel."""
    means = _energy(frame, x)
    labels = ", ".join(sorted({str(label) for label in means.rows["energy_label"].dropna()}))
    figure = draw_means(means, value_texts(means.data, means.metric), "Tokens per kilojoule by policy", [f"power: {labels}"])
    told = f"Power figures: {labels}; a device draws its busy power whenever it is busy, links none of their own."
    return Drawing(means.data, figure, caption_of(means, "Generated tokens per kilojoule, prefill included, by policy.", told))


def _energy(frame: pd.DataFrame, x: str | None) -> Means:
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
    return means_of(frame, "energy", "tokens_per_kj", x)
