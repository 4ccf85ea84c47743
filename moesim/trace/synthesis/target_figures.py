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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.core.limits import COUNT, TOKENS
from moesim.core.yaml_reader import read_yaml_value
from moesim.errors import ConfigError, unknown_name
from moesim.trace.synthesis.data_files import data_file, mapping
from moesim.trace.synthesis.measure import STEPS_IN_STEP, check_figure, decode_rows, measure
from moesim.trace.synthesis.parameter_set import NUMBERS, read_shape

if TYPE_CHECKING:
    from moesim.trace import Trace

SOURCES = ("measured", "published", "derived", "assumed")
_TOLERANCE = 0.02
_SAMPLE = ("n_requests", "n_decode")


@dataclass(frozen=True)
class Figure:
    """One figure to match."""

    name: str  # as `moesim.trace.synthesis.measure.measure` names it
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
        """Figures that a fit tries to match."""
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
        model=raw["model"],
        shape=read_shape(raw["shape"], f"{place}: shape"),
        n_requests=sample["n_requests"],
        n_decode=sample["n_decode"],
        separate=_flag(sample.get("separate", False), f"{place}: sample.separate"),
        source=raw["source"],
        base=raw.get("base", ""),
        fit=tuple(wanted),
        figures=tuple(_figure(name, value, f"{place}: figures.{name}") for name, value in figures.items()),
    )


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
