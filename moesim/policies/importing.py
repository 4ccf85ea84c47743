"""Import a class that is named in a file as ``package.module:Class``."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

from moesim.errors import ConfigError, culprit, describe_exception, unknown_name


def check_target(target: str, place: str) -> str:
    """Return the name of a class if it is written as it must be."""
    if not all(target.partition(":")[0].split(".")):
        raise ConfigError(f"{place}: expected package.module:Class, got {target!r}")
    return target


def import_class(target: str, place: str) -> type:
    """Import ``package.module:Class``; a module that is not installed may lie in the current folder."""
    module_name, _, class_name = target.partition(":")
    module = _import_module(module_name, f"{place}: cannot import module {module_name!r} of {target!r}")
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        own = [key for key, value in vars(module).items() if isinstance(value, type) and value.__module__ == module_name]
        got = repr(found) if hasattr(module, class_name) else "none"
        hint = unknown_name("class", class_name, own) if own else "it has no class of its own"
        raise ConfigError(f"{place}: expected a class {class_name!r} in module {module_name!r}, got {got}; {hint}")
    return found


def _import_module(name: str, what: str) -> ModuleType:
    here = str(Path.cwd())
    if not _is_ours(name) and here not in sys.path:
        sys.path.append(here)  # last, and for good: the module may import its neighbours later
    if name not in sys.modules:
        importlib.invalidate_caches()  # it may have been written since its folder was read
    try:
        return importlib.import_module(name)
    except SyntaxError as error:
        where = f"{Path(error.filename or name).name}:{error.lineno}"
        raise ConfigError(f"{what}: syntax error in {where}: {error.msg}") from None
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if name == missing or name.startswith(f"{missing}."):
            raise ConfigError(f"{what}: {error}, neither installed nor in the current folder {here}") from None
        raise ConfigError(f"{what}: {culprit(error)} imports {missing!r}, which is not there; install it") from None
    except Exception as error:
        raise ConfigError(f"{what}: {describe_exception(error)}") from None


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == "moesim"
