"""A cache next to the CPU: hits run on the GPU, misses on the CPU or after a copy.

The caches of engines that compute misses on the CPU differ in a few decisions. Each is an option of `BackgroundCache`, and no
option is a system: those are in files of their own. They fix the options, and replace a method where an engine has a rule that
no option has. What they share stands first: slots, fading scores, rates, the order of a visit, and prompts that pass by.

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

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from heapq import heappop
from typing import TYPE_CHECKING, Literal, NamedTuple

from moesim.policies.base import (
    STAGING,
    CostTable,
    PolicyBase,
    cpu_of,
    gpu_of,
    idle_resident,
    layer_residents,
    slot_bytes,
    slots_per_layer,
    staging_pool,
)
from moesim.policies.options import option
from moesim.policies.parts import Unit
from moesim.policies.parts.replacement import PresentVisit
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
    Ran,
    Routed,
    Run,
    StepBegin,
    View,
    Work,
)

if TYPE_CHECKING:
    from moesim.model import ModelSpec


class Bank:
    """Slots of one pool: who has which, the one used longest ago first."""

    def __init__(self, slots: int) -> None:
        self.slot: dict[Unit, int] = {}  # of those that are there or on their way
        self.there: set[Unit] = set()  # those that count as there
        self.free = list(range(slots))  # a heap

    def enter(self, unit: Unit, slot: int) -> None:
        """Assign a slot to a unit, at the recent end; it does not count as there yet."""
        self.slot[unit] = slot

    def touch(self, unit: Unit) -> None:
        self.slot[unit] = self.slot.pop(unit)

    def leave(self, unit: Unit) -> int:
        self.there.discard(unit)
        return self.slot.pop(unit)


class DecayedScores:
    """Uses of each expert, each half as much after so many visits of its layer."""

    def __init__(self, n_layers: int, half_life: float) -> None:
        self._half_life = half_life
        self._visits = [0] * n_layers
        self._scores: dict[Unit, tuple[float, int]] = {}  # score, and the visit at which it was that

    def used(self, layer: int, experts: Sequence[int], *, begins: bool) -> None:
        """Count one use of each in this visit, which ``begins`` or goes on with another micro-batch."""
        self._visits[layer] += begins
        for unit in ((layer, expert) for expert in experts):
            self._scores[unit] = self.of(unit) + 1, self._visits[layer]

    def of(self, unit: Unit) -> float:
        score, at = self._scores.get(unit, (0.0, 0))
        return score * 2 ** ((at - self._visits[unit[0]]) / self._half_life)


class InSequence:
    """Holds a layer's Runs until those before them are over; not the CPU's if ``cpu_beside``."""

    # Runs of several micro-batches go together.

    def __init__(self, gpu: str, cpu: str, *, cpu_beside: bool = False) -> None:
        self._gpu, self._cpu = gpu, cpu
        self._cpu_beside = cpu_beside
        self._layer = -1
        self._copies: set[int] = set()  # on their way
        self._on_gpu: dict[int, None] = {}
        self._running: set[int] = set()  # on the GPU
        self._on_cpu: dict[int, None] = {}

    def hold(self, layer: int, copies: Iterable[int], on_gpu: Iterable[int], on_cpu: Iterable[int]) -> list[Action]:
        """Take the experts of a micro-batch; return what may begin."""
        self._layer = layer
        self._copies.update(copies)
        self._on_gpu.update(dict.fromkeys(on_gpu))
        if self._cpu_beside:
            at_once = sorted(on_cpu)
            return [*([Run(layer, at_once, self._cpu)] if at_once else []), *self._go_on()]
        self._on_cpu.update(dict.fromkeys(on_cpu))
        for expert in self._on_gpu:  # the GPU takes the rows of all micro-batches so far
            self._on_cpu.pop(expert, None)
        return self._go_on()

    def happened(self, event: Fetched | Ran) -> list[Action]:
        """Note that a copy has arrived, or what has run; return what may begin."""
        if event.layer == self._layer and event.device == self._gpu:
            if isinstance(event, Ran):
                self._running.difference_update(event.experts)
            else:
                self._copies.discard(event.expert)
        return self._go_on()

    def _go_on(self) -> list[Action]:
        if self._copies or self._running:
            return []
        held, device = (self._on_gpu, self._gpu) if self._on_gpu else (self._on_cpu, self._cpu)
        experts = sorted(held)
        held.clear()
        if device == self._gpu:
            self._running.update(experts)
        return [Run(self._layer, experts, device)] if experts else []


SHARE_UNIT = 1 << 16


def copies_by_time(n_misses: int, copy: float, gpu: float, cpu: float, cpu_first: float = 0, both: float = 0) -> int:
    """Return how many of n misses to copy to the GPU, by one expert's times on link and CPU.

    The f with the least max(f copy + gpu; cpu_first + (n - f) cpu if n > f; n both if 0 < f < n); of equals the largest
    (moe-speed-of-light, rule of its FETCH table). ``both`` is the time of one if link and CPU read the host's memory together.

    >>> [copies_by_time(n, copy=530, gpu=37, cpu=220.8, cpu_first=20, both=176.7) for n in range(5)]
    [0, 0, 0, 1, 1]
    """

    def time(f: int) -> float:
        on_cpu = n_misses - f
        return max(f * copy + gpu, cpu_first + on_cpu * cpu if on_cpu else 0, n_misses * both if 0 < f < n_misses else 0)

    return min(range(n_misses, -1, -1), key=time)


def copies_by_share(n_misses: int, share: float) -> int:
    """Return how many of m misses to copy, by the link's share p of the rates, in 1/65536.

    Of floor(m p) and the next the one with the smaller max(f (1 - p), (m - f) p); of equals the smaller (FreeToken).

    >>> [copies_by_share(m, 0.281) for m in range(11)]
    [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 3]
    """
    p = round(share * SHARE_UNIT)
    low = n_misses * p // SHARE_UNIT
    return min((low, min(low + 1, n_misses)), key=lambda f: max(f * (SHARE_UNIT - p), (n_misses - f) * p))


MILLION = 1_000_000


class BothRates(NamedTuple):
    """Rates of the CPU and the link, each as a share of its rate alone, while both are busy."""

    cpu: float
    link: float


def both_rates(view: View, cpu: str, gpu: str) -> BothRates:
    """Read the rates off the machine's profile; 1 each where it says nothing about the pair."""
    hardware = view.costs.hardware
    links = {link.name for link in hardware.links if (link.src, link.dst) == (view.host, gpu)}
    for pair in view.costs.contention:
        ends = {pair.a: pair.a_rate_ppm, pair.b: pair.b_rate_ppm}
        on_link = links & ends.keys()
        if on_link and f"{cpu}.experts" in ends:
            return BothRates(ends[f"{cpu}.experts"] / MILLION, ends[on_link.pop()] / MILLION)
    return BothRates(1, 1)


