"""Combinations to leave out of a grid: ``exclude: [{policies: dali, workload.batch_size: [32, 64]}]``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moesim.core.units import as_share, parse_bytes
from moesim.errors import ConfigError, unknown_name
from moesim.experiment.spec import KEYS, MAPPINGS, VALUES, Point
from moesim.metrics.naming import policy_label

_ONE = {KEYS[name]: name for name in VALUES}
_NAMED = {"model": "base", "hardware": "base", "trace": "synthesize", "policies": "name"}
_SIZES = tuple(key for key, name in _ONE.items() if name.endswith("_bytes"))
_MISSING = object()


class Excluded:
    """What ``exclude`` describes."""

    def __init__(self, rules: Sequence[Mapping[str, Any]], place: str) -> None:
        self._rules = [
            {key: _values(key, value, f"{place}: exclude[{i}]") for key, value in rule.items()} for i, rule in enumerate(rules)
        ]
        self._place = place
        self._used = [False] * len(rules)

    def covers(self, point: Point) -> bool:
        """Whether a point is to be left out."""
        found = False
        for i, rule in enumerate(self._rules):
            if all(_fits(point, key, values) for key, values in rule.items()):
                found = self._used[i] = True
        return found

    def check_used(self) -> None:
        """Refuse a rule that fitted no point: it is a slip, and would be believed to work."""
        for i, used in enumerate(self._used):
            if not used:
                rule = ", ".join(f"{key}: {' or '.join(str(v) for v in values)}" for key, values in self._rules[i].items())
                raise ConfigError(
                    f"{self._place}: exclude[{i}]: expected a combination of the grid, got {rule}; "
                    "mend it, or give --set 'exclude=[]'"
                )


def _values(key: str, value: Any, place: str) -> list[Any]:
    section, _, inside = key.partition(".")
    if key not in _ONE and key not in _NAMED and not (inside and section in (*_NAMED, *MAPPINGS)):
        known = [*_NAMED, *_ONE, *(f"{name}.{word}" for name, word in MAPPINGS.items()), *(f"{name}.KEY" for name in _NAMED)]
        raise ConfigError(f"{place}: {unknown_name('field', key, known)}")
    values = value if isinstance(value, list) else [value]
    if key == "cache.ratio":
        return [as_share(v) for v in values]
    return [parse_bytes(v, f"{place}: {key}") if isinstance(v, str) and key in _SIZES else v for v in values]


def _fits(point: Point, key: str, values: Sequence[Any]) -> bool:
    if key in _ONE:
        return any(_same(getattr(point, _ONE[key]), wanted) for wanted in values)
    section, _, inside = key.partition(".")
    written: Any = point.policy if section == "policies" else getattr(point, section)
    if inside:
        value = written.get(inside, _MISSING) if isinstance(written, Mapping) else _MISSING
        return any(_same(value, wanted) for wanted in values)
    names = [written]
    if isinstance(written, Mapping):
        names.append(written[_NAMED[section]])
    if section == "policies":
        names.append(policy_label(written))
    return any(name == wanted for name in names for wanted in values)


def _same(value: Any, wanted: Any) -> bool:
    return bool(value == wanted) and isinstance(value, bool) == isinstance(wanted, bool)  # YAML's 1 is not its true
