"""HybriMoE: experts split between CPU and GPU by simulating the layer, prefetch by impact, and a cache that follows scores.

"HybriMoE: Hybrid CPU-GPU Scheduling and Cache Management for Efficient MoE Inference", 2025; code: PKU-SEC-Lab/HybriMoE.

Idea: which expert should run where depends on what the other devices are doing. So every layer is played through first, with
one timeline for the GPU, the CPU and the link, and the same play tells which prefetch would help. The cache keeps what the
router has recently scored high, chosen or not. Paper and code differ so much that there are two policies.

| point | paper says | released code does | we do |
|---|---|---|---|
| plan | three timelines; the one with the earliest completion acts; the CPU steals cached experts with few rows | a list with the GPU at the head and the CPU at the tail; transfers delay the head only | ``queues`` in ``hybrimoe-paper``, ``hss`` in ``hybrimoe-code`` |
| "earliest completion" | of what, is not said | - | ``timeline``: of the next operation (``completion``; agrees with its Fig. 5), or the timeline that is ``free`` first |
| ties | not stated | GPU | GPU, CPU, link; ``ties`` |
| completion of a transfer | leaves the GPU's time out | - | the same; ``count_compute`` |
| the busiest expert is on its way | not stated | - | the GPU takes the busiest that is there; ``overtake`` |
| where it is used | prefill and decode | steps of one row; else everything is on the GPU | each as it says; ``multi_row: cpu-and-gpu`` of ``hss`` |
| a prompt: loads | planned and prefetched as in decode; Table III has no gain of the cache there | all experts run on the GPU; a buffer is filled, and cleared before its use | as each says, the buffer left out |
| a prompt: what stays | not stated | every load, in the place of another, by the first row's scores | every load, by the rows' mean scores in ``hybrimoe-paper``, the first row's in ``hybrimoe-code`` |
| shared experts | not in the plan | on the GPU before the routed ones, not in the plan | the same; ``shared_in_plan`` of ``queues`` |
| an expert that is on its way | not stated | in the cache from the issue of its copy on, so its GPU run waits for it | ``queues``: there when the link says; ``hss``: ``cached_from``: ``issue``, or ``start`` of its transfer |
| costs | measured at the start | built-in constants | the engine's; ``costs: code`` of ``hss`` |
| order in decode | as planned | CPU job, shared experts, loads (cached first, then as planned), prefetch, GPU experts as each arrives | the same |
| cache | per layer by its scores, "across layers" in its list of contributions; alpha not printed | per layer, alpha 0.5, p = 2 top_k | ``mrs`` with the code's constants; ``scope`` in ``hybrimoe-paper`` |
| credit for scores | eq. 3: the p largest scores of the full softmax, each to its own expert | the p experts with the largest scores get these by id: the largest to the lowest id, and so on | eq. 3 in ``hybrimoe-paper``; ``credit``: ``by-id`` (the older of two versions of the code) or ``own`` in ``hybrimoe-code`` |
| decay | (1 - alpha) of the old score | the same, also of the p experts that are credited (our reading of what is known of it) | the same |
| slots that do not divide by the layers | not stated | as many in each layer | dealt out, some layers have one more; ``slots_split: equal`` as the code |
| ties in the cache | not stated | least recently used first | the same; the active experts of a layer are marked together, ascending |
| several rows | not stated | the first row's scores | ``tokens``: ``mean`` of the rows in ``hybrimoe-paper``, ``first`` in ``hybrimoe-code`` |
| no full scores in the trace | - | - | weights of the chosen experts, p = top_k; the result says so |
| when a victim is named | not stated | when the load is issued | when the load could start; at issue in ``hybrimoe-code`` |
| experts of the present layer as victims | by their scores, which have moved before | the same | the same, run or not; ``victims: unrouted-first`` of ``mrs``: only if nothing else is there |
| the victim is in use | not stated | overwritten | leaves once it is idle; until then its load lies next to the cache, where top_k experts (at least 2) have room; ``hybrimoe-code`` counts it in ``counters["overwrites"]`` |
| prefetch | three layers ahead by their gates, by the gain in the plan; no formula, no limit | by the cache's scores, next layer, steps of one row, if the GPU has work; 0 experts by default | ``impact-driven``, of each layer the 8 highest different row counts (``candidates``); ``mrs-score`` with ``prefetch_size`` |
| where prefetch stops | not stated | ``prefetch_size`` | the last one ends before the planned end of the layer; ``budget`` |
| "the largest scores, no residents" | - | not clear whether residents count | ``over: all``: they do, and are skipped; or ``non-resident`` |
| late prefetch | not stated | the next layer's GPU work waits for all that are outstanding | ``wait_prefetch`` in ``hybrimoe-code``, steps of one row |
| prefetched experts | not stated | in the cache, as any other | the same |
| start | not stated | experts 0, 1, 2 ... of each layer | the same |
| scheduling time | not stated (DALI's Table 6 gives it 3 %) | - | the experiment's ``decision_us``, at each routed layer; 0 unless set |
| hit rate | over all active experts | over those that the GPU runs | ``resident_rate`` is over all active experts, whoever runs them |

Ablations: ``assignment: resident`` (the cached on the GPU, the rest on the CPU) or any other, ``prefetch: none``, ``replacement: lru``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

from moesim.policies.algorithms.caching import SlotsSplit
from moesim.policies.base import CACHE, Range
from moesim.policies.composed import Composed
from moesim.policies.composition import PartSpec, Prefetch
from moesim.policies.declare import option
from moesim.policies.impact_part import ImpactDriven
from moesim.policies.no_prefetch import NoPrefetch
from moesim.policies.parts import PrefetchPart, ReplacementPart, Unit
from moesim.policies.queue_parts import Queues
from moesim.policies.score_parts import MRS, Credit, MRSScore
from moesim.policy import PREFETCH, Action, Drop, Fetch, Fetched, Placement, Run, StepBegin, View

PAPER = "HybriMoE (2025)"
WARM_UP = "the warm-up that measures costs: the engine's are known from the start"


def _same_reading(policy: Any, view: View) -> None:
    """Let the prefetch simulate with the assignment's reading of the paper."""
    _, assignment, prefetch, _ = policy.parts
    if isinstance(assignment, Queues) and isinstance(prefetch, ImpactDriven):
        prefetch.reading = assignment.reading


