"""Lines by policy: hit rates, speed over a setting, and memory against speed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from moesim.core.colours import BLACK, GREY, WHITE
from moesim.errors import ConfigError
from moesim.plots.bars import (
    AXES,
    BOTH_MOVE,
    Words,
    axes_of,
    axis_of,
    baseline_of,
    geometric,
    labelled,
    legend_names,
    limit_panels,
    metric_name,
    paired,
)
from moesim.plots.captions import (
    caption,
    label_below,
    not_drawn,
    not_shown,
    not_shown_sentences,
    repeats_sentence,
)
from moesim.plots.result_rows import (
    WORDS,
    cache_column,
    group_name,
    inexact,
    is_exact,
    levels,
    named,
    policies_of,
    prepared,
    qualified,
    summarised,
)
from moesim.plots.style import (
    COLUMN,
    OPTIMUM,
    TEXT,
    Drawing,
    Look,
    capital,
    columns_of,
    grid_of,
    kind,
    legend_above,
    looks_of,
    new_figure,
    numbers_between,
    panel_title,
    panels_of,
    sentence,
    width_for,
)

CHANCE: Final = "chance (cached share)"
"""Legend of what a cache with random content hits."""

_WORDS: Final = {"hit_rate_decode": "decode hit rate", "hit_rate_prefill": "prefill hit rate"}
_SERVED: Final = "A hit ran on a GPU from a copy that was there when its layer was routed."
_OPTIMUM: Final = (
    f"{OPTIMUM} knows the future, and bounds replacement only: it is the best of the caches that fetch on demand and admit every "
    "miss. A policy that runs misses on the CPU, prefetches, or chooses what it admits can lie above it."
)
_BOUND: Final = f"{OPTIMUM} bounds replacement only: prefetching can exceed it"
_PREFETCHED: Final = {"hit_rate": "prefetch_hit_share", "hit_rate_decode": "prefetch_hit_share_decode"}
"""Column of the part of a hit rate that prefetches have brought."""
_SEEN: Final = 0.01  # a part of the hit rate that is drawn
_CACHE_ALONE: Final = "cache hits alone"
"""Legend of the hollow marks."""
_PARTED: Final = (
    "Hollow marks: without the hits of a copy that a prefetch has brought since the expert was last looked up, which fill the "
    "light area up to the line."
)
_CHANCE_LOOK: Final[Any] = {"color": BLACK, "linestyle": (0, (6, 3)), "linewidth": 0.7}  # unlike any of `looks_of`
_HOLLOW: Final[Any] = {
    "linewidth": 0.6, "marker": "o", "markersize": 3.6, "markerfacecolor": WHITE, "markeredgecolor": GREY, "markeredgewidth": 0.9
}  # fmt: skip
_MARGIN: Final = 5.0  # percentage points


@kind("rows", "hit rate against cache size, with Belady and chance")
def hit_rate(frame: pd.DataFrame, metric: str | None = None, panel: str | None = None) -> Drawing:
    """Lines of the hit rate by policy against the cache ratio; Belady's emphasised, and chance.

    Hollow marks: hits of the cache without those of a copy that a prefetch has just brought.
    """
    if metric is None:
        decodes = "n_decode_tokens" not in frame or (frame["n_decode_tokens"].dropna() > 0).all()
        metric = "hit_rate_decode" if decodes else "hit_rate"
    rows = prepared(frame, "hit_rate", ["cache_ratio", metric])
    panels = panel_in(rows, "hit_rate", panel)
    means = _with_prefetched(rows, [*panels, "policy", "cache_ratio"], metric)
    rank = means["policy"].map(policies_of(rows).index)
    means = means.assign(rank=rank).sort_values(["rank", "cache_ratio"], kind="stable").drop(columns="rank")
    parts = divided(means, rows, panels)
    means = pd.concat(parts, ignore_index=True)
    chance = pd.DataFrame({"policy": CHANCE, "cache_ratio": [0.0, 1.0], metric: [0.0, 1.0], "n": 0})
    data = pd.concat([means, chance], ignore_index=True)
    words = _WORDS.get(metric, metric.replace("_", " "))
    policies = [name for name in policies_of(rows) if (data["policy"] == name).any()]
    names = legend_names(means, policies)
    figure, grid, n_columns = _grid(len(parts), 2.2)
    xlim = _limits((100 * means["cache_ratio"]).tolist())
    for i, (axes, part) in enumerate(zip(grid, parts, strict=True)):
        for policy, look in looks_of(policies).items():
            mine = part[part["policy"] == policy]
            x, y, low, high = (100 * mine[name] for name in ("cache_ratio", metric, "low", "high"))
            _line_with_intervals(axes, x, y, low, high, look, names[policy], best=policy == OPTIMUM)
            if mine["prefetched"].max() >= _SEEN:
                _cache_alone(axes, x, y, 100 * mine["prefetched"], look)
        axes.plot(100 * chance["cache_ratio"], 100 * chance[metric], label=CHANCE, zorder=1, **_CHANCE_LOOK)
        axes.set(xlim=xlim, ylim=(0, 103), ylabel="" if i % n_columns else f"{words} (%)")
        _name_panel(axes, part, panels, "cache ratio (% of all experts)" if i + n_columns >= len(parts) else "")
    parted = bool((means["prefetched"] >= _SEEN).any())
    handles = [*in_order(grid[0], names), *([Line2D([], [], label=_CACHE_ALONE, color=GREY, **_HOLLOW)] if parted else [])]
    legend_above(figure, handles, f"{capital(words)} by cache ratio")
    notes = ["one lookup per layer visit and distinct routed expert", *([_BOUND] if OPTIMUM in names else []), *not_shown(frame)]
    label_below(figure, rows, ["cache_ratio", *panels], *notes, axis="cache_ratio")
    sentences = [
        "One lookup per layer visit and distinct routed expert; thin, black and dashed: a cache with random content.",
        _SERVED if metric.startswith("hit_rate") else "",
        _OPTIMUM if OPTIMUM in policies_of(rows) else "",
        _PARTED if parted else "",
        "Cache ratios are those that fit into the budgets." if cache_column(rows) != "cache_ratio" else "",
    ]
    what = f"{capital(words)} against the share of all experts that the GPU caches."
    sentences += [repeats_sentence(rows), not_shown_sentences(frame)]
    return Drawing(data, figure, caption(what, rows, ["cache_ratio", cache_column(rows), *panels], *sentences))


def style_of(look: Look, *, best: bool = False) -> dict[str, Any]:
    """Return the style of a policy's line; the optimum is wide and below the others."""
    return {
        "color": look.colour, "marker": look.marker, "linestyle": look.dash, "markersize": 7 if best else 4.2,
        "linewidth": 1.9 if best else 1.1, "zorder": 2.9 if best else 3, "markeredgecolor": BLACK, "markeredgewidth": 0.4,
    }  # fmt: skip


