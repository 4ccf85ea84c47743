"""One source for many numbers: a mapping of a profile may have the key ``source: {source: ..., ref|how|why: ...}``.

Numbers below it that are written plain take it, and the nearest one counts. A number that states its own source keeps that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moesim.hardware.places import is_number

PROOF = ("source", "ref", "how", "why", "date", "method", "repeats", "spread")
"""What a source says of itself."""

_Place = tuple[str | int, ...]


def with_sources(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Write the source of a section beside each of its numbers; what is wrong stays as it is, for the checks of the format."""
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
