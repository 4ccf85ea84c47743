"""What a policy or part that is not moesim's own is made of: its source file, and the files beside it that it imports."""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from moesim.policies.importing import is_ours
from moesim.policies.registry import policy_class

_INSTALLED = ("site-packages", "dist-packages")


def source_digest(name: str) -> str | None:
    """Hash the source of a policy that is not moesim's own.

    It covers all files that its file imports, one through the other, from the same folder, or from its package if that is
    installed; only by statements. None for moesim's own, and for a class from no file.
    """
    module = policy_class(name).__module__
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


def sources_digest(names: Sequence[str]) -> str | None:
    """Hash the sources of a policy and of its parts, by the names that `moesim.policies.imports.code_names` gives.

    One that is moesim's own adds nothing. None if all are.
    """
    found = [digest for name in names if (digest := source_digest(name)) is not None]
    if len(found) < 2:
        return found[0] if found else None
    return hashlib.sha256(" ".join(found).encode()).hexdigest()


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
