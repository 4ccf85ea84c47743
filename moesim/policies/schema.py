"""JSON Schema of the policies of an experiment, for editors: read from the options' declarations."""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from moesim.policies.declare import Range, option_hints
from moesim.policies.options import describe_options
from moesim.policies.part_names import PARTS, PROTOCOLS
from moesim.policies.registry import POLICIES, policy_class

Schema = dict[str, Any]
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}


def policy_schema() -> tuple[Schema, dict[str, Schema]]:
    """Return the schema of one entry of ``policies``, and the definitions that it refers to."""
    parts = {f"{kind} part": _named(PARTS[kind], swept=False) for kind in PARTS}
    return _named({name: policy_class(name) for name in POLICIES}, swept=True), parts


def _named(classes: Mapping[str, type], swept: bool) -> Schema:
    """Describe a name, or a mapping of a name and options; a list of an option's values is swept."""
    others = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string", "not": {"enum": list(classes)}}}}
    mappings = [_mapping(name, cls, swept) for name, cls in classes.items()]
    # Others are package.module:Class, or names that a package adds by entry points.
    return {"anyOf": [{"enum": list(classes)}, {"type": "string"}, *mappings, others]}


def _mapping(name: str, cls: type, swept: bool) -> Schema:
    hints, options = option_hints(cls), describe_options(cls)
    properties: dict[str, Schema] = {"name": {"const": name}}
    for one in options:
        schema = _of(hints[one.name])
        properties[one.name] = {"anyOf": [schema, {"type": "array", "items": schema}]} if swept else schema
        properties[one.name] |= {"description": one.meaning.removesuffix(".")}
        if not one.required:
            properties[one.name]["default"] = one.default
    required = ["name", *(one.name for one in options if one.required)]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _of(hint: Any) -> Schema:
    """Describe what a type annotation allows."""
    kinds = [kind for kind, protocol in PROTOCOLS.items() if protocol in _members(hint)]
    if kinds:
        others = [_of(one) for one in _members(hint) if one is type(None)]
        return {"anyOf": [{"$ref": f"#/$defs/{kinds[0]} part"}, *others]}
    origin = get_origin(hint)
    if origin is Annotated:
        base, *extras = get_args(hint)
        return _of(base) | _bounds(extra for extra in extras if isinstance(extra, Range))
    if origin in (Union, types.UnionType):
        return {"anyOf": [_of(one) for one in get_args(hint)]}
    if origin is Literal:
        return {"enum": list(get_args(hint))}
    return {"type": _TYPES[hint]} if hint in _TYPES else {}


def _members(hint: Any) -> list[Any]:
    """List the types in a union, however they are nested."""
    if get_origin(hint) is Annotated:
        return _members(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        return [inside for one in get_args(hint) for inside in _members(one)]
    return [hint]


def _bounds(ranges: Iterable[Range]) -> Schema:
    found: Schema = {}
    for low, high in ranges:
        found |= {key: value for key, value in (("minimum", low), ("maximum", high)) if value is not None}
    return found