Prompts = Literal["bypass", "read-only", "fitting", "cached"]
STREAMED: tuple[Prompts, ...] = ("read-only", "fitting")
"""With these the GPU computes what is copied for one use."""
LLAMA_CPP_OFFLOAD_ROWS = 32
"""From which on llama.cpp copies weights of the host for one use (op-offload; ggml-org/llama.cpp PR 18535)."""
LLAMA_CPP_PROMPT_ROWS = 512
"""Rows of a micro-batch of llama.cpp (``--ubatch-size``): longer prompts go in several."""


class PastTheCache:
    """Serves visits that pass by a cache, which learns nothing of them."""

    # The GPU computes micro-batches from `offload_rows` rows on only, if it is to compute any.

    def __init__(self, prompts: Prompts, cached_rows: int | None, gpu: str, cpu: str, offload_rows: int = 1) -> None:
        self._prompts = prompts
        self._cached_rows = cached_rows
        self._offload_rows = offload_rows
        self._gpu, self._cpu = gpu, cpu
        self._large = False
        self.stages = prompts in STREAMED  # through a pool of its own
        self._unfit = (-1, -1)  # step and layer of the latest visit that did not fit

    def step_begin(self, event: StepBegin) -> bool:
        """Return whether all of a step passes by the cache."""
        rows = self._cached_rows
        self._large = event.phase == "prefill" if rows is None else len(event.requests) > rows
        self._large &= self._prompts != "cached"
        return self._large and self._prompts != "fitting"

    def passes(self, event: Routed, slots: int) -> bool:
        """Return whether a visit passes by the cache; of several micro-batches the first decides."""
        if not self._large or self._prompts != "fitting":
            return self._large
        if event.mb == 0 and len(event.active) > slots:
            self._unfit = event.step, event.layer
        return self._unfit == (event.step, event.layer)

    def serve(self, event: Routed, slotted: Container[Unit]) -> list[Action]:
        """Leave a visit to the CPU, or to the GPU by occupied slots and copies for one use."""
        layer = event.layer
        if self._prompts == "bypass" or len(event.experts) < self._offload_rows:
            return [Run(layer, event.active, self._cpu)]
        own = [e for e in event.active if (layer, e) in slotted]
        others = [e for e in event.active if (layer, e) not in slotted]
        fetches = [Fetch(layer, own, self._gpu, DEMAND, CACHE), Fetch(layer, others, self._gpu, DEMAND, STAGING)]
        return [*fetches, Run(layer, [*own, *others], self._gpu)]

    def layer_end(self, event: LayerEnd, view: View) -> list[Action]:
        held = layer_residents(view, self._gpu, STAGING, event.layer)
        return [Drop(event.layer, held, self._gpu)] if held else []


SPLIT = ("share", "time")


