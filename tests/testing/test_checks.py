"""The common checks find what they look for, in made-up policies and in records tampered with; the clock around decisions."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from moesim.cli.main import main
from moesim.errors import CapacityError, ConfigError
from moesim.model import load_model
from moesim.policies.base import PolicyBase
from moesim.policies.options import options_of
from moesim.policies.registry import POLICIES
from moesim.policies.systems.caches import LRU
from moesim.policies.systems.on_demand import OnDemand
from moesim.policy import Action, Copy, Fetch, Placement, Pool, Routed, Run, Skip, View
from moesim.records import EvictionRecord, InexactRecord
from moesim.studies import bench
from moesim.testing import CheckError, check_policy, examine_policy, run_tiny, tiny_machine, tiny_workload
from moesim.testing.conformance import check_slots, check_weights

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


class NoAnswer(OnHost):
    """Runs nothing."""

    def decide(self, event: Any, view: View) -> Iterable[Action]:
        return ()


class Small(OnHost):
    """Caches on demand, and forgets that there may be no slot."""

    slots_refused = -1

    def place(self, view: View) -> Placement:
        slots = view.cache_slots("gpu0") // view.model.n_layers
        if slots <= self.slots_refused:
            raise CapacityError("small: expected at least 1 cache slot a layer, got 0; raise cache.ratio")
        return Placement(pools=[Pool("gpu0", "cache", slots * view.model.expert_bytes(0), per_layer=True)])

    def decide(self, event: Any, view: View) -> Iterable[Action]:
        return Fetch(event.layer, event.active, "gpu0"), Run(event.layer, event.active, "gpu0")

    def evict(self, fetch: Fetch, view: View) -> tuple[int, int] | None:
        held = [(fetch.layer, expert) for expert in view.residents("gpu0", "cache", fetch.layer)]
        return next((unit for unit in held if not view.is_in_use(*unit, "gpu0")), None)


class Keeps(Small):
    """Never evicts."""

    def evict(self, fetch: Fetch, view: View) -> None:
        return None


class Misnames(Small):
    """Answers what is wrong with any size of the cache."""

    def evict(self, fetch: Fetch, view: View) -> tuple[int, int]:
        return fetch.layer, 99


class Places(Small):
    """Begins with two experts a layer, whatever the cache holds."""

    def place(self, view: View) -> Placement:
        pools = super().place(view).pools
        return Placement([Copy(layer, (0, 1), "gpu0") for layer in range(view.model.n_layers)], pools)


class Careful(Small):
    """Says that it needs a slot a layer."""

    slots_refused = 0


class Renames(OnHost):
    """Stores an option under another name."""

    def __init__(self, size: int = 1) -> None:
        self.n = size


class Raises(OnHost):
    """Has a defect."""

    def decide(self, event: Any, view: View) -> Iterable[Action]:
        raise KeyError("experts")


class Plain:
    """Declares nothing, and does nothing."""

    def decide(self, event: Any, view: Any) -> None:
        """Say nothing."""


def test_policies_that_keep_the_rules_pass() -> None:
    check_policy(OnHost, slots=(1,))
    check_policy(OnDemand, slots=(4,), hardware=tiny_machine(2))


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Remembers, r"Remembers\(\): .*an object that has run differs from a new one; build its state in place\(\)"),
        (Local, r"Local\(\): .*it cannot be sent to another process: "),
        (Wide, r"Wide\(\): .*it does not fit even with a slot for every expert: policy wide: expected more slots"),
        (NoAnswer, r"NoAnswer\(\): 32 cache slots, 8 a layer: batch 1: t=.* \[policy=NoAnswer\]"),
        (Raises, r"Raises\(\): 32 cache slots, 8 a layer: batch 1: KeyError: 'experts' \(test_checks\.py:\d+\)"),
        (Plain, r"Plain\(\): .*: expected the methods place, decide and evict, got no place, no evict"),
        (Renames, r"Renames\(\): .*: option size: expected the attribute size, got none; store it in __init__"),
    ],
)
def test_policies_that_break_a_rule_are_found(policy: Any, message: str) -> None:
    with pytest.raises(CheckError, match=message):
        check_policy(policy, slots=(32,))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"exact": None}, "expected exact to be a bool, got None"),
        ({"listens": [Routed]}, "expected listens to be a frozenset, got "),
        ({"listens": frozenset({int})}, "listens names no event: "),
        ({"needs": frozenset({"routing"})}, "needs 'routing'; expected "),
    ],
)
def test_declarations_are_those_of_the_contract(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckError, match=f"it declares exact, listens and needs as the contract asks: {message}"):
        check_policy(type("Wrong", (OnHost,), change))


def test_the_cause_of_a_failure_is_kept() -> None:
    with pytest.raises(CheckError) as error:
        check_policy(Raises, slots=(4, 32))
    assert str(error.value).startswith("Raises(): 4 and 32 cache slots: batch 1: KeyError: 'experts'"), "both fail alike"
    causes = []
    cause = error.value.__cause__
    while cause is not None:
        causes.append(type(cause))
        cause = cause.__cause__
    assert KeyError in causes


def test_a_cache_without_a_slot_a_layer_is_explained_and_may_be_refused() -> None:
    report = examine_policy(Small)
    assert [(check.verdict, check.what) for check in report.checks[2:]] == [
        ("failed", "1 cache slot, 0 a layer"), ("passed", "4 cache slots, 1 a layer"),
        ("passed", "12 cache slots, 3 a layer"), ("passed", "32 cache slots, 8 a layer"),
    ]  # fmt: skip
    (failure,) = report.failures
    assert "pool 'cache' holds 0 bytes" in failure.detail
    assert failure.remedy.startswith("1 over 4 layers are 0 a layer, and a row needs 2 experts; a policy may refuse so few")
    assert "CapacityError in place()" in failure.remedy
    with pytest.raises(CheckError, match=r"1 cache slot, 0 a layer: batch 1: .*: 1 over 4 layers are 0 a layer"):
        check_policy(Small)
    careful = check_policy(Careful)
    assert [check.verdict for check in careful.checks[2:]] == ["refused", "passed", "passed", "passed"]
    assert "small: expected at least 1 cache slot a layer" in str(careful)


def test_no_remedy_where_the_size_of_the_cache_is_not_the_matter() -> None:
    assert [(check.what, check.remedy) for check in examine_policy(Raises).failures] == [("1, 4, 12 and 32 cache slots", "")]
    failures = {check.what: check for check in examine_policy(Misnames).failures}
    for what in ("4 cache slots, 1 a layer", "12 cache slots, 3 a layer"):
        assert "E99: not resident in pool 'cache'" in failures[what].detail and not failures[what].remedy


def test_the_remedy_is_for_less_than_a_row_needs_where_the_engine_has_no_room() -> None:
    none, one, three = examine_policy(Keeps).failures
    assert "waits for memory in pool 'cache'" in one.detail and "waits for memory in pool 'cache'" in three.detail
    assert none.remedy.startswith("1 over 4 layers are 0 a layer, and a row needs 2 experts; a policy may refuse so few")
    assert one.remedy.startswith("4 over 4 layers are 1 a layer, and a row needs 2 experts; a policy may refuse so few")
    assert three.what == "12 cache slots, 3 a layer" and three.remedy == "", "a row's experts have room"
    placed = examine_policy(Places).failures
    assert [check.remedy.partition(",")[0] for check in placed] == [
        "1 over 4 layers are 0 a layer",
        "4 over 4 layers are 1 a layer",
    ]
    assert all("is too small for the copies" in check.detail for check in placed)


def test_a_report_says_what_was_checked() -> None:
    text = str(check_policy(partial(LRU, placement="highest-ids"), slots=(1, 32)))
    assert text.splitlines()[:5] == [
        "LRU(placement='highest-ids') on tiny: 4 layers of 8 experts, prompts of 12 tokens, 8 decode steps",
        "passed   it declares exact, listens and needs as the contract asks",
        "passed   its constructor stores its options unchanged: " + ", ".join(options_of(LRU)),
        next(line for line in text.splitlines() if line.startswith("refused  1 cache slot, 0 a layer: policy LRU")),
        "passed   32 cache slots, 8 a layer: 5 of 5 workloads",
    ]
    assert "batch 4 in 4 micro-batches, 0.7 us a decision; batch 4, top-1" in text


def test_a_table_that_no_made_up_trace_holds_is_bad_input() -> None:
    with pytest.raises(ConfigError, match="policy Wants: needs table:of_dreams, which no made-up trace holds"):
        check_policy(type("Wants", (OnHost,), {"needs": frozenset({"table:of_dreams"})}))


def test_a_class_that_no_other_process_could_find_is_not_pickled() -> None:
    class Inner(OnHost):
        """Made in a function."""

    check_policy(Inner, slots=(1,))


def test_rows_executed_too_often_are_found() -> None:
    records = run_tiny(LRU(), WORK, 12)
    check_slots(LRU(), WORK, records)
    records.tasks.append(next(t for t in records.tasks if t.kind == "expert"))
    with pytest.raises(CheckError, match="executed for other rows than were routed"):
        check_slots(LRU(), WORK, records)


def test_slots_that_do_not_add_up_are_found() -> None:
    policy = Skips()
    records = run_tiny(policy, WORK)
    check_slots(policy, WORK, records)
    assert {r.kind for r in records.inexact} == {"skipped"}
    skipped = records.inexact.pop()
    with pytest.raises(CheckError, match="rows executed and slots skipped are not the slots there were"):
        check_slots(policy, WORK, records)
    records.inexact.append(skipped._replace(mass=1e6))
    with pytest.raises(CheckError, match=f"more than all of step {skipped.step} is not fresh"):
        check_slots(policy, WORK, records)
    records.inexact[-1] = skipped
    records.steps[0] = records.steps[0]._replace(gate_mass=1.0)
    with pytest.raises(CheckError, match="gate weights of step 0"):
        check_slots(policy, WORK, records)


def test_an_exact_policy_may_have_nothing_inexact() -> None:
    records = run_tiny(LRU(), WORK, 12)
    records.inexact.append(InexactRecord(0, 0, "stale", 1, 0.5))
    with pytest.raises(CheckError, match="exact, and yet not all slots are fresh"):
        check_slots(LRU(), WORK, records)


def test_weights_that_are_not_there_are_found() -> None:
    records = run_tiny(LRU(), WORK, 12)
    check_weights(LRU(), WORK, records, 12)
    loaded = next(t for t in records.transfers if t.last)
    used = next(t for t in records.tasks if (t.layer, t.expert) == (loaded.layer, loaded.expert) and t.start >= loaded.end)
    message = f"gpu0 computed expert {used.expert} of layer {used.layer} without its weights"

    records.transfers.remove(loaded)  # it never came
    with pytest.raises(CheckError, match=message):
        check_weights(LRU(), WORK, records, 12)
    for end, fine in ((used.start, True), (used.start + 1, False)):  # it came in time, or too late
        records.transfers.append(loaded._replace(end=end))
        if fine:
            check_weights(LRU(), WORK, records, 12)
        else:
            with pytest.raises(CheckError, match=message):
                check_weights(LRU(), WORK, records, 12)
        records.transfers.pop()
    records.transfers.append(loaded)
    for time, fine in ((used.start - 1, False), (used.end - 1, False)):  # it went before, or while it was in use
        records.evictions.append(EvictionRecord(time, "gpu0", "cache", used.layer, used.expert, "evict", True, loaded.fetch))
        assert not fine
        with pytest.raises(CheckError, match=message):
            check_weights(LRU(), WORK, records, 12)
        records.evictions.pop()


@pytest.fixture
def few_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model of the measurement with four layers."""
    monkeypatch.setattr(bench, "load_model", lambda spec: load_model({**spec, "n_layers": 4}))


