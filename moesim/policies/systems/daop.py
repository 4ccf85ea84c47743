"""DAOP: experts swapped once a prompt, and decoding that predicts a layer ahead.

Y. Zhang, S. Aggarwal, T. Mitra, "DAOP: Data-Aware Offloading and Predictive Pre-Calculation for Efficient MoE Inference", DATE
2025; the authors released code.

Idea: what a prompt activates, its answer will: swap busy experts in during prefill, move nothing afterwards. In decode the CPU
computes predicted experts on the previous layer's state; where that would keep it too busy, a GPU expert stands in.

| point | paper says | released code does | we do |
|---|---|---|---|
| start | most frequent of calibration, equal shares, the rest to the globally most frequent | the same, counted in decode | the same (``placement``) |
| swap, prefill | Alg. 1: N/2 most loaded on the CPU with N/2 least loaded on the GPU, in pairs | the same | the same, as far as both lists go; ``swap=False``: none |
| swap if | w_hot >= 1.05 w_cold | w_hot > 1.05 w_cold | ``swap_if: above``, else two idle experts swap; ``at-least`` as printed |
| prefill in chunks | not stated | whole prompts | ``swap_chunk``: one decision a prompt, by the rows of all chunks (``last``) or of the ``first`` |
| cold list | experts on the GPU | all; an idle one on the CPU takes a place, so the hottest may stay there | ``cold_list: gpu-only`` (paper), ``mixed`` (code) |
| cost of a swap | hidden behind computing | copies of pageable memory, in line with the kernels | ``swap_cost: overlapped`` (paper), ``serial`` (code: pair after pair, then the layer); ``pageable`` |
| the expert that leaves | moved to the CPU | moved to the CPU | copied back, computed there once arrived; ``writeback=False``: the host has a copy |
| memory while swapping | not stated | - | overlapped: ``swap_buffers`` spare slots, so that both directions move |
| after the swaps | every expert where it is, in parallel | Fiddler's rule: an expert with many rows is copied through one buffer and dropped | ``assignment: resident`` (paper), ``threshold`` (code, with the engine's costs) |
| its constants | - | ms a row on the CPU, ms a load: A100 5, 40 (Mixtral), 2.5, 25 (Phi), 16, 86 (8x22B); A6000 8.5, 210 (Mixtral), 3.5, 30 (Phi) | ``assignment: {name: fixed-threshold, cpu_ms: 5, load_ms: 40}`` |
| a prompt: its first token | swaps are hidden; the CPU's time is proportional to its rows | plans with the constants above | with those of an A6000, 256 tokens, 46.9 % cached: 62 s (68 s without swaps), 45 s by the code's rules (29 s); none is printed, and 512 tokens at the printed 4.52 a second take 113 s, which decoding alone fills |
| next request | not stated | starts from the swapped placement | the same; ``reset=True``: from the initial one |
| first layers, decode | blocks 0..4: own gate | the same (``first_predict_layer`` 5) | the same |
| their order | "executed in parallel in their current locations" | CPU experts one by one, then GPU experts | ``serial``: False in ``daop-paper``, True in ``daop-code`` (prefill: the CPU after the last copy) |
| later layers, decode | experts and weights as predicted from the layer before | the same; the own gate is never asked | the same; the own gate where no prediction is in time |
| pre-calculation | CPU experts on the previous layer's state | the same, by two threads | the same, on the one CPU; ``precalculate=False``: own gates |
| order on the CPU, block 4 | not stated | its own experts and the job for block 5 overlap | ``first_on_cpu: current``, or ``next`` |
| degradation | both of two predicted on the CPU: the lower gives way to the best on the GPU | the same | the same; ``degrade=False``: none |
| top-k above 2 | undefined | undefined | at most ``cpu_experts`` of a row on the CPU, top_k // 2 by default |
| batches | 1 | 1 | row by row, rows of one expert together |
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Literal, NamedTuple

from moesim.model import ModelSpec
from moesim.policies.base import CACHE, ForOneUse, cpu_of, gpu_of, slot_bytes
from moesim.policies.options import option
from moesim.policies.parts import AssignmentOption, AssignmentPart, PlacementOption, PlacementPart, Setup, Unit, source_needs
from moesim.policies.parts.assignment import Resident
from moesim.policies.registry import make_part
from moesim.policy import (
    DEMAND,
    UPDATE,
    Action,
    Copies,
    Copy,
    Drop,
    Fetch,
    Fetched,
    LayerEnd,
    Move,
    Placement,
    Pool,
    Predict,
    Predicted,
    Ran,
    Routed,
    Run,
    StepBegin,
    View,
)

Pair = tuple[int, int]  # (expert that comes to the GPU, expert that leaves it)
Awaited = tuple[int, int, str]  # (layer, expert, device): an arrival on a GPU, the end of a Run on a CPU


SWAP_FACTOR = 1.05  # SwapInOut of Algorithm 1 and of the released code


def prefill_swaps(
    loads: Sequence[int],
    on_gpu: Sequence[int],
    *,
    factor: float = SWAP_FACTOR,
    strict: bool = True,
    mixed: bool = False,
    prompt_tokens: int = 1,
) -> list[tuple[int, int]]:
    """Pair hot experts on the CPU with cold ones on the GPU (Algorithm 1), hottest first.

    ``strict``: swap if ``hot > factor * cold`` (code), else if at least as many (paper), so that two idle experts swap. ``mixed``: the
    code's cold list, over all experts with the key ``rows * (1 if on the GPU else prompt_tokens)``: an idle one on the CPU has key 0,
    and its pair is passed over. Both lists have at most ``n_experts // 2``.

    >>> loads, on_gpu = [30, 2, 10, 8, 0, 25, 5, 16], [0, 1, 1, 1, 0, 0, 0, 1]
    >>> prefill_swaps(loads, on_gpu)
    [(0, 1), (5, 3)]

    In the released code the idle expert 4 takes the place opposite the hottest, which then stays on the CPU:

    >>> prefill_swaps(loads, on_gpu, mixed=True, prompt_tokens=48)
    [(5, 1)]
    """
    ids = range(len(loads))
    hot = [e for e in ids if not on_gpu[e]]
    cold = list(ids) if mixed else [e for e in ids if on_gpu[e]]
    size = len(loads) // 2
    hot = sorted(hot, key=lambda e: -loads[e])[:size]
    cold = sorted(cold, key=lambda e: loads[e] * (1 if on_gpu[e] else prompt_tokens))[:size]
    pairs = []
    for busy, idle in zip(hot, cold, strict=False):
        least = factor * loads[idle]
        if on_gpu[idle] and (loads[busy] > least if strict else loads[busy] >= least):
            pairs.append((busy, idle))
    return pairs


def swaps_from(
    present: Sequence[int], start: Sequence[int], pairs: Sequence[tuple[int, int]], loads: Sequence[int]
) -> list[tuple[int, int]]:
    """Return pairs (newcomer, leaver) that reach the outcome of swaps chosen for ``start``.

    >>> swaps_from([0, 0, 1, 1], [1, 1, 0, 0], [(2, 1)], [4, 0, 5, 1])
    [(0, 3)]
    """
    # Busiest and idlest first.
    wanted = list(start)
    for hot, cold in pairs:
        wanted[hot], wanted[cold] = 1, 0
    ids = range(len(loads))
    new = sorted((e for e in ids if wanted[e] > present[e]), key=lambda e: -loads[e])
    old = sorted((e for e in ids if wanted[e] < present[e]), key=lambda e: loads[e])
    return list(zip(new, old, strict=True))


LEAVING = "leaving"  # pool of experts on their way back to the host


class Exchange:
    """Copies between a GPU's cache and the host, by ``writeback`` of what leaves, else without."""

    # `n_buffers` experts make room, in the pool `LEAVING`, before they are gone.

    def __init__(self, gpu: str, host: str, writeback: bool, n_buffers: int) -> None:
        self._gpu, self._host = gpu, host
        self._writeback = writeback
        self._n_buffers = n_buffers
        self._leaving: dict[Unit, list[Run]] = {}  # -> Runs on the host that wait for it
        self._buffered: set[Unit] = set()

    def is_leaving(self, layer: int, expert: int) -> bool:
        """Whether the host has not got an expert yet."""
        return (layer, expert) in self._leaving

    def start(self, layer: int, pairs: Iterable[tuple[int, int]], view: View) -> list[Action]:
        """Swap pairs of a newcomer and an expert on the GPU, neither of them under way."""
        actions: list[Action] = []
        for new, old in pairs:
            if self._writeback:
                self._leaving[layer, old] = []
                actions += self._to_buffers(view)
                actions.append(Fetch(layer, (old,), self._host, UPDATE, source=self._gpu))
            actions.append(Drop(layer, (old,), self._gpu))
            actions.append(Fetch(layer, (new,), self._gpu, DEMAND, CACHE))
        return actions

    def arrived(self, layer: int, expert: int, view: View) -> list[Action]:
        """Return what an arrival on the host sets free: the next buffer, and Runs there."""
        self._buffered.discard((layer, expert))
        runs = self._leaving.pop((layer, expert))
        return [*self._to_buffers(view), *runs]

    def when_there(self, runs: Sequence[Run]) -> list[Action]:
        """Return Runs on the host, of one expert each, but keep those whose expert is still leaving."""
        if not self._leaving:
            return list(runs)
        now: list[Action] = []
        for run in runs:
            kept = self._leaving.get((run.layer, run.experts[0]))
            if kept is None:
                now.append(run)
            elif run.rows is not None or run not in kept:  # without rows, the one that is kept takes all
                kept.append(run)
        return now

    def _to_buffers(self, view: View) -> list[Action]:
        """Assign buffers to who leaves, unless it left during a decision."""
        actions: list[Action] = []
        for layer, expert in self._leaving:
            if len(self._buffered) >= self._n_buffers:
                break
            if (layer, expert) not in self._buffered and view.is_resident(layer, expert, self._gpu):
                self._buffered.add((layer, expert))
                actions.append(Move(layer, (expert,), self._gpu, LEAVING))
        return actions


