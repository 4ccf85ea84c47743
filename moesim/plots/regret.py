"""What each decision would save if an oracle made it, as a waterfall."""

from __future__ import annotations

from typing import Final

import pandas as pd

from moesim.core.colours import BLACK, BLUE, GREEN, ORANGE, VERMILION
from moesim.core.units import NS_PER_S
from moesim.plots.captions import caption, corner_label
from moesim.plots.kinds import Drawing, kind
from moesim.plots.rows import policies_of
from moesim.plots.style import SMALL, add_corner, legend_beside, need, new_figure, short, title
from moesim.plots.widths import TEXT

_COLOUR: Final = {"prediction": ORANGE, "replacement": GREEN, "assignment": BLUE, "bandwidth": VERMILION}
_HATCH: Final = {"prediction": "", "replacement": "....", "assignment": "\\\\\\\\", "bandwidth": "----"}
_ORDERS: Final = {"forward": "predictions first", "reversed": "links first"}
_BOUNDS: Final = {
    "lower_bound_ns": ("lower bound, links as they are", ":"),
    "lower_bound_instant_links_ns": ("lower bound, links without time", "-."),
}
"""Column -> what its line is of, and how it is drawn."""
_HEIGHT: Final = 0.2  # of a bar, in rows


_COLUMNS: Final = ("policy", "order", "decision", "replaced", "base_ns", "before_ns", "after_ns")


def _seconds(rows: pd.DataFrame) -> pd.DataFrame:
    """Give the makespan before and after each decision is given to its oracle."""
    data = rows[["policy", "order", "decision", "replaced"]].copy()
    for name in ("base", "before", "after"):
        data[f"{name}_s"] = rows[f"{name}_ns"].astype(float) / NS_PER_S
    data["saved_s"] = data["before_s"] - data["after_s"]
    for name in _BOUNDS:
        bounds = rows[name].astype(float) if name in rows else float("nan")
        data[f"{name.removesuffix('_ns')}_s"] = bounds / NS_PER_S
    data["links"] = rows.get("links")
    return data.reset_index(drop=True)


def _of_orders(frame: pd.DataFrame) -> pd.DataFrame:
    need(frame, _COLUMNS, "regret")
    frame = frame[frame["order"].isin(_ORDERS) & frame["base_ns"].notna()]
    need(frame, ("policy",), "regret")
    return frame


@kind("regret", "what each decision would save if an oracle made it")
def regret(frame: pd.DataFrame) -> Drawing:
    """Makespan while one decision after the other is given to its oracle, in both orders."""
    frame = _of_orders(frame)
    rows = [(policy, order) for policy in policies_of(frame) for order in _ORDERS]
    figure, axes = new_figure(TEXT, 0.5 + 0.42 * len(rows))
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")
    seen: set[str] = set()
    for place, (policy, order) in enumerate(rows):
        steps = frame[(frame["policy"] == policy) & (frame["order"] == order)]
        base = float(steps["base_ns"].iloc[0]) / NS_PER_S
        top = place - 0.42
        axes.plot([base, base], [top, top + 4.2 * _HEIGHT], color=BLACK, linewidth=1.2)
        far = max(base, float(steps["after_ns"].max()) / NS_PER_S) if steps["after_ns"].notna().any() else base
        axes.annotate(short(base), (far, place), (4, 0), textcoords="offset points", va="center", fontsize=SMALL)
        last = base
        done = steps["replaced"] & steps["after_ns"].notna() & steps["before_ns"].notna()
        for i, name in enumerate(steps["decision"]):
            if not done.iloc[i]:
                continue
            before, last = (float(steps[column].iloc[i]) / NS_PER_S for column in ("before_ns", "after_ns"))
            if before != last:
                axes.barh(
                    top + (i + 0.55) * _HEIGHT, abs(before - last), _HEIGHT, min(before, last), color=_COLOUR[name],
                    hatch=_HATCH[name],
                    edgecolor=BLACK, linewidth=1.8 if last > before else 0.5,
                )  # fmt: skip
                seen.add(name)
        axes.plot(last, place, "o", color=BLACK, markersize=3.5, label=None if place else "all oracles, links without time")
        for column, (words, style) in _BOUNDS.items():
            bound = steps[column].iloc[0] if column in steps else None
            if bound is not None and not pd.isna(bound):
                label = None if column in seen else words
                seen.add(column)
                ends = [bound / NS_PER_S] * 2, [top, top + 4.2 * _HEIGHT]
                axes.plot(*ends, color=BLACK, linestyle=style, linewidth=1.4, label=label)
    for name in [name for name in _COLOUR if name in seen]:
        axes.barh(0, 0, color=_COLOUR[name], hatch=_HATCH[name], edgecolor=BLACK, linewidth=0.5, label=name)  # for the legend
    axes.set_yticks(range(len(rows)), [f"{policy}\n{_ORDERS[order]}" for policy, order in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, 1.12 * frame[["base_ns", "after_ns"]].astype(float).max().max() / NS_PER_S)
    axes.set_xlabel("makespan (s)")
    title(axes, "What each decision would save if an oracle made it")
    legend_beside(axes, list(_COLOUR))
    add_corner(
        figure, corner_label(frame), ["thick edge: slower with the oracle · a decision without a bar has no oracle, or saves 0"]
    )
    labels = sorted({str(v) for v in frame["base_label"].dropna()}) if "base_label" in frame else []
    rest = f" The runs as they are rest on: {', '.join(labels)}." if labels else ""
    told = caption(
        "Makespan while one decision after the other is given to its oracle, predictions first and links first; a bar spans what "
        "an oracle saves, a thick edge: the run is slower with it. Dot: all oracles. With bandwidth replaced links take no "
        "time, which is another machine: dash-dotted line, its lower bound; dotted line, that of the machine as it is; no bar: "
        f"no oracle, or it saves nothing.{rest}", frame,
    )  # fmt: skip
    return Drawing(_seconds(frame), figure, told)


regret_waterfall = regret
