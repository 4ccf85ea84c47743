"""An option that cannot matter beside another one is refused: the rules, the message, what is listed, and where specs change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import pytest

from moesim.cli.main import main
from moesim.errors import ConfigError
from moesim.experiment.resolve import Experiment
from moesim.policies.composed import Composed
from moesim.policies.declare import Range, option_parameters
from moesim.policies.moot import InPolicy, MootIf, OnlyWith, Where, describe_rules, moot_in_parts, moot_options, rules_of
from moesim.policies.options import construct, describe, matches
from moesim.policies.part_names import PARTS
from moesim.policies.parts.replacement import LRU, Static
from moesim.policies.registry import POLICIES, make_policy, policy_class, without_moot
from moesim.studies.oracles import derive
from tests.experiment.experiment_kit import resolve, write_yaml

LARGE = Where("above 2", lambda size: size > 2)


class Made:
    """Something with options."""

    def __init__(
        self,
        *,
        mode: Literal["a", "b"] = "a",
        on: bool = True,
        size: int = 1,
        only_a: Annotated[int, Range(0), OnlyWith(mode="a")] = 0,
        not_off: Annotated[int, MootIf(on=False)] | None = None,
        both: Annotated[bool, MootIf(mode="b", size=(0, 1))] = False,
        small: Annotated[bool, MootIf(size=LARGE)] = False,
        itself: Annotated[int, MootIf(on=False, itself=LARGE)] = 0,
    ) -> None:
        self.mode, self.on, self.size, self.only_a, self.not_off = mode, on, size, only_a, not_off
        self.both, self.small, self.itself = both, small, itself


class Held:
    """A part with options."""

    def __init__(
        self,
        *,
        if_on: Annotated[int, InPolicy(OnlyWith(on=True))] = 0,
        if_other: Annotated[int, InPolicy(MootIf(other=Where("empty", lambda part: part is None)))] = 0,
        beside_own: Annotated[int, InPolicy(MootIf(on=False), if_on=(0, 1))] = 0,
    ) -> None:
        self.if_on, self.if_other, self.beside_own = if_on, if_other, beside_own


class Holder:
    """A policy with parts."""

    class Parts(NamedTuple):
        held: Held
        other: Any

    def __init__(self, *, held: Any = None, other: Any = "some", on: bool = True) -> None:
        self.held, self.other, self.on = held, other, on

    @property
    def parts(self) -> Parts:
        return self.Parts(Held(**(self.held or {})), None if self.other == "none" else self.other)


def refused(**options: Any) -> str:
    with pytest.raises(ConfigError) as error:
        construct(Made, options, "thing", "a.yaml")
    return str(error.value).removeprefix("a.yaml: thing: ")


def test_what_makes_an_option_moot_is_named_with_what_to_do() -> None:
    assert refused(mode="b", only_a=2) == "option only_a: cannot matter beside mode: b; leave it out, or set mode: a"
    assert refused(on=False, not_off=2) == "option not_off: cannot matter beside on: false; leave it out"
    assert refused(size=3, small=True) == "option small: cannot matter beside size: 3; leave it out"
    assert refused(mode="b", both=True) == "option both: cannot matter beside mode: b and size: 1 (the default); leave it out"


def test_an_option_that_is_written_at_its_default_is_refused_too() -> None:
    assert refused(mode="b", only_a=0).startswith("option only_a: cannot matter beside mode: b")
    assert refused(on=False, not_off=None).startswith("option not_off: cannot matter beside on: false")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mode": "b"},
        {"only_a": 2},
        {"on": True, "not_off": 3},
        {"mode": "b", "size": 2, "both": True},
        {"size": 2, "small": True},
        {"on": False, "itself": 2},
    ],
    ids=str,
)
def test_an_option_that_may_matter_is_accepted(options: dict[str, Any]) -> None:
    assert construct(Made, options, "thing", "a.yaml")


def test_a_rule_may_be_about_some_values_of_the_option_itself() -> None:
    assert refused(on=False, itself=3) == "option itself: cannot matter beside on: false; leave it out"


def test_an_option_of_a_part_may_be_moot_in_a_policy() -> None:
    written = {"held": {"if_on": 1, "if_other": 2}, "other": "none", "on": False}
    assert moot_in_parts(Holder(**written), written) == {
        "held": {
            "if_on": "cannot matter beside on: false; leave it out, or set on: true",
            "if_other": "cannot matter beside other: none; leave it out",
        }
    }
    assert moot_in_parts(Holder(**written), {"other": "none"}) == {}, "nobody wrote them"
    assert moot_in_parts(Holder(held=written["held"]), written) == {}
    written = {"held": {"if_on": 1, "beside_own": 2}, "on": False}
    assert (
        moot_in_parts(Holder(**written), written)["held"]["beside_own"]
        == "cannot matter beside if_on: 1 and on: false; leave it out"
    )
    written = {"held": {"if_on": 2, "beside_own": 2}, "on": False}
    assert list(moot_in_parts(Holder(**written), written)["held"]) == ["if_on"]
    assert describe_rules(Held) == {
        "if_on": "in a policy, only with on true",
        "if_other": "in a policy, not with other empty",
        "beside_own": "in a policy, with if_on 0 or 1, not with on false",
    }


def test_a_rule_about_what_a_policy_has_not_says_nothing() -> None:
    class Less(Holder):
        def __init__(self, *, held: Any = None) -> None:
            self.held, self.other = held, "none"

    written = {"held": {"if_on": 1}}
    assert moot_in_parts(Less(**written), written) == {}


def test_false_is_not_zero() -> None:
    assert not moot_options(Made(mode="b", size=False, both=True), ["both"])


def test_annotations_say_what_they_said_without_rules() -> None:
    hint = Annotated[int, Range(1), OnlyWith(mode="a")] | None
    assert describe(hint) == "an integer of at least 1 or null"
    assert (matches(None, hint), matches(1, hint), matches(0, hint)) == (True, True, False)


def test_rules_are_written_for_people() -> None:
    assert describe_rules(Made) == {
        "only_a": "only with mode a",
        "not_off": "not with on false",
        "both": "not with mode b and size 0 or 1",
        "small": "not with size above 2",
        "itself": "not with on false and itself above 2",
    }
    assert describe_rules(LRU) == {}


@pytest.mark.parametrize("cls", [*map(policy_class, POLICIES), *(part for parts in PARTS.values() for part in parts.values())])
def test_rules_name_options(cls: type) -> None:
    known = set(option_parameters(cls))
    of_policies = [(set(option_parameters(cls)), set(vars(cls))) for cls in map(policy_class, POLICIES)]
    for option, rules in rules_of(cls).items():
        for rule in rules:
            if isinstance(rule, InPolicy):
                named = set(rule.rule.others)
                assert any(named <= options | attributes for options, attributes in of_policies), f"{cls.__name__}.{option}"
                assert set(rule.own) <= known - {option}, f"{cls.__name__}.{option}"
            else:
                assert set(rule.others) <= known, f"{cls.__name__}.{option}"
                assert set(rule.others) != {option}, "of no other option"


# ------------------------------------------------------------------------------------------------------------- policies
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            {"name": "dali", "replacement": "lru", "w_size": 8},
            "policy dali: option w_size: cannot matter beside replacement: lru; leave it out, or set replacement: null",
        ),
        (
            {"name": "dali", "prefetch": {"name": "random", "size": 2}, "prefetch_size": 2},
            "policy dali: option prefetch_size: cannot matter beside prefetch: random; leave it out, or set prefetch: null",
        ),
        (
            {"name": "prescope", "next2_predictor": "oracle"},
            "policy prescope: option next2_predictor: cannot matter beside window: none (the default); leave it out, or set "
            "window: next2",
        ),
        (
            {"name": "composed", "assignment": "all-cpu", "replacement": "lfu"},
            "policy composed: option replacement: cannot matter beside assignment: all-cpu and prefetch: none (the default); "
            "leave it out",
        ),
        (
            {"name": "lru", "prefetch": {"name": "predicted", "source": "oracle", "pool": "cache", "buffers": 2}},
            "policy lru: prefetch: prefetch predicted: option buffers: cannot matter beside pool: cache; leave it out, or set "
            "pool: transient",
        ),
        (
            {"name": "composed", "placement": "none", "replacement": {"name": "workload-aware", "w_size": 2}},
            "policy composed: replacement workload-aware: option w_size: cannot matter beside placement: none; leave it out",
        ),
        (
            {"name": "prescope", "scheduler": {"name": "hss", "cached_from": "start"}},
            "policy prescope: scheduler hss: option cached_from: cannot matter beside cancel: layer-end (the default); leave it",
        ),
        (
            {"name": "hybrimoe-paper", "assignment": "all-cpu", "prefetch": {"name": "mrs-score", "size": 2}},
            "policy hybrimoe-paper: prefetch mrs-score: option size: cannot matter beside assignment: all-cpu; leave it out",
        ),
        (
            {"name": "dali", "assignment": "gready", "cache_only": True},
            "policy dali: assignment: unknown assignment 'gready'; did you mean 'greedy'?",
        ),
    ],
)
def test_policies_and_parts_refuse_what_cannot_matter(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_policy(spec, "a.yaml: policies")
    assert str(error.value).startswith(f"a.yaml: policies: {message}")


def test_a_part_that_somebody_made_counts_as_what_it_is() -> None:
    with pytest.raises(ConfigError, match="option slots_split: cannot matter beside placement: none and replacement: "):
        make_policy({"name": "composed", "placement": "none", "replacement": Static(), "slots_split": "equal"})


def test_what_other_options_make_moot_is_left_out() -> None:
    spec = {"name": "dali", "w_size": 8, "cache_only": True, "replacement": "belady", "assignment": "all-gpu"}
    assert without_moot(spec) == {"name": "dali", "replacement": "belady", "assignment": "all-gpu"}
    assert without_moot({"name": "dali", "w_size": 8}) == {"name": "dali", "w_size": 8}
    swaps = {"name": "composed", "assignment": {"name": "hss", "cached_from": "start"}, "replacement": "workload-aware"}
    assert without_moot(swaps) == swaps
    assert without_moot({**swaps, "replacement": "belady"}) == {**swaps, "assignment": {"name": "hss"}, "replacement": "belady"}


# ------------------------------------------------------------------------------------------------- sweeps, oracles, lists
def test_a_sweep_that_combines_an_option_with_what_makes_it_moot_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    swept = {"name": "dali", "replacement": [None, "lru"], "w_size": [2, 8]}
    write_yaml(tmp_path, policies=[swept])
    assert main(["run", str(tmp_path / "small.yaml")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "small.yaml: policies[0]: policy dali: option w_size: cannot matter beside replacement: lru; leave it out" in line


def test_combinations_that_are_excluded_are_not_refused(tmp_path: Path) -> None:
    swept = {"name": "dali", "replacement": [None, "lru"], "w_size": [2, 8]}
    moot = {"policies.replacement": "lru", "policies.w_size": [2, 8]}
    experiment = resolve(tmp_path, policies=[swept, {"name": "dali", "replacement": "lru"}], exclude=[moot])
    assert [spec.point.policy.get("w_size") for spec in experiment.specs] == [2, 8, None]


def test_an_oracle_replaces_a_decision_with_its_options(tmp_path: Path) -> None:
    experiment: Experiment = resolve(tmp_path, policies=[{"name": "dali", "w_size": 2, "prefetch_size": 2}])
    derived = derive(experiment.specs[0], frozenset({"replacement"}))
    assert derived.point.policy == {"name": "dali", "prefetch_size": 2, "replacement": "belady"}
    assert make_policy(derived.point.policy)


def test_lists_show_the_rules(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["list", "policies", "--long"]) == 0
    assert "  op_offload_rule, staging_slots: only with op_offload true\n" in capsys.readouterr().out
    assert main(["list", "policies", "-o", "json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["llama-cpp"]["moot"]["op_offload_rule"] == "only with op_offload true"
    assert main(["list", "parts", "-o", "json"]) == 0
    predicted = next(row for row in json.loads(capsys.readouterr().out) if row["name"] == "predicted")
    assert "buffers=1 (only with pool transient)" in predicted["options"]


def test_what_a_preset_has_fixed_is_no_remedy() -> None:
    fixed = Composed.preset("Fixed", "A cache.", fixed=("scope",), scope="global")
    why = moot_options(fixed(slots_split="equal"), ["slots_split"])["slots_split"]
    assert why.endswith("; leave it out")
    free = moot_options(Composed(scope="global", slots_split="equal"), ["slots_split"])["slots_split"]
    assert free.endswith("; leave it out, or set scope: per-layer")
