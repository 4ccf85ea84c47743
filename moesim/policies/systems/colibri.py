"""colibri: experts on a disk; slots of each layer in memory, with pins; the hottest of all layers on a GPU.

JustVugg/colibri. Memory: c/olmoe.c at 762e5cae. GPU: c/qwen36_tier.c at 032d8df4 with c/tier.h at 762e5cae, and c/qwen36.c for
the order of its calls.

| decision | code | ours |
|---|---|---|
| slots in memory | ``cap`` of each layer; olmoe.c: by a number or what memory is free; with the GPU tier all experts, or, in its streaming mode, fewer | ``cap``; without it as many as fit, at most all |
| on the GPU | one store for all layers, as large as the free memory | the granted slots; without a GPU, or slots, there is none |
| who computes | the GPU what is there as the layer is routed, in one group; the CPU meanwhile the others in the order of the rows' choices | the same; each expert once for all rows, by its first appearance |
| a miss in memory | read, then computed, then the next is looked at | the same |
| its slot | the next empty one, else the smallest key, first slot of equals; not those on their way, pinned ones only if all are; an expert that the visit has not come to can leave | the same; nor one that is just copied to the GPU, of which the code has made a copy |
| key | ``DEMAND_POLICY``: lru: the clock of its latest use; lfru: 256 times its rows so far, and 255 less its age if that is less; auto: lfru up to 12 slots. The clock of all layers ticks once for a hit, twice for a read | the same (``policy``) |
| pins | ``HOT``: after ``WARMUP`` tokens the experts of each layer with the most rows; rows are no longer counted then. A file keeps them for later runs, which count no rows | the same (``hot``, ``warmup``; ``pins: table``: by calibration) |
| PILOT | the next layer's gate on the present layer's input, top k a row, by id; one thread reads what is not there | the same (``pilot``), in steps of up to 8 rows |
| PILOT: slot | the next empty one, else that used longest ago, not pinned; only if the newcomer's lfru score is more than 5/4 of its, and 4 rows (``PILOT_EVICT_GUARD``) | the same (``guard``) |
| PILOT: queue | what is queued is forgotten as a step begins | the same |
| heat | of each expert: 1 for each use; halved every 1024 tokens | the same |
| GPU at the start | as many as fit, by the heat that a file keeps from the run before, else by layer and id | the same, from memory's slots (``warm: table``: by calibration) |
| GPU: a used expert that is not there | takes free room | the same |
| GPU: exchanges | every 16 tokens the hottest that is not there and the coldest that is; with ``streaming`` each used one, as its bytes pass | the same (``exchange: tokens`` or ``passing``); of what is in memory |
| GPU: who may | heat of more than the coldest's and a quarter of it and 4; first by layer and id of equals | the same |
| the one that leaves | is the CPU's from then on | the same |
"""

from __future__ import annotations

from collections import deque
from typing import Literal

import numpy as np

from moesim.errors import CapacityError, HardwareError
from moesim.policies.base import PolicyBase, disk_of, slot_bytes
from moesim.policies.options import option
from moesim.policies.parts import Unit, source_needs
from moesim.policy import (
    CACHE,
    DEMAND,
    PREFETCH,
    UPDATE,
    Action,
    Copy,
    Drop,
    Fetch,
    Fetched,
    Placement,
    Pool,
    Predict,
    Predicted,
    Ran,
    Routed,
    Run,
    StepBegin,
    StepEnd,
    View,
)

AUTO_SLOTS = 12
"""Up to so many slots ``auto`` is lfru."""
EXCHANGE_TOKENS, DECAY_TOKENS, PILOT_ROWS = 16, 1024, 8


def should_promote(hot: int, cold: int) -> bool:
    """Return whether a heat is that much more than another (tier.h).

    >>> [should_promote(hot, 8) for hot in (14, 15)]
    [False, True]
    """
    return hot > cold + cold // 4 + 4


class MemorySlots:
    """Slots of one layer in memory: who has which, and what its key is made of."""

    def __init__(self, cap: int, n_experts: int) -> None:
        self.owner: list[int | None] = [None] * cap
        self.where: dict[int, int] = {}  # expert -> slot, of those on their way, too
        self.loading: set[int] = set()
        self.pinned: set[int] = set()
        self.rows = [0] * n_experts
        self._used = [0] * n_experts  # clock of the latest use as a slot's owner
        self._asked = [0] * n_experts  # the same, but not of a read that has just begun
        self._n_filled = 0

    def use(self, expert: int, clock: int) -> None:
        self._used[expert] = self._asked[expert] = clock

    def score(self, expert: int, clock: int) -> int:
        """Return the lfru score: rows, then how recently it was used."""
        return (self.rows[expert] << 8) + max(0, 255 - (clock - self._asked[expert]))

    def victim(self, clock: int, busy: set[int], *, lfru: bool, pins_too: bool) -> int | None:
        """Return the slot to fill next, None if all are busy, on their way or pinned."""
        if self._n_filled < len(self.owner):
            return self._n_filled
        idle = [e for e in self.owner if e is not None and e not in self.loading and e not in busy]
        free = [e for e in idle if e not in self.pinned] or (idle if pins_too else [])
        if not free:
            return None
        expert = min(free, key=lambda e: self.score(e, clock)) if lfru else min(free, key=self._used.__getitem__)
        return self.where[expert]

    def assign(self, expert: int, slot: int, clock: int) -> int | None:
        """Let an expert in; return whom it replaces."""
        gone, self.owner[slot] = self.owner[slot], expert
        if gone is None:
            self._n_filled += 1
        else:
            del self.where[gone]
        self.where[expert] = slot
        self._used[expert] = clock
        return gone


