"""Check what a user gives as options of a policy or part against their declaration."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from moesim.errors import ConfigError, mistyped, unknown_name
from moesim.policies.declare import Range, option_hints, option_meanings, option_parameters
from moesim.policies.released import Tables, released

_PART, _SHOWN_PART = "a string or a mapping or an object", "a part by name or by a mapping"
_PLAIN = (str, int, float, bool, list, tuple, dict, set, type(None))


def construct(
    cls: Any, options: Mapping[str, Any], what: str, place: str, hint: Callable[[str], str] = lambda option: ""
) -> Any:  # fmt: skip
    """Build a policy or a part from options that a user wrote.

    ``what`` and ``place`` are for messages: ``"policy dali"``, and a file and a key. ``hint`` may say more of an unknown option.
    """
    parameters, hints = option_parameters(cls), option_hints(cls)
    options = {
        name: value
        if value is None or not (tables := _tables(hints.get(name)))
        else released(value, tables, _at(place, what, name))
        for name, value in options.items()
    }
    for name, value in options.items():
        if name not in parameters:
            known = unknown_name("option", str(name), parameters) if parameters else f"unknown option '{name}'; it has none"
            raise ConfigError("; ".join(filter(None, (f"{place}: {what}: {known}", hint(str(name))))))
        if name in hints and not matches(value, hints[name]):
            expected = describe(hints[name])
            see = "; see moesim list parts" if _SHOWN_PART in expected else ""
            raise ConfigError(f"{_at(place, what, name)}: {mistyped(expected, value)}{see}")
    required = [name for name, one in parameters.items() if one.default is one.empty and name not in options]
    if required:
        raise ConfigError(f"{place}: {what}: expected option {required[0]} ({describe(hints.get(required[0], Any))}), got none")
    return cls(**options)


def _at(place: str, what: str, option: str) -> str:
    return f"{place}: {what}: option {option}"


def _tables(hint: Any) -> tuple[str, ...]:
    """Return the names of released tables that an option takes; none if it is another option."""
    extras = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return next((one.names for one in extras if isinstance(one, Tables)), ())


def matches(value: object, hint: Any) -> bool:
    """Say whether a value from a YAML file fits a type annotation.

    Understands bool, int, float (integers fit), str, None, Literal, unions, Annotated with `Range`, lists and mappings.
    Any other class is an instance check, and what cannot be checked fits.

    >>> matches(3, Annotated[int, Range(1)] | None), matches(0, Annotated[int, Range(1)]), matches(True, int)
    (True, False, False)
    """
    origin = get_origin(hint)
    if origin is Annotated:
        base, *extras = get_args(hint)
        return matches(value, base) and all(_within(value, one) for one in extras if isinstance(one, Range))
    if origin in (Union, types.UnionType):
        return any(matches(value, one) for one in get_args(hint))
    if origin is Literal:
        return any(value == one and type(value) is type(one) for one in get_args(hint))
    if hint is None or hint is type(None):
        return value is None
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    target = origin if origin is not None else hint
    if target is Any:
        return True
    if getattr(target, "_is_protocol", False) or not isinstance(target, type):
        return not isinstance(value, _PLAIN)  # an object that somebody made, not something from a file
    return isinstance(value, target)


def describe(hint: Any) -> str:
    """Write a type annotation for people.

    >>> describe(Annotated[int, Range(1)] | None), describe(Literal["profile", "code"])
    ('an integer of at least 1 or null', "'profile' or 'code'")
    """
    origin = get_origin(hint)
    if origin is Annotated:
        base, *extras = get_args(hint)
        if tables := _tables(hint):
            return f"{{file: PATH}} or a mapping with source and {', '.join(tables)}, or null"
        return describe(base) + "".join(_describe_range(one) for one in extras if isinstance(one, Range))
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(describe(one) for one in get_args(hint))).replace(_PART, _SHOWN_PART)
    if origin is Literal:
        return " or ".join(repr(one) for one in get_args(hint))
    names = {bool: "true or false", int: "an integer", float: "a number", str: "a string", type(None): "null"}
    target = origin if origin is not None else hint
    if target in names:
        return names[target]
    if isinstance(target, type) and issubclass(target, Mapping):
        return "a mapping"
    return "an object" if getattr(target, "_is_protocol", False) else getattr(target, "__name__", str(hint))


class Option(NamedTuple):
    """What there is to say about one option of a policy or part."""

    name: str
    type: str
    required: bool
    default: Any
    meaning: str


def describe_options(cls: type) -> list[Option]:
    """Describe the options of a policy or part for people.

    >>> from moesim.policies.systems.fiddler import Fiddler
    >>> describe_options(Fiddler)[0].type
    "'profile' or 'code'"
    """
    hints, meanings = option_hints(cls), option_meanings(cls)
    return [
        Option(
            name,
            describe(hints[name]) if name in hints else "anything",
            one.default is one.empty,
            None if one.default is one.empty else one.default,
            meanings[name],
        )
        for name, one in option_parameters(cls).items()
    ]


def _within(value: object, bounds: Range) -> bool:
    assert isinstance(value, int | float)
    return (bounds.low is None or value >= bounds.low) and (bounds.high is None or value <= bounds.high)


def _describe_range(bounds: Range) -> str:
    if bounds.low is not None and bounds.high is not None:
        return f" from {bounds.low:g} to {bounds.high:g}"
    return f" of at least {bounds.low:g}" if bounds.low is not None else f" of at most {bounds.high:g}"
