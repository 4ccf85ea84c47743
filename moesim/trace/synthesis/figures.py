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
    also:                     # optional: figures of other samples of the same model, fitted together
      one prompt: {source: where from, sample: {...}, top_k: 2, figures: {...}}

A sample may have `n_prompt` (rows of each prompt), `separate: true` (each request by itself, with cold caches) and `workloads: 4`
(requests of four kinds of text in turn).
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
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
    loads,
    spans,
    top_by_layer,
    used,
)
from moesim.trace.stats.caches import layer_hit_rates
from moesim.trace.stats.locality import reuse_baseline, reuse_by_lag, segments
from moesim.trace.stats.prediction import coactivation_recall, signal_recall, state_cosine
from moesim.trace.synthesis.parameter_set import NUMBERS, data_file, mapping, read_shape

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moesim.trace import Trace

STEPS_IN_STEP = 128  # how far a batch is followed: the longer, the less of what its requests begin with alike
_PAIRED = "recall@coactivation"
_TABLES = 4  # requests that it is measured on, where each is measured by itself: their tables take long
_PART = 32  # tokens that count as a request of their own where there is but one
_PERCENT = r"[1-9]\d?(\.\d+)?"
_NAMES = {
    "reuse@N": r"reuse@[1-9]\d*",
    "lru@PERCENT, belady@PERCENT (of the experts, in one cache a layer)": rf"(lru|belady)@{_PERCENT}",
    "static@PERCENT (hit rate of the most used of the first tenth of the rows in the others)": rf"static@{_PERCENT}",
    "share@PERCENT (of the activations, of the most used)": rf"share@{_PERCENT}",
    "driftTOKENS@PERCENT (part of the most used that changes from window to window)": rf"drift[1-9]\d*@{_PERCENT}",
    "window@TOKENS (distinct experts of so many tokens, one after another)": r"window@[1-9]\d*",
    "distinct@BATCH (distinct experts of so many neighbouring requests)": r"distinct@[1-9]\d?",
    "entropy": r"entropy",
    "top_over_uniform": r"top_over_uniform",
}
_OF_LAYERS = r"(:q[1-9]\d?|:layer\d+(-\d+)?)?"
_OTHERS = {
    "any of these with :qPERCENT (over layers), or :layerN or :layerN-M (from 0 on)": "",
    "lru@PERCENT:prompt (of prompt tokens, cold caches) or :requests (standard deviation over requests)": (
        rf"lru@{_PERCENT}:(prompt|requests)"
    ),
    "union@BATCH or union@BATCH:TOKENS": r"union@[1-9]\d?(:[1-9]\d*)?",
    "reuse_baseline": r"reuse_baseline",
    "recall@coactivation": r"recall@coactivation",
    "recall@SIGNAL": r"recall@(gate_next[123]|residual)",
    "cosine@SIGNAL:LAYER or :FIRST-LAST": r"cosine@(gate_next1|residual):[1-9]\d*(-[1-9]\d*)?",
    "top_weight": r"top_weight",
}
_KNOWN = re.compile("|".join([rf"({'|'.join(_NAMES.values())}){_OF_LAYERS}", *filter(None, _OTHERS.values())]))


def check_figure(name: str, place: str) -> None:
    """Check that `measure` knows a figure."""
    if not _KNOWN.fullmatch(name):
        raise ConfigError(f"{place}: expected one of {', '.join(_NAMES | _OTHERS)}, got {name!r}; correct the name")


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
    found: dict[str, float] = {}
    for name in names:
        what, _, of = name.partition(":")
        if of in ("prompt", "requests"):
            rates = _cold_rates(trace, 0 if of == "prompt" else 1, what)
            found[name] = float(rates.mean() if of == "prompt" else rates.std())
    rest = [name for name in names if name not in found]
    if not rest:
        return found
    rows = decode_rows(trace, "trace")
    groups = _by_request(trace, rows) if separate else [rows]
    parts = [_measure(trace, group, [name for name in rest if n < _TABLES or name != _PAIRED]) for n, group in enumerate(groups)]
    return found | {name: float(np.mean([each[name] for each in parts if name in each])) for name in rest}


