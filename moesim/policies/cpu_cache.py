"""Prompts that a cache beside the CPU does not serve: which they are, and who computes them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Literal, NamedTuple

from moesim.policies.base import STAGING, layer_residents
from moesim.policies.parts import Unit
from moesim.policy import CACHE, DEMAND, Action, Drop, Fetch, Fetched, LayerEnd, Ran, Routed, Run, StepBegin, View


class Bank:
    """Slots of one pool: who has which, the one used longest ago first."""

    def __init__(self, slots: int) -> None:
        self.slot: dict[Unit, int] = {}  # of those that are there or on their way
        self.there: set[Unit] = set()  # those that count as there
        self.free = list(range(slots))  # a heap

    def enter(self, unit: Unit, slot: int) -> None:
        """Give a unit a slot, at the recent end; it does not count as there yet."""
        self.slot[unit] = slot

    def touch(self, unit: Unit) -> None:
        """Move it to the recent end."""
        self.slot[unit] = self.slot.pop(unit)

    def leave(self, unit: Unit) -> int:
        """Take the slot from a unit, and return it."""
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
        """Return the score of now."""
        score, at = self._scores.get(unit, (0.0, 0))
        return score * 2 ** ((at - self._visits[unit[0]]) / self._half_life)


class InSequence:
    """Holds the Runs of a layer until those before them are over; those of several micro-batches go together.

    With ``cpu_beside`` nothing is held for the CPU.
    """

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
    """Return how many of n misses to copy and compute on the GPU, by the times of one expert on the link and on the CPU.

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
    """Return how many of m misses to copy, by the link's share p of the rates of link and CPU, counted in 1/65536.

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
    for pair in hardware.contention:
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
    """Says which visits pass by a cache, and serves them; the cache learns nothing of them.

    The GPU computes micro-batches from ``offload_rows`` rows on only, if it is to compute any.
    """

    def __init__(self, prompts: Prompts, cached_rows: int | None, gpu: str, cpu: str, offload_rows: int = 1) -> None:
        self._prompts = prompts
        self._cached_rows = cached_rows
        self._offload_rows = offload_rows
        self._gpu, self._cpu = gpu, cpu
        self._large = False
        self.stages = prompts in STREAMED  # through a pool of its own
        self._unfit = (-1, -1)  # step and layer of the latest visit that did not fit

    def step_begin(self, event: StepBegin) -> bool:
        """Say whether all of a step passes by."""
        rows = self._cached_rows
        self._large = event.phase == "prefill" if rows is None else len(event.requests) > rows
        self._large &= self._prompts != "cached"
        return self._large and self._prompts != "fitting"

    def passes(self, event: Routed, slots: int) -> bool:
        """Say whether a visit passes by; of several micro-batches the first decides."""
        if not self._large or self._prompts != "fitting":
            return self._large
        if event.mb == 0 and len(event.active) > slots:
            self._unfit = event.step, event.layer
        return self._unfit == (event.step, event.layer)

    def serve(self, event: Routed, slotted: Container[Unit]) -> list[Action]:
        """Leave a visit to the CPU, or to the GPU by what has a slot, maybe on its way to it, and copies for one use."""
        layer = event.layer
        if self._prompts == "bypass" or len(event.experts) < self._offload_rows:
            return [Run(layer, event.active, self._cpu)]
        own = [e for e in event.active if (layer, e) in slotted]
        others = [e for e in event.active if (layer, e) not in slotted]
        fetches = [Fetch(layer, own, self._gpu, DEMAND, CACHE), Fetch(layer, others, self._gpu, DEMAND, STAGING)]
        return [*fetches, Run(layer, [*own, *others], self._gpu)]

    def layer_end(self, event: LayerEnd, view: View) -> list[Action]:
        """Drop what was copied for one use."""
        held = layer_residents(view, self._gpu, STAGING, event.layer)
        return [Drop(event.layer, held, self._gpu)] if held else []
