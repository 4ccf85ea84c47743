"""Pre-gated MoE: the gate of one layer selects the experts of the next, which are copied while this layer computes.

R. Hwang, J. Wei, S. Cao, C. Hwang, X. Tang, T. Cao, M. Yang, "Pre-gated MoE: An Algorithm-System Co-Design for Fast and Scalable
Mixture-of-Expert Inference", ISCA 2024 (arXiv:2308.12066); the artifact's code.

Idea: a model is fine-tuned so that each gate looks one layer ahead. Then nothing has to be guessed: what is copied ahead is used.

| point | paper says | released code does | we do |
|---|---|---|---|
| selection | the gate of layer l selects the experts of layer l + 1 | the same | ``source: oracle``: the recorded routing of l + 1, once l is routed; a recorded signal guesses instead |
| order in a layer | copy the next layer's experts while this one computes | wait for this layer's copies, swap the two buffers, begin the next layer's, compute | the same; an expert runs once all of its layer are there |
| first layer | on demand | on demand, then it copies the second layer's | the same |
| last layer | copies nothing ahead | the same | the same |
| copies | - | one thread, ascending ids, each expert once | the same |
| buffers | two, of the activated experts | two | two, of a layer's experts each |
| wrong guesses | none, by training | none | copied on demand; what nobody asks for is dropped as its layer ends |
| cache | optional | one arena for all layers, LFU, LRU or LIFO; off | none |
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from moesim.policies.base import PolicyBase, gpu_of, layer_residents, slot_bytes
from moesim.policies.declare import option_of
from moesim.policies.parts import source_needs
from moesim.policies.prefetching import Lane, TopPredicted
from moesim.policy import (
    DEMAND,
    PREFETCH,
    Action,
    Drop,
    Fetch,
    Fetched,
    LayerEnd,
    Placement,
    Pool,
    Predict,
    Predicted,
    Routed,
    Run,
    View,
)  # fmt: skip

BUFFERS = ("even", "odd")
"""Pools of the experts of layers with even and with odd numbers."""


class PreGated(PolicyBase):
    """No cache: the next layer's experts, known one layer ahead, are copied while this layer computes (Pre-gated MoE, 2024)."""

    paper = "Pre-gated MoE (ISCA 2024, arXiv:2308.12066)"
    missing = (
        "the model that is fine-tuned so that a gate selects the next layer's experts: the recorded routing stands in, an oracle",
        "the optional cache of experts, off in the released code",
    )
    listens = frozenset({Routed, Predicted, Fetched, LayerEnd})

    source: str = option_of(TopPredicted, default="oracle")
    """Who says what the next layer is routed to; ``oracle`` for a model that is trained to know."""
    lane: Lane = option_of(TopPredicted)

    @property
    def needs(self) -> frozenset[str]:
        """What the source needs."""
        return source_needs(self.source)

    def place(self, view: View) -> Placement:
        """Return the two buffers, empty."""
        self._gpu = gpu_of(view, "pre-gated")
        self._awaited: set[int] = set()  # experts of the present layer that are not there
        self._held: set[int] = set()  # those that run once all are
        self._ahead: dict[int, set[int]] = {}  # layer -> what was fetched before it was routed
        size = view.model.n_experts * slot_bytes(view)
        return Placement(pools=[Pool(self._gpu, buffer, size) for buffer in BUFFERS])

    def decide(self, event: Any, view: View) -> Iterable[Action]:
        """Run what is there, and copy what the next layer will want."""
        if type(event) is Routed:
            return self._routed(event, view)
        if type(event) is Predicted:
            return self._predicted(event, view)
        if type(event) is Fetched:
            return self._arrived(event)
        return self._layer_end(event.layer, view)

    def _routed(self, event: Routed, view: View) -> list[Action]:
        layer, gpu = event.layer, self._gpu
        self._layer = layer
        absent = [e for e in event.active if not view.is_resident(layer, e, gpu)]
        self._awaited.update(absent)
        self._held.update(event.active)
        actions: list[Action] = [Fetch(layer, absent, gpu, DEMAND, BUFFERS[layer % 2]), *self._run()]
        if event.mb == 0 and layer + 1 < view.model.n_layers:
            actions.append(Predict(event.step, layer + 1, self.source, view.dense_device(layer), self.lane))
        return actions

    def _predicted(self, event: Predicted, view: View) -> list[Action]:
        layer, top_k = event.layer, view.model.top_k
        if layer <= self._layer:  # it has been routed meanwhile
            return []
        ahead = self._ahead.setdefault(layer, set())
        new = sorted(set(event.ids[:, :top_k].ravel().tolist()) - ahead)
        ahead.update(new)
        return [Fetch(layer, new, self._gpu, PREFETCH, BUFFERS[layer % 2])]

    def _arrived(self, event: Fetched) -> list[Action]:
        if event.layer != self._layer:
            return []
        self._awaited.discard(event.expert)
        return self._run()

    def _run(self) -> list[Action]:
        if self._awaited or not self._held:
            return []
        held, self._held = sorted(self._held), set()
        return [Run(self._layer, held, self._gpu)]

    def _layer_end(self, layer: int, view: View) -> list[Action]:
        ahead = self._ahead.pop(layer, set())
        gone = layer_residents(view, self._gpu, BUFFERS[layer % 2], layer)
        gone += sorted(e for e in ahead if view.is_pending(layer, e, self._gpu))
        return [Drop(layer, gone, self._gpu)]

    def evict(self, fetch: Fetch, view: View) -> tuple[int, int] | None:
        """Wait for the end of the layer before the last: a buffer holds all experts of one."""
        return None
