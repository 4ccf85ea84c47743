"""DALI: a greedy CPU-GPU split of each layer, residual-corrected prefetch, and a cache that follows the workload.

The paper DALI, arXiv, 2026. No code is released.

Idea: with a batch, experts differ in how many rows they serve. Busy experts pay for their transfer, idle ones are cheap on the
CPU; so the split, the prefetch and the cache are all decided by rows per expert, not by recency.

| point | paper says | released code does | we do |
|---|---|---|---|
| assignment | Alg. 1: by cost difference, largest first, to the GPU while its total is not larger | none | the same; ties by id; other rules by ``assignment`` (exact and beam are the paper's comparison) |
| GPU cost | max(transfer, compute), transfer 0 if resident | none | the same; the rest of a transfer under way; ``cache_only`` counts cached experts only |
| a device's first expert takes longer (``first_extra_us`` of a profile) | costs by rows alone | none | counted once for each device, as on the engine and in HybriMoE's plans |
| prefetch | gate of the next layer on h + res, top-k each row, most rows first | none | ``signal:residual``, top ``prefetch_size`` of all, residents skipped; ``prefetch_over`` |
| where it is predicted | at once, on a separate stream | none | ``lane``: ``main``, ahead of the layer's GPU runs, or ``side`` |
| not begun when its layer is routed | not stated | none | a demand if the GPU runs it, else queued until the layer ends |
| its memory | not stated | none | a transient pool of ``prefetch_size`` slots (times ``prefetch_buffers``), emptied at the layer's end |
| cache | Alg. 2: every w_size tokens, u_size residents out and u_size others in | none | at the end of each window of w_size visits of a layer; a prefill chunk is one visit; fewer than u_size where one side has not so many |
| its line 9 | i mod w_size = 0, true at i = 0 | none | ``firing``: ``default`` after w_size visits, ``printed`` after the first |
| its line 11 | TopK for the victims | none | the lowest, as in its text |
| swap if worse | yes | none | yes; ``only_if_better`` |
| swap traffic | not stated | none | lowest urgency, the victim leaves at issue; ``blocking`` queues it as demand; ``relabel`` keeps a copy that is there |
| a newcomer whose unused prefetch is still under way | not stated | none | left for a later window, with its victim |
| demand loads | only Alg. 2 changes what is on the GPU | none | transient: staged, dropped at the layer's end; most rows first |
| the GPU's order | - | none | what is there first, then by arrival |
| the memory constraint (9) | dropped by Alg. 1 | none | not in the plan; loads go in waves, and the peak of each pool is reported (``peak_pool_bytes``) |
| a step | a token | none | a decode step of the whole batch, or a prefill chunk, whose counts are the prompt's |
| start | random experts in each layer | none | the same, seeded |
| slots that do not divide by the layers | the same number in each layer | none | dealt out, some layers have one more; ``slots_split: equal`` as in the paper |
| shared experts | not in Alg. 1 | none | on the GPU, not in the plan; ``assignment: {name: greedy, shared_in_plan: true}`` |
| prefetch size | 1 (Mixtral), 4; 8 for Qwen with a quarter cached | none | 1 with up to 8 experts, else 4; ``prefetch_size`` |
| scheduling time | 4.5 % of the total, an exact solver 55 % | none | the experiment's ``decision_us``, at each routed layer; 0 unless set |
| one CPU and two GPUs | its section 6.5 | none | ``dali-multi-gpu`` |

Ablations: ``assignment: all-cpu`` (the paper's "naive"), ``prefetch: none``, ``replacement: static``, or any other part.
"""

from __future__ import annotations

from functools import cached_property
from types import MappingProxyType
from typing import Annotated, Literal

