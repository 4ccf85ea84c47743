"""The best of whatever a sweep varies, by two of its settings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import pandas as pd
from matplotlib.patches import Rectangle

from moesim.core.colours import SERIES, WHITE, text_on
from moesim.errors import ConfigError, unknown_name
from moesim.metrics.naming import value_in_words
from moesim.plots.bars import axis_of
from moesim.plots.captions import caption, label_below, repeats_sentence
from moesim.plots.result_rows import (
    WORDS,
    column_of,
    group_name,
    inexact,
    levels,
    named,
    prepared,
    settings_in,
    star,
    summarised,
    varying,
)
from moesim.plots.style import COLUMN, SMALL, TEXT, Drawing, alike, kind, legend_above, looks_of, new_figure, swatch, text_width

_CELL: Final = 0.2  # inches that a line of a cell is high
_TIE: Final = 1.02  # from here on the best is no tie with the second
APART: Final = ("hardware", "trace")  # each has a figure of its own


def competing(frame: pd.DataFrame, x: str, y: str) -> list[str]:
    """List what varies in a map of the best setting, but for its axes: that is what competes."""
    return [name for name in ("policy", *varying(frame, [x, y])) if name not in APART and frame[name].astype(str).nunique() > 1]


@kind("rows", "the best of what else was varied, by two settings")
def best_setting(
    frame: pd.DataFrame, x: str = "prompt_tokens", y: str = "closed", metric: str = "decode_tokens_per_s"
) -> Drawing:  # fmt: skip
    """Cells with the best mean of a metric over all else that was varied, coloured by the setting that has it."""
    rows = prepared(frame, "best_setting", [metric])
    x, y = column_of(rows, x), column_of(rows, y if y in rows and rows[y].notna().any() else "batch_size")
    known = settings_in(rows)
    for name in (x, y):
        if name not in known:
            raise ConfigError(f"plot best_setting: {unknown_name('setting', name, known)}")
        if rows[name].isna().any():
            raise ConfigError(
                f"plot best_setting: expected {name} of every run, got runs without; name settings that vary with --x and --y"
            )
    others = competing(rows, x, y) or ["policy"]
    data = summarised(rows, [y, x, *others], metric).dropna(subset=[metric])
    marks = dict.fromkeys(inexact(rows), "*")
    data["setting"] = [_setting(one, data, others, marks) for one in data[others].to_dict("records")]
    least = metric.endswith("_ns")  # of times the least is the best
    data["place"] = data.groupby([y, x], sort=False)[metric].rank(ascending=least, method="first")
    best = data[data["place"] == 1]
    second = data[data["place"] == 2].set_index([y, x])[metric]
    columns, lines = levels(rows, x), levels(rows, y)
    counts = best["setting"].value_counts(sort=False)
    several = others != ["policy"]  # settings are no policies; all have a colour, whichever are the best
    names = list(dict.fromkeys(data["setting"])) if several else []
    colours = {name: SERIES[i % len(SERIES)] for i, name in enumerate(names)} or {
        f"{name}{marks.get(name, '')}": look.colour for name, look in looks_of(list(dict.fromkeys(best["policy"]))).items()
    }
    label, scale = axis_of(metric, float(best[metric].max()))
    longest = max(text_width(name, 7.0) for name in counts.index)
    figure, axes = new_figure(COLUMN if len(columns) < 6 and longest + 0.8 < COLUMN else TEXT, 0.8 + 2 * _CELL * len(lines))
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.set(xlim=(-0.5, len(columns) - 0.5), ylim=(-0.5, len(lines) - 0.5), xlabel=WORDS.get(x, x), ylabel=WORDS.get(y, y))
    for one, value in zip(best.to_dict("records"), alike(best[metric].astype(float) / scale), strict=True):
        column, line, colour = columns.index(one[x]), lines.index(one[y]), colours[one["setting"]]
        axes.add_patch(Rectangle((column - 0.5, line - 0.5), 1, 1, facecolor=colour, edgecolor=WHITE, linewidth=0.8))
        ratio = one[metric] / second.get((one[y], one[x]), math.nan)
        ratio = 1 / ratio if least else ratio
        on, gain = text_on(colour), "" if math.isnan(ratio) else f"\n×{ratio:.2f}"
        if ratio < _TIE:
            hatch: dict[str, Any] = {"fill": False, "hatch": "////", "linewidth": 0, "edgecolor": on, "alpha": 0.3}
            axes.add_patch(Rectangle((column - 0.5, line - 0.5), 1, 1, **hatch))
        text = f"{value}{star(one['fresh'])}{gain}"
        box = {"facecolor": colour, "edgecolor": "none", "pad": 0.6}
        axes.text(column, line, text, ha="center", va="center", fontsize=SMALL, color=on, bbox=box)
    axes.set_xticks(range(len(columns)), [group_name(value, x) for value in columns])
    axes.set_yticks(range(len(lines)), [group_name(value, y) for value in lines])
    legend = [swatch(colours[name], f"{name} ({counts[name]})") for name in counts.index]
    legend_above(figure, legend, "The best by " + label.replace("\n", " "))
    notes = "below: the best over the second; hatched: less than 2 % better", "white: no run succeeded"
    label_below(figure, rows, [x, y, *others], *notes)
    what = (
        f"The setting with the {'least' if least else 'largest'} {label} by {WORDS.get(x, x)} and {WORDS.get(y, y)}, and below "
        "it how much better than the second "
        f"of {data['setting'].nunique()}: {'; '.join(dict.fromkeys(data['setting']))}. In the legend: in how many cells it is "
        "the best. Hatched: less than 2 % better. White: no run succeeded, mostly for want of memory."
    ).replace("\n", " ")
    shown = best.drop(columns="place").reset_index(drop=True)
    return Drawing(shown, figure, caption(what, rows, [x, y, *others], repeats_sentence(rows, how=None)))


def _setting(one: Mapping[Any, Any], data: pd.DataFrame, others: Sequence[str], marks: Mapping[str, str]) -> str:
    """Name what competes; of models what they do not have in common."""
    words = []
    for name in others:
        if name == "policy":
            words.append(f"{one[name]}{marks.get(str(one[name]), '')}")
            continue
        if name == "kv":
            words.append(value_in_words(one[name], name))
            continue
        if name != "model":
            words.append(named(one[name], name))
            continue
        of = {str(model): set(str(model).partition(" (")[2].rstrip(")").split(", ")) for model in data["model"].unique()}
        common = set.intersection(*of.values())
        words.append(", ".join(sorted(of[str(one[name])] - common - {""})) or str(one[name]).partition(" (")[0])
    return ", ".join(words)
