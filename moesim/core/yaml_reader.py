"""YAML without duplicate keys, dates or bombs, where 1e9 is a number; one-line errors."""

from __future__ import annotations

import re
from copy import deepcopy
from functools import lru_cache
from typing import Any

import yaml

from moesim.core.gate import YAML, check_text
from moesim.core.text import steering
from moesim.errors import ConfigError

MAX_VALUES = 100_000
"""Most values of a document, what an alias stands for counted each time: a few lines of aliases can stand for billions."""
MAX_DEPTH = 50
"""Most lists and mappings inside each other."""

MAX_DIGITS = 300
"""Most digits of a number: a double holds what is below 1.8e308."""


class StrictLoader(yaml.SafeLoader):
    """`yaml.SafeLoader` without repeated keys and dates, and with 936e9 as a number."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Refuse a repeated key, of which YAML would silently keep the last."""
        if not isinstance(node, yaml.MappingNode):  # tagged as one
            return super().construct_mapping(node, deep)
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.value in seen:
                line = key.start_mark.line + 1
                raise ConfigError(f"line {line}: expected each key once, got '{key.value}' again; remove one")
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """Refuse integers of more digits than a double has, which take long to read."""
        short = len(node.value) <= MAX_DIGITS
        value = int(super().construct_yaml_int(node)) if short else 0
        if not short or abs(value) >= 10**MAX_DIGITS:  # hexadecimal digits are worth more
            line, got = node.start_mark.line + 1, f"{node.value[:20]}..."
            raise ConfigError(f"line {line}: expected a number of at most {MAX_DIGITS} digits, got {got}; correct it")
        return value

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Merge what ``<<`` names, which may multiply."""
        super().flatten_mapping(node)
        if len(node.value) > MAX_VALUES:
            raise ConfigError(f"line {node.start_mark.line + 1}: expected at most {MAX_VALUES} keys, got more by merging")


StrictLoader.add_constructor("tag:yaml.org,2002:int", StrictLoader.construct_yaml_int)
_REPLACED = ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:float")
StrictLoader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag not in _REPLACED]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+|\.(?:inf|nan))$"),
    list("-+0123456789."),
)


def read_yaml_value(text: str, place: str) -> Any:
    """Read one YAML document of any kind.

    >>> read_yaml_value("{rate: 25e9, when: 2024-05-01}", "example")
    {'rate': 25000000000.0, 'when': '2024-05-01'}
    """
    try:
        check_text(text, YAML)
        return deepcopy(_read(text))
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None
    except RecursionError:
        raise ConfigError(f"{place}: {_TOO_DEEP}") from None
    except (yaml.YAMLError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:  # some are Python's own
        raise ConfigError(f"{place}: expected valid YAML, got {_told(error)}") from None


def _told(error: Exception) -> str:
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem is None or error.problem_mark is None:
        return " ".join(str(error).replace(' in "<unicode string>"', "").split())
    mark, begun = error.problem_mark, error.context_mark
    begin = f" from line {begun.line + 1}" if begun is not None and begun.line != mark.line else ""
    context = f" ({error.context}{begin})" if error.context else ""
    return " ".join(f"an error in line {mark.line + 1}, column {mark.column + 1}: {error.problem}{context}".split())


@lru_cache(maxsize=128)
def _read(text: str) -> Any:
    """Read a document once: a sweep reads the same profiles and models again and again."""
    value = yaml.load(text, Loader=StrictLoader)
    _count(value, {}, 0)
    return value


_TOO_DEEP = f"expected at most {MAX_DEPTH} lists and mappings inside each other, got more"


def _count(value: Any, known: dict[int, int], depth: int) -> int:
    """Count values; `known` are those of containers by identity, which aliases share."""
    if isinstance(value, str) and not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
        raise ConfigError(f"expected text, got half a character in {value!a}")
    if isinstance(value, str) and (found := steering(value)) is not None:
        raise ConfigError(f"expected text that can be shown, got the control character {found!a} in {value!a}; remove it")
    if not isinstance(value, dict | list | set):
        return 1
    if depth >= MAX_DEPTH:  # also where one contains itself
        raise ConfigError(_TOO_DEEP)
    if id(value) not in known:
        inside = [*value, *value.values()] if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_count(one, known, depth + 1) for one in inside)
    if known[id(value)] > MAX_VALUES:
        raise ConfigError(f"expected at most {MAX_VALUES} values, aliases counted each time, got more")
    return known[id(value)]