class MainThread:
    """Swaps of a layer pair by pair, then its experts device by device; waits in between."""

    def __init__(self) -> None:
        self.begin_step()

    def begin_step(self) -> None:
        self._swaps: deque[Pair] = deque()
        self._experts: dict[str, list[int]] = {"gpu": [], "cpu": []}
        self._awaited: set[Awaited] = set()

    def add_swaps(self, pairs: Iterable[Pair]) -> None:
        self._swaps.extend(pairs)

    def add_experts(self, gpu: Iterable[int], cpu: Iterable[int]) -> None:
        """Execute these; one that waits already takes the rows of all micro-batches so far."""
        taken = {*self._experts["gpu"], *self._experts["cpu"]}
        self._experts["gpu"] += [e for e in gpu if e not in taken]
        self._experts["cpu"] += [e for e in cpu if e not in taken]

    def leave_out(self, expert: int) -> None:
        """Leave out an expert whose rows another Run takes."""
        for experts in self._experts.values():
            if expert in experts:
                experts.remove(expert)

    def wait_for(self, what: Iterable[Awaited]) -> None:
        """Do nothing more before all of these have happened."""
        self._awaited.update(what)

    def happened(self, what: Awaited) -> bool:
        """Note that something has happened; return whether it was awaited."""
        waited = what in self._awaited
        self._awaited.discard(what)
        return waited

    def steps(self, *, cpu_first: bool) -> Iterator[tuple[Pair | None, str, list[int]]]:
        """Yield what to do now: a pair to swap, or a device and the experts it executes."""
        while self._swaps and not self._awaited:
            yield self._swaps.popleft(), "", []
        for device in ("cpu", "gpu") if cpu_first else ("gpu", "cpu"):
            if self._experts[device] and not self._awaited:
                experts, self._experts[device] = self._experts[device], []
                yield None, device, experts