def _line_with_intervals(
    axes: Axes, x: Any, y: pd.Series, low: pd.Series, high: pd.Series, look: Look, name: str, *, best: bool
) -> None:
    axes.plot(x, y, label=name, **style_of(look, best=best))
    if low.notna().any():
        axes.errorbar(x, y, yerr=[y - low, high - y], fmt="none", ecolor=look.colour, elinewidth=0.7, capsize=1.5)


def _with_prefetched(rows: pd.DataFrame, by: Sequence[str], metric: str) -> pd.DataFrame:
    means, column = summarised(rows, by, metric), _PREFETCHED.get(metric, "")
    if column not in rows or rows[column].isna().all():
        return means.assign(prefetched=math.nan)
    parts = summarised(rows, by, column)[[*by, column]]
    return means.merge(parts.rename(columns={column: "prefetched"}), "left", list(by))


def _cache_alone(axes: Axes, x: pd.Series, y: pd.Series, prefetched: pd.Series, look: Look) -> None:
    below = y - prefetched
    axes.fill_between(x, below, y, color=look.colour, alpha=0.18, linewidth=0, zorder=2)
    axes.vlines(x, below, y, color=look.colour, linewidth=0.7, zorder=2)
    style = {"color": look.colour, "linestyle": look.dash, **_HOLLOW, "marker": look.marker, "markeredgecolor": look.colour}
    axes.plot(x, below, zorder=3.5, **style)


