"""AdapMoE: cache sizes by a dynamic program, one prefetch, and fewer second experts.

S. Zhong et al., "AdapMoE: Adaptive Sensitivity-based Expert Gating and Management for Efficient MoE Inference", ICCAD 2024
(arXiv:2408.10284); the released code, which grew from Mixtral-Offloading's.

| point | paper says | released code does | we do |
|---|---|---|---|
| cache sizes | a dynamic program over expected loads | the same, from tables of accuracy and of single experts, 32 layers | the same; ``recall`` and ``single``, or the tables (``released``) |
| gating, decode | the second expert is left out below a threshold of the layer | weight < sqrt(0.005 / sensitivity), steps of one token | the same: ``sensitivity``, or the table; None: no gating |
| cache | LRU per layer | the same; a used prefetch takes its place before demand loads | the same |
| prediction | the next layer's gate on the present state | the same, steps of one token; the first predicted that is not on the GPU | the same (``source``) |
| prefetch | deeper layers too, when the next is complete | one expert of the next layer, behind the demand loads | as the code |
| wait | - | nothing of a layer begins before its prefetch is in, right or wrong | the same |
| a wrong prefetch | - | given up when the layer is routed, never cached | given up when it has arrived |
| hits | - | a right prefetch counts as a miss | one that has arrived is a hit |
| eviction | - | free: host copies stay | the same |
| loads | - | a window of ``buffer_size`` - 1 | the same |
| start | - | the highest ids | the same |
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf, sqrt
from typing import Annotated, Any, ClassVar

import numpy as np

from moesim.errors import CapacityError, ConfigError
from moesim.policies.options import option
from moesim.policies.released import Released, Tables
from moesim.policies.systems.mixtral_offloading import SwapPlan, mixtral_offloading_plan
from moesim.policies.systems.mixtral_offloading_spec import AHEAD, MixtralOffloadingSpec
from moesim.policy import DEMAND, PREFETCH, Action, Fetch, Placement, Predicted, Routed, Skip, StepBegin, View

SENSITIVITY = 0.005
"""Constant in the released code's thresholds."""


def expected_loads(size: int, n_experts: int, accuracy: float, single: float = 0.0) -> float:
    """Return a token's expected demand loads with ``size`` experts cached (our derivation).

    One expert is wanted and missing (``single``: share of such tokens); of two, both are, with a right prefetch (``accuracy``: its
    chance; 0 for the first layer) and without; of two, one is.

    >>> [round(expected_loads(size, 8, 0.5), 3) for size in (0, 4, 8)]
    [1.5, 0.607, 0.0]
    """
    n, free = n_experts, n_experts - size
    both, one = free * (free - 1) / (n * (n - 1)), 2 * size * free / (n * (n - 1))
    alone = single * (1 - accuracy) * free / n
    return alone + (1 - single) * (accuracy * both + (1 - accuracy) * 2 * both + (1 - accuracy) * one)


def cache_sizes(loads: Sequence[Sequence[float]], total: int) -> list[int]:
    """Divide cache slots among layers, at least one each, for the fewest expected loads.

    Of equal sums, from the last layer on, the smallest size. Slots beyond all experts are not used.

    >>> cache_sizes([[9, 5, 1], [9, 8, 7], [9, 2, 2]], 4)
    [2, 1, 1]
    """
    n_layers, largest = len(loads), len(loads[0]) - 1
    if total < n_layers:
        raise CapacityError(
            f"cache sizes: expected at least a slot a layer, {n_layers} in all, got {total}; raise cache.ratio or cache.budget"
        )
    total = min(total, n_layers * largest)
    best = np.full(total + 1, np.inf)
    best[0] = 0.0
    chosen = np.zeros((n_layers, total + 1), np.int64)
    for layer, cost in enumerate(loads):
        found = np.full(total + 1, np.inf)
        for size in range(1, min(largest, total) + 1):
            with_it = best[: total + 1 - size] + cost[size]
            better = with_it < found[size:]
            found[size:][better] = with_it[better]
            chosen[layer, size:][better] = size
        best = found
    sizes, left = [], total
    for layer in reversed(range(n_layers)):
        sizes.append(int(chosen[layer, left]))
        left -= sizes[-1]
    return sizes[::-1]


def gating_threshold(sensitivity: float) -> float:
    """Return below which weight, of two that sum to 1, a token's second expert is left out.

    >>> gating_threshold(0.02)
    0.5
    """
    return sqrt(SENSITIVITY / sensitivity)


def leaves_second_out(first: float, second: float, threshold: float) -> bool:
    """Return whether a token's second weight, of two scaled to sum to 1, is below the threshold.

    >>> leaves_second_out(0.6, 0.2, 0.26), leaves_second_out(0.6, 0.2, 0.25)
    (True, False)
    """
    return second / (first + second) < threshold


TABLES = ("recall", "single", "sensitivity")


def _gates(policy: Any) -> bool:
    return policy.sensitivity is not None or (policy.released is not None and "sensitivity" in policy.released)