def degraded(predicted: Sequence[int], scores: Sequence[float], on_gpu: Sequence[int], allowed: int) -> list[int]:
    """Replace predicted experts of which too many are on the CPU ("graceful degradation").

    The lowest of those on the CPU beyond ``allowed`` give way to the best on the GPU not predicted, as far as there are any. Paper and
    code have two predicted experts and ``allowed`` 1.

    >>> degraded([4, 0], [0.2, 0.1, 0.15, 0.05, 0.5], [0, 1, 1, 0, 0], allowed=1)
    [4, 2]
    >>> degraded([1, 4], [0.2, 0.3, 0.15, 0.05, 0.25], [0, 1, 1, 0, 0], allowed=1)
    [1, 4]
    """
    absent = [place for place, expert in enumerate(predicted) if not on_gpu[expert]]
    n_extra = len(absent) - allowed
    if n_extra <= 0:
        return list(predicted)
    free = [e for e, here in enumerate(on_gpu) if here and e not in predicted]
    best = sorted(free, key=lambda e: -scores[e])[:n_extra]
    chosen = list(predicted)
    for place, expert in zip(absent[len(absent) - len(best) :], best, strict=True):
        chosen[place] = expert
    return chosen


class Ahead:
    """Collects and degrades the next layer's predictions, and keeps the GPU's share until then."""

    def __init__(self, on_gpu: Sequence[Sequence[int]], top_k: int, allowed: int | None) -> None:
        self._on_gpu = on_gpu
        self._top_k = top_k
        self._allowed = allowed  # experts of a row that may be on the CPU; None: any number
        self.answered = False  # whether a prediction has come in this run
        self.begin_step(0)

    def begin_step(self, n_rows: int) -> None:
        self._n_rows = n_rows
        self._said: list[Predicted] = []  # about the next layer, by micro-batch
        self._planned: dict[tuple[int, int], dict[int, list[int]]] = {}  # (layer, micro-batch) -> GPU expert -> rows

    def take(self, layer: int, mb: int) -> dict[int, list[int]] | None:
        """Return the GPU's rows by expert; None: the layer's own gate decides."""
        return self._planned.pop((layer, mb), None)

    def add(self, event: Predicted, routed: int) -> dict[int, list[int]] | None:
        """Return the CPU's rows by expert once all rows are predicted; None: not yet, or too late."""
        if not event.mb:
            self._said = []
        if event.layer <= routed or event.mb != len(self._said) or event.ids.shape[1] < self._top_k:
            return None
        self._said.append(event)
        if sum(len(one.ids) for one in self._said) < self._n_rows:
            return None
        self.answered = True
        on_gpu = self._on_gpu[event.layer]
        ahead: dict[int, list[int]] = {}
        first = 0
        for said in self._said:
            rows_of: dict[int, list[int]] = {}
            for row, chosen in enumerate(self._chosen(said, on_gpu), first):
                for expert in chosen:
                    (rows_of if on_gpu[expert] else ahead).setdefault(expert, []).append(row)
            self._planned[event.layer, said.mb] = dict(sorted(rows_of.items()))
            first += len(said.ids)
        return dict(sorted(ahead.items()))

    def _chosen(self, event: Predicted, on_gpu: Sequence[int]) -> list[list[int]]:
        found: list[list[int]] = event.ids.tolist()
        chosen = [ids[: self._top_k] for ids in found]
        if self._allowed is None:
            return chosen
        for row, ids in enumerate(chosen):
            if sum(not on_gpu[e] for e in ids) > self._allowed:
                if event.scores is not None and event.scores.shape[1] == len(on_gpu):
                    scores = event.scores[row].tolist()
                else:  # in the order of the ids that were given, then all others alike
                    scores = [0] * len(on_gpu)
                    for place, expert in enumerate(found[row]):
                        scores[expert] = len(found[row]) - place
                chosen[row] = degraded(ids, scores, on_gpu, self._allowed)
        return chosen


