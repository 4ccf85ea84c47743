"""Prompts for which whole layers are streamed through buffers in a cache's own slots, whatever their routers choose."""

from __future__ import annotations

from collections.abc import Container, Sequence
from heapq import heappush

from moesim.policies.bank import Bank
from moesim.policies.parts import Unit
from moesim.policies.past_the_cache import PastTheCache
from moesim.policy import CACHE, DEMAND, PREFETCH, Action, Drop, Fetch, Fetched, LayerEnd, Routed, Run, Send, Sent, View

TAG = "again"


class LayerStream(PastTheCache):
    """Streams each layer of a prompt through the first slots of a bank, of one or two layers; their experts are lost.

    What a later slot holds stays there, and is computed from there; it is sent with the others unless ``copy_within``.
    """

    def __init__(self, gpu: str, host: str, bank: Bank, expert_bytes: Sequence[int], n_experts: int, *, n_buffers: int,
                 copy_within: bool) -> None:  # fmt: skip
        super().__init__("bypass", None, gpu, "")
        self._host = host
        self._bank = bank
        self._bytes = expert_bytes
        self._n_experts = n_experts
        self._n_buffers = n_buffers
        self._copy_within = copy_within
        self._now = -1
        self._streamed: dict[int, list[int]] = {}  # by layer that is in a buffer or on its way
        self._awaited: dict[int, set[int | str]] = {}
        self._routed: set[int] = set()  # experts of this layer that wait

    def clear(self) -> list[Action]:
        """Empty the slots of the buffers, before a step whose layers are streamed."""
        bank = self._bank
        lost = [unit for unit, slot in bank.slot.items() if slot < self._n_buffers * self._n_experts]
        for unit in lost:
            heappush(bank.free, bank.leave(unit))
        return [Drop(layer, [expert], self._gpu) for layer, expert in lost]

    def serve(self, event: Routed, slotted: Container[Unit]) -> list[Action]:
        """Copy this layer with its first micro-batch, and the next one behind it; run what is routed once the layer is there."""
        layer = self._now = event.layer
        actions: list[Action] = []
        if event.mb == 0:
            actions += self._load(layer, DEMAND)
            if self._n_buffers > 1 and layer + 1 < len(self._bytes):
                actions += self._load(layer + 1, PREFETCH)
        self._routed.update(event.active)
        return [*actions, *self._go_on()]

    def _load(self, layer: int, urgency: int) -> list[Action]:
        """Copy all experts of a layer that have no slot; what is on its way becomes more urgent."""
        if layer in self._streamed:
            return [Fetch(layer, sorted(e for e in self._awaited[layer] if isinstance(e, int)), self._gpu, urgency, CACHE)]
        absent = self._streamed[layer] = [e for e in range(self._n_experts) if (layer, e) not in self._bank.slot]
        self._awaited[layer] = {*absent}
        again = self._n_experts - len(absent)
        if not again or self._copy_within:
            return [Fetch(layer, absent, self._gpu, urgency, CACHE)]
        tag = f"{TAG}{layer}"  # the engine knows one copy a device, so that the bytes of a second one are a message
        self._awaited[layer].add(tag)
        return [Fetch(layer, absent, self._gpu, urgency, CACHE), Send(again * self._bytes[layer], self._host, self._gpu, tag)]

    def arrived(self, event: Fetched | Sent) -> list[Action]:
        """Note an arrival; return what may run."""
        layer = event.layer if isinstance(event, Fetched) else int(event.tag.removeprefix(TAG))
        if layer in self._awaited:
            self._awaited[layer].discard(event.expert if isinstance(event, Fetched) else event.tag)
        return self._go_on()

    def _go_on(self) -> list[Action]:
        if self._awaited.get(self._now) or not self._routed:
            return []
        experts = sorted(self._routed)
        self._routed.clear()
        return [Run(self._now, experts, self._gpu)]

    def layer_end(self, event: LayerEnd, view: View) -> list[Action]:
        """Give the layer's buffer up."""
        self._awaited.pop(event.layer, None)
        streamed = self._streamed.pop(event.layer, None)
        return [Drop(event.layer, streamed, self._gpu)] if streamed else []
