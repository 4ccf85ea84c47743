"""FreeToken: one LRU over all layers; misses go over the link, or are split with the CPU.

FlashML-org/FreeToken at 0ab982f109, python/freetoken/moe/ (offload_cache, offload_kernels, bench_profile, benchbw, cpu_offload).

| decision | code | ours |
|---|---|---|
| backend | ``auto``: ``hybrid`` if the CPU's kernel reads more than 2.0 times as fast as the link gathers, else ``offload`` | the same, from the profile's times of one row |
| slots | one pool over all layers, a number, a share, or what is left next to the KV cache; at least N | the granted slots; fewer than N are refused |
| stamps | the number of the call, for hits and fills alike | the same |
| who leaves | the smallest stamp, of equals the lowest slot; nobody of this call | the same |
| offload | all misses are gathered, then the GPU computes | the same |
| hybrid: how many | f = min(m, cap) of m misses; the cap is a number, or the f near m p with the smaller max(f (1 - p), (m - f) p), of equals the smaller; p: the link's share of both rates while both run | the same (``max_fetch``), p from the profile's times of one row and its contention |
| hybrid: which | active last in an earlier step, wherever they ran, of equals the lower id; or by id | the same (``fetch_order``) |
| hybrid: others | the CPU computes them meanwhile; they do not enter | the same |
| prompts | whole layers through a double buffer in the first 2N slots, whose experts are lost; the next layer's copies during this one's products | the same (``prefill_overlap``); with fewer than 2N slots, or without overlap, one buffer |
| prompts: cached experts | streamed with the others, or copied within the GPU | the same (``prefill_hit_d2d``) |
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from heapq import heappush
from typing import Literal

from moesim.errors import CapacityError
from moesim.policies.cpu_cache import BackgroundCache, Bank, InSequence, PastTheCache, both_rates, copies_by_share
from moesim.policies.options import option
from moesim.policies.parts import Unit
from moesim.policy import (
    CACHE,
    DEMAND,
    PREFETCH,
    Action,
    Drop,
    Fetch,
    Fetched,
    LayerEnd,
    Placement,
    Ran,
    Routed,
    Run,
    Send,
    Sent,
    StepBegin,
    View,
)

TAG = "again"


class LayerStream(PastTheCache):
    """Streams each layer of a prompt through a bank's first slots, whose experts are lost."""

    # One or two layers. A later slot's expert is computed there; it is sent with the others unless `copy_within`.

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
        """Empty the slots of the buffers."""
        bank = self._bank
        lost = [unit for unit, slot in bank.slot.items() if slot < self._n_buffers * self._n_experts]
        for unit in lost:
            heappush(bank.free, bank.leave(unit))
        return [Drop(layer, [expert], self._gpu) for layer, expert in lost]

    def serve(self, event: Routed, slotted: Container[Unit]) -> list[Action]:
        """Copy this layer and the next behind it; run what is routed once the layer is there."""
        layer = self._now = event.layer
        actions: list[Action] = []
        if event.mb == 0:
            actions += self._load(layer, DEMAND)
            if self._n_buffers > 1 and layer + 1 < len(self._bytes):
                actions += self._load(layer + 1, PREFETCH)
        self._routed.update(event.active)
        return [*actions, *self._go_on()]

    def _load(self, layer: int, urgency: int) -> list[Action]:
        """Copy a layer's experts that have no slot; what is on its way becomes more urgent."""
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
        self._awaited.pop(event.layer, None)
        streamed = self._streamed.pop(event.layer, None)
        return [Drop(event.layer, streamed, self._gpu)] if streamed else []


HYBRID_FACTOR = 2.0
"""By how much the CPU must read faster than the link copies."""


class FreeToken(BackgroundCache, fixed=True):
    """One LRU over all layers; misses over the link, or a share by rates (FreeToken)."""

    paper = "FreeToken (FlashML-org/FreeToken)"
    engine = "freetoken"
    missing = (
        "backends fused and cpu: all-gpu and all-cpu",
        "a machine without a profile of its rates, where one miss is fetched: set max_fetch to 1",
        "older profiles, whose rates were not measured together: the plain ones take their place",
        "at most 992 slots with one family of kernels",
        "copies within the GPU (prefill_hit_d2d) take no time",
    )
    copied_now = "all"
    scope = "global"
    hit_order = "equal"
    overlap = False
    _name = "freetoken"

    backend: Literal["auto", "offload", "hybrid"] = option(
        "auto", "The link takes all misses, or the CPU some; auto: by their rates (``--moe-backend``)."
    )
    max_fetch: int | None = option(
        None, "Misses of a layer that the link takes at most; None: by the rates (``--moe-hybrid-max-fetch``, -1).", ge=0
    )
    fetch_order: Literal["recent", "lowest-id"] = option(
        "recent", "Which misses the link takes: those used last, or those with the lowest ids."
    )
    prefill_overlap: bool = option(True, "Copy a prompt's next layer while this one is computed.")
    prefill_hit_d2d: bool = option(False, "Copy what is cached within the GPU, not over the link.")

    @property
    def listens(self) -> frozenset[type]:
        return frozenset({StepBegin, Routed, Fetched, Sent, Ran, LayerEnd})

    def place(self, view: View) -> Placement:
        placement = super().place(view)
        copy, cpu = max(self._copy_ns), self._cpu_ns[1]
        self._hybrid = copy > HYBRID_FACTOR * cpu if self.backend == "auto" else self.backend == "hybrid"
        rates = both_rates(view, self._cpu, self._gpu)
        link_share, cpu_share = rates.link * cpu, rates.cpu * copy  # of the bytes, times the time of both
        self._p = link_share / (link_share + cpu_share) if link_share else 0.0
        self._order = "recent" if self._hybrid and self.fetch_order == "recent" else "id"
        if self._hybrid:
            self._sequence = InSequence(self._gpu, self._cpu, cpu_beside=True)
        return placement

    def _prompts(self, view: View, slots: int) -> PastTheCache:
        model = view.model
        n = model.n_experts
        if slots < n:
            raise CapacityError(
                f"policy freetoken on {self._gpu}: expected at least {n} cache slots, as many as a layer has experts, got {slots}; "
                f"set cache.ratio to at least 1/{model.n_layers}"
            )
        self._stream = LayerStream(
            self._gpu, view.host, self._banks[0], [model.expert_bytes(layer) for layer in range(model.n_layers)], n,
            n_buffers=2 if self.prefill_overlap and slots >= 2 * n else 1, copy_within=self.prefill_hit_d2d,
        )  # fmt: skip
        return self._stream

    def on_step_begin(self, event: StepBegin, view: View) -> Iterable[Action]:
        lost = self._stream.clear() if event.phase == "prefill" else ()
        return [*lost, *super().on_step_begin(event, view)]

    def on_fetched(self, event: Fetched, view: View) -> Iterable[Action]:
        return [*self._stream.arrived(event), *super().on_fetched(event, view)]

    def on_sent(self, event: Sent, view: View) -> Iterable[Action]:
        return self._stream.arrived(event)

    def _n_now(self, layer: int, misses: Sequence[int], rows: Sequence[int]) -> int:
        if not self._hybrid:
            return len(misses)
        return copies_by_share(len(misses), self._p) if self.max_fetch is None else min(len(misses), self.max_fetch)
