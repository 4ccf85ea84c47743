"""Figures of how well recorded signals tell routing, by layer and by token index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from moesim.errors import ConfigError, unknown_name
from moesim.plots.kinds import Drawing, kind
from moesim.plots.map_panels import NOT_FROM_ZERO, Panel, Words, heat_maps
from moesim.plots.style import add_corner, legend_above, new_figure
from moesim.plots.trace_kit import level, line, phase_of, signal_numbers, trace_corner, trace_words, whole_numbers
from moesim.plots.widths import COLUMN, TEXT
from moesim.trace import Signal, Trace
from moesim.trace.stats.balance import phase_rows, spans
from moesim.trace.stats.batches import compose, workloads
from moesim.trace.stats.prediction import busiest_found, recall, signal_recall_by_layer, top_ids, workload_recall

METRICS: Final = ("activated", "workload")
_CELLS: Final = {"activated": 32, "workload": 16}  # columns of a heat map, about: a step says less than its tokens
_LARGEST_BATCH: Final = 8


class _Asked(NamedTuple):
    """What to draw, checked."""

    signals: dict[str, Signal]
    rows: NDArray[np.int64]  # of the phase, that some signal covers
    token: NDArray[np.int64]  # of every row of the trace: number in its phase, from 1; 0 in the other phase
    phase: str
    metric: str
    top: int
    batch: int


def _asked(trace: Trace, metric: str, top: int, batch: int | None, phase: str | None, signals: Sequence[str] | None) -> _Asked:
    if metric not in METRICS:
        raise ConfigError(f"plot signal_accuracy: {unknown_name('metric', metric, METRICS)}")
    for name in signals or ():
        if name not in trace.signals:
            raise ConfigError(f"plot signal_accuracy: {unknown_name('signal of this trace', name, sorted(trace.signals))}")
    phase = phase_of(trace, phase)
    rows = phase_rows(trace, phase)
    chosen = {name: trace.signals[name] for name in signals or trace.signals}
    covered = {name: signal for name, signal in chosen.items() if np.isin(signal.rows, rows).any()}
    if not covered:
        raise ConfigError(f"plot signal_accuracy: expected a trace with signals of its {phase} tokens, got none ({trace.model})")
    index = np.zeros(len(trace.request), np.int64)
    first, length = spans(trace.request[rows])
    index[rows] = np.arange(len(rows)) - np.repeat(first, length) + 1
    if metric == "workload" and not 1 <= top < trace.n_experts:
        raise ConfigError(f"plot signal_accuracy: top: expected 1 to {trace.n_experts - 1} experts, got {top}")
    smallest = min(len(np.unique(trace.request[s.rows[np.isin(s.rows, rows)]])) for s in covered.values())
    size = min(_LARGEST_BATCH, smallest) if batch is None else batch
    if metric == "workload" and not 1 <= size <= smallest:
        raise ConfigError(f"plot signal_accuracy: batch: expected 1 to {smallest} requests that all signals cover, got {size}")
    order = signal_numbers(covered)
    rows = rows[np.isin(rows, np.concatenate([signal.rows for signal in covered.values()]))]
    return _Asked({name: covered[name] for name in order}, rows, index, phase, metric, top, size)


def _cells(trace: Trace, asked: _Asked, cell: int | None) -> pd.DataFrame:
    """Compute the accuracy of signals by layer and token index."""
    longest = int(asked.token[asked.rows].max())
    cell = cell or -(-longest // _CELLS[asked.metric])
    if not 1 <= cell <= longest:
        raise ConfigError(f"plot signal_accuracy: cell: expected 1 to {longest} tokens, got {cell}")
    parts = []
    for name, signal in asked.signals.items():
        for first, n, values in _by_cell(trace, signal, asked, cell):
            layers = np.arange(signal.first_layer, trace.n_layers)
            columns: dict[str, Any] = {"signal": name, "layer": layers, "token": first}
            columns |= {"last_token": min(first + cell - 1, longest), "accuracy": values[signal.first_layer :], "n": n}
            parts.append(pd.DataFrame(columns))
    return pd.concat(parts, ignore_index=True)


def _by_cell(trace: Trace, signal: Signal, asked: _Asked, cell: int) -> list[tuple[int, int, NDArray[np.float64]]]:
    """Give the first token index of each cell, the number of tokens or steps in it, and the accuracy by layer."""
    which = np.flatnonzero(np.isin(signal.rows, asked.rows))
    covered = np.asarray(signal.rows)[which]
    named, true = top_ids(signal, which, trace.top_k), np.asarray(trace.experts)[covered]
    found = None
    if asked.metric == "workload":
        steps = np.concatenate(compose(trace.request[covered], asked.batch))
        index = asked.token[covered][steps[:, 0]]  # a step takes tokens of one index: requests are covered from their first
        found = _busiest(named, true, steps, asked.top, trace.n_experts)
    else:
        index = asked.token[covered]
    numbers = (index - 1) // cell
    cells = []
    for number in np.unique(numbers):
        inside = numbers == number
        values = recall(named[inside], true[inside]) if found is None else found[inside].mean(axis=0)
        cells.append((int(number) * cell + 1, int(inside.sum()), values))
    return cells


def _busiest(named: Any, true: Any, steps: Any, top: int, n_experts: int) -> NDArray[np.float64]:
    """Overlap of the busiest experts, (n_steps, n_layers)."""
    layers = []
    for layer in range(true.shape[1]):
        said, is_so = (workloads(ids[:, layer][steps], n_experts) for ids in (named, true))
        layers.append(busiest_found(said, is_so, top)[0])
    return np.stack(layers, axis=1)


@kind("trace", "accuracy of recorded signals: heat maps, layers by token index")
def signal_accuracy(
    trace: Trace,
    metric: str = "activated",
    top: int = 1,
    batch: int | None = None,
    phase: str | None = None,
    signals: Sequence[str] | None = None,
    cell: int | None = None,
) -> Drawing:
    """Heat maps of the accuracy of signals, layers by token index."""
    asked = _asked(trace, metric, top, batch, phase, signals)
    data = _cells(trace, asked, cell)
    cell = int(data["last_token"].iloc[0] - data["token"].iloc[0] + 1)
    firsts = np.arange(data["token"].min(), data["token"].max() + 1, cell)
    panels = []
    for name, part in data.groupby("signal", sort=False):
        values = part.pivot(index="layer", columns="token", values="accuracy").reindex(range(trace.n_layers), columns=firsts)
        edges = (float(firsts[0]) - 0.5, float(firsts[-1]) + cell - 0.5)
        title = f"{name}: {_mean(part):.2f}"
        panels.append(Panel(title, values.to_numpy(np.float64), edges, _layers(trace), f"{asked.phase} token", "layer"))
    words = Words("Accuracy of signals", _scale(asked))
    figure = heat_maps(panels, words, size=(TEXT, 1.5), n_columns=3, from_zero=False)
    notes = ["beside the name: mean · crossed out: layers about which a signal says nothing"]
    add_corner(figure, trace_corner(trace, asked.phase, asked.rows), notes)
    low, high = int(data["n"].min()), int(data["n"].max())
    unit = "tokens" if asked.metric == "activated" else "steps"
    many = f"{low}" if low == high else f"{low} to {high}"
    cells = f"A cell is the mean of {many} {unit}" + (f" of {cell} neighbouring token indices." if cell > 1 else ".")
    told = (
        f"Accuracy of recorded signals by layer and {asked.phase} token index. {_definition(trace, asked)} {cells} The number "
        f"beside a name is the mean; what a signal says nothing about is crossed out. {NOT_FROM_ZERO} "
        f"{trace_words(trace, asked.phase, asked.rows)}"
    )
    return Drawing(data, figure, told)


def _mean(part: pd.DataFrame) -> float:
    """Mean accuracy of a signal over layers, each token or step counting once."""
    return float((part["accuracy"] * part["n"]).sum() / part["n"].sum())


def _layers(trace: Trace) -> tuple[float, float]:
    return -0.5, trace.n_layers - 0.5


def _scale(asked: _Asked) -> str:
    if asked.metric == "activated":
        return "recall@k"
    return "busiest expert found" if asked.top == 1 else f"overlap of top {asked.top}"


def _definition(trace: Trace, asked: _Asked) -> str:
    if asked.metric == "activated":
        return (
            f"Shown is recall@k: the share of the k = {trace.top_k} routed experts of a token that are among the k which the "
            f"signal ranks first (chance: {trace.top_k / trace.n_experts:.3f})."
        )
    what = "expert" if asked.top == 1 else f"{asked.top} experts"
    return (
        f"Shown is the share of the busiest {what} of a batch of {asked.batch} request{'s' if asked.batch > 1 else ''} that "
        f"the signal, its k best of each token counted, also names as busiest; ties for the last place of the true ones count "
        f"as right."
    )


def _by_layer(trace: Trace, asked: _Asked) -> pd.DataFrame:
    """Compute the accuracy of signals by layer."""
    parts = []
    for name, signal in asked.signals.items():
        if asked.metric == "activated":
            values, chance = signal_recall_by_layer(trace, signal, asked.rows), trace.top_k / trace.n_experts
        else:
            (found,) = workload_recall(trace, signal, asked.rows, [asked.batch], [asked.top])
            values, chance = found.by_layer[0], float(found.chance[0])
        layers = np.arange(signal.first_layer, trace.n_layers)
        columns = {"signal": name, "layer": layers, "accuracy": values[signal.first_layer :], "chance": chance}
        parts.append(pd.DataFrame(columns))
    return pd.concat(parts, ignore_index=True)


@kind("trace", "accuracy of recorded signals: a line a signal, by layer")
def signal_accuracy_by_layer(
    trace: Trace,
    metric: str = "activated",
    top: int = 1,
    batch: int | None = None,
    phase: str | None = None,
    signals: Sequence[str] | None = None,
) -> Drawing:
    """Lines of the accuracy of signals by layer."""
    asked = _asked(trace, metric, top, batch, phase, signals)
    data = _by_layer(trace, asked)
    figure, axes = new_figure(COLUMN, 1.9)
    for name, number in signal_numbers(data["signal"].unique()).items():
        part = data[data["signal"] == name]
        line(axes, part["layer"].tolist(), part["accuracy"].tolist(), number, name, linewidth=1.1, markersize=3.4)
    level(axes, float(data["chance"].mean()), "chance")
    axes.set_ylim(0, 1.03)
    axes.set_xlim(*_layers(trace))
    whole_numbers(axes.xaxis)
    axes.set_xlabel("layer")
    axes.set_ylabel(_scale(asked))
    legend_above(figure, axes.get_legend_handles_labels()[0], "Accuracy of signals by layer")
    add_corner(figure, trace_corner(trace, asked.phase, asked.rows))
    words = trace_words(trace, asked.phase, asked.rows)
    return Drawing(data, figure, f"Accuracy of recorded signals by layer. {_definition(trace, asked)} {words}")
