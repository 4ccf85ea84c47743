"""A prefetcher next to least-stale eviction by generations; see `moesim.policies.systems.two_generations` for what is known of it."""

from __future__ import annotations

from types import MappingProxyType
from typing import Annotated, Any, Literal

from moesim.policies.base import Range
from moesim.policies.composed import Composed
from moesim.policies.composition import PartSpec
from moesim.policies.declare import option, option_of
from moesim.policies.parts import PrefetchPart
from moesim.policies.parts.prefetch import TopPredicted
from moesim.policies.systems.two_generations import LeastStaleByGeneration
from moesim.policy import View


def _prefetch(policy: Any) -> TopPredicted:
    """Build the prefetch; its size may follow in `_size`."""
    return TopPredicted(source=policy.prefetch_source, lane=policy.lane, pool="cache", size=policy.prefetch_size or 1)


def _size(policy: Any, view: View) -> None:
    """Prefetch as many experts as a row uses, if no number is given."""
    if policy.prefetch is None and policy.prefetch_size is None:
        policy.parts.prefetch.size = view.model.top_k


LeastStale2Gen = Composed.preset(
    "LeastStale2Gen",
    """Prefetch into one cache for all layers, which evicts first what the present pass has not used (no SpecMD).

    The two-generation reading of "least stale". SpecMD (arXiv:2602.03921) was not read in full; only its abstract was.
    """,
    missing=(
        "SpecMD: only its abstract was read; this is one of several public readings of its eviction",
        "its prefetcher: the next layer's gate on the present state stands next to the eviction",
    ),
    fixed=("replacement", "slots_split", "staging_slots", "load_order", "cache_only"),
    own=MappingProxyType({"replacement": LeastStaleByGeneration, "prefetch": _prefetch}),
    adjust=_size,
    placement="none",
    replacement=None,
    scope=option(Literal["per-layer", "global"], "global"),
    prefetch=option(PartSpec | PrefetchPart | None, None, "Another prefetch. Beside it, the options of its own are refused."),
    prefetched=option_of(LeastStaleByGeneration),
    prefetch_source=option_of(TopPredicted, name="source", default="signal:gate_next1"),
    prefetch_size=option(
        Annotated[int, Range(1)] | None,
        None,
        "Experts of a layer visit to prefetch; null: as many as a row uses.",
    ),
    lane=option_of(TopPredicted),
)