def in_order(axes: Axes, names: Mapping[str, str]) -> list[Artist]:
    """Return the lines of a legend: policies in order, and chance."""
    handles = {str(handle.get_label()): handle for handle in axes.get_lines()}
    return [handles[name] for name in (*names.values(), CHANCE)]


def _limits(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values, default=0.0), max(values, default=100.0)
    if high - low >= 50:
        return 0.0, 100.0
    return max(0.0, low - _MARGIN), min(100.0, high + _MARGIN)


_MARKS_ON_LINE: Final = 8  # on a line
_TOKEN_COLUMNS: Final = ("phase", "token", "lookups", "hits", "cache_share")


def _by_token(rows: pd.DataFrame, smooth: int) -> pd.DataFrame:
    if smooth < 1 or smooth % 2 == 0:
        raise ConfigError(f"plot hit_rate_by_token: smooth: expected an odd number of tokens from 1, got {smooth}")
    parts = []
    for policy in policies_of(rows):
        mine = rows[rows["policy"] == policy]
        counts = mine.groupby("token")[["lookups", "hits"]].sum()
        around = counts.rolling(smooth, center=True, min_periods=1).sum()
        part = counts.assign(hit_rate=around["hits"] / around["lookups"].where(around["lookups"] > 0)).reset_index()
        parts.append(part.assign(policy=policy, **qualified(mine)))
    data = pd.concat(parts, ignore_index=True)
    shares = sorted({float(rows["cache_share"].min()), float(rows["cache_share"].max())})
    ends = [int(data["token"].min()), int(data["token"].max())]
    chance = pd.DataFrame([{"policy": CHANCE, "token": end, "hit_rate": share} for share in shares for end in ends])
    columns = ["policy", "token", "lookups", "hits", "hit_rate", "fresh", "source_label"]
    whole = {"lookups": "Int64", "hits": "Int64"}  # chance has none
    return pd.concat([data, chance], ignore_index=True)[columns].astype(whole)


def _decoded(frame: pd.DataFrame) -> pd.DataFrame:
    rows = prepared(frame, "hit_rate_by_token", _TOKEN_COLUMNS)
    rows = rows[(rows["phase"] == "decode") & rows["token"].notna()]
    if rows.empty:
        raise ConfigError(
            "plot hit_rate_by_token: expected decode steps with a token index, got none; runs with refill have none, as their "
            "sequences are at different tokens"
        )
    return rows.assign(token=rows["token"].astype(np.int64))


