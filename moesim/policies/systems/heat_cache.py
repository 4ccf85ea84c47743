"""A cache next to the CPU, "WackMall", that exchanges one expert at a time by decayed heat.

ggml-org/llama.cpp PRs 26563 and 26824 (closed); miltos22/llama.cpp-wackMall-merge-request at 02512c813a.

| decision | code | ours |
|---|---|---|
| token embedding | on the CPU, as of llama.cpp | the same |
| prompts, as of llama.cpp | micro-batches of 512 rows | the same |
| slots | S of each layer (``--expert-hot-s``) | the granted slots, dealt to layers |
| start | the S hottest of a saved run, else the S lowest ids | the lowest ids |
| hits, misses | the GPU computes what is there, the CPU the others; outputs are added | the same, also in prompts; the CPU after the GPU (``overlap``: at once); from 32 tokens on the GPU copies misses for one use, as in llama.cpp |
| heat | rows a step, five times as many in the first 3 generated tokens; every second step times ``decay`` squared | the same |
| when | after each ``period`` of steps of one token: floor + int(27 (r - 1) / 5), from floor to 32; floor 10, in copy mode 5 | the same |
| r | the hit rate, averaged with weight 0.9 for the past, over clamp(0.8 (S/N)^0.6, 0.2, 0.9) | the same; of steps of one token |
| first | moves that have ended count from now on; who leaves does so once copied back | the same; in copy mode at once |
| gate | the hottest on the CPU is hotter than the coldest on the GPU | the same, unless a slot is free |
| who leaves | one a layer: the coldest outside the S hottest, there for ``dwell`` exchanges, if the hottest on the CPU has ``hyst`` times its heat | the same; of equals the lower id |
| who enters | one a layer: the hottest of the S hottest not there, into the first free slot; at most 2 moves of a layer at once | the same |
| other steps | of several tokens: change nothing | the same; their rows add heat |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Literal

from moesim.policies.cpu_cache import LLAMA_CPP_OFFLOAD_ROWS, FilledBetweenSteps
from moesim.policies.options import option
from moesim.policies.parts import Unit
from moesim.policy import (
    CACHE,
    UPDATE,
    Action,
    Copy,
    Drop,
    Fetch,
    Fetched,
    LayerEnd,
    Placement,
    Ran,
    Routed,
    StepBegin,
    StepEnd,
    View,
    Work,
)

WARM_TOKENS, WARM_FACTOR = 3, 5
"""First generated tokens whose rows count more, and how much more."""
LONGEST, FLOOR = 32, {"copy": 5, "move": 10}
"""Steps between exchanges, at most and at least."""
MOVES = 2
"""Of a layer at once."""
PAST = 0.9
"""Weight of the hit rate so far."""


def target_rate(slots: float, n_experts: int) -> float:
    """Return the hit rate below which exchanges are as frequent as can be."""
    share: float = (slots / n_experts) ** 0.6
    return min(max(0.8 * share, 0.2), 0.9)


def period(floor: int, ratio: float) -> int:
    """Return the steps of one token between exchanges, for a hit rate over its target."""
    return min(max(floor + int(27 * (ratio - 1) / 5), floor), LONGEST)


class Heat:
    """Heat of one layer's experts, and who is on the GPU by it."""

    def __init__(self, n_experts: int, slots: int) -> None:
        self.slots = slots
        self.heat = [0.0] * n_experts
        self.there: dict[int, int] = dict.fromkeys(range(slots), 0)  # expert -> exchanges since it counts
        self.entering: set[int] = set()
        self.leaving: set[int] = set()

    def hottest(self) -> list[int]:
        """Return as many experts as there are slots, hottest first."""
        return sorted(range(len(self.heat)), key=lambda e: (-self.heat[e], e))[: self.slots]

    def leaves(self, hyst: float, dwell: int) -> int | None:
        on_cpu = [e for e in range(len(self.heat)) if e not in self.there and e not in self.entering]
        if not on_cpu or not self.there or self._full():
            return None
        hot, best = max(self.heat[e] for e in on_cpu), self.hottest()
        if hot <= min(self.heat[e] for e in self.there):
            return None
        outside = [e for e in self.there if e not in best and e not in self.leaving and self.there[e] >= dwell]
        coldest = min(outside, key=lambda e: (self.heat[e], e), default=None)
        return coldest if coldest is not None and hot >= hyst * self.heat[coldest] else None

    def enters(self) -> int | None:
        if len(self.there) + len(self.entering) >= self.slots or self._full():
            return None
        return next((e for e in self.hottest() if e not in self.there and e not in self.entering), None)

    def _full(self) -> bool:
        return len(self.entering) + len(self.leaving) >= MOVES


