"""Heat maps of how the popularity of experts moves in the course of a trace."""

from __future__ import annotations

from typing import Final

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from moesim.errors import ConfigError
from moesim.plots.kinds import Drawing, kind
from moesim.plots.map_panels import Panel, Words, heat_maps
from moesim.plots.style import add_corner
from moesim.plots.trace_kit import phase_of, trace_corner, trace_words
from moesim.plots.widths import TEXT
from moesim.trace import Trace
from moesim.trace.stats.balance import Sample, select

_PANELS: Final = {"before": "from the window before", "first": "from the first window"}


def _shares(experts: NDArray[np.int64], windows: int, n_experts: int) -> NDArray[np.float64]:
    """Give the share of each expert in the activations of a window and layer, (window, layer, expert)."""
    parts = np.array_split(experts, windows)
    counts = [[np.bincount(part[:, layer].ravel(), minlength=n_experts) for layer in range(part.shape[1])] for part in parts]
    return np.array([np.array(one) / (len(part) * part.shape[2]) for one, part in zip(counts, parts, strict=True)])


def _distances(shares: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
    """Give the total variation distance of each window but the first from others, (window, layer)."""
    return {
        "before": np.abs(shares[1:] - shares[:-1]).sum(axis=2) / 2,
        "first": np.abs(shares[1:] - shares[0]).sum(axis=2) / 2,
    }


def _drift(sample: Sample, windows: int) -> pd.DataFrame:
    """Compute the distances, and those of as large windows of the same tokens in a random order."""
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
    """Heat maps of how far the popularity in a window of tokens is from that in others, layers by window."""
    sample = select(trace, phase_of(trace, phase))
    data = _drift(sample, windows)
    panels = []
    for name, words in _PANELS.items():
        part = data[data["from"] == name]
        values = part.pivot(index="layer", columns="window", values="distance").to_numpy(np.float64)
        title = f"{words}: {part['distance'].mean():.2f} ({part['shuffled'].mean():.2f})"
        panels.append(Panel(title, values, (1.5, windows + 0.5), (-0.5, trace.n_layers - 0.5), "window", "layer"))
    figure = heat_maps(panels, Words("Drift of popularity", "distance of popularity"), size=(TEXT, 2.1), n_columns=2)
    least, rest = divmod(len(sample.rows), windows)
    tokens = f"{least}{f' or {least + 1}' if rest else ''} tokens a window"
    add_corner(figure, trace_corner(trace, sample.phase), [f"{tokens} · beside the name: mean (of shuffled tokens)"])
    told = (
        f"Drift of the popularity of experts: the tokens, request after request as in the trace, are cut into {windows} windows "
        f"({tokens}). Shown is the total variation distance, half the sum over experts of the difference of their shares "
        "in the activations of a layer: 0 is the same popularity, 1 no expert in common. Beside the names: the mean, and that of "
        "the same tokens in a random order (fixed seed), which is what chance gives windows of this size. "
        f"{trace_words(trace, sample.phase)}"
    )
    return Drawing(data, figure, told)
