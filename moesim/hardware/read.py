"""Read a profile's YAML: places by keys, sources of sections, overrides, one-line errors."""

from __future__ import annotations

import copy
import difflib
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from moesim.core.yaml_reader import read_yaml_value
from moesim.errors import ConfigError, HardwareError, unknown_name
from moesim.hardware.schema import ProfileFile, Sourced


def _models_in(annotation: Any) -> list[Any]:
    """Look through Optional and Annotated for the types that hold something."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _models_in(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [inner for arg in get_args(annotation) for inner in _models_in(arg)]
    return [] if annotation is type(None) else [annotation]


def type_at(loc: Sequence[str | int], root: Any = ProfileFile) -> Any:
    """Return the annotation of a place in a profile; None if the format has no such place."""
    here = root
    for step in loc:
        candidates = _models_in(here)
        here = None
        for candidate in candidates:
            if isinstance(candidate, type) and issubclass(candidate, BaseModel):
                found = candidate.model_fields.get(str(step))
                here = found.annotation if found else None
            elif get_origin(candidate) is dict:
                here = get_args(candidate)[1]
            elif get_origin(candidate) is list:
                here = get_args(candidate)[0]
            if here is not None:
                break
        if here is None:
            return None
    return here


def keys_at(loc: Sequence[str | int], root: Any = ProfileFile) -> list[str]:
    """Name the keys that a place in a profile, or in another format, may have."""
    for candidate in _models_in(type_at(loc, root)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return list(candidate.model_fields)
    return []


def optional(loc: Sequence[str | int]) -> bool:
    """Whether the format has a key at this place that may be left out."""
    owners = [one for one in _models_in(type_at(loc[:-1])) if isinstance(one, type) and issubclass(one, BaseModel)]
    return any(not one.model_fields[str(loc[-1])].is_required() for one in owners if str(loc[-1]) in one.model_fields)


def is_number(loc: Sequence[str | int]) -> bool:
    """Whether the format has a sourced number at this place, in its short form or the whole one."""
    if loc[:1] in (("numbers",), ["numbers"]):
        return len(loc) == 2
    found = _models_in(type_at(loc))
    return any(isinstance(kind, type) and issubclass(kind, Sourced) for kind in found)


PROOF = ("source", "ref", "how", "why", "date", "method", "repeats", "spread")  # what a source says of itself

_Place = tuple[str | int, ...]


def with_sources(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Write a section's source next to each of its numbers; what is wrong stays."""
    return _spread(raw, (), None) if _has_section(raw) else dict(raw)


def _is_section(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("source"), str) and set(value) <= set(PROOF)


def _has_section(value: Any) -> bool:
    if isinstance(value, Mapping):
        return _is_section(value.get("source")) or any(map(_has_section, value.values()))
    return isinstance(value, list) and any(map(_has_section, value))


def _spread(value: Any, place: _Place, section: Mapping[str, Any] | None) -> Any:
    if is_number(place):
        return value if section is None or value is None else _sourced(value, section)
    if isinstance(value, Mapping):
        if _is_section(value.get("source")):
            section = value["source"]
            value = {key: one for key, one in value.items() if key != "source"}
        return {
            key: one if key == "anchors" and not place else _spread(one, (*place, *str(key).split(".")), section)
            for key, one in value.items()
        }
    if isinstance(value, list):
        return [_spread(one, (*place, index), section) for index, one in enumerate(value)]
    return value


def _sourced(value: Any, section: Mapping[str, Any]) -> Any:
    if not isinstance(value, Mapping):
        return {"value": value, **section}
    return {**value, **section} if "value" in value and "source" not in value else value


def read_yaml(text: str, place: str, keys: str = "name, devices and links") -> dict[str, Any]:
    """Read the YAML of a profile, or of something else with these keys."""
    try:
        raw = read_yaml_value(text, place)
    except ConfigError as error:
        raise HardwareError(str(error)) from None
    if not isinstance(raw, dict):
        raise HardwareError(f"{place}: expected a mapping with {keys}, got {type(raw).__name__}")
    return raw


