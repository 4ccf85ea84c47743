"""What a change of link, memory, CPU or GPU does to the speed, the largest swing on top."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.textpath import TextPath
from matplotlib.ticker import MaxNLocator

from moesim.core.colours import BLACK, BLUE, GREY, ORANGE
from moesim.plots.captions import weakest_source
from moesim.plots.exactness import is_exact, meaning
from moesim.plots.kinds import Drawing, kind
from moesim.plots.rows import policies_of, qualified
from moesim.plots.style import SMALL, add_corner, legend_above, need, text_width
from moesim.plots.widths import COLUMN, TEXT, width_for

_COLUMNS: Final = ("policy", "knob", "setting", "factor", "decode_tokens_per_s", "base_decode_tokens_per_s")
_SIDES: Final = {"less": (ORANGE, "////"), "more": (BLUE, ""), "other": (GREY, "....")}
_WORDS: Final = {"less": "less of it", "more": "more of it", "other": "something else"}
_BESIDE: Final = 0.35  # inches beside the axis and the names of knobs
_ENOUGH: Final = 0.5  # of the axis for bars, else the figure takes both columns
_ABOUT: Final = ("model", "hardware", "trace")


def _changes(frame: pd.DataFrame) -> pd.DataFrame:
    """Compare the speed at each varied setting with the speed as it is.

    ``swing`` is the largest change of a knob less the smallest, no change included; the knobs of a policy are sorted by it.
    """
    need(frame, _COLUMNS, "tornado")
    rows = frame[frame["decode_tokens_per_s"].notna() & (frame["base_decode_tokens_per_s"] > 0)]
    need(rows, ("policy",), "tornado")
    change = rows["decode_tokens_per_s"] / rows["base_decode_tokens_per_s"] - 1
    factor = pd.to_numeric(rows["factor"], errors="coerce")
    side = ["other" if pd.isna(f) or f == 1 else "more" if f > 1 else "less" for f in factor]
    kept = [name for name in (*_COLUMNS[:4], "limit", "base_limit", "source_label") if name in rows]
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
    heights = [0.25 + 0.24 * len(knobs[policy]) for policy in policies]
    figure = Figure(figsize=(width, 0.35 + sum(heights)), layout="constrained")
    grid = figure.subplots(len(policies), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})
    starred = _not_exact(frame)
    for axes, policy in zip(grid[:, 0], policies, strict=True):
        axes.grid(visible=True, axis="x")
        axes.grid(visible=False, axis="y")
        axes.axvline(0, color=BLACK, linewidth=0.8)
        for place, knob in enumerate(knobs[policy]):
            rows = data[(data["policy"] == policy) & (data["knob"] == knob)]
            for _, row in rows.sort_values("change", key=lambda c: -c.abs(), kind="stable").iterrows():  # the shorter on top
                colour, hatch = _SIDES[row["side"]]
                axes.barh(place, 100 * row["change"], 0.66, color=colour, hatch=hatch, edgecolor=BLACK, linewidth=0.5)
            for end in _ends(rows):
                axes.annotate(
                    end.text, (end.x, place), (3 * end.ahead, 0), textcoords="offset points", va="center",
                    ha="left" if end.ahead > 0 else "right", fontsize=SMALL,
                )  # fmt: skip
        axes.set_yticks(range(len(knobs[policy])), knobs[policy])
        axes.set_ylim(len(knobs[policy]) - 0.4, -0.6)
        axes.tick_params(axis="y", length=0)
        base = float(frame.loc[frame["policy"] == policy, "base_decode_tokens_per_s"].iloc[0])
        axes.set_title(
            f"{policy}{'*' if policy in starred else ''}: {base:.3g} tokens/s as it is", fontsize=7.5, fontweight="normal"
        )
    grid[-1, 0].set_xlim(*_limits(found, width - names - _BESIDE))
    low, high = _reach(found)
    grid[-1, 0].set_xticks(
        [tick for tick in MaxNLocator(5, steps=[1, 2, 5, 10]).tick_values(low, high) if low <= tick <= high]
    )  # none beyond the bars
    grid[-1, 0].set_xlabel("change of decode speed (%)")
    handles: list[Artist] = [
        Patch(facecolor=colour, hatch=hatch, edgecolor=BLACK, linewidth=0.5, label=_WORDS[side])
        for side, (colour, hatch) in _SIDES.items()
        if (data["side"] == side).any()
    ]
    legend_above(figure, handles, "What a change of the machine would do")
    add_corner(figure, _about(frame), [meaning(starred)])
    n_failed = int(frame["decode_tokens_per_s"].isna().sum())
    missing = f" Not shown: {n_failed} setting{'s' if n_failed > 1 else ''} that failed." if n_failed else ""
    exact = f" {meaning(starred)}." if starred else ""
    largest = [f"{policy}: {rows['knob'].iloc[0]}" for policy, rows in data.groupby("policy", sort=False)]
    told = (
        "Change of decode speed when one thing changes and all else stays, sorted by swing (largest change less smallest); the "
        f"largest is that of {'; '.join(largest)}.{missing} {_about(frame)}.{exact}"
    )
    return Drawing(data, figure, told)


class _End(NamedTuple):
    """What is written at the end of a bar, and on which side of it."""

    x: float  # %
    ahead: int
    text: str


def _ends(rows: pd.DataFrame) -> list[_End]:
    """Name the extreme settings of a knob, each on its side of no change."""
    found = []
    changes = rows["change"].to_numpy(float)
    for ahead, place in ((-1, int(changes.argmin())), (1, int(changes.argmax()))):
        change = 100 * float(changes[place])
        if change * ahead > 0 or (change == 0 and ahead > 0 and (changes <= 0).all()):
            found.append(_End(change, ahead, f"{rows['setting'].iloc[place]} ({_percent(change)})"))
    return found


def _limits(ends: Sequence[_End], inches: float) -> tuple[float, float]:
    """Choose what the axis shows, so that all bars and what is written at their ends have room in its width."""
    low, high = _reach(ends)
    widths = [_width(end.text) + 0.08 for end in ends]
    for _ in range(50):  # more room for text leaves less for bars, and so on
        per_inch = (high - low) / inches
        reach = [end.x + end.ahead * per_inch * wide for end, wide in zip(ends, widths, strict=True)]
        low, high = min([low, *reach]), max([high, *reach])
    return low, high


def _reach(ends: Sequence[_End]) -> tuple[float, float]:
    """Give the range of the bars, in %; 1 % if nothing changes."""
    low, high = min([0.0, *(end.x for end in ends)]), max([0.0, *(end.x for end in ends)])
    return (low, high) if high > low else (0.0, 1.0)


def _bars_share(ends: Sequence[_End], inches: float) -> float:
    """Give the share of the axis that is left for bars."""
    (low, high), (first, last) = _limits(ends, inches), _reach(ends)
    return (last - first) / (high - low)


def _width(text: str) -> float:
    """Measure a line of text, in inches."""
    return float(TextPath((0, 0), text, size=SMALL).get_extents().width) / 72


def _percent(change: float) -> str:
    """Write a change; small ones with a decimal.

    >>> _percent(-46.8), _percent(0.62), _percent(5.0), _percent(-0.01)
    ('-47%', '+0.6%', '+5%', '±0%')
    """
    text = f"{change:+z.0f}" if abs(change) >= 10 else f"{change:+z.1f}".removesuffix(".0")
    return "±0%" if text == "+0" else f"{text}%"


def _not_exact(frame: pd.DataFrame) -> dict[str, tuple[float, float]]:
    """Shares computed as routed of the policies that are not exact."""
    means = {str(name): float(qualified(rows)["fresh"]) for name, rows in frame.groupby("policy", sort=False)}
    return {name: (share, share) for name, share in means.items() if not is_exact(share)}


def _about(frame: pd.DataFrame) -> str:
    parts = [", ".join(dict.fromkeys(str(v) for v in frame[name].dropna())) for name in _ABOUT if name in frame]
    parts.append(weakest_source(frame, "simulated"))
    return " · ".join(part for part in parts if part)
