"""What to say of a part in the wrong place: where a policy is expected, or with its options beside those of the policy around it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from moesim.errors import ConfigError
from moesim.policies.declare import option_parameters
from moesim.policies.importing import import_class
from moesim.policies.part_names import PARTS, PROTOCOLS, methods_of


def part_as_policy(name: str) -> str:
    """Say that a name is a part's, and where it goes; nothing if it is none.

    >>> part_as_policy("greedy")
    "got 'greedy', an assignment: this is a part; write {name: composed, assignment: greedy}"
    """
    kinds = [kind for kind, known in PARTS.items() if name in known]
    return f"got '{name}', {_a(' or '.join(kinds))}: {_is_a_part(kinds[0], name)}" if kinds else ""


def lacking_of_a_policy(cls: type) -> list[str]:
    """Name the methods of a policy that a class lacks."""
    return [method for method in ("place", "decide", "evict") if not callable(getattr(cls, method, None))]


def class_as_policy(name: str, cls: type) -> str:
    """Say that a class is a part, by its methods, and where it goes; nothing if it is none."""
    wanted = {kind: methods_of(kind) for kind in PROTOCOLS}
    fits = [kind for kind, names in wanted.items() if all(callable(getattr(cls, one, None)) for one in names)]
    if not fits:
        return ""
    kind = max(fits, key=lambda fit: len(wanted[fit]))  # a prefetch has the method of a placement as well
    return f"got {cls.__name__}, {_a(kind)}: {_is_a_part(kind, name)}"


def option_of_a_part(cls: type, options: Mapping[str, Any], strange: str) -> str:
    """Say to which part an option belongs that a policy does not have; nothing if the policy has no parts.

    Of the parts that have it, those count first that the policy's options name.
    """
    known = option_parameters(cls)
    kinds = [kind for kind in PROTOCOLS if kind in known]
    if not kinds:
        return ""
    named = [(kind, name) for kind in kinds if (name := _named(options.get(kind)))]
    owners = [(kind, name) for kind, name in named if strange in _options(kind, name)]
    owners = owners or [(kind, name) for kind in kinds for name in PARTS[kind] if strange in _options(kind, name)]
    value = json.dumps(options[strange], default=str)
    if not owners and get_close_matches(strange, known):
        return ""
    if not owners:
        return f"options of a part are written with its name, as in {kinds[-1]}: {{name: PART, {strange}: {value}}}"
    kind, name = owners[0]
    which = " and ".join(f"{of} {', '.join(one for other, one in owners if other == of)}" for of in dict(owners))
    return f"it is an option of {which}: write {kind}: {{name: {_written(name)}, {strange}: {value}}}"


def _named(spec: Any) -> str:
    name = spec.get("name") if isinstance(spec, Mapping) else spec
    return name if isinstance(name, str) else ""


def _options(kind: str, name: str) -> Mapping[str, Any]:
    """Return the options of a part by name; none of one that is not there, which has an error of its own."""
    try:
        cls = import_class(name, kind) if ":" in name else PARTS[kind].get(name)
    except ConfigError:
        return {}
    return {} if cls is None else option_parameters(cls)


def _is_a_part(kind: str, name: str) -> str:
    return f"this is a part; write {{name: composed, {kind}: {_written(name)}}}"


def _written(name: str) -> str:
    return f'"{name}"' if ":" in name else name


def _a(kind: str) -> str:
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"
