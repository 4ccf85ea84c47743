"""DAOP: experts swapped once a prompt, and decoding that predicts a layer ahead so that the CPU can begin early.

Y. Zhang, S. Aggarwal, T. Mitra, "DAOP: Data-Aware Offloading and Predictive Pre-Calculation for Efficient MoE Inference", DATE
2025; the authors released code.

Idea: what a prompt activates is what its answer will activate, so swap busy experts in during prefill and move nothing
afterwards. In decode an expert on the CPU is slow but its place is known: predict it one layer ahead, compute it on the previous
layer's state while the GPU is busy, and where a prediction would keep the CPU too busy, take a GPU expert instead.

| point | paper says | released code does | we do |
|---|---|---|---|
| start | most frequent experts of calibration, an equal share a layer, the rest to the globally most frequent | the same, counted in decode | the same (``placement``) |
| swap, prefill | Alg. 1: N/2 most loaded on the CPU with N/2 least loaded on the GPU, pair by pair | the same | the same, as far as both lists go; ``swap=False``: none |
| swap if | w_hot >= 1.05 w_cold | w_hot > 1.05 w_cold | ``swap_if: above``, else two idle experts swap; ``at-least`` as printed |
| prefill in chunks | not stated | whole prompts | one decision a prompt for each layer: ``swap_chunk: last``, with the rows of all its chunks, so that decode begins as after a whole prompt, or ``first`` |
| cold list | experts on the GPU | all experts; an idle one on the CPU takes a place, so the hottest may stay there | ``cold_list: gpu-only`` (paper), ``mixed`` (code) |
| cost of a swap | hidden behind computing | ordinary copies of pageable memory, in line with the kernels | ``swap_cost: overlapped`` (paper), ``serial`` (code: pair after pair, then the layer); ``pageable`` |
| the expert that leaves | moved to the CPU | moved to the CPU | copied back, and computed there when it has arrived; ``writeback=False``: the host keeps a copy |
| memory while swapping | not stated | - | overlapped: ``swap_buffers`` spare slots, so that both directions move at once |
| after the swaps | every expert where it is, in parallel | Fiddler's rule: an expert on the CPU with many rows is copied through one buffer and dropped | ``assignment: resident`` (paper), ``threshold`` (code, with the engine's costs) |
| its constants | - | ms a row on the CPU, ms a load: A100 5, 40 (Mixtral), 2.5, 25 (Phi), 16, 86 (8x22B); A6000 8.5, 210 (Mixtral), 3.5, 30 (Phi) | ``assignment: {name: fixed-threshold, cpu_ms: 5, load_ms: 40}`` |
| a prompt: its first token | swaps are hidden; the CPU's time is proportional to its rows | plans with the constants above | with those of an A6000, 256 tokens, 46.9 % cached: 62 s (68 s without swaps), 45 s by the code's rules (29 s); none is printed, and 512 tokens at the printed 4.52 a second take 113 s, which decoding alone fills |
| next request | not stated | starts from the swapped placement | the same; ``reset=True``: swaps start from the initial placement |
| first layers, decode | blocks 0..4: own gate | the same (``first_predict_layer`` 5) | the same |
| their order | "executed in parallel in their current locations" | CPU experts one by one, then GPU experts | ``serial=False`` in ``daop-paper``; ``True`` in ``daop-code`` (prefill: the CPU after the last copy) |
| later layers, decode | experts and weights as predicted from the layer before | the same; the own gate is never asked | the same; the own gate where there is no prediction in time |
| pre-calculation | CPU experts on the previous layer's state | the same, by a pool of two threads | the same, on the one CPU; ``precalculate=False``: own gates throughout |
| order on the CPU, block 4 | not stated | its own experts and the job for block 5 overlap | ``first_on_cpu: current``, or ``next`` |
| degradation | both of two predicted on the CPU: the lower gives way to the best on the GPU | the same | the same; ``degrade=False``: none |
| top-k above 2 | undefined | undefined | at most ``cpu_experts`` of a row stay on the CPU, top_k // 2 by default |
| batches | 1 | 1 | row by row, rows of one expert together |
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

from moesim.model import ModelSpec
from moesim.policies.algorithms.daop import SWAP_FACTOR
from moesim.policies.base import CACHE, PolicyBase, Range, cpu_of, gpu_of, idle_resident, layer_residents, slot_bytes
from moesim.policies.composition import PartSpec
from moesim.policies.daop_ahead import Ahead
from moesim.policies.daop_swaps import PromptSwaps, SwapRule
from moesim.policies.exchanging import LEAVING, Exchange
from moesim.policies.main_thread import Awaited, MainThread
from moesim.policies.part_names import make_part
from moesim.policies.parts import AssignmentPart, PlacementPart, Setup, source_needs
from moesim.policies.parts.assignment import Resident
from moesim.policy import (
    DEMAND,
    Action,
    Copy,
    Drop,
    Fetch,
    Fetched,
    LayerEnd,
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

PLACEHOLDER = "placeholder"  # of the one expert that is copied for one use
DECODE_FREQUENCY = {"name": "frequency-per-layer", "phase": "decode"}

_PREDICTION = -1  # in place of the expert: what is awaited is the prediction about that layer


class DaopParts(NamedTuple):
    """The parts of DAOP."""

    placement: PlacementPart
    assignment: AssignmentPart


class DaopPaper(PolicyBase):
    """Prefill swaps, then pre-calculation of predicted experts on the CPU, as the paper says (DAOP, DATE 2025).

    Not exact: predicted experts replace the routed ones, and those on the CPU read the state of the layer before. The replay is
    conditioned on the recorded routing, from which the hidden states would have diverged. Where weights are renormalised costs
    no time, and the gate that is not asked saves none. A prediction that scores only its best experts says nothing about the
    others: degradation then takes the one on the GPU with the lowest id. With several micro-batches the swaps are decided before the
    rows of the second are known.
    """

    paper = "DAOP (DATE 2025)"
    missing = (
        "serial: in the released code a copy through the buffer also waits for the kernels queued before it",
        "the thread pool of the pre-calculation, which shares the cores with the main thread",
        "the constants of the MI100 platform",
    )
    exact = False
    planned_loads = "whole"  # an expert is there, or all of its load is still to come
    oracles = MappingProxyType({"assignment": {"assignment": "exact"}})

    placement: PartSpec | PlacementPart = DECODE_FREQUENCY
    """Residents at the start; in a pool for all layers, so that a remainder of slots is used."""
    swap: bool = True
    """Swap hot experts for cold ones in prefill."""
    swap_factor: Annotated[float, Range(0)] = SWAP_FACTOR
    """By how much the hot one must be busier."""
    swap_if: Literal["above", "at-least"] = "above"
    """Whether exactly that much is enough."""
    cold_list: Literal["gpu-only", "mixed"] = "gpu-only"
    """Candidates to leave: experts on the GPU, or as the released code lists them."""
    swap_chunk: Literal["last", "first"] = "last"
    """With prefill in chunks, the one in which the swaps of a prompt are decided, by the rows up to then."""
    swap_cost: Literal["overlapped", "serial"] = "overlapped"
    """Copies beside all computing; or one pair after the other, out and in, before any expert of the layer runs."""
    swap_buffers: Annotated[int, Range(0)] = 1
    """Spare slots for experts that are leaving, if swaps are overlapped."""
    writeback: bool = True
    """Copy what leaves back to the host. False: the host has kept a copy, and leaving is free."""
    reset: bool = False
    """Each new batch of requests starts from the initial placement: swaps are chosen from there, and each layer moves what its
    present placement does not share with the outcome."""
    assignment: PartSpec | AssignmentPart = "resident"
    """Which device runs an expert in prefill after the swaps. What it sends to the GPU and is not there is copied through a
    buffer of one expert and dropped."""
    serial: bool = False
    """One thread does one thing after the other: in decode the CPU's experts, then the GPU's, where the layer's own gate is
    asked; in prefill the CPU's after the last copy has arrived."""
    first_predict_layer: Annotated[int, Range(1)] = 5
    """First layer (from 0) of which the predicted experts are executed."""
    precalculate: bool = True
    """Predict at all; False: own gates throughout."""
    degrade: bool = True
    """Replace predicted experts of which too many are on the CPU."""
    cpu_experts: Annotated[int, Range(0)] | None = None
    """Predicted experts of a row that may be on the CPU; None: half of top_k, rounded down."""
    source: str = "signal:gate_next1"
    """Where predictions come from."""
    first_on_cpu: Literal["current", "next"] = "current"
    """In the last layer with its own gate: its own CPU experts first, or those of the next layer (in the order in which the
    released code submits them; from the second such visit on, when it is known that a prediction comes)."""
    pageable: bool = False
    """Copies at the rate of pageable memory, whatever the experiment says."""

    @cached_property
    def parts(self) -> DaopParts:
        """Placement and assignment, built from their names at the first use."""
        return DaopParts(make_part("placement", self.placement), make_part("assignment", self.assignment))

    @property
    def streams(self) -> bool:
        """Whether the assignment may send an expert to the GPU that is not there."""
        return not isinstance(self.parts.assignment, Resident)

    @property
    def prefetches(self) -> bool:
        """It never does: its predictions run experts ahead on the CPU."""
        return False

    @property
    def listens(self) -> frozenset[type]:
        """Steps for their phase, routing and arrivals; predictions, Runs and layer ends where the options want them."""
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
        """The calibration table, and the signal that predicts."""
        signal = source_needs(self.source) if self.precalculate else frozenset()
        return signal.union(*(part.needs for part in self.parts))

    def transfer(self, model: ModelSpec) -> tuple[str, int | None] | None:
        """Return the curve of pageable memory where the copies are module moves."""
        return ("pageable", None) if self.pageable else None

    def place(self, view: View) -> Placement:
        """Fill all slots from calibration; add the buffers that the options ask for."""
        placement, assignment = self.parts
        model = view.model
        gpu = self._gpu = gpu_of(view, "daop")
        self._cpu = cpu_of(view, "daop")
        setup = Setup(view, gpu, self._cpu, [view.cache_slots(gpu)], per_layer=False)
        residents = placement.choose(setup)
        assignment.start(setup)
        initial = [bytes(e in here for e in range(model.n_experts)) for here in residents]
        rule = SwapRule(
            self.swap_factor, self.swap_if == "above", self.cold_list == "mixed", self.swap_chunk == "last", self.reset
        )
        self._swaps = PromptSwaps(rule, initial, model.top_k)
        self._on_gpu = self._swaps.on_gpu
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

    def evict(self, fetch: Fetch, view: View) -> tuple[int, int] | None:
        """Give up an expert in the buffer that has been computed; the rest leaves only in a swap."""
        return idle_resident(view, fetch) if fetch.pool == PLACEHOLDER else None

    def decide(self, event: Any, view: View) -> Iterable[Action]:
        """Swap and assign in prefill; predict, pre-calculate and execute in decode."""
        kind = type(event)
        if kind is Routed:
            return self._routed(event, view)
        if kind is Predicted:
            return self._predicted(event, view)
        if kind is Fetched:
            if event.device != self._gpu:
                actions = self._exchange.arrived(event.layer, event.expert, view)
                if event.layer == self._now and any(type(one) is Run and one.rows is None for one in actions):
                    self._thread.leave_out(event.expert)  # this Run takes the rows of all micro-batches so far
                return actions
            return self._happened((event.layer, event.expert, event.device), view)
        if kind is Ran:
            return self._happened((event.layer, event.experts[0], event.device), view)
        if kind is LayerEnd:
            held = layer_residents(view, self._gpu, PLACEHOLDER, event.layer)
            return (Drop(event.layer, held, self._gpu),) if held else ()
        return self._step_begin(event)

    def _step_begin(self, event: StepBegin) -> Iterable[Action]:
        self._decode = event.phase == "decode"
        self._now = -1  # the layer routed last in this step
        self._left: set[int] = set()  # experts of this layer that give way to others while it is computed
        self._thread.begin_step()
        self._ahead.begin_step(len(event.requests))
        self._swaps.begin_step(event)
        return ()

    def _routed(self, event: Routed, view: View) -> list[Action]:
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
            # Whatever the plan: the host runs what leaves beside the computing.
            leaving = [e for e in plan.gpu if e in self._left or self._exchange.is_leaving(layer, e)]
            gpu, cpu = [e for e in plan.gpu if e not in leaving], [*plan.cpu, *leaving]
        self._thread.add_experts(gpu, cpu)
        return actions + self._go_on(view)

    def _ask(self, event: Routed, view: View) -> list[Action]:
        """Note that a layer begins, and ask for the prediction about the next one."""
        self._now, self._left = event.layer, set()
        ahead = event.layer + 1
        if not (self.precalculate and self._decode and self.first_predict_layer <= ahead < view.model.n_layers):
            return []
        if ahead == self.first_predict_layer and self.first_on_cpu == "next" and self._ahead.answered:
            self._thread.wait_for([(ahead, _PREDICTION, "")])
        return [Predict(event.step, ahead, self.source, view.dense_device(event.layer))]

    def _swap(self, event: Routed, view: View) -> list[Action]:
        """Begin the swaps of a layer beside its computing, or leave them to the thread."""
        layer = event.layer

        def may_swap(new: int, old: int) -> bool:
            return not self._exchange.is_leaving(layer, new) and view.is_resident(layer, old, self._gpu)

        pairs = self._swaps.decide(event, may_swap)
        if self.swap_cost == "serial":
            self._thread.add_swaps(pairs)
            return []
        if not event.mb:
            self._left = {old for _, old in pairs}
        return self._exchange.start(layer, pairs, view)

    # ---------------------------------------------------------------------------------------------------- the thread
    def _happened(self, what: Awaited, view: View) -> Iterable[Action]:
        """Go on if this was the last that the thread has waited for."""
        return self._go_on(view) if self._thread.happened(what) else ()

    def _go_on(self, view: View) -> list[Action]:
        """Do what is to be done in this layer, until something must be waited for."""
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

    def _predicted(self, event: Predicted, view: View) -> Iterable[Action]:
        """Submit the CPU's share of the next layer once all its rows are predicted, on the state of this one."""
        share = self._ahead.add(event, self._now)
        if share is None:
            return ()
        runs = [Run(event.layer, (expert,), self._cpu, rows, self._now) for expert, rows in share.items()]
        return [*self._exchange.when_there(runs), *self._happened((event.layer, _PREDICTION, ""), view)]


DaopCode = DaopPaper.preset(
    "DaopCode",
    "Prefill swaps and pre-calculation as the released code does them, mostly one thing after the other (DAOP, DATE 2025).",
    cold_list="mixed",
    swap_cost="serial",
    assignment="threshold",
    serial=True,
    pageable=True,
)
