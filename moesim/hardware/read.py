"""Read and check a hardware profile's YAML, with errors of one line."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from moesim.core.yaml_reader import read_yaml_value
from moesim.errors import ConfigError, HardwareError
from moesim.hardware.places import is_number, keys_at
from moesim.hardware.schema import ProfileFile


def read_yaml(text: str, place: str) -> dict[str, Any]:
    """Read the YAML of a profile."""
    try:
        raw = read_yaml_value(text, place)
    except ConfigError as error:
        raise HardwareError(str(error)) from None
    if not isinstance(raw, dict):
        raise HardwareError(f"{place}: expected a mapping with name, devices and links, got {type(raw).__name__}")
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


def unknown_key(loc: Sequence[str | int]) -> str:
    """Build the message for a key the format does not have."""
    known, key = [*keys_at(loc[:-1]), *(("numbers", "for") if len(loc) == 1 else ())], str(loc[-1])
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


def _expected(loc: tuple[str | int, ...], error: Mapping[str, Any]) -> str:
    kind, got, ctx = error["type"], _got(error.get("input")), error.get("ctx", {})
    if kind == "extra_forbidden":
        return unknown_key(loc)
    if kind == "missing":
        return "expected this key, got nothing; add it"
    if kind == "value_error":
        return str(ctx["error"])
    if kind in ("model_type", "model_attributes_type"):
        if is_number(loc):
            return f"expected {{value: ..., source: ..., ref: ...}} (every number carries its source), got {got}"
        return f"expected a mapping with keys such as {', '.join(keys_at(loc)[:3])}, got {got}"
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
        raise refusal(place, [f"{key}: {said}" for key, said in (told(one) for one in failures(failure))]) from None


def failures(failure: ValidationError) -> list[Any]:
    """List what pydantic found, wrong keys first: they explain missing ones."""
    return sorted(failure.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden")


def told(error: Mapping[str, Any]) -> tuple[str, str]:
    """Return where something is wrong, and what."""
    loc = tuple(error["loc"])
    message = " ".join(_expected(loc, error).split())
    inner, colon, rest = message.partition(": ")
    if colon and inner in keys_at(loc):  # what a check of a whole mapping says of one of its keys
        loc, message = (*loc, inner), rest
    return " ".join((".".join(str(step) for step in loc) or "profile").split()), message


def refusal(place: str, problems: Sequence[str]) -> HardwareError:
    """Make the error for a profile with some problems; its message has the first."""
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    error = HardwareError(f"{place}: {problems[0]}{more}")
    error.problems = tuple(problems)
    return error
