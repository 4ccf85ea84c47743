"""Which rules each policy states, which deviations are known, and which policies state no rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moesim.testing.rules import assignments, caches
from moesim.testing.rules.evictions import CacheRule
from moesim.testing.rules.facts import Facts

MakeRule = Callable[[Facts], CacheRule]


def _victims(part: Any, default: str = "idle") -> bool:
    return (getattr(part, "victims", None) or default) == "unrouted-first"


# By the class of a policy or of a part: its rule, and the options that the rule has, too.
RULES: dict[str, Callable[[Any], tuple[type[caches.Rule], dict[str, Any]]]] = {
    "LRU": lambda part: (caches.LRU, {"by_rank": part.use_order == "rank"}),
    "FIFO": lambda part: (caches.FIFO, {"spares_routed": _victims(part)}),
    "LFU": lambda part: (caches.LFU, {"spares_routed": _victims(part)}),
    "RandomVictim": lambda part: (caches.Whoever, {"spares_routed": _victims(part)}),
    "MRS": lambda part: (
        caches.MRS,
        {n: getattr(part, n) for n in ("alpha", "p", "tokens", "credit")} | {"spares_routed": _victims(part)},
    ),
    "Belady": lambda part: (caches.Belady, {"spares_routed": _victims(part)}),
    "ArcVictim": lambda part: (
        caches.Arc,
        {"variant": part.variant, "spares_routed": _victims(part, "unrouted-first" if part.variant == "canonical" else "idle")},
    ),
    "S3FifoVictim": lambda part: (caches.S3Fifo, {"spares_routed": _victims(part)}),
    "LeastStale": lambda part: (caches.LayerDistance, {"distance": part.distance, "spares_routed": _victims(part)}),
    "LeastStaleByGeneration": lambda part: (caches.TwoGenerations, {"prefetched": part.prefetched}),
    "MixtralOffloading": lambda policy: (caches.LRU, {"by_rank": False, "at_issue": True, "pools": ("cache", "buffer"), "written_back": True}),
    "MoEInfinityCode": lambda policy: (caches.Thread, {}),
    "MoEInfinityPaper": lambda policy: (caches.Activations, {}),
}


# The same of assignments: a rule, or None where its options have none.
ASSIGNMENTS: dict[str, Callable[[Any], assignments.Rule | None]] = {
    "AllGpu": lambda _: assignments.everything,
    "AllCpu": lambda _: assignments.nothing,
    "Resident": lambda _: assignments.residents,
    "ResidentInDecode": lambda _: assignments.decode_residents,
    "Threshold": lambda _: assignments.threshold,
    "FixedThreshold": lambda part: assignments.constants(part.cpu_ms, part.load_ms),
    "Greedy": lambda part: None if part.shared_in_plan else assignments.greedy,
    "Queues": lambda part: assignments.queues if all(getattr(part, n) == v for n, v in QUEUES.items()) else None,
    "TwoEnded": lambda part: assignments.two_ended if (part.costs, part.cached_from, part.multi_row) == HSS else None,
}
QUEUES = {"timeline": "completion", "ties": "gpu", "count_compute": False, "overtake": True, "shared_in_plan": False}
HSS = ("profile", "issue", "gpu")

WITHOUT: dict[str, str] = {}
"""By the class of a policy: why nothing of it is judged."""

IDLE_ONLY = "a resident leaves only while it is idle, so that one in use is passed over"

EXCEPTIONS: dict[tuple[str, str], str] = {
    **{(name, "eviction"): IDLE_ONLY for name in ("FIFO", "LFU", "MRS", "Belady", "ArcVictim", "S3FifoVictim")},
    ("LeastStaleByGeneration", "eviction"): "what the present visit is routed to is spared, of which the reading says nothing",
}
"""By the class of a part or policy, and the kind of decision: deviations from the rule that are known, and why they are."""


def _bases(thing: Any) -> list[str]:
    return [cls.__name__ for cls in type(thing).__mro__]


def _things(policy: Any) -> list[Any]:
    """Return a policy and the parts that it is made of."""
    return [policy, *getattr(policy, "parts", ())]


def rule_of(policy: Any) -> tuple[str, Any]:
    """Return the name under which the table has a policy's or its part's rule, and which of the two it is; else nothing."""
    return next(((name, thing) for thing in _things(policy) for name in _bases(thing) if name in RULES), ("", None))


def excepted(policy: Any, kind: str) -> str:
    """Return why decisions of a policy deviate; empty if they should not."""
    return EXCEPTIONS.get((type(policy).__name__, kind)) or EXCEPTIONS.get((rule_of(policy)[0], kind), "")


def cache_rule(policy: Any) -> MakeRule | None:
    """Return the rule by which a policy's cache gives up experts; None if it states none."""
    name, thing = rule_of(policy)
    if not name:
        return None
    cls, options = RULES[name](thing)
    options = {"at_issue": getattr(policy, "victims_named", "") == "at issue", **options}
    return lambda facts: cls(facts, **options)


def assignment_rule(policy: Any) -> assignments.Rule | None:
    """Return the rule by which a policy gives experts to devices; None if it states none."""
    for thing in _things(policy):
        for name in _bases(thing):
            if name in ASSIGNMENTS:
                return ASSIGNMENTS[name](thing)
    return None


def reason_without(policy: Any) -> str:
    """Return why no rule of a policy is judged; empty for one that is not shipped."""
    return next((WITHOUT[name] for name in _bases(policy) if name in WITHOUT), "")
