"""Classes that are not moesim's own, by ``package.module:Class``: policies, parts, schedulers."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType

from moesim.core.text import note
from moesim.errors import ConfigError, culprit, describe_exception, unknown_name

NOT_TRUSTED = "whose code is not imported to read a result; add --trust (in Python trust=True) if you trust it"
_REFUSED: ContextVar[set[str] | None] = ContextVar("refused", default=None)


@contextmanager
def reading(*, trust: bool) -> Iterator[set[str]]:
    """Read somebody's result; without trust import only moesim's own classes and collect others."""
    refused: set[str] = set()
    token = _REFUSED.set(None if trust else refused)
    try:
        yield refused
    finally:
        _REFUSED.reset(token)


@contextmanager
def reading_results(*, trust: bool) -> Iterator[None]:
    """Read results of anybody; say which code was not imported."""
    with reading(trust=trust) as refused:
        try:
            yield
        finally:
            for name in sorted(refused):
                note(f"moesim: not imported: {name}, of whose options no default is shown; --trust imports it")


def check_target(target: str, place: str) -> str:
    """Return the name of a class if it is written as it must be."""
    if not all(target.partition(":")[0].split(".")):
        raise ConfigError(f"{place}: expected package.module:Class, got {target!r}")
    return target


def import_class(target: str, place: str) -> type:
    """Import ``package.module:Class``, also from the current folder."""
    module_name, _, class_name = target.partition(":")
    if (refused := _REFUSED.get()) is not None and not is_ours(target):
        refused.add(target)
        raise ConfigError(f"{place}: expected a class of moesim's, got {target!r}, {NOT_TRUSTED}")
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
    if not is_ours(name) and here not in sys.path:
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
            raise ConfigError(
                f"{what}: {error}, neither installed nor in the current folder {here}, or in --inputs of a result"
            ) from None
        raise ConfigError(f"{what}: {culprit(error)} imports {missing!r}, which is not there; install it") from None
    except Exception as error:
        raise ConfigError(f"{what}: {describe_exception(error)}") from None


def is_ours(target: str) -> bool:
    """Whether a module or class is moesim's own."""
    return target.partition(":")[0].partition(".")[0] == "moesim"
