"""An option is written once, and appears from there everywhere."""

from __future__ import annotations

import json
import re
import sys
from typing import Annotated, Any, ClassVar, Literal

import pytest

from moesim.cli.main import main
from moesim.errors import ConfigError
from moesim.policies.base import PolicyBase, Range
from moesim.policies.composed import Composed
from moesim.policies.declare import lifted_options, option, option_hints, option_meanings, option_of, option_parameters
from moesim.policies.options import construct, describe
from moesim.policies.part_names import PARTS
from moesim.policies.parts import Part
from moesim.policies.registry import POLICIES, make_policy, policy_class

CLASSES = [*map(policy_class, POLICIES), *(part for parts in PARTS.values() for part in parts.values())]


class Plain(PolicyBase):
    paper: ClassVar[str] = "none"
    exact: bool = False  # of the contract, annotated or not
    listens: frozenset[type] = frozenset()  # type: ignore[assignment]
    _hidden: int = 3
    constant = 4

    share: Annotated[float, Range(0, 1)] = 0.5
    """How much
    of it."""
    kind: Literal["a", "b"] = "a"


class Preset(Plain, fixed=("kind",)):
    share = 0.25
    kind = "b"
    more: int


class Own(Preset):
    def __init__(self, *, other: int = 2) -> None:
        super().__init__(more=1)
        self.other = other


class Rated(Part):
    rate: Annotated[int, Range(1)] = 7
    """How fast."""
    on: bool = True
    pool: str = "x"


class Lifting(PolicyBase):
    speed: int | None = option_of(Rated, name="rate", default=None)
    started: bool = option_of(Rated, name="on")
    """Whether it runs."""
    mode: Literal["fast", "slow"] = "fast"
    cold: bool = False


def test_annotated_attributes_are_options_and_nothing_else_is() -> None:
    assert {name: one.default for name, one in option_parameters(Plain).items()} == {"share": 0.5, "kind": "a"}
    assert option_meanings(Plain) == {"share": "How much of it.", "kind": ""}
    made = Plain(share=0.1)
    assert (made.share, made.kind, made.options(), repr(made)) == (0.1, "a", {"share": 0.1, "kind": "a"}, "Plain(share=0.1)")


def test_a_subclass_has_other_defaults_and_may_fix_an_option() -> None:
    assert list(option_parameters(Preset)) == ["share", "more"]
    assert (Preset(more=1).share, Preset(more=1).kind) == (0.25, "b")
    assert option_meanings(Preset)["share"] == "How much of it."
    for wrong in ({"more": 1, "kind": "a"}, {}, {"more": 1, "nothing": 2}):
        with pytest.raises(TypeError):
            Preset(**wrong)  # type: ignore[arg-type]


def test_a_constructor_of_its_own_is_read_instead() -> None:
    assert list(option_parameters(Own)) == ["other"]
    assert option_hints(Own) == {"other": int}
    assert (Own(other=3).share, Own(other=3).other) == (0.25, 3)


def test_an_option_of_a_part_is_an_option_of_the_policy() -> None:
    assert describe(option_hints(Lifting)["speed"]) == "an integer of at least 1 or null"
    assert option_parameters(Lifting)["started"].default is True
    assert option_meanings(Lifting) == {"speed": "How fast.", "started": "Whether it runs.", "mode": "", "cold": ""}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speed": 0}, "option speed: expected an integer of at least 1 or null, got 0"),
        ({"spedd": 3}, "unknown option 'spedd'; did you mean 'speed'?"),
    ],
)
def test_messages_come_from_the_declaration(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        construct(Lifting, options, "policy lifting", "a.yaml")
    assert f"a.yaml: policy lifting: {message}" in str(caught.value)


@pytest.mark.parametrize("cls", CLASSES)
def test_every_shipped_option_has_a_type_and_a_meaning(cls: type) -> None:
    meanings, hints = option_meanings(cls), option_hints(cls)
    assert [name for name in option_parameters(cls) if not meanings[name] or name not in hints] == []


@pytest.mark.parametrize("cls", [cls for cls in CLASSES if lifted_options(cls) and "_meanings" not in vars(cls)])
def test_what_is_written_of_a_lifted_option_is_what_the_part_takes(cls: type) -> None:
    """The annotation is for editors and mypy; what is checked is the part's."""
    for name in lifted_options(cls):
        base = next(base for base in cls.__mro__ if name in vars(base).get("__annotations__", {}))
        written = vars(base)["__annotations__"][name]
        taken = re.sub(r" (of at (least|most) \S+|from \S+ to \S+)", "", describe(option_hints(cls)[name]))
        assert describe(eval(written, vars(sys.modules[base.__module__]))) == taken


def test_a_preset_is_a_class_with_other_defaults_constants_and_options() -> None:
    named = Lifting.preset(
        "Named",
        "Something of that name.",
        fixed=("cold",),
        paper="Some paper (2025)",
        cold=True,
        mode="slow",
        started=option_of(Rated, name="on", default=False, meaning="Whether it walks."),
        more=option(Annotated[int, Range(2)], 3, "How many."),
    )
    assert (named.__name__, named.__doc__, named.__module__) == ("Named", "Something of that name.", __name__)
    made = named(more=4)
    assert made.options() == {"speed": None, "started": False, "mode": "slow", "more": 4}
    assert (made.cold, made.paper, repr(made)) == (True, "Some paper (2025)", "Named(more=4)")
    assert option_meanings(named) == {"speed": "How fast.", "started": "Whether it walks.", "mode": "", "more": "How many."}
    assert describe(option_hints(named)["more"]) == "an integer of at least 2"
    assert option_meanings(Lifting)["started"] == "Whether it runs." and "more" not in option_parameters(Lifting)
    with pytest.raises(TypeError):
        named(cold=False)


def test_an_option_of_the_policy_reaches_the_part() -> None:
    policy = make_policy({"name": "dali", "w_size": 3, "firing": "printed", "prefetch_source": "oracle", "prefetch_buffers": 2})
    assert isinstance(policy, Composed)
    assert repr(policy.parts.replacement) == (
        "WorkloadAware(w_size=3, u_size=1, firing='printed', only_if_better=False, blocking=False, relabel=False)"
    )
    assert "buffers=2" in repr(policy.parts.prefetch) and "source='oracle'" in repr(policy.parts.prefetch)


def test_the_list_explains_the_options_of_those_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "policies", "daop-code", "-o", "json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    (swap_cost,) = [one for one in row["options"] if one["name"] == "swap_cost"]
    assert swap_cost == {
        "name": "swap_cost",
        "type": "'overlapped' or 'serial'",
        "required": False,
        "default": "serial",
        "meaning": "Copies beside all computing; or one pair after the other, out and in, before any expert of the layer runs.",
    }
    assert main(["list", "parts", "predicted"]) == 0
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
        assert set(one["properties"]) == {"name", *option_parameters(policy_class(name))} and not one["additionalProperties"]
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
        (["parts", "lru2"], "list parts: unknown part 'lru2'; did you mean 'lru'?"),
        (["parts", "fiddler"], "list parts: expected a part, got fiddler, a policy; `moesim list policies fiddler` explains it"),
        (["parts", POLICY], f"list parts: expected a part, got {POLICY}, a policy; `moesim list policies {POLICY}` explains it"),
        (["policies", PART], f"list policies: expected a policy, got {PART}, a part; `moesim list parts {PART}` explains it"),
        (["models", "lru"], "list models: expected no name, got lru; names are for policies and parts"),
    ],
)
def test_a_wrong_name_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"moesim: {message}")
