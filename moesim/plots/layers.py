"""Where a policy's time goes from layer to layer."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.patches import Patch

from moesim.core.colours import BLACK, FILL, HATCH, LABEL
from moesim.core.units import NS_PER_MS
from moesim.errors import ConfigError
from moesim.metrics.causes import CAUSES
from moesim.plots.balance import visits_of
from moesim.plots.captions import averaged, caption, corner_label
from moesim.plots.exactness import inexact, meaning, star
from moesim.plots.kinds import Drawing, kind
from moesim.plots.rows import policies_of, qualified
from moesim.plots.style import add_corner, legend_above, new_figure
from moesim.plots.trace_kit import whole_numbers
from moesim.plots.widths import COLUMN, TEXT

_MANY: Final = 34  # layers of a figure as wide as a column
_VISIBLE: Final = 0.0005  # of the longest bar; less has no entry in the legend


def _times(rows: pd.DataFrame) -> pd.DataFrame:
    """Average the time of a layer visit by layer and cause."""
    by_layer = rows.groupby("layer")
    means = by_layer[[f"time_{cause}_ns" for cause in CAUSES]].mean() / NS_PER_MS
    long = means.set_axis(list(CAUSES), axis=1).reset_index().melt("layer", var_name="cause", value_name="ms")
    long = long.sort_values("layer", kind="stable").reset_index(drop=True)
    return long.assign(visits=long["layer"].map(by_layer.size()), policy=rows["policy"].iloc[0], **qualified(rows))


@kind("layers", "one policy's time by layer and cause")
def time_by_layer(frame: pd.DataFrame, phase: str | None = None) -> Drawing:
    """Stacked bars of the mean time of a layer visit, one a layer, the causes in the order of `CAUSES`."""
    rows = visits_of(frame, "time_by_layer", phase, [f"time_{cause}_ns" for cause in CAUSES])
    policy, *others = policies_of(rows)
    if others:
        raise ConfigError(f"plot time_by_layer: expected one policy, got {policy}, {', '.join(others)}; choose one")
    data = _times(rows)
    tops = data.groupby("layer")["ms"].sum()
    figure, axes = new_figure(COLUMN if len(tops) <= _MANY else TEXT, 1.9)
    handles: list[Artist] = []
    base = np.zeros(len(tops))
    for cause in CAUSES:
        values = data.loc[data["cause"] == cause, "ms"].to_numpy(float)
        style: dict[str, Any] = {"facecolor": FILL[cause], "hatch": HATCH[cause] * 2, "edgecolor": BLACK, "linewidth": 0.4}
        if values.any():
            axes.bar(tops.index, values, 0.9, base, **style)
            base += values
        if values.max() >= _VISIBLE * tops.max():
            handles.append(Patch(label=LABEL[cause], **style))
    whole_numbers(axes.xaxis)
    axes.set_xlim(tops.index.min() - 0.75, tops.index.max() + 0.75)
    axes.set_ylim(0, 1.05 * max(float(tops.max()), 1e-9))
    axes.set_xlabel("layer")
    axes.set_ylabel("time of a visit (ms)")
    name = policy + star(qualified(rows)["fresh"])
    legend_above(figure, handles, f"Time by layer: {name}")
    phases = " and ".join(rows["phase"].unique())
    notes = [f"{name}, {phases}", *averaged(rows, []), meaning(inexact(rows))]
    add_corner(figure, corner_label(rows), notes)
    low, high = int(data["visits"].min()), int(data["visits"].max())
    many = f"{low}{f' to {high}' if high > low else ''}"
    sentences = [
        f"A bar is the mean of {many} visits of the layer in {phases}, by what was waited for on the critical path.",
        f"The slowest layer is {tops.idxmax()} with {tops.max():.3g} ms, the fastest {tops.idxmin()} with {tops.min():.3g} ms.",
        "What comes before the first layer visit of a step and after the last one is left out.",
    ]
    return Drawing(data, figure, caption(f"Time of {policy} by layer.", rows, [], *sentences))
