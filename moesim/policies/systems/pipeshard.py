"""Pipelined Sharding: layers pinned, streamed or on the CPU, planned for each batch size.

deepshnv/pipeshard-mlsys26-ae at 7794a3f024 (``src/llama-plan-builder.cpp``, ``llama-pipeline-executor.cpp``,
``llama-pipeline.h``), a fork of llama.cpp and the artifact of an MLSys 2026 paper, which was not read.

| point | paper says | released code does | we do |
|---|---|---|---|
| token embedding | - | on the CPU, as of llama.cpp | the same |
| shards | - | attention, FFN with all its experts, output layer | FFNs; attention and output stay on the GPU |
| plans | - | five strategies, each with as much pinned as fits; the least predicted time | the same (`shard_plan`), attention takes no memory, no output layer |
| batch sizes | - | plans for 1, with several sequences 4, 16, 64, and 512, 1024 ...; the least that holds the rows | the same (`tier_of`), at most the rows of the largest step |
| profile | - | a measured table of operators, interpolated | the engine's costs, rows spread evenly over the experts |
| memory | - | a limit (``-mva``); 1.5 times the scratch stays free | the granted cache slots |
| run | - | as each split begins the next streamed one is copied, all its experts; a split begins once it is there | the same: attention is a split, and so is an FFN |
| buffers | - | one, or two if all is streamed | the same: with one, a copy waits for the end of the layer before |
| other batch size | - | the common prefix of what is pinned stays, the rest is copied or given up | the same, at the begin of the step |
| at the start | - | what a plan pins is loaded | the plan for the largest step |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

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

State = Literal["pinned", "streamed", "cpu"]

SCRATCH = 1.5
"""Times the buffer of a pass that are left free."""
PARALLEL_TIERS = (4, 16, 64)


class Shard(NamedTuple):
    """A part of a layer, or the output layer, in the order of execution."""

    kind: Literal["attention", "ffn", "output"]
    n_bytes: int  # of weights; of an FFN those of all experts
    # gpu, cpu: time of one pass on either, any unit
    gpu: float
    cpu: float
    kv_bytes: int = 0  # of the cache that it reads
    new_kv_bytes: int = 0  # what a pass adds to it


class ShardPlan(NamedTuple):
    """States of all shards."""

    strategy: str
    states: tuple[State, ...]
    slots: int  # buffers that shards are streamed to
    time: float  # predicted, of one pass


def tier_of(rows: int, parallel: bool) -> int:
    """Return the batch size that a pass is planned for: the least tier that holds it.

    Tiers are 1, with several sequences also 4, 16 and 64, and 512, 1024, 2048 ... for prompts.

    >>> [tier_of(rows, True) for rows in (1, 2, 5, 65, 513)], tier_of(5, False)
    ([1, 4, 16, 512, 1024], 512)
    """
    if rows <= 1:
        return 1
    fit = next((tier for tier in PARALLEL_TIERS if parallel and rows <= tier), 0)
    return fit or max(512, 1 << (rows - 1).bit_length())


def predicted_time(shards: Sequence[Shard], states: Sequence[State], bytes_per_time: float, cpu_rate: float = 1.0) -> float:
    """Predict the time of a pass through shards in order of execution, in their unit of time.

    The sum over splits of the longer of computing and of copying the next streamed split with its cache, and of the time in which what
    is added to streamed caches comes back. A split is a streamed shard, or a run of shards that are pinned or on the CPU. A copy begins
    with the streamed split before, or with the first; that of the first split itself hides behind nothing. ``cpu_rate``: share of its
    speed that the CPU keeps during copies.

    One shard of 6 ms on the CPU and two of 1 ms and 300 MB that are streamed at 25 GB/s; bytes per ms:

    >>> streamed = Shard("ffn", 300_000_000, 1, 9)
    >>> predicted_time([Shard("ffn", 0, 1, 6), streamed, streamed], ["cpu", "streamed", "streamed"], 25e6)
    25.0
    """
    splits: list[tuple[State, float, float]] = []  # state, computing, copying
    download = 0.0
    for shard, state in zip(shards, states, strict=True):
        time = shard.cpu if state == "cpu" else shard.gpu
        if state == "streamed":
            splits.append((state, time, (shard.n_bytes + shard.kv_bytes) / bytes_per_time))
            download += shard.new_kv_bytes / bytes_per_time
        elif splits and splits[-1][0] == state:
            splits[-1] = (state, splits[-1][1] + time, 0.0)
        else:
            splits.append((state, time, 0.0))
    total = splits[0][2] if splits else 0.0
    for i, (state, time, _) in enumerate(splits):
        begins = i == 0 or state == "streamed"
        copy = next((copying for later, _, copying in splits[i + 1 :] if later == "streamed"), 0.0) if begins else 0.0
        total += max(time / cpu_rate if state == "cpu" and copy else time, copy)
    return total + download


def shard_plan(
    shards: Sequence[Shard], budget: int, bytes_per_time: float, *, scratch: int = 0, cpu_rate: float = 1.0
) -> ShardPlan:
    """Choose the plan with the least predicted time of five strategies' best; ties: the first.

    Shards are attention and FFN of each layer in turn, then the output layer if there is a choice; ``budget`` of the GPU's memory and
    ``scratch``, the buffer of a pass, are bytes.

    ``all``: everything is pinned. ``all but output``: the output layer is the CPU's. ``static attention``: attention from the first
    layer on, then output, then FFNs are pinned, the rest is the CPU's. ``streamed attention``: the same with one buffer, through which
    go attention that is not pinned or, once all is, FFNs. ``all streamed``: the first shards are pinned, others go through two buffers.
    Of each the longest prefix counts for which 1.5 times the scratch, what is pinned with its caches, and buffers of the largest
    streamed shard fit the budget. What takes no memory counts as pinned. If none fits: "static attention".

    >>> layers = [Shard("attention", 1, 1, 9), Shard("ffn", 8, 1, 20)] * 4
    >>> [shard_plan([*layers, Shard("output", 2, 1, 9)], budget, 1.0).strategy for budget in (40, 36, 20)]
    ['all', 'all but output', 'streamed attention']
    """
    found = [_planned(name, options, shards, budget, scratch, bytes_per_time, cpu_rate) for name, options in _options(shards)]
    fitting = [plan for plan, fits in found if fits]
    if not fitting:
        return next(plan for plan, _ in found if plan.strategy == "static attention")
    return min(fitting, key=lambda plan: plan.time)


_Options = tuple[list[Sequence[State]], int, int]  # states by the length of the prefix, buffers, bytes of each


def _options(shards: Sequence[Shard]) -> list[tuple[str, list[_Options]]]:
    """List the choices of each strategy, those that are preferred first."""
    kinds = [shard.kind for shard in shards]
    attention, ffn = ([i for i, kind in enumerate(kinds) if kind == one] for one in ("attention", "ffn"))
    output = [i for i, kind in enumerate(kinds) if kind == "output"]
    attention_first = [*attention, *output, *ffn]
    sizes = [shard.n_bytes + shard.kv_bytes for shard in shards]

    def largest(of: Sequence[int]) -> int:
        return max((sizes[i] for i in of), default=0)

    def prefixes(order: Sequence[int], low: int, high: int, rest: Callable[[str], State]) -> list[Sequence[State]]:
        pinned = [{*order[:n], *(i for i, size in enumerate(sizes) if not size)} for n in range(low, high + 1)]
        return [["pinned" if i in these else rest(kind) for i, kind in enumerate(kinds)] for these in pinned]

    n, n_attention = len(shards), len(attention)
    streamed_ffn = prefixes(attention_first, n_attention, n, lambda kind: "streamed" if kind == "ffn" else "cpu")
    streamed_attention = prefixes(attention_first, 0, n_attention - 1, lambda kind: "streamed" if kind == "attention" else "cpu")
    return [
        ("all", [([["pinned"] * n], 0, 0)]),
        ("all but output", [([["cpu" if kind == "output" else "pinned" for kind in kinds]], 0, 0)]),
        ("static attention", [(prefixes(attention_first, 0, n, lambda kind: "cpu"), 0, 0)]),
        ("streamed attention", [(streamed_ffn, 1, largest(ffn)), (streamed_attention, 1, largest(attention))]),
        ("all streamed", [(prefixes(range(n), 0, n, lambda kind: "streamed"), 2, largest(range(n)))]),
    ]


def _planned(
    name: str, options: Sequence[_Options], shards: Sequence[Shard], budget: int, scratch: int, bytes_per_time: float,
    cpu_rate: float,
) -> tuple[ShardPlan, bool]:  # fmt: skip
    """Take the longest prefix that fits, of the first choice that has one."""

    def fits(states: Sequence[State], buffers: int) -> bool:
        pinned = sum(s.n_bytes + s.kv_bytes for s, state in zip(shards, states, strict=True) if state == "pinned")
        return SCRATCH * scratch + pinned + buffers <= budget

    for by_length, slots, size in options:
        low, high = -1, len(by_length) - 1
        while low < high:  # the longest that fits is in low .. high
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(by_length[middle], slots * size) else (low, middle - 1)
        if low >= 0:
            break
    states = tuple(by_length[max(low, 0)])
    return ShardPlan(name, states, slots, predicted_time(shards, states, bytes_per_time, cpu_rate)), low >= 0


class Tier(NamedTuple):
    """FFNs of a plan: the first layers are pinned, all others are treated alike."""

    pinned: int
    others: State
    slots: int  # layers that the buffers of streamed ones hold


class PipeShard(PolicyBase):
    """Layers pinned, streamed or on the CPU, planned by batch size (Pipelined Sharding, 2026)."""

    paper = "Pipelined Sharding (artifact of MLSys 2026, deepshnv/pipeshard-mlsys26-ae)"
    missing = (
        "attention and output layer on the CPU or streamed, and their KV cache: cache slots are granted next to them",
        "pinned host memory as a limit (-psa): all of it is pinned, or as the experiment's curve says",
        "a CPU slowed down by copies in the prediction: with attention on the GPU no plan has both",
        "the paper, which was not read",
    )

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

    def on_step_begin(self, event: StepBegin, view: View) -> list[Action]:
        """Change the plan with the batch size."""
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

    def on_layer_begin(self, event: LayerBegin, view: View) -> list[Action]:
        return self._ahead(event.layer, PREFETCH, view)

    def on_fetched(self, event: Fetched, view: View) -> list[Action]:
        if event.layer == self._layer:
            self._awaited.discard(event.expert)
        return self._run()

    def on_layer_end(self, event: LayerEnd, view: View) -> list[Action]:
        return [Drop(event.layer, self._everyone, self._gpu)] if self._is_streamed(event.layer) else []

    def on_routed(self, event: Routed, view: View) -> list[Action]:
        """Run the layer once it is there; copy the next one that is streamed."""
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
