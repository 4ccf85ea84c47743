"""Random compositions: the native engine's own parts decide as Python's do."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from moesim.engine.native import AVAILABLE
from moesim.policies.composed import IN_CPP, Composed, in_python
from moesim.policies.parts import replacement
from moesim.policies.parts.prefetch import TopPredicted
from moesim.policies.registry import make_policy, part_class
from moesim.policies.systems.hybrimoe import RecentScores
from moesim.testing import run_tiny, tiny_workload
from tests.engine.parts_kit import assert_alike


@pytest.mark.parametrize("n_cases", [30, pytest.param(120, marks=pytest.mark.long)])
def test_native_parts_decide_as_those_in_python(engine: str, n_cases: int) -> None:
    if engine == "simpy" or not AVAILABLE:
        pytest.skip("compares the engines, once, where both are")
    played = [assert_alike(seed) for seed in range(n_cases)]
    ended = [records for records, _ in played if records is not None]
    assert len(ended) > 0.75 * n_cases
    drawn = Counter(type(part) for _, policy in played for part in policy.parts)
    assert all(drawn[part_class(kind, name)] for kind, names in IN_CPP.items() for name in names)
    assert sum(len(records.evictions) for records in ended) > n_cases * 25 / 3


def test_the_native_engine_asks_no_shipped_composition(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("asked")

    monkeypatch.setattr(Composed, "decide", refuse)
    monkeypatch.setattr(Composed, "evict", refuse)
    policy = make_policy("lru")
    work = tiny_workload(policy)
    if engine == "native":
        run_tiny(policy, work)
    with pytest.raises(AssertionError, match="asked"):
        run_tiny(in_python(policy), work)


def test_what_is_not_exactly_as_shipped_is_asked() -> None:
    class Mine(replacement.LRU):
        """No other choice, but another class."""

    class Other(Composed):
        """Decides otherwise."""

        def decide(self, event: Any, view: Any) -> Any:
            return super().decide(event, view)

    class Named(Composed):
        """Has another part."""

        assignment = "greedy"

    policy = make_policy("lru")
    policy.parts.replacement.victim = policy.parts.replacement.victim  # of the object, no longer of its class
    own = [Composed(), make_policy("dali"), make_policy("hybrimoe-paper"), Named()]
    asked = [
        Composed(replacement=Mine()),
        Other(),
        make_policy("hybrimoe-code"),
        policy,
        Composed(replacement="arc"),
        Composed(prefetch=TopPredicted(source="frequency", size=1 << 70)),
    ]
    for one in own + asked:
        run_tiny(one, tiny_workload(one))
        assert (one.native_parts() is None) == (one in asked)


def test_scores_of_an_only_expert_are_added_in_python() -> None:
    one = Composed(replacement="mrs")
    run_tiny(one, tiny_workload(one))
    assert one.native_parts() is not None
    one.parts.replacement._recent = RecentScores(4, 1, 1, 0.5, None, "mean")
    assert one.native_parts() is None
