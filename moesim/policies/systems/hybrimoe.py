"""HybriMoE: layers split by simulation, prefetch by impact, and a cache by recent scores.

"HybriMoE: Hybrid CPU-GPU Scheduling and Cache Management for Efficient MoE Inference", 2025; code: PKU-SEC-Lab/HybriMoE.

Idea: play every layer through first, with a timeline each for GPU, CPU and link; the same play shows which prefetch would help.
The cache keeps what the router scored high of late. Paper and code differ so much that there are two policies.

| point | paper says | released code does | we do |
|---|---|---|---|
| plan | three timelines; the one with the earliest completion acts; the CPU steals cached experts with few rows | a list, the GPU at its head, the CPU at its tail; transfers delay the head only | ``queues`` in ``hybrimoe-paper``, ``hss`` in ``hybrimoe-code`` |
| "earliest completion" | of what, is not said | - | ``timeline``: of the next operation (``completion``; agrees with its Fig. 5), or the one ``free`` first |
| ties | not stated | GPU | GPU, CPU, link; ``ties`` |
| completion of a transfer | without the GPU's time | - | the same; ``count_compute`` |
| the busiest expert is on its way | not stated | - | the GPU takes the busiest that is there; ``overtake`` |
| where it is used | prefill and decode | steps of one row; else all on the GPU | each as it says; ``multi_row: cpu-and-gpu`` of ``hss`` |
| a prompt: loads | as in decode; Table III has no gain of the cache there | all on the GPU; a buffer is filled, and cleared before its use | each as it says, without the buffer |
| a prompt: what stays | not stated | every load, in the place of another, by the first row's scores | every load, by the mean scores (``hybrimoe-paper``) or the first row's (``hybrimoe-code``) |
| shared experts | not in the plan | on the GPU before the routed, not in the plan | the same; ``shared_in_plan`` of ``queues`` |
| an expert that is on its way | not stated | cached from the issue of its copy on; its GPU run waits | ``queues``: there when the link says; ``hss``: ``cached_from``: ``issue``, or ``start`` of its transfer |
| costs | measured at the start | built-in constants | the engine's; ``costs: code`` of ``hss`` |
| order in decode | as planned | CPU job, shared experts, loads (cached first, then as planned), prefetch, GPU experts on arrival | the same |
| cache | per layer by its scores, "across layers" in its contributions; alpha not printed | per layer, alpha 0.5, p = 2 top_k | ``mrs`` with the code's constants; ``scope`` in ``hybrimoe-paper`` |
| credit for scores | eq. 3: the p largest of the full softmax, each to its own expert | the same scores by id: the largest to the lowest id, and so on | eq. 3 in ``hybrimoe-paper``; ``credit``: ``by-id`` (the older of two versions) or ``own`` in ``hybrimoe-code`` |
| decay | (1 - alpha) of the old score | the same, also of those credited (our reading) | the same |
| slots that do not divide by the layers | not stated | as many in each layer | some layers have one more; ``slots_split: equal`` as the code |
| ties in the cache | not stated | least recently used first | the same; a layer's active experts are marked together, ascending |
| several rows | not stated | the first row's scores | ``tokens``: ``mean`` in ``hybrimoe-paper``, ``first`` in ``hybrimoe-code`` |
| no full scores in the trace | - | - | weights of the chosen, p = top_k; the result says so |
| when a victim is named | not stated | when the load is issued | when it could start; at issue in ``hybrimoe-code`` |
| experts of the present layer as victims | by their scores, which have moved before | the same | the same, run or not; ``victims: unrouted-first`` of ``mrs``: only if nothing else is there |
| the victim is in use | not stated | overwritten | leaves once idle, its load lies next to the cache (room for top_k, at least 2); ``hybrimoe-code`` counts ``overwrites`` |
| prefetch | three layers ahead by their gates, by the gain in the plan; no formula, no limit | by the cache's scores, next layer, steps of one row, if the GPU has work; 0 by default | ``impact-driven``, of each layer the 8 highest different row counts (``candidates``); ``mrs-score`` with ``prefetch_size`` |
| where prefetch stops | not stated | ``prefetch_size`` | the last ends before the planned end of the layer; ``budget`` |
| "the largest scores, no residents" | - | unclear whether residents count | ``over: all``: they count and are skipped; or ``non-resident`` |
| late prefetch | not stated | the next layer's GPU work waits for all outstanding | ``wait_prefetch`` in ``hybrimoe-code``, steps of one row |
| prefetched experts | not stated | in the cache, as any other | the same |
| start | not stated | experts 0, 1, 2 ... of each layer | the same |
| scheduling time | not stated (3 % in DALI's Table 6) | - | ``decision_us`` of the experiment, at each routed layer; 0 unless set |
| hit rate | over all active experts | over those that the GPU runs | ``resident_rate``: over all active, whoever runs them |

Ablations: ``assignment: resident`` (the cached on the GPU, the rest on the CPU) or any other, ``prefetch: none``,
``replacement: lru``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from moesim.policies.algorithms.hybrimoe import (
    CODE_COSTS,
    CODE_CPU_PER_ROW,
    PAPER,
    Ahead,
    PerRow,
    Reading,
    Rows,
    Timings,
    impact_driven,
    queue_layer_plan,
    queue_makespan,
    recent_scores,
    recent_weights,
    replay,
    two_ended_plan,
)
from moesim.policies.base import CACHE, CostTable, SlotsSplit
from moesim.policies.composed import Composed, Parts
from moesim.policies.options import option
from moesim.policies.parts import AssignmentOption, Part, Plan, PrefetchOption, ReplacementOption, Setup, Unit, source_needs
from moesim.policies.parts.prefetch import NoPrefetch, Over, add_rows
from moesim.policies.parts.replacement import LRU, Victims
from moesim.policy import PREFETCH, Action, Drop, Fetch, Fetched, Placement, Predict, Predicted, Routed, Run, StepBegin, View
from moesim.trace.stats.caches import MRS_ALPHA


def layer_timings(setup: Setup) -> list[Timings]:
    """Return each layer's costs of operations; layers share the tables of compute times."""
    view, gpu, cpu = setup.view, setup.gpu, setup.cpu
    costs = view.costs
    gpu_ns, cpu_ns = CostTable(view, gpu), CostTable(view, cpu) if cpu else None
    first = costs.first_extra_ns(gpu), costs.first_extra_ns(cpu) if cpu else 0
    return [Timings(costs.fetch_ns(view.host, gpu, None, layer), gpu_ns, cpu_ns, *first) for layer in range(view.model.n_layers)]


