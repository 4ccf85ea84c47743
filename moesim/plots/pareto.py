"""GPU memory against decode speed, with the front of what neither less memory nor another policy beats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.lines import Line2D

from moesim.core.colours import BLACK, GREY, WHITE
from moesim.errors import ConfigError
from moesim.plots.bars import AXES, legend_names
from moesim.plots.captions import averaged, caption, corner_label, repeats_sentence
from moesim.plots.ends import not_drawn
from moesim.plots.exactness import inexact, is_exact, meaning
from moesim.plots.failures import not_shown, not_shown_sentences
from moesim.plots.kinds import Drawing, kind
from moesim.plots.looks import looks_of
from moesim.plots.rows import cache_column, policies_of, prepared, qualified, summarised
from moesim.plots.style import add_corner, legend_above, new_figure
from moesim.plots.widths import COLUMN

MEMORY: Final = "peak_memory_bytes.gpu"
"""Beginning of the columns of memory in use on each GPU."""
_SPEED: Final = "decode_tokens_per_s"
_GIB: Final = 1 << 30


def _points(rows: pd.DataFrame) -> pd.DataFrame:
    """Average memory and speed of each policy and cache; on the front if no comparable one needs no more and is no slower."""
    by = [name for name in (cache_column(rows),) if name in rows]
    data = summarised(rows, ["policy", *by], _SPEED)
    memory = summarised(rows[rows[_SPEED].notna()], ["policy", *by], "gpu_memory_gib")["gpu_memory_gib"]
    data.insert(1 + len(by), "gpu_memory_gib", memory.to_numpy())
    data["comparable"] = [
        is_exact(fresh) and label != "oracle" for fresh, label in zip(data["fresh"], data["source_label"], strict=True)
    ]
    usable = data[data["comparable"]]
    on_front = front(usable["gpu_memory_gib"].tolist(), usable[_SPEED].tolist())
    data["on_front"] = data.index.isin(usable.index[on_front])
    return data


def _rows(frame: pd.DataFrame) -> pd.DataFrame:
    rows = prepared(frame, "vram", [_SPEED])
    columns = [name for name in rows.columns.astype(str) if name.startswith(MEMORY)]
    if not columns or rows[columns].isna().all().all():
        raise ConfigError(f"plot vram: expected columns {MEMORY}0 and so on, got none; draw runs on a machine with a GPU")
    return rows.assign(gpu_memory_gib=rows[columns].astype(float).sum(axis=1) / _GIB)


def front(cost: Sequence[float], gain: Sequence[float]) -> list[bool]:
    """Say which points no other one beats.

    >>> front([1, 2, 2, 3], [5, 9, 7, 9])
    [True, True, False, False]
    """
    points = list(zip(cost, gain, strict=True))
    return [not any(c <= a and g >= b and (c, g) != (a, b) for c, g in points) for a, b in points]


@kind("rows", "GPU memory against decode speed, with the Pareto front")
def vram(frame: pd.DataFrame) -> Drawing:
    """Points of policies, and the front as a line of steps; hollow: not exact, or an oracle's."""
    rows = _rows(frame)
    data = _points(rows)
    policies = [name for name in policies_of(rows) if (data["policy"] == name).any()]
    names = legend_names(data, policies)
    figure, axes = new_figure(COLUMN, 2.3)
    axes.grid(visible=True, axis="both")
    best = data[data["on_front"]].sort_values("gpu_memory_gib", kind="stable")
    axes.plot(best["gpu_memory_gib"], best[_SPEED], color=GREY, linewidth=3, drawstyle="steps-post", solid_joinstyle="miter",
              alpha=0.6, zorder=1)  # fmt: skip
    handles: list[Artist] = []
    for policy, look in looks_of(policies).items():
        part = data[data["policy"] == policy].sort_values("gpu_memory_gib", kind="stable")
        filled = bool(part["comparable"].all())
        style: dict[str, Any] = {
            "color": look.colour, "marker": look.marker, "linestyle": look.dash, "linewidth": 0.6, "markersize": 5,
            "markerfacecolor": look.colour if filled else WHITE, "markeredgecolor": BLACK if filled else look.colour,
            "markeredgewidth": 0.4 if filled else 1.1,
        }  # fmt: skip
        axes.plot(part["gpu_memory_gib"], part[_SPEED], zorder=3, **style)
        handles.append(Line2D([], [], label=names[policy], **style))
    handles.append(Line2D([], [], color=GREY, linewidth=3, alpha=0.6, label="Pareto front"))
    axes.set_ylim(0, 1.12 * float(data[_SPEED].max()))
    axes.margins(x=0.08)
    axes.set_xlabel("peak GPU memory (GiB)")
    axes.set_ylabel(AXES[_SPEED])
    legend_above(figure, handles, "GPU memory and decode speed")
    hollow = "hollow: not exact, or an oracle's, and so not on the front"
    notes = [*averaged(rows, [cache_column(rows)]), hollow, *not_shown(frame), meaning(inexact(rows))]
    add_corner(figure, corner_label(rows, cache_column(rows)), notes)
    told = "Grey: the Pareto front of the policies that are exact and need no oracle; the others are hollow."
    what = "Peak GPU memory, all GPUs together and everything counted, against decode speed of the whole batch."
    several = qualified(rows)["source_label"] is not None and rows[cache_column(rows)].nunique() > 1
    lines = "A line joins the cache sizes of one policy." if several else ""
    said = told, lines, repeats_sentence(rows, how=None), not_drawn(rows), not_shown_sentences(frame)
    return Drawing(data, figure, caption(what, rows, [cache_column(rows)], *said))
