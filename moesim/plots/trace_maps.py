"""Figures of a trace: heat maps of reuse, drift, co-activation and accuracy of signals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from moesim.errors import ConfigError, unknown_name
from moesim.plots.style import (
    COLUMN,
    MAP,
    TEXT,
    Drawing,
    add_corner,
    for_paper,
    kind,
    legend_above,
    level,
    marked_line,
    new_figure,
    numbers_between,
    panel_title,
    panels_of,
    whole_numbers,
    width_for,
)
from moesim.trace import Signal, Trace
from moesim.trace.stats.balance import PHASES, Sample, main_phase, phase_rows, select, spans
from moesim.trace.stats.locality import membership, ranked, reuse_baseline, reuse_by_lag, reuse_by_rank
from moesim.trace.stats.prediction import pair_counts, recall, signal_recall_by_layer, top_ids

NOT_FROM_ZERO: Final = "The scale of colours does not begin at 0."
_BLANK: Final = "#FFFFFF"  # what has no value; lighter than every colour of the map, and crossed out
_CROSSED: Final = "#BBBBBB"
_CUT: Final = 2.0  # percent
_TITLE: Final = 0.18  # inches


class Panel(NamedTuple):
    """One heat map: values (rows, columns) and its edges."""

    title: str
    values: NDArray[np.float64]
    x: tuple[float, float]  # edges
    y: tuple[float, float]
    x_label: str
    y_label: str = "layer"


def heat_maps(
    panels: Sequence[Panel], title: str, scale: str, *, size: tuple[float, float], n_columns: int, power: float = 1.0,
    from_zero: bool = True, square: bool = False,
) -> Figure:  # fmt: skip
    """Draw heat maps on one scale."""
    width = width_for(size[0])
    n_columns = min(max(1, round(n_columns * width / size[0])), len(panels))
    height = -(-len(panels) // n_columns) * size[1] + (0 if for_paper() else _TITLE)
    figure, grid = panels_of(len(panels), n_columns, width, height, "compressed" if square else "constrained", sharey=True)
    everything = np.concatenate([panel.values.ravel() for panel in panels])
    low = 0.0 if from_zero else float(np.nanpercentile(everything, _CUT))
    norm = PowerNorm(power, low, float(np.nanmax(everything)))
    for place, (axes, panel) in enumerate(zip(grid, panels, strict=True)):
        image = _draw(axes, panel, norm, square)
        below = panels[place + n_columns].x_label if place + n_columns < len(panels) else None
        axes.set(
            ylabel="" if place % n_columns else panel.y_label, xlabel="" if panel.x_label == below else panel.x_label
        )  # fmt: skip
    cut = "min" if float(np.nanmin(everything)) < low else "neither"
    figure.colorbar(image, ax=grid, label=scale, aspect=25, pad=0.02, fraction=0.05, extend=cut)
    if not for_paper():
        figure.suptitle(title, x=0.01, ha="left", fontsize=8.5, fontweight="bold")
    return figure


def _draw(axes: Axes, panel: Panel, norm: PowerNorm, square: bool) -> Any:
    axes.grid(visible=False)
    axes.set_facecolor(_BLANK)
    (left, right), (low, high) = panel.x, panel.y
    if np.isnan(panel.values).any():
        crossed: Any = {"facecolor": _BLANK, "edgecolor": _CROSSED, "hatch": "xxxx", "linewidth": 0}
        axes.add_patch(Rectangle((left, low), right - left, high - low, **crossed))
    image = axes.imshow(
        np.ma.masked_invalid(panel.values), cmap=MAP, norm=norm, origin="lower", extent=(left, right, low, high),
        aspect="equal" if square else "auto", interpolation="nearest", zorder=2,
    )  # fmt: skip
    panel_title(axes, panel.title)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    return image


def _values(data: pd.DataFrame, columns: str, values: str = "probability", index: str = "layer") -> NDArray[np.float64]:
    return data.pivot(index=index, columns=columns, values=values).to_numpy(np.float64)


def _edges(n: int, first: int = 0) -> tuple[float, float]:
    return first - 0.5, first + n - 0.5


_PAIRS: Final = 3  # pairs of layers that are drawn unless they are named
_RANKS: Final = 4  # ranks that are drawn, in multiples of k


def _reuse(sample: Sample, lags: int) -> pd.DataFrame:
    trace = sample.trace
    longest = int(np.unique(sample.request, return_counts=True)[1].max()) - 1
    if not 1 <= lags <= max(longest, 1):
        raise ConfigError(f"plot reuse_map: lags: expected 1 to {max(longest, 1)} tokens, got {lags}")
    if longest < 1:
        raise ConfigError(f"plot reuse_map: expected a request with two {sample.phase} tokens, got none ({trace.model})")
    by_lag = reuse_by_lag(sample.experts, sample.request, range(1, lags + 1), trace.n_experts)
    by_rank = reuse_by_rank(ranked(sample), sample.experts, sample.request, trace.n_experts)
    parts = []
    for name, values in (("lag", by_lag), ("rank", by_rank)):
        x, layer = (index.ravel() for index in np.indices(values.shape))
        parts.append(pd.DataFrame({"by": name, "layer": layer, "x": x + 1, "probability": values.ravel()}))
    return pd.concat(parts, ignore_index=True)


@kind("trace", "reuse of experts: heat maps, layers by distance and by rank")
def reuse_map(trace: Trace, lags: int = 16, phase: str | None = None) -> Drawing:
    """Heat maps of reuse, layers by distance and by rank."""
    sample = select(trace, phase_of(trace, phase))
    data = _reuse(sample, lags)
    titles = {"lag": ("by distance", "distance (tokens)"), "rank": ("by rank in the token before", "rank (1: best)")}
    panels = []
    for name, (title, label) in titles.items():
        values = _values(data[data["by"] == name], "x")
        panels.append(Panel(title, values, _edges(values.shape[1], 1), _edges(trace.n_layers), label))
    figure = heat_maps(panels, "Reuse of experts", "P(used again)", size=(TEXT, 2.1), n_columns=2, from_zero=False)
    baseline, chance = reuse_baseline(sample.experts, trace.n_experts), trace.top_k / trace.n_experts
    notes = [f"independent tokens: {baseline:.2f} · uniform router: {chance:.2f}"]
    add_corner(figure, trace_corner(trace, sample.phase), notes)
    ranks = (
        "by its full score" if trace.recorded_scores is not None else "among the chosen experts (the trace has no other scores)"
    )
    text = (
        f"Reuse of experts by layer. Left: share of a token's experts that the token d positions earlier also used, d from 1 to "
        f"{lags}. Right: probability that a token uses an expert, by that expert's rank in the token before, {ranks}. "
        f"With independent tokens of the same popularity the left would be {baseline:.2f} everywhere, with a uniform router "
        f"{chance:.2f}. Tokens of one request only. "
        f"{NOT_FROM_ZERO} {trace_words(trace, sample.phase)}"
    )
    return Drawing(data, figure, text)


def _followers(experts: NDArray[Any], pairs: Sequence[int], n_experts: int) -> pd.DataFrame:
    parts = []
    for layer in pairs:
        values = _conditional(experts, layer, n_experts)
        here, there = (_places(experts[:, at], n_experts) for at in (layer, layer + 1))
        expert, other = (index.ravel() for index in np.indices(values.shape))
        columns = {"layer": layer, "expert": expert, "next_expert": other, "place": here[expert], "next_place": there[other],
                   "probability": values.ravel()}  # fmt: skip
        parts.append(pd.DataFrame(columns))
    return pd.concat(parts, ignore_index=True)


def _pairs(trace: Trace, layers: Sequence[int] | int | None) -> list[int]:
    last = trace.n_layers - 2
    if last < 0:
        raise ConfigError(f"plot coactivation: expected a trace with two layers or more, got one ({trace.model})")
    if layers is None:
        return sorted({round(last * i / (_PAIRS - 1)) for i in range(_PAIRS)})
    asked = [layers] if isinstance(layers, int) else list(layers)
    for layer in asked:
        if not 0 <= layer <= last:
            raise ConfigError(f"plot coactivation: layers: expected layers from 0 to {last}, which have a next one, got {layer}")
    return asked


def _places(experts: NDArray[Any], n_experts: int) -> NDArray[np.int64]:
    """Return the place of each expert by popularity, from 1."""
    order = np.argsort(-np.bincount(experts.ravel(), minlength=n_experts), kind="stable")
    places = np.empty(n_experts, np.int64)
    places[order] = np.arange(1, n_experts + 1)
    return places


def _conditional(experts: NDArray[Any], layer: int, n_experts: int) -> NDArray[np.float64]:
    """Compute P(token uses j in the next layer | it uses i here)."""
    counts = pair_counts(experts[:, layer], experts[:, layer + 1], n_experts)
    tokens = counts.sum(axis=1, keepdims=True) / experts.shape[2]  # each token was counted with each of its k next experts
    shares = np.full(counts.shape, np.nan)
    np.divide(counts, tokens, out=shares, where=tokens > 0)
    return shares


@kind("trace", "which experts of the next layer follow those of a layer: heat maps")
def coactivation(trace: Trace, layers: Sequence[int] | int | None = None, phase: str | None = None) -> Drawing:
    """Heat maps of P(expert of the next layer | expert of this one)."""
    sample, pairs = select(trace, phase_of(trace, phase)), _pairs(trace, layers)
    data = _followers(sample.experts, pairs, trace.n_experts)
    edges = _edges(trace.n_experts, 1)
    panels = []
    for layer, part in data.groupby("layer", sort=False):
        values = _values(part, "next_place", index="place")
        title = f"layer {layer} to {int(str(layer)) + 1}"
        panels.append(Panel(title, values, edges, edges, "next layer's expert, by popularity", "expert, by popularity"))
    size = (TEXT, 2.6) if len(panels) > 1 else (COLUMN, 2.8)
    words = "Which experts follow which", "P(next | this)"
    figure = heat_maps(panels, *words, size=size, n_columns=3, power=0.5, square=True)
    add_corner(figure, trace_corner(trace, sample.phase), [f"uniform router: {trace.top_k / trace.n_experts:.2f}"])
    which = ", ".join(f"{layer} and {layer + 1}" for layer in pairs)
    text = (
        f"Which experts follow which: probability that a token uses expert j of the next layer (horizontal), given that it uses "
        f"expert i of this one (vertical), layers {which}; both by popularity, the most popular expert being 1. Each row adds up "
        f"to k = {trace.top_k}; a uniform router would give {trace.top_k / trace.n_experts:.3f} everywhere. The scale "
        "is that of square roots. Experts that no token used are crossed out; those that few used have noisy rows. "
        f"{trace_words(trace, sample.phase)}"
    )
    return Drawing(data, figure, text)


def _followed(sample: Sample) -> pd.DataFrame:
    """Compute ranks and probabilities of the next layer, by halves."""
    trace, n_experts = sample.trace, sample.trace.n_experts
    n_ranks = min(n_experts, _RANKS * trace.top_k)
    if trace.n_layers < 2 or sample.n_requests < 2:
        raise ConfigError(f"plot coactivation_ranks: expected two layers and two requests or more, got fewer ({trace.model})")
    numbers, number = np.unique(sample.request, return_inverse=True)
    is_seen = (np.random.default_rng(0).permutation(len(numbers)) < (len(numbers) + 1) // 2)[number]
    seen, rest = sample.experts[is_seen], sample.experts[~is_seen]
    parts = []
    for layer in range(trace.n_layers - 1):
        here, then = (pair_counts(rows[:, layer], rows[:, layer + 1], n_experts) for rows in (seen, rest))
        order = np.argsort(-here, axis=1, kind="stable")
        follows = np.take_along_axis(then, order, axis=1).sum(axis=0) / (len(rest) * trace.top_k)
        before, after = (membership(rows[:, layer + 1 : layer + 2], n_experts)[:, 0].mean(axis=0) for rows in (seen, rest))
        popular = after[np.argsort(-before, kind="stable")]
        for name, values in (("expert", follows), ("popularity", popular)):
            columns = {"by": name, "layer": layer, "rank": range(1, n_ranks + 1), "probability": values[:n_ranks]}
            parts.append(pd.DataFrame(columns))
    return pd.concat(parts, ignore_index=True)


@kind("trace", "how far an expert tells those of the next layer: heat maps, layers by rank")
def coactivation_ranks(trace: Trace, phase: str | None = None) -> Drawing:
    """Heat maps of how well an expert predicts those of the next layer."""
    sample = select(trace, phase_of(trace, phase))
    data = _followed(sample)
    panels = []
    for name, title in (("expert", "by what follows an expert"), ("popularity", "by popularity alone")):
        values = _values(data[data["by"] == name], "rank")
        panels.append(Panel(title, values, _edges(values.shape[1], 1), _edges(trace.n_layers - 1), "rank"))
    words = "What an expert tells of the next layer", "P(used in the next layer)"
    figure = heat_maps(panels, *words, size=(TEXT, 2.1), n_columns=2)
    notes = ["ranks by one half of the requests, probabilities by the other"]
    add_corner(figure, trace_corner(trace, sample.phase), notes)
    n_ranks = int(data["rank"].max())
    text = (
        f"How far one expert of a token tells those of the next layer. Left: probability that the token uses the expert of the "
        f"next layer which is r-th among those that follow it, mean over its experts; right: the r-th most popular expert of "
        f"that layer. The first {n_ranks} of {trace.n_experts} ranks; all would add up to k = {trace.top_k}. Ranks were counted "
        f"on a random half of the requests, probabilities on the rest. {trace_words(trace, sample.phase)}"
    )
    return Drawing(data, figure, text)


_PANELS: Final = {"before": "from the window before", "first": "from the first window"}


def _shares(experts: NDArray[np.int64], windows: int, n_experts: int) -> NDArray[np.float64]:
    parts = np.array_split(experts, windows)
    counts = [[np.bincount(part[:, layer].ravel(), minlength=n_experts) for layer in range(part.shape[1])] for part in parts]
    return np.array([np.array(one) / (len(part) * part.shape[2]) for one, part in zip(counts, parts, strict=True)])


def _distances(shares: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
    return {"before": np.abs(shares[1:] - shares[:-1]).sum(axis=2) / 2, "first": np.abs(shares[1:] - shares[0]).sum(axis=2) / 2}


def _drift(sample: Sample, windows: int) -> pd.DataFrame:
    n_tokens, n_experts = len(sample.rows), sample.trace.n_experts
    if not 2 <= windows <= n_tokens:
        raise ConfigError(f"plot popularity_drift: windows: expected 2 to {n_tokens}, the tokens of the phase, got {windows}")
    mixed = np.random.default_rng(0).permutation(n_tokens)
    found = _distances(_shares(sample.experts, windows, n_experts))
    by_chance = _distances(_shares(sample.experts[mixed], windows, n_experts))
    firsts = np.cumsum([0, *(len(part) for part in np.array_split(np.arange(n_tokens), windows))])
    parts = []
    for name, values in found.items():
        window, layer = (index.ravel() for index in np.indices(values.shape))
        columns = {"from": name, "layer": layer, "window": window + 2, "first_token": firsts[window + 1] + 1,
                   "distance": values.ravel(), "shuffled": by_chance[name].ravel()}  # fmt: skip
        parts.append(pd.DataFrame(columns))
    return pd.concat(parts, ignore_index=True)


@kind("trace", "drift of popularity: heat maps, layers by window")
def popularity_drift(trace: Trace, windows: int = 12, phase: str | None = None) -> Drawing:
    """Heat maps of the distance of popularity between windows of tokens, layers by window."""
    sample = select(trace, phase_of(trace, phase))
    data = _drift(sample, windows)
    panels = []
    for name, words in _PANELS.items():
        part = data[data["from"] == name]
        title = f"{words}: {part['distance'].mean():.2f} ({part['shuffled'].mean():.2f})"
        values = _values(part, "window", "distance")
        panels.append(Panel(title, values, _edges(windows - 1, 2), _edges(trace.n_layers), "window"))
    figure = heat_maps(panels, "Drift of popularity", "distance of popularity", size=(TEXT, 2.1), n_columns=2)
    least, rest = divmod(len(sample.rows), windows)
    tokens = f"{least}{f' or {least + 1}' if rest else ''} tokens a window"
    add_corner(figure, trace_corner(trace, sample.phase), [f"{tokens} · beside the name: mean (of shuffled tokens)"])
    text = (
        f"Drift of the popularity of experts: the tokens, request after request as in the trace, are cut into {windows} windows "
        f"({tokens}). Shown is the total variation distance, half the sum over experts of the difference of their shares "
        "in the activations of a layer: 0 is the same popularity, 1 no expert in common. Beside the names: the mean, and that of "
        "the same tokens in a random order (fixed seed), which is what chance gives windows of this size. "
        f"{trace_words(trace, sample.phase)}"
    )
    return Drawing(data, figure, text)


_CELLS: Final = 32  # columns of a heat map, about


class _Asked(NamedTuple):
    signals: dict[str, Signal]
    rows: NDArray[np.int64]  # of the phase, that some signal covers
    token: NDArray[np.int64]  # of every row of the trace: number in its phase, from 1; 0 in the other phase
    phase: str


def _asked(trace: Trace, phase: str | None, signals: Sequence[str] | None) -> _Asked:
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
    order = signal_numbers(covered)
    rows = rows[np.isin(rows, np.concatenate([signal.rows for signal in covered.values()]))]
    return _Asked({name: covered[name] for name in order}, rows, index, phase)


def _cells(trace: Trace, asked: _Asked) -> pd.DataFrame:
    longest = int(asked.token[asked.rows].max())
    cell = -(-longest // _CELLS)
    parts = []
    for name, signal in asked.signals.items():
        for first, n, values in _by_cell(trace, signal, asked, cell):
            layers = np.arange(signal.first_layer, trace.n_layers)
            columns: dict[str, Any] = {"signal": name, "layer": layers, "token": first}
            columns |= {"last_token": min(first + cell - 1, longest), "accuracy": values[signal.first_layer :], "n": n}
            parts.append(pd.DataFrame(columns))
    return pd.concat(parts, ignore_index=True)


def _by_cell(trace: Trace, signal: Signal, asked: _Asked, cell: int) -> list[tuple[int, int, NDArray[np.float64]]]:
    """Return first token, number of tokens, and accuracy by layer of each cell."""
    which = np.flatnonzero(np.isin(signal.rows, asked.rows))
    covered = np.asarray(signal.rows)[which]
    named, true = top_ids(signal, which, trace.top_k), np.asarray(trace.experts)[covered]
    numbers = (asked.token[covered] - 1) // cell
    cells = []
    for number in np.unique(numbers):
        inside = numbers == number
        cells.append((int(number) * cell + 1, int(inside.sum()), recall(named[inside], true[inside])))
    return cells


@kind("trace", "accuracy of recorded signals: heat maps, layers by token index")
def signal_accuracy(trace: Trace, phase: str | None = None, signals: Sequence[str] | None = None) -> Drawing:
    """Heat maps of recall@k of signals, layers by token index."""
    asked = _asked(trace, phase, signals)
    data = _cells(trace, asked)
    cell = int(data["last_token"].iloc[0] - data["token"].iloc[0] + 1)
    firsts = np.arange(data["token"].min(), data["token"].max() + 1, cell)
    panels = []
    for name, part in data.groupby("signal", sort=False):
        values = part.pivot(index="layer", columns="token", values="accuracy").reindex(range(trace.n_layers), columns=firsts)
        edges = (float(firsts[0]) - 0.5, float(firsts[-1]) + cell - 0.5)
        mean = float((part["accuracy"] * part["n"]).sum() / part["n"].sum())  # each token counts once
        token = f"{asked.phase} token"
        panels.append(Panel(f"{name}: {mean:.2f}", values.to_numpy(np.float64), edges, _edges(trace.n_layers), token))
    figure = heat_maps(panels, "Accuracy of signals", "recall@k", size=(TEXT, 1.5), n_columns=3, from_zero=False)
    notes = ["beside the name: mean · crossed out: layers about which a signal says nothing"]
    add_corner(figure, trace_corner(trace, asked.phase, asked.rows), notes)
    many = numbers_between(int(data["n"].min()), int(data["n"].max()))
    cells = f"A cell is the mean of {many} tokens" + (f" of {cell} neighbouring token indices." if cell > 1 else ".")
    text = (
        f"Accuracy of recorded signals by layer and {asked.phase} token index. {_definition(trace)} {cells} The number "
        f"beside a name is the mean; what a signal says nothing about is crossed out. {NOT_FROM_ZERO} "
        f"{trace_words(trace, asked.phase, asked.rows)}"
    )
    return Drawing(data, figure, text)


def _definition(trace: Trace) -> str:
    return (
        f"Shown is recall@k: the share of the k = {trace.top_k} routed experts of a token that are among the k which the "
        f"signal ranks first (chance: {trace.top_k / trace.n_experts:.3f})."
    )


def _by_layer(trace: Trace, asked: _Asked) -> pd.DataFrame:
    parts = []
    for name, signal in asked.signals.items():
        values, layers = signal_recall_by_layer(trace, signal, asked.rows), np.arange(signal.first_layer, trace.n_layers)
        parts.append(pd.DataFrame({"signal": name, "layer": layers, "accuracy": values[signal.first_layer :]}))
    return pd.concat(parts, ignore_index=True).assign(chance=trace.top_k / trace.n_experts)


@kind("trace", "accuracy of recorded signals: a line a signal, by layer")
def signal_accuracy_by_layer(trace: Trace, phase: str | None = None, signals: Sequence[str] | None = None) -> Drawing:
    """Lines of recall@k of signals by layer."""
    asked = _asked(trace, phase, signals)
    data = _by_layer(trace, asked)
    figure, axes = new_figure(COLUMN, 1.9)
    for name, number in signal_numbers(data["signal"].unique()).items():
        part = data[data["signal"] == name]
        marked_line(axes, part["layer"].tolist(), part["accuracy"].tolist(), number, name, linewidth=1.1, markersize=3.4)
    level(axes, float(data["chance"].mean()), "chance")
    whole_numbers(axes.xaxis)
    axes.set(xlim=_edges(trace.n_layers), ylim=(0, 1.03), xlabel="layer", ylabel="recall@k")
    legend_above(figure, axes.get_legend_handles_labels()[0], "Accuracy of signals by layer")
    add_corner(figure, trace_corner(trace, asked.phase, asked.rows))
    words = trace_words(trace, asked.phase, asked.rows)
    return Drawing(data, figure, f"Accuracy of recorded signals by layer. {_definition(trace)} {words}")


_SIGNALS: Final = ("gate_next1", "gate_next2", "gate_next3", "residual", "learned", "shadow", "coactivation", "")
"""Beginnings of the names of signals, in the order of their looks; the last stands for all others."""


def signal_numbers(names: Iterable[str]) -> dict[str, int]:
    """Number signals for `marked_line`, so that each looks the same in every figure.

    >>> signal_numbers(["coactivation", "shadow-int8", "residual", "shadow-int4"])
    {'residual': 3, 'shadow-int4': 5, 'coactivation': 6, 'shadow-int8': 13}
    """
    numbers: dict[str, int] = {}
    for name in sorted(names):
        number = next(i for i, beginning in enumerate(_SIGNALS) if name.startswith(beginning))
        while number in numbers.values():
            number += len(_SIGNALS)
        numbers[name] = number
    return dict(sorted(numbers.items(), key=lambda item: item[1]))


def phase_of(trace: Trace, phase: str | None) -> str:
    """Choose the phase to draw; by default decode, if there is any."""
    if phase is None:
        return main_phase(trace)
    if phase not in PHASES:
        raise ConfigError(f"plot: {unknown_name('phase', phase, list(PHASES))}")
    if not len(phase_rows(trace, phase)):
        raise ConfigError(f"plot: expected a trace with {phase} tokens, got none in {trace.model}; choose the other phase")
    return phase


def trace_corner(trace: Trace, phase: str, rows: NDArray[Any] | None = None) -> str:
    """Name the routing of a figure in one line."""
    return f"routing of {trace.model} · {_origin(trace)} · {_tokens(trace, phase, rows)}"


def trace_words(trace: Trace, phase: str, rows: NDArray[Any] | None = None) -> str:
    """Name the routing of a figure in a caption."""
    warning = {"miniature": " A miniature has a large model's routing shape and is easier to predict.",
               "synthetic": " No model was run: the routing is made up."}  # fmt: skip
    return (
        f"Routing of {trace.model} ({_origin(trace)}): {_tokens(trace, phase, rows)}, {trace.n_layers} MoE layers of "
        f"{trace.n_experts} experts, top {trace.top_k}.{warning.get(trace.origin, '')}"
    )


def _tokens(trace: Trace, phase: str, rows: NDArray[Any] | None) -> str:
    rows = phase_rows(trace, phase) if rows is None else rows
    n_requests = len(np.unique(trace.request[rows]))
    return f"{len(rows):,} {phase} tokens of {n_requests} request{'' if n_requests == 1 else 's'}"


def _origin(trace: Trace) -> str:
    return trace.label if trace.origin in ("recorded", trace.label) else f"{trace.label}, {trace.origin}"