PLACEHOLDER = "placeholder"  # of the one expert that is copied for one use
DECODE_FREQUENCY = {"name": "frequency-per-layer", "phase": "decode"}

_PREDICTION = -1  # in place of the expert: what is awaited is the prediction about that layer


ColdList = Literal["gpu-only", "mixed"]
SwapCost = Literal["overlapped", "serial"]


class DaopParts(NamedTuple):
    """The parts of DAOP."""

    placement: PlacementPart
    assignment: AssignmentPart


class DaopPaper(ForOneUse):
    """Prefill swaps, then predicted experts computed early on the CPU (DAOP, DATE 2025).

    Not exact: predicted experts replace the routed ones, and those on the CPU read the state of the layer before, while the replay
    keeps the recorded routing. Renormalising weights costs no time, and a gate that is not asked saves none. Where a prediction scores
    its best experts only, degradation takes the lowest id on the GPU. With several micro-batches the first alone decides the swaps.
    """

    paper = "DAOP (DATE 2025)"
    missing = (
        "serial: in the released code a copy through the buffer also waits for the kernels queued before it",
        "the thread pool of the pre-calculation, which shares the cores with the main thread",
        "the constants of the MI100 platform",
    )
    exact = False
    _pool = PLACEHOLDER
    planned_loads = "whole"  # an expert is there, or all of its load is still to come
    oracles = MappingProxyType({"assignment": {"assignment": "exact"}})

    placement: PlacementOption = option(
        DECODE_FREQUENCY, "Residents at the start; in a pool for all layers, so that a remainder of slots is used."
    )
    swap: bool = option(True, "Swap hot experts for cold ones in prefill.")
    swap_factor: float = option(SWAP_FACTOR, "By how much the hot one must be busier.", ge=0)
    swap_if: Literal["above", "at-least"] = option("above", "Whether exactly that much is enough.")
    cold_list: ColdList = option("gpu-only", "Candidates to leave: experts on the GPU, or as the released code lists them.")
    swap_chunk: Literal["last", "first"] = option(
        "last", "With prefill in chunks, the one in which the swaps of a prompt are decided, by the rows up to then."
    )
    swap_cost: SwapCost = option(
        "overlapped", "Copies during all computing; or one pair after the other, out and in, before any expert of the layer runs."
    )
    swap_buffers: int = option(1, "Spare slots for experts that are leaving, if swaps are overlapped.", ge=0)
    writeback: bool = option(True, "Copy what leaves back to the host. False: the host has kept a copy, and leaving is free.")
    reset: bool = option(
        False,
        "Each new batch of requests starts from the initial placement: swaps are chosen from there, and each "
        "layer moves what its present placement does not share with the outcome.",
    )
    assignment: AssignmentOption = option(
        "resident",
        "Which device runs an expert in prefill after the swaps. What it sends to the GPU and is not there is "
        "copied through a buffer of one expert and dropped.",
    )
    serial: bool = option(
        False,
        "One thread does one thing after the other: in decode the CPU's experts, then the GPU's, where the "
        "layer's own gate is asked; in prefill the CPU's after the last copy has arrived.",
    )
    first_predict_layer: int = option(5, "First layer (from 0) of which the predicted experts are executed.", ge=1)
    precalculate: bool = option(True, "Predict at all; False: own gates throughout.")
    degrade: bool = option(True, "Replace predicted experts of which too many are on the CPU.")
    cpu_experts: int | None = option(
        None, "Predicted experts of a row that may be on the CPU; None: half of top_k, rounded down.", ge=0
    )
    source: str = option("signal:gate_next1", "Where predictions come from.")
    first_on_cpu: Literal["current", "next"] = option(
        "current",
        "In the last layer with its own gate: its own CPU experts first, or those of the next layer (in the "
        "order in which the released code submits them; from the second such visit on, when it is known that "
        "a prediction comes).",
    )
    pageable: bool = option(False, "Copies at the rate of pageable memory, whatever the experiment says.")

    @cached_property
    def parts(self) -> DaopParts:
        return DaopParts(make_part("placement", self.placement), make_part("assignment", self.assignment))

    @property
    def streams(self) -> bool:
        """Whether the assignment may send an expert to the GPU that is not there."""
        return not isinstance(self.parts.assignment, Resident)

    @property
    def prefetches(self) -> bool:
        """False: its predictions run experts ahead on the CPU."""
        return False

    @property
    def listens(self) -> frozenset[type]:
        events: set[type] = {StepBegin, Routed, Fetched}
        if self.precalculate:
            events.add(Predicted)
        if self.serial:
            events.add(Ran)
        if self.streams:
            events.add(LayerEnd)
        return frozenset(events)

    @property
    def needs(self) -> frozenset[str]:
        signal = source_needs(self.source) if self.precalculate else frozenset()
        return signal.union(*(part.needs for part in self.parts))

    def transfer(self, model: ModelSpec) -> Copies | None:
        return Copies("pageable") if self.pageable else None

    def place(self, view: View) -> Placement:
        """Fill all slots from calibration; add the buffers that the options ask for."""
        placement, assignment = self.parts
        model = view.model
        gpu, self._cpu = gpu_of(view, "daop"), cpu_of(view, "daop")
        self._gpu, slots = gpu, min(view.cache_slots(gpu), model.n_layers * model.n_experts)
        setup = Setup(view, gpu, self._cpu, [slots], per_layer=False)
        residents = placement.choose(setup)
        assignment.start(setup)
        self._initial = [bytes(e in here for e in range(model.n_experts)) for here in residents]
        self._on_gpu = [bytearray(row) for row in self._initial]  # which copies under way may still have to reach
        self._first_chunk, self._last_chunk = True, True
        self._rows = [[0] * model.n_experts for _ in residents]  # of the present prompt, chunk by chunk
        allowed = model.top_k // 2 if self.cpu_experts is None else self.cpu_experts
        self._ahead = Ahead(self._on_gpu, model.top_k, allowed if self.degrade else None)
        self._load_ns = [view.costs.fetch_ns(view.host, gpu, None, layer) for layer in range(model.n_layers)]
        n_buffers = self.swap_buffers if self.swap and self.swap_cost == "overlapped" and self.writeback else 0
        self._exchange = Exchange(gpu, view.host, self.writeback, n_buffers)
        self._thread = MainThread()
        pools = [Pool(gpu, CACHE, sum(len(here) * model.expert_bytes(at) for at, here in enumerate(residents)))]
        if n_buffers:
            pools.append(Pool(gpu, LEAVING, n_buffers * slot_bytes(view)))
        if self.streams:
            pools.append(Pool(gpu, PLACEHOLDER, slot_bytes(view)))
        return Placement([Copy(layer, here, gpu) for layer, here in enumerate(residents) if here], pools)

    def on_fetched(self, event: Fetched, view: View) -> Iterable[Action]:
        """Go on after an arrival on the GPU; let go what waits for one on the host."""
        if event.device == self._gpu:
            return self._happened((event.layer, event.expert, event.device), view)
        actions = self._exchange.arrived(event.layer, event.expert, view)
        if event.layer == self._now and any(type(one) is Run and one.rows is None for one in actions):
            self._thread.leave_out(event.expert)  # this Run takes the rows of all micro-batches so far
        return actions

    def on_ran(self, event: Ran, view: View) -> Iterable[Action]:
        return self._happened((event.layer, event.experts[0], event.device), view)

    def on_step_begin(self, event: StepBegin, view: View) -> Iterable[Action]:
        self._decode = event.phase == "decode"
        self._now = -1  # the layer routed last in this step
        self._left: set[int] = set()  # experts of this layer that give way to others while it is computed
        self._thread.begin_step()
        self._ahead.begin_step(len(event.requests))
        self._first_chunk, self._last_chunk = self._last_chunk, event.last_chunk
        if self._first_chunk and not self._decode:
            self._rows = [[0] * len(rows) for rows in self._rows]
        return ()

    def on_routed(self, event: Routed, view: View) -> list[Action]:
        """Swap and assign in prefill; predict and execute in decode."""
        layer = event.layer
        actions: list[Action] = [] if event.mb else self._ask(event, view)
        planned = self._ahead.take(layer, event.mb)
        if planned is not None:
            return actions + [Run(layer, (expert,), self._gpu, rows) for expert, rows in planned.items()]
        on_gpu = self._on_gpu[layer]
        if self._decode:
            gpu, cpu = [e for e in event.active if on_gpu[e]], [e for e in event.active if not on_gpu[e]]
        else:
            if self.swap:
                actions += self._swap(event, view)
            waiting = [0 if here else self._load_ns[layer] for here in on_gpu]
            plan = self.parts.assignment.assign(layer, event.rows, waiting)
            # Whatever the plan: the host runs what leaves during the computing.
            leaving = [e for e in plan.gpu if e in self._left or self._exchange.is_leaving(layer, e)]
            gpu, cpu = [e for e in plan.gpu if e not in leaving], [*plan.cpu, *leaving]
        self._thread.add_experts(gpu, cpu)
        return actions + self._go_on(view)

    def _ask(self, event: Routed, view: View) -> list[Action]:
        """Begin a layer, and ask for the prediction about the next."""
        self._now, self._left = event.layer, set()
        ahead = event.layer + 1
        if not (self.precalculate and self._decode and self.first_predict_layer <= ahead < view.model.n_layers):
            return []
        if ahead == self.first_predict_layer and self.first_on_cpu == "next" and self._ahead.answered:
            self._thread.wait_for([(ahead, _PREDICTION, "")])
        return [Predict(event.step, ahead, self.source, view.dense_device(event.layer))]

    def _swap(self, event: Routed, view: View) -> list[Action]:
        """Begin a layer's swaps during its computing, or leave them to the thread."""
        pairs = self._decide_swaps(event, view)
        if self.swap_cost == "serial":
            self._thread.add_swaps(pairs)
            return []
        if not event.mb:
            self._left = {old for _, old in pairs}
        return self._exchange.start(event.layer, pairs, view)

    def _decide_swaps(self, event: Routed, view: View) -> list[Pair]:
        """Count rows, and decide once, as a chunk begins; who still moves stays where it is going."""
        layer = event.layer
        rows = self._rows[layer] = [old + new for old, new in zip(self._rows[layer], event.rows, strict=True)]
        if event.mb or not (self._last_chunk if self.swap_chunk == "last" else self._first_chunk):
            return []
        on_gpu = self._on_gpu[layer]
        start = self._initial[layer] if self.reset else on_gpu
        pairs = prefill_swaps(
            rows, start, factor=self.swap_factor, strict=self.swap_if == "above", mixed=self.cold_list == "mixed",
            prompt_tokens=sum(rows) // view.model.top_k,
        )  # fmt: skip
        if self.reset:
            pairs = swaps_from(on_gpu, start, pairs, rows)
        found = []
        for new, old in pairs:
            if not self._exchange.is_leaving(layer, new) and view.is_resident(layer, old, self._gpu):
                on_gpu[new], on_gpu[old] = 1, 0
                found.append((new, old))
        return found

    def _happened(self, what: Awaited, view: View) -> Iterable[Action]:
        return self._go_on(view) if self._thread.happened(what) else ()

    def _go_on(self, view: View) -> list[Action]:
        """Do what is to be done in this layer, until something must be awaited."""
        layer = self._now
        actions: list[Action] = []
        for pair, device, experts in self._thread.steps(cpu_first=self._decode):
            if pair is not None:
                self._thread.wait_for([(layer, pair[0], self._gpu)])
                actions += self._exchange.start(layer, [pair], view)
            else:
                actions += self._run_cpu(layer, experts) if device == "cpu" else self._run_gpu(layer, experts, view)
        return actions

    def _run_gpu(self, layer: int, experts: Sequence[int], view: View) -> list[Action]:
        gpu, on_gpu = self._gpu, self._on_gpu[layer]
        here = view.residency(layer, gpu)
        streamed = [e for e in experts if not on_gpu[e]]
        kept = [e for e in experts if on_gpu[e]]
        actions: list[Action] = []
        if streamed:
            actions.append(Fetch(layer, streamed, gpu, DEMAND, PLACEHOLDER))
        if self.serial:  # with several micro-batches an expert may still be in the buffer
            self._thread.wait_for((layer, e, gpu) for e in streamed if not here[e])
        actions.append(Run(layer, sorted(kept, key=lambda e: not here[e]) + streamed, gpu))
        return actions

    def _run_cpu(self, layer: int, experts: Sequence[int]) -> list[Action]:
        if self.serial and self._decode:
            self._thread.wait_for((layer, e, self._cpu) for e in experts)
        return self._exchange.when_there([Run(layer, (e,), self._cpu) for e in experts])

    def on_predicted(self, event: Predicted, view: View) -> Iterable[Action]:
        """Submit the CPU's share of the next layer, on the state of this one."""
        share = self._ahead.add(event, self._now)
        if share is None:
            return ()
        runs = [Run(event.layer, (expert,), self._cpu, rows, self._now) for expert, rows in share.items()]
        return [*self._exchange.when_there(runs), *self._happened((event.layer, _PREDICTION, ""), view)]


class DaopCode(DaopPaper):
    """DAOP's swaps and pre-calculation in the order of its released code (DAOP, DATE 2025)."""

    cold_list: ColdList = option("mixed")
    swap_cost: SwapCost = option("serial")
    assignment: AssignmentOption = option("threshold")
    serial: bool = option(True)
    pageable: bool = option(True)
