"""An option is written once, and appears from there everywhere."""

from __future__ import annotations

import inspect
import json
import math
from typing import Annotated, Any, ClassVar, Literal

import pytest
from pydantic import Field
from pydantic.fields import FieldInfo

from moesim.cli.main import main
from moesim.errors import ConfigError
from moesim.policies.base import PolicyBase
from moesim.policies.composed import Composed
from moesim.policies.options import Option, _check_class, construct, option, options_of
from moesim.policies.parts import PrefetchOption
from moesim.policies.parts.prefetch import NoPrefetch
from moesim.policies.registry import PARTS, POLICIES, make_policy, part_class, policy_class

CLASSES = [*map(policy_class, POLICIES), *(part_class(kind, name) for kind, names in PARTS.items() for name in names)]
Rate = Annotated[int, Field(ge=1, description="How fast.")]


class Plain(PolicyBase):
    constant = 4
    _hidden: ClassVar[int] = 3

    share: float = option(0.5, "How much of it.", ge=0, le=1)
    kind: Literal["a", "b"] = option("a")


class Fixing(Plain):
    share: float = option(0.25, ge=0, le=1)
    kind = "b"
    more: int = option()


class Own(Fixing):
    def __init__(self, *, other: Rate = 2, unknown: Any = None) -> None:
        super().__init__(more=1)
        self.other, self.unknown = other, unknown


class Nothing(Fixing, fixed=True):
    more = 3


class Rated(PolicyBase):
    speed: Rate | None = option(None)
    rate: Rate = option(7)
    walks: bool = option(True, "Whether it walks.")


def meanings(cls: type) -> dict[str, str]:
    return {name: one.meaning for name, one in options_of(cls).items()}


def test_attributes_with_an_option_are_options_and_nothing_else_is() -> None:
    assert {name: one.default for name, one in options_of(Plain).items()} == {"share": 0.5, "kind": "a"}
    assert meanings(Plain) == {"share": "How much of it.", "kind": ""}
    made = Plain(share=0.1)
    assert (made.share, made.kind, made.options(), repr(made)) == (0.1, "a", {"share": 0.1, "kind": "a"}, "Plain(share=0.1)")
    assert list(inspect.signature(Plain).parameters) == ["share", "kind"]