from moesim.policies.algorithms.caching import SlotsSplit
from moesim.policies.base import Range
from moesim.policies.composed import Composed, Parts, PartSpec, StagingSlots
from moesim.policies.moot import MootIf, OnlyWith
from moesim.policies.no_prefetch import NoPrefetch
from moesim.policies.part_conditions import COLD, LOADED_ARE_CACHED, NEVER_FILLED, NO_COPIES, NONE_BUT_CACHED, ONE_DEVICE_PLANNED
from moesim.policies.part_names import make_part
from moesim.policies.parts import AssignmentPart, PlacementPart, PrefetchPart, ReplacementPart
from moesim.policies.prefetching import TopPredicted
from moesim.policies.replacement import NO_SWAPS, WorkloadAware
from moesim.policy import Placement, View

FEW_EXPERTS = 8  # Mixtral; the paper's other models have 64 and more
PUBLISHED_U_SIZE = (1, 8)  # with few experts, with many
PUBLISHED_PREFETCH_SIZE = (1, 4)  # of its Fig. 12; its Fig. 19 has 8 for Qwen
OWN_CACHE, OWN_PREFETCH = OnlyWith(replacement=None), OnlyWith(prefetch=None)
NO_PREFETCH, COLD_START = MootIf(prefetch_size=0), MootIf(placement=COLD)


