"""Which compositions the native engine decides by itself: all parts are moesim's own, and are there in C++ as well."""

from __future__ import annotations

from functools import cache
from itertools import takewhile
from types import FunctionType
from typing import Any

from moesim.policies.composition import Parts
from moesim.policies.part_names import PARTS

IN_CPP = {
    "assignment": ("all-gpu", "greedy", "queues"),
    "prefetch": ("none", "predicted", "impact-driven"),
    "replacement": ("lru", "mrs", "workload-aware"),
}
"""Parts that are in C++, too: those of LRU, DALI and HybriMoE; placements are asked once, in Python."""
SET_BY_PRESETS = ("adjust", "own_part")
"""Methods of a composition that are over when a run begins."""


def parts_as_shipped(parts: Parts) -> dict[str, Any] | None:
    """Name the parts with their options; None if one is not in C++, or not exactly as moesim has it."""
    if hasattr(parts.placement, "step_begin"):
        return None
    found: dict[str, Any] = {}
    for kind, names in IN_CPP.items():
        part = getattr(parts, kind)
        name = next((name for name in names if type(part) is PARTS[kind][name]), None)
        if name is None or not _as_shipped(part):
            return None
        state = part.native_state() if hasattr(part, "native_state") else {}
        if state is None:
            return None
        found[kind] = {"name": name, **_options(part), **state}
    return found


def _options(part: Any) -> dict[str, Any]:
    """Give an option's value by name, also of those that a class fixes."""
    return {name: getattr(part, name) for base in type(part).__mro__ for name in getattr(base, "_options", ())}


def _as_shipped(part: Any) -> bool:
    """Whether no method is replaced, and no option is too large for C++ or for a double."""
    return not any(
        callable(getattr(type(part), name, None)) or (isinstance(value, int) and abs(value) >> 53)
        for name, value in vars(part).items()
    )


def methods_as_shipped(policy: Any, *classes: type) -> bool:
    """Whether no subclass of these classes, and no attribute of the policy, replaces how they decide."""
    deciding = _deciding(classes)
    own = takewhile(lambda cls: cls not in classes, type(policy).__mro__)
    return vars(policy).keys().isdisjoint(deciding) and all(vars(cls).keys().isdisjoint(deciding) for cls in own)


@cache
def _deciding(classes: tuple[type, ...]) -> frozenset[str]:
    """Name the methods and properties of some classes."""
    found = {name for cls in classes for name, one in vars(cls).items() if isinstance(one, FunctionType | property)}
    return frozenset(found.difference(SET_BY_PRESETS))


def in_python(policy: Any) -> Any:
    """Have the native engine ask this policy at every event, to compare; return it."""
    policy.native_parts = None
    return policy