def test_a_subclass_declares_an_option_anew_or_fixes_it() -> None:
    assert [(one.name, one.required) for one in options_of(Fixing).values()] == [("share", False), ("more", True)]
    assert (Fixing(more=1).share, Fixing(more=1).kind) == (0.25, "b")
    assert meanings(Fixing)["share"] == "How much of it."
    for wrong in ({"more": 1, "kind": "a"}, {}, {"more": 1, "nothing": 2}):
        with pytest.raises(TypeError):
            Fixing(**wrong)  # type: ignore[arg-type]
    assert not options_of(Nothing) and (Nothing().more, Nothing().share) == (3, 0.25)
    with pytest.raises(TypeError):
        Nothing(more=3)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"scope": "perlayer"}, r"Mine.scope: expected 'per-layer' or 'global', got 'perlayer'; choose one of these"),
        ({"scope": option("perlayer")}, r"Mine.scope: expected 'per-layer' or 'global', got 'perlayer'"),
        ({"scope": None}, r"Mine.scope: expected 'per-layer' or 'global', got None"),
        (
            {"staging_slots": 0, "__annotations__": {"staging_slots": "int"}},
            r"Mine.staging_slots: expected an integer of at least 1",
        ),
        (
            {"assignmnt": option("all-gpu")},
            r"Mine.assignmnt: expected an annotation such as `assignmnt: str = .*`, got none; did you mean assignment\?$",
        ),
        ({"zeal": option(3)}, r"Mine.zeal: expected an annotation such as `zeal: str = option\(...\)`, got none$"),
    ],
)
def test_a_class_fixes_an_option_by_what_it_takes_and_types_its_own(own: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        type("Mine", (Composed,), own)
    fine = type("Mine", (Composed,), {"scope": "global", "replacement": None, "needs": frozenset(), "load_order": option("rows")})
    assert options_of(fine)["load_order"].default == "rows" and "scope" not in options_of(fine)


@pytest.mark.parametrize("cls", CLASSES)
def test_shipped_classes_fix_options_by_what_they_take(cls: type) -> None:
    for base in cls.__mro__:
        _check_class(base)


def test_a_constructor_of_its_own_is_read_instead() -> None:
    assert {name: one.expected for name, one in options_of(Own).items()} == {
        "other": "an integer of at least 1", "unknown": "anything",
    }  # fmt: skip
    assert (meanings(Own)["other"], options_of(Own)["other"].default) == ("How fast.", 2)
    assert (construct(Own, {"other": 3}, "policy own", "a").share, Own(other=3).other) == (0.25, 3)


def test_a_type_that_classes_share_has_bounds_and_meaning() -> None:
    assert options_of(Rated)["rate"].expected == "an integer of at least 1"
    assert options_of(Rated)["speed"].expected == "an integer of at least 1 or null"
    assert meanings(Rated)["rate"] == "How fast."


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speed": 0}, "option speed: expected an integer of at least 1 or null, got 0; choose a value in this range"),
        ({"rate": "3"}, "option rate: expected an integer of at least 1, got '3'; write it without quotes"),
        ({"rate": True}, "option rate: expected an integer of at least 1, got True"),
        ({"walks": 1}, "option walks: expected true or false, got 1"),
        ({"spedd": 3}, "unknown option 'spedd'; did you mean 'speed'?"),
    ],
)
def test_messages_come_from_the_declaration(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        construct(Rated, options, "policy rated", "a.yaml")
    assert f"a.yaml: policy rated: {message}" in str(caught.value)


@pytest.mark.parametrize(
    ("hint", "fits", "not_fit"),
    [
        (int, [0, -3], [True, 1.0, "1", None]),
        (float, [0, 0.5, math.inf], [True, "1", None]),
        (Annotated[float, Field(ge=0, le=1)], [0, 1, 0.5], [1.5, -1, math.nan]),
        (bool, [True], [1, "yes"]),
        (str | None, ["a", None], [1, ["a"]]),
        (Literal["a", "b"] | None, ["a", None], ["c", 1]),
        (list[int], [[1]], [1, ["a"]]),
        (PrefetchOption | None, ["none", {"name": "random"}, NoPrefetch(), None], [1, ["none"]]),
        (Any, [1, [2]], []),
    ],
)
def test_what_fits_a_type(hint: Any, fits: list[Any], not_fit: list[Any]) -> None:
    one = Option("one", FieldInfo.from_annotation(hint))
    assert [value for value in fits if not one.fits(value)] == [] == [value for value in not_fit if one.fits(value)]
    assert all(one.read(value) is value for value in fits)


@pytest.mark.parametrize("cls", CLASSES)
def test_every_shipped_option_has_a_type_and_a_meaning(cls: type) -> None:
    assert [one.name for one in options_of(cls).values() if not one.meaning or not one.schema] == []


def test_an_option_of_the_policy_reaches_the_part() -> None:
    policy = make_policy({"name": "dali", "w_size": 3, "firing": "printed", "prefetch_source": "oracle"})
    assert isinstance(policy, Composed)
    assert repr(policy.parts.replacement) == (
        "WorkloadAware(w_size=3, u_size=1, firing='printed', only_if_better=False, blocking=False, relabel=False)"
    )
    assert "source='oracle'" in repr(policy.parts.prefetch)


def test_the_list_explains_the_options_of_those_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "policies", "daop-code", "-o", "json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    (swap_cost,) = [one for one in row["options"] if one["name"] == "swap_cost"]
    assert swap_cost == {
        "name": "swap_cost",
        "type": "'overlapped' or 'serial'",
        "required": False,
        "default": "serial",
        "meaning": "Copies during all computing; or one pair after the other, out and in, before any expert of the layer runs.",
    }
    assert main(["list", "policy-parts", "predicted"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("prefetch predicted: Fetch the experts that a predictor gives the most rows")
    assert "  source: a string; required\n" in out
    assert "  buffers: an integer of at least 1; default 1\n      Slots of the transient pool in units of size.\n" in out


def test_the_schema_has_every_option_with_type_bounds_default_and_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    entries = {
        one["properties"]["name"]["const"]: one
        for one in schema["properties"]["policies"]["items"]["anyOf"]
        if "const" in one.get("properties", {}).get("name", {})
    }
    assert set(entries) == set(POLICIES)
    for name, one in entries.items():
        assert set(one["properties"]) == {"name", *options_of(policy_class(name))} and not one["additionalProperties"]
        assert all(option["description"] for key, option in one["properties"].items() if key != "name")
    w_size = entries["dali"]["properties"]["w_size"]
    whole = {"type": "integer", "minimum": 1}
    assert w_size["anyOf"] == [whole, {"type": "array", "items": whole}] and w_size["default"] == 4
    replacement = entries["dali"]["properties"]["replacement"]["anyOf"][0]["anyOf"]
    assert replacement == [{"$ref": "#/$defs/replacement part"}, {"type": "null"}]
    parts = {
        one["properties"]["name"]["const"]: one
        for one in schema["$defs"]["prefetch part"]["anyOf"]
        if "const" in one.get("properties", {}).get("name", {})
    }
    assert set(parts) == set(PARTS["prefetch"]) and parts["predicted"]["required"] == ["name", "source"]


POLICY, PART = "moesim.policies.systems.fiddler:Fiddler", "moesim.policies.parts.replacement:LRU"  # named as a user's own


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["policies", "dail"], "list policies: unknown policy 'dail'; did you mean 'dali'?"),
        (["policy-parts", "lru2"], "list policy-parts: unknown part 'lru2'; did you mean 'lru'?"),
        (
            ["policy-parts", "fiddler"],
            "list policy-parts: expected a part, got fiddler, a policy; `moesim list policies fiddler` explains it",
        ),
        (
            ["policy-parts", POLICY],
            f"list policy-parts: expected a part, got {POLICY}, a policy; `moesim list policies {POLICY}` explains it",
        ),
        (
            ["policies", PART],
            f"list policies: expected a policy, got {PART}, a part; `moesim list policy-parts {PART}` explains it",
        ),
        (["models", "lru"], "list models: expected words that a row has, got lru; leave some out"),
    ],
)
def test_a_wrong_name_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"moesim: {message}")