class HeatCache(FilledBetweenSteps):
    """Slots next to the CPU; one expert at a time gives way to a hotter (llama.cpp PR 26563)."""

    paper = "WackMall (ggml-org/llama.cpp PRs 26563 and 26824)"
    engine = "llama.cpp"
    missing = (
        "heat saved over runs (--expert-sidecar), --expert-pin and --expert-no-evict",
        "--expert-move-mode 0, which chooses by how the model is loaded and what memory is free",
        "--expert-sync-period next to the period that adapts itself, which the files read do not explain",
        "checks of the moved bytes by a hash",
        "host memory that move mode frees",
    )

    decay: float = option(0.999, "By what heat is multiplied a step (``--expert-heat-decay``).", ge=0, le=1)
    hyst: float = option(1.3, "How many times as hot the newcomer must be (``--expert-hyst``).", ge=0)
    dwell: int = option(0, "Exchanges for which an expert stays (``--expert-dwell``).", ge=0)
    move_mode: Literal["copy", "move"] = option(
        "copy", "The host keeps a copy of what is on the GPU, or what leaves is copied back first (``--expert-move-mode``)."
    )
    overlap: bool = option(False, "GPU and CPU compute at once; else the CPU after the GPU.")

    @property
    def listens(self) -> frozenset[type]:
        return frozenset({StepBegin, StepEnd, Routed, Fetched, LayerEnd, *(() if self.overlap else (Ran,))})

    def place(self, view: View) -> Placement:
        """Put the lowest ids of each layer into its slots."""
        n_slots, placement = self._begin("heat-cache", view, (LLAMA_CPP_OFFLOAD_ROWS - 1, 1))
        n_experts = view.model.n_experts
        self._layers = [Heat(n_experts, n) for n in n_slots]
        self._target = target_rate(sum(n_slots) / len(n_slots), n_experts)
        self._rows: list[list[int]] = []  # of this step, by layer
        self._phase, self._n_tokens = "prefill", 0
        self._generated = self._updates = self._steps_since = 0
        self._rate: float | None = None
        self._hits = self._uses = 0
        self._back: set[Unit] = set()  # copied back
        self._counts = {"exchanges": 0}
        return replace(placement, copies=[Copy(layer, range(n), self._gpu) for layer, n in enumerate(n_slots) if n])

    @property
    def counters(self) -> Mapping[str, int]:
        return self._counts

    def on_fetched(self, event: Fetched, view: View) -> list[Action]:
        if event.device == self._host:
            self._back.add((event.layer, event.expert))
        return self.on_ran(event, view)

    def on_layer_end(self, event: LayerEnd, view: View) -> list[Action]:
        return self._past.layer_end(event, view)

    def on_step_begin(self, event: StepBegin, view: View) -> Iterable[Action]:
        self._past.step_begin(event)
        self._phase, self._n_tokens = event.phase, len(event.requests)
        self._generated = self._generated + 1 if event.phase == "decode" else 0
        self._rows = [[0] * len(one.heat) for one in self._layers]
        self._hits = self._uses = 0
        return ()

    def on_routed(self, event: Routed, view: View) -> list[Action]:
        """Count the rows, and run experts where they are."""
        layer, there = event.layer, self._layers[event.layer].there
        self._rows[layer] = [a + b for a, b in zip(self._rows[layer], event.rows, strict=True)]
        self._uses += sum(event.rows)
        self._hits += sum(event.rows[e] for e in event.active if e in there)
        if self._past.passes(event, 0):
            moving = {*there, *self._layers[layer].entering}
            return self._past.serve(event, {(layer, e) for e in moving})
        on_gpu, on_cpu = [e for e in event.active if e in there], [e for e in event.active if e not in there]
        return self._run(layer, on_gpu, on_cpu)

    def on_step_end(self, event: StepEnd, view: View) -> list[Action]:
        """Add the step's rows to the heat; exchange if it is time."""
        self._updates += 1
        factor = WARM_FACTOR if self._phase == "decode" and self._generated <= WARM_TOKENS else 1
        for one, rows in zip(self._layers, self._rows, strict=True):
            one.heat = [heat + factor * n for heat, n in zip(one.heat, rows, strict=True)]
            if self._updates % 2 == 0:
                one.heat = [heat * self.decay**2 for heat in one.heat]
        if self._n_tokens > 1:
            return []
        rate = self._hits / self._uses if self._uses else 0.0
        self._rate = rate if self._rate is None else PAST * self._rate + (1 - PAST) * rate
        self._steps_since += 1
        if self._steps_since < period(FLOOR[self.move_mode], self._rate / self._target):
            return []
        self._steps_since = 0
        self._counts["exchanges"] += 1
        return [action for layer in range(len(self._layers)) for action in self._exchange(layer, view)]

    def _exchange(self, layer: int, view: View) -> list[Action]:
        """Finish what has ended, then begin at most one move each way."""
        one, actions = self._layers[layer], list[Action]()
        one.there = {expert: n + 1 for expert, n in one.there.items()}
        for expert in sorted(e for e in one.entering if view.is_resident(layer, e, self._gpu)):
            one.entering.discard(expert)
            one.there[expert] = 0
            actions.append(Work("table", self._gpu))
        for expert in sorted(e for e in one.leaving if (layer, e) in self._back):
            actions += self._gone(layer, expert)
        leaver = one.leaves(self.hyst, self.dwell)
        if leaver is not None:
            one.leaving.add(leaver)
            if self.move_mode == "copy":
                actions += self._gone(layer, leaver)
            else:
                actions.append(Fetch(layer, [leaver], self._host, UPDATE, source=self._gpu))
        newcomer = one.enters()
        if newcomer is not None:
            one.entering.add(newcomer)
            actions.append(Fetch(layer, [newcomer], self._gpu, UPDATE, CACHE))
        return actions

    def _gone(self, layer: int, expert: int) -> list[Action]:
        one = self._layers[layer]
        one.leaving.discard(expert)
        del one.there[expert]
        self._back.discard((layer, expert))
        return [Drop(layer, [expert], self._gpu)]
