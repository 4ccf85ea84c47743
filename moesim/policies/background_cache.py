"""A cache beside the CPU: hits run on the GPU, misses on the CPU, and some of them are copied for later visits.

The caches of engines that compute misses on the CPU differ in a few decisions. Each is an option, and no option is a
system: those are in files of their own. They fix the options, and replace a method where an engine has a rule that no option
says.

| decision | option |
|---|---|
| which misses the GPU computes in their own visit, after a copy | ``copied_now`` |
| which of the others are copied for later | none unless ``later``; ``admission``, and what belongs to it; at most ``inserts`` |
| in which order misses are looked at, and hits count as used | ``miss_order``, ``hit_order`` |
| who leaves | ``victim``; as the copy is issued, so that its slot is of no use until the newcomer counts |
| from when on a copy counts as there | ``publish`` |
| what of a visit goes on together | ``overlap`` |
| prompts, and what counts as one | ``prefill``, ``cached_rows`` |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import heappop
from typing import TYPE_CHECKING, Any, Literal

from moesim.policies.base import (
    CACHE,
    STAGING,
    CostTable,
    PolicyBase,
    cpu_of,
    gpu_of,
    idle_resident,
    slot_bytes,
    slots_per_layer,
    staging_pool,
)
from moesim.policies.cpu_cache import (
    STREAMED,
    Bank,
    DecayedScores,
    InSequence,
    PastTheCache,
    Prompts,
    copies_by_share,
    copies_by_time,
)
from moesim.policies.options import option
from moesim.policies.parts import Unit
from moesim.policies.parts.replacement import PresentVisit
from moesim.policy import (
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
    Ran,
    Routed,
    Run,
    StepBegin,
    View,
)

if TYPE_CHECKING:
    from moesim.model import ModelSpec

SPLIT = ("share", "time")


class BackgroundCache(PolicyBase):
    """Cache beside the CPU: misses run there, or are split with the link, and some are copied for later visits."""

    _name = "background-cache"  # in messages
    _embedding_on_cpu = False  # where tokens are looked up

    copied_now: Literal["none", "all", "share", "time"] = option(
        "none",
        "Misses that the GPU computes in their own visit, once they are copied: as many as balance the rates "
        "or the times of link and CPU. The CPU computes the others, and what finds no slot.",
    )
    share: float = option(0.5, "The link's rate over the sum of the rates of link and CPU.", ge=0, le=1)
    later: bool = option(True, "What the CPU computes beside such copies may be copied for later visits, too.")
    admission: Literal["all", "demand", "score", "newest"] = option(
        "all",
        "Misses of the CPU that are copied: all, those missed often enough, those with a higher score than "
        "who would leave, or, at the next step's begin, the newest of a layer.",
    )
    inserts: int | None = option(None, "At most so many copies for later a layer visit; None: any number.", ge=1)
    admit_free: int = option(2, "Rows missed before an expert is copied into a free slot.", ge=1)
    admit_full: int = option(8, "The same in a full cache, since its last copy.", ge=1)
    kappa: float = option(0.0, "By how much the newcomer's score must be higher.", ge=0)
    half_life: float = option(
        16.0, "A score counts visits in which the expert was used, each half as much after so many visits of its layer.", ge=0.001
    )
    victim: Literal["lru", "score"] = option(
        "lru", "Who leaves: the one used longest ago, or the one with the lowest score, of equals that in the lowest slot."
    )
    publish: Literal["arrival", "step", "two-steps", "batch"] = option(
        "arrival",
        "A copy for later counts from its arrival, from the begin of the next step, from two steps after its "
        "issue, or from the first step of the next batch of requests.",
    )
    hit_order: Literal["rank", "id", "equal"] = option(
        "rank",
        "In which order hits of a visit count as used: of first appearance, by id, or all at once with what "
        "the visit copies; of those used at once the one in the lowest slot leaves first.",
    )
    miss_order: Literal["rank", "id", "recent"] = option(
        "rank", "In which order misses are looked at: of first appearance, by id, or those routed to most recently first."
    )
    scope: Literal["per-layer", "global"] = option("per-layer", "Slots of each layer, or one pool for all.")
    overlap: bool = option(
        True, "Copies, GPU and CPU work at the same time; else the GPU waits for a visit's copies, and the CPU for the GPU."
    )
    prefill: Prompts = option(
        "bypass",
        "Who computes prompts: the CPU; the GPU, by the cache as it is and copies for one use; the cache "
        "where all experts of the visit fit, else as before; or the cache like any step.",
    )
    cached_rows: int | None = option(None, "Steps of more rows are treated as prompts, others are not; None: prompts are.", ge=1)
    warm: bool = option(False, "Begin with the lowest ids of each layer in the cache, not with an empty one.")

    @property
    def listens(self) -> frozenset[type]:
        """Steps, routing and arrivals; what has run and ends of layers where the options ask."""
        more = {Ran} if not self.overlap else set()
        return frozenset({StepBegin, Routed, Fetched, *more, *([LayerEnd] if self.prefill in STREAMED else [])})

    def place(self, view: View) -> Placement:
        """Return the cache, empty or warm."""
        gpu = self._gpu = gpu_of(view, self._name)
        self._cpu = cpu_of(view, self._name)
        model = view.model
        per_layer = slots_per_layer(view, gpu, self._name, 0)
        slots = per_layer if self.scope == "per-layer" else [sum(per_layer)]
        self._banks = [self._new_bank(n, model) for n in slots]
        self._gpu_ns, self._cpu_ns = CostTable(view, gpu), CostTable(view, self._cpu)
        self._first_ns = view.costs.first_extra_ns(self._cpu)
        self._copy_ns = [view.costs.fetch_ns(view.host, gpu, None, layer) for layer in range(model.n_layers)]
        self._visit = PresentVisit()
        self._spared: set[Unit] = set()  # besides what the present visit uses
        self._routed_at: dict[Unit, int] = {}  # step of the latest visit that used it
        self._order = self.miss_order
        self._sequence = None if self.overlap else InSequence(gpu, self._cpu)
        self._scores = DecayedScores(model.n_layers, self.half_life)
        self._missed: dict[Unit, int] = {}  # rows since it was last copied
        self._seen: list[dict[int, None]] = [{} for _ in range(model.n_layers)]  # misses of the step, oldest first
        self._issued: dict[Unit, int] = {}  # unit on its way -> step of its issue
        self._step = -1
        self._batch_over = True
        self._past = self._prompts(view, min(slots))
        self._counts = {"cache_hits": 0, "cache_misses": 0}
        copies = [Copy(layer, range(n), gpu) for layer, n in enumerate(per_layer) if n] if self.warm else []
        for copy in copies:
            bank = self._bank(copy.layer)
            for unit in ((copy.layer, expert) for expert in copy.experts):
                bank.enter(unit, heappop(bank.free))
                bank.there.add(unit)
        sizes = [n * slot_bytes(view) for n in slots]
        pool = Pool(gpu, CACHE, sizes, per_layer=True) if self.scope == "per-layer" else Pool(gpu, CACHE, sizes[0])
        parts = {("embedding", -1): self._cpu} if self._embedding_on_cpu else {}
        return Placement(copies, [pool, staging_pool(view, gpu, None)] if self._past.stages else [pool], parts)

    def _prompts(self, view: View, slots: int) -> PastTheCache:
        """Return who says what passes by a cache, of which a layer can have so many slots, and serves it."""
        return PastTheCache(self.prefill, self.cached_rows, self._gpu, self._cpu)

    @property
    def counters(self) -> Mapping[str, int]:
        """Hits and misses by what counts as there; the records count what is on the GPU, whether it counts or not."""
        return self._counts

    def _new_bank(self, slots: int, model: ModelSpec) -> Bank:
        """Return empty slots, of one layer or of all."""
        return Bank(slots)

    def _bank(self, layer: int) -> Bank:
        return self._banks[layer if self.scope == "per-layer" else 0]

    def decide(self, event: Any, view: View) -> Iterable[Action]:
        """Split what is routed; count copies as there when they do."""
        kind = type(event)
        if kind is Ran and self._sequence is not None:  # most events are of this kind
            return self._sequence.happened(event)
        if kind is StepBegin:
            return self._step_begin(event, view)
        if kind is LayerEnd:
            return self._past.layer_end(event, view)
        if kind is Routed:
            bank = self._bank(event.layer)
            past = self._past.passes(event, len(bank.slot) + len(bank.free))
            return self._past.serve(event, bank.slot) if past else self._routed(event)
        if kind is Fetched and self.publish == "arrival":
            self._publish([(event.layer, event.expert)])
        return self._sequence.happened(event) if self._sequence is not None else ()

    def evict(self, fetch: Fetch, view: View) -> Unit | None:
        """Give up what was copied for one use; who leaves the cache is dropped as its successor's copy is issued."""
        return idle_resident(view, fetch) if fetch.pool == STAGING else None

    def _step_begin(self, event: StepBegin, view: View) -> list[Action]:
        prefill = event.phase == "prefill"
        first_of_batch, self._batch_over = prefill and self._batch_over, event.phase == "decode"
        past = self._past.step_begin(event)
        self._step += not past
        arrived = [unit for unit in self._issued if view.is_resident(*unit, self._gpu)]
        begins = {"batch": first_of_batch, "step": not past, "two-steps": not past}
        if begins.get(self.publish, False):
            age = 2 if self.publish == "two-steps" else 0
            self._publish([unit for unit in arrived if self._issued[unit] <= self._step - age])
        return self._copy_newest() if self.admission == "newest" and not past else []

    def _publish(self, units: Iterable[Unit]) -> None:
        for unit in units:
            if self._issued.pop(unit, None) is not None:
                bank = self._bank(unit[0])
                bank.there.add(unit)
                if self.publish == "step":  # which counts as a use
                    bank.touch(unit)

    def _copy_newest(self) -> list[Action]:
        """Walk each layer's misses from the newest; one that is there or on its way by now uses its turn, too."""
        self._visit = PresentVisit()
        actions: list[Action] = []
        for layer, seen in enumerate(self._seen):
            turns = list(reversed(seen))[: self.inserts]
            for expert in turns:
                actions += self._take((layer, expert), UPDATE)
            seen.clear()
        return actions

    def _routed(self, event: Routed) -> list[Action]:
        layer, bank = event.layer, self._bank(event.layer)
        self._visit.add(event)
        ranked = list(dict.fromkeys(event.experts.ravel().tolist()))
        self._used(event)
        there, rows = bank.there, event.rows
        hits = [e for e in (event.active if self.hit_order == "id" else ranked) if (layer, e) in there]
        for expert in hits:
            self._hit((layer, expert), bank, rows[expert])
        misses = self._in_order([e for e in ranked if (layer, e) not in there], event)
        self._counts["cache_hits"] += len(hits)
        self._counts["cache_misses"] += len(misses)
        now, actions = self._now(layer, misses, rows) if misses else ([], [])
        on_cpu = [e for e in misses if e not in now]
        lent = self._lent(hits, rows) if not misses else []
        on_gpu = [*(e for e in hits if e not in lent), *now]
        if self._sequence is not None:
            actions += self._sequence.hold(layer, now, on_gpu, [*lent, *on_cpu])
        else:
            actions += [Run(layer, sorted(on_gpu), self._gpu), Run(layer, sorted([*lent, *on_cpu]), self._cpu)]
        if self._copies_later:
            actions += self._for_later(layer, on_cpu, rows)
        if self.hit_order == "equal":
            for unit in sorted(self._visit.units & bank.slot.keys(), key=bank.slot.__getitem__):
                bank.touch(unit)
        return actions

    def _used(self, event: Routed) -> None:
        """Note what a visit uses, before anything is decided about it."""
        if "score" in (self.admission, self.victim):
            self._scores.used(event.layer, event.active, begins=event.mb == 0)

    def _hit(self, unit: Unit, bank: Bank, rows: int) -> None:
        """Note that a use finds an expert there."""
        bank.touch(unit)

    def _lent(self, hits: Sequence[int], rows: Sequence[int]) -> Sequence[int]:
        """Return which experts the CPU computes although all of a visit are there."""
        return ()

    def _in_order(self, misses: Sequence[int], event: Routed) -> list[int]:
        """Put misses, which come by first appearance, in the order in which they are looked at."""
        if self._order == "rank":
            return [*misses]
        found = sorted(misses)
        if self._order == "recent":
            found.sort(key=lambda e: -self._routed_at.get((event.layer, e), -1))
            self._routed_at.update(((event.layer, e), self._step) for e in event.active)
        return found

    @property
    def _copies_later(self) -> bool:
        """Whether misses that the CPU computes may be copied."""
        return self.copied_now == "none" or (self.copied_now in SPLIT and self.later)

    def _now(self, layer: int, misses: Sequence[int], rows: Sequence[int]) -> tuple[list[int], list[Action]]:
        """Return which misses the GPU computes in this visit, and their copies."""
        n, actions = self._n_now(layer, misses, rows), list[Action]()
        now: list[int] = []
        for expert in misses:
            if len(now) == n:
                break
            taken = self._take((layer, expert), DEMAND)
            if taken:
                self._publish([(layer, expert)])
                actions += taken
                now.append(expert)
        return now, actions

    def _n_now(self, layer: int, misses: Sequence[int], rows: Sequence[int]) -> int:
        if self.copied_now == "share":
            return copies_by_share(len(misses), self.share)
        if self.copied_now == "time" and misses:
            gpu, cpu = (sum(of[rows[e]] for e in misses) / len(misses) for of in (self._gpu_ns, self._cpu_ns))
            return copies_by_time(len(misses), self._copy_ns[layer], gpu, cpu, self._first_ns)
        return len(misses) if self.copied_now == "all" else 0

    def _for_later(self, layer: int, misses: Sequence[int], rows: Sequence[int]) -> list[Action]:
        """Copy those that are admitted, or remember them for the next step's begin."""
        if self.admission == "newest":
            self._seen[layer].update(dict.fromkeys(misses))
            return []
        bank, n = self._bank(layer), 0
        actions: list[Action] = []
        for unit in ((layer, expert) for expert in misses):
            if unit in bank.slot:
                continue
            if self.admission == "demand":
                self._missed[unit] = self._missed.get(unit, 0) + rows[unit[1]]
            if n != self.inserts and self._admitted(unit, bank) and (taken := self._take(unit, UPDATE)):
                actions += taken
                n += 1
        return actions

    def _admitted(self, unit: Unit, bank: Bank) -> bool:
        if self.admission == "demand":
            return self._missed[unit] >= self._wanted_misses(bank)
        if self.admission == "score" and not bank.free:
            victim = self._victim(bank)
            return victim is not None and self._scores.of(unit) > self._scores.of(victim) + self.kappa
        return True

    def _wanted_misses(self, bank: Bank) -> int:
        """Return after how many an expert is copied."""
        return self.admit_free if bank.free else max(self.admit_free, self.admit_full)

    def _idle(self, bank: Bank, among: Iterable[Unit] | None = None) -> Iterator[Unit]:
        """Give who may leave, in the order of the bank: nobody that the present visit uses, or that is on its way."""
        units = bank.slot if among is None else among
        return (unit for unit in units if unit in bank.there and unit not in self._visit.units and unit not in self._spared)

    def _victim(self, bank: Bank) -> Unit | None:
        """Return who leaves."""
        if self.victim == "lru":
            return next(self._idle(bank), None)
        return min(self._idle(bank), key=lambda unit: (self._scores.of(unit), bank.slot[unit]), default=None)

    def _take(self, unit: Unit, urgency: int) -> list[Action]:
        """Copy an expert into a free slot or a victim's; nothing if there is none, or if it has a slot."""
        bank = self._bank(unit[0])
        if unit in bank.slot:
            return []
        actions: list[Action] = []
        if bank.free:
            slot = heappop(bank.free)
        else:
            victim = self._victim(bank)
            if victim is None:
                return []
            slot = bank.leave(victim)
            actions.append(Drop(victim[0], [victim[1]], self._gpu))
        bank.enter(unit, slot)
        self._issued[unit] = self._step
        self._missed.pop(unit, None)
        return [*actions, Fetch(unit[0], [unit[1]], self._gpu, urgency, CACHE)]
