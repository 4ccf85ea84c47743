"""Lines of speed and speed-up against one swept setting, such as concurrent streams or the length of prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moesim.core.colours import BLACK
from moesim.errors import ConfigError
from moesim.plots.bars import AXES, axes_of, axis_of, legend_names, metric_name
from moesim.plots.captions import averaged, caption, corner_label, repeats_sentence
from moesim.plots.ends import not_drawn
from moesim.plots.exactness import inexact, meaning
from moesim.plots.failures import not_shown, not_shown_sentences
from moesim.plots.grouped import Words, limit_panels
from moesim.plots.kinds import Drawing, kind
from moesim.plots.lines import style_of
from moesim.plots.looks import Look, looks_of
from moesim.plots.rows import WORDS, group_name, levels, named, policies_of, prepared, summarised
from moesim.plots.speedup import BOTH_MOVE, baseline_of, geometric, labelled, paired
from moesim.plots.style import OPTIMUM, add_corner, legend_above
from moesim.plots.widths import COLUMN, TEXT, width_for

_SPEED: Final = "decode_tokens_per_s"
STREAMS: Final = "batch_size"
CONTEXT: Final = "prompt_tokens"
_SPREAD: Final = 4  # values that differ by more are on a logarithmic axis
_PANEL: Final = 2.2  # inches that a panel needs
_HEIGHT: Final = {1: 2.0, 2: 1.75}  # of panels, in inches, by number of rows
_LOW: Final = 1.5  # the same with more rows


def shown_in(frame: pd.DataFrame, what: str, x: str | None) -> list[str]:
    """Choose what is on the axis, the setting asked for or else the one that groups bars; after it, what divides panels."""
    return [name for name in axes_of(frame, what, x) if name is not None]


@kind("rows", "throughput against concurrent streams")
def throughput(frame: pd.DataFrame, metric: str = _SPEED) -> Drawing:
    """Lines of the speed of all streams together, or another metric, against the batch size."""
    title = _title(metric, "throughput", "concurrent streams")
    what = "the batch size is the number of requests that are active at once"
    rows = _prepared(frame, "throughput", [metric, STREAMS])
    return _drawing(frame, rows, "throughput", STREAMS, metric, "concurrent streams (batch size)", title, what)


@kind("rows", "speed against context length")
def speed_by_context(frame: pd.DataFrame, metric: str = _SPEED) -> Drawing:
    """Lines of decode speed, or another metric, against the length of prompts."""
    rows = _prepared(frame, "speed_by_context", [metric, CONTEXT])
    told = sorted({group_name(n) for n in rows["decode_tokens"].dropna()}) if "decode_tokens" in rows else []
    more = f"decoding adds {' or '.join(told)} tokens to the context" if told else ""
    title = _title(metric, "speed", "context length")
    return _drawing(frame, rows, "speed_by_context", CONTEXT, metric, "prompt (tokens)", title, more, *_of_context(rows, metric))


@kind("rows", "speed-up over a baseline policy, as lines against a swept setting")
def speedup_lines(frame: pd.DataFrame, baseline: str | None = None, metric: str = _SPEED, x: str | None = None) -> Drawing:
    """Lines of speed-ups over a baseline against one setting, each with the interval of its repeats."""
    rows = _prepared(frame, "speedup_lines", [metric])
    (x, *panel), baseline = shown_in(rows, "speedup_lines", x), baseline_of(rows, baseline, "speedup_lines")
    if x == "policy":
        raise ConfigError("plot speedup_lines: expected results with a column of a setting, got none; give those of `moesim run`")
    pairs = paired(rows, baseline, metric, "speedup_lines")
    by = [*panel, "policy", x]
    groups = pairs.groupby(by, sort=False, dropna=False)
    data = pd.DataFrame([geometric(part, dict(zip(by, values, strict=True))) for values, part in groups])
    names = [name for name in policies_of(rows) if name != baseline]
    words = Words(f"Speed-up over {baseline}", WORDS.get(x, x), f"speed-up over\n{baseline}{_star(rows, baseline)}")
    data, figure = _figure(data, rows, names, words, (x, *panel), "speedup", level=1.0)
    told = labelled(rows, data)
    add_corner(figure, corner_label(told, x), [*averaged(rows, [x, *panel]), *not_shown(frame), meaning(inexact(rows))])
    repeats = repeats_sentence(rows, "Geometric means", "Student's t, logarithms")
    sentences = repeats, not_drawn(rows, BOTH_MOVE), not_shown_sentences(frame)
    what = f"Speed-up over {baseline} ({_worded(metric)}) against {WORDS.get(x, x)}, like with like; dashed: {baseline}."
    return Drawing(data, figure, caption(what, told, [x, *panel], *sentences))


def _of_context(rows: pd.DataFrame, metric: str) -> list[str]:
    """Say why lines over the context may be flat, and where its rows come from."""
    flat = "Decode speed hardly depends on the context where a layer's attention takes less than its launches."
    again = "Prompts longer than recorded ones repeat rows (`reuse: shifted`)."
    shifted = "reuse" in rows and (rows["reuse"] == "shifted").any()
    return [*([flat] if metric.startswith("decode_tokens_per_s") else []), *([again] if shifted else [])]


def _star(rows: pd.DataFrame, policy: str) -> str:
    return "*" if policy in inexact(rows) else ""


def _worded(metric: str) -> str:
    return (metric_name(metric) if metric.endswith("_ns") else AXES.get(metric, metric)).replace("\n", " ")


def _title(metric: str, usual: str, by: str) -> str:
    """Say in a title what is drawn over what."""
    word = usual if metric == _SPEED else metric_name(metric)
    return f"{word[0].upper()}{word[1:]} by {by}"


def _prepared(frame: pd.DataFrame, what: str, columns: Sequence[str]) -> pd.DataFrame:
    rows = prepared(frame, what, columns)
    for name in columns:
        if rows[name].isna().all():
            raise ConfigError(f"plot {what}: expected runs with a value of {name}, got none; `moesim run` of a sweep over it has")
    return rows[rows[columns].notna().all(axis=1)].reset_index(drop=True)


def _drawing(
    frame: pd.DataFrame, rows: pd.DataFrame, kind: str, x: str, metric: str, label: str, title: str, more: str, *notes: str
) -> Drawing:
    """Draw the means of a metric."""
    x, *panel = shown_in(rows, kind, x)
    data = summarised(rows, [*panel, "policy", x], metric)
    words = Words(title, label, axis_of(metric, float(data[metric].max()))[0])
    data, figure = _figure(data, rows, policies_of(rows), words, (x, *panel), metric)
    add_corner(figure, corner_label(rows, x), [*averaged(rows, [x, *panel]), *not_shown(frame), meaning(inexact(rows))])
    told = words.y.replace("\n", " ")
    what = f"{title}: {told}." + (f" {more[0].upper()}{more[1:]}." if more else "")
    sentences = *notes, repeats_sentence(rows), not_drawn(rows), not_shown_sentences(frame)
    return Drawing(data, figure, caption(what, rows, [x, *panel], *sentences))


def _figure(
    data: pd.DataFrame,
    rows: pd.DataFrame,
    policies: Sequence[str],
    words: Words,
    shown: Sequence[str],
    metric: str,
    level: float | None = None,
) -> tuple[pd.DataFrame, Figure]:
    """Draw lines over a setting, in panels by another; gives their data in the order of panels, policies and settings as well."""
    x, *panel = shown
    orders = {name: [group_name(value) for value in (None, *levels(rows, name))] for name in shown}  # without a value: first
    places = [[orders[name].index(group_name(value)) for value in data[name]] for name in shown]
    ranks = list(zip(*places[1:], [list(policies).index(name) for name in data["policy"]], places[0], strict=True))
    data = data.iloc[sorted(range(len(data)), key=ranks.__getitem__)].reset_index(drop=True)
    scale = axis_of(metric, float(data[metric].max()))[1]
    parts = [part for _, part in data.groupby(panel, sort=False, dropna=False)] if panel else [data]
    figure, grid = _grid(len(parts))
    looks = looks_of(policies)
    tops = []
    for i, (axes, part) in enumerate(zip(grid.ravel().tolist(), parts, strict=False)):
        axes.grid(visible=True, axis="both")
        below = i + grid.shape[1] >= len(parts)
        at = _axis(axes, [None] * bool(data[x].isna().any()) + levels(data, x), x, words.x if below else "")
        for policy, legend in legend_names(data, policies).items():
            _line(axes, part[part["policy"] == policy], (x, metric), at, scale, looks[policy], legend, best=policy == OPTIMUM)
        if level is not None:
            axes.axhline(level, color=BLACK, linewidth=0.8, linestyle="--", zorder=0.9)
        tops.append(1.08 * float(np.nanmax([part[metric].max() / scale, part["high"].max() / scale, level or 0.0])))
        if panel:
            axes.set_title(named(part[panel[0]].iloc[0], panel[0]), fontsize=7.5, fontweight="normal")
        if i % grid.shape[1] == 0:
            axes.set_ylabel(words.y)
    limit_panels(figure.axes, tops)
    legend_above(figure, grid[0, 0].get_legend_handles_labels()[0], words.title)
    return data, figure


def _grid(n_panels: int) -> tuple[Figure, Any]:
    """Make a figure with as many panels side by side as its width has room for."""
    width = width_for(COLUMN if n_panels == 1 else TEXT)
    n_rows = -(-n_panels // max(1, int(width / _PANEL)))
    n_columns = -(-n_panels // n_rows)
    figure = Figure(figsize=(width, n_rows * _HEIGHT.get(n_rows, _LOW)), layout="constrained")
    grid = figure.subplots(n_rows, n_columns, squeeze=False)
    for axes in grid.ravel()[n_panels:]:
        axes.remove()
    return figure, grid


def _line(
    axes: Axes, part: pd.DataFrame, names: tuple[str, str], places: Mapping[str, float], scale: float, look: Look, legend: str,
    *, best: bool,
) -> None:  # fmt: skip
    """Draw the line of a policy, with its intervals."""
    x, metric = names
    at = [places[group_name(value)] for value in part[x]]
    axes.plot(at, part[metric] / scale, label=legend, **style_of(look, best=best))
    if part["low"].notna().any():
        spread: Any = [(part[metric] - part["low"]) / scale, (part["high"] - part[metric]) / scale]
        axes.errorbar(at, part[metric] / scale, yerr=spread, fmt="none", ecolor=look.colour, elinewidth=0.7, capsize=1.5)


def _axis(axes: Axes, values: Sequence[Any], x: str, label: str) -> Mapping[str, float]:
    """Make the x axis; gives the place of each value: numbers stand where they are, names side by side."""
    texts = [group_name(value, x) for value in values]
    numbers = all(isinstance(value, int | float | np.number) and not isinstance(value, bool | np.bool_) for value in values)
    at = [float(value) for value in values] if numbers else [float(i) for i in range(len(values))]
    if numbers and min(at) > 0 and max(at) > _SPREAD * min(at):
        axes.set_xscale("log", base=2)
    axes.set_xticks(at, texts)
    axes.minorticks_off()
    axes.set_xlabel(label)
    return dict(zip([group_name(value) for value in values], at, strict=True))