HybriMoEPaper = Composed.preset(
    "HybriMoEPaper",
    "Three simulated timelines, prefetch by impact over three layers, and minus recent score (HybriMoE's paper, 2025).",
    paper=PAPER,
    missing=(WARM_UP,),
    fixed=("staging_slots", "load_order", "cache_only"),
    adjust=_same_reading,
    load_order="plan",
    assignment="queues",
    prefetch=option(PartSpec | PrefetchPart, "impact-driven"),
    replacement="mrs",
)


class HybriMoECode(Composed, fixed=("scope", "staging_slots", "load_order", "cache_only")):
    """The two-ended split of single rows, prefill on the GPU, and minus recent score (HybriMoE's released code, 2025).

    Its counter ``overwrites`` counts loads for which the code would have overwritten an expert that is still needed: one that the GPU
    runs in this layer, or one whose own load is not over.

    A load's victim is named when the load is issued, among the experts that are there, and leaves at once if idle. One that
    the GPU still has to run leaves after that; where every place belongs to a load that is not over, a demand load waits for
    one of them to be used, and a prefetch is left out. A prefetch that arrives while a decision is being made (where that
    takes time) lets the GPU's experts go at once.
    """

    paper = PAPER
    missing = (
        WARM_UP,
        "an expert copied in three pieces, so that its first product can start before the last has arrived",
        "the prefetch during prefill, of the layer after the next into a buffer that is cleared before it is used",
        "what overwriting an expert in use does to the output",
        "defects: routing weights of other experts, shared experts computed twice, no scores for Mixtral and Qwen2",
    )
    victims_named = "at issue"

    _overwrites = 0

    load_order = "plan"

    assignment = "hss"
    prefetch: Prefetch | None = None  # type: ignore[assignment]
    """Another part than the code's, ``"mrs-score"`` of ``prefetch_size`` experts."""
    replacement: PartSpec | ReplacementPart | None = None  # type: ignore[assignment]
    """Another part than the code's, ``"mrs"`` by the first row."""
    prefetch_size: Annotated[int, Range(0)] = 0
    """Experts of the next layer to prefetch; not read with another prefetch."""
    credit: Credit = "by-id"
    """Whose the recent scores are in the code's cache and prefetch: as the released code writes them, or as eq. 3 says. Not
    read by parts that are named, which have an option of their own."""
    wait_prefetch: bool = True
    """In steps of one row, the GPU's experts wait for all prefetches that were issued before their layer was routed."""
    slots_split: SlotsSplit = "spread"

    def own_part(self, kind: str) -> Any:
        """Build the code's part."""
        if kind == "replacement":
            return MRS(tokens="first", credit=self.credit)
        return MRSScore(size=self.prefetch_size, credit=self.credit) if self.prefetch_size else NoPrefetch()

    @property
    def _waits(self) -> bool:
        prefetch = self.parts.prefetch
        return self.wait_prefetch and not prefetch.transient and not isinstance(prefetch, NoPrefetch)

    @property
    def listens(self) -> frozenset[type]:
        """What its parts want; arrivals and steps where it may have to wait for prefetches."""
        return super().listens | (frozenset({Fetched, StepBegin}) if self._waits else frozenset())

    @property
    def counters(self) -> Mapping[str, int]:
        """Victims of the latest run that were in use, as ``"overwrites"``."""
        return {"overwrites": self._overwrites}

    def place(self, view: View) -> Placement:
        """Start the parts, with nothing issued."""
        placement = super().place(view)
        self._slots = self._cache_slots(view, per_layer=True)
        # Experts of each layer that are in the cache or were promised a place in it, by decisions made so far.
        self._inside: list[set[int]] = [set() for _ in range(view.model.n_layers)]
        for copy in placement.copies:
            self._inside[copy.layer].update(copy.experts)
        self._outstanding: set[Unit] = set()  # prefetches that have not arrived
        self._awaited: set[Unit] = set()  # those for which the held experts wait
        self._held: list[Unit] = []  # experts for the GPU, in order
        self._late: list[Unit] = []  # of these, the ones to be loaded in the place of another one held
        self._doomed: list[Unit] = []  # the ones in whose place
        self._overwrites = 0
        return placement

    # ------------------------------------------------------------------------------------------------------ events
    def decide(self, event: Any, view: View) -> Iterable[Action]:
        """Answer as composed; then name the victims of what is loaded, and hold back what must wait."""
        if type(event) is Fetched:
            return self._arrived(event, view)
        actions = super().decide(event, view)
        return self._issue(actions, view) if actions else ()

    def _step_begin(self, event: StepBegin) -> Iterable[Action]:
        self._rows = len(event.requests)  # of the step
        return super()._step_begin(event)

    def _issue(self, actions: Iterable[Action], view: View) -> list[Action]:
        actions = list(actions)
        running = [(a.layer, e) for a in actions if isinstance(a, Run) and a.device == self._gpu for e in a.experts]
        hold = bool(running and self._outstanding and self._waits and self._rows == 1)
        issued: list[Action] = []
        for action in actions:
            if isinstance(action, Fetch) and action.pool == CACHE:
                issued += self._load_into_cache(action, running, hold, view)
            elif isinstance(action, Run) and hold and action.device == self._gpu:
                self._held, self._awaited = running, set(self._outstanding)
            else:
                if isinstance(action, Drop):
                    self._inside[action.layer].difference_update(action.experts)
                issued.append(action)
        if self._doomed and not hold and not self._held:
            issued += self._drop_doomed()  # after the Run that still needs them
        return issued

    def _load_into_cache(self, fetch: Fetch, running: Sequence[Unit], hold: bool, view: View) -> list[Action]:
        """Return a Fetch of what can be loaded now, after a Drop of what leaves for it."""
        layer, inside = fetch.layer, self._inside[fetch.layer]
        leaving: list[int] = []
        now: list[int] = []
        for expert in fetch.experts:
            if expert in inside:  # under way as a prefetch; if the layer is held, that is waited for anyway
                now += [] if hold else [expert]
                continue
            blocked = False
            if len(inside) >= self._slots[layer]:
                victim = self.parts.replacement.victim(fetch._replace(experts=(expert,)), view)
                named = victim is not None and victim[1] in inside
                blocked = not named or victim in running
                self._overwrites += blocked
                if victim is not None and named:
                    inside.discard(victim[1])
                    if blocked:
                        self._doomed.append(victim)
                    else:
                        leaving.append(victim[1])
                elif fetch.urgency == PREFETCH:
                    continue
            inside.add(expert)
            if blocked and hold:
                self._late.append((layer, expert))
            else:
                now.append(expert)
        if fetch.urgency == PREFETCH and self._waits:
            self._outstanding.update((layer, e) for e in now if not view.is_resident(layer, e, self._gpu))
        actions: list[Action] = [Drop(layer, leaving, self._gpu)] if leaving else []
        return [*actions, fetch._replace(experts=now)] if now else actions

    def _drop_doomed(self) -> list[Action]:
        doomed, self._doomed = self._doomed, []
        return [Drop(layer, (expert,), self._gpu) for layer, expert in doomed]

    def _arrived(self, event: Fetched, view: View) -> Iterable[Action]:
        unit = (event.layer, event.expert)
        self._outstanding.discard(unit)
        self._awaited.discard(unit)
        return self._release(view) if self._held and not self._awaited else ()

    def _release(self, view: View) -> list[Action]:
        """Run what was held. A load that is not queued yet, because its decision is still being made, runs on arrival."""
        gpu, late = self._gpu, self._late
        layer = self._held[0][0]
        there = [u for u in self._held if view.is_resident(*u, gpu) or view.is_pending(*u, gpu)]
        self._held = [u for u in self._held if u not in there and u not in late]
        self._late = []
        actions: list[Action] = [Run(layer, [e for _, e in there], gpu)] if there else []
        actions += self._drop_doomed()
        if late:
            experts = [e for _, e in late]
            actions += [Fetch(layer, experts, gpu), Run(layer, experts, gpu)]
        return actions

    def evict(self, fetch: Fetch, view: View) -> tuple[int, int] | None:
        """Name a victim for a load that found no place when it was issued; a place that was promised is about to be free."""
        if fetch.pool == CACHE and len(self._inside[fetch.layer]) <= self._slots[fetch.layer]:
            return None
        unit = super().evict(fetch, view)
        if unit is not None and fetch.pool == CACHE:
            self._inside[unit[0]].discard(unit[1])
        return unit