class BackgroundCache(PolicyBase):
    """Cache next to the CPU, which computes misses or splits them with the link."""

    _name = "background-cache"  # in messages
    _for_cpu: str | None = None  # operation of the host before the CPU computes experts
    _embedding_on_cpu = False  # where tokens are looked up

    copied_now: Literal["none", "all", "share", "time"] = option(
        "none",
        "Misses that the GPU computes in their own visit, once they are copied: as many as balance the rates "
        "or the times of link and CPU. The CPU computes the others, and what finds no slot.",
    )
    share: float = option(0.5, "The link's rate over the sum of the rates of link and CPU.", ge=0, le=1)
    later: bool = option(True, "What the CPU computes during such copies may be copied for later visits, too.")
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
        more = {Ran} if not self.overlap else set()
        return frozenset({StepBegin, Routed, Fetched, *more, *([LayerEnd] if self.prefill in STREAMED else [])})

    def place(self, view: View) -> Placement:
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
        """Return the server of prompts that pass by a cache of which a layer can have so many slots."""
        return PastTheCache(self.prefill, self.cached_rows, self._gpu, self._cpu)

    @property
    def counters(self) -> Mapping[str, int]:
        """Hits and misses by what counts as there; the records count all that is on the GPU."""
        return self._counts

    def _new_bank(self, slots: int, model: ModelSpec) -> Bank:
        return Bank(slots)

    def _bank(self, layer: int) -> Bank:
        return self._banks[layer if self.scope == "per-layer" else 0]

    def on_routed(self, event: Routed, view: View) -> Iterable[Action]:
        """Split what is routed, unless the visit passes by the cache."""
        bank = self._bank(event.layer)
        past = self._past.passes(event, len(bank.slot) + len(bank.free))
        return self._past.serve(event, bank.slot) if past else self._split(event)

    def on_fetched(self, event: Fetched, view: View) -> Iterable[Action]:
        if self.publish == "arrival":
            self._publish([(event.layer, event.expert)])
        return self._sequence.happened(event) if self._sequence is not None else ()

    def on_ran(self, event: Ran, view: View) -> Iterable[Action]:
        return self._sequence.happened(event) if self._sequence is not None else ()

    def on_layer_end(self, event: LayerEnd, view: View) -> Iterable[Action]:
        return self._past.layer_end(event, view)

    def evict(self, fetch: Fetch, view: View) -> Unit | None:
        """Return a copy for one use; cache victims are dropped as their successor's copy is issued."""
        return idle_resident(view, fetch) if fetch.pool == STAGING else None

    def on_step_begin(self, event: StepBegin, view: View) -> Iterable[Action]:
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
        """Copy each layer's newest misses; one that is there or on its way uses its turn, too."""
        self._visit = PresentVisit()
        actions: list[Action] = []
        for layer, seen in enumerate(self._seen):
            turns = list(reversed(seen))[: self.inserts]
            for expert in turns:
                actions += self._take((layer, expert), UPDATE)
            seen.clear()
        return actions

    def _split(self, event: Routed) -> list[Action]:
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
        if self._for_cpu and (on_cpu or lent):
            actions = [Work(self._for_cpu, self._cpu), *actions]
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
        return self.admit_free if bank.free else max(self.admit_free, self.admit_full)

    def _idle(self, bank: Bank, among: Iterable[Unit] | None = None) -> Iterator[Unit]:
        """Yield possible victims in the bank's order, none in the present visit or on its way."""
        units = bank.slot if among is None else among
        return (unit for unit in units if unit in bank.there and unit not in self._visit.units and unit not in self._spared)

    def _victim(self, bank: Bank) -> Unit | None:
        if self.victim == "lru":
            return next(self._idle(bank), None)
        return min(self._idle(bank), key=lambda unit: (self._scores.of(unit), bank.slot[unit]), default=None)

    def _take(self, unit: Unit, urgency: int) -> list[Action]:
        """Copy an expert that has no slot into a free one or a victim's, if there is any."""
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


class FilledBetweenSteps(PolicyBase):
    """A cache of slots of each layer that llama.cpp's forks fill between certain steps."""

    prompt_rows = LLAMA_CPP_PROMPT_ROWS
    each_layer = ("lookup",)
    overlap: bool

    def _begin(self, name: str, view: View, past: tuple[int, int]) -> tuple[list[int], Placement]:
        """Return each layer's slots and the empty cache; ``past``: rows cached, rows for the GPU."""
        gpu = self._gpu = gpu_of(view, name)
        self._cpu, self._host = cpu_of(view, name), view.host
        slots = slots_per_layer(view, gpu, name, 0)
        self._sequence = None if self.overlap else InSequence(gpu, self._cpu)
        self._past = PastTheCache("read-only", past[0], gpu, self._cpu, past[1])
        pool = Pool(gpu, CACHE, [n * slot_bytes(view) for n in slots], per_layer=True)
        return slots, Placement((), [pool, staging_pool(view, gpu, None)], {("embedding", -1): self._cpu})

    def _run(self, layer: int, on_gpu: Sequence[int], on_cpu: Sequence[int]) -> list[Action]:
        work: list[Action] = [] if on_cpu else [Work("split", self._gpu)]
        if self._sequence is not None:
            return [*work, *self._sequence.hold(layer, (), on_gpu, on_cpu)]
        return [*work, Run(layer, sorted(on_gpu), self._gpu), Run(layer, sorted(on_cpu), self._cpu)]

    def on_ran(self, event: Fetched | Ran, view: View) -> list[Action]:
        return self._sequence.happened(event) if self._sequence is not None else []

    def evict(self, fetch: Fetch, view: View) -> Unit | None:
        return idle_resident(view, fetch) if fetch.pool == STAGING else None
