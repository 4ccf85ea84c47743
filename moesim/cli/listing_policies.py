"""Policies and parts as ``moesim list`` shows them: in brief, at length, or by option."""

from __future__ import annotations

import inspect
import shutil
import textwrap
from functools import partial
from typing import Any

from moesim.core.own_code import check_target, import_class
from moesim.core.table import written
from moesim.errors import ConfigError, unknown_name
from moesim.policies.options import options_of
from moesim.policies.registry import (
    PARTS,
    PolicyInfo,
    class_as_policy,
    describe_policy,
    lacking_of_a_policy,
    part_class,
    policy_class,
    policy_info,
    policy_names,
)

Rows = list[dict[str, Any]]
_fill = partial(textwrap.fill, break_on_hyphens=False)  # a name stays one word


def list_policies() -> Rows:
    """Describe all policies, with the defaults of their options."""
    return [
        _about(info) | {"options": {key: value if _simple(value) else repr(value) for key, value in info.options.items()}}
        for info in policy_info()
    ]


def list_parts() -> Rows:
    """Describe all parts."""
    return [
        {
            "kind": kind,
            "name": name,
            "options": [
                key if one.required else f"{key}={written(one.default)}"
                for key, one in options_of(part_class(kind, name)).items()
            ],
            "summary": _summary(part_class(kind, name)),
        }
        for kind, parts in PARTS.items()
        for name in parts
    ]


def explain_policies(names: list[str]) -> Rows:
    """Describe some policies, with each of their options explained."""
    classes = [(name, _policy(name)) for name in names]
    return [_about(describe_policy(name)) | {"options": _options(cls)} for name, cls in classes]


def explain_parts(names: list[str]) -> Rows:
    """Describe some parts, with each of their options explained."""
    known = {name for parts in PARTS.values() for name in parts}
    for name in names:
        if name not in known and ":" not in name:
            raise ConfigError(
                f"list policy-parts: {_a_policy(name) if name in policy_names() else unknown_name('part', name, known)}"
            )
    places = [(of, name, part_class(of, name)) for name in names for of, parts in PARTS.items() if name in parts]
    places += [("own part", name, _own_part(name)) for name in names if ":" in name]
    return [{"name": name, "kind": of, "summary": _summary(cls), "options": _options(cls)} for of, name, cls in places]


def _policy(name: str) -> type:
    cls = policy_class(name, "list policies")
    if lacking_of_a_policy(cls) and class_as_policy(name, cls):
        raise ConfigError(f"list policies: expected a policy, got {name}, a part; `moesim list policy-parts {name}` explains it")
    return cls


def _own_part(name: str) -> type:
    cls = import_class(check_target(name, "list policy-parts"), "list policy-parts")
    if not lacking_of_a_policy(cls):
        raise ConfigError(f"list policy-parts: {_a_policy(name)}")
    return cls


def _a_policy(name: str) -> str:
    return f"expected a part, got {name}, a policy; `moesim list policies {name}` explains it"


def _about(info: PolicyInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "exact": info.exact,
        "summary": info.summary,
        "paper": info.paper or "-",
        "missing": list(info.missing),
    }


def _summary(cls: type) -> str:
    return (inspect.getdoc(cls) or "").split("\n\n")[0].replace("\n", " ")


def _options(cls: type) -> Rows:
    return [
        {
            "name": one.name,
            "type": one.expected,
            "required": one.required,
            "default": None if one.required else one.default,
            "meaning": one.meaning,
        }
        for one in options_of(cls).values()
    ]


def _simple(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float | bool)


LISTS = {"policies": list_policies, "policy-parts": list_parts}
EXPLAIN = {"policies": explain_policies, "policy-parts": explain_parts}


# ------------------------------------------------------------------------------------------------------------ as text
def brief(rows: Rows) -> str:
    """Write a policy in a line or two: name, summary, and marks of what its card says."""
    lines = []
    for row in rows:
        marks = [] if row["exact"] else ["not exact"]
        marks += [f"missing: {len(row['missing'])}"] if row["missing"] else []
        mark = f" ({', '.join(marks)})" if marks else ""
        lines.append(_paragraph(f"{row['name']}{mark}: {row['summary']}"))
    lines.append("`moesim list policies NAME` has paper, what is missing and options of one; --long has them of all.")
    return "\n".join(lines) + "\n"


def cards(rows: Rows) -> str:
    """Write each policy as a paragraph: its texts are too long for columns."""
    return "\n".join(map(_card, rows))


def explanations(rows: Rows) -> str:
    """Write each policy or part with a paragraph for each option."""
    return "\n".join(map(_explanation, rows))


def _card(row: dict[str, Any]) -> str:
    lines = [f"options: {written(row['options'])}"] if row["options"] else []
    return "\n".join([*_head(row), *(_paragraph(line, 1) for line in lines)]) + "\n"


def _explanation(row: dict[str, Any]) -> str:
    lines = _head(row)
    for one in row["options"]:
        start = "required" if one["required"] else f"default {written(one['default'])}"
        lines.append(_paragraph(f"{one['name']}: {one['type']}; {start}", 1, 4))
        lines += [_paragraph(one["meaning"].replace("``", ""), 3, 0)] if one["meaning"] else []
    return "\n".join(lines) + "\n"


def _head(row: dict[str, Any]) -> list[str]:
    """Describe a policy or part; of a policy also its paper, what is missing and if it is exact."""
    what = f"{row['kind']} {row['name']}" if "kind" in row else row["name"]
    lines = [f"{key}: {written(row[key])}" for key in ("paper", "missing") if row.get(key, "-") not in ("-", [])]
    lines += [] if row.get("exact", True) else ["not exact: what it runs may differ from what was routed"]
    return [_paragraph(f"{what}: {row['summary']}"), *(_paragraph(line, 1) for line in lines)]


def _paragraph(text: str, depth: int = 0, more: int = 2) -> str:
    """Wrap a text that is indented, its further lines by some characters more."""
    width = min(shutil.get_terminal_size((120, 24)).columns, 120)
    first = "  " * depth
    return _fill(text, width, initial_indent=first, subsequent_indent=first + " " * more)