def _by_request(trace: Trace, rows: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    return np.split(rows, np.flatnonzero(np.diff(np.asarray(trace.request)[rows])) + 1)


def _cold_rates(trace: Trace, phase: int, name: str) -> NDArray[np.float64]:
    """Replay a phase of each request through caches that begin empty; hit rates by request."""
    groups = _by_request(trace, np.flatnonzero(np.asarray(trace.phase) == phase))
    of = name.partition("@")[2]
    return np.asarray([_hit_rates(np.asarray(trace.experts)[g], trace.n_experts, "lru", [of])[of].mean() for g in groups])


def _measure(trace: Trace, rows: NDArray[np.int64], names: Sequence[str]) -> dict[str, float]:
    experts, request = np.asarray(trace.experts)[rows], np.asarray(trace.request)[rows]
    n_experts = trace.n_experts
    frequency = activation_frequency(experts, n_experts)
    layers = _of_layers(experts, request, n_experts, frequency, {name.partition(":")[0] for name in names})
    found = {}
    for name in names:
        figure, _, part = name.partition(":")
        what, _, which = name.partition("@")
        if figure in layers:
            found[name] = _summary(layers[figure], part)
        elif what == "union":
            found[name] = _union(experts, request, n_experts, *map(int, which.split(":")))
        elif name == "reuse_baseline":
            found[name] = reuse_baseline(experts, n_experts)
        elif name == _PAIRED:
            parts = request if request[0] != request[-1] else np.arange(len(request)) // _PART  # one request is cut into parts
            found[name] = coactivation_recall(experts, parts, n_experts)
        elif what == "recall":
            found[name] = signal_recall(trace, trace.signals[which], rows)
        elif what == "cosine":
            found[name] = _cosine(trace, which)
        else:
            assert name == "top_weight" and trace.weights is not None
            weights = np.asarray(trace.weights[rows], np.float32)
            found[name] = float((weights[..., 0] / weights.sum(axis=2)).mean())
    return found


def _summary(by_layer: NDArray[np.float64], part: str) -> float:
    """Average a figure over layers or over some of them, or take a quantile."""
    if part.startswith("q"):
        return float(np.quantile(by_layer, int(part[1:]) / 100))
    first, _, last = part.removeprefix("layer").partition("-")
    return float(by_layer[int(first) : int(last or first) + 1].mean() if part else by_layer.mean())


def _of_layers(
    experts: NDArray[Any], request: NDArray[Any], n_experts: int, frequency: NDArray[np.float64], names: Collection[str]
) -> dict[str, NDArray[np.float64]]:
    """Measure figures that each layer has, by name."""
    found: dict[str, NDArray[np.float64]] = {}
    for policy in ("lru", "belady"):
        shares = sorted(name.partition("@")[2] for name in names if name.startswith(f"{policy}@"))
        found |= {f"{policy}@{of}": rate for of, rate in _hit_rates(experts, n_experts, policy, shares).items()}
    for name in sorted(set(names) - set(found)):
        what, _, which = name.partition("@")
        if what == "reuse":
            found[name] = reuse_by_lag(experts, request, [int(which)], n_experts)[0]
        elif what == "entropy":
            found[name] = entropy_by_layer(frequency)
        elif what == "top_over_uniform":
            found[name] = top_by_layer(frequency)
        elif what == "share":
            found[name] = -np.sort(-frequency, axis=-1)[:, : _slots(which, n_experts)].sum(axis=1)
        elif what == "static":
            early = len(experts) // 10
            seen, met = used(experts[:early], n_experts), activation_frequency(experts[early:], n_experts)
            found[name] = np.take_along_axis(met, _most(seen, _slots(which, n_experts)), axis=-1).sum(axis=1)
        elif what.startswith("drift"):
            found[name] = _drift(experts, n_experts, int(what.removeprefix("drift")), _slots(which, n_experts))
        elif what == "window":
            inside, segment = segments(request, int(which))
            found[name] = (loads(experts[inside], segment, n_experts) > 0).sum(axis=2).mean(axis=0)
        elif what == "distinct":
            found[name] = _distinct(experts, request, n_experts, int(which))
    return found


def _slots(percent: str, n_experts: int) -> int:
    return round(float(percent) * n_experts / 100)


def _most(counts: NDArray[Any], n: int) -> NDArray[np.int64]:
    """Find the most used experts; of equal ones the lower ids."""
    return np.argsort(-counts, axis=-1, kind="stable")[..., :n]


def _hit_rates(experts: NDArray[Any], n_experts: int, policy: str, shares: Sequence[str]) -> dict[str, NDArray[np.float64]]:
    if not shares:
        return {}
    capacities = [_slots(share, n_experts) for share in shares]
    return dict(zip(shares, layer_hit_rates(experts, n_experts, capacities, [policy])[policy], strict=True))


def _drift(experts: NDArray[Any], n_experts: int, tokens: int, n: int) -> NDArray[np.float64]:
    """Compute which part of the n most used experts of a window is not among those of the next."""
    n_windows = len(experts) // tokens
    if n_windows < 2:
        return np.full(experts.shape[1], np.nan)
    counts = loads(experts[: n_windows * tokens], np.repeat(np.arange(n_windows), tokens), n_experts)
    best = np.zeros(counts.shape, bool)
    np.put_along_axis(best, _most(counts, n), True, axis=2)
    return np.asarray(1 - (best[1:] & best[:-1]).sum(axis=2).mean(axis=0) / n)


def _distinct(experts: NDArray[Any], request: NDArray[Any], n_experts: int, size: int) -> NDArray[np.float64]:
    """Count the distinct experts of batches of neighbouring requests."""
    first, length = spans(request)
    groups = np.arange(len(first) // size * size).reshape(-1, size)
    if not len(groups):
        return np.full(experts.shape[1], np.nan)
    batches = [first[g] + np.arange(min(STEPS_IN_STEP, length[g].min()), dtype=np.int64)[:, None] for g in groups]
    return distinct_experts(experts, batches, n_experts)


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
    n_prompt: int = 0
    workloads: int = 0  # kinds of text, request by request in turn; 0: as the parameters say
    name: str = ""  # of the sample, if there are several
    also: tuple[Targets, ...] = ()  # other samples of the same model

    @property
    def samples(self) -> tuple[Targets, ...]:
        return (self, *self.also)

    @property
    def fitted(self) -> tuple[Figure, ...]:
        return tuple(figure for figure in self.figures if figure.fitted)


def read_targets(name_or_path: str) -> Targets:
    """Read a file of targets."""
    text, place = data_file("targets", name_or_path)
    of_sample = ("sample", "source", "figures")
    raw = mapping(read_yaml_value(text, place), place, ("model", "shape", *of_sample), ("base", "fit", "also"))
    for key in ("model", *(key for key in ("base",) if key in raw)):
        if not _text(raw[key], f"{place}: {key}"):
            raise ConfigError(f"{place}: {key}: expected a text, got an empty one; write one")
    wanted = raw.get("fit", [])
    if not isinstance(wanted, list):
        raise ConfigError(f"{place}: fit: expected a list of parameters, got {wanted!r}; write [name, ...]")
    for name in wanted:
        if not isinstance(name, str) or name not in NUMBERS:
            raise ConfigError(f"{place}: fit: {unknown_name('parameter', str(name), NUMBERS)}")
    shape = read_shape(raw["shape"], f"{place}: shape")
    others = raw.get("also", {})
    also = []
    for name in mapping(others, f"{place}: also", (), tuple(others) if isinstance(others, dict) else ()):
        where = f"{place}: also.{name}"
        part = mapping(others[name], where, of_sample, ("top_k",))
        shaped = read_shape({**shape, "top_k": part.get("top_k", shape["top_k"])}, where)
        also.append(Targets(model=raw["model"], shape=shaped, base="", fit=(), name=str(name), **_sample(part, where)))
    return Targets(
        model=raw["model"], shape=shape, base=raw.get("base", ""), fit=tuple(wanted), also=tuple(also), **_sample(raw, place)
    )


_COUNTS = {"n_requests": 1, "n_decode": 1, "n_prompt": 0, "workloads": 0}  # with the least that each may be


def _sample(raw: dict[str, Any], place: str) -> dict[str, Any]:
    """Check the size, the source and the figures of a sample."""
    sample = mapping(raw["sample"], f"{place}: sample", _SAMPLE, ("separate", "n_prompt", "workloads"))
    for key, least in _COUNTS.items():
        value = sample.get(key, 0)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= TOKENS.most:
            what = f"{'a positive' if least else 'no negative'} integer of at most {TOKENS.most}"
            raise ConfigError(f"{place}: sample.{key}: expected {what}, got {value!r}; correct it")
    if not _text(raw["source"], f"{place}: source"):
        raise ConfigError(f"{place}: source: expected a text, got an empty one; write one")
    figures = mapping(raw["figures"], f"{place}: figures", (), tuple(raw["figures"]) if isinstance(raw["figures"], dict) else ())
    if not figures:
        raise ConfigError(f"{place}: figures: expected at least one, got none; write NAME: {{value: ..., source: ...}}")
    return {
        **{key: sample.get(key, 0) for key in _COUNTS},
        "separate": _flag(sample.get("separate", False), f"{place}: sample.separate"),
        "source": raw["source"],
        "figures": tuple(_figure(name, value, f"{place}: figures.{name}") for name, value in figures.items()),
    }


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
