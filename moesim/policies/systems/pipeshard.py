"""Pipelined Sharding: whole layers of experts are pinned, streamed one ahead, or the CPU's, by a plan for each batch size.

deepshnv/pipeshard-mlsys26-ae at 7794a3f024 (``src/llama-plan-builder.cpp``, ``llama-pipeline-executor.cpp``,
``llama-pipeline.h``), a fork of llama.cpp and the artifact of an MLSys 2026 paper, which was not read.

Idea: what is best pinned, streamed or left to the CPU depends on the number of rows, and a profile tells.

| point | paper says | released code does | we do |
|---|---|---|---|
| token embedding | - | on the CPU, as of llama.cpp | the same |
| shards | - | attention, FFN with all its experts, output layer | FFNs; attention and output stay on the GPU |
| plans | - | five strategies, each as much pinned as fits; the one with the least predicted time | the same (`shard_plan`), with attention that takes no memory and no output layer |
| batch sizes | - | plans for 1, with several sequences 4, 16, 64, and 512, 1024 ...; the least that holds the rows | the same (`tier_of`), with at most the rows of the largest step |
| profile | - | a table of operators, measured and interpolated | the engine's costs, rows spread evenly over the experts |
| memory | - | a limit of GPU memory (``-mva``); 1.5 times the scratch stays free | the granted cache slots |
| run | - | at the begin of each split the next streamed one is copied, all its experts, whatever is routed; a split begins once it is there | the same: attention is a split, and so is an FFN |
| buffers | - | one, or two if all is streamed | the same: with one, a copy waits for the end of the layer before |
| other batch size | - | the common prefix of what is pinned stays, the rest is copied or given up | the same, at the begin of the step |
| at the start | - | what a plan pins is loaded | the plan for the largest step |
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from moesim.policies.algorithms.pipeshard import Shard, State, shard_plan, tier_of
from moesim.policies.base import CACHE, PolicyBase, cpu_of, gpu_of, slot_bytes
from moesim.policy import (
    DEMAND,
    PREFETCH,
    Action,
    Copy,
    Drop,
    Fetch,
    Fetched,
    LayerBegin,
    LayerEnd,
    Placement,
    Pool,
    Routed,
    Run,
    StepBegin,
    View,
)  # fmt: skip


class Tier(NamedTuple):
    """What a plan says about FFNs: the first layers are pinned, all others are treated alike."""

    pinned: int
    others: State
    slots: int  # layers that the buffers of streamed ones hold


class PipeShard(PolicyBase):
    """Whole layers of experts pinned, streamed or on the CPU, planned for each batch size (Pipelined Sharding, 2026)."""

    paper = "Pipelined Sharding (artifact of MLSys 2026, deepshnv/pipeshard-mlsys26-ae)"
    missing = (
        "attention and output layer on the CPU or streamed, and their KV cache: cache slots are granted beside them",
        "pinned host memory as a limit (-psa): all of it is pinned, or as the experiment's curve says",
        "a CPU slowed down by copies in the prediction: with attention on the GPU no plan has both",
        "the paper, which was not read",
    )
    listens = frozenset({StepBegin, LayerBegin, Routed, Fetched, LayerEnd})

    def place(self, view: View) -> Placement:
        """Pin what the plan for the largest step pins."""
        gpu, self._cpu = gpu_of(view, "pipeshard"), cpu_of(view, "pipeshard")
        self._gpu, model = gpu, view.model
        self._budget = min(view.cache_slots(gpu), model.n_layers * model.n_experts) * slot_bytes(view)
        self._tiers: dict[int, Tier] = {}
        self._everyone = range(model.n_experts)
        self._now = self._tier(tier_of(view.max_tokens, False), view)
        self._layer = -1
        self._awaited: set[int] = set()  # experts of the present layer that are not there
        self._held: set[int] = set()  # its routed experts, which run once all are
        copies = [Copy(layer, tuple(self._everyone), gpu) for layer in range(self._now.pinned)]
        return Placement(copies, [Pool(gpu, CACHE, self._budget)], {("embedding", -1): self._cpu})

    def _tier(self, tier: int, view: View) -> Tier:
        if tier not in self._tiers:
            rows = min(tier, view.max_tokens)
            shards = self._shards(rows, view)
            rate = view.model.expert_bytes(0) / view.costs.fetch_ns(view.host, self._gpu, None, 0)  # bytes/ns
            plan = shard_plan(shards, self._budget, rate)
            ffns = [state for shard, state in zip(shards, plan.states, strict=True) if shard.kind == "ffn"]
            self._tiers[tier] = Tier(sum(state == "pinned" for state in ffns), ffns[-1], plan.slots)
        return self._tiers[tier]

    def _shards(self, rows: int, view: View) -> list[Shard]:
        """Cost the shards of a pass: attention, which takes no memory, and FFNs."""
        costs, model, gpu, cpu = view.costs, view.model, self._gpu, self._cpu
        n_active = min(model.n_experts, rows * model.top_k)
        each = -(-rows * model.top_k // n_active)
        on_gpu, on_cpu = (costs.first_extra_ns(name) + n_active * costs.expert_ns(name, each) for name in (gpu, cpu))
        dense = costs.attention_ns(gpu, rows, 0) + costs.dense_ns(gpu, rows)
        found = []
        for layer in range(model.n_layers):
            found.append(Shard("attention", 0, dense, dense))
            found.append(Shard("ffn", model.n_experts * model.expert_bytes(layer), on_gpu, on_cpu))
        return found

    def decide(self, event: Any, view: View) -> Iterable[Action]:
        """Change the plan with the batch size; copy the next streamed layer; run a layer once it is there."""
        kind = type(event)
        if kind is Routed:
            return self._routed(event, view)
        if kind is LayerBegin:
            return self._ahead(event.layer, PREFETCH, view)
        if kind is StepBegin:
            return self._step_begin(event, view)
        if kind is LayerEnd:
            return [Drop(event.layer, self._everyone, self._gpu)] if self._is_streamed(event.layer) else ()
        if event.layer == self._layer:
            self._awaited.discard(event.expert)
        return self._run()

    def _step_begin(self, event: StepBegin, view: View) -> list[Action]:
        requests = event.requests
        before, self._now = self._now, self._tier(tier_of(len(requests), len(set(requests.tolist())) > 1), view)
        leaving, coming = range(self._now.pinned, before.pinned), range(before.pinned, self._now.pinned)
        return [
            *(Drop(layer, self._everyone, self._gpu) for layer in leaving),
            *(Fetch(layer, self._everyone, self._gpu, DEMAND, CACHE) for layer in coming),
        ]

    def _is_streamed(self, layer: int) -> bool:
        return layer >= self._now.pinned and self._now.others == "streamed"

    def _ahead(self, first: int, urgency: int, view: View) -> list[Action]:
        """Copy the next layer that is streamed, from some layer on."""
        layer = max(first, self._now.pinned)
        if layer >= view.model.n_layers or not self._is_streamed(layer):
            return []
        return [Fetch(layer, self._everyone, self._gpu, urgency, CACHE)]

    def _routed(self, event: Routed, view: View) -> list[Action]:
        layer = event.layer
        if layer >= self._now.pinned and self._now.others == "cpu":
            return [Run(layer, event.active, self._cpu)]
        self._layer = layer
        self._held.update(event.active)
        self._awaited = {e for e in self._everyone if not view.is_resident(layer, e, self._gpu)}
        if not self._is_streamed(layer):
            return [*self._ahead(layer, PREFETCH, view), *self._run()]
        following = self._ahead(layer + 1, PREFETCH, view) if self._now.slots > 1 else []  # else there is no free buffer
        return [*self._ahead(layer, DEMAND, view), *following, *self._run()]

    def _run(self) -> list[Action]:
        if self._awaited or not self._held:
            return []
        held, self._held = sorted(self._held), set()
        return [Run(self._layer, held, self._gpu)]

    def evict(self, fetch: Fetch, view: View) -> tuple[int, int] | None:
        """Wait for the end of a layer that is streamed."""
        return None
