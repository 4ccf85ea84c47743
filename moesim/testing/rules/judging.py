"""Small runs of a policy, each decision judged by the policy's rules, and what is said of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from moesim.engine import simulate
from moesim.errors import CapacityError
from moesim.testing.rules.evictions import Judged
from moesim.testing.rules.facts import Facts
from moesim.testing.rules.table import judge, reason_without, states_a_rule
from moesim.testing.runs import run_inputs, tiny_workload
from moesim.trace.predictors import FutureUse, PredictorSet

if TYPE_CHECKING:
    from moesim.hardware import HardwareProfile

CASES = ((1, 8, 8, 4), (1, 16, 40, 4), (4, 16, 8, 4), (1, 32, 8, 10))
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