@pytest.mark.usefixtures("few_layers")
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

    monkeypatch.setattr("moesim.cli.bench.run_deciding", lambda repeats, tokens: rows[: repeats + tokens])
    assert main(["bench", "--policies", "--repeats", "2", "--tokens", "3", "-o", "json"]) == 0
    assert [row["policy"] for row in json.loads(capsys.readouterr().out)] == [row.policy for row in rows[:5]]
    assert main(["bench", "--policies", "--repeats", "1", "--tokens", "1"]) == 0
    printed = capsys.readouterr().out
    assert "both / dali's" in printed
    assert "half of the experts cached" in printed


def test_growth_is_told_by_size(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench, "AXES", {"tokens": (2, 4, 99), "layers": (1, 2)})
    monkeypatch.setattr(bench, "_BASE", {"tokens": 3, "batch": 2, "experts": 8, "layers": 3})
    assert main(["bench", "--growth", "--repeats", "1", "--tokens", "4", "-o", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["varied"], row["value"]) for row in rows] == [("tokens", 2), ("tokens", 4), ("layers", 1), ("layers", 2)]
    assert [row["n_slots"] for row in rows] == [3 * 2 * 3 * 2, 5 * 2 * 3 * 2, 4 * 2 * 1 * 2, 4 * 2 * 2 * 2]
    assert all(0 < row["n_runs"] <= row["n_slots"] for row in rows)
    assert main(["bench", "--growth", "--repeats", "1", "--tokens", "2", "-o", "md"]) == 0
    head, _, first, *_ = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
    assert len(head) == len(first)
    assert main(["bench", "--growth", "--sweeps"]) == 2


