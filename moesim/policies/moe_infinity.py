"""MoE-Infinity as released: one thread fetches active experts on demand, into one cache for all layers that goes by use.

L. Xue, Y. Fu, Z. Lu, L. Mai, M. Marina, "MoE-Infinity: Efficient MoE Inference on Personal Machines with Sparsity-Aware Expert
Cache", arXiv:2401.14361; code: EfficientMoE/MoE-Infinity.

Idea: sequences that begin alike use the same experts later. Past sequences tell what to prefetch and what to keep.

| point | paper says | released code does | we do |
|---|---|---|---|
| prefetch | by the closest past sequence | commented out for Mixtral, DeepSeek, Switch and NLLB; off by default | none |
| start | - | empty cache | the same |
| order | on-demand copies before prefetches | one thread: active experts by ascending id; each copy ends before the next expert is looked at | the same: a hit waits for the misses before it |
| victim | lowest activation ratio, nearer layers weighing more | the lowest count of uses over all layers, scanned expert by expert, within it layer by layer: the first strict minimum | the same |
| counts | of the sequence | of the whole run, kept when evicted; the reset at the end of a sequence is never reached | the same |
| locked | experts of the present layer | what is queued, until it has run | active experts of the present layer; if all cached are locked, those that have run, then those still to run (``victims``) |
| eviction | free | free: the host copy stays | the same |
| size of the cache | - | free space shrinks at hits too, so that the cache never fills (a defect) | the granted slots |
| CPU | computes nothing | the same | the same |
"""

from __future__ import annotations

from moesim.policies.fetch_thread import FetchThread
from moesim.policies.parts import Unit
from moesim.policies.visit import UNROUTED_FIRST, Victims
from moesim.policy import Fetch, View


class MoEInfinityCode(FetchThread):
    """One fetch thread, and a cache for all layers that evicts what was used least since the start (MoE-Infinity's code)."""

    paper = "MoE-Infinity (arXiv:2401.14361), its released code"
    missing = ("the defect that free space shrinks at hits too, so that the released cache never fills",)

    victims: Victims = UNROUTED_FIRST
    """What the present layer visit is routed to goes only if nothing else is idle, or, once it has run, like any other."""

    def evict(self, fetch: Fetch, view: View) -> Unit | None:
        """Name the expert used least."""
        return super().evict(fetch, view) if self.victims == UNROUTED_FIRST else self.of_the_layer(view)
