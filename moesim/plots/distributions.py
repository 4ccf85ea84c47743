"""Distributions: latency of tokens, and balance of CPU and GPU."""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm
from typing import Final

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from moesim.core.colours import BLACK
from moesim.core.record_table import RecordTable
from moesim.core.units import NS_PER_MS
from moesim.errors import ConfigError, unknown_name
from moesim.metrics.latency import percentile, token_times
from moesim.plots.bars import legend_names
from moesim.plots.captions import caption, label_below, repeats_sentence
from moesim.plots.result_rows import DRAW, policies_of, prepared, qualified, settings_in
from moesim.plots.style import (
    COLUMN,
    OPTIMUM,
    TEXT,
    Drawing,
    grid_of,
    is_narrow,
    kind,
    legend_above,
    looks_of,
    new_figure,
    numbers_between,
    panel_title,
    width_for,
)
from moesim.records import Records, StepRecord

_PERCENTS: Final = (50, 90, 99)
_SPREAD: Final = 5  # times that differ by more are on a logarithmic axis


def _latencies(rows: pd.DataFrame) -> pd.DataFrame:
    """Collect the times per output token of each policy; runs of one draw weigh as one."""
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
        percentiles = {f"p{percent}_ms": (percentile(samples, percent) or 0) / NS_PER_MS for percent in _PERCENTS}
        parts.append(pd.DataFrame(columns).assign(**percentiles, **qualified(mine)))
    if not parts:
        raise ConfigError("plot latency_cdf: expected decode steps, got none; `workload.decode_tokens` asks for some")
    return pd.concat(parts, ignore_index=True)


def _alike(runs: Sequence[pd.DataFrame]) -> list[int]:
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
    data = _latencies(rows)
    names, looks = legend_names(data, policies_of(rows)), looks_of(policies_of(rows))
    figure, axes = new_figure(COLUMN, 2.1, "both")
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
    axes.set(ylim=(0, 100), xlabel="time per output token (ms)", ylabel="tokens (%)")
    legend_above(figure, axes.get_legend_handles_labels()[0], "Latency of tokens")
    label_below(figure, rows, [], "marks: p50, p90 and p99")
    each = data.drop_duplicates("policy")
    text = "; ".join(f"{row['policy']} " + ", ".join(f"{row[f'p{p}_ms']:.4g}" for p in _PERCENTS) for _, row in each.iterrows())
    counts = data.groupby("policy")["tokens"].sum()
    many = f"{float(counts.min()):.12g}" + (f" to {float(counts.max()):.12g}" if counts.max() > counts.min() else "")
    sentences = [
        f"Distribution over {many} tokens of decoding, one sample for each decode step and sequence.",
        repeats_sentence(rows, "Tokens", how=None),
        f"Marks: p50, p90 and p99 by nearest rank, in ms: {text}.",
    ]
    return Drawing(data, figure, caption("Time per output token.", rows, [], *sentences))


MEASURES: Final = {"done": "experts done", "longest": "experts' busy time"}
"""Measure -> title of its panel; its columns are ``cpu_<measure>_ns`` and ``gpu_<measure>_ns``."""
_PHASES: Final = ("decode", "prefill")


def _imbalances(rows: pd.DataFrame) -> pd.DataFrame:
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
    """Keep the layer visits of a phase; by default decode, if there is any."""
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
    """List the policies that never ran experts on both sides, unless all are such."""
    found = [name for name, part in data.groupby("policy", sort=False) if part["imbalance"].min() == 1]
    return [str(name) for name in found] if len(found) < data["policy"].nunique() else []


@kind("layers", "how evenly the experts of a layer occupy CPU and GPU: distribution over layer visits")
def balance_cdf(frame: pd.DataFrame, phase: str | None = None) -> Drawing:
    """Distribution functions of the imbalance of CPU and GPU: |CPU - GPU| / max(CPU, GPU)."""
    columns = [f"{kind}_{measure}_ns" for kind in ("cpu", "gpu") for measure in MEASURES]
    rows = visits_of(frame, "balance_cdf", phase, columns)
    data = _imbalances(rows)
    aside = one_sided(data)
    policies = [policy for policy in policies_of(rows) if policy not in aside]
    names, looks = legend_names(data, policies), looks_of(policies_of(rows))
    width = width_for(TEXT)
    n_rows = len(MEASURES) if is_narrow(width) else 1
    figure = Figure(figsize=(width, 2.1 * n_rows), layout="constrained")
    panels = figure.subplots(n_rows, len(MEASURES) // n_rows, sharey=True)
    for axes, (measure, words) in zip(panels, MEASURES.items(), strict=True):
        grid_of(axes, "both")
        for policy in policies:
            look = looks[policy]
            part = data[(data["policy"] == policy) & (data["measure"] == measure)]
            x, y = (100 * np.concatenate(([0.0], part[column], [1.0])) for column in ("imbalance", "share"))
            marks = [int(np.searchsorted(y, level)) for level in (25, 50, 75)]  # at the quartiles
            axes.plot(
                x, y, drawstyle="steps-post", label=names[policy], color=look.colour, linestyle=look.dash, linewidth=1.2,
                marker=look.marker, markevery=marks, markersize=4, markeredgecolor=BLACK, markeredgewidth=0.4, clip_on=False,
            )  # fmt: skip
        panel_title(axes, words)
        axes.set(xlim=(0, 100), ylim=(0, 100), xlabel="|CPU - GPU| / max(CPU, GPU) (%)")
        if n_rows > 1 or axes is panels[0]:
            axes.set_ylabel("layer visits (%)")
    legend_above(figure, panels[0].get_legend_handles_labels()[0], "Balance of CPU and GPU")
    text = f" · all experts on one side: {', '.join(aside)}" if aside else ""
    label_below(figure, rows, [], f"marks: quartiles{text}")
    phases = " and ".join(rows["phase"].unique())
    many = numbers_between(int(data["visits"].min()), int(data["visits"].max()))
    sentences = [
        f"Distribution over {many} layer visits in {phases} of |CPU - GPU| / max(CPU, GPU); 100 % where all experts ran on one "
        + (f"side, as always with {', '.join(aside)} (not drawn)." if aside else "side."),
        "Left: time from the router's result to the end of the last expert on each side, copies that it waited for included.",
        "Right: time for which experts ran, on the busiest device of each kind, without copies.",
        "The definitions are ours; of PreScope (2025), Fig. 17, the kind of figure is known and not the definition.",
    ]
    return Drawing(data, figure, caption("Balance of CPU and GPU.", rows, [], *sentences))
