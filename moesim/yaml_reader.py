"""YAML as moesim reads it: no duplicate keys, 1e9 is a number, dates are text, one-line errors."""

from __future__ import annotations

import re
from typing import Any

import yaml

from moesim.errors import ConfigError


class StrictLoader(yaml.SafeLoader):
    """`yaml.SafeLoader` that refuses a key given twice, reads 936e9 as a number and leaves dates as text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build a mapping; a repeated key is an error, since YAML would silently keep the last."""
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.value in seen:
                line = key.start_mark.line + 1
                raise ConfigError(f"line {line}: expected each key once, got '{key.value}' again; remove one")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


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

    Parameters
    ----------
    text : str
        The YAML.
    place : str
        File, or file and key, for messages.

    Returns
    -------
    object
        What it holds; None for an empty text.

    Raises
    ------
    ConfigError
        If it is not valid YAML or a key is given twice.

    Examples
    --------
    >>> read_yaml_value("{rate: 25e9, when: 2024-05-01}", "example")
    {'rate': 25000000000.0, 'when': '2024-05-01'}
    """
    try:
        return yaml.load(text, Loader=StrictLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{place}: expected valid YAML, got {' '.join(str(error).split())}") from None
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None
