"""``moesim schema``: the format of experiment files and of synthetic routing's parameters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any

import typer

from moesim.experiment.config import json_schema
from moesim.policies.options import options_of
from moesim.policies.registry import PARTS, POLICIES, part_class, policy_class

File = StrEnum("File", ["experiment", "parameters"])


def schema(
    file: Annotated[File, typer.Argument(help="Experiments, or parameters of synthetic routing.")] = File.experiment,
) -> None:
    """Print the JSON Schema of a kind of file.

    Example: moesim schema
    """
    print(json.dumps(_experiment() if file is File.experiment else _parameters(), indent=2, sort_keys=True))


def _experiment() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json_schema())
    found["properties"]["policies"]["items"], parts = _policies()
    found["$defs"] |= parts
    return found


def _parameters() -> dict[str, Any]:
    from moesim.trace.synthesis.parameter_set import parameter_schema  # SciPy takes most of a second to import

    return parameter_schema()


def _policies() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the JSON schema of one entry of ``policies``, and the definitions it refers to."""
    parts = {f"{kind} part": _named({name: part_class(kind, name) for name in PARTS[kind]}, swept=False) for kind in PARTS}
    return _named({name: policy_class(name) for name in POLICIES}, swept=True), parts


def _named(classes: Mapping[str, type], swept: bool) -> dict[str, Any]:
    """Describe a name, or a mapping of a name and options; a list of values is swept."""
    others = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string", "not": {"enum": list(classes)}}}}
    mappings = [_mapping(name, cls, swept) for name, cls in classes.items()]
    # Others are package.module:Class, or names that a package adds by entry points.
    return {"anyOf": [{"enum": list(classes)}, {"type": "string"}, *mappings, others]}


def _mapping(name: str, cls: type, swept: bool) -> dict[str, Any]:
    properties: dict[str, Any] = {"name": {"const": name}}
    for one in options_of(cls).values():
        schema = _with_refs(one.schema)
        properties[one.name] = {"anyOf": [schema, {"type": "array", "items": schema}]} if swept else schema
        properties[one.name] |= {"description": one.meaning.removesuffix(".")} | (
            {} if one.required else {"default": one.default}
        )
    required = ["name", *(one.name for one in options_of(cls).values() if one.required)]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _with_refs(schema: Any) -> Any:
    """Refer to the definition of a part where there is one; leave out texts for people."""
    if isinstance(schema, list):
        return [_with_refs(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if "part" in schema:
        return {"$ref": f"#/$defs/{schema['part']} part"}
    return {key: _with_refs(value) for key, value in schema.items() if key != "expected"}
