"""A metric over two options of a policy, or any two settings, as a heat map; and the best of what else was varied."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import pandas as pd
from matplotlib.colors import Normalize, to_hex
from matplotlib.patches import Rectangle

from moesim.core.colours import BLACK, SERIES, WHITE, text_on
from moesim.errors import ConfigError, unknown_name
from moesim.plots.bars import axis_of
from moesim.plots.captions import (
    averaged,
    caption,
    corner_label,
    meaning,
    not_drawn,
    not_shown,
    not_shown_sentences,
    repeats_sentence,
)
from moesim.plots.result_rows import (
    WORDS,
    column_of,
    failing,
    group_name,
    inexact,
    levels,
    named,
    policies_of,
    prepared,
    settings_in,
    star,
    summarised,
    varying,
)
from moesim.plots.style import (
    COLUMN,
    MAP,
    SMALL,
    TEXT,
    Drawing,
    add_corner,
    capital,
    kind,
    legend_above,
    need,
    new_figure,
    short,
    swatch,
    text_width,
    title,
)
from moesim.policies.options import Option, options_of
from moesim.policies.registry import policy_class
from moesim.trace.workload import WorkloadSpec

OPTION: Final = "option "
"""Beginning of the columns of policy options, so that none hides a setting."""
_CELL: Final = 0.2  # inches that a cell is high


def with_options(frame: pd.DataFrame) -> pd.DataFrame:
    """Add a column for each option in ``policy_options``, with defaults."""
    need(frame, ["policy_name", "policy_options"], "heatmap")
    options = [json.loads(text) if isinstance(text, str) else {} for text in frame["policy_options"]]
    defaults = {
        str(name): {option: one.default for option, one in (_parameters(str(name)) or {}).items() if not one.required}
        for name in frame["policy_name"].unique()
    }
    found = [defaults[str(name)] | given for name, given in zip(frame["policy_name"], options, strict=True)]
    names = dict.fromkeys(name for given in options for name in given)

    def plain(value: Any) -> Any:
        return json.dumps(value) if isinstance(value, dict | list) else value

    return frame.assign(**{f"{OPTION}{name}": [plain(one.get(name)) for one in found] for name in names})


def _parameters(policy: str) -> Mapping[str, Option] | None:
    try:
        return options_of(policy_class(policy))
    except ConfigError:
        return None


def asked(frame: pd.DataFrame, x: str | None, y: str | None, metric: str) -> tuple[pd.DataFrame, str, str]:
    """Find the columns of two options or settings, and the rows that have both."""
    rows = with_options(prepared(frame, "heatmap", [metric, "policy_name"]))
    options = _options(rows)
    if x is None or y is None:
        several = [name for name in options if rows[name].dropna().nunique() > 1 and name.removeprefix(OPTION) not in (x, y)]
        missing = (x is None) + (y is None)
        if len(several) != missing:
            found = ", ".join(name.removeprefix(OPTION) for name in several) or "none"
            raise ConfigError(f"plot heatmap: expected two options that vary, got {found}; name them with --x and --y")
        x, y = (several.pop(0) if x is None else x), (several.pop(0) if y is None else y)
    assert x is not None and y is not None
    columns = [_column(rows, name, options) for name in (x, y)]
    if columns[0] == columns[1]:
        raise ConfigError(f"plot heatmap: expected two different options, got '{x}' twice; name two with --x and --y")
    whole = rows[columns].notna().all(axis=1)
    if not whole.any():
        raise ConfigError(f"plot heatmap: expected runs with both {x} and {y}, got none; give both in the experiment's policies")
    rows = rows[whole]
    return rows, columns[0], columns[1]


def _column(rows: pd.DataFrame, name: str, options: Sequence[str]) -> str:
    known = {option.removeprefix(OPTION): option for option in options} | {setting: setting for setting in settings_in(rows)}
    if name in options:
        return name
    name = name if name in known else column_of(rows, name)
    if name not in known:
        raise ConfigError(f"plot heatmap: {unknown_name('option or setting', name, known)}")
    return known[name]


@kind("rows", "a metric over two options of a policy, or two settings")
def heatmap(frame: pd.DataFrame, x: str | None = None, y: str | None = None, metric: str = "decode_tokens_per_s") -> Drawing:
    """Cells with the mean of a metric over two options or settings, the best one framed."""
    rows, across, up = asked(frame, x, y, metric)
    names = across.removeprefix(OPTION), up.removeprefix(OPTION)
    data = summarised(rows, [up, across], metric).rename(columns={across: names[0], up: names[1]})
    columns, lines = ([v for v in levels(rows, of) if v in set(data[name])] for of, name in zip((across, up), names, strict=True))
    label, scale = axis_of(metric, float(data[metric].max()))
    texts = [short(value / scale) + star(fresh) for value, fresh in zip(data[metric], data["fresh"], strict=True)]
    longest = max(max(text_width(text) for text in texts), max(text_width(group_name(v, names[0]), 7.0) for v in columns)) + 0.08
    wide = 1.2 + longest * len(columns)
    figure, axes = new_figure(COLUMN if wide <= COLUMN else TEXT, 0.6 + max(_CELL * len(lines), 1.25))
    values = np.full((len(lines), len(columns)), math.nan)
    places = [(lines.index(row[names[1]]), columns.index(row[names[0]])) for _, row in data.iterrows()]
    for place, value in zip(places, data[metric], strict=True):
        values[place] = value / scale
    axes.grid(visible=False)
    norm = Normalize(float(np.nanmin(values)), float(np.nanmax(values)))
    shown = np.ma.masked_invalid(values)
    image = axes.imshow(shown, cmap=MAP, norm=norm, origin="lower", aspect="auto", interpolation="nearest")
    axes.set_facecolor(WHITE)
    for (line, column), value, text in zip(places, data[metric], texts, strict=True):
        colour = text_on(to_hex(image.cmap(norm(value / scale))))
        axes.text(column, line, text, ha="center", va="center", fontsize=SMALL, color=colour)
    best = places[int(data[metric].to_numpy(float).argmax())]
    axes.add_patch(Rectangle((best[1] - 0.5, best[0] - 0.5), 1, 1, fill=False, edgecolor=BLACK, linewidth=1.6, zorder=3))
    axes.set_xticks(range(len(columns)), [group_name(value, names[0]) for value in columns])
    axes.set_yticks(range(len(lines)), [group_name(value, names[1]) for value in lines])
    axes.set(xlabel=names[0], ylabel=names[1])
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    figure.colorbar(image, ax=axes, label=label, aspect=15, pad=0.02)
    title(axes, f"{_policy(rows)}: {names[0]} and {names[1]}")
    missing = [f"not shown: {name}, which chooses them itself" for name in left_out(frame, rows)]
    missing += not_shown(_same(frame, rows))
    marked = meaning(inexact(rows.assign(policy=rows["policy_name"])))
    add_corner(
        figure, corner_label(rows), ["framed: the largest", *missing, *averaged(rows, [across, up, *_options(rows)]), marked]
    )
    sentences = [
        "The largest value is framed.",
        repeats_sentence(rows, how=None),
        not_drawn(rows),
        *(f"Not shown: {name}, which chooses them itself." for name in left_out(frame, rows)),
        not_shown_sentences(_same(frame, rows)),
        *(
            f"Defaults of {name} are not shown, for its code was not imported."
            for name in rows["policy_name"].unique()
            if _parameters(name) is None
        ),
    ]
    what = f"{capital(label)} of {_policy(rows)} over {names[0]} and {names[1]}.".replace("\n", " ")
    return Drawing(data, figure, caption(what, rows.assign(policy=rows["policy_name"]), [across, up], *sentences))


def left_out(frame: pd.DataFrame, rows: pd.DataFrame) -> list[str]:
    """Name the runs whose option is at a default of its own."""
    same = _same(frame, rows)
    return [name for name in policies_of(same[~failing(same)]) if name not in set(rows["policy"])]


def _same(frame: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    return frame[frame["policy_name"].isin(rows["policy_name"])]


def _policy(rows: pd.DataFrame) -> str:
    return ", ".join(str(name) for name in rows["policy_name"].unique())


def _options(rows: pd.DataFrame) -> list[str]:
    return [name for name in rows.columns.astype(str) if name.startswith(OPTION)]


_TIE: Final = 1.02
_APART: Final = ("hardware", "trace")  # each has a figure of its own


def competing(frame: pd.DataFrame, x: str, y: str) -> list[str]:
    """List what varies in a map of the best setting, but for its axes: that is what competes."""
    return [name for name in ("policy", *varying(frame, [x, y])) if name not in _APART and frame[name].astype(str).nunique() > 1]


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
    for name in (x, y):
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
    colours = {name: SERIES[i % len(SERIES)] for i, name in enumerate(dict.fromkeys(data["setting"])) if name in counts}
    label, scale = axis_of(metric, float(best[metric].max()))
    longest = max(text_width(name, 7.0) for name in counts.index)
    figure, axes = new_figure(COLUMN if len(columns) < 6 and longest + 0.8 < COLUMN else TEXT, 0.8 + 2 * _CELL * len(lines))
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.set(xlim=(-0.5, len(columns) - 0.5), ylim=(-0.5, len(lines) - 0.5), xlabel=WORDS.get(x, x), ylabel=WORDS.get(y, y))
    for one in best.to_dict("records"):
        column, line, colour = columns.index(one[x]), lines.index(one[y]), colours[one["setting"]]
        axes.add_patch(Rectangle((column - 0.5, line - 0.5), 1, 1, facecolor=colour, edgecolor=WHITE, linewidth=0.8))
        ratio = one[metric] / second.get((one[y], one[x]), math.nan)
        ratio = 1 / ratio if least else ratio
        gain = "" if math.isnan(ratio) else f"\n×{ratio:.2f}"
        if ratio < _TIE:
            axes.add_patch(
                Rectangle(
                    (column - 0.5, line - 0.5), 1, 1, fill=False, hatch="////", linewidth=0, edgecolor=text_on(colour), alpha=0.3
                )
            )
        text = f"{short(one[metric] / scale)}{star(one['fresh'])}{gain}"
        axes.text(
            column,
            line,
            text,
            ha="center",
            va="center",
            fontsize=SMALL,
            color=text_on(colour),
            bbox={"facecolor": colour, "edgecolor": "none", "pad": 0.6},
        )
    axes.set_xticks(range(len(columns)), [group_name(value, x) for value in columns])
    axes.set_yticks(range(len(lines)), [group_name(value, y) for value in lines])
    legend_above(
        figure,
        [swatch(colours[name], f"{name} ({counts[name]})") for name in counts.index],
        "The best by " + label.replace("\n", " "),
    )
    add_corner(
        figure,
        corner_label(rows),
        ["below: the best over the second; hatched: less than 2 % better", "white: no run succeeded", meaning(inexact(rows))],
    )
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
            words.append(_kv_in_words(one[name]))
            continue
        if name != "model":
            words.append(named(one[name], name))
            continue
        of = {str(model): set(str(model).partition(" (")[2].rstrip(")").split(", ")) for model in data["model"].unique()}
        common = set.intersection(*of.values())
        words.append(", ".join(sorted(of[str(one[name])] - common - {""})) or str(one[name]).partition(" (")[0])
    return ", ".join(words)


def _kv_in_words(written: object) -> str:
    """Describe where the KV cache lies.

    >>> _kv_in_words('{"host": 0.5, "resident": 4096}'), _kv_in_words(None)
    ('50 % of KV in host, streamed but for 4,096 tokens', 'KV as placed')
    """
    place = WorkloadSpec(kv=written).kv_place if isinstance(written, str) else None
    if place is None:
        return "KV as placed"
    near = f" but for {place.resident:,} tokens" if place.resident else ""
    return f"{100 * place.host:g} % of KV in host, {place.read}{near}"
