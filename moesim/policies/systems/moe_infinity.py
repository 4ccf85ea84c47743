"""MoE-Infinity: as published, by past sequences that are like the present one, and as released, by use over the whole run.

L. Xue, Y. Fu, Z. Lu, L. Mai, M. Marina, "MoE-Infinity: Efficient MoE Inference on Personal Machines with Sparsity-Aware Expert
Cache", arXiv:2401.14361; code: EfficientMoE/MoE-Infinity.

Idea: sequences that begin alike use the same experts later. The matrix of a past sequence, tokens by layer and expert, tells what
to prefetch and what to keep. The released blocks of Mixtral, DeepSeek, Switch and NLLB have this commented out; what is left is an
LFU cache. ``moe-infinity-code`` is these blocks. ``moe-infinity-paper`` is the method, in the terms of the released modules.

| point | paper says | released code does | we do |
|---|---|---|---|
| prefetch | by the closest past sequence | modules that only the blocks of Grok and Arctic call; off by default | ``-code``: none; ``-paper``: as in the modules |
| past sequences | matrices of a data set, collected ahead | up to 1000, from the run | requests held back for calibration (``capacity``); ``online`` adds those of the run |
| match at layer l | rows 0 to l | masks these rows, so that the later ones are compared | ``-paper``: rows 0 to l; ``mask: later`` is the code: of equals, the first |
| several sequences | - | one by one | the mean over the sequences of the step |
| priority of an expert of layer j | its share, nearer layers weighing more | (p + 1e-8) (1 - (j - l) / (L + 1)); layers passed 0 | the same; p is the share within the layer |
| queue | by priority, on-demand copies first | every expert from the present layer on; on-demand copies first, which drop what is queued for layers passed | the same (``begin``), one prefetch at a time, as the link is free |
| what a prefetch replaces | - | unclear: its candidates are protected | what has a lower priority (``replaces``) |
| victim | lowest activation ratio, nearer layers weighing more | ``-code``: the lowest count of uses over all layers, scanned expert by expert, within it layer by layer: the first strict minimum | the same; ``-paper``: the lowest priority, scanned likewise |
| counts | of the sequence | of the whole run, kept when evicted; the reset at the end of a sequence is never reached | the same |
| start | - | empty cache | the same |
| order on demand | - | one thread: active experts by ascending id; each copy ends before the next expert is looked at | the same, for both: a hit waits for the misses before it |
| locked | experts of the present layer | what is queued, until it has run | active experts of the present layer; if all cached are locked, those that have run, then those still to run (``victims``) |
| eviction | free | free: the host copy stays | the same |
| size of the cache | - | free space shrinks at hits too, so that the cache never fills (a defect) | the granted slots |
| CPU | computes nothing | the same | the same |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np

from moesim.policies.algorithms.activations import Mask, least_visited
from moesim.policies.base import Range
from moesim.policies.fetch_thread import FetchThread, PrefetchingThread
from moesim.policies.parts import Unit
from moesim.policies.past_sequences import Past
from moesim.policies.visit import UNROUTED_FIRST, Victims
from moesim.policy import Fetch, Placement, Routed, StepBegin, View

if TYPE_CHECKING:
    from numpy.typing import NDArray


class MoEInfinityCode(FetchThread):
    """One fetch thread, and a cache for all layers that evicts what was used least since the start (MoE-Infinity's code)."""

    paper = "MoE-Infinity (arXiv:2401.14361), its released code"
    missing = (
        "the defect that free space shrinks at hits too, so that the released cache never fills",
        "more than one GPU, each with a fetch thread",
    )

    victims: Victims = UNROUTED_FIRST
    """What the present layer visit is routed to goes only if nothing else is idle, or, once it has run, like any other."""

    def evict(self, fetch: Fetch, view: View) -> Unit | None:
        """Name the expert used least."""
        return super().evict(fetch, view) if self.victims == UNROUTED_FIRST else self.of_the_layer(view)


class MoEInfinityPaper(PrefetchingThread):
    """Like the past sequence that is closest so far: prefetch what it used next, keep what it will use (MoE-Infinity, 2024)."""

    paper = "MoE-Infinity (arXiv:2401.14361)"
    missing = (
        "the released modules' cache score, with a decay for encoder and decoder halves: the prefetch priority ranks the cache",
        "the time of the match: the experiment's decision_us stands for it",
        "more than one GPU, each with a fetch thread",
    )
    needs = frozenset({"table:activation_matrices"})

    mask: Mask = "seen"
    """Rows of the matrices that are compared at layer l: 0 to l, or, as in the released modules, those after l."""
    begin: Literal["present", "next"] = "present"
    """The first layer of which experts are prefetched; in the released modules the present one."""
    replaces: Literal["lower", "any"] = "lower"
    """Which cached experts a prefetch may replace: those of a lower priority than its own, or any that is not locked."""
    capacity: Annotated[int, Range(1)] = 1000
    """Matrices kept."""
    online: bool = False
    """Sequences of the run that are over are stored, too; the oldest matrix is replaced."""

    def place(self, view: View) -> Placement:
        """Return the empty cache; keep the calibration's matrices."""
        model = view.model
        stored = view.tables["activation_matrices"]
        self._past = Past(
            self.capacity, model.n_layers, model.n_experts, stored=stored, learns=self.online, mask=self.mask
        )  # fmt: skip
        self._priority = self._from_best = np.zeros((model.n_layers, model.n_experts))
        self._queued = np.zeros((model.n_layers, model.n_experts), np.bool_)  # since the last match, and not asked for yet
        return super().place(view)

    def step_begin(self, event: StepBegin) -> None:
        """Note whose rows are whose."""
        self._past.begin(event.requests, event.phase == "decode")

    def routed(self, event: Routed) -> None:
        """Count, and match anew."""
        super().routed(event)
        self._past.count(event.layer, event.experts, event.first_row)
        self._priority = self._past.priority(event.layer)
        self._from_best = -self._priority
        self._queued[:] = False
        self._queued[event.layer + (self.begin == "next") :] = True

    def lowest(self, may_go: NDArray[np.bool_]) -> Unit | None:
        """Return the expert of the lowest priority."""
        return least_visited(self._priority, may_go)

    def next_ahead(self) -> Unit | None:
        """Take the best expert that is not there, if there is a slot for it; of equals the lowest id."""
        unit = least_visited(self._from_best, self._queued & ~self._cached)
        if unit is None:
            return None
        if self.full:
            victim = self.lowest(self.spare())
            if victim is None or (self.replaces == "lower" and self._priority[victim] >= self._priority[unit]):
                return None
        self._queued[unit] = False
        return unit
