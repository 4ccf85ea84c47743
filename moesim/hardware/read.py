"""Read and check a hardware profile's YAML, and say in one line what is wrong with it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from moesim.errors import ConfigError, HardwareError
from moesim.hardware.schema import ProfileFile, is_number, keys_at
from moesim.yaml_reader import read_yaml_value

# ------------------------------------------------------------------------------------------------------------ reading


def read_yaml(text: str, place: str) -> dict[str, Any]:
    """Read the YAML of a profile; ``place`` is the file for messages. Raises `HardwareError`."""
    try:
        raw = read_yaml_value(text, place)
    except ConfigError as error:
        raise HardwareError(str(error)) from None
    if not isinstance(raw, dict):
        raise HardwareError(f"{place}: expected a mapping with name, devices and links, got {type(raw).__name__}")
    return raw


# ------------------------------------------------------------------------------------------------------------- errors

_UNITS = {
    "bytes_per_s": "a number of bytes per second such as 25e9",
    "flops": "a number of operations per second such as 71e12",
    "_us": "a number of microseconds",
    "_w": "a number of watts",
    "_rate": "a share in (0, 1]",
}


def unknown_key(loc: Sequence[str | int]) -> str:
    """Build the message for a key the format does not have."""
    known, key = keys_at(loc[:-1]), str(loc[-1])
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"did you mean '{close[0]}'? " if close else ""
    if not close and key.endswith(("_ms", "_ns", "_s")):
        hint = "times are in microseconds (_us); "
    return f"unknown key '{key}'; {hint}known: {', '.join(known)}"


def _expected(loc: tuple[str | int, ...], error: Mapping[str, Any]) -> str:
    kind, got, ctx = error["type"], error.get("input"), error.get("ctx", {})
    if kind == "extra_forbidden":
        return unknown_key(loc)
    if kind == "missing":
        return "expected this key, got nothing; add it"
    if kind == "value_error":
        return str(ctx["error"])
    if kind in ("model_type", "model_attributes_type") and is_number(loc):
        return f"expected {{value: ..., source: ..., ref: ...}} (every number carries its source), got {got!r}"
    if kind == "literal_error":
        return f"expected {ctx['expected']}, got {got!r}"
    name = str(loc[-2]) if len(loc) > 1 and loc[-1] == "value" else str(loc[-1])
    for suffix, words in _UNITS.items():
        if name.endswith(suffix) and kind in ("float_type", "float_parsing", "finite_number"):
            return f"expected {words} (the unit is in the key), got {got!r}"
    bound = {"greater_than": ("a number above", "gt"), "greater_than_equal": ("a number of at least", "ge")}
    if kind in bound:
        return f"expected {bound[kind][0]} {ctx[bound[kind][1]]}, got {got!r}"
    if kind == "less_than_equal":
        return f"expected a share in (0, {ctx['le']:g}], got {got!r}"
    said = str(error["msg"]).removeprefix("Input should be ")
    return f"expected {said}, got {got!r}"


def validate(raw: Mapping[str, Any], place: str) -> ProfileFile:
    """Check a raw profile against the format.

    Parameters
    ----------
    raw : mapping
        What the YAML holds.
    place : str
        The file, for messages.

    Returns
    -------
    ProfileFile

    Raises
    ------
    HardwareError
        One line with the first thing that is wrong; a misspelt key comes before what it leaves missing.
    """
    try:
        return ProfileFile.model_validate(dict(raw))
    except ValidationError as failure:
        errors = sorted(failure.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden")
        first = errors[0]
        loc = tuple(first["loc"])
        key = ".".join(str(step) for step in loc) or "profile"
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        message = " ".join(_expected(loc, first).split())
        raise HardwareError(f"{place}: {key}: {message}{more}") from None
