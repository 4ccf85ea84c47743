"""Which code a policy's name would make Python import: found out without importing any of it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from moesim.errors import ConfigError
from moesim.policies.registry import target_of


class WouldImport(NamedTuple):
    """What the name of a policy stands for, if that is no code of moesim's."""

    module: str
    files: tuple[Path, ...]  # of the packages around it, and its own; none for what is built into Python


def would_import(name: str, place: str = "policies") -> WouldImport | None:
    """Say what a policy's name would import.

    Parameters
    ----------
    name : str
        As in the YAML.
    place : str
        File and key, for messages.

    Returns
    -------
    WouldImport or None
        None for moesim's own policies.

    Raises
    ------
    ConfigError
        If there is no such policy, or no such module. Whether the module has the class shows only when it is imported.
    """
    target = target_of(name, place)
    module = target.partition(":")[0]
    if module.partition(".")[0] == "moesim":
        return None
    return WouldImport(module, tuple(_files_of(module, f"{place}: module {module!r} of {target!r}")))


def _files_of(module: str, what: str) -> Iterator[Path]:
    """Find the files of a module and its packages. Python's own search imports the packages, and with them their code."""
    importlib.invalidate_caches()
    path = [*sys.path, str(Path.cwd())]  # in the order in which `moesim.policies.registry` looks
    name = ""
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        specs = (finder.find_spec(name, path) for finder in sys.meta_path)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None:
            here = Path.cwd()
            raise ConfigError(f"{what}: expected a module {name!r}, got none, neither installed nor in the current folder {here}")
        if spec.origin is not None and spec.has_location:
            yield Path(spec.origin)
        path = list(spec.submodule_search_locations or ())
