"""A cache next to the CPU, filled between steps with each layer's two newest misses; and what two forks made of it.

ggml-org/llama.cpp PR 27861 (open draft); src/llama-moecache.cpp in zazaidi/llama.cpp at c8b2bbe452. ``early``: everett6/moe-prefetch,
patches/0002 at 2a1653fb and, for the window, 0007 at 47af2fa8. ``admit`` without it: Andrei-Dr/local-ai,
research/patches/mainline-series/0001 at 4d4f477e.

| decision | code | ours |
|---|---|---|
| token embedding | on the CPU, as of llama.cpp | the same |
| prompts, as of llama.cpp | micro-batches of 512 rows | the same |
| slots | as many of each layer (``--moe-expert-cache``) | the granted slots, dealt to layers |
| hits | the GPU computes them; stamped by a clock | the same |
| misses | the CPU computes them; noted once a step, in selection order | the same |
| CPU and GPU | two chains of products; who waits is left to the scheduler of the graph | the GPU first, then the CPU; ``overlap``: both at once |
| between steps, first | uploads that have ended count from now on, stamped | the same |
| between steps, then | of each layer the ``--moe-expert-cache-inserts`` newest misses; one that is there by now takes its turn, too | the same (``inserts``) |
| who leaves | the first empty slot, else the smallest stamp of those not being filled, as the upload is chosen | the same |
| worker | one thread uploads one expert after the other | the same |
| on its way | a miss on its way is uploaded again, to another slot; when the first leaves, it does not count as there | the same; ``dup_upload: false``: one upload takes its turn |
| larger steps | more than 1 token (the fork: 4) pass by the cache, unseen | the same (``cached_rows``); from 32 tokens on the GPU computes them, as in llama.cpp, else the CPU |
| ``early``: uploads | as a layer has routed, of its misses by first appearance the first ``inserts`` that are neither there nor queued or copied; a copy just under way may be issued again | the same, but none under way is issued again |
| ``early``: into which slots | a stack of empty ones, the lowest on top at first; between steps the ones used longest ago are emptied until ``inserts`` are in it | the same |
| ``early`` and ``admit: 2``, ``window: 8`` | with more empty slots than that, or none in use, all misses; else those that missed before, less than 8 steps ago (``LLAMA_MOE_ADMIT=window``) | the same |
| ``admit``, ``window`` alone | misses fill empty slots; else they must be the third of an expert within 16 tokens of its layer (``--moe-expert-cache-admit``, ``-window``); newest first, up to ``inserts`` that are neither there nor on their way | the same (``admit: 3``, ``window: 16``) |
| ``admit`` alone, as it is shipped | steps of up to 4 tokens are cached; CPU and GPU compute at once | ``cached_rows: 4``, ``overlap: true`` |
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from moesim.policies.cpu_cache import LLAMA_CPP_OFFLOAD_ROWS, FilledBetweenSteps
from moesim.policies.options import option
from moesim.policies.parts import Unit
from moesim.policy import (
    CACHE,
    UPDATE,
    Action,
    Copies,
    Drop,
    Fetch,
    Fetched,
    LayerEnd,
    Placement,
    Ran,
    Routed,
    Send,
    Sent,
    StepBegin,
    View,
    Work,
)

if TYPE_CHECKING:
    from moesim.model import ModelSpec

AGAIN = "uploaded again"


class UploadSlots:
    """Slots of one layer: residents, where each expert is looked for, and the use of each slot."""

    def __init__(self, n: int) -> None:
        self.where: dict[int, int] = {}  # expert -> slot, of those that count as there
        self.owner: list[int | None] = [None] * n
        self.filling: dict[int, int] = {}  # slot -> expert
        self.free = list(range(n))[::-1]  # a stack of empty slots, with ``early``
        self._stamps = [0] * n
        self._clock = 0
        self._token = 0
        self._missed: dict[int, deque[int]] = {}  # tokens of the latest misses

    def touch(self, slot: int) -> None:
        self._clock += 1
        self._stamps[slot] = self._clock

    def take(self, expert: int) -> tuple[int, int | None] | None:
        """Assign a slot to an upload; return it and whom it held; None: all are being filled."""
        idle = [slot for slot in range(len(self.owner)) if slot not in self.filling]
        if not idle:
            return None
        slot = min(idle, key=lambda slot: -1 if self.owner[slot] is None else self._stamps[slot])
        victim, self.owner[slot] = self.owner[slot], None
        if victim is not None:
            self.where.pop(victim, None)  # even if it lies in another slot, too
        self.filling[slot] = expert
        return slot, victim

    def fill(self, expert: int) -> int:
        """Assign the slot on top of the stack to an upload."""
        slot = self.free.pop()
        self.filling[slot] = expert
        return slot

    def empty(self) -> int | None:
        """Empty the slot used longest ago, onto the stack; return whom it held, None if none can be emptied."""
        slot = min(self.where.values(), key=self._stamps.__getitem__, default=None)
        if slot is None:
            return None
        victim, self.owner[slot] = self.owner[slot], None
        assert victim is not None
        del self.where[victim]
        self.free.append(slot)
        return victim

    def next_token(self) -> None:
        self._token += 1

    def missed(self, expert: int, times: int, window: int) -> bool:
        """Note a miss of the present token; return whether it is so many within a window of tokens."""
        found = self._missed.setdefault(expert, deque(maxlen=times))
        found.append(self._token)
        return len(found) == times and self._token - found[0] < window

    def publish(self, slot: int) -> None:
        expert = self.filling.pop(slot)
        self.owner[slot] = expert
        self.where[expert] = slot
        self.touch(slot)


class _Job(NamedTuple):
    unit: Unit
    slot: int


class TwoUploadsLru(FilledBetweenSteps):
    """Slots of each layer, filled between steps with its two newest misses (llama.cpp PR 27861)."""

    paper = "llama.cpp PR 27861 (zazaidi/llama.cpp)"
    engine = "llama.cpp"
    missing = (
        "rows of misses that the GPU computes with an expert of zeros",
        "three slices of an upload, one for each matrix",
        "from 32 tokens on experts of a prompt that are cached are copied again: here they are read from the cache",
    )

    inserts: int = option(2, "Uploads of a layer between two steps (``--moe-expert-cache-inserts``).", ge=1)
    overlap: bool = option(False, "GPU and CPU compute at once; else the CPU after the GPU.")
    dup_upload: bool = option(True, "Upload again what misses while it is on its way, as the PR does; not with early or admit.")
    cached_rows: int = option(1, "Steps of more tokens pass by the cache.", ge=1)
    early: bool = option(
        False, "Issue uploads as a layer has routed, into slots that were emptied between steps (``LLAMA_MOE_EARLY_ISSUE``)."
    )
    admit: int = option(1, "So many misses within the window before an upload may replace an expert.", ge=1)
    mmap: bool = option(True, "Experts are copied from the mapped file (``--mmap``), not from page-locked memory.")
    window: int = option(16, "Tokens of that window.", ge=1)

    def transfer(self, model: ModelSpec) -> Copies:
        """Return copies of which each matrix is waited for."""
        return Copies(syncs=3)

    @property
    def listens(self) -> frozenset[type]:
        return frozenset({StepBegin, Routed, Fetched, Sent, LayerEnd, *(() if self.overlap else (Ran,))})

    def place(self, view: View) -> Placement:
        n_slots, placement = self._begin("two-uploads-lru", view, (self.cached_rows, LLAMA_CPP_OFFLOAD_ROWS))
        self._model = view.model
        self._slots = [UploadSlots(n) for n in n_slots]
        self._seen: list[dict[int, None]] = [{} for _ in n_slots]  # misses of the step, oldest first
        self._jobs: deque[_Job] = deque()
        self._on_its_way: _Job | None = None
        self._staged = -1  # layer of which experts are copied for one use
        self._ended: list[_Job] = []
        self._copies: set[Unit] = set()  # of which the engine has a copy there, or one on its way
        self._counts = {"cache_hits": 0, "cache_misses": 0, "duplicate_copies": 0}
        return placement

    @property
    def counters(self) -> Mapping[str, int]:
        """Hits and misses by what counts as there, and uploads of what was there or coming."""
        return self._counts

    def on_step_begin(self, event: StepBegin, view: View) -> list[Action]:
        """Publish what has ended; walk each layer's misses from the newest."""
        self._past.step_begin(event)
        for unit, slot in self._ended:
            self._slots[unit[0]].publish(slot)
        actions: list[Action] = [Work("table", self._gpu, len(self._ended))]
        self._ended.clear()
        for layer, seen in enumerate(self._seen):
            if self.early:
                actions += self._empty(layer)
            else:
                turns = [e for e in reversed(seen) if self.admit == 1 or not self._known(layer, e)]
                for expert in turns[: self.inserts]:
                    actions += self._choose(layer, expert)
            seen.clear()
        return [*actions, *self._start()]

    def on_fetched(self, event: Fetched, view: View) -> list[Action]:
        job = self._on_its_way
        ended = job is not None and (event.layer, event.expert) == job.unit
        actions = self._next() if ended else []
        return [*actions, *self.on_ran(event, view)]

    def on_sent(self, event: Sent, view: View) -> list[Action]:
        return self._next()

    def on_layer_end(self, event: LayerEnd, view: View) -> list[Action]:
        self._staged = -1
        return [*self._past.layer_end(event, view), *self._start()]

    def on_routed(self, event: Routed, view: View) -> list[Action]:
        """Run experts where they count as there; note the misses."""
        if self._past.passes(event, 0):
            self._staged = event.layer
            return self._past.serve(event, self._copies)
        layer, slots = event.layer, self._slots[event.layer]
        ranked = list(dict.fromkeys(event.experts.ravel().tolist()))
        hits = [e for e in ranked if e in slots.where]
        misses = [e for e in ranked if e not in slots.where]
        for expert in hits:
            slots.touch(slots.where[expert])
        self._seen[layer].update(dict.fromkeys(misses if self.admit == 1 else self._admitted(event)))
        self._counts["cache_hits"] += len(hits)
        self._counts["cache_misses"] += len(misses)
        actions = self._run(layer, hits, misses)
        return [*actions, *self._issue(layer)] if self.early and misses else actions

    def _known(self, layer: int, expert: int) -> bool:
        slots = self._slots[layer]
        return expert in slots.where or expert in slots.filling.values()

    def _admitted(self, event: Routed) -> list[int]:
        """Return the misses that may be uploaded, token by token."""
        slots, found = self._slots[event.layer], dict[int, None]()
        room = len(slots.free) > self.inserts or not slots.where if self.early else None
        n_empty = slots.owner.count(None) - len(slots.filling) - len(self._seen[event.layer])
        for row in event.experts.tolist():
            slots.next_token()
            for expert in row:
                if expert in slots.where or (room is None and expert in slots.filling.values()):
                    continue
                if (room is None and len(found) < n_empty) or slots.missed(expert, self.admit, self.window) or room:
                    found[expert] = None
        return list(found)

    def _issue(self, layer: int) -> list[Action]:
        """Queue uploads of the step's misses so far, into empty slots."""
        slots, n = self._slots[layer], self.inserts
        for expert in self._seen[layer]:
            if n and slots.free and not self._known(layer, expert):
                self._jobs.append(_Job((layer, expert), slots.fill(expert)))
                n -= 1
        return self._start()

    def _empty(self, layer: int) -> list[Action]:
        """Empty slots for the uploads of the coming step."""
        slots, actions = self._slots[layer], list[Action]()
        while len(slots.free) < self.inserts and (victim := slots.empty()) is not None:
            actions += self._gone((layer, victim))
        return actions

    def _choose(self, layer: int, expert: int) -> list[Action]:
        """Queue an upload, unless the expert is there or coming; the victim goes at once."""
        slots = self._slots[layer]
        if expert in slots.where or (expert in slots.filling.values() and not (self.dup_upload and self.admit == 1)):
            return []
        taken = slots.take(expert)
        if taken is None:
            return []
        slot, victim = taken
        self._jobs.append(_Job((layer, expert), slot))
        return self._gone((layer, victim)) if victim is not None else []

    def _gone(self, unit: Unit) -> list[Action]:
        """Forget the engine's copy, unless another slot holds it or gets it now."""
        layer, expert = unit
        if expert in self._slots[layer].owner or (self._on_its_way is not None and self._on_its_way.unit == unit):
            return []
        self._copies.discard(unit)
        return [Drop(layer, [expert], self._gpu)]

    def _next(self) -> list[Action]:
        """Note the end of the upload under way; begin the next."""
        if self._on_its_way is not None:
            self._ended.append(self._on_its_way)
        self._on_its_way = None
        return self._start()

    def _start(self) -> list[Action]:
        """Begin the next upload; a copy that is there already becomes a message."""
        if self._on_its_way is not None or not self._jobs or self._jobs[0].unit[0] == self._staged:
            return []
        self._on_its_way = self._jobs.popleft()
        unit = layer, expert = self._on_its_way.unit
        if unit in self._copies:
            self._counts["duplicate_copies"] += 1
            return [Send(self._model.expert_bytes(layer), self._host, self._gpu, AGAIN)]
        self._copies.add(unit)
        return [Fetch(layer, [expert], self._gpu, UPDATE, CACHE)]
