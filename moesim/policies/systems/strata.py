"""Strata: misses of a window split between CPU and link, a profiled cache that adapts, prompts streamed.

Niko1221/Strata: docs/BATCHING.md at 045219a1, docs/DETAILS.md and src/core/expert_source.cpp at 0173fc46, src/core/verify.cpp at e1aeec84, src/program/generate.cpp, and the
users' simulator ops/cache-sim.py, which was checked against the engine's counts; versions 0.1.40 to 0.1.42.

| decision | code | ours |
|---|---|---|
| window | the rows of a step: a token and its drafts (``--spec``), a row of each slot (``--batch``), or two (``--batch-mtp``), at most 8 | the rows of a decode step, as the workload's ``drafts`` and the scheduler ``strata`` make them; more than 8 are refused |
| at the start | hottest pairs of layer and expert of a profile, as many as fit; so each layer has its number | the same, by the calibration table |
| hits | the GPU computes them | the same |
| misses | the last m of n in routing order are copied to 16 staging buffers, for the GPU, and dropped; the CPU computes the others, each once for all rows | the same |
| m | n round(256 p) / 256, rounded down; at most 16 | the same |
| p, the link's share | ``--pcie-frac``; else, until 0.1.41, of the link's rate: 0.55, or less in proportion below 20 GB/s; since then, of what the CPU takes for a miss, from 0.1 to 0.6 | ``pcie_frac``; ``pcie_rule: link`` (factors derived from printed shares), or ``balance``: both paths end together [choice], by the profile's times |
| join | the GPU waits for both | the same |
| uses | entries of an expert in windows, times 0.7 (``--adapt-decay``) after each adaptation, forgotten below 0.001 | the same |
| adaptation | every 4 windows (``--adapt-every``), in each layer the absent ones with most uses, at least 2, against the residents with fewest, while 1.5 apart; over all layers the 96 (``--adapt-swaps``) that gain most | the same; ties as in the simulator: the higher id comes, the lower leaves |
| a swap | who leaves is a miss at once; the copy has a stream of its own; who comes is a hit from the first window after its arrival | the same; ``overtake``: whether misses' copies pass those of swaps |
| variants of the simulator | victims of any layer; or the link's share stays, for a resident of its layer that the window does not use and that has fewer uses | ``adapt: any-layer``, ``fetch-admit`` |
| prompts | chunks (``--prefill``, automatic: 512 to 16,384); the GPU computes all | ``prefill``, 4,096 [choice] |
| a chunk's buffers | cache slots, from the last on, refilled after the prompt | the same, for the slots through which experts pass |
| from 1,024 tokens on | all absent experts of each layer pass in order through a ring, ahead of their use (``--prefill-stream-min``) | the same; the ring's size is ``prefill_ring``, 384 as printed on an 8 GB card |
| windows between the chunks of a prompt | see the cache without the lent slots; no adaptation meanwhile | the same; such windows do not count towards the next adaptation [choice] |
| fewer tokens | the absent experts that are routed, through 8 slots | the same |
| host, each layer | reads the chosen ids, plans the GPU's part, builds the CPU's jobs | ``readback``, ``plan``, ``handover`` |
| host, between windows | writes which experts are there to the GPU, once for all that have arrived | ``table`` |
| token embedding | in host memory | the same |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import nlargest, nsmallest
from typing import Literal

from moesim.errors import CapacityError, ConfigError
from moesim.policies.base import STAGING, PolicyBase, cpu_of, gpu_of, idle_resident, layer_residents, slot_bytes, staging_pool
from moesim.policies.cpu_cache import both_rates
from moesim.policies.options import option
from moesim.policies.parts import Unit
from moesim.policies.parts.placement import by_frequency
from moesim.policies.streamed import StreamedAhead
from moesim.policy import (
    CACHE,
    DEMAND,
    UPDATE,
    Action,
    Copy,
    Drop,
    Fetch,
    Fetched,
    LayerEnd,
    Placement,
    Pool,
    Routed,
    Run,
    StepBegin,
    View,
    Work,
)

MOST_ROWS = 8
STAGED = 16
STAGE = 8
"""Slots through which the routed experts of a small chunk pass."""
LEAST_USES, FORGOTTEN = 2.0, 1e-3
FULL_SHARE, FULL_RATE = 0.55, 20.0  # GB/s, bytes/ns


def link_share(copy_ns: float, cpu_ns: float, n_bytes: int, rule: str) -> float:
    """Return the link's share of a window's misses from an expert's times and bytes.

    Links of 14.5, 7.2 and 31.4 GB/s, for which version 0.1.40 prints 0.40, 0.20 and 0.55; and a CPU as fast as the link:

    >>> [round(link_share(1000 / rate, 1, 1000, "link"), 2) for rate in (14.5, 7.2, 31.4)], link_share(1, 1, 1, "balance")
    ([0.4, 0.2, 0.55], 0.5)
    """
    if rule == "link":
        return FULL_SHARE * min(1.0, n_bytes / copy_ns / FULL_RATE)
    return min(max(cpu_ns / (cpu_ns + copy_ns), 0.1), 0.6)


class Strata(PolicyBase):
    """Misses split between CPU and link, and a profiled cache that adapts between windows (Strata)."""

    paper = "Strata (Niko1221/Strata)"
    engine = "strata"
    each_layer = ("readback", "plan")
    missing = (
        "prompts of up to 64 tokens read as windows (--short-read)",
        "a prompt chunk's own buffers in cache slots: they are the machine's workspace",
        "the automatic size of chunk and ring, by free memory",
        "slots sized in bytes for each layer: all are as large as the largest expert",
        "misses ranked 7th or lower skipped (STRATA_ROUTE_TAIL_SKIP, 0.1.42), which changes the answer",
        "KV beyond --kv-resident in pinned memory, whose room becomes slots: set workload.kv (resident: 32768)",
        "RAM and file tiers below the cache (--ram-budget-gib, --resident-experts); several GPUs",
        "an expert copied twice, as swap and for its window: it is copied once",
    )

    pcie_frac: float | None = option(
        None, "The link's share of a window's misses (``--pcie-frac``); None: by ``pcie_rule``.", ge=0, le=1
    )
    pcie_rule: Literal["balance", "link"] = option(
        "balance", "That share by the times of CPU and link, as since 0.1.42, or by the link's rate alone, as before."
    )
    adapt: Literal["layer", "any-layer", "fetch-admit"] = option(
        "layer",
        "Swaps within a layer; with victims of any layer; or within a layer, while what the link copies for a window stays, too.",
    )
    adapt_every: int = option(4, "Windows between two adaptations (``--adapt-every``).", ge=1)
    adapt_swaps: int = option(96, "Swaps of an adaptation, over all layers (``--adapt-swaps``); 0: none.", ge=0)
    adapt_decay: float = option(0.7, "Factor of uses after an adaptation (``--adapt-decay``).", ge=0, le=1)
    adapt_margin: float = option(1.5, "Uses that a newcomer must have more than the expert that it replaces.", ge=0)
    overtake: bool = option(True, "Copies of misses go before those of swaps that wait; else in the order of issue.")
    prefill: int = option(4096, "Tokens of a prompt's chunk (``--prefill``).", ge=1)
    prefill_stream_min: int = option(
        1024, "Tokens of a chunk from which on all absent experts are streamed (``--prefill-stream-min``).", ge=1
    )
    prefill_ring: int = option(384, "Slots of the ring through which they pass (``STRATA_PREFILL_RING``).", ge=1)

    @property
    def prompt_rows(self) -> int | None:
        return self.prefill

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"table:activation_frequency"})

    def place(self, view: View) -> Placement:
        gpu = self._gpu = gpu_of(view, "strata")
        self._cpu, model = cpu_of(view, "strata"), view.model
        n_slots = min(view.cache_slots(gpu), model.n_layers * model.n_experts)
        if not n_slots:
            raise CapacityError(f"policy strata on {gpu}: expected at least 1 cache slot, got 0; raise cache.ratio")
        start = by_frequency(view.tables["activation_frequency"].tolist())[:n_slots]
        self._owner: list[Unit | None] = [*start]  # of each slot
        self._slot: dict[Unit, int] = {unit: slot for slot, unit in enumerate(start)}
        self._there: list[set[int]] = [set() for _ in range(model.n_layers)]  # hits, by layer
        for layer, expert in start:
            self._there[layer].add(expert)
        self._n_experts = model.n_experts
        self._coming: dict[Unit, None] = {}  # have a slot, and are no hits yet
        self._lent: dict[int, Unit | None] = {}  # slots lent to a prompt, and who comes back to them
        self._streams = self._prefills = False
        self._reads = False  # a prompt, of which more chunks are to come
        self._stream = StreamedAhead(gpu, CACHE, 1)
        self._usage: list[dict[int, float]] = [{} for _ in range(model.n_layers)]
        self._windows = 0
        self._swap_urgency = UPDATE if self.overtake else DEMAND
        self._share = round(256 * self._link_share(view))
        self._counts = {"cache_hits": 0, "cache_misses": 0, "swaps": 0}
        copies = [Copy(layer, sorted(there), gpu) for layer, there in enumerate(self._there) if there]
        pools = [Pool(gpu, CACHE, n_slots * slot_bytes(view)), staging_pool(view, gpu, STAGED)]
        return Placement(copies, pools, {("embedding", -1): self._cpu})

    def _link_share(self, view: View) -> float:
        if self.pcie_frac is not None:
            return self.pcie_frac
        layer = max(range(view.model.n_layers), key=view.model.expert_bytes)
        copy, cpu = view.costs.fetch_ns(view.host, self._gpu, None, layer), view.costs.expert_ns(self._cpu, 1)
        rates = both_rates(view, self._cpu, self._gpu)
        if self.pcie_rule == "balance" and rates.cpu and rates.link:
            return link_share(copy / rates.link, cpu / rates.cpu, 0, "balance")
        return link_share(copy, cpu, view.model.expert_bytes(layer), self.pcie_rule)

    @property
    def counters(self) -> Mapping[str, int]:
        """Hits and misses of windows by what counts as there, and swaps."""
        return self._counts

    def on_step_begin(self, event: StepBegin, view: View) -> list[Action]:
        """Count what has arrived; lend slots to a prompt, or refill them and adapt."""
        arrived = [unit for unit in self._coming if view.is_resident(*unit, self._gpu)]
        for layer, expert in arrived:
            del self._coming[layer, expert]
            self._there[layer].add(expert)
        self._prefills = event.phase == "prefill"
        if self._prefills:
            self._reads = not event.last_chunk
            return self._lend(len(event.requests))
        if len(event.requests) > MOST_ROWS:
            raise ConfigError(
                f"policy strata: expected at most {MOST_ROWS} rows in a window, got {len(event.requests)} {event.phase} rows; lower "
                f"workload.batch_size or drafts.n, or set workload.scheduler: strata"
            )
        actions: list[Action] = [Work("table", self._gpu)] if arrived else []
        if self._reads:
            return actions
        actions += self._refill()
        if self._windows and not self._windows % self.adapt_every:
            actions += self._adapt()
        self._windows += 1
        return actions

    def on_routed(self, event: Routed, view: View) -> list[Action]:
        if not self._prefills:
            return self._window(event)
        layer = event.layer
        coming = [e for e in event.active if (layer, e) in self._coming]
        wanted: Action = Fetch(layer, coming, self._gpu, DEMAND, CACHE)
        if self._streams:
            return [wanted, *self._stream.serve(event)]
        absent = [e for e in event.active if e not in self._there[layer] and e not in coming]
        fetch = Fetch(layer, absent, self._gpu, DEMAND, CACHE)
        return [wanted, fetch, Run(layer, event.active, self._gpu), Drop(layer, absent, self._gpu)]

    def on_fetched(self, event: Fetched, view: View) -> list[Action]:
        return self._stream.arrived(event)

    def on_layer_end(self, event: LayerEnd, view: View) -> list[Action]:
        held = layer_residents(view, self._gpu, STAGING, event.layer)
        return [Drop(event.layer, held, self._gpu)] if held else []

    def evict(self, fetch: Fetch, view: View) -> Unit | None:
        """Return a buffer's idle expert; in the cache only what a prompt has copied ahead leaves for another."""
        return idle_resident(view, fetch) if fetch.pool == STAGING else self._stream.evict(fetch) if self._streams else None

    # ---------------------------------------------------------------------------------------------------------- windows
    def _window(self, event: Routed) -> list[Action]:
        """Count uses; run hits on the GPU, the last misses there after a copy, the first on the CPU."""
        layer, rows, there, usage = event.layer, event.rows, self._there[event.layer], self._usage[event.layer]
        order = list(dict.fromkeys(event.experts.ravel().tolist()))
        for expert in order:
            usage[expert] = usage.get(expert, 0.0) + rows[expert]
        hits = [e for e in order if e in there]
        misses = [e for e in order if e not in there]
        self._counts["cache_hits"] += len(hits)
        self._counts["cache_misses"] += len(misses)
        on_cpu = len(misses) - min(len(misses) * self._share >> 8, STAGED)
        staged, actions = misses[on_cpu:], list[Action]()
        if on_cpu:
            actions.append(Work("handover", self._cpu))
        if self.adapt == "fetch-admit":
            actions += self._admit(layer, staged, order)
        return [
            *actions,
            Run(layer, misses[:on_cpu], self._cpu),
            Run(layer, hits, self._gpu),
            Fetch(layer, staged, self._gpu, DEMAND, STAGING),
            Run(layer, staged, self._gpu),
        ]

    def _admit(self, layer: int, staged: Sequence[int], order: Sequence[int]) -> list[Action]:
        """Keep what is copied for the window in place of residents that it does not use, with fewer uses."""
        usage = self._usage[layer]
        new = [e for e in staged if (layer, e) not in self._coming]
        idle = sorted((usage.get(e, 0.0), e) for e in self._there[layer].difference(order))
        actions: list[Action] = []
        for expert, (uses, victim) in zip(new, idle, strict=False):
            if usage[expert] <= uses:
                break
            actions += self._replace((layer, victim), (layer, expert), DEMAND)
        return actions

    # ------------------------------------------------------------------------------------------------------- adaptation
    def _adapt(self) -> list[Action]:
        """Swap the pairs that gain most; let all uses fade."""
        gains: list[tuple[float, Unit, Unit]] = []
        layers = range(len(self._there))
        if self.adapt_swaps:
            groups = [layers] if self.adapt == "any-layer" else [[layer] for layer in layers]
            for group in groups:
                gains += self._pairs(group)
        swaps = nlargest(self.adapt_swaps, gains)
        self._counts["swaps"] += len(swaps)
        decay = self.adapt_decay
        self._usage = [{e: n * decay for e, n in usage.items() if n * decay >= FORGOTTEN} for usage in self._usage]
        return [action for _, new, old in swaps for action in self._replace(old, new, self._swap_urgency)]

    def _pairs(self, layers: Sequence[int]) -> list[tuple[float, Unit, Unit]]:
        """Pair the most used absent experts of some layers with their least used residents."""
        absent = [
            (uses, (layer, expert)) for layer in layers for expert, uses in self._usage[layer].items()
            if uses >= LEAST_USES and expert not in self._there[layer] and (layer, expert) not in self._coming
        ]  # fmt: skip
        if not absent:
            return []
        absent.sort(reverse=True)
        there = ((self._usage[layer].get(e, 0.0), (layer, e)) for layer in layers for e in self._there[layer])
        found = []
        for (many, new), (few, old) in zip(absent, nsmallest(len(absent), there), strict=False):
            if many < few + self.adapt_margin:
                break
            found.append((many - few, new, old))
        return found

    def _replace(self, old: Unit, new: Unit, urgency: int) -> list[Action]:
        """Let an expert have another's slot; it is a hit from the window after its arrival on."""
        self._there[old[0]].discard(old[1])
        slot = self._slot.pop(old)
        return [Drop(old[0], [old[1]], self._gpu), self._fill(slot, new, urgency)]

    def _fill(self, slot: int, unit: Unit, urgency: int) -> Fetch:
        self._owner[slot] = unit
        self._slot[unit] = slot
        self._coming[unit] = None
        self._stream.unwanted.discard(unit)
        return Fetch(unit[0], [unit[1]], self._gpu, urgency, CACHE)

    # ---------------------------------------------------------------------------------------------------------- prompts
    def _lend(self, rows: int) -> list[Action]:
        """Empty the last slots for the experts of a chunk to pass through."""
        large = rows >= self.prefill_stream_min
        n = min(self.prefill_ring if large else STAGE, len(self._owner))
        self._streams = large and n > STAGE
        actions: list[Action] = []
        for slot in range(len(self._owner) - n, len(self._owner)):
            if slot in self._lent:
                continue
            unit = self._lent[slot] = self._owner[slot]
            self._owner[slot] = None
            if unit is not None:
                del self._slot[unit]
                self._coming.pop(unit, None)
                self._there[unit[0]].discard(unit[1])
                actions.append(Drop(unit[0], [unit[1]], self._gpu))
        if self._streams:
            held: list[set[int]] = [set() for _ in self._there]
            for layer, expert in self._slot:
                held[layer].add(expert)
            actions += self._stream.begin([[e for e in range(self._n_experts) if e not in on] for on in held])
        return actions

    def _refill(self) -> list[Action]:
        lent, self._lent = self._lent, {}
        self._streams = False
        return [self._fill(slot, unit, self._swap_urgency) for slot, unit in lent.items() if unit is not None]
