"""Routing that nobody recorded: its LRU lift, what to expect of it, and parameters that have it.

The lift of a cache of C of a layer's N experts with hit rate h is d = ln(h / (1 - h)) - ln(C / (N - C)). For LRU it is nearly
the same for all sizes from 1.5 top_k to half of the experts, so that one number describes a model. 0 is uniform routing.
"""

from __future__ import annotations

import math
from functools import cache
from importlib import resources
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from moesim.core.yaml_reader import read_yaml_value
from moesim.errors import ConfigError
from moesim.trace import Trace
from moesim.trace.made import ASSUMED, EVEN, ROUTING
from moesim.trace.stats.caches import layer_hit_rates
from moesim.trace.synthesis.generate import synthesize
from moesim.trace.synthesis.parameter_set import NUMBERS, ParameterSet, read_parameters

if TYPE_CHECKING:
    from moesim.trace.made import Made

FILE: Final = "lift.yaml"
STATED: Final = 0.3
"""Half the range of the lift where one hit rate was counted: such a rate halves the error (12 models)."""
LIFTS: Final = (0.0, 4.5)
"""Least and largest lift for which there are parameters."""


class Lift(NamedTuple):
    """A lift with the range to assume, and the reason for both."""

    low: float
    middle: float
    high: float
    why: str


def lift_of(hit_rate: float, slots: int, n_experts: int) -> float:
    """Compute the lift of an LRU hit rate.

    >>> round(lift_of(0.61, 16, 128), 2)
    2.39
    """
    return math.log(hit_rate / (1 - hit_rate)) - math.log(slots / (n_experts - slots))


def hit_rate_of(lift: float, slots: int, n_experts: int) -> float:
    """Compute the LRU hit rate of a lift.

    >>> round(hit_rate_of(2.39, 32, 128), 2)
    0.78
    """
    return 1 / (1 + math.exp(-lift) * (n_experts - slots) / slots)


@cache
def _facts() -> dict[str, Any]:
    text = resources.files("moesim.trace.synthesis").joinpath(FILE).read_text(encoding="utf-8")
    return dict(read_yaml_value(text, FILE))


def expected(name: str, n_experts: int) -> Lift:
    """Return the lift to expect of a model that nobody recorded, by its experts and its vintage."""
    law, words = _facts()["law"], name.lower().replace("_", "-")
    found = [vintage for vintage, parts in _facts()["vintages"].items() if any(part in words for part in parts)]
    later = found != ["balanced"]
    middle = law["constant"] + law["per_doubling"] * math.log2(n_experts) + law["later"] * later
    sure = bool(found) and n_experts < law["wide_from"]
    half = law["range"] if sure else law["wide_range"]
    why = f"of {n_experts} experts, a law of seven recorded models"
    return _around(middle, half, why + ("" if found else "; how this one was balanced is not known"))


def _around(middle: float, half: float, why: str) -> Lift:
    """Return a lift and its range, within the lifts that there are parameters for."""
    least, most = LIFTS
    low, high = max(least, round(middle - half, 2)), min(most, round(middle + half, 2))
    return Lift(low, round(middle, 2), high, f"d = {middle:.2f} ({low:g} to {high:g}) {why}")


def counted(hit_rate: float, slots: int, n_experts: int) -> Lift:
    """Return the lift of a hit rate that an engine counted, and its range."""
    low, high = LIFTS
    middle = lift_of(hit_rate, slots, n_experts)
    if not low - STATED <= middle <= high + STATED:
        least, most = (f"{100 * hit_rate_of(lift, slots, n_experts):.3g}" for lift in LIFTS)
        raise ConfigError(
            f"expected {least} to {most} % hits with {slots} of {n_experts} experts, got {100 * hit_rate:g} %; "
            "state the rate of a warm LRU cache and the slots of one layer"
        )
    why = f"of {100 * hit_rate:g} % hits with {slots} of {n_experts} experts"
    return _around(min(max(middle, low), high), STATED, why)


