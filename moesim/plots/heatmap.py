"""A metric over two options of a policy, or any two settings, as a heat map."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import pandas as pd
from matplotlib.colors import Normalize, to_hex
from matplotlib.patches import Rectangle

from moesim.core.colours import BLACK, WHITE, text_on
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
    column_of,
    failing,
    group_name,
    inexact,
    levels,
    policies_of,
    prepared,
    settings_in,
    star,
    summarised,
)
from moesim.plots.style import COLUMN, MAP, SMALL, TEXT, Drawing, add_corner, alike, capital, kind, new_figure, text_width, title
from moesim.policies.options import Option, options_of
from moesim.policies.registry import policy_class

OPTION: Final = "option "
"""Beginning of the columns of policy options, so that none hides a setting."""
_CELL: Final = 0.2  # inches that a cell is high


def with_options(frame: pd.DataFrame) -> pd.DataFrame:
    """Add a column for each option in ``policy_options``, with defaults."""
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
    rows = with_options(prepared(frame, "heatmap", [metric, "policy_name", "policy_options"]))
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
    texts = [text + star(fresh) for text, fresh in zip(alike(data[metric] / scale), data["fresh"], strict=True)]
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
    marked = meaning(inexact(rows.assign(policy=rows["policy_name"])))
    means = averaged(rows, [across, up, *_options(rows)])
    add_corner(figure, corner_label(rows), ["framed: the largest", *missing, *not_shown(_same(frame, rows)), *means, marked])
    sentences = [
        "The largest value is framed.",
        repeats_sentence(rows, how=None),
        not_drawn(rows),
        *(f"{capital(text)}." for text in missing),
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
