"""How evenly the experts of a layer keep CPU and GPU occupied: distributions over layer visits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from moesim.core.colours import BLACK
from moesim.errors import ConfigError, unknown_name
from moesim.plots.bars import legend_names
from moesim.plots.captions import averaged, caption, corner_label
from moesim.plots.exactness import inexact, meaning
from moesim.plots.kinds import Drawing, kind
from moesim.plots.looks import looks_of
from moesim.plots.rows import policies_of, prepared, qualified
from moesim.plots.style import add_corner, legend_above
from moesim.plots.widths import TEXT, is_narrow, width_for

MEASURES: Final = {"done": "experts done", "longest": "experts' busy time"}
"""Which times are compared -> title of the panel; ``cpu_<measure>_ns`` and ``gpu_<measure>_ns`` are their columns."""
_PHASES: Final = ("decode", "prefill")


def _distributions(rows: pd.DataFrame) -> pd.DataFrame:
    """Compute how the imbalance of CPU and GPU is distributed over layer visits in which an expert ran."""
    parts = []
    for policy in policies_of(rows):
        mine = rows[rows["policy"] == policy]
        for measure in MEASURES:
            cpu, gpu = (mine[f"{kind}_{measure}_ns"].to_numpy(np.float64) for kind in ("cpu", "gpu"))
            longer = np.maximum(cpu, gpu)
            ran = longer > 0
            values, counts = np.unique(np.abs(cpu - gpu)[ran] / longer[ran], return_counts=True)
            columns = {"policy": policy, "measure": measure, "imbalance": values, "share": counts.cumsum() / max(1, counts.sum())}
            parts.append(pd.DataFrame(columns).assign(visits=int(ran.sum()), **qualified(mine)))
    data = pd.concat(parts, ignore_index=True)
    if data.empty:
        raise ConfigError("plot balance_cdf: expected layer visits in which experts ran, got none")
    return data


def visits_of(frame: pd.DataFrame, what: str, phase: str | None, columns: Sequence[str]) -> pd.DataFrame:
    """Keep the layer visits of a phase: the one asked for, else decode, unless there is none."""
    rows = prepared(frame, what, ["phase", *columns])
    if phase is not None and phase not in _PHASES:
        raise ConfigError(f"plot {what}: {unknown_name('phase', phase, _PHASES)}")
    found = rows[rows["phase"] == (phase or "decode")]
    if found.empty and phase is None:
        found = rows
    if found.empty:
        raise ConfigError(f"plot {what}: expected layer visits in {phase}, got none; choose the other phase")
    return found


def one_sided(data: pd.DataFrame) -> list[str]:
    """List the policies whose experts never ran on both sides of a visit, unless no other is left; they are not drawn."""
    found = [name for name, part in data.groupby("policy", sort=False) if part["imbalance"].min() == 1]
    return [str(name) for name in found] if len(found) < data["policy"].nunique() else []


@kind("layers", "how evenly the experts of a layer occupy CPU and GPU: distribution over layer visits")
def balance_cdf(frame: pd.DataFrame, phase: str | None = None) -> Drawing:
    """Distribution functions of the imbalance of CPU and GPU: |CPU - GPU| / max(CPU, GPU)."""
    columns = [f"{kind}_{measure}_ns" for kind in ("cpu", "gpu") for measure in MEASURES]
    rows = visits_of(frame, "balance_cdf", phase, columns)
    data = _distributions(rows)
    aside = one_sided(data)
    policies = [policy for policy in policies_of(rows) if policy not in aside]
    names, looks = legend_names(data, policies), looks_of(policies_of(rows))
    width = width_for(TEXT)
    n_rows = len(MEASURES) if is_narrow(width) else 1
    figure = Figure(figsize=(width, 2.1 * n_rows), layout="constrained")
    panels = figure.subplots(n_rows, len(MEASURES) // n_rows, sharey=True)
    for axes, (measure, words) in zip(panels, MEASURES.items(), strict=True):
        axes.grid(visible=True, axis="both")
        for policy in policies:
            look = looks[policy]
            part = data[(data["policy"] == policy) & (data["measure"] == measure)]
            x, y = (100 * np.concatenate(([0.0], part[column], [1.0])) for column in ("imbalance", "share"))
            marks = [int(np.searchsorted(y, level)) for level in (25, 50, 75)]  # at the quartiles
            axes.plot(
                x, y, drawstyle="steps-post", label=names[policy], color=look.colour, linestyle=look.dash, linewidth=1.2,
                marker=look.marker, markevery=marks, markersize=4, markeredgecolor=BLACK, markeredgewidth=0.4, clip_on=False,
            )  # fmt: skip
        axes.set_title(words, fontsize=7.5, fontweight="normal")
        axes.set_xlim(0, 100)
        axes.set_ylim(0, 100)
        axes.set_xlabel("|CPU - GPU| / max(CPU, GPU) (%)")
        if n_rows > 1 or axes is panels[0]:
            axes.set_ylabel("layer visits (%)")
    legend_above(figure, panels[0].get_legend_handles_labels()[0], "Balance of CPU and GPU")
    said = f" · all experts on one side: {', '.join(aside)}" if aside else ""
    notes = [*averaged(rows, []), f"marks: quartiles{said}", meaning(inexact(rows))]
    add_corner(figure, corner_label(rows), notes)
    phases = " and ".join(rows["phase"].unique())
    low, high = int(data["visits"].min()), int(data["visits"].max())
    sentences = [
        f"Distribution over {low}{f' to {high}' if high > low else ''} layer visits in {phases} of |CPU - GPU| / max(CPU, GPU); "
        "100 % where all experts ran on one side" + (f", as always with {', '.join(aside)} (not drawn)." if aside else "."),
        "Left: time from the router's result to the end of the last expert on each side, copies that it waited for included.",
        "Right: time for which experts ran, on the busiest device of each kind, without copies.",
        "The definitions are ours; of PreScope (2025), Fig. 17, the kind of figure is known and not the definition.",
    ]
    return Drawing(data, figure, caption("Balance of CPU and GPU.", rows, [], *sentences))
