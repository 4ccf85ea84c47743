"""Code that a file names as ``package.module:Class``: import it, find its files without importing it, hash its sources."""

from __future__ import annotations

import ast
import hashlib
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType

from moesim.errors import ConfigError, culprit, describe_exception, unknown_name

_INSTALLED = ("site-packages", "dist-packages")
NOT_TRUSTED = "whose code is not imported to read a result; add --trust (in Python trust=True) if you trust it"
_REFUSED: ContextVar[set[str] | None] = ContextVar("refused", default=None)


@contextmanager
def reading(*, trust: bool) -> Iterator[set[str]]:
    """Read somebody's result: without trust no class is imported that is not moesim's own; collect those that were asked for."""
    refused: set[str] = set()
    token = _REFUSED.set(None if trust else refused)
    try:
        yield refused
    finally:
        _REFUSED.reset(token)


def check_target(target: str, place: str) -> str:
    """Return the name of a class if it is written as it must be."""
    if not all(target.partition(":")[0].split(".")):
        raise ConfigError(f"{place}: expected package.module:Class, got {target!r}")
    return target


def import_class(target: str, place: str) -> type:
    """Import ``package.module:Class``; a module that is not installed may lie in the current folder."""
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


def module_files(module: str, what: str) -> Iterator[Path]:
    """Find the files of a module and its packages. Python's own search imports the packages, and with them their code."""
    importlib.invalidate_caches()
    path = [*sys.path, str(Path.cwd())]  # in the order in which `import_class` looks
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


def source_digest(module: str) -> str | None:
    """Hash the source of an imported module that is not moesim's own.

    It covers all files that its file imports, one through the other, from the same folder, or from its package if that is
    installed; only by statements. None for moesim's own, and for one from no file.
    """
    path = getattr(sys.modules.get(module), "__file__", None)
    if is_ours(module) or path is None:
        return None
    file = Path(path)
    depth = module.count(".") + (file.name == "__init__.py")
    root = file.parents[depth]  # of the package, or the folder of a single module
    only = module.partition(".")[0] if root.name in _INSTALLED else None
    files = sorted(_with_imports(file, root, only))
    if len(files) == 1:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    digest = hashlib.sha256()
    for one in files:
        digest.update(one.relative_to(root).as_posix().encode() + b"\0" + one.read_bytes())
    return digest.hexdigest()


def _with_imports(file: Path, root: Path, only: str | None) -> set[Path]:
    found, todo = {file}, [file]
    while todo:
        for other in _imports(todo.pop(), root):
            inside = other.relative_to(root).parts[0].removesuffix(".py")
            if other not in found and (only is None or inside == only):
                found.add(other)
                todo.append(other)
    return found


def _imports(file: Path, root: Path) -> Iterator[Path]:
    """Give the files below a folder that a file's import statements name."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # whoever imports it will say so
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _files(root, alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            above = file.parents[node.level - 1] if node.level else root
            steps = node.module.split(".") if node.module else []
            for alias in node.names:
                yield from _files(above, [*steps, alias.name])


def _files(above: Path, steps: list[str]) -> Iterator[Path]:
    """Give what an import of a dotted name executes: each package's file on the way, and the module's."""
    for n in range(1, len(steps) + 1):
        place = above.joinpath(*steps[:n])
        for path in (place / "__init__.py", place.with_name(f"{place.name}.py")):
            if path.is_file():
                yield path
