"""Mixtral-Offloading: an LRU cache per layer, in which every miss swaps two experts.

A. Eliseev, D. Mazur, "Fast Inference of Mixture-of-Experts Language Models with Offloading", arXiv:2312.17238, 2023;
code: dvmazur/mixtral-offloading.

Idea: an expert lives in one place only: a miss copies the newcomer in and the victim out, through a few spare device buffers.

| point | paper says | released code does | we do |
|---|---|---|---|
| cache | LRU, the same number per layer | the same; initially the highest ids | the same; a remainder of slots is dealt out, ``slots_split: equal``: unused |
| when used | - | all active experts are marked before the first load; each load evicts the LRU head at once | the same |
| experts of the present layer as victims | - | only if the layer has more misses than other residents | the same |
| order | - | residents first, then misses, both by ascending id | the same |
| write-back | - | the victim is copied to the host while the newcomer arrives | ``writeback=True``, on its own link |
| buffers | 4 | 4 for all layers, so 3 loads under way; the next starts when a loaded one is taken | the same; taken means arrived |
| speculative loading | next layer's gate on the present hidden state, 1-2 experts | not in the repository | ``mixtral-offloading-spec`` |
| copies | asynchronous | both directions share the compute stream | each direction is its own link, parallel to compute |
| bits | 2 and 3 bit experts | HQQ 2-bit experts, 4-bit attention | the model says |
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Sequence
from typing import ClassVar, NamedTuple

from moesim.policies.base import CACHE, PolicyBase, SlotsSplit, gpu_of, slots_per_layer
from moesim.policies.options import option
from moesim.policies.parts import Unit
from moesim.policy import (
    DEMAND,
    UPDATE,
    Action,
    Copy,
    Drop,
    Fetch,
    Fetched,
    Move,
    Placement,
    Pool,
    Ran,
    Routed,
    Run,
    View,
)

BUFFER = "buffer"


class SwapPlan(NamedTuple):
    """Swaps of Mixtral-Offloading in one layer visit."""

    compute: tuple[int, ...]  # active experts in execution order
    order: tuple[int, ...]  # residents afterwards, least recently used first
    swaps: tuple[tuple[int, int], ...]  # (victim, newcomer) in the order in which they start
    window: int  # swaps that may be under way at a time


def mixtral_offloading_plan(
    order: Sequence[int], active: Sequence[int], buffer_size: int, prefetched: Container[int] = ()
) -> SwapPlan:
    """Plan a layer visit; ``order`` lists residents, least recently used first.

    Active residents are marked before the first load; one of them leaves only where others do not suffice, and then still computes.
    ``prefetched`` misses take their places first, as in AdapMoE's code. One fewer loads than ``buffer_size`` may be under way.

    >>> mixtral_offloading_plan([4, 5, 6, 7], [0, 1, 4, 5, 6, 7], buffer_size=4)
    SwapPlan(compute=(4, 5, 6, 7, 0, 1), order=(6, 7, 0, 1), swaps=((4, 0), (5, 1)), window=2)
    """
    resident = set(order)
    hits = [expert for expert in active if expert in resident]
    misses = [expert for expert in active if expert not in resident]
    misses.sort(key=lambda expert: expert not in prefetched)
    if misses and not order:
        raise ValueError(
            f"mixtral_offloading_plan: expected a resident that can be swapped for expert {misses[0]}, got an empty cache"
        )
    used = set(hits)
    queue = [expert for expert in order if expert not in used] + hits
    swaps = []
    for newcomer in misses:
        swaps.append((queue.pop(0), newcomer))
        queue.append(newcomer)
    window = min(buffer_size - 1, len(order), len(misses))
    return SwapPlan((*hits, *misses), tuple(queue), tuple(swaps), window)


class MixtralOffloading(PolicyBase):
    """LRU cache per layer; every miss copies an expert in and its victim out (2023)."""

    paper = "Mixtral-Offloading (arXiv:2312.17238)"
    missing: ClassVar[tuple[str, ...]] = (
        "speculative loading (in the report, absent from the released code): mixtral-offloading-spec has it",
        "copies in both directions queue behind kernels on one CUDA stream in the released code; here they overlap",
    )
    _bits: float | None = None  # the width of all copies; None: the full one

    buffer_size: int = option(4, "Spare device buffers; one fewer swaps may be under way.", ge=2)
    writeback: bool = option(
        True, "Copy each victim back to the host. False keeps a host copy of everything, so that eviction is free."
    )
    slots_split: SlotsSplit = option(
        "spread",
        "What becomes of slots beyond an equal share of each layer: dealt out to some layers, or, as in the code, unused.",
    )

    def place(self, view: View) -> Placement:
        """Put the highest ids of each layer into its cache."""
        self._gpu = gpu_of(view, "mixtral-offloading")
        self._host = view.host
        n_bytes = max(view.model.expert_bytes(layer, self._bits) for layer in range(view.model.n_layers))
        experts = view.model.n_experts
        slots = self._sizes(view)
        self._order = [tuple(range(experts - n, experts)) for n in slots]  # least recently used first; includes the planned
        self._waiting: deque[tuple[int, int, int]] = deque()  # (layer, victim, newcomer): swaps not started
        self._loading: set[tuple[int, int]] = set()  # (layer, newcomer) on their way
        self._leaving: list[tuple[int, int]] = []  # (layer, victim) still in a buffer
        self._owed: set[tuple[int, int]] = set()  # newcomers whose Run is returned when their swap starts
        pools = [
            Pool(self._gpu, CACHE, [n * n_bytes for n in slots], per_layer=True),
            Pool(self._gpu, BUFFER, self.buffer_size * n_bytes),
        ]
        copies = [Copy(layer, first, self._gpu, bits=self._bits) for layer, first in enumerate(self._order)]
        return Placement(copies=copies, pools=pools)

    def _sizes(self, view: View) -> list[int]:
        return slots_per_layer(view, self._gpu, "mixtral-offloading", split=self.slots_split)

    def on_routed(self, event: Routed, view: View) -> list[Action]:
        """Plan the layer; run what is there, and start its swaps."""
        layer = event.layer
        plan = self._plan(layer, event.active)
        self._order[layer] = plan.order
        self._waiting.extend((layer, victim, newcomer) for victim, newcomer in plan.swaps)
        later = {newcomer for of_layer, _, newcomer in self._waiting if of_layer == layer}
        self._owed.update((layer, expert) for expert in plan.compute if expert in later)
        now = [expert for expert in plan.compute if expert not in later]
        run_now: list[Action] = [Run(layer, now, self._gpu, bits=self._bits)] if now else []
        return run_now + self._start_swaps(view)

    def on_fetched(self, event: Fetched, view: View) -> list[Action]:
        if event.device == self._gpu:
            self._loading.discard((event.layer, event.expert))
        return self._start_swaps(view)

    def on_ran(self, event: Ran, view: View) -> list[Action]:
        return self._start_swaps(view)

    def _plan(self, layer: int, active: Sequence[int]) -> SwapPlan:
        return mixtral_offloading_plan(self._order[layer], active, self.buffer_size)

    def _start_swaps(self, view: View) -> list[Action]:
        """Start as many swaps as the window and the free buffers allow."""
        # With several micro-batches an expert may be planned to load twice in one layer; the second may be left over.
        actions: list[Action] = []
        gpu = self._gpu
        while self._waiting:
            layer, victim, newcomer = self._waiting[0]
            if len(self._loading) >= min(self.buffer_size - 1, len(self._order[layer])):
                break
            # Not the pool's free bytes: with a decision time, victims named before are not moved yet.
            self._leaving = [unit for unit in self._leaving if view.is_resident(*unit, gpu, self._bits)]
            if len(self._leaving) == self.buffer_size:
                break
            # With several micro-batches a newcomer may still be leaving, or a victim still be arriving.
            if self._blocked((layer, newcomer), view) or not view.is_resident(layer, victim, gpu, self._bits):
                break
            self._waiting.popleft()
            self._leaving.append((layer, victim))
            actions += self._swap(layer, victim, newcomer, view)
        return actions

    def _blocked(self, unit: Unit, view: View) -> bool:
        """Whether a newcomer cannot come in yet."""
        return view.is_resident(*unit, self._gpu, self._bits)

    def _bring(self, unit: Unit, view: View) -> Action:
        self._loading.add(unit)
        return Fetch(unit[0], (unit[1],), self._gpu, DEMAND, CACHE, bits=self._bits)

    def _swap(self, layer: int, victim: int, newcomer: int, view: View) -> list[Action]:
        gpu = self._gpu
        actions: list[Action] = [Move(layer, (victim,), gpu, BUFFER, self._bits)]
        if self.writeback:
            actions.append(Fetch(layer, (victim,), self._host, UPDATE, source=gpu, bits=self._bits))
        actions.append(Drop(layer, (victim,), gpu, self._bits))
        actions.append(self._bring((layer, newcomer), view))
        if (layer, newcomer) in self._owed:
            self._owed.discard((layer, newcomer))
            actions.append(Run(layer, (newcomer,), gpu, bits=self._bits))
        return actions