class AdapMoE(MixtralOffloadingSpec):
    """LRU caches of planned sizes, one prefetch, and fewer second experts (AdapMoE, 2024).

    Where decisions take time, a prefetch that arrives during the decision of its layer lets the layer begin at once.
    """

    paper = "AdapMoE (ICCAD 2024, arXiv:2408.10284)"
    missing: ClassVar[tuple[str, ...]] = (
        "sizes of models with more than two experts a token: they are computed as for two",
        "tables of accuracy, of single experts and of sensitivities by layer, unless they are given (released): one value each",
        "the paper's prefetches beyond the next layer, which the released code leaves out",
        "copies queue behind kernels on one CUDA stream in the released code; here they overlap",
    )
    n_ahead = 1
    writeback = False
    bits = None

    buffer_size: int = option(6, "Spare device buffers; one fewer loads may be under way.", ge=2)
    released: Annotated[Released | None, Tables(TABLES)] = option(
        None,
        "Tables with a number a layer, as in the released code: of the recall (``accs``), of single "
        "(``top1_ratios``), and of the sensitivity (``weight``) for gating; what is not among them is as the "
        "options say.",
    )
    recall: float = option(
        0.86, "How often a prediction is right in layers after the first, for the cache sizes (0.86 is published).", ge=0, le=1
    )
    single: float = option(0.0, "Share of tokens for which one expert is enough, for the cache sizes.", ge=0, le=1)
    sensitivity: float | None = option(
        None, "In decode of one token, the second expert is left out below a weight of sqrt(0.005 / this); None: never.", ge=0.005
    )

    @property
    def exact(self) -> bool:  # type: ignore[override]  # as asked for
        return not _gates(self)

    @property
    def needs(self) -> frozenset[str]:
        return super().needs | {"scores-or-weights"} if _gates(self) else super().needs

    def place(self, view: View) -> Placement:
        """Fill caches of the program's sizes with the highest ids."""
        if _gates(self) and view.model.top_k > 2:
            raise ConfigError(
                f"policy adapmoe: sensitivity: expected null for {view.model.name}, which has {view.model.top_k} experts a token "
                "and not one or two, got one; leave it out"
            )
        sensitivity = self._by_layer("sensitivity", view) if _gates(self) else []
        self._threshold = [gating_threshold(one) if one else inf for one in sensitivity]
        self._one_row = False
        self._held: Routed | None = None  # a layer that waits for its prefetch
        return super().place(view)

    def _sizes(self, view: View) -> list[int]:
        experts = view.model.n_experts
        layers = zip(self._by_layer("recall", view), self._by_layer("single", view), strict=True)
        loads = [[expected_loads(n, experts, recall, single) for n in range(experts + 1)] for recall, single in layers]
        return cache_sizes(loads, view.cache_slots(self._gpu))

    def _by_layer(self, name: str, view: View) -> list[float]:
        """Return a number a layer, of the table or the option; the first layer's recall is 0."""
        model = view.model
        if self.released is not None and name in self.released:
            most = 1e15 if name == "sensitivity" else 1.0
            found: list[float] = self.released.table(name, (model.n_layers,), f"policy adapmoe: {model.name}", most).tolist()
            return found
        first = 0.0 if name == "recall" else getattr(self, name)
        return [first] + [getattr(self, name)] * (model.n_layers - 1)

    def decide(self, event: Any, view: View) -> Iterable[Action]:
        """Answer, and serve a layer that has waited for its prefetch once that is there."""
        actions = super().decide(event, view)
        held = None if type(event) in (StepBegin, Routed) else self._held
        if held is None or any(not view.is_resident(held.layer, e, self._gpu) for e in self._ahead[held.layer]):
            return actions
        self._held = None
        return [*actions, *self._serve(held, view)]

    def on_step_begin(self, event: StepBegin, view: View) -> Iterable[Action]:
        self._one_row = event.phase == "decode" and len(event.requests) == 1
        return ()

    def on_routed(self, event: Routed, view: View) -> list[Action]:
        """Serve the layer, or wait for the guess."""
        coming = [e for e in self._ahead.get(event.layer, ()) if not view.is_resident(event.layer, e, self._gpu)]
        if not coming:
            return self._serve(event, view)
        self._held = event
        return [Fetch(event.layer, [e for e in coming if e in event.active], self._gpu, DEMAND, AHEAD)]

    def _serve(self, event: Routed, view: View) -> list[Action]:
        """Leave the second expert out where it hardly counts; else Mixtral-Offloading with a guess."""
        left_out = self._left_out(event)
        if left_out is None:
            return super().on_routed(event, view)
        kept = [e for e in event.active if e != left_out]
        return [Skip(event.layer, [left_out]), *super().on_routed(event._replace(active=kept), view)]

    def _left_out(self, event: Routed) -> int | None:
        if not self._threshold or not self._one_row or event.experts.shape[1] < 2:
            return None
        if event.weights is None:
            raise ConfigError(
                "policy adapmoe: sensitivity: expected a trace with gate weights, got one without; make some up with "
                "moesim trace calibrate --weights uniform, or leave it out"
            )
        first, second = (float(w) for w in event.weights[0])
        return int(event.experts[0, 1]) if leaves_second_out(first, second, self._threshold[event.layer]) else None

    def _plan(self, layer: int, active: Sequence[int]) -> SwapPlan:
        early = {expert for of, expert in self._used if of == layer}
        return mixtral_offloading_plan(self._order[layer], active, self.buffer_size, early)

    def _asks(self, event: Routed) -> bool:
        return self._one_row

    def on_predicted(self, event: Predicted, view: View) -> list[Action]:
        layer = event.layer
        if layer <= self._layer:
            return []
        ids = event.ids[0, : view.model.top_k].tolist()
        ahead = [e for e in ids if e not in self._order[layer] and not self._leaves((layer, e), view)][:1]
        self._ahead[layer] = ahead
        return [Fetch(layer, ahead, self._gpu, PREFETCH, AHEAD)]
