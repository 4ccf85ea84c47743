"""llama.cpp with experts read from an SSD, into slots of each layer on the GPU.

ggml-org/llama.cpp PR 25294 (open): src/llama-moe-stream.cpp at 4260e460, which ends with an error where a call needs more slots
than there are. Waves: the PR's description, and the same file in phhusson/llama.cpp at 144e1268.

| decision | code | ours |
|---|---|---|
| where experts are | in the model's file alone; each layer has ``n_slots`` slots on the device of its router (``--moe-stream-cache``) | the same; the granted slots in equal shares, the rest unused |
| prompts, as of llama.cpp | micro-batches of 512 rows; token embedding on the CPU | the same |
| one call or waves | waves if min(rows k, N) is more than the slots, whatever is routed | the same, by the rows of a call |
| a call: order | distinct experts by first appearance; a hit keeps its slot | the same |
| a call: misses | the lowest empty slot, else the resident with the fewest counts, of equals used longest ago; none that the call has come to: one that it needs later can leave, and is read again | the same |
| a call: counts | one for each distinct expert; all are halved in each call whose number is a multiple of 64 times the layers, before victims are chosen | the same |
| use | each of the rows' choices in turn is the latest | the same |
| reads | 9 threads (``--moe-stream-io-threads``), in order; each reads an expert's matrices one after the other past the page cache, and copies each to the device | one after the other over the disk's link and the link to the GPU, each at the rate of many reads |
| when it computes | once all experts of the call are there | the same |
| waves | consecutive groups of (slots - k) / 2 distinct experts, by first appearance; each is computed once its experts are there | the same |
| waves: what stays | the wave, residents of the next one, and, of a wave with fewer than k, so many slots of the wave before as are lacking | the same |
| waves: ahead | what the next wave lacks is read as this one begins to wait, if there are slots (not with ``LLAMA_MOE_STREAM_NO_PRELOAD``) | the same (``preload``) |
| waves: counts | none; the number of calls goes on | the same |
| waves: rows | a wave computes all of the rows' choices, those of other waves with any slot and a weight of zero | the wave's own |
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from moesim.errors import CapacityError
from moesim.policies.base import PolicyBase, disk_of, gpu_of, micro_batch_runs, slot_bytes, slots_per_layer
from moesim.policies.cpu_cache import LLAMA_CPP_PROMPT_ROWS
from moesim.policies.options import option
from moesim.policy import (
    CACHE,
    DEMAND,
    PREFETCH,
    Action,
    Copies,
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
)

if TYPE_CHECKING:
    from moesim.model import ModelSpec

HALVING_CALLS = 64
"""Calls of each layer after which all counts are halved."""


class StreamSlots:
    """Slots of one layer: who has which, its counts and its use."""

    def __init__(self, slots: int, n_experts: int) -> None:
        self.owner: list[int | None] = [None] * slots
        self.where: dict[int, int] = {}  # expert -> slot, of those on their way, too
        self.loading: set[int] = set()
        self.counts = [0] * n_experts
        self._used = [0] * slots
        self._clock = 0

    def use(self, expert: int) -> None:
        self._clock += 1
        self._used[self.where[expert]] = self._clock

    def victim(self, kept: set[int]) -> int | None:
        """Return the lowest empty slot, else that of the expert counted least; None if all stay."""
        best, least = None, (0, 0)
        for slot, owner in enumerate(self.owner):
            if slot in kept or owner in self.loading:
                continue
            if owner is None:
                return slot
            key = self.counts[owner], self._used[slot]
            if best is None or key < least:
                best, least = slot, key
        return best

    def assign(self, expert: int, slot: int) -> int | None:
        """Let an expert in; return whom it replaces."""
        gone, self.owner[slot] = self.owner[slot], expert
        if gone is not None:
            del self.where[gone]
        self.where[expert] = slot
        self.loading.add(expert)
        self.use(expert)
        return gone


class Call:
    """A layer's visit: its choices in order, and its distinct experts in groups that fit."""

    def __init__(self, event: Routed, choices: Sequence[int], waves: Sequence[Sequence[int]]) -> None:
        self.event, self.layer, self.choices, self.waves = event, event.layer, choices, waves
        self.at = -1  # of the waves
        self.kept: list[int] = []  # slots of the wave, and those that it needs besides
        self.awaited: set[int] = set()
        self.running: set[int] = set()


