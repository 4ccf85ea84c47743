"""The rules that each policy states, small runs judged by them, and the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from moesim.engine import simulate
from moesim.errors import CapacityError
from moesim.testing.rules import assignments, caches, plans, strata_vllm
from moesim.testing.rules.assignments import judged_assignments, judged_daop
from moesim.testing.rules.evictions import Judged, judged_evictions
from moesim.testing.rules.facts import Facts
from moesim.testing.rules.plans import judged_plan
from moesim.testing.rules.prefetches import (
    Guess,
    judged_by_impact,
    judged_klotski,
    judged_od_moe,
    judged_prefetches,
    judged_presched,
)
from moesim.testing.runs import run_inputs, tiny_workload
from moesim.trace.predictors import FutureUse, PredictorSet

if TYPE_CHECKING:
    from moesim.hardware import HardwareProfile


def _options(thing: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(thing, name) for name in names}


def _od_moe(policy: Any) -> bool:
    return policy.has_shadow and policy.group_size is None


def _presched(policy: Any) -> bool:
    usual = {"none_better": "eq2", "limit_to_queue": False, "prefetch_size": None, "window": "none", "async_io": True}
    return policy.predictor is not None and policy.scheduler == "presched" and _options(policy, *usual) == usual


def _daop(policy: Any) -> dict[str, Any]:
    return {"factor": policy.swap_factor, "predicted": policy.first_predict_layer if policy.precalculate else 0}


def _victims(part: Any, default: str = "idle") -> bool:
    return (getattr(part, "victims", None) or default) == "unrouted-first"


def _judged_colibri(policy: Any, facts: Facts) -> list[Judged]:
    """Judge the GPU's experts, then those in memory."""
    cap = min(policy.cap or facts.model.n_experts, facts.model.n_experts)
    lfru = policy.policy == "lfru" or (policy.policy == "auto" and cap <= 12)
    options = {"cap": cap, "lfru": lfru, **_options(policy, "hot", "warmup")}
    inside = replace(facts, cache=facts.hosts[0])
    return judged_plan(facts, plans.Colibri(facts, **options)) + judged_plan(
        inside, plans.Colibri(inside, memory=True, **options)
    )


def _strata(policy: Any) -> dict[str, Any]:
    named = {"frac": "pcie_frac", "rule": "pcie_rule", "adapt": "adapt", "every": "adapt_every", "swaps": "adapt_swaps",
             "decay": "adapt_decay", "margin": "adapt_margin", "ring": "prefill_ring",
             "stream_min": "prefill_stream_min"}  # fmt: skip
    return {name: getattr(policy, option) for name, option in named.items()}


SWAPS: dict[str, Any] = {"by_rank": False, "at_issue": True, "pools": ("cache", "buffer"), "written_back": True}

# By the class of a policy or of a part: its rule, and the options that the rule has, too.
RULES: dict[str, Callable[[Any], tuple[type[caches.Rule], dict[str, Any]] | None]] = {
    "LRU": lambda part: (caches.LRU, {"by_rank": part.use_order == "rank"}),
    "FIFO": lambda part: (caches.FIFO, {"spares_routed": _victims(part)}),
    "LFU": lambda part: (caches.LFU, {"spares_routed": _victims(part)}),
    "RandomVictim": lambda part: (caches.Whoever, {"spares_routed": _victims(part)}),
    "MRS": lambda part: (
        caches.MRS,
        _options(part, "alpha", "p", "tokens", "credit") | {"spares_routed": _victims(part)},
    ),
    "Belady": lambda part: (caches.Belady, {"spares_routed": _victims(part)}),
    "ArcVictim": lambda part: (
        caches.Arc,
        {"variant": part.variant, "spares_routed": _victims(part, "unrouted-first" if part.variant == "canonical" else "idle")},
    ),
    "S3FifoVictim": lambda part: (caches.S3Fifo, {"spares_routed": _victims(part)}),
    "LeastStale": lambda part: (caches.LayerDistance, {"distance": part.distance, "spares_routed": _victims(part)}),
    "LeastStaleByGeneration": lambda part: (caches.TwoGenerations, {"prefetched": part.prefetched}),
    "Hobbit": lambda policy: (
        caches.Hobbit,
        {"weights": tuple(getattr(policy, f"{name}_weight") for name in ("lru", "lfu", "lhu", "fld"))},
    ),
    "MixtralOffloading": lambda policy: (caches.LRU, SWAPS),
    "AdapMoE": lambda policy: (caches.LRU, SWAPS | {"guesses_first": True}),
    "MoEInfinityCode": lambda policy: (caches.Thread, {}),
    "FineMoE": lambda policy: (
        (caches.FineMoE, _options(policy, "prefetch_distance", "float_score")) if not policy.selected_only else None
    ),
    "MoEInfinityPaper": lambda policy: (caches.Activations, {}),
}


