"""Say in one line what is wrong with an experiment file: key, expected, got."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from moesim.errors import IN_RANGE, mistyped, unknown_name
from moesim.hardware.places import keys_at

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

_TAGS = ("one", "many")  # of a sweepable field: which of its two forms was meant

# pydantic's error types -> what was expected
_EXPECTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "int_parsing": "an integer",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a text",
    "string_too_short": "a text that is not empty",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "too_short": "at least one entry",
}


def key_path(steps: Sequence[str | int]) -> str:
    """Write a place in a YAML file.

    >>> key_path(["cache", "ratio", 1])
    'cache.ratio[1]'
    """
    path = ""
    for step in steps:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return path


def first_problem(failure: ValidationError, root: type[BaseModel]) -> str:
    """Describe the first thing that is wrong."""
    errors = sorted(failure.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden")
    first = errors[0]
    steps = [step for step in first["loc"] if step not in _TAGS]
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    path = key_path(steps)
    message = " ".join(_message(first, steps, root).split())
    return f"{path}: {message}{more}" if path else message + more


def _message(error: Mapping[str, Any], steps: Sequence[str | int], root: type[BaseModel]) -> str:
    kind, got, context = error["type"], error.get("input"), error.get("ctx", {})
    if kind == "extra_forbidden":
        return unknown_name("key", str(steps[-1]), keys_at(steps[:-1], root))
    if kind == "missing":
        return "expected this key, got nothing; add it"
    if kind == "value_error":
        return str(context["error"])
    if kind == "literal_error":
        several = " or " in context["expected"]
        return f"expected {context['expected']}, got {got!r}{'; choose one of these' if several else ''}"
    if steps and _field_name(steps) == "ratio":
        return mistyped("a number in [0, 1]", got) + _remedy_of_a_share(got)
    if kind == "greater_than_equal":
        number = "an integer" if isinstance(context["ge"], int) else "a number"
        return f"expected {number} of at least {context['ge']}, got {got!r}; {IN_RANGE}"
    if kind == "less_than_equal":
        number = "an integer" if isinstance(context["le"], int) else "a number"
        return f"expected {number} of at most {context['le']}, got {got!r}; {IN_RANGE}"
    if kind == "model_type":
        return f"{mistyped('a mapping', got)}; its keys are {', '.join(keys_at(steps, root))}"
    if kind == "list_type" and steps and isinstance(steps[-1], int):  # of zip, whose entries go into one list together
        return f"expected a list, got {got!r}; write [[KEY, KEY]]"
    if kind in _EXPECTED:
        return mistyped(_EXPECTED[kind], got)
    return f"expected {str(error['msg']).removeprefix('Input should be ')}, got {got!r}"


def _remedy_of_a_share(got: object) -> str:
    """Say what to do with a share that is out of range, or that may be meant as bytes."""
    if isinstance(got, str):
        return "; for bytes use cache.budget" if got[:1].isdigit() and got[-1:].isalpha() else ""
    if isinstance(got, bool) or not isinstance(got, int | float):
        return ""
    return f"; {IN_RANGE}" + ("; for bytes use cache.budget" if got > 1 else "")


def _field_name(steps: Sequence[str | int]) -> str:
    return next((step for step in reversed(steps) if isinstance(step, str)), "")
