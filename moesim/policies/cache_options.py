"""The decisions in which caches beside the CPU differ, as options.

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

from typing import Annotated, Literal

from moesim.policies.base import PolicyBase, Range
from moesim.policies.cpu_cache import Prompts

SPLIT = ("share", "time")


class CacheOptions(PolicyBase):
    """Options of a cache beside the CPU."""

    copied_now: Literal["none", "all", "share", "time"] = "none"
    """Misses that the GPU computes in their own visit, once they are copied: as many as balance the rates or the times of
    link and CPU. The CPU computes the others, and what finds no slot."""
    share: Annotated[float, Range(0, 1)] = 0.5
    """The link's rate over the sum of the rates of link and CPU."""
    later: bool = True
    """What the CPU computes beside such copies may be copied for later visits, too."""
    admission: Literal["all", "demand", "score", "newest"] = "all"
    """Misses of the CPU that are copied: all, those missed often enough, those with a higher score than who would leave, or, at
    the next step's begin, the newest of a layer."""
    inserts: Annotated[int, Range(1)] | None = None
    """At most so many copies for later a layer visit; None: any number."""
    admit_free: Annotated[int, Range(1)] = 2
    """Rows missed before an expert is copied into a free slot."""
    admit_full: Annotated[int, Range(1)] = 8
    """The same in a full cache, since its last copy."""
    kappa: Annotated[float, Range(0)] = 0.0
    """By how much the newcomer's score must be higher."""
    half_life: Annotated[float, Range(0.001)] = 16.0
    """A score counts visits in which the expert was used, each half as much after so many visits of its layer."""
    victim: Literal["lru", "score"] = "lru"
    """Who leaves: the one used longest ago, or the one with the lowest score, of equals that in the lowest slot."""
    publish: Literal["arrival", "step", "two-steps", "batch"] = "arrival"
    """A copy for later counts from its arrival, from the begin of the next step, from two steps after its issue, or from the
    first step of the next batch of requests."""
    hit_order: Literal["rank", "id", "equal"] = "rank"
    """In which order hits of a visit count as used: of first appearance, by id, or all at once with what the visit copies; of
    those used at once the one in the lowest slot leaves first."""
    miss_order: Literal["rank", "id", "recent"] = "rank"
    """In which order misses are looked at: of first appearance, by id, or those routed to most recently first."""
    scope: Literal["per-layer", "global"] = "per-layer"
    """Slots of each layer, or one pool for all."""
    overlap: bool = True
    """Copies, GPU and CPU work at the same time; else the GPU waits for a visit's copies, and the CPU for the GPU."""
    prefill: Prompts = "bypass"
    """Who computes prompts: the CPU; the GPU, by the cache as it is and copies for one use; the cache where all experts of the
    visit fit, else as before; or the cache like any step."""
    cached_rows: Annotated[int, Range(1)] | None = None
    """Steps of more rows are treated as prompts, others are not; None: prompts are."""
    warm: bool = False
    """Begin with the lowest ids of each layer in the cache, not with an empty one."""
