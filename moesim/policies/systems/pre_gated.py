"""Pre-gated MoE: one layer's gate selects the next layer's experts, copied meanwhile.

R. Hwang et al., "Pre-gated MoE: An Algorithm-System Co-Design for Fast and Scalable Mixture-of-Expert Inference", ISCA 2024
(arXiv:2308.12066); the artifact's code. The model is fine-tuned for it, so nothing has to be guessed.

| point | paper says | released code does | we do |
|---|---|---|---|
| selection | the gate of layer l selects the experts of layer l + 1 | the same | ``source: oracle``: the recorded routing of l + 1, once l is routed; a recorded signal guesses |
| compared with | on demand; all of the next layer's experts (SE-MoE); all on the GPU | the same, chosen for encoder and decoder | ``method``; the policy ``all-gpu`` |
| encoder | - | on demand | prompts as decoding, or on demand (``prompts_on_demand``) [choice] |
| order in a layer | copy the next layer's experts while this one computes | wait for this layer's copies, swap the buffers, begin the next layer's, compute | the same; an expert runs once all of its layer are there |
| first layer | on demand | on demand, then it copies the second layer's | the same |
| last layer | copies nothing ahead | the same | the same |
| copies | - | one thread, ascending ids, each expert once | the same |
| buffers | two, of the activated experts | two | two, of a layer's experts each |
| wrong guesses | none, by training | none | copied on demand; what nobody asks for is dropped as its layer ends |
| cache | optional | one arena for all layers, LFU, LRU or LIFO, informed of requests as copies are issued; off | the same (``cache``), of the granted slots; who leaves before its layer is over goes to the layer's buffer |
| its counts | - | begin anew where the decoder takes over | begin anew at 1 where decoding follows a prompt, in the same order [choice] |
| a hit in the cache | - | copied to the buffer within the GPU | computed where it is |
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Generic, Literal, TypeVar

from moesim.policies.base import PolicyBase, gpu_of, layer_residents, slot_bytes
from moesim.policies.options import option
from moesim.policies.parts import Unit, source_needs
from moesim.policies.parts.prefetch import Source
from moesim.policy import (
    CACHE,
    DEMAND,
    PREFETCH,
    Action,
    Drop,
    Fetch,
    Fetched,
    LayerEnd,
    Move,
    Placement,
    Pool,
    Predict,
    Predicted,
    Routed,
    Run,
    StepBegin,
    View,
)  # fmt: skip

Key = TypeVar("Key")
Rule = Literal["lfu", "lru", "lifo"]


class Arena(Generic[Key]):
    """Keys of a cache that learns of requests when copies are issued.

    ``lfu``: the fewest requests since it came in leaves, of equals the longest unchanged; a key begins at 1. ``lru``: requested longest
    ago. ``lifo``: came in last.

    >>> arena = Arena(2, "lfu")
    >>> [arena.request(key) for key in "AABCB"]  # C puts out B, which was asked for once
    [None, None, None, 'B', 'C']
    >>> "A" in arena, "C" in arena
    (True, False)
    """

    def __init__(self, capacity: int, rule: Rule = "lfu") -> None:
        self.capacity = capacity
        self.rule = rule
        self._counts: dict[Key, int] = {}  # in order of the last change

    def __contains__(self, key: object) -> bool:
        return key in self._counts

    def request(self, key: Key) -> Key | None:
        """Ask for a key; return the one that leaves, itself if the cache holds nothing."""
        counts = self._counts
        if key in counts:
            if self.rule != "lifo":
                counts[key] = counts.pop(key) + 1
            return None
        if not self.capacity:
            return key
        victim = self._victim() if len(counts) == self.capacity else None
        if victim is not None:
            del counts[victim]
        counts[key] = 1
        return victim

    def discard(self, key: Key) -> None:
        self._counts.pop(key, None)

    def reset(self) -> None:
        """Begin all counts anew at 1, in the same order."""
        self._counts = dict.fromkeys(self._counts, 1)

    def _victim(self) -> Key:
        if self.rule == "lfu":
            return min(self._counts, key=self._counts.__getitem__)  # the first of equals
        return next(iter(self._counts)) if self.rule == "lru" else next(reversed(self._counts))


BUFFERS = ("even", "odd")
"""Pools of the experts of layers with even and with odd numbers."""


class PreGated(PolicyBase):
    """No cache: the next layer's experts, known a layer ahead, are copied (Pre-gated MoE, 2024)."""

    paper = "Pre-gated MoE (ISCA 2024, arXiv:2308.12066)"
    missing = (
        "the model that is fine-tuned so that a gate selects the next layer's experts: the recorded routing stands in, an oracle",
        "cache: copies within the GPU from the cache to a buffer",
    )

    method: Literal["pre-gated", "prefetch-all", "on-demand"] = option(
        "pre-gated",
        "What is copied while a layer computes: what the next layer is said to be routed to, all of its experts, or nothing.",
    )
    source: Source = option(
        "oracle", "Who says what the next layer is routed to; ``oracle`` for a model that is trained to know."
    )
    prompts_on_demand: bool = option(
        False, "While prompts are processed nothing is copied ahead, as in the encoder of the released code's models."
    )
    cache: Rule | None = option(None, "Who leaves a cache of experts of all layers; None: no cache.")

    @property
    def listens(self) -> frozenset[type]:
        phases = {StepBegin} if self.prompts_on_demand or self.cache == "lfu" else set()
        return frozenset({Routed, Predicted, Fetched, LayerEnd} | phases)

    @property
    def needs(self) -> frozenset[str]:
        return source_needs(self.source) if self.method == "pre-gated" else frozenset()

    def place(self, view: View) -> Placement:
        self._gpu = gpu_of(view, "pre-gated")
        self._prompt = False  # whether the step is one of prefill
        self._awaited: set[int] = set()  # experts of the present layer that are not there
        self._held: set[int] = set()  # those that run once all are
        self._asked: set[Unit] = set()  # what was asked for, until its layer is over
        self._next: tuple[int, list[int]] | None = None  # layer and experts to fetch once this layer's are there
        size = slot_bytes(view)
        slots = min(view.cache_slots(self._gpu), view.model.n_layers * view.model.n_experts) if self.cache else 0
        self._arena = Arena[Unit](slots, self.cache or "lfu")
        self._inside: set[Unit] = set()  # in the cache's pool, or on their way to it
        self._leaving: dict[Unit, str] = {}  # given up on their way to a pool: they take a place until they have come and gone
        pools = [Pool(self._gpu, buffer, view.model.n_experts * size) for buffer in BUFFERS]
        return Placement(pools=[*pools, Pool(self._gpu, CACHE, slots * size)] if slots else pools)

    def on_step_begin(self, event: StepBegin, view: View) -> Iterable[Action]:
        if self._prompt and event.phase == "decode":
            self._arena.reset()
        self._prompt = event.phase == "prefill"
        return ()

    def on_routed(self, event: Routed, view: View) -> list[Action]:
        """Copy what was not guessed, run what is there, and look one layer ahead."""
        layer, gpu = event.layer, self._gpu
        self._layer = layer
        whole = self.method == "prefetch-all"  # then all that is asked for is waited for
        asked = [e for e in (range(view.model.n_experts) if whole else event.active) if (layer, e) in self._asked]
        actions, copied = self._copies(layer, [e for e in event.active if e not in asked], DEMAND, view)
        late = [e for e in sorted({*asked, *event.active}) if view.is_pending(layer, e, gpu)]
        self._awaited.update(late, copied)
        self._held.update(event.active)
        actions += [Fetch(layer, late, gpu, DEMAND, BUFFERS[layer % 2]), *self._run(view)]
        last = layer + 1 == view.model.n_layers
        if event.mb or last or self.method == "on-demand" or (self._prompt and self.prompts_on_demand):
            return actions
        if whole:
            return actions + self._ahead(layer + 1, range(view.model.n_experts), view)
        return [*actions, Predict(event.step, layer + 1, self.source, view.dense_device(layer))]

    def on_predicted(self, event: Predicted, view: View) -> list[Action]:
        if event.layer <= self._layer:  # it has been routed meanwhile
            return []
        return self._ahead(event.layer, set(event.ids[:, : view.model.top_k].ravel().tolist()), view)

    def _ahead(self, layer: int, experts: Iterable[int], view: View) -> list[Action]:
        """Copy experts of the next layer, or wait with it."""
        new = sorted(e for e in experts if (layer, e) not in self._asked)
        if self._awaited and self.cache:  # who leaves the cache then is there, and can be moved
            self._next = layer, new
            return []
        return self._copies(layer, new, PREFETCH, view)[0]

    def _copies(self, layer: int, experts: list[int], urgency: int, view: View) -> tuple[list[Action], list[int]]:
        """Copy what is not in the cache, into it or the layer's buffer; return whom, too."""
        gpu, arena = self._gpu, self._arena
        actions: list[Action] = []
        copied: list[int] = []
        self._leaving = {unit: pool for unit, pool in self._leaving.items() if view.is_pending(*unit, gpu)}
        for expert in experts:
            unit = layer, expert
            if unit in self._leaving:  # it may stay after all
                pool = self._leaving.pop(unit)
                actions.append(Fetch(layer, [expert], gpu, urgency, pool))
                if pool == CACHE:
                    self._inside.add(unit)
            elif unit not in arena and unit not in self._inside:
                copied.append(expert)
            gone = arena.request(unit)
            self._asked.add(unit)
            if gone in self._inside and view.is_resident(*gone, gpu):  # what is on its way leaves when its layer ends
                self._inside.discard(gone)
                keep = gone in self._asked  # its layer is not over
                actions.append(Move(gone[0], [gone[1]], gpu, BUFFERS[gone[0] % 2]) if keep else Drop(gone[0], [gone[1]], gpu))
        kept = [e for e in copied if (layer, e) in arena][: max(0, self._room())]
        self._inside.update((layer, e) for e in kept)
        for stays, some in groupby(copied, kept.__contains__):
            actions.append(Fetch(layer, list(some), gpu, urgency, CACHE if stays else BUFFERS[layer % 2]))
        return actions, copied

    def on_fetched(self, event: Fetched, view: View) -> list[Action]:
        if event.layer != self._layer:
            return []
        self._awaited.discard(event.expert)
        return self._run(view)

    def _run(self, view: View) -> list[Action]:
        """Run the layer once all is there; with a cache, only then begin the next copies."""
        if self._awaited or not self._held:
            return []
        ahead, self._next = self._next, None
        actions = self._copies(*ahead, PREFETCH, view)[0] if ahead else []
        held, self._held = sorted(self._held), set()
        return [*actions, Run(self._layer, held, self._gpu)]

    def on_layer_end(self, event: LayerEnd, view: View) -> list[Action]:
        """Empty the layer's buffer, and keep what the cache took in."""
        layer = event.layer
        ahead = {unit for unit in self._asked if unit[0] == layer}
        self._asked -= ahead
        gone = layer_residents(view, self._gpu, BUFFERS[layer % 2], layer)
        late = sorted(e for _, e in ahead - self._inside if view.is_pending(layer, e, self._gpu))
        gone += late
        self._leaving.update({(layer, e): BUFFERS[layer % 2] for e in late})
        over = [unit for unit in self._inside if unit[0] == layer and unit not in self._arena]
        self._inside.difference_update(over)
        self._leaving.update({unit: CACHE for unit in over if view.is_pending(*unit, self._gpu)})
        gone += sorted(e for _, e in over)
        stay = self._newly_kept(layer, ahead, view)
        return [Drop(layer, [e for e in gone if e not in stay], self._gpu), Move(layer, stay, self._gpu, CACHE)]

    def _room(self) -> int:
        return self._arena.capacity - len(self._inside) - [*self._leaving.values()].count(CACHE)

    def _newly_kept(self, layer: int, asked: set[Unit], view: View) -> list[int]:
        """Choose who goes from the buffer to a place of the cache that was not free before."""
        room = self._room()
        stay: list[int] = []
        for unit in sorted(unit for unit in asked - self._inside if unit in self._arena):
            if room > len(stay) and view.is_resident(*unit, self._gpu):
                stay.append(unit[1])
            else:
                self._arena.discard(unit)
        self._inside.update((layer, e) for e in stay)
        return stay
