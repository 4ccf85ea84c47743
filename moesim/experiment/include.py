"""Take in other files: ``include: base.yaml``, merged key by key, the including file winning; and tables of policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from moesim.core.data import data_dirs
from moesim.core.gate import SMALLER, YAML, TooLargeError, decoded, read_text, why_not
from moesim.core.yaml_reader import read_yaml_value
from moesim.errors import ConfigError, mistyped

INCLUDE = "include"
FILE = "file"
MAX_DEPTH = 20
"""Most files that include each other in a row."""


def read_merged(path: Path) -> Any:
    """Read an experiment file and what it includes."""
    return _unshared(_read(path, (), {}))


def _read(path: Path, above: Sequence[Path], known: dict[Path, Any]) -> Any:
    """Read a file below others; `known` are those that have been read, for one may be included many times."""
    here = _resolved(path, above)
    if here in known:
        return known[here]
    raw = known[here] = read_yaml_value(_text(path, above), str(path))
    if not isinstance(raw, dict) or INCLUDE not in raw:
        return raw
    if len(above) >= MAX_DEPTH:
        raise ConfigError(f"{path}: {INCLUDE}: expected at most {MAX_DEPTH} files that include each other, got more")
    own = {key: value for key, value in raw.items() if key != INCLUDE}
    merged: dict[str, Any] = {}
    for name in _names(raw[INCLUDE], path):
        part = path.parent / name
        if _resolved(part, (*above, here)) in (*above, here):
            raise ConfigError(f"{path}: {INCLUDE}: expected files that do not include this one, got '{name}'; remove it")
        found = _read(part, (*above, here), known)
        if not isinstance(found, dict):
            got = "nothing" if found is None else type(found).__name__
            raise ConfigError(f"{path}: {INCLUDE}: expected a mapping in '{name}', got {got}")
        merged = merge(merged, found)
    known[here] = merge(merged, own)
    return known[here]


def _resolved(path: Path, above: Sequence[Path]) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links; a null character
        raise _unreadable(path, above, str(error)) from None


def with_tables(policies: Any, place: str) -> Any:
    """Take the content of files into the options of policies that name one: ``released: {file: adapmoe.yaml}``."""

    def content(value: Any, where: str) -> Any:
        if isinstance(value, list):
            return [content(one, where) for one in value]
        if not isinstance(value, Mapping) or set(value) != {FILE}:
            return value
        path = value[FILE]
        if not isinstance(path, str) or not path.strip():
            raise ConfigError(f"{where}: {FILE}: {mistyped('a text, the path of a YAML file', path)}")
        found = read_yaml_value(read_text(Path(path), YAML, "released tables"), path)
        if not isinstance(found, dict) or "source" not in found:
            got = f"the keys {', '.join(map(str, found))[:60]}" if isinstance(found, dict) else type(found).__name__
            raise ConfigError(
                f"{path}: expected a mapping with tables and source, which says where the numbers come from, got {got}; add it"
            )
        return found

    if not isinstance(policies, list):
        return policies
    return [
        {key: content(value, f"{place}: policies[{i}]: {key}") for key, value in spec.items()} if isinstance(spec, dict) else spec
        for i, spec in enumerate(policies)
    ]


def _unshared(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _unshared(inside) for key, inside in value.items()}
    return [_unshared(inside) for inside in value] if isinstance(value, list) else value


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Lay one mapping over another, key by key.

    >>> merge({"workload": {"seed": 1, "batch_size": [1, 2]}}, {"workload": {"batch_size": [8]}})
    {'workload': {'seed': 1, 'batch_size': [8]}}
    """
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


def _names(value: Any, path: Path) -> list[str]:
    names = value if isinstance(value, list) else [value]
    for name in names:
        if not isinstance(name, str) or not name.strip():
            raise ConfigError(f"{path}: {INCLUDE}: expected the path of a file or a list of paths, got {value!r}")
    return names


def _text(path: Path, above: Sequence[Path]) -> str:
    try:
        return decoded(path, YAML)
    except TooLargeError as error:
        raise _unreadable(path, above, why_not(error), SMALLER) from None
    except (OSError, ValueError) as error:
        raise _unreadable(path, above, why_not(error)) from None


def _unreadable(path: Path, above: Sequence[Path], reason: str, remedy: str = "") -> ConfigError:
    whose = f"{above[-1]}: {INCLUDE}: " if above else ""
    return ConfigError(f"{whose}{path}: expected an experiment file, got: {reason}; {remedy or _remedy(path)}")


def _remedy(path: Path) -> str:
    known = [other.name for other in path.parent.glob("*.y*ml")]
    if len(path.parts) == 1 and not path.suffix:  # a shipped one by its name
        known += [other.stem for folder in data_dirs("experiments") for other in folder.glob("*.yaml")]
    near = get_close_matches(path.name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else "correct the path"