_UNITS = {
    "bytes_per_s": "a number of bytes per second such as 25e9",
    "flops": "a number of operations per second such as 71e12",
    "_us": "a number of microseconds",
    "_w": "a number of watts",
    "_rate": "a share in (0, 1]",
}
_OTHER_UNITS = (  # what a key says that has another unit, or none
    (re.compile(r"time|duration|delay|.*_(ms|ns|s|sec|seconds)(?<!_per_s)"), "times are in microseconds (_us)"),
    (
        re.compile(r"(?!(.*_)?bytes_per_s$)(bandwidth|speed|rate|.*_per_s(ec)?|.*g(i?b)?p?s)"),
        "rates are in bytes per second (bytes_per_s)",
    ),
    (re.compile(r"power|watts?|.*_(mw|kw)"), "powers are in watts (_w)"),
)
_TYPES = {
    "dict_type": "a mapping", "list_type": "a list", "tuple_type": "a pair such as [1, 64]",
    "string_type": "a text; put it in quotes", "int_type": "a whole number",
    "int_from_float": "a whole number", "float_type": "a number", "finite_number": "a finite number",
}  # fmt: skip
_LONGEST = 80  # characters of what was got


def unknown_key(loc: Sequence[str | int], root: Any = ProfileFile) -> str:
    """Build the message for a key the format does not have."""
    short = ("numbers", "for") if len(loc) == 1 and root is ProfileFile else ()
    known, key = [*keys_at(loc[:-1], root), *short], str(loc[-1])
    if key == "source":
        return "expected a source for the numbers below, such as source: {source: published, ref: '...'}, got something else"
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"did you mean '{close[0]}'? " if close else ""
    with_unit = [name for name in known if name.startswith(f"{key}_")]
    if with_unit:
        hint = f"the unit belongs into the key: did you mean {' or '.join(repr(name) for name in with_unit)}? "
    elif key not in known:
        said = [words for pattern, words in _OTHER_UNITS if pattern.fullmatch(key.lower())]
        inside = [repr(name) for name in known if key.endswith(tuple(_UNITS)) and key in keys_at((*loc[:-1], name))]
        hint = f"{said[0]}; {hint}" if said else hint
        hint = f"it belongs into {' or '.join(inside)}; " if inside else hint
    return f"unknown key '{key}'; {hint}known: {', '.join(known)}"


