"""Shared parts of experiment files: ``include: base.yaml``, merged key by key, the including file winning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moesim.errors import ConfigError
from moesim.yaml_reader import read_yaml_value

INCLUDE = "include"


def read_merged(path: Path, _above: Sequence[Path] = ()) -> Any:
    """Read an experiment file and what it includes.

    Parameters
    ----------
    path : Path
        The YAML file. Its ``include`` names a file or a list of files, relative to its own folder; later ones win over earlier
        ones, and the file itself over all of them.

    Returns
    -------
    object
        What it holds, without ``include``. Mappings are merged key by key, anything else is replaced as a whole.

    Raises
    ------
    ConfigError
        If a file cannot be read, is not valid YAML, includes something that is no mapping, or includes itself.
    """
    raw = read_yaml_value(_text(path, _above), str(path))
    if not isinstance(raw, dict) or INCLUDE not in raw:
        return raw
    own = {key: value for key, value in raw.items() if key != INCLUDE}
    merged: dict[str, Any] = {}
    for name in _names(raw[INCLUDE], path):
        part = path.parent / name
        above = [*_above, path.resolve()]
        if part.resolve() in above:
            raise ConfigError(f"{path}: {INCLUDE}: expected files that do not include this one, got '{name}'; remove it")
        found = read_merged(part, above)
        if not isinstance(found, dict):
            got = "nothing" if found is None else type(found).__name__
            raise ConfigError(f"{path}: {INCLUDE}: expected a mapping in '{name}', got {got}")
        merged = merge(merged, found)
    return merge(merged, own)


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Lay one mapping over another, key by key.

    Examples
    --------
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
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        whose = f"{above[-1]}: {INCLUDE}: " if above else ""
        raise ConfigError(f"{whose}{path}: expected an experiment file, got: {reason}") from None