class Dali(Composed):
    """Greedy split by rows per expert, residual prefetch, and window-based cache replacement (DALI, 2026).

    Parameters
    ----------
    assignment : str, mapping or part
        ``"greedy"`` (the paper's), ``"exact"``, ``"beam"``, ``"threshold"``, ``"all-cpu"``, ``"all-gpu"`` or any other.
    replacement, prefetch : str, mapping, part or None
        None: the paper's. With another part, the options below that describe the paper's are refused.
    w_size : int
        Visits of a layer in a window.
    u_size : int or None
        Experts replaced at its end; None: the paper's, 1 for models with up to 8 experts and 8 for others; 0: never.
    firing : {"default", "printed"}
        At the end of each window, or, as the algorithm is printed, after visits 0, w, 2 w ...
    only_if_better : bool
        Keep a resident unless its newcomer served more rows.
    blocking : bool
        Cache updates queue as demand loads.
    relabel : bool
        A newcomer that is on the GPU as a transient copy is kept instead of copied again.
    prefetch_size : int or None
        Experts of a layer visit to prefetch; None: the paper's, 1 for models with up to 8 experts and 4 for others; 0: none.
    prefetch_source : str
        Where predictions come from.
    prefetch_over : {"all", "non-resident"}
        Top of all experts with residents skipped, or top of the non-residents.
    prefetch_buffers : int
        Slots of the prefetch pool in units of ``prefetch_size``.
    lane : {"main", "side"}
        Where predictions are computed; the paper uses a second stream, which needs its measured rate in the profile.
    cache_only : bool
        The assignment counts only cached experts as being on the GPU, not prefetched ones.
    placement : str, mapping or part
        Residents at the start.
    staging_slots : int or None
        Experts of the pool for demand loads; None: the model's top_k, but at least 2. More go in waves.
    slots_split : {"spread", "equal"}
        What becomes of slots beyond an equal share of each layer: dealt out to some layers, or, as in the paper, unused.

    Notes
    -----
    The totals of the plan are not the executed time, which pipelines. Not implemented:

    * the memory constraint (9), which Algorithm 1 drops too: more demand loads than staging slots go in waves
    * the switch between streams before a prediction
    * the time that a solver takes for ``exact``, layer by layer: ``decision_us`` is the same for all
    """

    paper = "DALI (arXiv, 2026)"
    missing = (
        "the memory constraint (9), which Algorithm 1 drops too: more demand loads than staging slots go in waves",
        "the switch between streams before a prediction",
        "the time that a solver takes for ``exact``, layer by layer: ``decision_us`` is the same for all",
    )

    oracles = MappingProxyType({"replacement": {"replacement": "belady"}, "assignment": {"assignment": "exact"}})

    def __init__(
        self,
        *,
        assignment: PartSpec | AssignmentPart = "greedy",
        replacement: PartSpec | ReplacementPart | None = None,
        prefetch: PartSpec | PrefetchPart | None = None,
        w_size: Annotated[int, Range(1), OWN_CACHE, COLD_START, NO_SWAPS] = 4,
        u_size: Annotated[int, Range(0), OWN_CACHE, COLD_START] | None = None,
        firing: Annotated[Literal["default", "printed"], OWN_CACHE, COLD_START, NO_SWAPS, MootIf(w_size=1)] = "default",
        only_if_better: Annotated[bool, OWN_CACHE, COLD_START, NO_SWAPS] = False,
        blocking: Annotated[bool, OWN_CACHE, COLD_START, NO_SWAPS] = False,
        relabel: Annotated[bool, OWN_CACHE, COLD_START, NO_SWAPS, NO_COPIES] = False,
        prefetch_size: Annotated[int, Range(0), OWN_PREFETCH] | None = None,
        prefetch_source: Annotated[str, OWN_PREFETCH, NO_PREFETCH] = "signal:residual",
        prefetch_over: Annotated[Literal["all", "non-resident"], OWN_PREFETCH, NO_PREFETCH, NEVER_FILLED] = "all",
        prefetch_buffers: Annotated[int, Range(1), OWN_PREFETCH, NO_PREFETCH] = 1,
        lane: Annotated[Literal["main", "side"], OWN_PREFETCH, NO_PREFETCH] = "main",
        cache_only: Annotated[bool, ONE_DEVICE_PLANNED, NONE_BUT_CACHED, LOADED_ARE_CACHED] = False,
        placement: PartSpec | PlacementPart = "random",
        staging_slots: StagingSlots = None,
        slots_split: Annotated[SlotsSplit, NEVER_FILLED] = "spread",
    ) -> None:
        self.w_size = w_size
        self.u_size = u_size
        self.firing = firing
        self.only_if_better = only_if_better
        self.blocking = blocking
        self.relabel = relabel
        self.prefetch_size = prefetch_size
        self.prefetch_source = prefetch_source
        self.prefetch_over: Literal["all", "non-resident"] = prefetch_over
        self.prefetch_buffers = prefetch_buffers
        self.lane = lane
        super().__init__(
            placement=placement,
            assignment=assignment,
            staging_slots=staging_slots,
            slots_split=slots_split,
            load_order="rows",
            cache_only=cache_only,
        )
        self.replacement = replacement
        self.prefetch = prefetch

    @cached_property
    def parts(self) -> Parts:
        """The parts, built from their names at the first use; the paper's where none is named."""
        return Parts(
            make_part("placement", self.placement),
            make_part("assignment", self.assignment),
            self._own_prefetch() if self.prefetch is None else make_part("prefetch", self.prefetch),
            self._own_replacement() if self.replacement is None else make_part("replacement", self.replacement),
        )

    def _own_prefetch(self) -> PrefetchPart:
        if self.prefetch_size == 0:
            return NoPrefetch()
        return TopPredicted(
            source=self.prefetch_source,
            size=self.prefetch_size or PUBLISHED_PREFETCH_SIZE[0],  # the published one is set in place()
            over=self.prefetch_over,
            buffers=self.prefetch_buffers,
            lane=self.lane,
        )

    def _own_replacement(self) -> ReplacementPart:
        return WorkloadAware(
            w_size=self.w_size,
            u_size=PUBLISHED_U_SIZE[0] if self.u_size is None else self.u_size,
            firing=self.firing,
            only_if_better=self.only_if_better,
            blocking=self.blocking,
            relabel=self.relabel,
        )

    def place(self, view: View) -> Placement:
        """Fill in the published sizes for this model, then start the parts."""
        many = view.model.n_experts > FEW_EXPERTS
        _, _, prefetch, replacement = self.parts
        if self.prefetch is None and self.prefetch_size is None and isinstance(prefetch, TopPredicted):
            prefetch.size = PUBLISHED_PREFETCH_SIZE[many]
        if self.replacement is None and self.u_size is None and isinstance(replacement, WorkloadAware):
            replacement.u_size = PUBLISHED_U_SIZE[many]
        return super().place(view)
