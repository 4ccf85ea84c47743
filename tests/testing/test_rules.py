"""Shipped policies decide as their rules say, or as an exception says; and a policy that decides otherwise is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from moesim.policies.adaptive import ArcVictim, S3FifoVictim
from moesim.policies.layer_distance import LeastStale
from moesim.policies.mixtral_offloading import MixtralOffloading
from moesim.policies.moe_infinity import MoEInfinityCode, MoEInfinityPaper
from moesim.policies.parts import Unit
from moesim.policies.ranking import LFU, Belady
from moesim.policies.registry import POLICIES, make_policy
from moesim.policies.replacement import FIFO, LRU
from moesim.policies.score_parts import MRS
from moesim.policies.two_generations import LeastStaleByGeneration
from moesim.policy import Fetch, View
from moesim.testing.rules import examine_rules

Make = Callable[[], Any]


@pytest.mark.parametrize("name", POLICIES)
def test_every_shipped_policy_decides_as_its_rule_says(name: str) -> None:
    checks = examine_rules(lambda: make_policy({"name": name}))
    assert [str(check) for check in checks if check.verdict == "failed"] == []
    assert checks, "a rule, or why there is none"


def _wrong(part: type, **options: Any) -> Make:
    """Make a composition whose part names another idle resident than the one it would."""

    class Wrong(part):  # type: ignore[misc]
        def victim(self, fetch: Fetch, view: View) -> Unit | None:
            named: Unit | None = super().victim(fetch, view)
            others = view.residents(self._gpu, "cache", fetch.layer if self._per_layer else None)
            units = [(fetch.layer, other) if isinstance(other, int) else other for other in others]
            idle = [unit for unit in units if unit != named and not view.is_in_use(*unit, self._gpu)]
            return named if named is None or not idle else idle[-1]

    return lambda: make_policy({"name": "composed", "replacement": Wrong(), **options})


def _deviations(make: Make) -> int:
    return sum(n - ok for check in examine_rules(make) for ok, n in check.shares.values())


GLOBAL = {"scope": "global"}


@pytest.mark.parametrize(
    ("part", "options"),
    [
        (LRU, {}), (FIFO, {}), (LFU, {}), (MRS, {}), (Belady, {}), (ArcVictim, {}), (S3FifoVictim, {}), (LeastStale, GLOBAL),
        (LeastStaleByGeneration, GLOBAL),
    ],
)  # fmt: skip
def test_a_part_that_lets_another_one_go_is_found(part: type, options: dict[str, Any]) -> None:
    right = _deviations(lambda: make_policy({"name": "composed", "replacement": part(), **options}))
    assert _deviations(_wrong(part, **options)) > right + 10


class NoAlpha(MRS):
    """Forgets how much the present visit counts."""

    def start(self, *given: Any) -> None:
        super().start(*given)
        self._recent._alpha = 1.0


class MostUsed(MoEInfinityCode):
    """Lets the one go that was used most."""

    def lowest(self, may_go: Any) -> Unit | None:
        self._visits *= -1
        found = super().lowest(may_go)
        self._visits *= -1
        return found


class Unmatched(MoEInfinityPaper):
    """Goes by the use so far, not by the past sequence that is most alike."""

    def lowest(self, may_go: Any) -> Unit | None:
        return MoEInfinityCode.lowest(self, may_go)


class MostRecent(MixtralOffloading):
    """Swaps the most recently used out."""

    def _plan(self, layer: int, active: Any) -> Any:
        self._order[layer] = self._order[layer][::-1]
        return super()._plan(layer, active)


@pytest.mark.parametrize("make", [MostUsed, Unmatched, MostRecent], ids=lambda make: make.__name__)
def test_a_system_that_lets_another_one_go_is_found(make: Make) -> None:
    [check] = [check for check in examine_rules(make) if check.kind == "eviction"]
    assert check.verdict == "failed"
    assert "eviction" in str(check)


def test_scores_that_forget_alpha_are_found() -> None:
    assert _deviations(lambda: make_policy({"name": "composed", "replacement": NoAlpha()})) > _deviations(
        lambda: make_policy({"name": "composed", "replacement": "mrs"})
    )
