"""YAML files of synthesis: the package's by name, any by path."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

from moesim.core.data import known_text, note
from moesim.core.gate import YAML, read_text
from moesim.errors import ConfigError, unknown_name


def data_file(kind: str, name_or_path: str) -> tuple[str, str]:
    """Read a file of the package by name, or any by path."""
    by_path = name_or_path.endswith((".yaml", ".yml")) or "/" in name_or_path or "\\" in name_or_path
    if (text := known_text(kind, name_or_path)) is None:
        text = note(kind, name_or_path, _text(kind, name_or_path, by_path))
    return text, name_or_path if by_path else f"{kind}/{name_or_path}.yaml"


def _text(kind: str, name_or_path: str, by_path: bool) -> str:
    if by_path:
        return read_text(Path(name_or_path), YAML, "a readable YAML file")
    known = data_names(kind)
    if name_or_path not in known:
        raise ConfigError(unknown_name(f"{kind} file", name_or_path, known))
    file = resources.files("moesim.trace.synthesis") / kind / f"{name_or_path}.yaml"
    return file.read_text(encoding="utf-8")


def data_names(kind: str) -> list[str]:
    """Names that `data_file` knows, sorted."""
    folder = resources.files("moesim.trace.synthesis") / kind
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def mapping(value: Any, place: str, needed: tuple[str, ...], optional: tuple[str, ...] = ()) -> dict[str, Any]:
    """Check that a YAML value is a mapping with the right keys."""
    if not isinstance(value, dict):
        raise ConfigError(f"{place}: expected a mapping, got {value!r}; see docs/guide/synthesis.md")
    for key in needed:
        if key not in value:
            raise ConfigError(f"{place}: expected the key '{key}', got {sorted(map(str, value))}; add it")
    for key in value:
        if key not in (*needed, *optional):
            raise ConfigError(f"{place}: {unknown_name('key', str(key), (*needed, *optional))}")
    return value