class Colibri(PolicyBase):
    """Experts on a disk, in memory's slots of each layer, and the hottest on a GPU (colibri)."""

    paper = "colibri (JustVugg/colibri)"
    profile = "RTX 3090 + EPYC 7532 + 256GB DDR4-3200 + nvme4"
    missing = (
        "PILOT=2 and 3, WIDE, SMOOTH and MARKOV: guesses of later layers, by more ids, smoothed over tokens, or by transitions",
        "RECENT_RING, RECENT_BLOOM and GROUP_EVICT: protection of what was routed recently or together",
        "HOT from 100 on: as many pins as have that share of a layer's rows",
        "several misses read at once (PIPE of colibri.c), several loaders (PILOT_WORKERS), two mirrored disks",
        "dense parts in memory, or placed by value on the GPU (COLI_PLACE): they run where the profile says",
        "several GPUs, each with the experts of its residue",
        "int8 copies in memory of what is on the GPU, which are freed and made again",
    )

    each_layer = ("readback",)

    cap: int | None = option(None, "Slots of each layer in memory; None: as many as fit.", ge=1)
    policy: Literal["lru", "lfru", "auto"] = option("lru", "Who leaves memory (``DEMAND_POLICY``).")
    hot: int = option(0, "Experts of each layer that are pinned in memory (``HOT``).", ge=0, le=99)
    warmup: int = option(5, "Tokens after which they are chosen (``WARMUP``).", ge=1)
    pins: Literal["counts", "table"] = option("counts", "Pins by the rows of the run, or from its begin by calibration.")
    pilot: bool = option(False, "Read what the next layer's gate names on this layer's input (``PILOT=1``).")
    guard: bool = option(True, "Such reads replace only what is scored much lower (``PILOT_EVICT_GUARD``).")
    source: str = option("signal:gate_next1", "Where the guesses of ``pilot`` come from.")
    exchange: Literal["tokens", "passing"] = option(
        "tokens", "The GPU's experts are exchanged every 16 tokens, or whenever one passes through the CPU (streaming)."
    )
    warm: Literal["natural", "table", "none"] = option(
        "natural",
        "The GPU begins with the first layers' lowest ids, with the most used by calibration (``HEAT_FILE``), or empty "
        "(``QT_NO_WARMSTART``).",
    )

    @property
    def needs(self) -> frozenset[str]:
        table = {"table:activation_frequency"} if "table" in (self.warm, self.hot and self.pins) else set()
        return frozenset(table) | (source_needs(self.source) if self.pilot else frozenset())

    @property
    def listens(self) -> frozenset[type]:
        return frozenset({StepBegin, Routed, Fetched, Ran, StepEnd, *({Predicted} if self.pilot else ())})

    def place(self, view: View) -> Placement:
        name, model = "colibri", view.model
        if not view.cpus:
            raise HardwareError(
                f"policy {name}: expected a host in {view.costs.hardware.name}, got none; choose a profile with one"
            )
        self._cpu, self._disk = view.cpus[0], disk_of(view, name)
        self._gpu = next((gpu for gpu in view.gpus if view.cache_slots(gpu)), "")
        shape, size = (model.n_layers, model.n_experts), slot_bytes(view)
        host = view.costs.hardware.devices[self._cpu]
        held = host.workspace_bytes + (model.non_expert_bytes if view.compute == self._cpu else 0)
        fits = (host.memory_bytes - held) // (size * model.n_layers)
        cap = min(model.n_experts, fits if self.cap is None else self.cap)
        if cap < 1:
            raise CapacityError(
                f"policy {name}: expected memory for an expert of each layer, got {self._cpu} of {view.costs.hardware.name} with "
                f"{host.memory_bytes} bytes for {size * model.n_layers}; choose fewer bits (expert_bits) or more memory"
            )
        self._lfru = self.policy == "lfru" or (self.policy == "auto" and cap <= AUTO_SLOTS)
        self._layers = [MemorySlots(cap, model.n_experts) for _ in range(model.n_layers)]
        self._clock = self._tokens = self._ticks = 0
        self._counts_rows = not (self.hot and self.pins == "table")
        self._pins: list[set[int]] = [set() for _ in range(model.n_layers)]
        self._turns: deque[int] = deque()  # of the present visit, what the CPU has not come to
        self._layer = -1
        self._awaited = -1  # what it waits for
        self._read_now = -1  # what was read for it last
        self._running: set[int] = set()  # on the CPU
        self._guesses: deque[Unit] = deque()
        self._guessed: Unit | None = None  # being read
        self._heat = np.zeros(shape, np.int64)
        self._there = np.zeros(shape, np.bool_)  # on the GPU
        self._coming: set[Unit] = set()
        self._coldest = 0  # heat, a lower bound
        order = view.tables["activation_frequency"] if self.needs & {"table:activation_frequency"} else None
        n_slots = min(view.cache_slots(self._gpu), model.n_layers * model.n_experts) if self._gpu else 0
        self._room = n_slots if self.warm == "none" else 0
        copies: list[Copy] = []
        if not self._counts_rows and order is not None:
            for layer, shares in enumerate(order):
                self._pins[layer] = set(np.argsort(-shares, kind="stable")[: self.hot].tolist())
        if n_slots > self._room:
            first = np.arange(self._heat.size)
            if self.warm == "table" and order is not None:
                first = np.argsort(-order.ravel(), kind="stable")
            self._there.ravel()[first[:n_slots]] = True
            copies = [Copy(layer, np.flatnonzero(row).tolist(), self._gpu) for layer, row in enumerate(self._there) if row.any()]
        pools = [Pool(self._cpu, CACHE, [cap * size] * model.n_layers, per_layer=True)]
        pools += [Pool(self._gpu, CACHE, n_slots * size)] if n_slots else []
        return Placement(copies, pools, backing=[self._disk])

    def on_step_begin(self, event: StepBegin, view: View) -> list[Action]:
        self._guesses.clear()
        self._few = len(event.requests) <= PILOT_ROWS
        return []

    def on_step_end(self, event: StepEnd, view: View) -> list[Action]:
        """Choose the pins once so many tokens have passed."""
        if not self._counts_rows or not self.hot or self._tokens < self.warmup:
            return []
        self._counts_rows = False
        for slots, pins in zip(self._layers, self._pins, strict=True):
            ranked = sorted((e for e, n in enumerate(slots.rows) if n), key=lambda e: -slots.rows[e])
            pins.update(ranked[: self.hot])
            slots.pinned = pins & slots.where.keys()
        missing = ((layer, e) for layer, pins in enumerate(self._pins) for e in sorted(pins - self._layers[layer].where.keys()))
        self._guesses += missing if self.pilot else ()
        return self._next_guess()

    def on_routed(self, event: Routed, view: View) -> list[Action]:
        """Run what is on the GPU, and begin with the others."""
        layer, slots = event.layer, self._layers[event.layer]
        chosen = event.experts.ravel()
        if self._counts_rows:
            for expert in chosen.tolist():
                slots.rows[expert] += 1
        actions: list[Action] = []
        if layer == 0:
            self._tokens += len(event.experts)
        if self._gpu:
            np.add.at(self._heat[layer], chosen, 1)
            actions += self._tick(len(event.experts)) if layer == 0 else []
        waiting = set(self._turns) if self._layer == layer else set()
        self._layer = layer
        ranked = [e for e in dict.fromkeys(chosen.tolist()) if e not in waiting]
        on_gpu = [e for e in ranked if self._there[layer, e]]
        self._turns.extend(e for e in ranked if not self._there[layer, e])
        if on_gpu:
            actions.append(Run(layer, sorted(on_gpu), self._gpu))
        if self.pilot and self._few and layer + 1 < len(self._layers):
            actions.append(Predict(event.step, layer + 1, self.source, view.dense_device(layer)))
        return [*actions, *self._go_on()]

    def on_fetched(self, event: Fetched, view: View) -> list[Action]:
        unit = event.layer, event.expert
        if event.device == self._gpu:
            self._coming.discard(unit)
            self._there[unit] = True
            return self._go_on()  # its slot in memory is free to be filled
        slots = self._layers[event.layer]
        slots.loading.discard(event.expert)
        self._clock += 1
        slots.use(event.expert, self._clock)
        if event.expert in self._pins[event.layer]:
            slots.pinned.add(event.expert)
        if unit == (self._layer, self._awaited):
            self._awaited = -1
        actions = self._go_on()
        if unit == self._guessed:
            self._guessed = None
            actions += self._next_guess()
        return actions

    def on_ran(self, event: Ran, view: View) -> list[Action]:
        if event.device != self._cpu:
            return []
        self._running.difference_update(event.experts)
        actions: list[Action] = []
        if self._gpu and (self._room or self.exchange == "passing"):
            for expert in event.experts:
                actions += self._promote((event.layer, expert))
        return [*actions, *self._go_on()]

    def on_predicted(self, event: Predicted, view: View) -> list[Action]:
        slots = self._layers[event.layer]
        for row in event.ids[:, : view.model.top_k].tolist():
            for unit in ((event.layer, e) for e in sorted(row)):
                if unit[1] not in slots.where and unit not in self._guesses and not self._there[unit]:
                    self._guesses.append(unit)
        return self._next_guess()

    def _go_on(self) -> list[Action]:
        """Let the CPU compute what is in memory; at a miss, read it once all before it has run."""
        layer, slots = self._layer, self._layers[self._layer]
        runs: list[Action] = []
        while self._turns and self._awaited < 0:
            expert = self._turns[0]
            if expert in slots.loading:
                self._awaited = expert
            elif expert in slots.where:
                if expert != self._read_now:
                    self._clock += 1
                    slots.use(expert, self._clock)
                self._read_now = -1
                self._running.add(self._turns.popleft())
                runs.append(Run(layer, [expert], self._cpu))
            elif self._running or (slot := self._slot(layer, lfru=self._lfru, pins_too=True)) is None:
                break
            else:
                self._awaited = self._read_now = expert
                runs += self._read((layer, expert), slot, DEMAND)
        return runs

    def _slot(self, layer: int, *, lfru: bool, pins_too: bool) -> int | None:
        busy = {e for at, e in self._coming if at == layer}
        return self._layers[layer].victim(self._clock, busy, lfru=lfru, pins_too=pins_too)

    def _read(self, unit: Unit, slot: int, urgency: int) -> list[Action]:
        layer, expert = unit
        slots = self._layers[layer]
        self._clock += 1
        gone = slots.assign(expert, slot, self._clock)
        slots.loading.add(expert)
        slots.pinned.discard(-1 if gone is None else gone)
        leave: list[Action] = [] if gone is None else [Drop(layer, [gone], self._cpu)]
        return [*leave, Fetch(layer, [expert], self._cpu, urgency, CACHE, self._disk)]

    def _next_guess(self) -> list[Action]:
        """Read the next guess that is not there and may take a slot."""
        while self._guesses and self._guessed is None:
            unit = layer, expert = self._guesses.popleft()
            slots = self._layers[layer]
            slot = None if expert in slots.where else self._slot(layer, lfru=False, pins_too=False)
            if slot is None:
                continue
            held = slots.owner[slot]
            if held is not None and self.guard:
                score, other = (slots.score(e, self._clock) for e in (expert, held))
                if score <= other + other // 4 + (4 << 8):
                    continue
            self._guessed = unit
            return self._read(unit, slot, PREFETCH)
        return []

    def _tick(self, n_tokens: int) -> list[Action]:
        """Count tokens; let heat fade, and exchange the coldest on the GPU."""
        actions: list[Action] = []
        for _ in range(n_tokens):
            self._ticks += 1
            if self._ticks % DECAY_TOKENS == 0:
                self._heat >>= 1
                self._coldest = 0
            if self._ticks % EXCHANGE_TOKENS == 0 and self.exchange == "tokens":
                ready = np.zeros_like(self._there)
                for layer, slots in enumerate(self._layers):
                    ready[layer, [e for e in slots.where if e not in slots.loading and (layer, e) not in self._coming]] = True
                heat = np.where(ready & ~self._there, self._heat, -1)
                layer, expert = divmod(int(heat.argmax()), heat.shape[1])
                actions += self._promote((layer, expert)) if heat[layer, expert] > 0 else []
        return actions

    def _promote(self, unit: Unit) -> list[Action]:
        """Copy an expert from memory to the GPU, into free room or for the coldest if it is much hotter."""
        slots = self._layers[unit[0]]
        if self._there[unit] or unit in self._coming or unit[1] not in slots.where or unit[1] in slots.loading:
            return []
        copy = Fetch(unit[0], [unit[1]], self._gpu, UPDATE, CACHE, self._cpu)
        if self._room:
            self._room -= 1
            self._coming.add(unit)
            return [copy]
        if not should_promote(int(self._heat[unit]), self._coldest) or not self._there.any():
            return []
        heat = np.where(self._there, self._heat, np.iinfo(np.int64).max)
        layer, expert = divmod(int(heat.argmin()), heat.shape[1])
        self._coldest = int(heat[layer, expert])
        if not should_promote(int(self._heat[unit]), self._coldest):
            return []
        self._there[layer, expert] = False
        self._coming.add(unit)
        return [Drop(layer, [expert], self._gpu), copy]
