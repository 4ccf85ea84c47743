"""vLLM's expert cache: slots of each layer filled on demand; larger batches in pieces that fit.

vllm-project/vllm RFC #38256, PR #37190 (open): expert_weight_provider.py with plan_chunks, plan_expert_groups and run_with_expert_cache, its first
version at 6d0ac79f, expert cache policies with EWMAPolicy, and docs of ``--moe-expert-cache-size``.

| decision | code | ours |
|---|---|---|
| slots | ``--moe-expert-cache-size`` of each layer, at least as many as a token has experts | the granted slots, dealt to layers; the same |
| ids of a call | all distinct ones of the step's rows, ascending; the host waits for them | the same |
| hit | the layer's clock + 1; one use more, at this clock | the same |
| miss | a free slot, else one of who leaves; then the clock + 1, and one use | the same |
| who leaves | the least uses / (clock - last use + 1); of equals the one that came first; nobody of this call | the same; the first version spared nobody, so that rows could be computed with another expert's weights, which is not simulated |
| with VLLM_MOE_CACHE_POLICY=ewma | the least use that fades by 0.999 with each event of the layer (``VLLM_MOE_CACHE_DECAY``), kept when it leaves | ``eviction: ewma``, ``decay`` |
| who computes | the GPU: copies lie on its stream before the products | the GPU, once all copies of the call are there |
| more ids than slots, ``token`` | rows in order, in pieces whose experts fit, one after the other; experts may come again | the same (``split``) |
| more ids than slots, ``expert`` | ids in groups as large as the slots, one after the other; partial outputs are added | the same |
| prompts | as any step | the same |
| host, each call | reads the ids, plans each piece in Python, writes its slots to the GPU and waits | ``readback`` and ``plan``, once a layer visit |
| with ``VLLM_MOE_MVWSA``, when no request is there and 8 steps or more have run since | slots for the most experts that a layer's visit asked for; KV cache for 115 % of the most tokens in use, at least | ``moves_memory``: the same, and the longest request of the workload; all that is left is KV cache |
| who is moved | 2 slots a layer or more, once two such moments in a row agree; 0.4 to 1.1 s | the same; they agree if both want more, or both fewer: the move is the smaller of the two |
| prediction, admission | none; every miss enters | the same |
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from math import ceil, inf
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from moesim.policies.base import PolicyBase, gpu_of, micro_batch_runs, slot_bytes, slots_per_layer
from moesim.policies.options import option
from moesim.policy import CACHE, DEMAND, Action, Copies, Drop, Fetch, Fetched, Placement, Pool, Ran, Routed, Run, StepBegin, View

if TYPE_CHECKING:
    from moesim.model import ModelSpec
    from moesim.serving.steps import KvUse


class ScoredSlots:
    """Slots of one layer: its experts with their uses, in the order in which they came."""

    def __init__(self, n: int, decay: float | None = None) -> None:
        self.n = n
        self.entries: dict[int, list[int]] = {}  # expert -> uses since it came, clock at the last
        self._clock = 0  # uses in the layer so far
        self._decay = decay  # None: the score forgets who leaves
        self._faded: dict[int, tuple[float, int]] = {}  # score and clock at the last use, of all

    def take(self, wanted: Sequence[int]) -> tuple[list[int], list[int]]:
        """Let all that are wanted in; return who leaves and who comes."""
        left, came = [], []
        spared = set(wanted)
        for expert in wanted:
            entry = self.entries.get(expert)
            if entry is None:
                if len(self.entries) == self.n:
                    victim = self._victim(spared)
                    del self.entries[victim]
                    left.append(victim)
                came.append(expert)
                entry = self.entries[expert] = [0, 0]
            self._clock += 1
            entry[0] += 1
            entry[1] = self._clock
            if self._decay is not None:
                self._faded[expert] = self._score_of(expert) + 1, self._clock
        return left, came

    def shrink(self, n: int) -> list[int]:
        """Have so many slots from now on; return who leaves."""
        self.n, left = n, []
        while len(self.entries) > n:
            left.append(self._victim(()))
            del self.entries[left[-1]]
        return left

    def _victim(self, spared: Collection[int]) -> int:
        if self._decay is not None:
            return min((e for e in self.entries if e not in spared), key=self._score_of)
        now, best, found = self._clock + 1, inf, -1
        for expert, (uses, last) in self.entries.items():
            if uses / (now - last) < best and expert not in spared:
                best, found = uses / (now - last), expert
        return found

    def _score_of(self, expert: int) -> float:
        score, at = self._faded.get(expert, (0.0, self._clock))
        return score * self._decay ** (self._clock - at) if self._decay is not None else 0.0


class MovingBudget:
    """Bytes that slots and KV cache share, and when they move from one to the other (VLLM_MOE_MVWSA)."""

    STEPS, SLOTS, SPARE = 8, 2, Fraction(115, 100)

    def __init__(self, slots: int, least: int, most: int, slot_bytes: int, token_bytes: int) -> None:
        self.slots = slots  # of each layer
        self._least, self._most = least, most
        self._slot_bytes, self._token_bytes = slot_bytes, token_bytes  # of one slot in every layer; of a token of KV cache
        self._total = 0
        self._proposed: int | None = None
        self.steps = self.widest = self._used = 0

    def tokens(self, use: KvUse) -> int | None:
        """Return the tokens of KV cache from now on, with `slots` changed; None: nothing moves."""
        self._total = self._total or self.slots * self._slot_bytes + use.tokens * self._token_bytes
        self._used = max(self._used, use.used)
        if self.steps < self.STEPS:
            return None
        needed = max(use.least, ceil(self.SPARE * self._used)) * self._token_bytes
        room = (self._total - needed) // self._slot_bytes
        wanted = max(self._least, min(self.widest, self._most, room))
        before, self._proposed = self._proposed, wanted
        self.steps = self._used = 0
        if before is None or min(abs(one - self.slots) for one in (before, wanted)) < self.SLOTS:
            return None
        if (before > self.slots) != (wanted > self.slots):
            return None
        self.slots, self._proposed = min(before, wanted, key=lambda one: abs(one - self.slots)), None
        return (self._total - self.slots * self._slot_bytes) // self._token_bytes


class _Piece(NamedTuple):
    """Part of a layer's visit whose experts fit the slots."""

    event: Routed  # with its rows only
    experts: list[int]  # ascending
    whole: bool  # all rows and experts of a micro-batch