@kind("steps", "hit rate of decoding by token index")
def hit_rate_by_token(frame: pd.DataFrame, smooth: int = 1) -> Drawing:
    """Lines of the hit rate of decoding by token index."""
    rows = _decoded(frame)
    data = _by_token(rows, smooth)
    policies = policies_of(rows)
    names = legend_names(data, policies)
    figure, axes = new_figure(COLUMN, 2.1, "both")
    for number, (policy, look) in enumerate(looks_of(policies).items()):
        part, best = data[data["policy"] == policy], policy == OPTIMUM
        every = max(1, len(part) // _MARKS_ON_LINE)
        style = style_of(look, best=best) | {"markersize": 6 if best else 3.6, "linewidth": 1.7 if best else 1.0}
        axes.plot(
            part["token"], 100 * part["hit_rate"], label=names[policy], markevery=(number * every // 3 % every, every),
            clip_on=False, **style,
        )  # fmt: skip
    chance = data[data["policy"] == CHANCE]
    for share in chance["hit_rate"].unique():
        axes.axhline(100 * share, color=GREY, linestyle=":", linewidth=1.2, zorder=1, label=CHANCE)
    top = min(103, 10 * math.ceil(10.5 * data["hit_rate"].max()))
    ends = int(data["token"].min()), int(data["token"].max())
    axes.set(xlim=ends, ylim=(0, top), xlabel="decode token", ylabel="hit rate (%)")
    legend_above(figure, in_order(axes, names), "Hit rate by token")
    label_below(figure, rows, [], f"moving mean of {smooth} tokens" if smooth > 1 else "")
    per_token = rows.groupby(["policy", "token"])["lookups"].sum()
    many = numbers_between(int(per_token.min()), int(per_token.max()))
    sentences = [
        f"A point is hits over lookups of {many} lookups, one for each layer and distinct routed expert of the step.",
        f"Each point is taken over {smooth} neighbouring tokens." if smooth > 1 else "",
        "Dotted: a cache with random content.",
        f"{OPTIMUM} knows the future." if OPTIMUM in policies else "",
    ]
    what = "Hit rate of decoding by token index: the first token of decoding is 1."
    return Drawing(data, figure, caption(what, rows, [], *sentences))


_SPEED: Final = "decode_tokens_per_s"
STREAMS: Final = "batch_size"
CONTEXT: Final = "prompt_tokens"
_SPREAD: Final = 4  # values that differ by more are on a logarithmic axis
_PANEL: Final = 2.2  # inches that a panel needs
_HEIGHT: Final = {1: 2.0, 2: 1.75}  # of panels, in inches, by number of rows
_LOW: Final = 1.5  # the same with more rows


def shown_in(frame: pd.DataFrame, what: str, x: str | None, panel: str | None = None) -> list[str]:
    """Choose the settings on the axis and of panels."""
    return [name for name in axes_of(frame, what, x, panel) if name is not None]


def panel_in(frame: pd.DataFrame, what: str, panel: str | None) -> list[str]:
    """Return the setting of the panels, next to the cache on the axis, if one was asked for."""
    cache = cache_column(frame)
    return [] if panel is None else shown_in(frame, what, cache if cache in frame else None, panel)[1:]


def divided(data: pd.DataFrame, rows: pd.DataFrame, panels: Sequence[str]) -> list[pd.DataFrame]:
    """Divide data into those of panels, in the order of the setting; without a value: first."""
    if not panels:
        return [data]
    order = [group_name(value) for value in (None, *levels(rows, panels[0]))]
    parts = [part for _, part in data.groupby(panels[0], sort=False, dropna=False)]
    return sorted(parts, key=lambda part: order.index(group_name(part[panels[0]].iloc[0])))


def _grid(n: int, height: float) -> tuple[Figure, list[Axes], int]:
    """Make panels, the height of which is given if there is one; return how many stand side by side."""
    width = width_for(COLUMN if n == 1 else TEXT)
    n_rows = -(-n // columns_of(n, int(width / _PANEL), width, _LOW))
    n_columns = -(-n // n_rows)
    figure, grid = panels_of(n, n_columns, width, height if n == 1 else n_rows * _HEIGHT.get(n_rows, _LOW))
    for axes in grid:
        grid_of(axes, "both")
    return figure, grid, n_columns


def _name_panel(axes: Axes, part: pd.DataFrame, panels: Sequence[str], below: str) -> None:
    axes.set_xlabel(below)
    if panels:
        panel_title(axes, named(part[panels[0]].iloc[0], panels[0]))


@kind("rows", "throughput against concurrent streams")
def throughput(frame: pd.DataFrame, metric: str = _SPEED, panel: str | None = None) -> Drawing:
    """Lines of the speed of all streams together, or another metric, against the batch size."""
    title = _title(metric, "throughput", "concurrent streams")
    what = "the batch size is the number of requests that are active at once"
    rows = with_values(frame, "throughput", [metric, STREAMS])
    return _setting_drawing(frame, rows, "throughput", (STREAMS, panel), metric, "concurrent streams (batch size)", title, what)


@kind("rows", "speed against context length")
def speed_by_context(frame: pd.DataFrame, metric: str = _SPEED, panel: str | None = None) -> Drawing:
    """Lines of decode speed, or another metric, against the length of prompts."""
    rows = with_values(frame, "speed_by_context", [metric, CONTEXT])
    lengths = sorted({group_name(n) for n in rows["decode_tokens"].dropna()}) if "decode_tokens" in rows else []
    more = f"decoding adds {' or '.join(lengths)} tokens to the context" if lengths else ""
    title = _title(metric, "speed", "context length")
    return _setting_drawing(
        frame, rows, "speed_by_context", (CONTEXT, panel), metric, "prompt (tokens)", title, more, *_of_context(rows, metric)
    )


@kind("rows", "speed-up over a baseline policy, as lines against a swept setting")
def speedup_lines(
    frame: pd.DataFrame, baseline: str | None = None, metric: str = _SPEED, x: str | None = None, panel: str | None = None
) -> Drawing:  # fmt: skip
    """Lines of speed-ups over a baseline against one setting, with intervals of repeats."""
    rows = with_values(frame, "speedup_lines", [metric])
    (x, *panels), baseline = shown_in(rows, "speedup_lines", x, panel), baseline_of(rows, baseline, "speedup_lines")
    if x == "policy":
        raise ConfigError("plot speedup_lines: expected results with a column of a setting, got none; give those of `moesim run`")
    pairs = paired(rows, baseline, metric, "speedup_lines")
    by = [*panels, "policy", x]
    groups = pairs.groupby(by, sort=False, dropna=False)
    data = pd.DataFrame([geometric(part, dict(zip(by, values, strict=True))) for values, part in groups])
    names = [name for name in policies_of(rows) if name != baseline]
    star = "*" if baseline in inexact(rows) else ""
    words = Words(f"Speed-up over {baseline}", WORDS.get(x, x), f"speed-up over {baseline}{star}")
    data, figure = setting_figure(data, rows, names, words, (x, *panels), "speedup", level=1.0)
    labelled_rows = labelled(rows, data)
    label_below(figure, labelled_rows, [x, *panels], *not_shown(frame), axis=x)
    repeats = repeats_sentence(rows, "Geometric means", "Student's t, logarithms")
    sentences = repeats, not_drawn(rows, BOTH_MOVE), not_shown_sentences(frame)
    name = metric_name(metric) if metric.endswith("_ns") else AXES.get(metric, metric).replace("\n", " ")
    what = f"Speed-up over {baseline} ({name}) against {WORDS.get(x, x)}, like with like; dashed: {baseline}."
    return Drawing(data, figure, caption(what, labelled_rows, [x, *panels], *sentences))


def _of_context(rows: pd.DataFrame, metric: str) -> list[str]:
    flat = "Decode speed hardly depends on the context where a layer's attention takes less than its launches."
    again = "Prompts longer than recorded ones repeat rows (`reuse: shifted`)."
    shifted = "reuse" in rows and (rows["reuse"] == "shifted").any()
    return [*([flat] if metric.startswith("decode_tokens_per_s") else []), *([again] if shifted else [])]


def _title(metric: str, usual: str, by: str) -> str:
    return f"{capital(usual if metric == _SPEED else metric_name(metric))} by {by}"


def with_values(frame: pd.DataFrame, what: str, columns: Sequence[str]) -> pd.DataFrame:
    """Keep the rows that have all of some columns; ConfigError if none has one of them."""
    rows = prepared(frame, what, columns)
    for name in columns:
        if rows[name].isna().all():
            raise ConfigError(f"plot {what}: expected runs with a value of {name}, got none; `moesim run` of a sweep over it has")
    return rows[rows[columns].notna().all(axis=1)].reset_index(drop=True)


def _setting_drawing(
    frame: pd.DataFrame, rows: pd.DataFrame, kind: str, asked: tuple[str, str | None], metric: str, label: str, title: str,
    more: str, *notes: str,
) -> Drawing:  # fmt: skip
    x, *panel = shown_in(rows, kind, *asked)
    data = summarised(rows, [*panel, "policy", x], metric)
    words = Words(title, label, axis_of(metric, float(data[metric].max()))[0])
    data, figure = setting_figure(data, rows, policies_of(rows), words, (x, *panel), metric)
    label_below(figure, rows, [x, *panel], *not_shown(frame), axis=x)
    what = f"{title}: {words.y}.".replace("\n", " ")
    sentences = sentence(more), *notes, repeats_sentence(rows), not_drawn(rows), not_shown_sentences(frame)
    return Drawing(data, figure, caption(what, rows, [x, *panel], *sentences))


def setting_figure(
    data: pd.DataFrame, rows: pd.DataFrame, policies: Sequence[str], words: Words, shown: Sequence[str], metric: str,
    level: float | None = None,
) -> tuple[pd.DataFrame, Figure]:  # fmt: skip
    """Draw lines over a setting; return their sorted data as well."""
    x, *panel = shown
    orders = {name: [group_name(value) for value in (None, *levels(rows, name))] for name in shown}  # without a value: first
    places = [[orders[name].index(group_name(value)) for value in data[name]] for name in shown]
    ranks = list(zip(*places[1:], [list(policies).index(name) for name in data["policy"]], places[0], strict=True))
    data = data.iloc[sorted(range(len(data)), key=ranks.__getitem__)].reset_index(drop=True)
    scale = axis_of(metric, float(data[metric].max()))[1]
    parts = [part for _, part in data.groupby(panel, sort=False, dropna=False)] if panel else [data]
    figure, grid, n_columns = _grid(len(parts), _HEIGHT[1])
    looks = looks_of(policies)
    tops = []
    for i, (axes, part) in enumerate(zip(grid, parts, strict=True)):
        below = i + n_columns >= len(parts)
        at = _axis(axes, [None] * bool(data[x].isna().any()) + levels(data, x), x, words.x if below else "")
        for policy, legend in legend_names(data, policies).items():
            mine = part[part["policy"] == policy]
            values, low, high = (mine[name] / scale for name in (metric, "low", "high"))
            where = [at[group_name(value)] for value in mine[x]]
            _line_with_intervals(axes, where, values, low, high, looks[policy], legend, best=policy == OPTIMUM)
        if level is not None:
            axes.axhline(level, color=BLACK, linewidth=0.8, linestyle="--", zorder=0.9)
        tops.append(1.08 * float(np.nanmax([part[metric].max() / scale, part["high"].max() / scale, level or 0.0])))
        if panel:
            panel_title(axes, named(part[panel[0]].iloc[0], panel[0]))
        if i % n_columns == 0:
            axes.set_ylabel(words.y)
    limit_panels(figure.axes, tops)
    legend_above(figure, grid[0].get_legend_handles_labels()[0], words.title)
    return data, figure


def _axis(axes: Axes, values: Sequence[Any], x: str, label: str) -> Mapping[str, float]:
    """Make the x axis; return the place of each value."""
    texts = [group_name(value, x) for value in values]
    numbers = all(isinstance(value, int | float | np.number) and not isinstance(value, bool | np.bool_) for value in values)
    at = [float(value) for value in values] if numbers else [float(i) for i in range(len(values))]
    if numbers and min(at) > 0 and max(at) > _SPREAD * min(at):
        axes.set_xscale("log", base=2)
    axes.set_xticks(at, texts)
    axes.minorticks_off()
    axes.set_xlabel(label)
    return dict(zip([group_name(value) for value in values], at, strict=True))


MEMORY: Final = "peak_memory_bytes.gpu"
"""Beginning of the columns of memory in use on each GPU."""
_GIB: Final = 1 << 30


def _memory_and_speed(rows: pd.DataFrame, panels: Sequence[str]) -> list[pd.DataFrame]:
    by = [*panels, "policy", *(name for name in (cache_column(rows),) if name in rows)]
    data = summarised(rows, by, _SPEED)
    memory = summarised(rows[rows[_SPEED].notna()], by, "gpu_memory_gib")["gpu_memory_gib"]
    data.insert(len(by), "gpu_memory_gib", memory.to_numpy())
    data["comparable"] = [
        is_exact(fresh) and label != "oracle" for fresh, label in zip(data["fresh"], data["source_label"], strict=True)
    ]
    return [_with_front(part) for part in divided(data, rows, panels)]


def _with_front(data: pd.DataFrame) -> pd.DataFrame:
    usable = data[data["comparable"]]
    on_front = front(usable["gpu_memory_gib"].tolist(), usable[_SPEED].tolist())
    return data.assign(on_front=data.index.isin(usable.index[on_front]))


def _with_memory(frame: pd.DataFrame) -> pd.DataFrame:
    rows = prepared(frame, "vram", [_SPEED])
    columns = [name for name in rows.columns.astype(str) if name.startswith(MEMORY)]
    if not columns or rows[columns].isna().all().all():
        raise ConfigError(f"plot vram: expected columns {MEMORY}0 and so on, got none; draw runs on a machine with a GPU")
    return rows.assign(gpu_memory_gib=rows[columns].astype(float).sum(axis=1) / _GIB)


def front(cost: Sequence[float], gain: Sequence[float]) -> list[bool]:
    """Mark the points that no other one beats.

    >>> front([1, 2, 2, 3], [5, 9, 7, 9])
    [True, True, False, False]
    """
    points = list(zip(cost, gain, strict=True))
    return [not any(c <= a and g >= b and (c, g) != (a, b) for c, g in points) for a, b in points]


@kind("rows", "GPU memory against decode speed, with the Pareto front")
def vram(frame: pd.DataFrame, panel: str | None = None) -> Drawing:
    """Points of policies, and the front as a line of steps; hollow: not exact, or an oracle's."""
    rows = _with_memory(frame)
    panels = panel_in(rows, "vram", panel)
    parts = _memory_and_speed(rows, panels)
    data = pd.concat(parts, ignore_index=True)
    policies = [name for name in policies_of(rows) if (data["policy"] == name).any()]
    names = legend_names(data, policies)
    figure, grid, n_columns = _grid(len(parts), 2.3)
    handles: dict[str, Artist] = {}
    for i, (axes, of_panel) in enumerate(zip(grid, parts, strict=True)):
        best = of_panel[of_panel["on_front"]].sort_values("gpu_memory_gib", kind="stable")
        axes.plot(best["gpu_memory_gib"], best[_SPEED], color=GREY, linewidth=3, drawstyle="steps-post", solid_joinstyle="miter",
                  alpha=0.6, zorder=1)  # fmt: skip
        for policy, look in looks_of(policies).items():
            part = of_panel[of_panel["policy"] == policy].sort_values("gpu_memory_gib", kind="stable")
            filled = bool(data.loc[data["policy"] == policy, "comparable"].all())
            style: dict[str, Any] = {
                "color": look.colour, "marker": look.marker, "linestyle": look.dash, "linewidth": 0.6, "markersize": 5,
                "markerfacecolor": look.colour if filled else WHITE, "markeredgecolor": BLACK if filled else look.colour,
                "markeredgewidth": 0.4 if filled else 1.1,
            }  # fmt: skip
            axes.plot(part["gpu_memory_gib"], part[_SPEED], zorder=3, **style)
            seeds = [part[_SPEED] - part["low"], part["high"] - part[_SPEED]]
            axes.errorbar(
                part["gpu_memory_gib"], part[_SPEED], yerr=seeds, fmt="none", ecolor=look.colour, elinewidth=0.7, capsize=1.5
            )
            handles[policy] = Line2D([], [], label=names[policy], **style)
        axes.margins(x=0.08)
        axes.set_ylabel("" if i % n_columns else AXES[_SPEED])
        _name_panel(axes, of_panel, panels, "peak GPU memory (GiB)" if i + n_columns >= len(parts) else "")
    limit_panels(grid, [1.12 * float(part[_SPEED].max()) for part in parts])
    front_line = Line2D([], [], color=GREY, linewidth=3, alpha=0.6, label="Pareto front")
    legend_above(figure, [*handles.values(), front_line], "GPU memory and decode speed")
    hollow = "hollow: not exact, or an oracle's, and so not on the front"
    label_below(figure, rows, [cache_column(rows), *panels], hollow, *not_shown(frame), axis=cache_column(rows))
    text = "Grey: the Pareto front of the policies that are exact and need no oracle; the others are hollow."
    what = "Peak GPU memory, all GPUs together and everything counted, against decode speed of the whole batch."
    several = qualified(rows)["source_label"] is not None and rows[cache_column(rows)].nunique() > 1
    lines = "A line joins the cache sizes of one policy." if several else ""
    sentences = text, lines, repeats_sentence(rows), not_drawn(rows), not_shown_sentences(frame)
    return Drawing(data, figure, caption(what, rows, [cache_column(rows), *panels], *sentences))