def test_the_clock_changes_nothing() -> None:
    assert run_tiny(bench.Clocked(OnDemand()), WORK) == run_tiny(OnDemand(), WORK)


@pytest.mark.long
@pytest.mark.usefixtures("few_layers")
def test_every_policy_is_measured_on_a_machine_that_it_can_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "DECIDING_BATCHES", (1,))
    monkeypatch.setattr(bench, "PROMPT_TOKENS", 1)
    assert {row.policy for row in bench.run_deciding(repeats=1, tokens=1)} == set(POLICIES)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            "class Mine(LRU):\n    def on_route(self, event, view): return []",
            "Mine.on_route: nothing calls it; did you mean on_routed?",
        ),
        ("class Mine(Composed):\n    scop = 'global'", "Mine.scop: nothing reads it; did you mean scope?"),
        ("class Mine(Composed):\n    assignmnt = 'all-gpu'", "Mine.assignmnt: nothing reads it; did you mean assignment?"),
        (
            "class Mine(Composed):\n    replacement = None\n    def compos(self): return ()",
            "Mine.compos: nothing calls it; did you mean compose?",
        ),
        (
            "class Own(Admitting):\n    def victm(self, fetch, view): return None\n"
            "class Mine(Composed):\n    replacement = None\n"
            "    def compose(self): return super().compose()._replace(replacement=Own())",
            "Own.victm: nothing calls it; did you mean victim?",
        ),
        ("class Mine(Composed):\n    scop: str = 'global'\n    _scope = prefix = 1\n    load_order = 'rows'", ""),
    ],
)
def test_a_name_that_nothing_uses_is_found(body: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imports = (
        "from moesim.policies.composed import Composed\nfrom moesim.policies.systems.caches import LRU\n"
        "from moesim.policies.parts.replacement import Admitting\n"
    )
    (tmp_path / "misspelt_policy.py").write_text(imports + body, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "misspelt_policy", raising=False)
    first = next((check.detail for check in examine_policy(import_module("misspelt_policy").Mine).failures), "")
    assert first == (f"{said} a helper's name begins with _" if said else "")


class _Scores(LRU):
    def on_routed(self, event: Any, view: Any) -> list[Any]:
        event.scores.mean()
        return super().on_routed(event, view)


def test_scores_that_are_not_asked_for_are_not_there() -> None:
    assert "'NoneType' object has no attribute 'mean'" in str(examine_policy(_Scores).failures[0].detail)
