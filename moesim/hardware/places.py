"""Places of a hardware profile by their keys: which keys and numbers the format has there."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from moesim.hardware.numbers import Sourced
from moesim.hardware.schema import ProfileFile


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