class LlamaCppSsd(PolicyBase):
    """Experts on an SSD, read into slots of each layer on the GPU (llama.cpp PR 25294)."""

    paper = "llama.cpp PR 25294 (freedomljc)"
    engine = "llama.cpp"
    profile = "RTX 3090 + EPYC 7532 + 256GB DDR4-3200 + nvme4"
    missing = (
        "reads in parallel: the disk's link serves one after the other, each with the latency of a read",
        "what a wave computes with a weight of zero for choices of other waves",
        "buffered reads (without --moe-stream-direct), which the system may serve from memory",
        "guesses of the next layer (LLAMA_MOE_STREAM_LOOKAHEAD of forks)",
    )
    prompt_rows = LLAMA_CPP_PROMPT_ROWS
    each_layer = ("readback", "plan")

    preload: bool = option(True, "Read the next wave's experts during a wave (else ``LLAMA_MOE_STREAM_NO_PRELOAD``).")

    def transfer(self, model: ModelSpec) -> Copies:
        """Return copies from a buffer of each reading thread, of which each matrix is waited for."""
        return Copies("pageable", syncs=3)

    def place(self, view: View) -> Placement:
        name, model = "llama-cpp-ssd", view.model
        gpu = self._gpu = gpu_of(view, name)
        disk = disk_of(view, name)
        self._slots = slots_per_layer(view, gpu, name, model.top_k, split="equal")[0]
        self._n_experts, self._top_k = model.n_experts, model.top_k
        self._wave_size = (self._slots - model.top_k) // 2
        rows, least = min(view.max_tokens, self.prompt_rows), 3 * model.top_k
        if not self._fits(rows) and self._slots < least:
            raise CapacityError(
                f"policy {name}: expected at least {least} cache slots a layer for steps of {rows} tokens, got {self._slots}; "
                f"set cache.ratio to at least {least}/{model.n_experts}, or workload.prefill_chunk to at most "
                f"{self._slots // model.top_k}"
            )
        self._layers = [StreamSlots(self._slots, model.n_experts) for _ in range(model.n_layers)]
        self._calls: deque[Call] = deque()
        self._n_calls = 0
        pool = Pool(gpu, CACHE, [self._slots * slot_bytes(view)] * model.n_layers, per_layer=True)
        return Placement((), [pool], {("embedding", -1): view.cpus[0]} if view.cpus else {}, backing=[disk])

    def _fits(self, rows: int) -> bool:
        """Whether a call of so many rows is one wave, whatever is routed."""
        return min(rows * self._top_k, self._n_experts) <= self._slots

    def on_step_begin(self, event: StepBegin, view: View) -> list[Action]:
        self._rows = len(event.requests)
        return []

    def on_routed(self, event: Routed, view: View) -> list[Action]:
        """Plan a call; those of a layer's micro-batches go one after the other."""
        choices = event.experts.ravel().tolist()
        ranked = list(dict.fromkeys(choices))
        whole = self._fits(len(event.experts))
        size = len(ranked) if whole else self._wave_size
        self._n_calls += 1
        self._calls.append(Call(event, choices, [ranked[i : i + size] for i in range(0, len(ranked), size)]))
        if whole:
            self._count(event.layer, ranked)
        return self._next_wave() if len(self._calls) == 1 else []

    def _count(self, layer: int, experts: Iterable[int]) -> None:
        counts = self._layers[layer].counts
        for expert in experts:
            counts[expert] += 1
        if self._n_calls % (HALVING_CALLS * len(self._layers)) == 0:
            for one in self._layers:
                one.counts = [n >> 1 for n in one.counts]

    def on_fetched(self, event: Fetched, view: View) -> list[Action]:
        self._layers[event.layer].loading.discard(event.expert)
        call = self._calls[0] if self._calls else None
        if call is None or call.layer != event.layer or event.expert not in call.awaited:
            return []
        call.awaited.discard(event.expert)
        return self._compute(call)

    def on_ran(self, event: Ran, view: View) -> list[Action]:
        call = self._calls[0]
        call.running.difference_update(event.experts)
        if call.running:
            return []
        if call.at + 1 == len(call.waves):
            self._calls.popleft()
        return self._next_wave() if self._calls else []

    def _next_wave(self) -> list[Action]:
        """Assign slots to the next wave and, as far as there are any, to the one after it."""
        call = self._calls[0]
        call.at += 1
        slots, wave = self._layers[call.layer], call.waves[call.at]
        after = call.waves[call.at + 1] if call.at + 1 < len(call.waves) else ()
        parked = call.kept[: max(0, self._top_k - len(wave))]
        kept = {*parked, *(slots.where[e] for e in after if e in slots.where)}
        actions: list[Action] = []
        for expert in wave:
            if expert not in slots.where:
                actions += self._load(call.layer, expert, kept, DEMAND)
            elif expert in slots.loading:
                actions.append(Fetch(call.layer, [expert], self._gpu, DEMAND))
            kept.add(slots.where[expert])
        call.kept = [*(slots.where[e] for e in wave), *parked]
        call.awaited = slots.loading.intersection(wave)
        for expert in after if self.preload else ():
            if expert not in slots.where:
                actions += self._load(call.layer, expert, kept, PREFETCH)
                kept.add(slots.where.get(expert, -1))
        return [*actions, *self._compute(call)]

    def _load(self, layer: int, expert: int, kept: set[int], urgency: int) -> list[Action]:
        """Read an expert into a slot that need not stay, if there is any."""
        slots = self._layers[layer]
        slot = slots.victim(kept)
        if slot is None:
            return []
        gone = slots.assign(expert, slot)
        leave: list[Action] = [] if gone is None else [Drop(layer, [gone], self._gpu)]
        return [*leave, Fetch(layer, [expert], self._gpu, urgency)]

    def _compute(self, call: Call) -> list[Action]:
        """Compute a wave once all of its experts are there."""
        if call.awaited:
            return []
        wave, slots = call.waves[call.at], self._layers[call.layer]
        own = set(wave)
        for expert in call.choices if len(call.waves) == 1 else [e for e in call.choices if e in own]:
            slots.use(expert)
        call.running = own
        if len(call.event.experts) < self._rows:
            return [*micro_batch_runs(call.event, sorted(wave), self._gpu)]
        return [Run(call.layer, sorted(wave), self._gpu)]
