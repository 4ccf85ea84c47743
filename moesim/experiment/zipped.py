"""Fields that vary together: ``zip: [[model, trace], [model.expert_bits, cache.budget]]``."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import product
from math import prod
from typing import Any, NamedTuple

from moesim.errors import ConfigError, unknown_name
from moesim.experiment.config import Config, parse_config
from moesim.experiment.spec import KEYS, MAPPINGS, PLAIN

MAX_RUNS = 100_000
"""Of an experiment: more would take weeks, and the memory to write them down."""
_WHOLE = ("model", "hardware", "trace", "policies", *(KEYS[name] for name in PLAIN if KEYS[name] in Config.model_fields))
_SECTIONS = ("workload", "cache", "transfer")
_OPEN = ("model", "hardware", "trace", *(name for name in MAPPINGS if name not in _SECTIONS))
"""Mappings whose keys are not known here."""


class _Field(NamedTuple):
    """Where a list lies in an experiment."""

    holder: tuple[str, ...]  # keys of the mapping
    key: str
    values: list[Any]


def zipped(config: Config, place: str) -> Iterator[Config]:
    """Give one experiment for each place of the lists that vary together; groups multiply."""
    if not config.zip:
        yield config
        return
    raw = config.model_dump(mode="python", exclude_unset=True)
    raw["zip"] = []
    choices, named = [], set[str]()
    for number, names in enumerate(config.zip):
        where = f"{place}: zip[{number}]"
        for name in names:
            if name in named:
                raise ConfigError(f"{where}: expected each field once, got {name} again; remove one")
            named.add(name)
        fields = [_find(config, raw, name, where) for name in names]
        if len({len(field.values) for field in fields}) != 1:
            lengths = ", ".join(f"{name} {len(field.values)}" for name, field in zip(names, fields, strict=True))
            raise ConfigError(f"{where}: expected lists of one length, got {lengths}")
        choices.append([[(field, i) for field in fields] for i in range(len(fields[0].values))])
    if prod(map(len, choices)) > MAX_RUNS:
        raise ConfigError(f"{place}: zip: expected at most {MAX_RUNS} combinations, got more; sweep fewer values")
    for field, _ in (pair for group in choices for pair in group[0]):
        _holder(raw, field)[field.key] = None  # the lists are not copied each time
    for together in product(*choices):
        one = copy.deepcopy(raw)
        for field, i in (pair for group in together for pair in group):
            value = field.values[i]
            _holder(one, field)[field.key] = [value] if (field.holder, field.key) == ((), "policies") else value
        yield parse_config(one, place)


def _holder(raw: dict[str, Any], field: _Field) -> Any:
    holder: Any = raw
    for step in field.holder:
        holder = holder[step]
    return holder


def _find(config: Config, raw: dict[str, Any], name: str, where: str) -> _Field:
    known = [*_WHOLE, *(f"{part}.{key}" for part in _SECTIONS for key in type(getattr(config, part)).model_fields)]
    section, _, key = name.partition(".")
    if name not in known and not (key and section in _OPEN):
        raise ConfigError(f"{where}: {unknown_name('field', name, [*known, *(f'{part}.KEY' for part in _OPEN)])}")
    holder, last = _place(raw, section, key) if key else ((), name)
    inside: Any = raw
    for step in holder:
        inside = inside.get(step) if isinstance(inside, dict) else None
    value = inside.get(last) if isinstance(inside, dict) else None
    if value is None and name in known:  # not given: its default is no list, which the message shows
        value = getattr(getattr(config, section), key) if key else getattr(config, name)
    if not isinstance(value, list):
        raise ConfigError(f"{where}: {name}: expected a list, got {value!r}; give it one, or remove it from zip")
    return _Field(holder, last, value)


def _place(raw: dict[str, Any], section: str, key: str) -> tuple[tuple[str, ...], str]:
    """Say which mapping holds a key, and its name there: ``a.b`` may be written as one key or as two."""
    inside = raw.get(section)
    if isinstance(inside, dict) and key in inside:
        return (section,), key
    *above, last = key.split(".")
    return (section, *above), last
