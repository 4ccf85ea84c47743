"""Figures that a synthetic trace should match: read from a file, or measured on a recording.

A file of targets is YAML::

    model: mixtral-8x7b
    shape: {n_layers: 32, n_experts: 8, top_k: 2, renormalise: true}
    sample: {n_requests: 80, n_decode: 128, separate: false}   # rows that the figures are compared on
    source: where the figures come from
    base: mixtral-8x7b        # parameter file to start from; what is not fitted stays as there
    fit: [popularity, ...]    # optional: what to fit; otherwise what the figures determine
    figures:
      reuse@1: {value: 0.355, tolerance: 0.02, source: published}
      belady@25: {value: 0.547, tolerance: 0.02, source: published, fitted: false}
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.core.limits import COUNT, TOKENS
from moesim.core.yaml_reader import read_yaml_value
from moesim.errors import ConfigError, TraceError, unknown_name
from moesim.trace.stats.balance import (
    activation_frequency,
    compose,
    distinct_experts,
    entropy_by_layer,
    independent_distinct,
    normalised_entropy,
    top_over_uniform,
)
from moesim.trace.stats.caches import layer_hit_rates
from moesim.trace.stats.locality import reuse, reuse_baseline, reuse_by_lag
from moesim.trace.stats.prediction import coactivation_recall, signal_recall, state_cosine
from moesim.trace.synthesis.parameter_set import NUMBERS, data_file, mapping, read_shape

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
    """Return whether figures are of the gate inputs."""
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
    batches = [batch[:steps] for batch in compose(request, size)]
    if not batches:
        return float("nan")
    return float(distinct_experts(experts, batches, n_experts).mean() / independent_distinct(experts, n_experts, size))


def _cosine(trace: Trace, which: str) -> float:
    """Return the cosine of a gate input with a signal's, by DALI's layers (Table 8)."""
    signal, _, layers = which.partition(":")
    first, _, last = layers.partition("-")
    assert trace.inputs is not None
    values = np.asarray(trace.inputs.values)
    cosines = state_cosine(values, trace.tables["residual"] if signal == "residual" else None)
    return float(cosines[int(first) - 1 : int(last or first)].mean())


SOURCES = ("measured", "published", "derived", "assumed")
_TOLERANCE = 0.02
_SAMPLE = ("n_requests", "n_decode")


@dataclass(frozen=True)
class Figure:
    """One figure to match."""

    name: str  # as `moesim.trace.synthesis.figures.measure` names it
    # value, tolerance: both in the figure's own unit
    value: float
    tolerance: float
    source: str  # `measured`, `published`, `derived` or `assumed`
    fitted: bool = True  # whether a fit tries to match it; otherwise it is a check
    ref: str = ""  # where it comes from, in a few words


@dataclass(frozen=True)
class Targets:
    """Figures of one model, and the size of the sample that they are compared on."""

    model: str
    shape: dict[str, Any]  # `n_layers`, `n_experts`, `top_k`, `renormalise` of what the figures are of
    # n_requests, n_decode: decode rows to synthesise
    n_requests: int
    n_decode: int
    separate: bool  # whether each request is measured by itself: the figures are of one request
    source: str
    base: str  # parameter file to start from; empty: none is named
    fit: tuple[str, ...]  # parameters to fit; empty: those that the figures determine
    figures: tuple[Figure, ...]

    @property
    def fitted(self) -> tuple[Figure, ...]:
        return tuple(figure for figure in self.figures if figure.fitted)


def read_targets(name_or_path: str) -> Targets:
    """Read a file of targets."""
    text, place = data_file("targets", name_or_path)
    raw = mapping(read_yaml_value(text, place), place, ("model", "shape", "sample", "source", "figures"), ("base", "fit"))
    sample = mapping(raw["sample"], f"{place}: sample", _SAMPLE, ("separate",))
    for key in _SAMPLE:
        if not isinstance(sample[key], int) or isinstance(sample[key], bool) or not 1 <= sample[key] <= TOKENS.most:
            what = f"a positive integer of at most {TOKENS.most}"
            raise ConfigError(f"{place}: sample.{key}: expected {what}, got {sample[key]!r}; correct it")
    for key in ("model", "source", *(key for key in ("base",) if key in raw)):
        if not _text(raw[key], f"{place}: {key}"):
            raise ConfigError(f"{place}: {key}: expected a text, got an empty one; write one")
    wanted = raw.get("fit", [])
    if not isinstance(wanted, list):
        raise ConfigError(f"{place}: fit: expected a list of parameters, got {wanted!r}; write [name, ...]")
    for name in wanted:
        if not isinstance(name, str) or name not in NUMBERS:
            raise ConfigError(f"{place}: fit: {unknown_name('parameter', str(name), NUMBERS)}")
    figures = mapping(raw["figures"], f"{place}: figures", (), tuple(raw["figures"]) if isinstance(raw["figures"], dict) else ())
    if not figures:
        raise ConfigError(f"{place}: figures: expected at least one, got none; write NAME: {{value: ..., source: ...}}")
    return Targets(
        model=raw["model"], shape=read_shape(raw["shape"], f"{place}: shape"), n_requests=sample["n_requests"],
        n_decode=sample["n_decode"], separate=_flag(sample.get("separate", False), f"{place}: sample.separate"),
        source=raw["source"], base=raw.get("base", ""), fit=tuple(wanted),
        figures=tuple(_figure(name, value, f"{place}: figures.{name}") for name, value in figures.items()),
    )  # fmt: skip


def _figure(name: str, value: Any, place: str) -> Figure:
    check_figure(str(name), place)  # of what is no text, none is
    raw = mapping(value, place, ("value", "source"), ("tolerance", "fitted", "ref"))
    number, tolerance = raw["value"], raw.get("tolerance", _TOLERANCE)
    for key, got in (("value", number), ("tolerance", tolerance)):
        if not isinstance(got, (int, float)) or isinstance(got, bool) or not 0 < got <= COUNT.most:
            raise ConfigError(f"{place}.{key}: expected a number above 0 and up to {COUNT.most:g}, got {got!r}; correct it")
    if raw["source"] not in SOURCES:
        raise ConfigError(f"{place}.source: {unknown_name('source', str(raw['source']), SOURCES)}")
    fitted, ref = _flag(raw.get("fitted", True), f"{place}.fitted"), _text(raw.get("ref", ""), f"{place}.ref")
    return Figure(name, float(number), float(tolerance), raw["source"], fitted, ref)


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{place}: expected a text, got {value!r}; correct it, or put it in quotes")
    return value


def _flag(value: Any, place: str) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{place}: expected true or false, got {value!r}; correct it")
    return value


def targets_of(trace: Trace, name: str) -> Targets:
    """Measure what a recording is like, as targets."""
    rows = decode_rows(trace, name)
    n_requests = len(np.unique(np.asarray(trace.request)[rows]))
    separate = n_requests == 1
    names = ["reuse@1", "reuse@8", "entropy", "top_over_uniform", "lru@25", "lru@50", "lru@75"]
    names += [] if separate else ["recall@coactivation"]
    names += [name for name in _BY_LAYER if trace.n_layers > 1]
    n_decode = max(1, round(len(rows) / n_requests))
    names += [f"union@{size}" for size in _BATCHES]
    names += [f"union@{_FITTED_BATCH}:{n_decode}"] if n_decode > STEPS_IN_STEP else []
    names += [f"recall@{signal}" for signal in ("gate_next1", "residual") if signal in trace.signals]
    renormalise = True
    if trace.weights is not None:
        names.append("top_weight")
        renormalise = bool(abs(np.asarray(trace.weights[rows], np.float64).sum(axis=2).mean() - 1) < 0.01)
    found = measure(trace, names, separate=separate)
    label = "measured" if trace.label == "measured" else "derived"
    return Targets(
        model=trace.model,
        shape={"n_layers": trace.n_layers, "n_experts": trace.n_experts, "top_k": trace.top_k, "renormalise": renormalise},
        n_requests=_ONE_BY_ONE if separate else n_requests,
        n_decode=n_decode,
        separate=separate,
        source=f"{label} on {name}, {len(rows)} decode rows of {n_requests} request{'s' * (n_requests > 1)}",
        base="",
        fit=(),
        figures=tuple(_measured(key, value, label) for key, value in found.items() if math.isfinite(value) and value > 0),
    )


_ONE_BY_ONE = 16
_BY_LAYER = tuple(f"{figure}:q{q}" for figure in ("reuse@1", "lru@50", "entropy", "top_over_uniform") for q in (10, 50, 90))
_BATCHES = (2, 4, 8, 16, 32)
_FITTED_BATCH = 8
_TOLERANCE_BY_LAYER = 0.03
_TOLERANCE_OF_A_RATIO = 0.08  # of a quantile over layers: about one expert of one layer
_NOT_FITTED = re.compile(rf"(lru@.*|top_over_uniform):q.*|union@(?!{_FITTED_BATCH}$).*")  # the others tell the same parameters


def _measured(name: str, value: float, label: str) -> Figure:
    tolerance = _TOLERANCE_BY_LAYER if ":q" in name and not name.startswith("entropy") else _TOLERANCE
    if name.startswith("top_over_uniform"):  # a ratio
        tolerance = value * (_TOLERANCE_OF_A_RATIO if ":q" in name else _TOLERANCE)
    return Figure(name, value, tolerance, label, not _NOT_FITTED.fullmatch(name))
