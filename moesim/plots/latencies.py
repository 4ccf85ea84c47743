"""How the latency of tokens is distributed."""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm
from typing import Final

import numpy as np
import pandas as pd
from matplotlib.ticker import LogLocator, NullFormatter

from moesim.core.colours import BLACK
from moesim.core.record_table import RecordTable
from moesim.core.units import NS_PER_MS
from moesim.errors import ConfigError
from moesim.metrics.latency import percentile, token_times
from moesim.plots.bars import legend_names
from moesim.plots.captions import averaged, caption, corner_label, repeats_sentence
from moesim.plots.exactness import inexact, meaning
from moesim.plots.kinds import Drawing, kind
from moesim.plots.looks import looks_of
from moesim.plots.means import DRAW
from moesim.plots.rows import policies_of, prepared, qualified, settings_in
from moesim.plots.style import OPTIMUM, add_corner, legend_above, new_figure
from moesim.plots.widths import COLUMN
from moesim.records import Records, StepRecord

_PERCENTS: Final = (50, 90, 99)
_SPREAD: Final = 5  # times that differ by more are on a logarithmic axis


def _distributions(rows: pd.DataFrame) -> pd.DataFrame:
    """Collect the times per output token of each policy, those of all its runs together; runs of one draw weigh as one."""
    parts = []
    for policy in policies_of(rows):
        mine = rows[rows["policy"] == policy]
        runs = [run for _, run in mine.groupby("run", sort=False)]
        alike = _alike(runs)
        whole = lcm(*alike)  # the weight of a run that no other repeats, so that all weights are integers
        samples = [
            (ns, tokens * whole // many)
            for run, many in zip(runs, alike, strict=True)
            for ns, tokens in token_times(_records(run))[1]
        ]
        if not samples:
            continue
        times, tokens = np.array(samples, np.int64).T
        ns, place = np.unique(times, return_inverse=True)
        counts = np.bincount(place, tokens).astype(np.int64)
        shown = counts / whole if (counts % whole).any() else counts // whole
        columns = {"policy": policy, "ms": ns / NS_PER_MS, "tokens": shown, "share": counts.cumsum() / counts.sum()}
        told = {f"p{percent}_ms": (percentile(samples, percent) or 0) / NS_PER_MS for percent in _PERCENTS}
        parts.append(pd.DataFrame(columns).assign(**told, **qualified(mine)))
    if not parts:
        raise ConfigError("plot latency_cdf: expected decode steps, got none; `workload.decode_tokens` asks for some")
    return pd.concat(parts, ignore_index=True)


def _alike(runs: Sequence[pd.DataFrame]) -> list[int]:
    """Count for each run those of its setting that drew the same requests, itself included."""
    firsts = pd.DataFrame([run.iloc[0] for run in runs])
    if DRAW not in firsts or firsts[DRAW].isna().any():
        return [1] * len(runs)
    return [int(n) for n in firsts.groupby([*settings_in(firsts), DRAW], dropna=False)[DRAW].transform("size")]


def _records(run: pd.DataFrame) -> Records:
    steps = run.assign(gate_mass=0.0)[list(StepRecord._fields)]
    return Records(steps=RecordTable(StepRecord, (StepRecord(*row) for row in steps.itertuples(index=False))))


@kind("steps", "latency of tokens: distribution of the time per output token")
def latency_cdf(frame: pd.DataFrame) -> Drawing:
    """Distribution functions of the time per output token, with marks at p50, p90 and p99."""
    rows = prepared(frame, "latency_cdf", [name for name in ("run", *StepRecord._fields) if name != "gate_mass"])
    data = _distributions(rows)
    names, looks = legend_names(data, policies_of(rows)), looks_of(policies_of(rows))
    figure, axes = new_figure(COLUMN, 2.1)
    axes.grid(visible=True, axis="both")
    for policy, name in names.items():
        part, look = data[data["policy"] == policy], looks[policy]
        x = np.append(part["ms"].iloc[0], part["ms"])
        y = 100 * np.append(0.0, part["share"])
        marks = [int(np.searchsorted(y, percent - 1e-9)) for percent in _PERCENTS]
        axes.plot(
            x, y, drawstyle="steps-post", label=name, color=look.colour, linestyle=look.dash, marker=look.marker, markevery=marks,
            linewidth=1.9 if policy == OPTIMUM else 1.2, markersize=4.2, markeredgecolor=BLACK, markeredgewidth=0.4,
            clip_on=False, zorder=2.9 if policy == OPTIMUM else 3,
        )  # fmt: skip
    if data["ms"].max() > _SPREAD * data["ms"].min():
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_xlim(left=0)
    axes.set_ylim(0, 100)
    axes.set_xlabel("time per output token (ms)")
    axes.set_ylabel("tokens (%)")
    legend_above(figure, axes.get_legend_handles_labels()[0], "Latency of tokens")
    add_corner(figure, corner_label(rows), [*averaged(rows, []), "marks: p50, p90 and p99", meaning(inexact(rows))])
    each = data.drop_duplicates("policy")
    told = "; ".join(f"{row['policy']} " + ", ".join(f"{row[f'p{p}_ms']:.4g}" for p in _PERCENTS) for _, row in each.iterrows())
    counts = data.groupby("policy")["tokens"].sum()
    many = f"{float(counts.min()):.12g}" + (f" to {float(counts.max()):.12g}" if counts.max() > counts.min() else "")
    sentences = [
        f"Distribution over {many} tokens of decoding, one sample for each decode step and sequence.",
        repeats_sentence(rows, "Tokens", how=None),
        f"Marks: p50, p90 and p99 by nearest rank, in ms: {told}.",
    ]
    return Drawing(data, figure, caption("Time per output token.", rows, [], *sentences))