# The same of caches that decide as a whole; None where options have another rule.
PLANS: dict[str, Callable[[Any], tuple[type[plans.Plan], dict[str, Any]] | None]] = {
    **dict.fromkeys(("Static", "Fiddler", "KtExpert", "KtLayer", "LlamaCpp"), lambda _: (plans.Fixed, {})),
    "WorkloadAware": lambda part: (plans.Windows, _options(part, "w_size", "u_size", "firing", "only_if_better")),
    "LlamaCppCache": lambda policy: (plans.LlamaCppCache, {}) if policy.eviction == "lru" else None,
    "FabricLru": lambda policy: (plans.Fabric, {}),
    "DfaCache": lambda policy: (
        (plans.Dfa, _options(policy, "kappa", "half_life", "inserts")) if (policy.rule, policy.fetch) == ("dfa", None) else None
    ),
    "PooledCache": lambda policy: (plans.Pooled, _options(policy, "admit_free", "admit_full", "inserts")),
    "TurboQuantCache": lambda policy: (plans.Pooled, _options(policy, "admit_free", "admit_full", "inserts", "hot")),
    "TwoUploadsLru": lambda policy: (plans.TwoUploads, _options(policy, "inserts", "dup_upload", "early", "admit", "window")),
    "LlamaCppSsd": lambda policy: (plans.Streamed, _options(policy, "preload")),
    "FreeToken": lambda policy: (plans.FreeToken, _options(policy, "backend")),
    "HeatCache": lambda policy: (plans.Heat, _options(policy, "decay", "hyst", "dwell")),
    "WindowedBelady": lambda policy: (plans.Windowed, _options(policy, "window", "half_life", "kappa")),
    "MinBypass": lambda policy: (plans.Bypass, {}),
    "Strata": lambda policy: (strata_vllm.Strata, _strata(policy)),
    "VllmExpertCache": lambda policy: (strata_vllm.Vllm, _options(policy, "split")) if policy.eviction == "lfru" else None,
    "Fate": lambda policy: (plans.Fate, {}),
    "DaopPaper": lambda policy: (plans.Daop, _daop(policy)),
    "DaopCode": lambda policy: (plans.Daop, _daop(policy) | {"mixed": True, "streams": True}),
}

QUEUES = {"timeline": "completion", "ties": "gpu", "count_compute": False, "overtake": True, "shared_in_plan": False}
HSS = ("profile", "issue", "gpu")

