"""What the tables of public measurements share: names given once, columns of a run, models that lie beside the table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from moesim.core.csv_reader import read_lines
from moesim.core.data import data_dirs
from moesim.core.yaml_reader import read_yaml_value
from moesim.errors import ConfigError, unknown_name

FOLDER = "validation"  # below experiments

Row = TypeVar("Row")


def shipped_table(name: str, what: str) -> Path:
    """Return a shipped table. Raises `ConfigError` if there is none."""
    for folder in data_dirs("experiments"):
        if (folder / FOLDER / name).is_file():
            return folder / FOLDER / name
    raise ConfigError(f"experiments/{FOLDER}/{name}: expected {what}, got no such file")


def read_rows(path: Path, columns: Sequence[str], what: str, build: Callable[[dict[str, str], str], Row]) -> list[Row]:
    """Read a table whose rows have names of their own."""
    lines = list(read_lines(path, columns, what))
    found = [build(texts, place) for texts, place in lines]
    names = [texts["check"] for texts, _ in lines]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{path}: check: expected each name once, got '{name}' {names.count(name)} times; rename one")
    return found


def check_words(texts: Mapping[str, str], place: str, known: Mapping[str, Sequence[str]]) -> None:
    """Raise `ConfigError` unless each of these columns has one of its words."""
    for key, words in known.items():
        if texts[key] not in words:
            raise ConfigError(f"{place}: {key}: {unknown_name(key, texts[key], words)}")


def check_run(texts: Mapping[str, str], place: str, needed: Sequence[str], run: Sequence[str]) -> bool:
    """Tell whether a row has a run, whose columns are then complete; otherwise they are empty."""
    runs = texts["status"] != "not predicted"
    for key in (*needed, *(run if runs else ())):
        if not texts[key]:
            raise ConfigError(f"{place}: {key}: expected a value, got nothing; every row of this status needs one")
    for key in () if runs else run:
        if texts[key]:
            raise ConfigError(f"{place}: {key}: expected nothing where nothing is predicted, got {texts[key]!r}; remove it")
    return runs


def run_values(
    texts: Mapping[str, str], place: str, folder: Path, *, numbers: Sequence[str], yaml: Sequence[str], least: int = 0
) -> dict[str, Any]:
    """Read the columns of a run that are more than text."""
    values: dict[str, Any] = {}
    for key in numbers:
        if not texts[key].isdecimal() or int(texts[key]) < least:
            bound = f" of at least {least}" if least else ""
            raise ConfigError(f"{place}: {key}: expected a whole number{bound}, got {texts[key]!r}; correct it")
        values[key] = int(texts[key])
    for key in yaml:
        values[key] = read_yaml_value(texts[key], f"{place}: {key}")
    spec = values["spec"]
    if isinstance(spec, dict) and str(spec.get("base", "")).endswith(".json"):
        values["spec"] = spec | {"base": str(folder / spec["base"])}
    return values
