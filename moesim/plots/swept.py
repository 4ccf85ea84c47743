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
from moesim.plots.grouped import Words
from moesim.plots.kinds import Drawing, kind
from moesim.plots.lines import style_of
from moesim.plots.looks import looks_of
from moesim.plots.rows import WORDS, group_name, levels, policies_of, prepared, summarised
from moesim.plots.speedup import baseline_of, geometric, labelled, paired
from moesim.plots.style import OPTIMUM, add_corner, legend_above, new_figure
from moesim.plots.widths import COLUMN

_SPEED: Final = "decode_tokens_per_s"
STREAMS: Final = "batch_size"
CONTEXT: Final = "prompt_tokens"
_SPREAD: Final = 4  # values that differ by more are on a logarithmic axis


def swept_axis(frame: pd.DataFrame, x: str | None) -> str:
    """Choose what is on the axis: the setting asked for, else the one that groups bars."""
    return axes_of(frame, x)[0]


@kind("rows", "throughput against concurrent streams")
def throughput(frame: pd.DataFrame, metric: str = _SPEED) -> Drawing:
    """Lines of the speed of all streams together, or another metric, against the batch size."""
    title = _title(metric, "throughput", "concurrent streams")
    what = "the batch size is the number of requests that are active at once"
    rows = _prepared(frame, "throughput", [metric, STREAMS])
    return _drawing(frame, rows, STREAMS, metric, "concurrent streams (batch size)", title, what)


@kind("rows", "speed against context length")
def speed_by_context(frame: pd.DataFrame, metric: str = _SPEED) -> Drawing:
    """Lines of decode speed, or another metric, against the length of prompts."""
    rows = _prepared(frame, "speed_by_context", [metric, CONTEXT])
    told = sorted({group_name(n) for n in rows["decode_tokens"].dropna()}) if "decode_tokens" in rows else []
    more = f"decoding adds {' or '.join(told)} tokens to the context" if told else ""
    title = _title(metric, "speed", "context length")
    return _drawing(frame, rows, CONTEXT, metric, "prompt (tokens)", title, more, *_of_context(rows, metric))


@kind("rows", "speed-up over a baseline policy, as lines against a swept setting")
def speedup_lines(frame: pd.DataFrame, baseline: str | None = None, metric: str = _SPEED, x: str | None = None) -> Drawing:
    """Lines of speed-ups over a baseline against one setting, each with the interval of its repeats."""
    rows = _prepared(frame, "speedup_lines", [metric])
    x, baseline = swept_axis(rows, x), baseline_of(rows, baseline, "speedup_lines")
    if x == "policy":
        raise ConfigError("plot speedup_lines: expected results with a column of a setting, got none; give those of `moesim run`")
    pairs = paired(rows, baseline, metric, "speedup_lines")
    groups = pairs.groupby(["policy", x], sort=False, dropna=False)
    found = [geometric(part, {"policy": policy, x: value}) for (policy, value), part in groups]
    data = pd.DataFrame(found)
    names = [name for name in policies_of(rows) if name != baseline]
    words = Words(f"Speed-up over {baseline}", WORDS.get(x, x), f"speed-up over\n{baseline}{_star(rows, baseline)}")
    data, figure = _figure(data, rows, names, words, (x, "speedup"), level=1.0)
    told = labelled(rows, data)
    add_corner(figure, corner_label(told, x), [*averaged(rows, [x]), *not_shown(frame), meaning(inexact(rows))])
    repeats = repeats_sentence(rows, "Geometric means", "Student's t, logarithms")
    sentences = repeats, not_drawn(rows), not_shown_sentences(frame)
    what = f"Speed-up over {baseline} ({_worded(metric)}) against {WORDS.get(x, x)}, like with like; dashed: {baseline}."
    return Drawing(data, figure, caption(what, told, [x], *sentences))


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
    frame: pd.DataFrame, rows: pd.DataFrame, x: str, metric: str, label: str, title: str, more: str, *notes: str
) -> Drawing:
    """Draw the means of a metric."""
    data = summarised(rows, ["policy", x], metric)
    words = Words(title, label, axis_of(metric, float(data[metric].max()))[0])
    data, figure = _figure(data, rows, policies_of(rows), words, (x, metric))
    add_corner(figure, corner_label(rows, x), [*averaged(rows, [x]), *not_shown(frame), meaning(inexact(rows))])
    told = words.y.replace("\n", " ")
    what = f"{title}: {told}." + (f" {more[0].upper()}{more[1:]}." if more else "")
    return Drawing(data, figure, caption(what, rows, [x], *notes, repeats_sentence(rows), not_shown_sentences(frame)))


def _figure(
    data: pd.DataFrame,
    rows: pd.DataFrame,
    policies: Sequence[str],
    words: Words,
    names: tuple[str, str],
    level: float | None = None,
) -> tuple[pd.DataFrame, Figure]:
    """Draw lines over a setting; gives their data in the order of policies and settings as well."""
    x, metric = names
    order = [group_name(value) for value in (None, *levels(rows, x))]  # runs without a value stand first
    ranks = [(list(policies).index(p), order.index(group_name(v))) for p, v in zip(data["policy"], data[x], strict=True)]
    data = data.iloc[sorted(range(len(data)), key=ranks.__getitem__)].reset_index(drop=True)
    scale = axis_of(metric, float(data[metric].max()))[1]
    figure, axes = new_figure(COLUMN, 2.0)
    axes.grid(visible=True, axis="both")
    places = _axis(axes, [None] * bool(data[x].isna().any()) + levels(data, x), x, words.x)
    looks = looks_of(policies)
    for policy, legend in legend_names(data, policies).items():
        part = data[data["policy"] == policy]
        at = [places[group_name(value)] for value in part[x]]
        axes.plot(at, part[metric] / scale, label=legend, **style_of(looks[policy], best=policy == OPTIMUM))
        if part["low"].notna().any():
            spread: Any = [(part[metric] - part["low"]) / scale, (part["high"] - part[metric]) / scale]
            axes.errorbar(
                at, part[metric] / scale, yerr=spread, fmt="none", ecolor=looks[policy].colour, elinewidth=0.7, capsize=1.5
            )
    handles, _ = axes.get_legend_handles_labels()
    if level is not None:
        axes.axhline(level, color=BLACK, linewidth=0.8, linestyle="--", zorder=0.9)
    axes.set_ylim(0, 1.08 * float(np.nanmax([data[metric].max() / scale, data["high"].max() / scale, level or 0.0])))
    axes.set_ylabel(words.y)
    legend_above(figure, handles, words.title)
    return data, figure


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
