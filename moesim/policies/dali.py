"""DALI: a greedy CPU-GPU split of each layer, residual-corrected prefetch, and a cache that follows the workload.

"DALI: workload-aware offloading for Mixture-of-Experts inference on local PCs", arXiv, 2026. No code is released.

Idea: with a batch, experts differ in how many rows they serve. Busy experts pay for their transfer, idle ones are cheap on the
CPU; so the split, the prefetch and the cache are all decided by rows per expert, not by recency.

| point | paper says | released code does | we do |
|---|---|---|---|
| assignment | Alg. 1: by cost difference, largest first, to the GPU while its total is not larger | none | the same; ties by id; other rules by ``assignment`` |
| GPU cost | max(transfer, compute), transfer 0 if resident | none | the same; the rest of a transfer under way; ``cache_only`` counts cached experts only |
| prefetch | gate of the next layer on h + res, top-k each row, most rows first | none | ``signal:residual``, top ``prefetch_size`` of all, residents skipped |
| where it is predicted | at once, on a separate stream | none | ``lane``: ``main``, ahead of the layer's GPU runs, or ``side`` |
| not begun when its layer is routed | not stated | none | a demand if the GPU runs it, else queued until the layer ends |
| its memory | not stated | none | a transient pool of ``prefetch_size`` slots (times ``prefetch_buffers``), emptied at the layer's end |
| cache | Alg. 2: every w_size tokens, u_size residents out and u_size others in | none | at the end of each window of w_size visits of a layer; a prefill chunk is one visit |
| its line 9 | i mod w_size = 0, true at i = 0 | none | ``firing``: ``default`` after w_size visits, ``printed`` after the first |
| its line 11 | TopK for the victims | none | the lowest, as in its text |
| swap if worse | yes | none | yes; ``only_if_better`` |
| swap traffic | not stated | none | lowest urgency, the victim leaves at issue; ``blocking`` queues it as demand; ``relabel`` keeps a copy that is there |
| a newcomer whose unused prefetch is still under way | not stated | none | left for a later window, with its victim |
| demand loads | - | none | transient: staged, dropped at the layer's end; most rows first |
| start | random experts in each layer | none | the same, seeded |
| shared experts | not in Alg. 1 | none | on the GPU, not in the plan |
| scheduling time | 4.5 % of the total | none | the experiment's decision time |
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Annotated, Literal

from moesim.policies.base import Range
from moesim.policies.composed import Composed, PartSpec
from moesim.policies.parts import AssignmentPart, PlacementPart
from moesim.policies.prefetching import TopPredicted
from moesim.policies.replacement import WorkloadAware
from moesim.policy import Placement, View

FEW_EXPERTS = 8  # Mixtral; the paper's other models have 64 and more
PUBLISHED_U_SIZE = (1, 8)  # with few experts, with many (section 6 and appendix)
PUBLISHED_PREFETCH_SIZE = (1, 4)


class Dali(Composed):
    """Greedy split by rows per expert, residual prefetch, and window-based cache replacement (DALI, 2026).

    Parameters
    ----------
    assignment : str, mapping or part
        ``"greedy"`` (the paper's), ``"exact"``, ``"beam"``, ``"threshold"``, ``"all-cpu"`` or ``"all-gpu"``.
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

    Notes
    -----
    The totals of the plan are not the executed time, which pipelines. Not implemented:

    * the memory constraint (9), which Algorithm 1 drops too: more demand loads than staging slots go in waves
    * the switch between streams before a prediction
    """

    paper = "DALI (arXiv, 2026)"
    missing = (
        "the memory constraint (9), which Algorithm 1 drops too: more demand loads than staging slots go in waves",
        "the switch between streams before a prediction",
    )

    oracles = MappingProxyType({"assignment": {"assignment": "exact"}})

    def __init__(
        self,
        *,
        assignment: PartSpec | AssignmentPart = "greedy",
        w_size: Annotated[int, Range(1)] = 4,
        u_size: Annotated[int, Range(0)] | None = None,
        firing: Literal["default", "printed"] = "default",
        only_if_better: bool = False,
        blocking: bool = False,
        relabel: bool = False,
        prefetch_size: Annotated[int, Range(0)] | None = None,
        prefetch_source: str = "signal:residual",
        prefetch_over: Literal["all", "non-resident"] = "all",
        prefetch_buffers: Annotated[int, Range(1)] = 1,
        lane: Literal["main", "side"] = "main",
        cache_only: bool = False,
        placement: PartSpec | PlacementPart = "random",
        staging_slots: Annotated[int, Range(1)] | None = None,
    ) -> None:
        self.w_size = w_size
        self.u_size = u_size
        self.firing = firing
        self.only_if_better = only_if_better
        self.blocking = blocking
        self.relabel = relabel
        self.prefetch_size = prefetch_size
        self.prefetch_source = prefetch_source
        self.prefetch_over = prefetch_over
        self.prefetch_buffers = prefetch_buffers
        self.lane = lane
        predicted = TopPredicted(
            source=prefetch_source,
            size=prefetch_size or PUBLISHED_PREFETCH_SIZE[0],  # the published one is set in place()
            over=prefetch_over,
            buffers=prefetch_buffers,
            lane=lane,
        )
        super().__init__(
            placement=placement,
            assignment=assignment,
            prefetch="none" if prefetch_size == 0 else predicted,
            replacement=WorkloadAware(
                w_size=w_size,
                u_size=PUBLISHED_U_SIZE[0] if u_size is None else u_size,
                firing=firing,
                only_if_better=only_if_better,
                blocking=blocking,
                relabel=relabel,
            ),
            staging_slots=staging_slots,
            load_order="rows",
            cache_only=cache_only,
        )

    def place(self, view: View) -> Placement:
        """Fill in the published sizes for this model, then start the parts."""
        many = view.model.n_experts > FEW_EXPERTS
        _, _, prefetch, replacement = self.parts
        if self.prefetch_size is None and isinstance(prefetch, TopPredicted):
            prefetch.size = PUBLISHED_PREFETCH_SIZE[many]
        if self.u_size is None and isinstance(replacement, WorkloadAware):
            replacement.u_size = PUBLISHED_U_SIZE[many]
        return super().place(view)
