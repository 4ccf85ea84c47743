"""Code of policies, parts and schedulers not moesim's own: the files a name would import, and hashes."""

from __future__ import annotations

import ast
import hashlib
import importlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moesim.core.own_code import is_ours
from moesim.errors import ConfigError
from moesim.policies.registry import POLICIES, code_names, policy_class, target_of

_INSTALLED = ("site-packages", "dist-packages")


class WouldImport(NamedTuple):
    """Code of a run that is not moesim's own."""

    module: str
    files: tuple[Path, ...]  # of the packages around it, and its own; none for what is built into Python


def foreign(names: Iterable[str]) -> list[str]:
    """Return the names of policies, parts and schedulers that are not moesim's own, also without their code."""
    return [name for name in names if name not in POLICIES and not (":" in name and is_ours(name))]


def would_import(policy: str | Mapping[str, Any], place: str = "policies") -> WouldImport | None:
    """Return the classes that a policy, or the name of another class, would import, without importing; None for moesim's own."""
    others = [target for name in code_names(policy) if not is_ours(target := target_of(name, place))]
    if not others:
        return None
    modules: dict[str, str] = {}
    for target in others:
        modules.setdefault(target.partition(":")[0], target)
    files = [path for name, of in modules.items() for path in module_files(name, f"{place}: module {name!r} of {of!r}")]
    return WouldImport(" and ".join(modules), tuple(dict.fromkeys(files)))


def sources_digest(names: Sequence[str]) -> str | None:
    """Hash the sources of a policy, its parts and a scheduler; None if all are moesim's own."""
    found = [
        digest for name in names if (digest := source_digest(policy_class(name, "policy or scheduler").__module__)) is not None
    ]
    if len(found) < 2:
        return found[0] if found else None
    return hashlib.sha256(" ".join(found).encode()).hexdigest()


def module_files(module: str, what: str) -> Iterator[Path]:
    """Find the files of a module and its packages without importing."""
    # Python's own search imports the packages, and with them their code.
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
    """Hash the source of a module and of what its statements import; None for moesim's own."""
    # It follows imports from the same folder, or from the module's package if that is installed.
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
    """Find the files below a folder that a file's import statements name."""
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
    """Find the files that an import of a dotted name runs: each package's and the module's."""
    for n in range(1, len(steps) + 1):
        place = above.joinpath(*steps[:n])
        for path in (place / "__init__.py", place.with_name(f"{place.name}.py")):
            if path.is_file():
                yield path