# The same of assignments: a rule, or None where its options have none.
ASSIGNMENTS: dict[str, Callable[[Any], assignments.Rule | None]] = {
    "DaopPaper": lambda _: None,  # its plan says it
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
ASSIGNMENTS |= dict.fromkeys(
    ("OnDemand", "MixtralOffloading", "FetchThread", "PreGated", "Hobbit", "Klotski",
     "ZeroInference", "MoEGen", "MoELightning"),
    lambda _: assignments.everything,
)  # fmt: skip
ASSIGNMENTS["Fiddler"] = lambda policy: assignments.threshold if policy.rule == "profile" else assignments.constants(7, 70)
ASSIGNMENTS |= dict.fromkeys(("KtExpert", "KtLayer", "LlamaCpp"), lambda _: assignments.residents)
ASSIGNMENTS["Exllamav3"] = lambda policy: assignments.residents if not policy.stream_decode else None

# The same of what is fetched once a layer is predicted; None where options change it.
PREFETCHES: dict[str, Callable[[Any], Guess | None]] = {
    "TopPredicted": lambda part: (
        Guess(part.source, part.size, part.over) if (part.lookahead, part.residents) == (1, "as-they-are") else None
    ),
    "PreGated": lambda policy: Guess(policy.source, None) if policy.method == "pre-gated" and not policy.cache else None,
    "Fate": lambda policy: Guess(policy.source, None, more=1) if policy.source.startswith("signal:") else None,
    "AdapMoE": lambda policy: Guess(policy.source, 1, "non-resident", first=True),
    "MixtralOffloadingSpec": lambda policy: Guess(policy.source, policy.n_ahead),
}

# Systems of which several kinds of decisions are judged together.
SYSTEMS: dict[str, Callable[[Any], Callable[[Facts], list[Judged]] | None]] = {
    "ImpactDriven": lambda part: partial(judged_by_impact, lookahead=part.lookahead) if part.source == "gate_next" else None,
    "Klotski": lambda policy: (
        partial(judged_klotski, n_hot=policy.n_hot) if policy.calibrated and policy.released is None else None
    ),
    "DaopPaper": lambda policy: (
        partial(judged_daop, source=policy.source, first=policy.first_predict_layer)
        if policy.precalculate and policy.degrade and policy.cpu_experts is None
        else None
    ),
    "OdMoE": lambda policy: partial(judged_od_moe, source=policy.source, workers=policy.workers) if _od_moe(policy) else None,
    "Colibri": lambda policy: (
        partial(_judged_colibri, policy)
        if (policy.pilot, policy.exchange, policy.warm, policy.pins) == (False, "tokens", "natural", "counts")
        else None
    ),
    "PreScope": lambda policy: partial(judged_presched, source=policy.predictor) if _presched(policy) else None,
}

TABLES: tuple[dict[str, Any], ...] = (RULES, PLANS, ASSIGNMENTS, PREFETCHES, SYSTEMS)

WITHOUT: dict[str, str] = {
    "BackgroundCache": "it is nobody's system: its options are the decisions in which others differ, and those are judged",
    "DaliMultiGpu": "section 6.5 prints no rule for several GPUs",
    "PipeShard": "it plans before the run, and whole layers",
}
"""By the class of a policy: why nothing of it is judged."""


def _bases(thing: Any) -> list[str]:
    """Name a shipped class and its bases; a user's subclass states no rule of its base."""
    shipped = type(thing).__module__.startswith("moesim.")
    return [cls.__name__ for cls in type(thing).__mro__] if shipped else []


def _things(policy: Any) -> list[Any]:
    return [policy, *getattr(policy, "parts", ())]


def entry(table: dict[str, Any], policy: Any) -> Any:
    """Return what a table has for a policy or for one of its parts; None if it has nothing."""
    for thing in _things(policy):
        for name in _bases(thing):
            if name in table:
                return table[name](thing)
    return None


def judge(policy: Any, facts: Facts) -> list[Judged]:
    """Judge all decisions of a run for which the policy states a rule."""
    rule, plan, assigns = (entry(table, policy) for table in (RULES, PLANS, ASSIGNMENTS))
    found: list[Judged] = []
    if rule is not None:
        own = {
            "at_issue": getattr(policy, "victims_named", "") == "at issue",
            "in_load_order": getattr(policy, "load_order", "id") != "id",
        }
        found += judged_evictions(facts, rule[0](facts, **own | rule[1]))
    if plan is not None:
        found += judged_plan(facts, plan[0](facts, **plan[1]))
    system = entry(SYSTEMS, policy)
    found += system(facts) if system is not None else []
    guess = entry(PREFETCHES, policy)
    found += judged_prefetches(facts, guess) if guess is not None else []
    return found + (judged_assignments(facts, assigns) if assigns is not None else [])


def states_a_rule(policy: Any) -> bool:
    """Whether anything of a policy is judged."""
    return any(entry(table, policy) is not None for table in TABLES)


def reason_without(policy: Any) -> str:
    """Return why no rule of a policy is judged; empty for one that is not shipped."""
    bases = _bases(policy)
    return WITHOUT.get(bases[0], "with these options its rule is not transcribed") if bases else ""


# ------------------------------------------------------------------------------------------------- runs and the report
CASES = ((1, 8, 8, 4), (1, 16, 40, 4), (4, 16, 8, 4), (1, 32, 8, 10), (1, 28, 24, 4))
"""Batch size, cache slots, decode steps and layers of 8 experts of each run; some rules begin at a layer beyond the fifth."""


class RuleCheck(NamedTuple):
    """Result for one kind of decision.

    Attributes
    ----------
    verdict : str
        ``"passed"``, ``"failed"`` or ``"no rule"``.
    kind : str
        ``"eviction"``, ``"admission"``, ``"prefetch"`` or ``"assignment"``; empty where there is no rule.
    shares : dict of str to (int, int)
        By phase: decisions that are what the rule says, and all that were judged.
    in_use : int
        Of those that are not: where the rule's choice was in use, and was passed over.
    first : str
        The first that is not.
    reason : str
        Why it has no rule.
    """

    verdict: str
    kind: str = ""
    shares: dict[str, tuple[int, int]] = {}  # noqa: RUF012  # of a tuple, never changed
    in_use: int = 0
    first: str = ""
    reason: str = ""

    def __str__(self) -> str:
        if not self.kind:
            return f"{self.verdict:<8} {self.reason}"
        shares = ", ".join(f"{phase} {ok} of {n}" for phase, (ok, n) in self.shares.items())
        text = f"{self.verdict:<8} {self.kind}{'es' if self.kind == 'prefetch' else 's'} as its rule says: {shares}"
        if self.in_use:
            text += f"; {self.in_use} times the rule's choice was in use"
        return text + (f"\n{'':<8} first: {self.first}" if self.verdict == "failed" else "")


def examine_rules(
    make: Callable[[], Any], *, hardware: HardwareProfile | None = None, like: Callable[[], Any] | None = None
) -> list[RuleCheck]:  # fmt: skip
    """Judge a policy's decisions in small runs by the rules that it states.

    Parameters
    ----------
    make : callable
        Returns a new policy.
    hardware : HardwareProfile or None
        The machine; None: the ``profile`` that the policy names, else `moesim.testing.tiny_machine`.
    like : callable or None
        Returns a shipped policy by whose rules it is judged; None: by its own, which a class that is not shipped has none of.

    Returns
    -------
    list of RuleCheck
        One for each kind of decision that was judged; or one that says why there is none; empty for a policy of one's own that
        is made of no parts with a rule.
    """
    like = like or make
    policy = like()
    if not states_a_rule(policy):
        reason = reason_without(policy)
        return [RuleCheck("no rule", reason=reason)] if reason else []
    judged: list[Judged] = []
    for case in CASES:
        try:
            policy = like()  # a run may set options of its parts that depend on the model
            facts = facts_of(policy, *case, hardware=hardware)
            judged += judge(policy, facts if like is make else facts_of(make(), *case, hardware=hardware))
        except CapacityError:
            continue
    return summary(judged)


def summary(judged: Sequence[Judged]) -> list[RuleCheck]:
    """Count what was judged, by kind and phase."""
    found = []
    for kind in dict.fromkeys(one.kind for one in judged):
        ours = [one for one in judged if one.kind == kind]
        phases = sorted({one.phase for one in ours}, reverse=True)
        shares = {phase: (sum(o.ok for o in ours if o.phase == phase), sum(o.phase == phase for o in ours)) for phase in phases}
        wrong = [one for one in ours if not one.ok]
        passed_over = sum(one.why == "in use" for one in wrong)
        found.append(RuleCheck("failed" if wrong else "passed", kind, shares, passed_over, wrong[0].text if wrong else ""))
    return found


def facts_of(
    policy: Any, batch: int, slots: int, decode: int = 8, n_layers: int = 4, *, hardware: HardwareProfile | None = None
) -> Facts:
    """Run a policy on a tiny workload, and return the facts."""
    trace, workload = both = tiny_workload(policy, batch, decode=decode, n_layers=n_layers)
    if "oracle:routing" in policy.needs:
        policy.bind_oracle(FutureUse(workload))
    inputs = run_inputs(policy, both, slots, hardware, {"n_layers": n_layers})
    placed: list[Any] = []
    sources = PredictorSet(trace, workload, {}, 0)
    records = simulate(**inputs, predictors=sources, policy_name=type(policy).__name__, placed=placed.append)
    return Facts(records, workload, placed[0], inputs["model"], inputs["costs"], inputs["tables"], sources)
