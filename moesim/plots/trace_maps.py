"""Heat maps of a trace's routing: reuse by layer, and which experts of the next layer follow those of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from moesim.errors import ConfigError
from moesim.plots.kinds import Drawing, kind
from moesim.plots.map_panels import NOT_FROM_ZERO, Panel, Words, heat_maps
from moesim.plots.style import add_corner
from moesim.plots.trace_kit import phase_of, trace_corner, trace_words
from moesim.plots.widths import COLUMN, TEXT
from moesim.trace import Trace
from moesim.trace.stats.balance import Sample, select
from moesim.trace.stats.locality import membership, ranked, reuse_baseline, reuse_by_lag, reuse_by_rank
from moesim.trace.stats.prediction import pair_counts

_PAIRS: Final = 3  # pairs of layers that are drawn unless they are named
_RANKS: Final = 4  # ranks that are drawn, in multiples of k


def _reuse(sample: Sample, lags: int) -> pd.DataFrame:
    """Compute how much of what a token needs the tokens before it needed, layer by layer."""
    trace = sample.trace
    longest = int(np.unique(sample.request, return_counts=True)[1].max()) - 1
    if not 1 <= lags <= max(longest, 1):
        raise ConfigError(f"plot reuse_map: lags: expected 1 to {max(longest, 1)} tokens, got {lags}")
    if longest < 1:
        raise ConfigError(f"plot reuse_map: expected a request with two {sample.phase} tokens, got none ({trace.model})")
    by_lag = reuse_by_lag(sample.experts, sample.request, range(1, lags + 1), trace.n_experts)
    by_rank = reuse_by_rank(ranked(sample), sample.experts, sample.request, trace.n_experts)
    return pd.concat([_long(name, values) for name, values in (("lag", by_lag), ("rank", by_rank))], ignore_index=True)


def _long(name: str, values: NDArray[np.float64]) -> pd.DataFrame:
    x, layer = (index.ravel() for index in np.indices(values.shape))
    return pd.DataFrame({"by": name, "layer": layer, "x": x + 1, "probability": values.ravel()})


@kind("trace", "reuse of experts: heat maps, layers by distance and by rank")
def reuse_map(trace: Trace, lags: int = 16, phase: str | None = None) -> Drawing:
    """Heat maps of reuse, layers by distance and by rank."""
    sample = select(trace, phase_of(trace, phase))
    data = _reuse(sample, lags)
    titles = {"lag": ("by distance", "distance (tokens)"), "rank": ("by rank in the token before", "rank (1: best)")}
    panels = []
    for name, (title, label) in titles.items():
        values = data[data["by"] == name].pivot(index="layer", columns="x", values="probability").to_numpy(np.float64)
        panels.append(Panel(title, values, (0.5, values.shape[1] + 0.5), _layers(trace.n_layers), label, "layer"))
    figure = heat_maps(panels, Words("Reuse of experts", "P(used again)"), size=(TEXT, 2.1), n_columns=2, from_zero=False)
    baseline, chance = reuse_baseline(sample.experts, trace.n_experts), trace.top_k / trace.n_experts
    notes = [f"independent tokens: {baseline:.2f} · uniform router: {chance:.2f}"]
    add_corner(figure, trace_corner(trace, sample.phase), notes)
    ranks = (
        "by its full score" if trace.recorded_scores is not None else "among the chosen experts (the trace has no other scores)"
    )
    told = (
        f"Reuse of experts by layer. Left: share of a token's experts that the token d positions earlier also used, d from 1 to "
        f"{lags}. Right: probability that a token uses an expert, by that expert's rank in the token before, {ranks}. "
        f"With independent tokens of the same popularity the left would be {baseline:.2f} everywhere, with a uniform router "
        f"{chance:.2f}. Tokens of one request only. "
        f"{NOT_FROM_ZERO} {trace_words(trace, sample.phase)}"
    )
    return Drawing(data, figure, told)


def _layers(n: int) -> tuple[float, float]:
    return -0.5, n - 0.5


def _followers(experts: NDArray[Any], pairs: Sequence[int], n_experts: int) -> pd.DataFrame:
    """Compute which experts of the next layer follow each expert of a layer."""
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
    """Place of each expert of a layer by popularity, from 1; of equals the lower id is first."""
    order = np.argsort(-np.bincount(experts.ravel(), minlength=n_experts), kind="stable")
    places = np.empty(n_experts, np.int64)
    places[order] = np.arange(1, n_experts + 1)
    return places


def _conditional(experts: NDArray[Any], layer: int, n_experts: int) -> NDArray[np.float64]:
    """P(token uses j in the next layer | it uses i here), (n_experts, n_experts); nan in the rows of unused experts."""
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
    edges = (0.5, trace.n_experts + 0.5)
    panels = []
    for layer, part in data.groupby("layer", sort=False):
        values = part.pivot(index="place", columns="next_place", values="probability").to_numpy(np.float64)
        title = f"layer {layer} to {int(str(layer)) + 1}"
        panels.append(Panel(title, values, edges, edges, "next layer's expert, by popularity", "expert, by popularity"))
    size = (TEXT, 2.6) if len(panels) > 1 else (COLUMN, 2.8)
    words = Words("Which experts follow which", "P(next | this)")
    figure = heat_maps(panels, words, size=size, n_columns=3, power=0.5, square=True)
    add_corner(figure, trace_corner(trace, sample.phase), [f"uniform router: {trace.top_k / trace.n_experts:.2f}"])
    which = ", ".join(f"{layer} and {layer + 1}" for layer in pairs)
    told = (
        f"Which experts follow which: probability that a token uses expert j of the next layer (horizontal), given that it uses "
        f"expert i of this one (vertical), layers {which}; both by popularity, the most popular expert being 1. Each row adds up "
        f"to k = {trace.top_k}; a uniform router would give {trace.top_k / trace.n_experts:.3f} everywhere. The scale "
        "is that of square roots. Experts that no token used are crossed out; those that few used have noisy rows. "
        f"{trace_words(trace, sample.phase)}"
    )
    return Drawing(data, figure, told)


def _told(sample: Sample, ranks: int | None) -> pd.DataFrame:
    """Compute how far an expert of a layer tells those of the next, for all layers.

    Ranks are counted on a random half of the requests (fixed seed), probabilities on the rest, since ranks by the same tokens
    would look good by chance.
    """
    trace, n_experts = sample.trace, sample.trace.n_experts
    n_ranks = min(n_experts, _RANKS * trace.top_k) if ranks is None else ranks
    if not 1 <= n_ranks <= n_experts:
        raise ConfigError(f"plot coactivation_ranks: ranks: expected 1 to {n_experts}, got {n_ranks}")
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
def coactivation_ranks(trace: Trace, phase: str | None = None, ranks: int | None = None) -> Drawing:
    """Heat maps of how far an expert tells those of the next layer."""
    sample = select(trace, phase_of(trace, phase))
    data = _told(sample, ranks)
    panels = []
    for name, title in (("expert", "by what follows an expert"), ("popularity", "by popularity alone")):
        values = data[data["by"] == name].pivot(index="layer", columns="rank", values="probability").to_numpy(np.float64)
        panels.append(Panel(title, values, (0.5, values.shape[1] + 0.5), _layers(trace.n_layers - 1), "rank", "layer"))
    words = Words("What an expert tells of the next layer", "P(used in the next layer)")
    figure = heat_maps(panels, words, size=(TEXT, 2.1), n_columns=2)
    notes = ["ranks by one half of the requests, probabilities by the other"]
    add_corner(figure, trace_corner(trace, sample.phase), notes)
    n_ranks = int(data["rank"].max())
    told = (
        f"How far one expert of a token tells those of the next layer. Left: probability that the token uses the expert of the "
        f"next layer which is r-th among those that follow it, mean over its experts; right: the r-th most popular expert of "
        f"that layer. The first {n_ranks} of {trace.n_experts} ranks; all would add up to k = {trace.top_k}. Ranks were counted "
        f"on a random half of the requests, probabilities on the rest. {trace_words(trace, sample.phase)}"
    )
    return Drawing(data, figure, told)
