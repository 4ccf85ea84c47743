"""Numbers of a raw profile changed by their dotted keys."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from moesim.errors import HardwareError, unknown_name
from moesim.hardware.places import is_number, type_at
from moesim.hardware.read import refusal, unknown_key


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
