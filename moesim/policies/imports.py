"""Which code a policy's name would make Python import: found out without importing any of it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moesim.errors import ConfigError
from moesim.policies.importing import is_ours
from moesim.policies.part_names import part_targets
from moesim.policies.registry import POLICIES, target_of


class WouldImport(NamedTuple):
    """The code of a policy that is not moesim's own."""

    module: str
    files: tuple[Path, ...]  # of the packages around it, and its own; none for what is built into Python


def foreign(policy: str | Mapping[str, Any]) -> list[str]:
    """Name a policy and its parts as far as they are not moesim's own; whether their code is there does not matter."""
    return [name for name in code_names(policy) if name not in POLICIES and not (":" in name and is_ours(name))]


def would_import(policy: str | Mapping[str, Any], place: str = "policies") -> WouldImport | None:
    """Say what a policy would import: its own class, and those of its parts.

    Returns None for moesim's own. Whether the module has the class shows only when it is imported.
    """
    targets = dict.fromkeys(target_of(name, place) for name in code_names(policy))
    others = [target for target in targets if not is_ours(target)]
    if not others:
        return None
    modules = list(dict.fromkeys(target.partition(":")[0] for target in others))
    files = [path for name in modules for path in _files_of(name, f"{place}: module {name!r} of {_first(others, name)!r}")]
    return WouldImport(" and ".join(modules), tuple(dict.fromkeys(files)))


def code_names(policy: str | Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of a policy's code: its own, and those of parts that are written as ``package.module:Class``."""
    return (policy,) if isinstance(policy, str) else (policy["name"], *sorted(part_targets(policy)))


def _first(targets: Sequence[str], module: str) -> str:
    return next(target for target in targets if target.partition(":")[0] == module)


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
