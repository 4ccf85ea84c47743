"""The common checks find what they look for, in made-up policies and in records tampered with; the clock around decisions."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest

from moesim import bench
from moesim.cli import main
from moesim.errors import CapacityError
from moesim.policies.base import PolicyBase
from moesim.policies.caches import LRU
from moesim.policies.on_demand import OnDemand
from moesim.policies.registry import POLICIES
from moesim.policy import Action, Placement, Routed, Run, Skip, View
from moesim.records import EvictionRecord, InexactRecord
from moesim.testing import check_policy, run_tiny, tiny_machine, tiny_workload
from moesim.testing.checks import check_slots, check_weights

WORK = tiny_workload(LRU(), 4)


class OnHost(PolicyBase):
    """Runs all on the host."""

    listens = frozenset({Routed})

    def decide(self, event: Any, view: View) -> Iterable[Action]:
        return (Run(event.layer, event.active, "cpu0"),)


class Remembers(OnHost):
    """Skips no row of its first run, and all of later ones."""

    exact = False

    def __init__(self) -> None:
        self.runs = 0

    def place(self, view: View) -> Placement:
        self.runs += 1
        return Placement()

    def decide(self, event: Any, view: View) -> Iterable[Action]:
        return super().decide(event, view) if self.runs == 1 else (Skip(event.layer, event.active),)


class Skips(OnHost):
    """Skips the first active expert of each layer, and says so."""

    exact = False

    def decide(self, event: Any, view: View) -> Iterable[Action]:
        first, *rest = event.active
        skip = Skip(event.layer, [first])
        return (skip, Run(event.layer, rest, "cpu0")) if rest else (skip,)


class Local(OnHost):
    """Holds what cannot be pickled."""

    def __init__(self) -> None:
        self.rule = lambda: None


class Wide(OnHost):
    """Refuses even a slot for every expert."""

    def place(self, view: View) -> Placement:
        raise CapacityError("policy wide: expected more slots, got fewer; raise cache.ratio")


def test_policies_that_keep_the_rules_pass() -> None:
    check_policy(OnHost, slots=(1,))
    check_policy(OnDemand, slots=(4,), hardware=tiny_machine(2))


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Remembers, r"Remembers\(\): an object that has run differs from a new one; build its state in place\(\)"),
        (Local, r"Local\(\): cannot be sent to another process: "),
        (Wide, r"Wide\(\): does not fit even with a slot for every expert"),
    ],
)
def test_policies_that_break_a_rule_are_found(policy: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_policy(policy, slots=(32,))


def test_a_class_that_no_other_process_could_find_is_not_pickled() -> None:
    class Inner(OnHost):
        """Made in a function."""

    check_policy(Inner, slots=(1,))


def test_rows_executed_too_often_are_found() -> None:
    records = run_tiny(LRU(), WORK, 12)
    check_slots(LRU(), WORK, records)
    records.tasks.append(next(t for t in records.tasks if t.kind == "expert"))
    with pytest.raises(AssertionError, match="executed for other rows than were routed"):
        check_slots(LRU(), WORK, records)


def test_slots_that_do_not_add_up_are_found() -> None:
    policy = Skips()
    records = run_tiny(policy, WORK)
    check_slots(policy, WORK, records)
    assert {r.kind for r in records.inexact} == {"skipped"}
    skipped = records.inexact.pop()
    with pytest.raises(AssertionError, match="rows executed and slots skipped are not the slots there were"):
        check_slots(policy, WORK, records)
    records.inexact.append(skipped._replace(mass=1e6))
    with pytest.raises(AssertionError, match=f"more than all of step {skipped.step} is not fresh"):
        check_slots(policy, WORK, records)
    records.inexact[-1] = skipped
    records.steps[0] = records.steps[0]._replace(gate_mass=1.0)
    with pytest.raises(AssertionError, match="gate weights of step 0"):
        check_slots(policy, WORK, records)


def test_an_exact_policy_may_have_nothing_inexact() -> None:
    records = run_tiny(LRU(), WORK, 12)
    records.inexact.append(InexactRecord(0, 0, "stale", 1, 0.5))
    with pytest.raises(AssertionError, match="exact, and yet not all slots are fresh"):
        check_slots(LRU(), WORK, records)


def test_weights_that_are_not_there_are_found() -> None:
    records = run_tiny(LRU(), WORK, 12)
    check_weights(LRU(), WORK, records, 12)
    loaded = next(t for t in records.transfers if t.last)
    used = next(t for t in records.tasks if (t.layer, t.expert) == (loaded.layer, loaded.expert) and t.start >= loaded.end)
    message = f"gpu0 computed expert {used.expert} of layer {used.layer} without its weights"

    records.transfers.remove(loaded)  # it never came
    with pytest.raises(AssertionError, match=message):
        check_weights(LRU(), WORK, records, 12)
    for end, fine in ((used.start, True), (used.start + 1, False)):  # it came in time, or too late
        records.transfers.append(loaded._replace(end=end))
        if fine:
            check_weights(LRU(), WORK, records, 12)
        else:
            with pytest.raises(AssertionError, match=message):
                check_weights(LRU(), WORK, records, 12)
        records.transfers.pop()
    records.transfers.append(loaded)
    for time, fine in ((used.start - 1, False), (used.end - 1, False)):  # it went before, or while it was in use
        records.evictions.append(EvictionRecord(time, "gpu0", "cache", used.layer, used.expert, "evict", True, loaded.fetch))
        assert not fine
        with pytest.raises(AssertionError, match=message):
            check_weights(LRU(), WORK, records, 12)
        records.evictions.pop()


# --------------------------------------------------------------------------------------------------- time in decisions
def test_bench_measures_decisions_beside_dalis(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench, "DECIDING_BATCHES", (1, 2))
    rows = bench.run_deciding(repeats=1, tokens=1, names=["all-cpu", "lru", "belady", "daop-paper"])
    assert [row.batch for row in rows] == [1] * 5 + [2] * 5
    assert {row.policy for row in rows} == {"dali", "all-cpu", "lru", "belady", "daop-paper"}
    for row in rows:
        assert (row.ratio == 1) or row.policy != "dali"
        assert row.decide_ns > 0
        assert (row.evict_ns > 0) == (row.policy in ("lru", "belady")) or row.policy in ("dali", "daop-paper")
    assert [row.ratio for row in rows[:5]] == sorted(row.ratio for row in rows[:5])

    monkeypatch.setattr("moesim.commands.bench.run_deciding", lambda repeats, tokens: rows[: repeats + tokens])
    assert main(["bench", "--policies", "--repeats", "2", "--tokens", "3", "-o", "json"]) == 0
    assert [row["policy"] for row in json.loads(capsys.readouterr().out)] == [row.policy for row in rows[:5]]
    assert main(["bench", "--policies", "--repeats", "1", "--tokens", "1"]) == 0
    printed = capsys.readouterr().out
    assert "both / dali's" in printed
    assert "half of the experts cached" in printed


def test_the_clock_changes_nothing() -> None:
    assert run_tiny(bench.Clocked(OnDemand()), WORK) == run_tiny(OnDemand(), WORK)


def test_every_policy_is_measured_on_a_machine_that_it_can_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "DECIDING_BATCHES", (1,))
    monkeypatch.setattr(bench, "PROMPT_TOKENS", 1)
    assert {row.policy for row in bench.run_deciding(repeats=1, tokens=1)} == set(POLICIES)
