"""What each decision would save if an oracle made it, as a waterfall."""

from __future__ import annotations

from typing import Final

import pandas as pd
from matplotlib.figure import Figure

from moesim.colours import BLACK, BLUE, GREEN, ORANGE, VERMILION
from moesim.plots.style import add_corner, corner_label, legend_beside, need, new_figure, policies_of, short, styled
from moesim.units import NS_PER_S

_COLOUR: Final = {"prediction": ORANGE, "replacement": GREEN, "assignment": BLUE, "bandwidth": VERMILION}
_ORDERS: Final = {"forward": "predictions first", "reversed": "links first"}
_BOUND: Final = "lower bound, links as they are"
_HEIGHT: Final = 0.2  # of a bar, in rows


@styled
def regret_waterfall(frame: pd.DataFrame) -> Figure:
    """Makespan while one decision after the other is given to its oracle, in both orders.

    Parameters
    ----------
    frame : DataFrame
        Records of `moesim.studies.regret.Regret`, of one setting.

    Returns
    -------
    Figure
        Two rows a policy. A bar spans what an oracle saves; it is hatched if the run takes longer with it. A line marks the lower
        bound, and a dot the makespan with all oracles.
    """
    need(frame, ("policy", "order", "decision", "replaced", "base_ns", "before_ns", "after_ns"), "regret_waterfall")
    frame = frame[frame["order"].isin(_ORDERS) & frame["base_ns"].notna()]
    need(frame, ("policy",), "regret_waterfall")
    rows = [(policy, order) for policy in policies_of(frame) for order in _ORDERS]
    figure, axes = new_figure(7.4, 1.6 + 0.62 * len(rows))
    axes.grid(axis="x")
    axes.grid(visible=False, axis="y")
    seen: set[str] = set()
    for place, (policy, order) in enumerate(rows):
        steps = frame[(frame["policy"] == policy) & (frame["order"] == order)]
        base = float(steps["base_ns"].iloc[0]) / NS_PER_S
        top = place - 0.42
        axes.plot([base, base], [top, top + 4.2 * _HEIGHT], color=BLACK, linewidth=1.2)
        far = max(base, float(steps["after_ns"].max()) / NS_PER_S) if steps["after_ns"].notna().any() else base
        axes.annotate(short(base), (far, place), (4, 0), textcoords="offset points", va="center", fontsize=7)
        last = base
        done = steps["replaced"] & steps["after_ns"].notna() & steps["before_ns"].notna()
        for i, name in enumerate(steps["decision"]):
            if not done.iloc[i]:
                continue
            before, last = (float(steps[column].iloc[i]) / NS_PER_S for column in ("before_ns", "after_ns"))
            if before != last:
                axes.barh(
                    top + (i + 0.55) * _HEIGHT, abs(before - last), _HEIGHT, min(before, last), color=_COLOUR[name],
                    edgecolor=BLACK, linewidth=0.5, hatch="//////" if last > before else None,
                )  # fmt: skip
                seen.add(name)
        axes.plot(last, place, "o", color=BLACK, markersize=3.5, label=None if place else "all oracles")
        bound = steps["lower_bound_ns"].iloc[0] if "lower_bound_ns" in steps else None
        if bound is not None and not pd.isna(bound):
            label = None if "bound" in seen else _BOUND
            seen.add("bound")
            axes.plot([bound / NS_PER_S] * 2, [top, top + 4.2 * _HEIGHT], color=BLACK, linestyle=":", linewidth=1.4, label=label)
    for name in [name for name in _COLOUR if name in seen]:
        axes.barh(0, 0, color=_COLOUR[name], edgecolor=BLACK, linewidth=0.5, label=name)  # for the legend, never hatched
    axes.set_yticks(range(len(rows)), [f"{policy}\n{_ORDERS[order]}" for policy, order in rows], fontsize=7.5)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.margins(x=0.1)
    axes.set_xlabel("makespan (s)")
    axes.set_title("What each decision would save if an oracle made it")
    legend_beside(axes, list(_COLOUR))
    add_corner(
        figure, corner_label(frame), ["hatched: slower with the oracle · a decision without a bar has no oracle, or saves 0"]
    )
    return figure
