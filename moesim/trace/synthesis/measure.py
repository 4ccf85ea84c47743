"""The figures that a synthetic trace is fitted to and judged by, with the definitions of `moesim.trace.stats`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from moesim.errors import ConfigError, TraceError
from moesim.trace.stats.balance import activation_frequency, entropy_by_layer, normalised_entropy, top_over_uniform
from moesim.trace.stats.batches import compose, distinct_experts, independent_distinct
from moesim.trace.stats.layer_caches import layer_hit_rates
from moesim.trace.stats.locality import reuse, reuse_baseline, reuse_by_lag
from moesim.trace.stats.prediction import coactivation_recall, signal_recall
from moesim.trace.stats.states import state_cosine

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moesim.trace import Trace

STEPS_IN_STEP = 128  # how far a batch is followed: the longer, the less of what its requests begin with alike
_NAMES = {
    "reuse@N": r"reuse@[1-9]\d*",
    "reuse_baseline": r"reuse_baseline",
    "entropy": r"entropy",
    "top_over_uniform": r"top_over_uniform",
    "lru@PERCENT": r"lru@[1-9]\d?",
    "belady@PERCENT": r"belady@[1-9]\d?",
    "recall@coactivation": r"recall@coactivation",
    "recall@SIGNAL": r"recall@(gate_next[123]|residual)",
    "cosine@SIGNAL:LAYER or :FIRST-LAST": r"cosine@(gate_next1|residual):[1-9]\d*(-[1-9]\d*)?",
    "top_weight": r"top_weight",
    "reuse@N, lru@PERCENT, entropy or top_over_uniform with :qPERCENT": (
        r"(reuse@[1-9]\d*|lru@[1-9]\d?|entropy|top_over_uniform):q[1-9]\d?"
    ),
    "union@BATCH or union@BATCH:TOKENS": r"union@[1-9]\d?(:[1-9]\d*)?",
}


def check_figure(name: str, place: str) -> None:
    """Check that `measure` knows a figure."""
    if not any(re.fullmatch(pattern, name) for pattern in _NAMES.values()):
        raise ConfigError(f"{place}: expected one of {', '.join(_NAMES)}, got {name!r}; correct the name")


def needs_inputs(names: Sequence[str]) -> bool:
    """Tell whether figures are about the gate inputs themselves."""
    return any(name.startswith("cosine@") for name in names)


def decode_rows(trace: Trace, name: str) -> NDArray[np.int64]:
    """Find the decode rows of a trace."""
    rows = np.flatnonzero(np.asarray(trace.phase) == 1)
    if not len(rows):
        raise TraceError(f"{name}: expected decode rows to measure, got a trace of prompts only; choose another")
    return rows


def measure(trace: Trace, names: Sequence[str], *, separate: bool = False) -> dict[str, float]:
    """Measure figures on the decode rows of a trace."""
    rows = decode_rows(trace, "trace")
    groups = [rows]
    if separate:
        request = np.asarray(trace.request)[rows]
        groups = np.split(rows, np.flatnonzero(np.diff(request)) + 1)
    found = [_measure(trace, group, names) for group in groups]
    return {name: float(np.mean([each[name] for each in found])) for name in names}


def _measure(trace: Trace, rows: NDArray[np.int64], names: Sequence[str]) -> dict[str, float]:
    experts, request = np.asarray(trace.experts)[rows], np.asarray(trace.request)[rows]
    n_experts = trace.n_experts
    frequency = activation_frequency(experts, n_experts)
    rates = {policy: _hit_rates(experts, n_experts, names, policy) for policy in ("lru", "belady")}
    found = {}
    for name in names:
        what, _, which = name.partition("@")
        if ":q" in name:
            found[name] = _quantile(experts, request, n_experts, *name.split(":q"))
        elif what == "union":
            found[name] = _union(experts, request, n_experts, *map(int, which.split(":")))
        elif what == "reuse":
            found[name] = reuse(experts, request, int(which), n_experts)
        elif what in rates:
            found[name] = rates[what][which]
        elif what == "recall" and which == "coactivation":
            found[name] = coactivation_recall(experts, request, n_experts)
        elif what == "recall":
            found[name] = signal_recall(trace, trace.signals[which], rows)
        elif what == "cosine":
            found[name] = _cosine(trace, which)
        elif what == "top_weight":
            assert trace.weights is not None
            weights = np.asarray(trace.weights[rows], np.float32)
            found[name] = float((weights[..., 0] / weights.sum(axis=2)).mean())
        else:
            found[name] = {
                "entropy": lambda: normalised_entropy(frequency),
                "top_over_uniform": lambda: top_over_uniform(frequency),
                "reuse_baseline": lambda: reuse_baseline(experts, n_experts),
            }[name]()
    return found


def _hit_rates(experts: NDArray[np.uint8], n_experts: int, names: Sequence[str], policy: str) -> dict[str, float]:
    shares = [name.partition("@")[2] for name in names if name.startswith(f"{policy}@") and ":q" not in name]
    if not shares:
        return {}
    capacities = [round(int(share) * n_experts / 100) for share in shares]
    rates = layer_hit_rates(experts, n_experts, capacities, [policy])[policy]
    return dict(zip(shares, rates.mean(axis=1).tolist(), strict=True))


def _quantile(experts: NDArray[np.uint8], request: NDArray[np.int32], n_experts: int, name: str, percent: str) -> float:
    """Quantile over layers of a figure whose mean over layers is the figure of that name."""
    what, _, which = name.partition("@")
    if what == "reuse":
        by_layer = reuse_by_lag(experts, request, [int(which)], n_experts)[0]
    elif what == "lru":
        by_layer = layer_hit_rates(experts, n_experts, [round(int(which) * n_experts / 100)], ["lru"])["lru"][0]
    else:
        load = activation_frequency(experts, n_experts)
        by_layer = load.max(axis=1) * n_experts if what == "top_over_uniform" else entropy_by_layer(load)
    return float(np.quantile(by_layer, int(percent) / 100))


def _union(
    experts: NDArray[np.uint8], request: NDArray[np.int32], n_experts: int, size: int, steps: int = STEPS_IN_STEP
) -> float:
    """Experts of a step of a batch, relative to independent rows; nan if there are fewer requests."""
    batches = [batch[:steps] for batch in compose(request, size)]
    if not batches:
        return float("nan")
    return float(distinct_experts(experts, batches, n_experts).mean() / independent_distinct(experts, n_experts, size))


def _cosine(trace: Trace, which: str) -> float:
    """Cosine of a layer's gate input with what a signal reads instead; layers as DALI (2026), Table 8, counts them."""
    signal, _, layers = which.partition(":")
    first, _, last = layers.partition("-")
    assert trace.inputs is not None
    values = np.asarray(trace.inputs.values)
    cosines = state_cosine(values, trace.tables["residual"] if signal == "residual" else None)
    return float(cosines[int(first) - 1 : int(last or first)].mean())