def assumed(n_layers: int, n_experts: int, top_k: int, lift: float) -> ParameterSet:
    """Make parameters for a shape whose LRU lift is as wanted."""
    low, high = LIFTS
    if not low <= lift <= high:
        raise ConfigError(f"lift: expected a number from {low:g} to {high:g}, got {lift:g}; 0 is uniform routing, 2.6 Qwen3's")
    if top_k >= n_experts:
        raise ConfigError(f"top_k: expected less than n_experts = {n_experts}, got {top_k}; nothing is chosen")
    facts = _facts()
    shares, knobs, table = facts["table"]["share"], facts["table"]["knob"], facts["table"]["lift"]
    where = min(max(math.log2(n_experts / top_k), shares[0]), shares[-1])
    lifts = [float(np.interp(where, shares, column)) for column in zip(*table, strict=True)]
    return turned(n_layers, n_experts, top_k, float(np.interp(lift, lifts, knobs)), f"{ROUTING[ASSUMED]} (lift {lift:g})")


def turned(n_layers: int, n_experts: int, top_k: int, knob: float, name: str = ROUTING[ASSUMED]) -> ParameterSet:
    """Make the parameters of a place of the knob: odds of locality and, below 0, how much loads differ."""
    values = dict(_facts()["parameters"])
    for share in ("topic_share", "context_share"):
        odds = values[share] / (1 - values[share]) * math.exp(knob)
        values[share] = float(f"{odds / (1 + odds):.4g}")
    for spread in ("popularity", "workload_spread"):
        values[spread] = float(f"{values[spread] * math.exp(_facts()['knob_of_popularity'] * min(knob, 0)):.4g}")
    return ParameterSet(
        model=name, n_layers=n_layers, n_experts=n_experts, top_k=top_k, renormalise=True, **values,
        fitted_to="nothing: parameters that give a wanted lift", origin=dict.fromkeys(NUMBERS, "assumed"),
    )  # fmt: skip


def parameters_for(made: Made) -> ParameterSet:
    """Read the parameters that an experiment names, or make assumed ones for its shape."""
    if made.synthesize != ASSUMED:
        return read_parameters(made.synthesize)
    layers, experts, top_k = made.sizes
    lift = made.lift
    if made.hit_rate is not None:
        lift = counted(made.hit_rate, made.slots, experts).middle
    return assumed(layers, experts, top_k, expected("", experts).middle if lift is None else lift)


def even(made: Made) -> Trace:
    """Make routing in which each layer uses its experts in turn, for placements that make no use of it."""
    layers, experts, top_k = made.sizes
    n_rows = made.prompt + made.decode
    turn = np.arange(made.requests * n_rows)[:, None, None] * top_k + np.arange(layers)[:, None] + np.arange(top_k)
    return Trace.build(
        experts=turn % experts, weights=np.full(turn.shape, 1 / top_k), n_prompt=[made.prompt] * made.requests,
        n_decode=[made.decode] * made.requests, n_experts=experts, model=ROUTING[EVEN], label="synthetic",
        header={"note": "Experts in turn: no model was run.", "recorder": "moesim.trace.synthesis.lift"},
    )  # fmt: skip


def measured_lift(parameters: ParameterSet, seed: int, n_requests: int = 8) -> float:
    """Simulate LRU caches, one request after the other, and return the mean lift over sizes."""
    n, k = parameters.n_experts, parameters.top_k
    trace = synthesize(
        parameters, n_requests=n_requests, n_prompt=0, n_decode=384, seed=seed, n_signal_requests=0, n_calibration=0
    )
    sizes = [size for share in (0.125, 0.25, 0.375) if (size := round(share * n)) >= 1.5 * k] or [n // 2]
    rates = layer_hit_rates(np.asarray(trace.experts), n, sizes, ("lru",))["lru"].mean(axis=1)
    return float(np.mean([lift_of(float(rate), size, n) for rate, size in zip(rates, sizes, strict=True)]))


_LAYERS = 24  # of the models that the table is simulated with


def tabulate() -> list[list[float]]:
    """Simulate the table of `FILE`: the lift by log2 of n_experts / top_k, and by knob."""
    table = _facts()["table"]
    rows = []
    for share, (n_experts, top_k) in zip(table["share"], table["shapes"], strict=True):
        assert math.log2(n_experts / top_k) == share
        places = [turned(_LAYERS, n_experts, top_k, knob) for knob in table["knob"]]
        found = [sum(measured_lift(one, seed, 6) for seed in (1, 2)) / 2 for one in places]
        assert all(one < other for one, other in pairwise(found))
        rows.append([round(one, 3) for one in found])
    return rows