def _got(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _expected(loc: tuple[str | int, ...], error: Mapping[str, Any], root: Any) -> str:
    kind, got, ctx = error["type"], _got(error.get("input")), error.get("ctx", {})
    if kind == "extra_forbidden":
        return unknown_key(loc, root)
    if kind == "missing":
        return "expected this key, got nothing; add it"
    if kind == "value_error":
        return str(ctx["error"])
    if kind in ("model_type", "model_attributes_type"):
        if is_number(loc):
            return f"expected {{value: ..., source: ..., ref: ...}} (every number carries its source), got {got}"
        return f"expected a mapping with keys such as {', '.join(keys_at(loc, root)[:3])}, got {got}"
    if kind == "literal_error":
        return f"expected {ctx['expected']}, got {got}"
    name = str(loc[-2]) if len(loc) > 1 and loc[-1] == "value" else str(loc[-1])
    for suffix, words in _UNITS.items():
        if name.endswith(suffix) and kind in ("float_type", "float_parsing", "finite_number"):
            remedy = "; write the number alone" if re.match(r"'[0-9.]", got) else ""
            return f"expected {words} (the unit is in the key), got {got}{remedy}"
    if kind == "greater_than":
        return f"expected a number above {ctx['gt']}, got {got}; correct it"
    if kind == "greater_than_equal":
        return f"expected a number of at least {ctx['ge']}, got {got}; correct it"
    if kind == "less_than_equal":
        what = "a share in (0, 1]" if name.endswith("_rate") else f"at most {ctx['le']:g}"
        return f"expected {what}, got {got}; correct it"
    if kind in ("too_short", "missing_argument"):
        return f"expected at least {ctx.get('min_length', 1)}, got {got}; add one"
    said = _TYPES.get(kind) or str(error["msg"]).removeprefix("Input should be ")
    said, _, remedy = said.partition("; ")
    return f"expected {said}, got {got}" + (f"; {remedy}" if remedy else "")


def validate(raw: Mapping[str, Any], place: str) -> ProfileFile:
    """Check a raw profile against the format."""
    try:
        return ProfileFile.model_validate(dict(raw))
    except ValidationError as failure:
        raise refusal(place, [": ".join(described(one)) for one in failures(failure)]) from None


def failures(failure: ValidationError) -> list[Any]:
    """List what pydantic found, wrong keys first: they explain missing ones."""
    return sorted(failure.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden")


def described(error: Mapping[str, Any], root: Any = ProfileFile) -> tuple[str, str]:
    """Return where something is wrong, and what."""
    loc = tuple(error["loc"])
    message = " ".join(_expected(loc, error, root).split())
    inner, colon, rest = message.partition(": ")
    if colon and inner in keys_at(loc, root):  # what a check of a whole mapping says of one of its keys
        loc, message = (*loc, inner), rest
    return " ".join((".".join(str(step) for step in loc) or "profile").split()), message


def refusal(place: str, problems: Sequence[str]) -> HardwareError:
    """Make the error for a profile with some problems; its message has the first."""
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    error = HardwareError(f"{place}: {problems[0]}{more}")
    error.problems = tuple(problems)
    return error


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the overrides of a profile by dotted key, however they are nested."""
    for key, value in values.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, Mapping) and "value" not in value:
            yield from flatten(value, f"{dotted}.")
        else:
            yield dotted, value


def override(raw: dict[str, Any], values: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Change numbers of `read_profile`'s contents, by dotted key, in a copy."""
    changed, problems = copy.copy(raw), []
    for key, value in values.items():
        try:
            override_one(changed, key, value, place)
        except HardwareError as error:
            problems.append(str(error).removeprefix(f"{place}: "))
    if problems:
        raise refusal(place, problems)
    return changed


def override_one(raw: dict[str, Any], key: str, value: Any, place: str) -> None:
    """Change one number in place; parts that YAML anchors share are copied on the way."""
    steps: list[str | int] = [int(step) if step.isdecimal() else step for step in key.split(".")]
    for end in range(1, len(steps) + 1):
        if type_at(steps[:end]) is None:
            raise HardwareError(f"{place}: {key}: {unknown_key(steps[:end])}")
    if is_number(steps):
        value = sourced(value)
    here: Any = raw
    for position, step in enumerate(steps[:-1]):
        inside = here[step] if (step in here if isinstance(here, dict) else _has(here, step)) else None
        if inside is None:
            if not isinstance(here, dict) or position == 1:  # a new device or link is not an override
                known = list(here) if isinstance(here, dict) else [str(i) for i in range(len(here))]
                message = unknown_name(str(steps[position - 1]).rstrip("s"), str(step), known)
                raise HardwareError(f"{place}: {key}: {message}")
            inside = here[step] = {}
        else:
            inside = here[step] = copy.copy(inside)  # YAML anchors share parts
        here = inside
    last = steps[-1]
    if isinstance(here, list) and not _has(here, last):
        raise HardwareError(f"{place}: {key}: expected an index below {len(here)}, got {last}")
    here[last] = value


def sourced(number: Any) -> Any:
    """Label a number without a source as set by the experiment."""
    return number if isinstance(number, Mapping) else {"value": number, "source": "assumed", "why": "set by the experiment"}


def _has(values: list[Any], step: str | int) -> bool:
    return isinstance(step, int) and step < len(values)
