"""Fate: the next layer's gate predicts on the present state; ARC; fewer bits by weight.

"Fate: Fast Edge Inference of Mixture-of-Experts Models via Cross-Layer Gate", 2025, was not read; the code is a port to MindSpore
by the authors' university.

| point | paper says | released code does | we do |
|---|---|---|---|
| prediction | the next gate on the present gate input, on the CPU | on a side stream of the GPU, top k + 1 of each row | ``source``: that gate's recorded answer, k + 1 ids a row, of other sources k; before the experts or next to them (``lane``) |
| prefetch | not read | all predicted and not cached, by frequency | the same; each micro-batch on its own, those on their way count as there [choice] |
| widths of it | not read | 4 bits; the least frequent, up to 30 % of the count, 2 bits | the model's first two widths; of the count of what is copied [choice] |
| layer 0 | - | no prefetch | the same |
| a miss | - | copied at 2 bits | the same, ascending ids [choice]; what is on its way is awaited at its width [choice] |
| a hit | - | - | at the width that is there, for as long as it stays [choice] |
| cache | not read | ARC per layer; each row's picks are requested in order before compute; differs from ARC | the same (`FateArc` lists how) |
| what leaves | - | cleared unless active | dropped once routed, what is active as its layer ends |
| sizes | "shallow-favoring" | 4 layers whole if they fit, the others share the rest; else filled from the first | `shallow_favoring` |
| at the start | - | the lowest ids | the same, at full width, requested once each [choice] |
| wrong prefetches | - | dropped unless resident | dropped as their layer ends, with what still waits for the link [choice] |
| buffers | - | not known | two, of a layer's experts each [choice] |
| CPU | predicts | computes nothing | computes nothing |
| ``compression: false`` | - | - | all at full width, as other papers ran it; exact |
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import ClassVar

from moesim.errors import ConfigError
from moesim.policies.base import PolicyBase, deal_slots, gpu_of, slot_bytes
from moesim.policies.options import option
from moesim.policies.parts import source_needs
from moesim.policies.parts.adaptive import FateArc
from moesim.policies.parts.prefetch import Lane, Source, top_by_count
from moesim.policies.systems.pre_gated import BUFFERS
from moesim.policy import (
    CACHE,
    DEMAND,
    PREFETCH,
    Action,
    Copy,
    Drop,
    Fetch,
    LayerEnd,
    Move,
    Placement,
    Pool,
    Predict,
    Predicted,
    Routed,
    Run,
    StepBegin,
    View,
)  # fmt: skip


def shallow_favoring(
    n_slots: int, n_layers: int, n_experts: int, n_shallow: int = 4
) -> list[int]:  # fmt: skip
    """Keep the first layers whole, and deal the other cache slots out (port to MindSpore).

    Without slots for all of the first layers, they are filled one after another, and the rest have none.

    >>> shallow_favoring(45, 8, 8), shallow_favoring(19, 8, 8)
    ([8, 8, 8, 8, 3, 4, 3, 3], [8, 8, 3, 0, 0, 0, 0, 0])
    """
    n_shallow = min(n_shallow, n_layers)
    whole = n_shallow * n_experts
    if n_slots < whole:
        return [max(0, min(n_experts, n_slots - layer * n_experts)) for layer in range(n_layers)]
    deep = n_layers - n_shallow
    return [n_experts] * n_shallow + (deal_slots(n_slots - whole, deep, n_experts) if deep else [])


def by_frequency(counts: Sequence[int], low_share: float) -> tuple[list[int], list[int]]:
    """Split the experts to prefetch into those of the full and of the lower width.

    The least frequent, with at most ``low_share`` of all counts (0.3 in the port), get the lower. Most frequent first; of equals the
    lower id first, a choice.

    >>> by_frequency([5, 0, 1, 2, 2], 0.3)
    ([0, 3], [4, 2])
    """
    order = top_by_count(counts, len(counts))
    allowed = Fraction(str(low_share)) * sum(counts)  # as the decimal number says
    n_high, covered = len(order), 0
    while n_high and covered + counts[order[n_high - 1]] <= allowed:
        n_high -= 1
        covered += counts[order[n_high]]
    return order[:n_high], order[n_high:]


HIGH = None  # the full width, as the contract names it


class Fate(PolicyBase):
    """ARC for each layer, prefetch by the next layer's gate, misses at fewer bits (Fate, 2025)."""

    paper = "Fate (2025), as its port to MindSpore has it"
    missing: ClassVar[tuple[str, ...]] = (
        "its own paper was not read: each point is as the port has it",
        "prediction on the CPU, as in the paper: the device of the router predicts, as in the port",
        "shared experts after the routed ones: they run before",
        "what becomes of wrong prefetches that are issued already: not known; those that wait are given up as their layer ends",
        "the size of the buffers of what is not cached: not known; two, of a layer's experts each",
        "what bookkeeping and decompression of experts take: no time",
    )
    low_bits: ClassVar[tuple[float, ...]] = (8.0,)

    compression: bool = option(
        True,
        "Copy misses, and the least frequent of what is predicted, at the model's next lower width; false: all at the full one.",
    )
    low_share: float = option(
        0.3, "Share of the predicted count that is prefetched at the lower width, the least frequent experts.", ge=0, le=1
    )
    source: Source = option(
        "signal:gate_next1",
        "Prediction source. A recorded signal tells one expert a row more than the model uses, as far as it "
        "holds them; others do not.",
    )
    lane: Lane = option("main")
    shallow_layers: int = option(4, "First layers whose experts are all cached if they fit.", ge=0)

    @property
    def exact(self) -> bool:  # type: ignore[override]  # as written in a class, or as asked for
        return not self.compression

    @property
    def needs(self) -> frozenset[str]:
        return source_needs(self.source)

    def place(self, view: View) -> Placement:
        """Return the lowest ids of each layer in its cache, and two empty buffers."""
        model = view.model
        gpu = self._gpu = gpu_of(view, "fate")
        if self.compression and len(model.widths) < 2:
            raise ConfigError(
                f"policy fate: expected a model with experts at two widths, got one of {model.expert_bits:g} bits; "
                f"set model.expert_bits to two, such as [[{model.expert_bits:g}, {model.expert_bits / 2:g}]], "
                "or compression: false"
            )
        self._low = model.widths[1] if self.compression else HIGH
        n_ids = model.top_k + 1
        self._asked = f"{self.source}:top{n_ids}" if self.source.startswith("signal:") else self.source
        self._n_ids = n_ids
        slots = shallow_favoring(
            view.cache_slots(gpu), model.n_layers, model.n_experts, self.shallow_layers
        )  # fmt: skip
        self._arcs = [FateArc[int](n) if n else None for n in slots]
        self._layer = -1  # the latest that is routed
        self._active: set[int] = set()  # of the present layer, all micro-batches so far
        # Width of each expert that is on the GPU or on its way, of each layer; and those of them that are in the cache's pool.
        self._held: list[dict[int, float | None]] = [dict.fromkeys(range(n), HIGH) for n in slots]
        self._cached = [set(range(n)) for n in slots]
        for arc, n in zip(self._arcs, slots, strict=True):
            for expert in range(n):
                assert arc is not None
                arc.request(expert)
        n_bytes = slot_bytes(view)
        return Placement(
            copies=[Copy(layer, range(n), gpu) for layer, n in enumerate(slots) if n],
            pools=[
                Pool(gpu, CACHE, [n * n_bytes for n in slots], per_layer=True),
                *(Pool(gpu, buffer, model.n_experts * n_bytes) for buffer in BUFFERS),
            ],
        )

    def on_step_begin(self, event: StepBegin, view: View) -> Iterable[Action]:
        self._layer = -1
        return ()

    def on_routed(self, event: Routed, view: View) -> list[Action]:
        """Update the cache, copy misses, and run; ask about the next layer."""
        layer, gpu, low = event.layer, self._gpu, self._low
        self._layer = layer
        self._active.update(event.active)
        arc, held = self._arcs[layer], self._held[layer]
        if arc is not None:
            for expert in event.experts.ravel().tolist():  # row after row, by rank
                arc.request(expert)
        there = [e for e in event.active if e in held and view.is_resident(layer, e, gpu, held[e])]
        coming = [e for e in event.active if e in held and e not in there]
        missing = [e for e in event.active if e not in held]
        gone = [e for e in sorted(self._cached[layer]) if e not in self._active and not self._stays(layer, e)]
        actions = self._drops(layer, gone)
        held.update(dict.fromkeys(missing, low))
        actions += self._fetches(layer, coming, DEMAND)  # hastened
        actions += self._fetches(layer, missing, DEMAND)
        for some in (there, coming, missing):
            actions += [Run(layer, ids, gpu, bits=bits) for bits, ids in self._by_width(layer, some)]
        if event.mb == 0 and layer + 1 < view.model.n_layers:
            actions.append(Predict(event.step, layer + 1, self._asked, view.dense_device(layer), self.lane))
        return actions

    def on_predicted(self, event: Predicted, view: View) -> list[Action]:
        layer = event.layer
        if layer <= self._layer:  # it has been routed meanwhile
            return []
        held = self._held[layer]
        counts = [0] * view.model.n_experts
        for row in event.ids[:, : self._n_ids].tolist():
            for expert in row:
                counts[expert] += expert not in held
        high, low = by_frequency(counts, self.low_share if self.compression else 0)
        held.update(dict.fromkeys(high, HIGH))
        held.update(dict.fromkeys(low, self._low))
        return [fetch for some in (high, low) for fetch in self._fetches(layer, some, PREFETCH)]

    def on_layer_end(self, event: LayerEnd, view: View) -> list[Action]:
        """Drop what does not stay, then move into the cache what does."""
        layer = event.layer
        held, cached = self._held[layer], self._cached[layer]
        actions = self._drops(layer, [e for e in held if not self._stays(layer, e)])
        new = sorted(held.keys() - cached)
        cached.update(new)
        self._active = set()
        return actions + [Move(layer, ids, self._gpu, CACHE, bits) for bits, ids in self._by_width(layer, new)]

    def _stays(self, layer: int, expert: int) -> bool:
        arc = self._arcs[layer]
        return arc is not None and expert in arc

    def _drops(self, layer: int, experts: list[int]) -> list[Action]:
        actions: list[Action] = [Drop(layer, ids, self._gpu, bits) for bits, ids in self._by_width(layer, experts)]
        for expert in experts:
            del self._held[layer][expert]
        self._cached[layer].difference_update(experts)
        return actions

    def _fetches(self, layer: int, experts: list[int], urgency: int) -> list[Action]:
        pool = BUFFERS[layer % 2]
        return [Fetch(layer, ids, self._gpu, urgency, pool, bits=bits) for bits, ids in self._by_width(layer, experts)]

    def _by_width(self, layer: int, experts: list[int]) -> list[tuple[float | None, list[int]]]:
        """Group held experts by their width, the full one first."""
        held = self._held[layer]
        widths = (HIGH, self._low) if self.compression else (HIGH,)
        groups = ((bits, [e for e in experts if held[e] == bits]) for bits in widths)
        return [(bits, ids) for bits, ids in groups if ids]