class Queues(Part):
    """HybriMoE's paper: a plan from three simulated timelines, of GPU, CPU and link."""

    uses_cpu = True

    timeline: Literal["completion", "free"] = option(
        "completion", "The timeline that acts next: whose operation would complete first, or which is free first."
    )
    ties: Literal["gpu", "cpu", "link"] = option("gpu", "Which timeline wins among equals; the others follow as GPU, CPU, link.")
    count_compute: bool = option(False, "A transfer is not complete before its expert could have been computed.")
    overtake: bool = option(True, "The GPU takes another expert while the one with the most rows is still on its way.")
    shared_in_plan: bool = option(
        False, "The GPU begins with the layer's shared experts, which the paper's algorithm does not know of."
    )

    @property
    def reading(self) -> Reading:
        return Reading(self.timeline, self.ties, self.count_compute, self.overtake)

    def start(self, setup: Setup) -> None:
        self._timings, self._reading = layer_timings(setup), self.reading
        self._costs, self._gpu, self._top_k = setup.view.costs, setup.gpu, setup.view.model.top_k

    def assign(self, layer: int, loads: Sequence[int], waiting: Sequence[int]) -> Plan:
        costs = self._timings[layer]
        shared = self._costs.shared_ns(self._gpu, sum(loads) // self._top_k) if self.shared_in_plan else 0
        return queue_layer_plan(loads, waiting, costs, shared, self._reading)


class TwoEnded(Part):
    """HybriMoE's code (HSS): the GPU eats a list from the head, the CPU from the tail.

    In steps with more than one row everything goes to the GPU, unless asked otherwise.
    """

    uses_cpu = True

    costs: Literal["profile", "code"] = option("profile", "The engine's own, or the constants built into the released code.")
    cpu_per_row: Literal["deepseek", "mixtral", "qwen2"] = option(
        "deepseek", "Which of the code's constants for a row on the CPU; it has the first, and the others in comments."
    )
    cached_from: Literal["issue", "start"] = option(
        "issue",
        "An expert that is on its way counts as cached from the issue of its copy on, as in the code, or from "
        "when the link has begun with it.",
    )
    multi_row: Literal["gpu", "cpu-and-gpu"] = option(
        "gpu", "Of steps with more than one row: everything on the GPU, as in the code, or the same split as of a single row."
    )

    @property
    def counts_issued(self) -> bool:
        """Whether what is only queued for the GPU counts as there."""
        return self.cached_from == "issue"

    def start(self, setup: Setup) -> None:
        self._view, self._gpu = setup.view, setup.gpu
        self._timings = layer_timings(setup)
        self._used = self._timings
        if self.costs == "code":
            cpu = PerRow(0, CODE_CPU_PER_ROW[self.cpu_per_row])
            self._used = [CODE_COSTS._replace(cpu=cpu)] * len(self._timings)
        self._rows = 1
        self._ranked: Sequence[int] | None = None

    def step_begin(self, event: StepBegin) -> None:
        self._rows = len(event.requests)

    def routed(self, event: Routed) -> None:
        """Note the gate's ranking of a single row, which decides among its experts."""
        self._ranked = event.experts[0].tolist() if self._rows == 1 else None

    def assign(self, layer: int, loads: Sequence[int], waiting: Sequence[int]) -> Plan:
        """Plan a single row; of several the GPU runs everything, what is there first."""
        order, self._ranked = self._ranked, None
        if order is None:
            order = [e for e, w in enumerate(loads) if w]
        transfer = self._timings[layer].transfer
        cached = {e for e in order if waiting[e] < transfer}
        if self.counts_issued:
            cached.update(e for e in order if self._view.is_pending(layer, e, self._gpu))
        if self._rows == 1 or self.multi_row == "cpu-and-gpu":
            return two_ended_plan(order, cached, loads, self._used[layer])
        return Plan(tuple(sorted(order, key=lambda e: e not in cached)), (), 0, 0)


SCORES = frozenset({"scores-or-weights"})
Credit = Annotated[
    Literal["own", "by-id"],
    Field(
        description="Each expert is credited with its own score, as the paper says, or as the released code does: of the p experts "
        "with the largest scores, the one with the lowest id gets the largest, the next id the second largest, and so on."
    ),
]
Alpha = Annotated[float, Field(ge=0, le=1, description="Weight of the present visit.")]
TopScores = Annotated[int | None, Field(ge=1, description="Scores of a row that count; None: twice the model's top_k.")]
ScoreRows = Annotated[
    Literal["mean", "first"], Field(description="With several rows: the mean over them, or the first row only.")
]


class RecentScores:
    """Recent scores of each layer: S <- alpha TopP(s) + (1 - alpha) S at visits (eq. 3).

    ``p`` scores of a row count, by default 2 top_k, of recorded weights at most top_k; of several rows the mean or the first.
    ``credit``: to each expert its own score, or one by its id (`credit_by_id`).

    Examples
    --------
    >>> from moesim.testing import routed
    >>> scores = RecentScores(1, 8, 2, 0.5, None, "mean")
    >>> scores.update(routed([[3, 1], [3, 0]]))
    >>> scores.of(0)
    [0.125, 0.125, 0.0, 0.25, 0.0, 0.0, 0.0, 0.0]
    """

    def __init__(
        self,
        n_layers: int,
        n_experts: int,
        top_k: int,
        alpha: float,
        p: int | None,
        tokens: Literal["mean", "first"],
        credit: Credit = "own",
    ) -> None:
        self._alpha, self._first, self._by_id = alpha, tokens == "first", credit == "by-id"
        self._p = 2 * top_k if p is None else p
        self._s = [[0.0] * n_experts for _ in range(n_layers)]

    def update(self, event: Routed) -> None:
        """Move a layer's scores on by one visit; a micro-batch is a visit."""
        before = self._s[event.layer]
        rows = slice(1) if self._first else slice(None)
        if event.scores is not None:
            found = recent_scores(before, event.scores[rows], self._p, self._alpha, self._by_id)
        elif event.weights is not None:
            found = recent_weights(before, event.experts[rows], event.weights[rows], self._p, self._alpha, self._by_id)
        else:
            raise RuntimeError("recent scores: the trace was promised to hold scores or weights, and holds neither")
        self._s[event.layer] = found

    def of(self, layer: int) -> list[float]:
        return self._s[layer]

    def native_state(self) -> dict[str, Any] | None:
        """None where rows have one score, whose sums NumPy orders in its own way."""
        return None if len(self._s[0]) == 1 else {}


def _recent_scores(part: MRS | MRSScore, view: View) -> RecentScores:
    model = view.model
    shape = model.n_layers, model.n_experts, model.top_k
    return RecentScores(*shape, part.alpha, part.p, part.tokens, part.credit)


class MRS(LRU):
    """HybriMoE's minus recent score: the resident with the smallest S leaves, then by LRU.

    The scores move before the layer evicts. Without full scores the weights of the chosen stand in, so p = top_k.
    """

    needs = SCORES
    use_order = "id"

    alpha: Alpha = option(MRS_ALPHA)
    p: TopScores = option(None)
    tokens: ScoreRows = option("mean")
    credit: Credit = option("own")
    victims: Victims = option(
        "idle",
        "Routed experts of the present layer visit are named only if there are no others, or, as in paper and "
        "code, by their scores like any other; they leave after their run.",
    )

    def start(self, setup: Setup, residents: Sequence[Sequence[int]] = ()) -> None:
        super().start(setup, residents)
        self._recent = _recent_scores(self, setup.view)

    def native_state(self) -> dict[str, Any] | None:
        return self._recent.native_state()

    def used(self, event: Routed) -> None:
        super().used(event)
        self._recent.update(event)

    def victim(self, fetch: Fetch, view: View) -> Unit | None:
        """Name the one with the smallest score, and forget it."""
        members, of = self.members(fetch.layer), self._recent.of
        found = self.first_resident(sorted(members, key=lambda unit: of(unit[0])[unit[1]]), view)
        if found is not None:
            del members[found]
        return found


class MRSScore(Part):
    """The prefetch of HybriMoE's code: the next layer's experts with the largest S, unpredicted.

    Only in steps of one row, and only if the GPU has something to do in this layer.
    """

    needs = SCORES
    transient = False
    slots = 0
    predicts = False

    size: int = option(1, "Experts of a layer visit to prefetch.", ge=1)
    over: Over = option("all")
    alpha: Alpha = option(MRS_ALPHA)
    p: TopScores = option(None)
    tokens: ScoreRows = option("first")
    credit: Credit = option("by-id")

    def start(self, setup: Setup) -> None:
        self._gpu, self._n_layers = setup.gpu, setup.view.model.n_layers
        self._rows = 1
        self._recent = _recent_scores(self, setup.view)

    def step_begin(self, event: StepBegin) -> None:
        self._rows = len(event.requests)

    def ask(self, event: Routed, view: View) -> Sequence[Predict]:
        self._recent.update(event)
        return ()

    def ahead(self, event: Routed, plan: Plan, view: View) -> Sequence[Unit]:
        """Choose in the next layer, largest S first, then lowest id."""
        layer = event.layer + 1
        if self._rows > 1 or not plan.gpu or layer == self._n_layers:
            return ()
        scores, resident = self._recent.of(layer), view.residency(layer, self._gpu)
        ids = range(len(scores)) if self.over == "all" else [e for e, here in enumerate(resident) if not here]
        best = sorted(ids, key=lambda e: -scores[e])[: self.size]
        return [(layer, e) for e in best if not resident[e]]

    def choose(self, event: Predicted, view: View) -> Sequence[Unit]:
        return ()


GATES = "gate_next"


class ImpactDriven(Part):
    """HybriMoE's prefetch: what would shorten the next layers' plans most, while the link idles.

    Chosen once a visit and micro-batch, when the next layer's prediction is in, by the latest known about each layer.
    """

    transient = False
    slots = 0
    predicts = True

    source: str = option(
        GATES,
        '``"gate_next"``: the recorded answers ``gate_next1`` .. ``gate_next3`` of the following layers\' '
        "gates to the present hidden state; any other source is asked for each of the layers.",
    )
    lookahead: int = option(3, "Layers ahead.", ge=1, le=3)
    budget: Literal["ends", "begins", "none"] = option(
        "ends", "The last transfer must end, or begin, before the planned end of the layer; or whatever gains is fetched."
    )
    candidates: int = option(8, "Different numbers of rows tried in each layer, from the highest down.", ge=1)
    lane: Literal["main", "side"] = option(
        "main", 'Where the predictions are computed; ``"side"`` needs its rate in the profile.'
    )

    reading = PAPER  # of the plans; a system sets that of its assignment

    @property
    def needs(self) -> frozenset[str]:
        return frozenset().union(*(source_needs(self._source(n)) for n in range(1, self.lookahead + 1)))

    def _source(self, ahead: int) -> str:
        return f"signal:{GATES}{ahead}" if self.source == GATES else self.source

    def start(self, setup: Setup) -> None:
        model = setup.view.model
        self._gpu, self._n_layers, self._top_k = setup.gpu, model.n_layers, model.top_k
        self._timings = layer_timings(setup)
        self._sources = [self._source(n) for n in range(self.lookahead + 1)]
        self._step = -1
        self._layer = -1  # routed last
        self._end_ns: float = 0  # planned end of it
        self._link_ns: float = 0  # planned end of its transfers
        self._rows: dict[int, dict[int, int]] = {}  # layer -> rows that each expert will have
        self._under_way: list[Unit] = []

    def native_state(self) -> dict[str, Any]:
        return {"sources": self._sources[1:], **self.reading._asdict()}

    def ask(self, event: Routed, view: View) -> Sequence[Predict]:
        """Ask about the layers ahead, the next one last, once a visit."""
        if event.step != self._step:
            self._step = event.step
            self._rows.clear()
        layer = self._layer = event.layer
        if event.mb:
            return ()
        self._end_ns = self._link_ns = view.now_ns
        step, device, lane = event.step, view.dense_device(layer), self.lane
        furthest = min(self.lookahead, self._n_layers - 1 - layer)
        return [Predict(step, layer + n, self._sources[n], device, lane) for n in range(furthest, 0, -1)]

    def ahead(self, event: Routed, plan: Plan, view: View) -> Sequence[Unit]:
        """Note when this layer and its transfers will have ended; choose nothing yet."""
        layer, gpu, now = event.layer, self._gpu, view.now_ns
        costs = self._timings[layer]
        wanted = {(layer, e) for e in plan.gpu}
        self._under_way = [u for u in self._under_way if u not in wanted and view.is_pending(*u, gpu)]
        link, _ = self._queue(view)
        ready = {}
        for expert in plan.gpu:
            wait = view.remaining_ns(layer, expert, gpu)
            if view.is_resident(layer, expert, gpu) or 0 < wait < costs.transfer:
                ready[expert] = wait
                link = max(link, wait)
        ends = replay(plan, event.rows, costs, ready, link)
        self._end_ns = max(self._end_ns, now + max(ends.gpu, ends.cpu))
        self._link_ns = max(self._link_ns, now + ends.link)
        return ()

    def _queue(self, view: View) -> tuple[int, int]:
        """Return what is left of the prefetch in flight, and the time of those queued."""
        flying = queued = 0
        for unit in self._under_way:
            left = view.remaining_ns(*unit, self._gpu)
            if left < self._timings[unit[0]].transfer:
                flying = max(flying, left)
            else:
                queued += left
        return flying, queued

    def choose(self, event: Predicted, view: View) -> Sequence[Unit]:
        """Count predicted rows; choose once the next layer's are in."""
        self._count(event)
        if event.layer != self._layer + 1:
            return ()
        self._under_way = [u for u in self._under_way if view.is_pending(*u, self._gpu)]
        flying, queued = self._queue(view)
        now = view.now_ns
        idle = self._end_ns - now - max(self._link_ns - now, flying) - queued
        transfer = self._timings[event.layer].transfer
        if self.budget != "none" and idle < (transfer if self.budget == "ends" else 1):
            return ()
        known = [layer for layer in range(event.layer, event.layer + self.lookahead) if layer in self._rows]
        ahead = [ahead_of(layer, self._rows[layer], self._gpu, view) for layer in known]

        def makespan(layer: int, cached: Rows, missing: Rows) -> float:
            return queue_makespan(self._timings[layer], cached, missing, self.reading)

        found = impact_driven(ahead, makespan, transfer, idle, self.budget, self.candidates)
        self._under_way += found
        return found

    def _count(self, event: Predicted) -> None:
        if not event.mb:
            self._rows[event.layer] = {}
        add_rows(self._rows.setdefault(event.layer, {}), event.ids, self._top_k)


def ahead_of(layer: int, rows: Mapping[int, int], gpu: str, view: View) -> Ahead:
    """Split a layer's predicted rows by whether the expert is on the GPU or on its way."""
    resident = view.residency(layer, gpu)
    cached, missing = [], []
    for expert, n in rows.items():
        if resident[expert] or view.is_pending(layer, expert, gpu):
            cached.append(n)
        else:
            missing.append((expert, n))
    return Ahead(layer, cached, missing)


SYSTEM = "HybriMoE (2025)"
WARM_UP = "the warm-up that measures costs: the engine's are known from the start"


class HybriMoEPaper(Composed):
    """Three simulated timelines, prefetch by impact, and minus recent score (HybriMoE, 2025)."""

    paper = SYSTEM
    missing: ClassVar[tuple[str, ...]] = (WARM_UP,)

    assignment: AssignmentOption = option("queues")
    prefetch: PrefetchOption = option("impact-driven")
    replacement: ReplacementOption = option("mrs")
    staging_slots = None
    load_order = "plan"
    cache_only = False

    def adjust(self, view: View) -> None:
        """Let the prefetch simulate with the assignment's reading of the paper."""
        _, assignment, prefetch, _ = self.parts
        if isinstance(assignment, Queues) and isinstance(prefetch, ImpactDriven):
            prefetch.reading = assignment.reading


class HybriMoECode(Composed):
    """The two-ended split in decode and minus recent score (HybriMoE's released code, 2025).

    A load's victim is named at issue, among the experts there, and leaves at once if idle, else after its run. Where every place
    belongs to a load that is not over, a demand load waits for one of them to be used, and a prefetch is left out. The counter
    ``overwrites`` counts loads for which the code would have overwritten an expert still needed: one that runs in this layer, or one
    whose own load is not over. A prefetch that arrives during a decision lets the GPU's experts go at once.
    """

    paper = SYSTEM
    missing = (
        WARM_UP,
        "an expert copied in three pieces, so that its first product can start before the last has arrived",
        "the prefetch during prefill, of the layer after the next into a buffer that is cleared before it is used",
        "what overwriting an expert in use does to the output",
        "defects: routing weights of other experts, shared experts computed twice, no scores for Mixtral and Qwen2",
    )
    victims_named = "at issue"

    _overwrites = 0

    assignment: AssignmentOption = option("hss")
    prefetch: PrefetchOption | None = option(None, 'Another part than the code\'s, ``"mrs-score"`` of ``prefetch_size`` experts.')  # type: ignore[assignment]
    replacement: ReplacementOption | None = option(None, 'Another part than the code\'s, ``"mrs"`` by the first row.')  # type: ignore[assignment]
    scope = "per-layer"
    staging_slots = None
    load_order = "plan"
    cache_only = False
    prefetch_size: int = option(0, "Experts of the next layer to prefetch; not read with another prefetch.", ge=0)
    credit: Credit = option(
        "by-id",
        "Whose the recent scores are in the code's cache and prefetch: as the released code writes them, or "
        "as eq. 3 says. Not read by parts that are named, which have an option of their own.",
    )
    wait_prefetch: bool = option(
        True, "In steps of one row, the GPU's experts wait for all prefetches that were issued before their layer was routed."
    )
    slots_split: SlotsSplit = option("spread")

    def compose(self) -> Parts:
        ahead = MRSScore(size=self.prefetch_size, credit=self.credit) if self.prefetch_size else NoPrefetch()
        return Parts(
            placement=self.named("placement"),
            assignment=self.named("assignment"),
            prefetch=self.named("prefetch", ahead),
            replacement=self.named("replacement", MRS(tokens="first", credit=self.credit)),
        )

    @property
    def _waits(self) -> bool:
        prefetch = self.parts.prefetch
        return self.wait_prefetch and not prefetch.transient and not isinstance(prefetch, NoPrefetch)

    @property
    def listens(self) -> frozenset[type]:
        return super().listens | (frozenset({Fetched, StepBegin}) if self._waits else frozenset())

    @property
    def counters(self) -> Mapping[str, int]:
        return {"overwrites": self._overwrites}

    def place(self, view: View) -> Placement:
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

    def decide(self, event: Any, view: View) -> Iterable[Action]:
        """Answer as composed; name the victims of what is loaded, hold back what must wait."""
        if type(event) is Fetched:
            return self._arrived(event, view)
        actions = super().decide(event, view)
        return self._issue(actions, view) if actions else ()

    def on_step_begin(self, event: StepBegin, view: View) -> Iterable[Action]:
        self._rows = len(event.requests)  # of the step
        return super().on_step_begin(event, view)

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
        """Return a Fetch of what can be loaded now, after a Drop of what leaves."""
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
        """Run what was held; a load not queued yet, as its decision is being made, runs on arrival."""
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
        """Name a victim for a load without a place; a promised place is about to be free."""
        if fetch.pool == CACHE and len(self._inside[fetch.layer]) <= self._slots[fetch.layer]:
            return None
        unit = super().evict(fetch, view)
        if unit is not None and fetch.pool == CACHE:
            self._inside[unit[0]].discard(unit[1])
        return unit
