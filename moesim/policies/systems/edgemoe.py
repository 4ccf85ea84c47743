"""EdgeMoE, as other papers describe it: experts preloaded by statistics, and a cache that gives up the farthest layers first.

EdgeMoE's own paper was not read for this, and no scheduler code is released: each point is as OD-MoE (2025), DAOP (2025) and DALI
(2026) describe it, or a choice.

Idea: statistics from calibration tell which experts follow which, and so what to preload.

| point | paper says | released code does | we do |
|---|---|---|---|
| prediction | by statistics (DALI): how often each expert was active (OD-MoE) | none | co-activation of this layer's experts with the next layer's, from calibration [choice]; ``prefetch_source: frequency`` is OD-MoE's word |
| what is preloaded | not known | none | the ``prefetch_size`` experts with the most predicted rows, of the next layer, into the cache; as many as a row uses |
| victim | an expert of the layer farthest from the present one (as OD-MoE describes it) | none | of the layer to which the pass comes last; ``distance: absolute`` is the distance in the stack |
| within a layer | not known | none | the one whose last use is longest ago |
| what the present layer uses | not known | none | goes last (``victims``) |
| start | not known | none | empty (``placement``) |
| widths of experts | each expert has its own (DAOP) | none | one for all |
| CPU | experts are copied to the GPU before they run (DALI) | none | computes no expert (``assignment``) |
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Annotated, Any

from moesim.policies.base import Range
from moesim.policies.composed import Composed
from moesim.policies.composition import PartSpec
from moesim.policies.declare import option, option_of
from moesim.policies.layer_distance import LeastStale
from moesim.policies.parts import PrefetchPart, ReplacementPart
from moesim.policies.parts.prefetch import TopPredicted
from moesim.policy import View

ANOTHER_PART = "Another part than EdgeMoE's. Beside it, the options that describe EdgeMoE's are refused."


def _prefetch(policy: Any) -> TopPredicted:
    """Build the preloading; its size may follow in `_size`."""
    return TopPredicted(source=policy.prefetch_source, lane=policy.lane, pool="cache", size=policy.prefetch_size or 1)


def _size(policy: Any, view: View) -> None:
    """Preload as many experts as a row uses, if no number is given."""
    if policy.prefetch is None and policy.prefetch_size is None:
        policy.parts.prefetch.size = view.model.top_k


EdgeMoE = Composed.preset(
    "EdgeMoE",
    "Experts preloaded by calibration statistics; the cache gives up experts of the farthest layers first (EdgeMoE).",
    paper="EdgeMoE, as OD-MoE (2025) and DALI (2026) describe it",
    missing=(
        "its own paper was not read: prediction and eviction are as other papers describe them",
        "widths of its experts, each of which has its own: one for all",
        "how many experts it preloads, when, and where to: not known",
        "what is in its cache at the start, and the order of victims within a layer: not known",
    ),
    fixed=("scope", "slots_split", "staging_slots", "load_order", "cache_only"),
    own=MappingProxyType({"replacement": LeastStale, "prefetch": _prefetch}),
    adjust=_size,
    placement="none",
    scope="global",
    replacement=option(PartSpec | ReplacementPart | None, None, ANOTHER_PART),
    prefetch=option(PartSpec | PrefetchPart | None, None, ANOTHER_PART),
    distance=option_of(LeastStale),
    victims=option_of(LeastStale),
    prefetch_source=option_of(TopPredicted, name="source", default="coactivation"),
    prefetch_size=option(
        Annotated[int, Range(1)] | None,
        None,
        "Experts of a layer visit to preload; null: as many as a row uses.",
    ),
    lane=option_of(TopPredicted),
)
