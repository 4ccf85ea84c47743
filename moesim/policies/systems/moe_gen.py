"""MoE-Gen: experts stream in a fixed cycle through buffers, each run once for all rows.

EfficientMoE/MoE-Gen at f83b812f81; for offline work with large batches.

| point | paper says | released code does | we do |
|---|---|---|---|
| batch | - | all queries whose cache fits host memory | the workload's |
| micro-batches of attention | - | from a table: for Mixtral on 24 GB 200 rows of attention, 400 of the rest | the workload's ``micro_batches`` |
| experts in decode | - | the rows of the whole batch | the same |
| experts in prefill | - | a larger micro-batch than attention's, by the table | all micro-batches of the step |
| launch | - | at most 2048 tokens of an expert, awaited before the next | the same (``launch_tokens``) |
| experts on the link | - | a fixed cycle over layers and experts, each pass anew, routed or not; the next as one of 8 buffers is free | the same (``buffers``) |
| a buffer is free | - | once its expert has run; of one that nobody selected once a later one is asked for | the same |
| attention's weights | - | streamed in the same cycle, one buffer | one layer ahead with two buffers |
| KV cache | - | in host memory; one copy in turn with modules, 3 buffers | copied for each layer with attention's weights |
| attention while decoding | - | on the GPU; or on the CPU; or divided by a ratio | ``attention``: on the GPU, or the CPU reads the cache |
| order on the link | - | one thread: on-demand requests, one cache, then one module of each kind | attention's weights and caches that are awaited first, then in the order of asking |
| cache, CPU | - | no cache of experts, none on the CPU | the same |
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np

from moesim.policies.base import PolicyBase, cpu_of, gpu_of, slot_bytes
from moesim.policies.options import option
from moesim.policy import (
    KV,
    PREFETCH,
    Action,
    Drop,
    Fetch,
    Fetched,
    Placement,
    Pool,
    Ran,
    Routed,
    Run,
    StepBegin,
    View,
)  # fmt: skip

BUFFERS = "buffers"
"""The pool of streamed experts."""


class MoEGen(PolicyBase):
    """All experts stream in a cycle through buffers, each run once for all rows (MoE-Gen, 2025)."""

    paper = "MoE-Gen (EfficientMoE/MoE-Gen)"
    missing = (
        "sizes of batches by its tables: set batch_size and micro_batches in the workload",
        "a micro-batch of experts in prefill that is smaller than the step: set prefill_chunk in the workload",
        "attention divided between CPU and GPU by a ratio",
        "buffers of attention and of KV caches: they are counted for a whole layer",
        "shared experts, embedding, router, norms and head: they stay on the GPU",
        "on-demand requests: the cycle comes to each expert in its turn",
    )
    listens = frozenset({StepBegin, Routed, Fetched, Ran})

    buffers: int = option(8, "Experts that are on the GPU or on their way to it.", ge=1)
    launch_tokens: int = option(2048, "Most rows of an expert that are computed at once.", ge=1)
    attention: Literal["gpu", "cpu"] = option("gpu", "Who reads the KV cache while decoding.")

    def place(self, view: View) -> Placement:
        """Leave experts, attention's weights and the KV cache in host memory."""
        gpu, model = gpu_of(view, "moe-gen"), view.model
        self._gpu = gpu
        self._n_experts, n_units = model.n_experts, model.n_layers * model.n_experts
        self._n_units = n_units
        self._n_buffers = min(self.buffers, n_units)
        # Experts are numbered in the order of the cycle, pass after pass.
        self._following = 0  # the next to be copied
        self._held: dict[int, bool] = {}  # those that have a buffer: whether they are there
        self._pass = -1
        self._n_rows = 0
        self._routed: list[Routed] = []  # micro-batches of the present layer
        self._queue: list[int] = []  # experts of it that have not run
        self._running = 0  # Runs that are not over, all of one expert
        parts: dict[tuple[str, int], str] = {}
        streamed = {("attention", layer): view.host for layer in range(model.n_layers)}
        if self.attention == "cpu":
            cpu = cpu_of(view, "moe-gen")
            parts = {(KV, layer): cpu for layer in range(model.n_layers)}
        else:
            streamed |= {(KV, layer): view.host for layer in range(model.n_layers)}
        parts |= {("attention", layer): gpu for layer in range(model.n_layers)}
        pool = Pool(gpu, BUFFERS, self._n_buffers * slot_bytes(view))
        return Placement(pools=[pool], parts=parts, streamed=streamed, stream_depth=1)

    def decide(self, event: Any, view: View) -> Iterable[Action]:
        """Copy the next experts of the cycle; run a layer's in turn once all is routed."""
        kind = type(event)
        if kind is StepBegin:
            self._pass += 1
            self._n_rows = len(event.requests)
        elif kind is Routed:
            self._gather(event)
        elif kind is Fetched:
            self._arrived(event)
        else:
            self._running -= 1
            if not self._running:
                return [self._release(self._number(self._queue.pop(0))), *self._go_on()]
        return self._go_on()

    def _gather(self, event: Routed) -> None:
        """Take a micro-batch; with the last one the layer's experts may run."""
        self._routed.append(event)
        if sum(len(one.experts) for one in self._routed) == self._n_rows:
            self._queue = sorted({e for one in self._routed for e in one.active})
            self._layer = event.layer
            rows = [np.full(len(one.experts), one.first_row) + np.arange(len(one.experts)) for one in self._routed]
            self._rows = np.concatenate(rows)
            self._chosen = np.concatenate([one.experts for one in self._routed])
            self._routed = []

    def _arrived(self, event: Fetched) -> None:
        unit = event.layer * self._n_experts + event.expert
        number = next(n for n, there in self._held.items() if not there and n % self._n_units == unit)
        self._held[number] = True

    def _number(self, expert: int) -> int:
        return self._pass * self._n_units + self._layer * self._n_experts + expert

    def _go_on(self) -> list[Action]:
        actions: list[Action] = []
        asked = self._number(self._queue[0]) if self._queue else -1
        for number in [n for n, there in self._held.items() if there and n < asked]:
            actions.append(self._release(number))
        while len(self._held) < self._n_buffers:
            layer, expert = divmod(self._following % self._n_units, self._n_experts)
            actions.append(Fetch(layer, (expert,), self._gpu, PREFETCH, BUFFERS))
            self._held[self._following] = False
            self._following += 1
        if self._queue and not self._running and self._held.get(asked, False):
            runs = self._runs(self._queue[0])
            self._running = len(runs)
            actions += runs
        return actions

    def _release(self, number: int) -> Drop:
        del self._held[number]
        layer, expert = divmod(number % self._n_units, self._n_experts)
        return Drop(layer, (expert,), self._gpu)

    def _runs(self, expert: int) -> Sequence[Run]:
        rows = self._rows[(self._chosen == expert).any(axis=1)].tolist()
        size = self.launch_tokens
        return [Run(self._layer, (expert,), self._gpu, rows[at : at + size]) for at in range(0, len(rows), size)]