class VllmExpertCache(PolicyBase):
    """Slots of each layer, filled on demand; batches that need more experts go in pieces (vLLM)."""

    paper = "vLLM (vllm-project/vllm, PR #37190)"
    engine = "vllm"
    each_layer = ("readback", "plan")

    def transfer(self, model: ModelSpec) -> Copies:
        """Return copies of which each of two tensors is waited for."""
        return Copies(syncs=2)

    missing = (
        "a disk tier with a pool in RAM (VLLM_MOE_DISK_STORE_DIR, VLLM_MOE_RAM_CACHE)",
        "experts read where they are on machines with unified memory (VLLM_MOE_ZERO_COPY)",
        "what a piece after the first takes apart from its experts: a launch of its products, plans, writes to the GPU",
        "mixed steps of prompts and answers (chunked prefill, --max-num-batched-tokens): set workload.prefill_chunk",
        "several GPUs, which it refuses",
    )

    split: Literal["token", "expert"] = option(
        "token", "What needs more experts than slots goes in pieces of rows or of experts (``--moe-expert-cache-split``)."
    )
    eviction: Literal["lfru", "ewma"] = option(
        "lfru", "Who leaves: by uses over age since it came, or by uses that fade (``VLLM_MOE_CACHE_POLICY``)."
    )
    decay: float = option(0.999, "Factor of fading uses with each use in the layer (``VLLM_MOE_CACHE_DECAY``).", ge=0, le=1)

    moves_memory: bool = option(False, "Move memory between slots and KV cache when no request is there (``VLLM_MOE_MVWSA``).")

    @property
    def listens(self) -> frozenset[type]:
        """Events it wants: those of steps only where it moves memory."""
        return super().listens - (frozenset() if self.moves_memory else {StepBegin})

    def place(self, view: View) -> Placement:
        gpu = self._gpu = gpu_of(view, "vllm-expert-cache")
        slots = slots_per_layer(view, gpu, "vllm-expert-cache", view.model.top_k)
        self._slots = [ScoredSlots(n, self.decay if self.eviction == "ewma" else None) for n in slots]
        self._pieces: deque[_Piece] = deque()  # that wait; the first one is under way
        self._awaited: set[int] = set()  # its experts on their way
        self._running: set[int] = set()  # its experts that run
        self._counts = {"cache_hits": 0, "cache_misses": 0, "pieces": 0}
        self._leaving: list[Drop] = []
        if not self.moves_memory:
            return Placement((), [Pool(gpu, CACHE, [n * slot_bytes(view) for n in slots], per_layer=True)])
        self._counts["moves"] = 0
        model, n, size = view.model, min(slots), slot_bytes(view)
        for one in self._slots:
            one.n = n
        self._budget = MovingBudget(n, model.top_k, model.n_experts, size * model.n_layers, model.kv_bytes_per_token)
        pool = Pool(gpu, CACHE, [model.n_experts * size] * model.n_layers, per_layer=True)
        return Placement((), [pool], lent={gpu: (model.n_experts - n) * size * model.n_layers})

    def at_idle(self, use: KvUse, view: View) -> tuple[int, int] | None:
        """Return the tokens of KV cache from now on, and the ns that the move takes; None: nothing moves."""
        if not self.moves_memory or (tokens := self._budget.tokens(use)) is None:
            return None
        self._leaving = [
            Drop(layer, left, self._gpu) for layer, slots in enumerate(self._slots) if (left := slots.shrink(self._budget.slots))
        ]
        self._counts["moves"] += 1
        return tokens, view.costs.operation_ns("move")

    def on_step_begin(self, event: StepBegin, view: View) -> Sequence[Action]:
        """Drop what has no slot any more."""
        self._budget.steps += 1
        leaving, self._leaving = self._leaving, []
        return leaving

    @property
    def counters(self) -> Mapping[str, int]:
        """Hits and misses of all pieces, and how many there were."""
        return self._counts

    def on_routed(self, event: Routed, view: View) -> list[Action]:
        if self.moves_memory:
            self._budget.widest = max(self._budget.widest, len(event.active))
        idle = not self._pieces
        self._pieces += self._planned(event)
        return self._begin() if idle else []

    def on_fetched(self, event: Fetched, view: View) -> list[Action]:
        self._awaited.discard(event.expert)
        return self._run()

    def on_ran(self, event: Ran, view: View) -> list[Action]:
        self._running.difference_update(event.experts)
        if self._running or self._awaited:
            return []
        self._pieces.popleft()
        return self._begin() if self._pieces else []

    def _planned(self, event: Routed) -> list[_Piece]:
        """Cut a visit into pieces whose experts fit."""
        active, n = event.active, self._slots[event.layer].n
        if len(active) <= n:
            return [_Piece(event, [*active], True)]
        if self.split == "expert":
            return [_Piece(event, [*active[i : i + n]], False) for i in range(0, len(active), n)]
        chosen, cuts, seen = event.experts.tolist(), [0], set[int]()
        for at, row in enumerate(chosen):
            if len(seen.union(row)) > n:
                cuts.append(at)
                seen.clear()
            seen.update(row)
        pieces = []
        for begin, end in zip(cuts, [*cuts[1:], len(chosen)], strict=True):
            part = event.experts[begin:end]
            cut = event._replace(experts=part, first_row=event.first_row + begin)
            pieces.append(_Piece(cut, np.unique(part).tolist(), False))
        return pieces

    def _begin(self) -> list[Action]:
        """Make room for the first piece, order its copies, and run it if there are none."""
        event, experts, _ = self._pieces[0]
        layer = event.layer
        left, came = self._slots[layer].take(experts)
        self._awaited.update(came)
        self._counts["cache_misses"] += len(came)
        self._counts["cache_hits"] += len(experts) - len(came)
        self._counts["pieces"] += 1
        return [Drop(layer, left, self._gpu), Fetch(layer, came, self._gpu, DEMAND, CACHE), *self._run()]

    def _run(self) -> list[Action]:
        if self._awaited or self._running or not self._pieces:
            return []
        event, experts, whole = self._pieces[0]
        self._running.update(experts)
        if whole and len(self._pieces) == 1:  # else a Run without rows would take those of later micro-batches
            return [Run(event.layer, experts, self._gpu)]
        return [*micro_batch_runs(event, experts, self._gpu)]
