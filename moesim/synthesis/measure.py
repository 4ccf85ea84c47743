"""The figures that a synthetic trace is fitted to and judged by, with the definitions of `moesim.stats`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from moesim.errors import ConfigError, TraceError
from moesim.stats.balance import activation_frequency, normalised_entropy, top_over_uniform
from moesim.stats.layer_caches import layer_hit_rates
from moesim.stats.locality import reuse, reuse_baseline
from moesim.stats.prediction import coactivation_recall, signal_recall
from moesim.stats.states import state_cosine

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moesim.trace import Trace

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
}


def check_figure(name: str, place: str) -> None:
    """Check that `measure` knows a figure.

    Raises
    ------
    ConfigError
        If not.
    """
    if not any(re.fullmatch(pattern, name) for pattern in _NAMES.values()):
        raise ConfigError(f"{place}: expected one of {', '.join(_NAMES)}, got {name!r}; correct the name")


def needs_inputs(names: Sequence[str]) -> bool:
    """Tell whether figures are about the gate inputs themselves."""
    return any(name.startswith("cosine@") for name in names)


def decode_rows(trace: Trace, name: str) -> NDArray[np.int64]:
    """Find the decode rows of a trace.

    Raises
    ------
    TraceError
        If there is none.
    """
    rows = np.flatnonzero(np.asarray(trace.phase) == 1)
    if not len(rows):
        raise TraceError(f"{name}: expected decode rows to measure, got a trace of prompts only; choose another")
    return rows


def measure(trace: Trace, names: Sequence[str], *, separate: bool = False) -> dict[str, float]:
    """Measure figures on the decode rows of a trace.

    Parameters
    ----------
    trace : Trace
    names : sequence of str
        ``reuse@8``: share of a token's experts that the token 8 positions earlier also used. ``reuse_baseline``: the
        same against any other token. ``entropy``: normalised. ``top_over_uniform``: load of the most used expert over
        the mean. ``lru@25``, ``belady@25``: hit rate of one cache a layer that holds 25 % of its experts, over all rows
        in order. ``recall@coactivation``: of a co-occurrence table of the experts of the layer before.
        ``recall@gate_next1``: of the top k of a signal. ``cosine@residual:4-23``: of what the signal reads with what
        the router will read, mean over layers 4 to 23. ``top_weight``: gate weight of the first expert, of 1 for all k.
    separate : bool
        Measure each request by itself, with cold caches, and give the mean.

    Returns
    -------
    dict of str to float
        Means over layers, in the order of the names.
    """
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
        if what == "reuse":
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
    shares = [name.partition("@")[2] for name in names if name.startswith(f"{policy}@")]
    if not shares:
        return {}
    capacities = [round(int(share) * n_experts / 100) for share in shares]
    rates = layer_hit_rates(experts, n_experts, capacities, [policy])[policy]
    return dict(zip(shares, rates.mean(axis=1).tolist(), strict=True))


def _cosine(trace: Trace, which: str) -> float:
    """Cosine of a layer's gate input with what a signal reads instead; layers as DALI (2026), Table 8, counts them."""
    signal, _, layers = which.partition(":")
    first, _, last = layers.partition("-")
    assert trace.inputs is not None
    values = np.asarray(trace.inputs.values)
    cosines = state_cosine(values, trace.tables["residual"] if signal == "residual" else None)
    return float(cosines[int(first) - 1 : int(last or first)].mean())
